"""`Linter`: finds the parts of prompts that keep them from sharing prefixes, and their cost.

Prompts are compared as text (see `prompts`). Each is compared with the earlier prompts of its salt next to it in sorted
order, as they are and with all times, ids and numbers blanked out. Where two prompts part, a rule names the cause, and
the comparison goes on after the difference. The text that is the same there would have been shared without the
difference. Text that some earlier prompt begins with does not count as lost. Other prompts may share more, so the count
is a lower bound.

The first prompt of a salt is compared with prompts of other salts. The result counts only if salts are new so often
that they cannot be one for each tenant.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from mainstem.watch.prompts import END, Body, Prompt, prompts

__all__ = [
    "ADVICE",
    "ANY_VALUE",
    "KEPT",
    "PATTERNS",
    "Finding",
    "Linter",
    "Loss",
    "Place",
    "Report",
    "about",
    "value_at",
]

SHORTEST = 64
"""Characters that must be the same after a difference for it to count: fewer are chance, or less than a page."""

KEPT = 10_000
"""Prompts that a prompt is compared with: the last ones of its model."""

_AROUND, _SHOWN = 12, 60  # characters of an example before the difference, and in all
_WORDS, _AGREE = 8, 6  # words that may differ, and that agree after them
_PIECES, _LONGEST = 1000, 4000  # of a list: how many may be in another order; characters of one
_CLOSE = 8  # values that may follow each other with less than SHORTEST between them
_OFTEN = 4  # if one in so many prompts with a salt brings a new salt, salts do not name tenants
_SYSTEM = ("system", "system)", "developer)", "instructions")  # how the names of system prompts end
_BLANK = "\1"

ADVICE = {
    "time": "Put the time at the end of the last message, or leave out what is finer than a day.",
    "id": "Put ids after what all prompts share, best in the last message.",
    "number": "Put what changes after what all prompts share.",
    "tools reordered": "Send the tools in one order, for example by name.",
    "tool keys reordered": "Write the JSON of a tool with its keys in one order.",
    "tools changed": "Send the same tools each time, and restrict them by tool_choice.",
    "parts reordered": "Sort documents, facts and lists, by name for example, and put the question after them.",
    "salt": "Send one salt for all requests that may share, such as those of a tenant, not one for each request.",
    "spaces": "Write the prompt with the same spaces and line ends each time.",
    "words": "Use one system prompt, and put what differs into the last message.",
}
"""The advice, by cause."""

ORDERS = {"tools reordered", "tool keys reordered", "parts reordered"}
"""Causes of a difference that is the same text in another order, which would be shared, too."""


# --- why two prompts part ---------------------------------------------------------------------------------------------

_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_MOMENT = (
    rf"(?:\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
    rf"|\d{{1,2}}\.? {_MONTH}(?:,? \d{{4}})?|{_DAY}|\d{{1,2}}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?"
    r"|\b1\d{9}(?:\d{3})?\b)"
)
_TIME = rf"\b{_MOMENT}(?:(?:,? |T|,? at )?{_MOMENT})*(?:Z|[+-]\d\d:?\d\d| ?UTC)?"
_ID = (
    r"\b(?:[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"  # a UUID
    r"|(?<==)(?=\w*\d)\w{4,}"  # a setting, such as cch=3f9a1
    r"|[A-Za-z]+[-_](?=\w*\d)\w{5,}|(?=\w*\d)(?=\w*[A-Za-z])[0-9A-Za-z]{8,}|\d{6,})\b"
)
_NUMBER = r"\d+(?:[.,]\d+)*"
PATTERNS = {"time": re.compile(_TIME), "id": re.compile(_ID), "number": re.compile(_NUMBER)}
"""Patterns of values that change, by cause; the first that fits counts."""
ANY_VALUE = re.compile("|".join(pattern.pattern for pattern in PATTERNS.values()))
_WORD = re.compile(r"\w+")


class Place(NamedTuple):
    """A position in each of two prompts."""

    here: int
    there: int


Rule = Callable[[Prompt, Prompt, Place], tuple[str, Place] | None]
"""Returns the cause, and where both prompts go on after the difference; None: the rule does not apply."""


def _tools(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    if not (here.tools and there.tools) or (at.here >= here.tools_end and at.there >= there.tools_end):
        return None
    after = Place(here.tools_end, there.tools_end)
    if sorted(here.tools) == sorted(there.tools):
        return "tools reordered", after
    if sorted(map(_canonical, here.tools)) == sorted(map(_canonical, there.tools)):
        return "tool keys reordered", after
    return "tools changed", after


def _canonical(tool: str) -> str:
    return json.dumps(json.loads(tool), sort_keys=True)


def _values(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    for cause, pattern in PATTERNS.items():
        ours, theirs = value_at(pattern, here, at.here), value_at(pattern, there, at.there)
        if ours and theirs and at.here - ours.start() == at.there - theirs.start():
            return cause, Place(ours.end(), theirs.end())
    return None


def value_at(pattern: re.Pattern[str], prompt: Prompt, at: int) -> re.Match[str] | None:
    """Returns the value of a pattern that a position of a prompt is in, or at the end of."""
    begin = max(prompt.part(at)[1], at - _SHOWN)
    values = pattern.finditer(prompt.text, begin, at + _SHOWN)
    return next((value for value in values if value.start() <= at <= value.end()), None)


def _spaces(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    ours, theirs = (_space(here.text, at.here), _space(there.text, at.there))
    return ("spaces", Place(ours, theirs)) if (ours, theirs) != at else None


def _space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


_SEPARATOR = rf"(?:[][(){{}},;|\n{END}]|[.:!?](?=\s))"
_SEPARATORS, _LAST_SEPARATOR = re.compile(_SEPARATOR), re.compile(rf"(?s:.*){_SEPARATOR}")
_WRAPPING = " \t\r\"'`-*\u2022"  # around pieces of lists


def _parts(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    """Looks for the fewest pieces after which both have had the same ones."""
    (name, *ours), (other, *theirs) = here.part(at.here), there.part(at.there)
    if name != other:
        return None
    balance: Counter[str] = Counter()
    pairs = zip(_pieces(here.text, at.here, *ours), _pieces(there.text, at.there, *theirs), strict=False)
    for number, ((mine, end), (its, end_there)) in enumerate(islice(pairs, _PIECES)):
        if number == 0 and (mine == its or mine not in there.text or its not in here.text):
            return None  # as most often, and quickly found
        for piece, more in ((mine, 1), (its, -1)):
            balance[piece] += more
            if not balance[piece]:
                del balance[piece]
        if not balance:
            return "parts reordered", Place(end, end_there)
    return None


def _pieces(text: str, at: int, begin: int, end: int) -> Iterator[tuple[str, int]]:
    """Yields the pieces of a part, from the one at a position on, each without its wrapping, and its end."""
    begin = max(begin, at - _LONGEST)
    last = _LAST_SEPARATOR.match(text, begin, at)
    begin = begin if last is None else last.end()
    while begin < end:
        separator = _SEPARATORS.search(text, begin, min(end, begin + _LONGEST))
        if separator is None:
            return
        if piece := text[begin : separator.start()].strip(_WRAPPING):
            yield piece, separator.start()
        begin = separator.end()


def _words(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    name, begin, end = here.part(at.here)
    if not name.endswith(_SYSTEM):
        return None
    _, begin_there, end_there = there.part(at.there)
    ours = _split(here.text, max(begin, here.text.rfind(" ", 0, at.here) + 1), end)
    theirs = _split(there.text, max(begin_there, there.text.rfind(" ", 0, at.there) + 1), end_there)
    for both in range(1, 2 * _WORDS + 1):
        for mine in range(max(0, both - _WORDS), min(both, _WORDS) + 1):
            a, b = ours[mine : mine + _AGREE], theirs[both - mine : both - mine + _AGREE]
            if len(a) == _AGREE and [word for word, _ in a] == [word for word, _ in b]:
                return "words", Place(a[0][1], b[0][1])
    return None


def _split(text: str, begin: int, end: int) -> list[tuple[str, int]]:
    """Returns the first words from a position on, and where each begins."""
    words = []
    for match in re.compile(r"\S+").finditer(text, begin, end - 1):
        words.append((match[0], match.start()))
        if len(words) == _WORDS + _AGREE:
            break
    return words


RULES: Sequence[Rule] = (_tools, _parts, _values, _spaces, _words)
"""In order; the first counts after which enough is the same. Several values count before words."""


# --- what it costs ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Finding:
    """A cause at a place.

    Attributes:
        cause: a key of `ADVICE`.
        where: the part of the prompt, such as `messages[0] (system)`, or `tools`, or `cache_salt`.
        requests: prompts that lost something by it.
        lost_tokens: tokens that they could have found in the cache, and did not; a lower bound.
        examples: two texts that differ; of salts, digests.
    """

    cause: str
    where: str
    requests: int = 0
    lost_tokens: int = 0
    examples: tuple[str, str] = ("", "")

    @property
    def advice(self) -> str:
        """The change that helps."""
        return ADVICE[self.cause]


@dataclass(slots=True)
class Report:
    """The findings of a linter.

    Attributes:
        requests, tokens: all that it has seen; each prompt of a list is a request.
        shared_tokens: those that a prompt has in common with an earlier one from its beginning.
        seconds: between the first and the last request; 0: they have no times.
        findings: by what they cost, the most first.
    """

    requests: int = 0
    tokens: int = 0
    shared_tokens: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


class Loss(NamedTuple):
    """The text that one prompt could not share, by one cause.

    Attributes:
        cause, where: as in a `Finding`.
        text: what could have been shared.
        examples: the texts that differ.
        here, there: the prompt, and the earlier one that it was compared with.
        at: where they part.
    """

    cause: str
    where: str
    text: str
    examples: tuple[str, str]
    here: Prompt
    there: Prompt
    at: Place


def about(text: str) -> int:
    """Returns how many tokens a text has, about: a token is four bytes."""
    return -(-len(text.encode(errors="replace")) // 4)


_Keys = tuple[tuple[str, str], ...]


def _keys(prompt: Prompt) -> _Keys:
    """Returns the keys by which a prompt is sorted: its text, as it is and blanked; each after its salt, and alone."""
    blanked = prompt.text if prompt.ids else ANY_VALUE.sub(_BLANK, prompt.text)
    return tuple((salt, text) for salt in (prompt.salt, "") for text in (prompt.text, blanked))


class _Model:
    """The last prompts of one model, in each order of `_keys`."""

    def __init__(self) -> None:
        self._orders: tuple[list[tuple[str, str, int]], ...] = ([], [], [], [])
        self._last: deque[tuple[_Keys, int]] = deque()
        self._prompts: dict[int, Prompt] = {}
        self._next = 0

    def neighbours(self, keys: _Keys) -> list[Prompt]:
        """Returns the earlier prompts that begin most like this one, of its salt and of all."""
        prompts = {}
        for order, key in zip(self._orders, keys, strict=True):
            at = bisect_left(order, (*key, self._next))
            for *_, number in order[max(0, at - 1) : at + 1]:
                prompts[number] = self._prompts[number]
        return [prompts[number] for number in sorted(prompts)]

    def add(self, prompt: Prompt, keys: _Keys) -> None:
        number, self._next = self._next, self._next + 1
        self._prompts[number] = prompt
        self._last.append((keys, number))
        for order, key in zip(self._orders, keys, strict=True):
            insort(order, (*key, number))
        if len(self._last) > KEPT:
            keys, number = self._last.popleft()
            del self._prompts[number]
            for order, key in zip(self._orders, keys, strict=True):
                del order[bisect_left(order, (*key, number))]


class _Findings(dict[tuple[str, str], Finding]):
    """Findings by their causes and places."""

    def note(self, cause: str, where: str, examples: tuple[str, str], requests: int, tokens: int) -> None:
        finding = self.setdefault((cause, where), Finding(cause, where, examples=examples))
        finding.requests += requests
        finding.lost_tokens += tokens


class Linter:
    """Compares prompts in the order in which they came.

    Args:
        count: returns the tokens of a text.
        lost: called with each loss, and its tokens.
    """

    def __init__(
        self, count: Callable[[str], int] = about, lost: Callable[[Loss, int], None] = lambda loss, tokens: None
    ) -> None:
        self._count = count
        self._lost = lost
        self._models: dict[tuple[str, bool], _Model] = {}
        self._report = Report()
        self._findings, self._across = _Findings(), _Findings()  # among prompts of one salt; of several
        self._salted = self._fresh = 0  # prompts with a salt; the first ones of a salt that lost something
        self._times: list[float] = []

    def add(self, body: Body, time_s: float | None = None) -> None:
        """Compares the prompts of one request with those before it.

        Raises:
            BadRequestBody: it has none, or a field of them is malformed. Nothing has changed.
        """
        for prompt in prompts(body):
            self._add(prompt)
        if time_s is not None:
            self._times = [min([*self._times, time_s]), max([*self._times, time_s])]

    def _add(self, prompt: Prompt) -> None:
        keys = _keys(prompt)
        model = self._models.setdefault((prompt.model, prompt.ids), _Model())
        found = model.neighbours(keys)
        model.add(prompt, keys)
        own = [other for other in found if other.salt == prompt.salt]
        count = len if prompt.ids else self._count
        shared = _most_common(prompt, own)
        self._report.requests += 1
        self._report.tokens += count(prompt.text)
        self._report.shared_tokens += count(prompt.text[:shared])
        losses = _most_lost(prompt, own, shared) if own else _lost_by_salt(prompt, found)
        self._salted += bool(prompt.salt)
        self._fresh += bool(losses and not own)
        findings = self._findings if own else self._across
        noted: set[tuple[str, str]] = set()
        for loss in losses:
            at = loss.cause, loss.where
            tokens = count(loss.text)
            findings.note(*at, loss.examples, int(at not in noted), tokens)
            noted.add(at)
            self._lost(loss, tokens)

    def report(self) -> Report:
        """Returns the findings so far."""
        findings = _Findings()
        across = self._across if self._fresh * _OFTEN >= self._salted else _Findings()
        for one in (*self._findings.values(), *across.values()):
            findings.note(one.cause, one.where, one.examples, one.requests, one.lost_tokens)
        self._report.findings = sorted(findings.values(), key=lambda one: (-one.lost_tokens, one.cause, one.where))
        self._report.seconds = self._times[1] - self._times[0] if self._times else 0.0
        return self._report


def _most_common(prompt: Prompt, others: Sequence[Prompt]) -> int:
    return max((_common(prompt.text, 0, other.text, 0) for other in others), default=0)


def _most_lost(prompt: Prompt, others: Sequence[Prompt], shared: int) -> list[Loss]:
    walks = [list(_losses(prompt, other, shared)) for other in others]
    return max(walks, key=lambda losses: sum(len(loss.text) for loss in losses), default=[])


def _lost_by_salt(prompt: Prompt, others: Sequence[Prompt]) -> list[Loss]:
    """Returns the losses of a prompt, the first of its salt, against other salts; empty if they are small."""
    shared = _most_common(prompt, others)
    losses = _most_lost(prompt, others, shared)
    if shared + sum(len(loss.text) for loss in losses) < SHORTEST:
        return []
    names = _name(prompt.salt), _name(others[0].salt)
    text, other = prompt.text[:shared].replace(END, "\n"), others[0]
    return [Loss("salt", "cache_salt", text, names, prompt, other, Place(shared, shared)), *losses]


def _name(salt: str) -> str:
    """Returns a name for a salt, which is a secret."""
    return f"salt {blake2b(salt.encode(errors='replace'), digest_size=4).hexdigest()}" if salt else "no salt"


def _losses(here: Prompt, there: Prompt, shared: int) -> Iterator[Loss]:
    """Yields the text that a prompt would share with another, beyond `shared` characters, without their differences."""
    if here.ids:
        return
    common = _common(here.text, 0, there.text, 0)
    at = Place(common, common)
    while at.here < len(here.text) and at.there < len(there.text):
        if not (steps := _steps(here, there, at)):
            return
        for cause, begin, next_at in steps:
            if next_at.here > shared:
                where = "tools" if cause.startswith("tool") else here.part(at.here)[0]
                text = here.text[max(begin, shared) : next_at.here].replace(END, "\n")
                examples = _example(here.text, at.here), _example(there.text, at.there)
                yield Loss(cause, where, text, examples, here, there, at)
            at = next_at


_Step = tuple[str, int, Place]
"""The cause of a difference, where the shared text after it would begin, and where both part again."""


def _steps(here: Prompt, there: Prompt, at: Place) -> list[_Step]:
    """Returns the differences after which enough is the same: one, or several values; none: there are not."""
    for rule in RULES:
        if rule is _words and (steps := _close_values(here, there, at)):
            return steps
        if (step := _step(rule(here, there, at), here, there, at)) is not None:
            return [step]
    return []


def _close_values(here: Prompt, there: Prompt, at: Place) -> list[_Step]:
    """Returns values that differ and follow each other closely, up to one after which enough is the same."""
    steps: list[_Step] = []
    while len(steps) < _CLOSE and (step := _step(_values(here, there, at), here, there, at, shortest=0)) is not None:
        steps.append(step)
        _, begin, at = step
        if at.here - begin >= SHORTEST:
            return steps
    return []


def _step(
    parted: tuple[str, Place] | None, here: Prompt, there: Prompt, at: Place, shortest: int = SHORTEST
) -> _Step | None:
    """Returns a difference; None: too little is the same after it."""
    if parted is None:
        return None
    cause, after = parted
    length = _common(here.text, after.here, there.text, after.there)
    begin = at.here if cause in ORDERS else after.here
    end = after.here + length
    if end - begin < shortest or after == at:
        return None
    return cause, begin, Place(end, after.there + length)


def _example(text: str, at: int) -> str:
    """Returns the text around a position, without cutting a word, or a value such as a time, at its ends."""
    begin, end = max(0, at - _AROUND), at - _AROUND + _SHOWN
    for pattern in (ANY_VALUE, _WORD):
        for found in pattern.finditer(text, max(0, begin - _SHOWN), end + _SHOWN):
            if found.start() < begin < found.end():
                begin = found.start()
            if found.start() < end < found.end():
                end = found.end()
    return text[begin:end].replace(END, " ").replace("\n", "\\n")


def _common(a: str, at_a: int, b: str, at_b: int) -> int:
    """Returns how many characters two texts have in common from these positions on."""
    low, step, most = 0, 64, min(len(a) - at_a, len(b) - at_b)
    while low < most:  # doubles while they agree, then halves
        size = min(step, most - low)
        if a[at_a + low : at_a + low + size] == b[at_b + low : at_b + low + size]:
            low += size
            step *= 2
        elif size == 1:
            break
        else:
            step = size // 2
            most = low + size - 1
    return low
