"""The benchmark of states: what its rules hit in cases that can be counted, and how cells are judged."""

from __future__ import annotations

import random

import pytest

from bench.report import Report
from bench.state_rules import Ask, Earlier, Marconi, Ours, Rule
from bench.states import PAGE, SESSIONS, Settings, ask_of, asks_of, found, judge, run, sessions, workloads
from mainstem.replay.trace import Batch, Trace


def rules(slots: int) -> dict[str, Rule]:
    return {
        "marks": Ours(slots),
        "unmarked": Ours(slots, marks=False),
        "earlier": Earlier(slots),
        "marconi": Marconi(slots, 1.0, PAGE),
    }


def branches(count: int, shared: int = 8) -> list[Ask]:
    """Prompts that share their first blocks, each with an answer of two."""
    return [Ask([*range(shared), *range(100 * at, 100 * at + 4)], shared + 2, (shared,)) for at in range(1, count + 1)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("marks", [0, 8, 8]), ("unmarked", [0, 0, 8]), ("earlier", [0, 0, 8]), ("marconi", [0, 0, 8])],
)
def test_prompts_that_part_hit_what_each_rule_keeps(rule: str, expected: list[int]) -> None:
    served = rules(20)[rule]
    assert [served.serve(ask) for ask in branches(3)] == expected


@pytest.mark.parametrize("rule", ["marks", "unmarked", "earlier", "marconi"])
def test_one_session_hits_its_whole_history(rule: str) -> None:
    asks = [ask_of(*turn) for turn in sessions(1)(random.Random(1), 20)]
    served = rules(10)[rule]
    assert [served.serve(ask) for ask in asks] == [0, *(len(ask.path) for ask in asks[:-1])]


def test_marconi_keeps_no_state_at_the_end_of_a_prompt_and_the_others_do() -> None:
    again = Ask([1, 2, 3, 4, 50, 51], 4)
    for name, rule in rules(10).items():
        rule.serve(Ask([1, 2, 3, 4, 60, 61], 4))
        assert rule.serve(again) == (0 if name == "marconi" else 4), name


def test_marconi_evicts_what_saves_least_for_its_bytes_or_what_is_oldest() -> None:
    def left(alpha: float) -> list[bool]:
        rule = Marconi(3, alpha, PAGE)  # two, and one to compute with
        paths = [[*range(first, first + length)] for first, length in ((0, 40), (100, 2), (200, 10))]
        for path in paths:
            rule.serve(Ask(path, len(path)))
        return [rule.walk(path)[-1].kept for path in paths]

    assert left(0.0) == [False, True, True]
    assert left(2.0) == [True, False, True]


def test_a_trace_goes_on_where_a_later_request_begins_with_all_of_an_earlier_one() -> None:
    paths = [[1, 2], [7, 8], [1, 2, 3, 4, 5]]
    trace = Trace.of(Batch.of(paths, block_size=10, input_tokens=[20, 20, 50], output_tokens=[21, 5, 1]), block_size=10)
    first, second, third = asks_of(trace)
    assert (first.path, first.end) == ([1, 2, 3, 4], 1)
    assert second.path == [7, 8] and third.path[:4] == [1, 2, 3, 4]
    assert first.marks == ()


def test_turns_are_marks_of_the_next_turn() -> None:
    columns = {"input_tokens": [20, 50], "output_tokens": [11, 1], "chat": [3, 3], "turn": [1, 2]}
    trace = Trace.of(Batch.of([[1, 2], [1, 2, 3, 4, 5]], block_size=10, **columns), block_size=10)
    first, second = asks_of(trace, [[10], [10]])
    assert first.path == [1, 2, 3]
    assert second.marks == (1, 2, 3)


def test_a_message_of_a_session_begins_where_its_tokens_jump() -> None:
    prompt = [*range(3 * PAGE), *range(1000, 1000 + 2 * PAGE)]
    assert ask_of(prompt, [5]).marks == (3,)


@pytest.mark.parametrize("name", SESSIONS)
def test_more_slots_have_more_hits(name: str) -> None:
    ((_, _, asks),) = workloads(Settings(sessions=(name,), generated=(), requests=150))
    few, many = (found(Ours(slots), asks) for slots in (10, 400))
    assert 0 < few < many < 100


def test_cells_are_judged_by_the_worst_and_the_mean() -> None:
    cells = [{"marks": 50.0, "earlier": 50.4, "marconi": 40.0}, {"marks": 60.0, "earlier": 50.0, "marconi": 60.6}]
    goals = {goal["what"]: (round(goal["measured"], 3), goal["met"]) for goal in judge(cells)}
    assert goals == {
        "states: hits below earlier at worst": (0.4, True),
        "states: hits below earlier in the mean": (-4.8, True),
        "states: hits below marconi at worst": (0.6, False),
        "states: hits below marconi in the mean": (-4.7, True),
    }


def test_a_run_has_a_row_for_each_cell() -> None:
    report = Report("states", "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)
    run(Settings(sessions=("100 documents",), generated=("chat",), requests=60, percents=(10,)), report)
    assert [(row["workload"], row["slots"]) for row in report.rows] == [("100 documents", 6), ("generated: chat", 6)]
    assert len(report.more["goals"]) == 4 and len(report.tables) == 1
