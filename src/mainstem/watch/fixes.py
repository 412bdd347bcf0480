"""`Fixes`: the rules of prompts that mend what a linter finds, each with what it would save.

A value in a system prompt gets a rule of its own, found by the text around it: a time is rounded if that makes most of
the prompts the same, else it is moved behind the last message, as ids and numbers are. A line that is a header of a
client is dropped. Tools are sorted if that makes them the same. Nothing that users write gets a rule.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from mainstem.prompt_rules.bodies import rewritten_body
from mainstem.prompt_rules.rule_file import BadRule, rules_of
from mainstem.prompt_rules.rules import SORTS, Round, Rule, Sort
from mainstem.watch.lint import ADVICE, PATTERNS, Finding, Loss, Report
from mainstem.watch.patterns import Spot, before, escaped, form, narrow, rounds, spot

MOST_RULES = 50
"""Rules that are written: those that save the most."""

_MOST_PLACES = 1000  # that are told apart
_SAMPLES = 4  # pairs of values of a place that its pattern is tried on
_MOST_FORMS = 4  # of the times of a place
_ROUNDED = 0.9  # the part of what a time costs that rounding must save, or it is moved
_SEEN = {"number": 2}  # how often a cause must be seen: a number that changes once is an edit
_UNITS = ("hour", "day")  # to which times are rounded
_HEADER = re.compile(r"[ \t]*([Xx]-[A-Za-z0-9]+(?:-[A-Za-z0-9]+)+):")
_SYSTEM = ("system", "system)", "developer)", "instructions")  # how the names of system prompts end
_BY_HAND = "no rule is written for what is not a system prompt; one that names its place would reach it"


@dataclass(slots=True)
class Cost:
    """The cost of a cause.

    Args:
        requests: that lost something.
        characters, tokens: that they lost.
    """

    requests: int = 0
    characters: int = 0
    tokens: int = 0

    def add(self, characters: int, tokens: int, requests: int = 1) -> None:
        """Adds a loss."""
        self.requests += requests
        self.characters += characters
        self.tokens += tokens


class Fix(NamedTuple):
    """A rule, and what it is for.

    Args:
        name, action: of the rule.
        cause: what it mends, a key of `ADVICE`.
        cost: what it would save; a lower bound.
        values: two of what it finds, that differ; of tools none.
        text: the rule as a file has it.
    """

    name: str
    action: str
    cause: str
    cost: Cost
    values: tuple[str, ...]
    text: str


class Left(NamedTuple):
    """A finding that no rule mends, and the reason."""

    cause: str
    where: str
    cost: Cost
    reason: str


class Fixed(NamedTuple):
    """The rules that traffic calls for, those that save the most first, and what they leave."""

    fixes: Sequence[Fix]
    left: Sequence[Left]


@dataclass(slots=True)
class _Place:
    """A value in system prompts, known by the text before it.

    Args:
        cost: of it; of what `rounded` would save of that, by unit.
        forms: of its values.
        samples: some of them, in pairs.
    """

    cost: Cost = field(default_factory=Cost)
    rounded: dict[str, Cost] = field(default_factory=lambda: {unit: Cost() for unit in _UNITS})
    causes: Counter[str] = field(default_factory=Counter)
    forms: dict[str, None] = field(default_factory=dict)  # in the order of their coming
    samples: list[tuple[Spot, Spot]] = field(default_factory=list)
    wheres: Counter[str] = field(default_factory=Counter)
    last: object = None

    def add(self, loss: Loss, tokens: int, here: Spot, there: Spot) -> None:
        """Adds a loss."""
        more = int(self.last is not loss.here)
        self.last = loss.here
        self.cost.add(len(loss.text), tokens, more)
        self.causes[loss.cause] += 1
        self.wheres[loss.where] += 1
        if len(self.forms) < _MOST_FORMS:
            self.forms |= dict.fromkeys(form(loss.cause, each.value) for each in (there, here))
        if len(self.samples) < _SAMPLES:
            self.samples.append((there, here))
        if loss.cause == "time":
            for unit, cost in self.rounded.items():
                if (mine := _rounded(here.value, unit)) is not None and mine == _rounded(there.value, unit):
                    cost.add(len(loss.text), tokens, more)

    @property
    def cause(self) -> str:
        """The cause that all values fit: a number may be an id."""
        return next(cause for cause in PATTERNS if cause in self.causes)

    @property
    def unit(self) -> str | None:
        """The unit to which it can be rounded; None: that would not help."""
        least = self.cost.tokens * _ROUNDED
        fitting = (unit for unit, cost in self.rounded.items() if cost.tokens and cost.tokens >= least)
        return next(fitting, None) if len(self.forms) == 1 else None


def _rounded(value: str, unit: str) -> str | None:
    """Returns a time rounded to a unit; None: it has no clock."""
    if not rounds(value):
        return None
    found: Any = re.fullmatch(form("time", value, named=True), value)
    if found is None:
        return None
    edit = Round(unit).edit(found, found.re.groupindex, "system")
    return value[: edit.start] + edit.text + value[edit.end :]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Fixes:
    """Collects what a linter finds; give `add` to it."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], _Place] = {}
        self._sorts: dict[frozenset[str], Cost] = {}
        self._left: dict[tuple[str, str, str], Cost] = {}

    def add(self, loss: Loss, tokens: int) -> None:
        """Adds a loss, and its tokens. Prompts of several salts share nothing, so what parts them is not mended."""
        if loss.here.salt != loss.there.salt:
            return
        if loss.cause.startswith("tool"):
            self._add_tools(loss, tokens)
        elif loss.cause not in PATTERNS:
            self._leave(loss.cause, loss.where, len(loss.text), tokens, "no rule mends it")
        elif not loss.where.endswith(_SYSTEM):
            self._leave(loss.cause, loss.where, len(loss.text), tokens, _BY_HAND)
        else:
            self._add_value(loss, tokens)

    def _leave(self, cause: str, where: str, characters: int, tokens: int, reason: str, requests: int = 1) -> None:
        self._left.setdefault((cause, where, reason), Cost()).add(characters, tokens, requests)

    def _add_value(self, loss: Loss, tokens: int) -> None:
        here, there = spot(loss.cause, loss.here, loss.at.here), spot(loss.cause, loss.there, loss.at.there)
        if here is None or there is None:
            self._leave(loss.cause, loss.where, len(loss.text), tokens, "it is not in a text alone")
            return
        if not (_is_unicode(here.text) and _is_unicode(there.text)):
            self._leave(loss.cause, loss.where, len(loss.text), tokens, "its text is not valid Unicode")
            return
        header = _HEADER.match(here.line)
        kind = "time" if loss.cause == "time" else "other"
        key = ("header", header[1]) if header else (kind, before(here))
        if key not in self._places and len(self._places) >= _MOST_PLACES:
            self._leave(loss.cause, loss.where, len(loss.text), tokens, f"more than {_MOST_PLACES} places")
            return
        self._places.setdefault(key, _Place()).add(loss, tokens, here, there)

    def _add_tools(self, loss: Loss, tokens: int) -> None:
        pair = [[json.loads(tool) for tool in prompt.tools] for prompt in (loss.here, loss.there)]
        lists = next((each for each in _LISTS if _sorted(pair[0], each) == _sorted(pair[1], each)), None)
        if lists is None:
            reason = "no rule mends it, but `keep` declares the tools that a session had, where clients agree"
            self._leave(loss.cause, loss.where, len(loss.text), tokens, reason)
        else:
            self._sorts.setdefault(lists, Cost()).add(len(loss.text), tokens)

    def fixed(self, report: Report, origin: str, others: Sequence[Rule] = ()) -> Fixed:
        """Returns the rules, each of which a server would take beside the others.

        Args:
            report: of the linter.
            origin: the file for which they are, for errors.
            others: rules that are in use already.
        """
        left, made, taken = dict(self._left), list[Fix](), list(others)
        names = Counter(rule.name for rule in others)
        for wanted in sorted(self._wanted(), key=lambda each: (-each.cost.tokens, each.cause, each.where)):
            draft, reason = None, f"{MOST_RULES} rules save more"
            if len(made) < MOST_RULES:
                draft = wanted.make()
                reason = draft.reason
            if draft is not None and not reason:
                names[draft.slug] += 1
                name = draft.slug if names[draft.slug] == 1 else f"{draft.slug}-{names[draft.slug]}"
                text = draft.written(name)
                try:
                    taken += rules_of(text, origin, taken)
                except BadRule as error:
                    reason = f"its rule is refused: {error}"
                else:
                    made.append(Fix(name, draft.action, wanted.cause, draft.cost, draft.values, text))
            if reason:
                cost = left.setdefault((wanted.cause, wanted.where, reason), Cost())
                cost.add(wanted.cost.characters, wanted.cost.tokens, wanted.cost.requests)
        for one in report.findings:
            if one.cause == "salt":
                left["salt", one.where, "no rule mends it"] = _cost(one)
        rest = [Left(cause, where, cost, reason) for (cause, where, reason), cost in left.items()]
        made.sort(key=lambda fix: -fix.cost.tokens)
        return Fixed(made, sorted(rest, key=lambda each: -each.cost.tokens))

    def _wanted(self) -> Iterator[_Wanted]:
        """Yields what rules are wanted for."""
        if self._sorts:
            cost, lists = Cost(), frozenset[str]().union(*self._sorts)
            for each in self._sorts.values():
                cost.add(each.characters, each.tokens, each.requests)
            cause = "tools reordered" if "tools" in lists else "tool keys reordered"
            yield _Wanted(cause, "tools", cost, partial(_sorting, lists, cost))
        for (kind, known), place in self._places.items():
            make = partial(_header, known, place) if kind == "header" else partial(_value, place)
            yield _Wanted(place.cause, place.wheres.most_common(1)[0][0], place.cost, make)


def _cost(finding: Finding) -> Cost:
    return Cost(finding.requests, 0, finding.lost_tokens)


_LISTS = tuple(map(frozenset, (("tools",), ("keys",), SORTS)))


def _sorted(tools: Sequence[object], lists: frozenset[str]) -> str:
    """Returns tools as they are sent, after lists of theirs were sorted."""
    body = rewritten_body([Rule("", Sort(lists))], {"messages": [], "tools": tools}).body
    return json.dumps(body["tools"])


# ---- rules


class _Wanted(NamedTuple):
    """Something for which a rule is wanted; see `Left`. `make` returns the rule."""

    cause: str
    where: str
    cost: Cost
    make: Callable[[], _Draft]


class _Draft(NamedTuple):
    """A rule that may be written.

    Args:
        action, cost, values: see `Fix`.
        slug: its name, unless another rule has it.
        lines: its other lines.
        reason: why it is not written; empty: it is.
    """

    action: str
    cost: Cost
    slug: str
    values: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    reason: str = ""

    def written(self, name: str) -> str:
        """Returns it as a file has it."""
        return "\n".join(("[[rule]]", f"name = {quoted(name)}", f'action = "{self.action}"', *self.lines)) + "\n"


def _sorting(lists: frozenset[str], cost: Cost) -> _Draft:
    listed = json.dumps([each for each in SORTS if each in lists])
    return _Draft("sort", cost, "tools-in-one-order", lines=(f"lists = {listed}",))


def _header(name: str, place: _Place) -> _Draft:
    pattern = f"(?m:^)[ \\t]*{escaped(name)}:[^\\n]*\\n?"
    lines = f"match = {quoted(pattern)}", f"example = {quoted(place.samples[0][0].line)}"
    values = tuple(each.line.strip() for each in place.samples[0])
    return _Draft("drop", place.cost, _slug("line", name), values, lines)


def _value(place: _Place) -> _Draft:
    cause, unit, spots = place.cause, place.unit, [each for pair in place.samples for each in pair]
    values, slug = (spots[0].value, spots[1].value), _slug(cause, before(spots[0], alone=True))
    if place.cost.requests < _SEEN.get(cause, 1):
        return _Draft("move", place.cost, slug, values, reason="seen once: it may be an edit")
    if unit is not None and (pattern := narrow(form(cause, spots[0].value, named=True), spots, alone=True)):
        lines = f'to = "{unit}"', *_found(pattern, spots[0])
        return _Draft("round", place.rounded[unit], slug, values, lines)
    forms = sorted(place.forms, key=len, reverse=True)
    either = forms[0] if len(forms) == 1 else f"(?:{'|'.join(forms)})"
    if pattern := narrow(f"(?P<value>{either})", spots):
        return _Draft("move", place.cost, slug, values, _found(pattern, spots[0]))
    return _Draft("move", place.cost, slug, values, reason="no pattern of the text around it finds it alone")


def _found(pattern: str, at: Spot) -> tuple[str, str]:
    """Returns the lines of a rule with a pattern, and what it finds at a value."""
    found = next(each for each in re.finditer(pattern, at.text) if each.start() <= at.start < each.end())
    return f"match = {quoted(pattern)}", f"example = {quoted(found[0])}"


def _slug(first: str, text: str) -> str:
    words = re.findall("[a-z]+", re.sub(r"\[[^]]*\]", " ", text).lower())
    return "-".join((first, *words[-3:]))


def quoted(text: str) -> str:
    """Returns a text as TOML has it."""
    if text.isprintable() and "'" not in text:
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- the file


def document(fixed: Fixed, report: Report, source: str) -> str:
    """Returns the text of a file of rules, with what each would save, and what they leave."""
    lines = [
        f"# What keeps the prompts of {shown(source)} from sharing more, mended: {report.requests:,} requests,",
        f"# {report.tokens:,} tokens, {report.shared_tokens:,} of them the beginning of an earlier prompt.",
        "# What a rule would save is a lower bound, and counts on the others: text behind two causes is shared if both",
        "# are mended. Read each rule before you use it: models no longer see at its place what it finds. `clients`,",
        "# `routes` and `tenants` make a rule narrower.",
    ]
    for fix in fixed.fixes:
        of_all = f"{fix.cost.requests:,} of {report.requests:,} requests"
        said = "A header of a client" if fix.action == "drop" else _CAUSES[fix.cause]
        lines += ["", f"# {said}: in {of_all} it kept text from being shared."]
        lines += [f"#   {shown(value)}" for value in fix.values]
        lines += [f"# Would save {saving(fix.cost, report)}.", fix.text.rstrip("\n")]
    if fixed.left:
        lines += ["", "# Not mended by these rules:"]
    for each in fixed.left[:MOST_RULES]:
        lost = f"{each.cost.requests:,} requests, {each.cost.tokens:,} tokens lost"
        lines.append(f"# - {each.cause} in {each.where}: {lost}; {shown(each.reason)[1:-1]}. {ADVICE[each.cause]}")
    return "\n".join(lines) + "\n"


_CAUSES = {"time": "A time", "id": "An id", "number": "A number", "tools reordered": "Tools in another order",
           "tool keys reordered": "Keys of tools in another order"}  # fmt: skip


def saving(cost: Cost, report: Report) -> str:
    """Returns what a rule would save: in this traffic, and a day if its requests have times."""
    here = f"{cost.characters:,} characters of this traffic, about {cost.tokens:,} tokens"
    if report.seconds:
        return f"{here}: {cost.tokens * 86400 / report.seconds:,.0f} tokens a day"
    return f"{here}: {cost.tokens * 1000 / report.requests:,.0f} of 1,000 requests (the traffic has no times)"


def shown(text: str) -> str:
    """Returns a text on one line of a comment."""
    whole = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="backslashreplace").decode()


_SHOWN = 200
