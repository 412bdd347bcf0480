"""Reads rules from a TOML file, and refuses those that would do harm, by name and line.

    [[rule]]
    name = "clock"
    action = "move"                        # drop, move, round, sort or keep
    match = 'Current time: (?P<value>.*)'  # RE2; not for sort and keep
    example = "Current time: 12:30:59"     # that the pattern finds
    places = ["system"]                    # the default; see rules.PLACES
    routes = ["/v1/messages"]              # no list: all
    clients = ["claude-cli/*"]
    tenants = ["research"]

`move` takes `note` and `after`, `round` takes `to`, and `sort` takes `lists`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mainstem.errors import MainstemError, one_of
from mainstem.prompt_rules.rules import (
    AFTER,
    NOTE,
    PLACES,
    SORTS,
    TIME_GROUPS,
    UNITS,
    UNSORTED,
    Drop,
    Edit,
    Keep,
    Move,
    Pattern,
    Round,
    Rule,
    Scope,
    Sort,
    TextAction,
)

_SHARED = {"name", "action", "routes", "clients", "tenants"}
_OF_TEXT = {"match", "example", "places"}
_FIELDS = {
    "drop": _SHARED | _OF_TEXT,
    "move": _SHARED | _OF_TEXT | {"note", "after"},
    "round": _SHARED | _OF_TEXT | {"to"},
    "sort": _SHARED | {"lists"},
    "keep": _SHARED,
}
_ORDINARY = ("", "Please read the file, then answer.", "a", "1", "\n", "Was gibt es Neues? 2 + 2 = 4")
"""Texts that no rule is for: a pattern that finds all of one finds everything."""
_MOST_PATTERN_BYTES = 1 << 20


class BadRule(MainstemError, ValueError):
    """A rule cannot be used.

    Args:
        origin: the file and the line of the rule.
        name: of the rule, if it has one.
        problem: what is wrong, and what is allowed.
    """

    def __init__(self, origin: str, name: object, problem: str) -> None:
        super().__init__(f"{origin}: rule {name!r}: {problem}" if name else f"{origin}: {problem}")


def own_files() -> list[str]:
    """Returns the names of the files that come with Mainstem, each of which has the rules of one client."""
    return sorted(each.name.removesuffix(".toml") for each in _OWN.iterdir() if each.name.endswith(".toml"))


_OWN = files("mainstem.prompt_rules") / "clients"


def read_rules(sources: Sequence[str | Path]) -> tuple[Rule, ...]:
    """Returns the rules of files, in their order.

    Args:
        sources: paths of files, and names of those that come with Mainstem (`own_files`).

    Raises:
        BadRule: a file is not there or is not TOML, or a rule in it is refused.
    """
    made: list[Rule] = []
    for source in sources:
        made += _rules(str(source), _text(source))
    _check_apart(made)
    return tuple(made)


def rules_of(text: str, origin: str, others: Sequence[Rule] = ()) -> tuple[Rule, ...]:
    """Returns the rules of a text in the form of a file.

    Args:
        text: the rules.
        origin: the file, for errors.
        others: rules beside which they would be used.

    Raises:
        BadRule: as `read_rules`.
    """
    made = tuple(_rules(origin, text))
    _check_apart(made, others)
    return made


def _text(source: str | Path) -> str:
    try:
        if isinstance(source, str) and source in own_files():
            return (_OWN / f"{source}.toml").read_text("utf-8")
        return Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadRule(str(source), None, f"{reason}; a file of rules, or one of {', '.join(own_files())}") from None


def _rules(origin: str, text: str) -> Iterator[Rule]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRule(origin, None, f"not TOML: {error}") from None
    rows = document.pop("rule", [])
    if document:
        raise BadRule(origin, None, f"unknown name {next(iter(document))!r}: a file has [[rule]] tables only")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise BadRule(origin, None, "it must have at least one [[rule]] table")
    lines = [number for number, line in enumerate(text.split("\n"), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    for number, row in enumerate(rows):
        yield _Reader(f"{origin}:{lines[number]}" if len(lines) == len(rows) else origin, row).rule()


class _Reader:
    """Reads one table."""

    def __init__(self, origin: str, row: Mapping[str, Any]) -> None:
        self._origin, self._row = origin, row

    def rule(self) -> Rule:
        action = self._text("action")
        if not self._row.get("name"):
            raise self._wrong("name: every rule needs one")
        self._text("name")
        if action not in _FIELDS:
            raise self._wrong(f"action = {action!r}: must be {one_of(action, _FIELDS)}")
        if other := sorted(self._row.keys() - _FIELDS[action]):
            allowed = one_of(other[0], sorted(_FIELDS[action]))
            raise self._wrong(f"unknown name {other[0]!r}: a rule with the action {action!r} has {allowed}")
        scope = Scope(self._texts("routes"), self._texts("clients"), self._texts("tenants"))
        name = str(self._row["name"])
        if action == "keep":
            return Rule(name, Keep(), scope, frozenset(), origin=self._origin)
        if action == "sort":
            return Rule(name, Sort(self._lists()), scope, frozenset(), origin=self._origin)
        pattern, example = self._pattern(), self._text("example")
        rule = Rule(name, self._action(action, pattern), scope, self._places(), pattern, example, self._origin)
        self._check(rule)
        return rule

    def _action(self, action: str, pattern: Pattern) -> TextAction:
        if action == "drop":
            return Drop()
        if action == "move":
            note = self._text("note", NOTE)
            if "{match}" not in note and "{value}" not in note:
                raise self._wrong("note: must have {match} or {value}, or what is moved would be lost")
            after = self._text("after", AFTER[0])
            if after not in AFTER:
                raise self._wrong(f"after = {after!r}: must be {one_of(after, AFTER)}")
            return Move(note, after)
        to = self._text("to")
        if to not in UNITS:
            raise self._wrong(f"to = {to!r}: must be {one_of(to, UNITS)}")
        rounding = Round(to)
        if not rounding.takes(pattern.groupindex):
            groups = ", ".join(f"(?P<{name}>...)" for name in sorted(TIME_GROUPS))
            raise self._wrong(f"match: needs a group that is finer than {to}, of {groups}")
        return rounding

    def _places(self) -> frozenset[str]:
        places = self._texts("places") or ("system",)
        if other := next((place for place in places if place not in PLACES), None):
            raise self._wrong(f"places: {other!r} must be {one_of(other, PLACES)}")
        if "prompt" in places and self._row["action"] == "move":
            raise self._wrong("places: a prompt that is completed has no last message to move anything behind")
        return frozenset(places)

    def _lists(self) -> frozenset[str]:
        lists = self._texts("lists")
        for each in lists or ("",):
            if each in UNSORTED:
                raise self._wrong(f"lists: {each!r} cannot be sorted: {UNSORTED[each]}")
            if each not in SORTS:
                raise self._wrong(f"lists: {each!r} must be {one_of(each, SORTS)}")
        return frozenset(lists)

    def _pattern(self) -> Pattern:
        import re2  # here, since `import mainstem` needs NumPy only

        options = re2.Options()
        options.log_errors, options.max_mem = False, _MOST_PATTERN_BYTES
        try:
            pattern: Pattern = re2.compile(self._text("match"), options)
        except re2.error as error:
            said = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
            raise self._wrong(f"match: not a pattern of RE2: {said}") from None
        return pattern

    def _check(self, rule: Rule) -> None:
        """Checks a rule with a pattern on ordinary texts and on its example."""
        pattern = rule.pattern
        assert pattern is not None
        for text in _ORDINARY:
            if any(found.group() == text for found in pattern.finditer(text)):
                raise self._wrong("match: finds everything; it must name what is around the text that changes")
        if next(iter(pattern.finditer(rule.example)), None) is None:
            raise self._wrong("example: the pattern does not find it")
        if not _example_edits(rule):
            raise self._wrong(f"example: the action {rule.action.name!r} changes nothing in it")

    # ---- fields

    def _text(self, name: str, default: str | None = None) -> str:
        value = self._row.get(name, default)
        if not isinstance(value, str) or not value:
            raise self._wrong(f"{name}: must be a text" + ("" if name in self._row else ", and it is missing"))
        return value

    def _texts(self, name: str) -> tuple[str, ...]:
        value = self._row.get(name, [])
        fits = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
        if not fits or (name in self._row and not value):
            raise self._wrong(f"{name}: must be a list of at least one text")
        return tuple(value)

    def _wrong(self, problem: str) -> BadRule:
        return BadRule(self._origin, self._row.get("name"), problem)


def _example_edits(rule: Rule, text: str | None = None) -> list[Edit]:
    place = next(iter(rule.places))
    return list(rule.edits(rule.example if text is None else text, place))


def _check_apart(rules: Collection[Rule], others: Collection[Rule] = ()) -> None:
    """Checks that names are unique, and that no text is for two rules, in rules and beside others."""
    seen = {rule.name: rule for rule in others}
    for rule in rules:
        if (other := seen.get(rule.name)) is not None:
            raise BadRule(rule.origin, rule.name, f"{other.origin} has a rule of this name")
        for other in seen.values():
            _check_pair(rule, other)
        seen[rule.name] = rule


def _check_pair(rule: Rule, other: Rule) -> None:
    if not rule.scope.meets(other.scope):
        return
    if isinstance(rule.action, Keep) and isinstance(other.action, Keep):
        raise BadRule(rule.origin, rule.name, f"{other.name!r} ({other.origin}) keeps the same tools")
    if isinstance(rule.action, Sort) and isinstance(other.action, Sort) and rule.action.lists & other.action.lists:
        raise BadRule(rule.origin, rule.name, f"{other.name!r} ({other.origin}) sorts the same list")
    if not rule.places & other.places:
        return
    for text in (rule.example, other.example):
        ours, theirs = ([(edit.start, edit.end) for edit in _example_edits(each, text)] for each in (rule, other))
        if any(start < stop and begin < end for start, end in ours for begin, stop in theirs):
            problem = f"{other.name!r} ({other.origin}) finds the same text, {text!r}; one of them must be narrower"
            raise BadRule(rule.origin, rule.name, problem)
