"""`Linter`: finds what in prompts keeps them from sharing their prefixes, and what that costs.

Prompts are compared as text: tools first, as templates place them, then the messages. Each is compared with the
earlier prompts next to it in sorted order, as they are and with all times, ids and numbers blanked out. Where two
prompts part, the rules say why; if they know, the comparison goes on after what differs. What is the same there could
have been found if it had not differed. Only what no earlier prompt begins with counts as lost. Other prompts may
share more, so the count is a lower bound.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mainstem.errors import MainstemError

Body = Mapping[str, Any]
"""The body of a request, as OpenAI's API has it."""

SHORTEST = 64
"""Characters that must be the same after a difference for it to count: fewer are chance, or less than a page."""

KEPT = 10_000
"""Prompts that a prompt is compared with: the last ones of its model."""

_AROUND, _SHOWN = 12, 60  # characters of an example before the difference, and in all
_WORDS, _AGREE = 8, 6  # words that may differ, and that agree after them
_END = "\0"  # between the parts of a prompt
_BLANK = "\1"

ADVICE = {
    "time": "Put the time at the end of the last message, or leave out what is finer than a day.",
    "id": "Put ids after what all prompts share, best in the last message.",
    "number": "Put what changes after what all prompts share.",
    "tools reordered": "Send the tools in one order, for example by name.",
    "tool keys reordered": "Write the JSON of a tool with its keys in one order.",
    "tools changed": "Send the same tools each time, and restrict them by tool_choice.",
    "parts reordered": "Keep documents in one order, and put the question after them.",
    "spaces": "Write the prompt with the same spaces and line ends each time.",
    "words": "Use one system prompt, and put what differs into the last message.",
}
"""What to change, by cause."""

ORDERS = {"tools reordered", "tool keys reordered", "parts reordered"}
"""Causes where what differs is the same text in another order, which would be shared, too."""


class BadRequestBody(MainstemError, ValueError):
    """A line is not the body of a request with text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text.

    Args:
        model: prompts of different models share nothing.
        tools: the text of each tool.
        text: everything, each part followed by `_END`.
        parts: what each part is, such as `messages[0] (system)`, and where it ends in the text.
    """

    model: str
    tools: tuple[str, ...]
    text: str
    parts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, body: Body) -> Prompt:
        """Returns the prompt of a request.

        Raises:
            BadRequestBody: it has neither messages nor a prompt with text.
        """
        tools = tuple(json.dumps(tool, ensure_ascii=False) for tool in body.get("tools") or ())
        named = [(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
        named += list(_messages(body))
        pieces: list[str] = []
        parts: list[tuple[str, int]] = []
        end = 0
        for name, piece in named:
            pieces.append(piece.replace(_END, " ") + _END)
            end += len(pieces[-1])
            parts.append((name, end))
        return cls(str(body.get("model") or ""), tools, "".join(pieces), tuple(parts))

    def part(self, at: int) -> tuple[str, int, int]:
        """Returns the name of the part at a position, where it begins and where it ends."""
        begin = 0
        for name, end in self.parts:
            if at < end:
                return name, begin, end
            begin = end
        return "the end", begin, len(self.text)

    @property
    def tools_end(self) -> int:
        """Where the tools end in the text."""
        return self.parts[len(self.tools) - 1][1] if self.tools else 0


def _messages(body: Body) -> Iterator[tuple[str, str]]:
    """Yields the name and text of each message, or of the prompt."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        yield "prompt", prompt
        return
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise BadRequestBody("neither messages (a list of objects) nor a prompt (a string) is present")
    for number, message in enumerate(messages):
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and part.get("type") == "text" for part in content
        ):
            text = "\n".join(str(part.get("text", "")) for part in content)
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        more = json.dumps(rest, ensure_ascii=False) if rest else ""
        role = str(message.get("role", ""))
        yield f"messages[{number}] ({role})", f"{role}\n{text}{more}"


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
    r"|[A-Za-z]+[-_](?=\w*\d)\w{5,}|(?=\w*\d)(?=\w*[A-Za-z])[0-9A-Za-z]{8,}|\d{6,})\b"
)
_NUMBER = r"\d+(?:[.,]\d+)*"
PATTERNS = {"time": re.compile(_TIME), "id": re.compile(_ID), "number": re.compile(_NUMBER)}
"""What a value that changes looks like, by cause; the first that fits counts."""
_ANY = re.compile("|".join(pattern.pattern for pattern in PATTERNS.values()))


class Place(NamedTuple):
    """A position in each of two prompts."""

    here: int
    there: int


Rule = Callable[[Prompt, Prompt, Place], tuple[str, Place] | None]
"""Returns the cause and where both go on after what differs; None: the rule does not know."""


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
        ours, theirs = _around(pattern, here, at.here), _around(pattern, there, at.there)
        if ours and theirs and at.here - ours.start() == at.there - theirs.start():
            return cause, Place(ours.end(), theirs.end())
    return None


def _around(pattern: re.Pattern[str], prompt: Prompt, at: int) -> re.Match[str] | None:
    """Returns the value that a position is in, or at the end of."""
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


def _parts(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    (name, begin, end), (other, begin_there, end_there) = here.part(at.here), there.part(at.there)
    ours, theirs = (re.split(r"\n+", text) for text in (here.text[begin:end], there.text[begin_there:end_there]))
    same = name == other and len(ours) > 2 and Counter(ours) == Counter(theirs)
    return ("parts reordered", Place(end, end_there)) if same else None


def _words(here: Prompt, there: Prompt, at: Place) -> tuple[str, Place] | None:
    name, begin, end = here.part(at.here)
    if not name.endswith(("(system)", "(developer)")):
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
    found = []
    for match in re.compile(r"\S+").finditer(text, begin, end - 1):
        found.append((match[0], match.start()))
        if len(found) == _WORDS + _AGREE:
            break
    return found


RULES: Sequence[Rule] = (_tools, _values, _spaces, _parts, _words)
"""In order; the first counts after which enough is the same."""


# --- what it costs ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Finding:
    """A cause at a place.

    Attributes:
        cause: a key of `ADVICE`.
        where: the part of the prompt, such as `messages[0] (system)`.
        requests: prompts that lost something by it.
        lost_tokens: what they could have found in the cache beyond what they found; a lower bound.
        examples: two texts that differ.
    """

    cause: str
    where: str
    requests: int = 0
    lost_tokens: int = 0
    examples: tuple[str, str] = ("", "")

    @property
    def advice(self) -> str:
        """What to change."""
        return ADVICE[self.cause]


@dataclass(slots=True)
class Report:
    """What a linter found.

    Attributes:
        requests, tokens: all that it has seen.
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
    """What one prompt lost by one cause."""

    cause: str
    where: str
    text: str
    examples: tuple[str, str]


def about(text: str) -> int:
    """Returns how many tokens a text has, about: a token is four bytes."""
    return -(-len(text.encode(errors="replace")) // 4)


class _Model:
    """The last prompts of one model, in two orders."""

    def __init__(self) -> None:
        self._plain: list[tuple[str, int]] = []
        self._blanked: list[tuple[str, int]] = []
        self._last: deque[tuple[str, str, int]] = deque()
        self._prompts: dict[int, Prompt] = {}
        self._next = 0

    def neighbours(self, prompt: Prompt, blanked: str) -> list[Prompt]:
        """Returns the earlier prompts that begin most like this one."""
        found = {}
        for order, key in ((self._plain, prompt.text), (self._blanked, blanked)):
            at = bisect_left(order, (key, self._next))
            for _, number in order[max(0, at - 1) : at + 1]:
                found[number] = self._prompts[number]
        return [found[number] for number in sorted(found)]

    def add(self, prompt: Prompt, blanked: str) -> None:
        number, self._next = self._next, self._next + 1
        self._prompts[number] = prompt
        self._last.append((prompt.text, blanked, number))
        insort(self._plain, (prompt.text, number))
        insort(self._blanked, (blanked, number))
        if len(self._last) > KEPT:
            text, blanked, number = self._last.popleft()
            del self._prompts[number]
            del self._plain[bisect_left(self._plain, (text, number))]
            del self._blanked[bisect_left(self._blanked, (blanked, number))]


class Linter:
    """Compares prompts in the order in which they came.

    Args:
        count: returns the tokens of a text.
    """

    def __init__(self, count: Callable[[str], int] = about) -> None:
        self._count = count
        self._models: dict[str, _Model] = {}
        self._report = Report()
        self._findings: dict[tuple[str, str], Finding] = {}
        self._times: list[float] = []

    def add(self, body: Body, time_s: float | None = None) -> None:
        """Compares one request with those before it.

        Raises:
            BadRequestBody: it has no text. Nothing has changed.
        """
        prompt = Prompt.of(body)
        blanked = _ANY.sub(_BLANK, prompt.text)
        model = self._models.setdefault(prompt.model, _Model())
        found = model.neighbours(prompt, blanked)
        model.add(prompt, blanked)
        shared = max((_common(prompt.text, 0, other.text, 0) for other in found), default=0)
        report = self._report
        report.requests += 1
        report.tokens += self._count(prompt.text)
        report.shared_tokens += self._count(prompt.text[:shared])
        if time_s is not None:
            self._times = [min([*self._times, time_s]), max([*self._times, time_s])]
        walks = [list(_losses(prompt, other, shared)) for other in found]
        best = max(walks, key=lambda losses: sum(len(loss.text) for loss in losses), default=[])
        for (cause, where), losses in _grouped(best).items():
            finding = self._findings.setdefault((cause, where), Finding(cause, where, examples=losses[0].examples))
            finding.requests += 1
            finding.lost_tokens += sum(self._count(loss.text) for loss in losses)

    def report(self) -> Report:
        """Returns what was found so far."""
        self._report.findings = sorted(
            self._findings.values(), key=lambda one: (-one.lost_tokens, one.cause, one.where)
        )
        self._report.seconds = self._times[1] - self._times[0] if self._times else 0.0
        return self._report


def _grouped(losses: Sequence[Loss]) -> dict[tuple[str, str], list[Loss]]:
    found: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        found.setdefault((loss.cause, loss.where), []).append(loss)
    return found


def _losses(here: Prompt, there: Prompt, shared: int) -> Iterator[Loss]:
    """Yields what a prompt would share with another beyond `shared` characters, if they did not part where they do."""
    common = _common(here.text, 0, there.text, 0)
    at = Place(common, common)
    while at.here < len(here.text) and at.there < len(there.text):
        step = next(filter(None, (_step(rule(here, there, at), here, there, at) for rule in RULES)), None)
        if step is None:
            return
        cause, begin, next_at = step
        if next_at.here > shared:
            where = "tools" if cause.startswith("tool") else here.part(at.here)[0]
            text = here.text[max(begin, shared) : next_at.here].replace(_END, "\n")
            yield Loss(cause, where, text, (_example(here.text, at.here), _example(there.text, at.there)))
        at = next_at


def _step(parted: tuple[str, Place] | None, here: Prompt, there: Prompt, at: Place) -> tuple[str, int, Place] | None:
    """Returns the cause, where what would be shared begins, and where both part again; None: that is too little."""
    if parted is None:
        return None
    cause, after = parted
    length = _common(here.text, after.here, there.text, after.there)
    begin = at.here if cause in ORDERS else after.here
    end = after.here + length
    if end - begin < SHORTEST or after == at:
        return None
    return cause, begin, Place(end, after.there + length)


def _example(text: str, at: int) -> str:
    return text[max(0, at - _AROUND) : at - _AROUND + _SHOWN].replace(_END, " ").replace("\n", "\\n")


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
