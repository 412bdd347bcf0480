"""The benchmark of bits: what it counts of answers that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from rich.console import Console

from bench.bits import ELSEWHERE, Scored, Served, Settings, differences, elsewhere, measure, precision, table
from bench.report import Report

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
    double = Double()
    cold = [double.ask([prompt], 2)[0] for prompt in ("one", "last")]
    rows = measure(Settings(together=(2,)), double, ["one", "last"], [{" a": -0.5}] * 2, cold)
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


class Elsewhere(Served):
    """A server that finds a share of its prompts, and answers one of them otherwise."""

    def __init__(self, found: int) -> None:
        super().__init__("double", "http://double", {})
        self.found = found

    def ask(self, prompts: Sequence[str], new_tokens: int) -> list[Scored]:
        self.prompt_tokens += 10
        self.cached_tokens += self.found
        return [Scored("text", (0.0, 1.0 + (prompt == "last")), BEST) for prompt in prompts]


@pytest.mark.parametrize(("found", "failures"), [(9, 0), (8, 3)])
def test_answers_from_elsewhere_are_compared_and_must_have_been_found(found: int, failures: int) -> None:
    flags: list[str] = []

    @contextmanager
    def start(given: str) -> Iterator[tuple[Served, Callable[[], object]]]:
        flags.append(given)
        yield Elsewhere(found), lambda: None

    report = Report("bits", "2026-11-29", quick=True, progress=lambda text: None)
    cold = [Scored("text", (0.0, 1.0), BEST)] * 2
    rows = elsewhere("double", ["one", "last"], cold, start, report)
    assert [row["value"] for row in rows] == [0, 1] * 3
    assert {row["what"].split(" by ")[1] for row in rows} == {f"pages from {where}" for where in ELSEWHERE}
    assert len(report.failures) == failures
    stored, again, gives, reads, computes, answers = flags
    assert stored == again and "--storage file:" in stored
    assert "--peer-listen" in gives and "--peers" in reads and "--peers" not in gives
    assert "--role prefill" in computes and "--role decode" in answers and "--prefill-url http://double" in answers


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
