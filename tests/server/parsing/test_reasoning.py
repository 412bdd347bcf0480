"""What a model thinks is split from what it says, however the text is cut."""

from __future__ import annotations

from typing import Any

import pytest

from mainstem.server.parsing.output import PlainText, Reasoning, Text
from mainstem.server.parsing.reasoning import THINKING, ReasoningParser, thinking_of
from tests.server.parsing.test_output import scanned

QWEN, R1, MISTRAL = THINKING["qwen3"], THINKING["deepseek_r1"], THINKING["mistral"]


def parser(opened: bool, thinking: Any = QWEN) -> ReasoningParser:
    return ReasoningParser(thinking, opened, PlainText())


CASES = [
    (False, "<think>\nWell, 2 < 3.\n</think>\n\nYes.", [Reasoning("Well, 2 < 3."), Text("Yes.")]),
    (False, " \n<think>a</think>b", [Reasoning("a"), Text("b")]),
    (False, "  Yes. <think>no</think>", [Text("  Yes. <think>no</think>")]),
    (False, "<thin", [Text("<thin")]),
    (False, " \n", [Text(" \n")]),
    (False, "<thought>a", [Text("<thought>a")]),
    (False, "<think></think>", []),
    (True, "a\n\nb\n</think>\n\nc <d", [Reasoning("a\n\nb"), Text("c <d")]),
    (True, "<think>\na</think>b", [Reasoning("a"), Text("b")]),
    (True, "never </thin ends", [Reasoning("never </thin ends")]),
    (True, "cut </thi", [Reasoning("cut </thi")]),
    (True, "a</think>b</think>c", [Reasoning("a"), Text("b</think>c")]),
    (True, "", []),
]


@pytest.mark.parametrize(("opened", "text", "expected"), CASES)
def test_thoughts(opened: bool, text: str, expected: list[Any]) -> None:
    assert scanned(parser(opened), text) == expected
    assert scanned(parser(opened), *text) == expected
    for at in range(len(text)):
        assert scanned(parser(opened), text[:at], text[at:]) == expected


def test_other_markers() -> None:
    assert scanned(parser(False, MISTRAL), "[THINK]a[/THINK] b") == [Reasoning("a"), Text("b")]


def test_a_thought_is_shown_while_it_lasts() -> None:
    made = parser(False)
    assert made.feed("<think>I wonder ") == [Reasoning("I wonder")]
    assert made.feed("why <") == [Reasoning(" why")], "what may be a marker, and the blanks before it, wait"
    assert made.feed("/think> So") == [Text("So")]


@pytest.mark.parametrize(
    ("thinking", "ending", "opened", "closed"),
    [
        (QWEN, "<|im_start|>assistant\n<think>\n", True, False),
        (QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        (QWEN, "<|im_start|>assistant\n", False, False),
        (R1, "<|Assistant|>", True, False),
        (R1, "<|Assistant|><think>\n", True, False),
        (R1, "<think></think>", False, True),
        (MISTRAL, "[THINK]", True, False),
    ],
)
def test_the_prompt_opens_or_closes_a_thought(thinking: Any, ending: str, opened: bool, closed: bool) -> None:
    assert (thinking.opened(ending), thinking.closed(ending)) == (opened, closed)


def test_models_with_thoughts_are_told_by_their_markers() -> None:
    assert thinking_of("... '<think>' ... '</think>'", {}) is QWEN
    assert thinking_of("", {"<think>": 1, "</think>": 2}) is QWEN
    assert thinking_of("<think>", {"</think>": 2}) is QWEN
    assert thinking_of("", {"[THINK]": 1, "[/THINK]": 2}) is MISTRAL
    assert thinking_of("<think>", {}) is None
