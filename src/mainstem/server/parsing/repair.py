"""JSON as models write it, made strict while it comes; strict JSON stays as it is, byte for byte.

    a raw line break, a tab          in a text: escaped
    {"a": 1,}                        the comma is left out
    {'a': 'it\\'s', "b": True}        Python's texts, `True`, `False` and `None`
    {a: 1}  // why                   names without quotes; comments
    "\\ud83d", "\\d", "\\x1b"           half a character is U+FFFD; what is no escape stands for itself

Only what has one meaning is repaired. All else is an error: a value that is missing, a quote that ends a text early.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

Read = TypeVar("Read")
_Steps: TypeAlias = Generator[None, str, Read]
"""Is sent one character at a time."""


class NoJson(ValueError):
    """A text is no JSON, and its meaning is unknown."""


class Repair:
    """Reads one value that has an end of its own: an object, an array or a text.

    Attributes:
        ended: whether it is complete. Then nothing more may be fed.
    """

    def __init__(self) -> None:
        self.ended = False
        self._out: list[str] = []
        self._again: list[str] = []  # characters that are read once more
        self._steps = self._value()
        next(self._steps)

    def feed(self, character: str) -> str:
        """Returns the part of the strict text that is certain after one more character.

        Raises:
            NoJson: the text cannot be repaired.
        """
        try:
            self._steps.send(character)
        except StopIteration:
            self.ended = True
        shown, self._out = "".join(self._out), []
        return shown

    def _next(self) -> _Steps[str]:
        if self._again:
            return self._again.pop()
        return (yield)

    def _value(self) -> _Steps[None]:
        """Reads the whole value. A stack instead of recursion, so that nesting costs nothing."""
        first = yield from self._next()
        if first in _QUOTES:
            yield from self._text(first)
            return
        if first not in _PAIRS:
            raise NoJson(f"{first!r} begins no object, array or text")
        self._out.append(first)
        closing, complete, comma = [_PAIRS[first]], False, ""  # `complete`: a value is; `comma`: it was followed by one
        while closing:
            gap, character = yield from self._solid()
            if character == closing[-1]:
                self._out.append(gap + closing.pop())
                complete, comma = True, ""
            elif complete:
                if character != ",":
                    raise NoJson(f"{character!r} follows a value")
                self._out.append(gap)
                complete, comma = False, character
            else:
                self._out.append(comma + gap)
                if closing[-1] == "}":
                    yield from self._name(character)
                    gap, character = yield from self._solid()
                    self._out.append(gap)
                complete, comma = character not in _PAIRS, ""
                if complete:
                    yield from self._scalar(character)
                else:
                    self._out.append(character)
                    closing.append(_PAIRS[character])

    def _name(self, first: str) -> _Steps[None]:
        """Reads a name and the colon after it."""
        if first in _QUOTES:
            yield from self._text(first)
        else:
            word = yield from self._word(first)
            if not _NAME.fullmatch(word):
                raise NoJson(f"{word!r} is no name")
            self._out.append(json.dumps(word, ensure_ascii=False))
        gap, character = yield from self._solid()
        if character != ":":
            raise NoJson(f"{character!r} follows a name")
        self._out.append(gap + character)

    def _scalar(self, first: str) -> _Steps[None]:
        if first in _QUOTES:
            yield from self._text(first)
        else:
            word = yield from self._word(first)
            self._out.append(strict(word))

    def _word(self, first: str) -> _Steps[str]:
        """Reads up to a character that is no part of a number or a name, and is read again."""
        word, character = "", first
        while character not in _DELIMITERS and not character.isspace():
            word += character
            character = yield from self._next()
        self._again.append(character)
        return word

    def _solid(self) -> _Steps[tuple[str, str]]:
        """Returns the white space that comes next, without comments, and the character after it."""
        gap = ""
        while True:
            character = yield from self._next()
            if character == "#":
                yield from self._comment("\n")
            elif character == "/":
                kind = yield from self._next()
                if kind not in _COMMENTS:
                    raise NoJson("'/' stands between values")
                yield from self._comment(_COMMENTS[kind])
            elif character.isspace():
                gap += character if character in " \t\n\r" else " "
            else:
                return gap, character

    def _comment(self, end: str) -> _Steps[None]:
        read = ""
        while not read.endswith(end):
            read += yield from self._next()

    # ---- texts

    def _text(self, quote: str) -> _Steps[None]:
        self._out.append('"')
        while (character := (yield from self._next())) != quote:
            if character == "\\":
                yield from self._escape()
            else:
                self._out.append('\\"' if character == '"' else _plain(character))
        self._out.append('"')

    def _escape(self) -> _Steps[None]:
        """Reads the characters after a backslash."""
        kind = yield from self._next()
        if kind in _ESCAPED:
            self._out.append("\\" + kind)
        elif kind == "'":
            self._out.append(kind)
        elif kind in _DIGITS:
            yield from self._coded(kind)
        else:
            self._out.append("\\\\")
            self._again.append(kind)

    def _coded(self, kind: str) -> _Steps[None]:
        """Reads a character by its number: `\\uXXXX`, or as in Python."""
        digits = yield from self._hexadecimal(_DIGITS[kind])
        number = int(digits, 16) if len(digits) == _DIGITS[kind] else _NO_CHARACTER
        if number >= _NO_CHARACTER:
            self._out.append(f"\\\\{kind}{digits}")
        elif _HIGH <= number < _LOW:
            yield from self._second_half(kind + digits)
        elif _LOW <= number < _ABOVE:
            self._out.append(_REPLACEMENT)
        else:
            self._out.append(f"\\u{digits}" if kind == "u" else json.dumps(chr(number))[1:-1])

    def _second_half(self, first: str) -> _Steps[None]:
        """Reads the second half of a character beyond 16 bits; without one, the first stands for no character."""
        character = yield from self._next()
        if character == "\\":
            kind = yield from self._next()
            digits = (yield from self._hexadecimal(4)) if kind == "u" else ""
            if len(digits) == 4 and _LOW <= int(digits, 16) < _ABOVE and first[0] == "u":
                self._out.append(f"\\{first}\\u{digits}")
                return
            character += kind + digits
        self._out.append(_REPLACEMENT)
        self._again.extend(reversed(character))

    def _hexadecimal(self, most: int) -> _Steps[str]:
        """Returns as many hexadecimal digits as there are, up to `most`."""
        digits = ""
        while len(digits) < most:
            character = yield from self._next()
            if character not in _HEXADECIMAL:
                self._again.append(character)
                break
            digits += character
        return digits


_PAIRS = {"{": "}", "[": "]"}
_QUOTES = frozenset("\"'")
_DELIMITERS = frozenset(",:{}[]\"'#/")
_COMMENTS = {"/": "\n", "*": "*/"}
_ESCAPED = frozenset('"\\/bfnrt')
_DIGITS = {"u": 4, "x": 2, "U": 8}
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_HIGH, _LOW, _ABOVE, _NO_CHARACTER = 0xD800, 0xDC00, 0xE000, 0x110000  # where halves of characters begin and end
_REPLACEMENT = "\\ufffd"
_NAME = re.compile(r"[\w$][\w$.-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CONSTANTS = {
    "true": "true", "false": "false", "null": "null", "none": "null", "undefined": "null", "nan": "null",
    "infinity": "null", "-infinity": "null",
}  # fmt: skip  # JSON has no number that is none


def strict(word: str) -> str:
    """Returns a number or a constant in JSON.

    Raises:
        NoJson: it is none.
    """
    if _NUMBER.fullmatch(word):
        return word
    if (constant := _CONSTANTS.get(word.lower())) is not None:
        return constant
    for read in (lambda: int(word, 0), lambda: int(word), lambda: float(word)):  # 0x1F; 007; .5
        try:
            number = read()
        except ValueError:
            continue
        if word.isascii() and math.isfinite(number):
            return json.dumps(number)
    raise NoJson(f"{word!r} is no value")


def repaired(text: str) -> str:
    """Returns a text that is one object, array or text, with white space around it, as strict JSON.

    Raises:
        NoJson: it cannot be repaired, or something follows.
    """
    made, repair = list[str](), Repair()
    for character in text.strip():
        if repair.ended:
            raise NoJson(f"{character!r} follows the value")
        made.append(repair.feed(character))
    if not repair.ended:
        raise NoJson("the value has no end")
    return "".join(made)


def _plain(character: str) -> str:
    """Returns a character of a text as it stands in JSON."""
    return character if character >= " " else json.dumps(character)[1:-1]
