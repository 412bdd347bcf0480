"""The pieces of an answer: text, reasoning and calls of tools, in the order in which they were generated.

Every API shows these pieces in its own form. An `OutputParser` finds them in the text of a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from mainstem.runtime.text.detokenizer import Stops

Kept = TypeVar("Kept")


class Text(NamedTuple):
    """A part of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """A part of the model's reasoning before it answered."""

    text: str


class Call(NamedTuple):
    """The beginning of a call of a tool. `number` counts the calls of an answer from 0; `id` is unique.

    `custom`: its arguments are a text.
    """

    number: int
    id: str
    name: str
    custom: bool = False


class Arguments(NamedTuple):
    """A part of a call's arguments, which together are a JSON object; of a custom tool, of its text."""

    number: int
    text: str
    custom: bool = False


class NoCall(NamedTuple):
    """A call that began is none: its arguments have no end, or are no JSON. Its text follows."""

    number: int


Piece: TypeAlias = Text | Reasoning | Call | Arguments | NoCall


class OutputParser(Protocol):
    """Finds the pieces of one answer. What it returns never has to be taken back."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Returns the pieces that are certain after some more text."""

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """Returns the pieces that were held back, at the end of the text.

        Args:
            cut: whether the answer was cut at its limit: then a call that has no end is shown as far as it goes.
        """


class PlainText:
    """Takes all as text; an `OutputParser`."""

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`."""
        return [Text(text)] if text else []

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        return []


class UntilStop:
    """Ends an answer's text at the first of several stop texts; an `OutputParser`.

    They count in the text that a client sees as the answer: not in thoughts, nor in calls and what marks them.

    Args:
        parser: finds the pieces of the answer.
        stops: finds the stop text in a text.
    """

    def __init__(self, parser: OutputParser, stops: Stops) -> None:
        self._parser, self._stops = parser, stops

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer; None: none did."""
        return self._stops.found

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`. What comes after the stop text is left out."""
        return [] if self.stop is not None else self._cut(self._parser.feed(text))

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        pieces = [] if self.stop is not None else self._cut(self._parser.close(cut))
        return joined([*pieces, *self._flushed()])

    def _cut(self, pieces: Sequence[Piece]) -> list[Piece]:
        shown: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, Text):
                shown += [*self._flushed(), piece]
                continue
            if safe := self._stops.push(piece.text):
                shown.append(Text(safe))
            if self.stop is not None:
                break
        return shown

    def _flushed(self) -> list[Piece]:
        return [Text(text)] if (text := self._stops.flush()) else []


Steps: TypeAlias = Generator[None, str, Kept]
"""A part of a `Scanner`: is sent one character at a time, and `END` at the end."""

END = ""


class Scanner(ABC):
    """An `OutputParser` that reads one character at a time, so that it does not matter how a text is split."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._unread: list[str] = []
        self._ended = self._cut = False
        self._steps = self._scan()
        next(self._steps)

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`."""
        for character in text:
            self._steps.send(character)
        return self._found()

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        self._cut = cut
        with suppress(StopIteration):
            self._steps.send(END)
        return self._found()

    @abstractmethod
    def _scan(self) -> Steps[None]:
        """Reads the text up to its end, and adds to `_pieces`."""

    def _next(self) -> Steps[str]:
        """Returns the next character; `END` when there is none, however often."""
        if self._unread:
            return self._unread.pop()
        if not self._ended:
            character = yield
            self._ended = character == END
            return character
        return END

    def _push_back(self, text: str) -> None:
        """Makes `_next` return a text again."""
        self._unread.extend(reversed(text))

    def _blanks(self) -> Steps[str]:
        """Returns the white space that comes next."""
        blanks = ""
        while (character := (yield from self._next())).isspace():
            blanks += character
        self._push_back(character)
        return blanks

    def _until(
        self, markers: Sequence[str], show: Callable[[str], object], read: Callable[[], Steps[str]] | None = None
    ) -> Steps[str]:
        """Shows the text before the first of several markers.

        Args:
            markers: which.
            show: is given each character.
            read: reads the next one; None: `_next`.

        Returns:
            The marker, or `END`.
        """
        held, read = "", read or self._next
        while character := (yield from read()):
            held += character
            while held and not any(marker.startswith(held) for marker in markers):
                show(held[0])
                held = held[1:]
            if held in markers:
                return held
        for character in held:
            show(character)
        return END

    def _found(self) -> list[Piece]:
        found, self._pieces = self._pieces, []
        return joined(found)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the same pieces with neighbours of one kind as one piece."""
    result: list[Piece] = []
    for _, group in groupby(pieces, lambda piece: (type(piece), getattr(piece, "number", None))):
        first, *others = group
        if isinstance(first, Call | NoCall):
            result.append(first)
        else:
            text = "".join(piece.text for piece in (first, *others) if not isinstance(piece, Call | NoCall))
            result.append(first._replace(text=text))
    return result
