"""`Rule`: which part of a prompt changes with every request, and what becomes of it.

An operator writes rules in a file (`rule_file`); `rewriting` applies them. A rule covers the requests of some routes,
clients and tenants, and finds its text by an RE2 pattern, which takes linear time whatever a client sends. If the
pattern has a group named `value`, only that group changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

PLACES = ("system", "tools", "user", "assistant", "tool", "prompt")
"""Parts of a prompt that a rule may change: messages by role, descriptions of tools, prompts that are completed."""

UNITS = ("day", "hour", "minute")
"""Units of time that `round` rounds down to."""

SORTS = ("tools", "keys")
"""The lists that `sort` sorts: tools by their names; the keywords of their schemas."""

UNSORTED = {
    "enum": "its order says which values a model sees first, and a grammar keeps it",
    "properties": "a grammar and a model write parameters in this order",
    "parameters": "a grammar and a model write parameters in this order",
    "required": "a template may list parameters in this order",
    "anyOf": "the first alternative that fits may count",
    "oneOf": "the first alternative that fits may count",
    "prefixItems": "the order is what it says",
    "messages": "their order is the conversation",
}
"""Lists that no rule sorts, with the reason: another order has another meaning."""

NOTE = "\n\n[{match} (moved here from the {place})]"
"""The note that `move` leaves, unless a rule has its own."""

AFTER = ("last", "first")
"""The message that `move` puts its note behind: the last one, for what changes with every request, or the user's first
one, for what stays the same through a session. The latter needs no memory of earlier turns."""


class Found(Protocol):
    """A match of a pattern, as `re` and `re2` have it."""

    def group(self, group: int | str = 0, /) -> str | None: ...
    def span(self, group: int = 0, /) -> tuple[int, int]: ...


class Pattern(Protocol):
    """A compiled pattern, as `re` and `re2` have it."""

    @property
    def groupindex(self) -> Mapping[str, int]: ...
    def finditer(self, text: str, /) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """The source of a request.

    Args:
        route: the path of its API.
        client: its user agent; empty: it sends none.
        tenant: the name of its tenant; None: it has none.
    """

    route: str
    client: str = ""
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """The requests that a rule covers; an empty list covers all.

    Args:
        routes: paths of APIs.
        clients: patterns of user agents, such as `claude-cli/*`; `*` and `?` stand for any text and any character.
        tenants: names of tenants.
    """

    routes: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()

    def covers(self, caller: Caller) -> bool:
        """Returns whether the rule covers a request."""
        return (
            (not self.routes or caller.route in self.routes)
            and (not self.tenants or caller.tenant in self.tenants)
            and (not self.clients or any(fnmatchcase(caller.client, pattern) for pattern in self.clients))
        )

    def meets(self, other: Scope) -> bool:
        """Returns whether one request may be in both scopes; patterns of clients that differ count as if it may."""
        pairs = (self.routes, other.routes), (self.tenants, other.tenants)
        return all(not ours or not theirs or {*ours} & {*theirs} for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a text.

    Args:
        start, end: the characters that are replaced.
        text: what replaces them.
        note: what is added behind a message; empty: nothing.
        after: which message, one of `AFTER`.
    """

    start: int
    end: int
    text: str
    note: str = ""
    after: str = "last"


class TextAction(Protocol):
    """Changes a text that a pattern found."""

    @property
    def name(self) -> str: ...

    def edit(self, found: Found, groups: Mapping[str, int], place: str) -> Edit:
        """Returns the change of the text that a match is in.

        Args:
            found: the match.
            groups: the numbers of the pattern's groups by their names.
            place: one of `PLACES`, where the text is.
        """


@dataclass(frozen=True, slots=True)
class Drop:
    """Drops the text: a line that no model needs."""

    name: str = "drop"

    def edit(self, found: Found, groups: Mapping[str, int], place: str) -> Edit:
        """Returns the change of the text that a match is in."""
        return Edit(*found.span(groups.get("value", 0)), "")


@dataclass(frozen=True, slots=True)
class Move:
    """Moves the text behind a message, as a note.

    Args:
        note: its form, in which `{match}` and `{value}` stand for what was found, `{place}` for where.
        after: one of `AFTER`.
    """

    note: str = NOTE
    after: str = "last"
    name: str = "move"

    def edit(self, found: Found, groups: Mapping[str, int], place: str) -> Edit:
        """Returns the change of the text that a match is in."""
        start, end = found.span(groups.get("value", 0))
        whole, (begin, _) = found.group() or "", found.span()
        said = {
            "{match}": whole.strip(),
            "{value}": whole[start - begin : end - begin].strip(),
            "{place}": _SAID[place],
        }
        return Edit(start, end, "", filled(self.note, said), self.after)


def filled(form: str, values: Mapping[str, str]) -> str:
    """Returns a text with names replaced by values, in one pass: a value that has a name in it stays as it is."""
    made, at = [], 0
    while found := min(((form.find(name, at), name) for name in values if name in form[at:]), default=None):
        made += [form[at : found[0]], values[found[1]]]
        at = found[0] + len(found[1])
    return "".join((*made, form[at:]))


_SAID = {
    "system": "system prompt",
    "tools": "description of a tool",
    "user": "conversation",
    "assistant": "conversation",
    "tool": "result of a tool",
}

_FINER = {
    "day": ("hour", "minute", "second", "fraction"),
    "hour": ("minute", "second", "fraction"),
    "minute": ("second", "fraction"),
}
HALF = "half"
"""The group of a pattern that `round` takes for AM or PM."""
TIME_GROUPS = frozenset(_FINER["day"])
"""The groups that `round` knows besides."""


@dataclass(frozen=True, slots=True)
class Round:
    """Rounds a time down: the digits of groups that are finer than a unit become 0, so the text keeps its length.

    Args:
        to: one of `UNITS`.
    """

    to: str
    name: str = "round"

    def edit(self, found: Found, groups: Mapping[str, int], place: str) -> Edit:
        """Returns the change of the text that a match is in."""
        begin, _ = found.span()
        before = found.group() or ""
        text = list(before)
        for name in (*_FINER[self.to], *((HALF,) if self.to == "day" else ())):
            start, stop = found.span(groups[name]) if name in groups else (-1, -1)
            for at in range(start - begin, stop - begin):
                text[at] = _least(text[at])
        changed = [at for at, (new, old) in enumerate(zip(text, before, strict=True)) if new != old] or [-1]
        first, end = changed[0], changed[-1] + 1
        return Edit(begin + first, begin + end, "".join(text[first:end]))

    def takes(self, groups: Mapping[str, int]) -> bool:
        """Returns whether a pattern with these groups has anything to round."""
        return any(name in groups for name in _FINER[self.to])


def _least(character: str) -> str:
    """Returns the first character of a kind in a time: 0 for digits, A for the letter that names half of the day."""
    if character.isdecimal():
        return "0"
    return {"p": "a", "P": "A"}.get(character, character)


@dataclass(frozen=True, slots=True)
class Sort:
    """Sorts lists whose order says nothing.

    Args:
        lists: some of `SORTS`.
    """

    lists: frozenset[str]
    name: str = "sort"


@dataclass(frozen=True, slots=True)
class Keep:
    """Declares the tools that a session had until it ends, where the client agrees."""

    name: str = "keep"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        name: unique among the rules of a server.
        action: what becomes of what it finds.
        scope: the requests that it covers.
        places: the parts of a prompt that it may change, some of `PLACES`.
        pattern: finds the text; None: the action takes none.
        example: a text that the pattern finds, from a request that shows why there is a rule.
        origin: the file and the line of the rule, for errors.
    """

    name: str
    action: TextAction | Sort | Keep
    scope: Scope = Scope()
    places: frozenset[str] = frozenset({"system"})
    pattern: Pattern | None = None
    example: str = ""
    origin: str = ""

    def edits(self, text: str, place: str) -> Iterator[Edit]:
        """Yields the changes of a text at a place, in order."""
        if self.pattern is None or place not in self.places or isinstance(self.action, Sort | Keep):
            return
        for found in self.pattern.finditer(text):
            edit = self.action.edit(found, self.pattern.groupindex, place)
            if 0 <= edit.start < edit.end and edit.text != text[edit.start : edit.end]:
                yield edit


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One change of a prompt by a rule.

    Args:
        rule, action: the names of both.
        at: what was changed: `system`, `tools[1]`, or a message or a prompt by its number, such as `messages[3]`.
        removed, added: characters.
    """

    rule: str
    action: str
    at: str
    removed: int
    added: int

    @property
    def is_note(self) -> bool:
        """Whether it is the note of a text that was moved in this turn, or in an earlier one."""
        return self.action == "move" and self.removed == 0


def counts(changes: Iterable[Rewrite]) -> Counter[str]:
    """Returns how often each rule changed what a client sent; notes do not count."""
    return Counter(change.rule for change in changes if not change.is_note)
