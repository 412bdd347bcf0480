"""What an answer consists of: text, reasoning and calls of tools, in the order in which it was generated.

Every API shows these pieces in its own form. An `OutputParser` finds them in the text of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias


class Text(NamedTuple):
    """A part of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """A part of what the model thought before it answered."""

    text: str


class Call(NamedTuple):
    """The beginning of a call of a tool. `number` counts the calls of an answer from 0; `id` is unique."""

    number: int
    id: str
    name: str


class Arguments(NamedTuple):
    """A part of a call's arguments, which together are a JSON object."""

    number: int
    text: str


Piece: TypeAlias = Text | Reasoning | Call | Arguments


class OutputParser(Protocol):
    """Finds the pieces of one answer. What it returns never has to be taken back."""

    def feed(self, text: str) -> Sequence[Piece]:
        """Returns the pieces that are certain after some more text."""

    def close(self) -> Sequence[Piece]:
        """Returns what was held back, at the end of the text."""


class PlainText:
    """Takes all as text; an `OutputParser`."""

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`."""
        return [Text(text)] if text else []

    def close(self) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        return []
