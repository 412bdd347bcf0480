"""Patterns of RE2 that find a value by the text around it, for rules of prompts.

A pattern is the text before a value as it is, the form of the value, and, where that would find other things, the text
after it. Other values in those texts count by their forms. Python's `re` finds the same as RE2 by all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mainstem.watch.lint import ANY_VALUE, PATTERNS, value_at
from mainstem.watch.prompts import Prompt

AROUND = 32
"""Characters before a value by which it is known, unless they find more than it."""

_WIDER = ((AROUND, 0), (AROUND, 16), (2 * AROUND, 16), (4 * AROUND, 32))  # characters before and after, in turn
_LETTERS = 4  # in the text before a value, without which it says nothing
_SPECIAL = frozenset("\\.^$|?*+()[]{}")
_FORMS = {"id": "[0-9A-Za-z_-]+", "number": "[0-9]+(?:[.,][0-9]+)*"}
_CLOCK = re.compile(
    r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.(?P<fraction>\d+))?)?(?: ?(?P<half>[AaPp])\.?[Mm]\.?)?"
)
_PIECE = re.compile(
    r"(?P<zone>(?<=\d)[+-]\d\d:?\d\d\Z)|(?P<clock>\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\.?)?)"
    r"|(?P<digits>\d+)|(?P<letters>[A-Za-z]+)|(?P<other>.)",
    re.DOTALL,
)


class Spot(NamedTuple):
    """A value in the text of a message: where it begins, and where it ends."""

    text: str
    start: int
    end: int

    @property
    def value(self) -> str:
        """The value."""
        return self.text[self.start : self.end]

    @property
    def line(self) -> str:
        """The line that it is in."""
        begin, end = self.text.rfind("\n", 0, self.start) + 1, self.text.find("\n", self.end)
        return self.text[begin : len(self.text) if end < 0 else end]


def spot(cause: str, prompt: Prompt, at: int) -> Spot | None:
    """Returns the value at a position in a message of a prompt; None: there is none by this cause."""
    _, begin, end = prompt.part(at)
    value = value_at(PATTERNS[cause], prompt, at)
    first = prompt.text.find("\n", begin, end) + 1  # after the role
    if value is None or not begin < first <= value.start() or value.end() >= end:
        return None
    return Spot(prompt.text[first : end - 1], value.start() - first, value.end() - first)


def escaped(text: str) -> str:
    """Returns a pattern that finds a text."""
    lines = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join("\\" + each if each in _SPECIAL else lines.get(each, each) for each in text)


def formed(text: str) -> str:
    """Returns a pattern that finds a text with any values in place of those that it has."""
    made, at = "", 0
    for found in ANY_VALUE.finditer(text):
        made += escaped(text[at : found.start()]) + form(cause_of(found[0]), found[0])
        at = found.end()
    return made + escaped(text[at:])


def cause_of(value: str) -> str:
    """Returns the cause whose pattern fits a value; one that only fits where it stands is an id."""
    return next((cause for cause, pattern in PATTERNS.items() if pattern.fullmatch(value)), "id")


def form(cause: str, value: str, *, named: bool = False) -> str:
    """Returns a pattern of values of the form that one has.

    Args:
        cause: `time`, `id` or `number`.
        value: one of them.
        named: with the groups of a time by which it can be rounded.
    """
    if cause != "time":
        return _FORMS[cause]
    made = ""
    for found in _PIECE.finditer(value):
        match found.lastgroup:
            case "clock":
                made += _clock(found[0], named=named)
            case "zone":
                made += "[+-][0-9]{2}:?[0-9]{2}"
            case "digits":
                made += "[0-9]+"
            case "letters":
                made += "[A-Za-z]+"
            case _:
                made += escaped(found[0])
    return made


def _clock(value: str, *, named: bool) -> str:
    """Returns a pattern of times of the day that are written as one is."""
    found = _CLOCK.fullmatch(value)
    assert found is not None, "a piece is found by the same pattern"
    made = ""
    for name, front, digits in _PARTS:
        if found[name] is not None:
            made += front + (f"(?P<{name}>{digits})" if named else digits)
    return made if found["half"] is None else made + "[.]?[Mm][.]?"


_PARTS = (
    ("hour", "", "[0-9]{1,2}"),
    ("minute", ":", "[0-9]{2}"),
    ("second", ":", "[0-9]{2}"),
    ("fraction", "[.]", "[0-9]+"),
    ("half", " ?", "[AaPp]"),
)


def rounds(value: str) -> bool:
    """Returns whether a time has one clock, which can be rounded."""
    return sum(found.lastgroup == "clock" for found in _PIECE.finditer(value)) == 1


def before(spot: Spot, length: int = AROUND, *, alone: bool = False) -> str:
    """Returns a pattern of the text before a value.

    Args:
        spot: the value.
        length: characters of the text, at most.
        alone: after the last value in it, so that the pattern covers no other.
    """
    begin = _begin(spot, length, alone=alone)
    return ("^" if _is_first(spot) else "") + formed(spot.text[begin : spot.start])


def _is_first(spot: Spot) -> bool:
    """Returns whether too little is before a value to know it by."""
    return spot.start <= AROUND and _letters(spot.text[: spot.start]) < _LETTERS


def _begin(spot: Spot, length: int, *, alone: bool) -> int:
    text, end = spot.text, spot.start
    if _is_first(spot):
        return 0
    line = text.rfind("\n", 0, end) + 1
    if _letters(text[line:end]) < _LETTERS and line:
        line = text.rfind("\n", 0, line - 1) + 1
    begin = _whole_word(text, max(line, end - length), end)
    return max((found.end() for found in ANY_VALUE.finditer(text, begin, end)), default=begin) if alone else begin


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def _whole_word(text: str, begin: int, end: int) -> int:
    """Returns the first position from `begin` on that does not cut a word."""
    while 0 < begin < end and not text[begin - 1].isspace() and not text[begin].isspace():
        begin += 1
    return begin


def after(spot: Spot, length: int) -> str:
    """Returns a pattern of the text after a value, up to the next value or the end of the line."""
    text = spot.text[spot.end : spot.end + length].partition("\n")[0]
    found = ANY_VALUE.search(text)
    return escaped(text if found is None else text[: found.start()])


def narrow(value: str, spots: Sequence[Spot], *, alone: bool = False) -> str | None:
    """Returns a pattern that finds each of some values and nothing else in their texts; None: none was found.

    Args:
        value: the pattern of the value alone.
        spots: the values.
        alone: see `before`.
    """
    return next(
        (each for each in _candidates(value, spots[0], alone=alone) if all(_finds(each, s) for s in spots)), None
    )


def _candidates(value: str, spot: Spot, *, alone: bool) -> Iterator[str]:
    for length, more in _WIDER:
        known = spot.text[_begin(spot, length, alone=alone) : spot.start] + spot.text[spot.end : spot.end + more]
        if _is_first(spot) or _letters(known) >= _LETTERS:
            yield before(spot, length, alone=alone) + value + after(spot, more)


def _finds(pattern: str, spot: Spot) -> bool:
    """Returns whether a pattern finds a value, and what it finds besides is the same value."""
    found = False
    for each in re.finditer(pattern, spot.text):
        start, end = each.span("value" if "value" in each.re.groupindex else 0)
        found |= start <= spot.start and spot.end <= end
        if spot.value not in each.group():
            return False
    return found
