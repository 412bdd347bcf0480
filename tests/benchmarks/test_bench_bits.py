"""The benchmark of bits: what it counts of answers that differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from bench.bits import Scored, Settings, differences, measure, precision, table

BEST = {" a": -0.5, " b": -1.5}


class Double:
    """Answers all prompts alike but the last one: warm, its scores change; beside others, its text."""

    name = "double"

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        return [self._answer(prompt, len(prompts)) for prompt in prompts]

    def read(self, passage: Sequence[int]) -> list[float]:
        return [-0.5 * token for token in passage[1:]]

    def _answer(self, prompt: str, beside: int) -> Scored:
        times = self.asked[prompt] = self.asked.get(prompt, 0) + 1
        if prompt != "last" or times == 1:
            return Scored("text", (0.0, 1.0), BEST)
        return Scored("text" if beside == 1 else "other", (0.0, 2.0), {" a": -0.25, " c": -1.0})


def test_texts_scores_and_first_tokens_are_counted_apart() -> None:
    rows = measure(Settings(together=(2,)), Double(), ["one", "last"], [{" a": -0.5}] * 2)
    assert {row["what"]: row["value"] for row in rows} == {
        "texts of 2 changed by a hit": 0,
        "sets of log-probabilities of 2 changed by a hit": 1,
        "best of the first token, cold against warm: mean": pytest.approx(0.25 / 3),
        "best of the first token, cold against warm: largest": 0.25,
        "the same against float32: cold, mean": 0.0,
        "the same against float32: warm, mean": 0.125,
        "texts changed by being one of 2 at once": 1,
        "sets of log-probabilities changed by being one of 2 at once": 0,
    }
    console = Console(width=200, record=True)
    console.print(table(rows))
    assert "sets of log-probabilities of 2 changed by a hit" in console.export_text()


def test_only_tokens_among_the_best_of_both_are_compared() -> None:
    assert differences(BEST, {" b": -1.0, " c": -2.0}) == [0.5]


def test_a_text_is_compared_with_float32_token_by_token() -> None:
    rows = precision(Double(), [[9, 1, 2], [9, 3]], [[-0.5, -0.75], [-1.5]])
    assert [row["value"] for row in rows] == [
        pytest.approx(0.25 / 3),
        pytest.approx(100 * (2.718281828 ** (0.25 / 3) - 1)),
        pytest.approx(100 * 0.25 / 3),
    ]
    assert all("3 tokens" in row["what"] for row in rows)
