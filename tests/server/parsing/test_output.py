"""Pieces of answers, and scanners that read one character at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.server.parsing.output import Arguments, Call, NoCall, PlainText, Reasoning, Scanner, Steps, Text, joined


class Brackets(Scanner):
    """Shows what is in brackets as reasoning."""

    def _scan(self) -> Steps[None]:
        while (yield from self._until(["<<", "<("], lambda c: self._pieces.append(Text(c)))):
            yield from self._until([">>"], lambda c: self._pieces.append(Reasoning(c)))


def scanned(parser: Any, *texts: str, cut: bool = False) -> list[Any]:
    return joined([*(piece for text in texts for piece in parser.feed(text)), *parser.close(cut)])


def test_neighbours_of_one_kind_are_one_piece() -> None:
    pieces = [
        Text("a"),
        Text("b"),
        Call(0, "i", "f"),
        Arguments(0, "{"),
        Arguments(0, "}"),
        Arguments(1, "x"),
        Text("c"),
    ]
    assert joined(pieces) == [
        Text("ab"), Call(0, "i", "f"), Arguments(0, "{}"), Arguments(1, "x"), Text("c"),
    ]  # fmt: skip
    assert joined([Call(0, "i", "f"), NoCall(0), Text("a"), Text("b")]) == [Call(0, "i", "f"), NoCall(0), Text("ab")]
    assert joined([Call(0, "i", "f"), Call(1, "j", "f")]) == [Call(0, "i", "f"), Call(1, "j", "f")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<<b>>c", [Text("a"), Reasoning("b"), Text("c")]),
        ("<<<b", [Reasoning("<b")]),
        ("a<x<", [Text("a<x<")]),
        ("<(b>>>", [Reasoning("b"), Text(">")]),
        ("<<b>", [Reasoning("b>")]),
        ("", []),
    ],
)
def test_markers(text: str, expected: list[Any]) -> None:
    assert scanned(Brackets(), text) == expected


@given(text=st.text("<(>ab", max_size=12), at=st.integers(0, 12))
def test_a_split_makes_no_difference(text: str, at: int) -> None:
    assert scanned(Brackets(), text) == scanned(Brackets(), text[:at], text[at:])


def test_what_may_be_a_marker_is_held_back() -> None:
    parser = Brackets()
    assert (parser.feed("a<"), parser.feed("b")) == ([Text("a")], [Text("<b")])


def test_plain_text() -> None:
    assert scanned(PlainText(), "a<", "<b") == [Text("a<<b")]
