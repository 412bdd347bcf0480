"""The benchmark of agents: its workloads are what they say, and its sums are right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import agents
from bench.report import Report
from mainstem.replay.trace import Batch, Trace

SMALL = replace(agents.QUICK, jobs=10, percents=(10,))


def jobs_of(name: str, count: int = 10) -> list[agents.Job]:
    return list(agents.WORKLOADS[name](random.Random(1), count))


@pytest.mark.parametrize("name", agents.WORKLOADS)
def test_every_request_goes_on_from_an_earlier_one_or_begins_anew(name: str) -> None:
    jobs = jobs_of(name)
    assert [job.start_s for job in jobs] == sorted(job.start_s for job in jobs)
    for job in jobs:
        before: list[tuple[int, ...]] = []
        for at, stage in enumerate(job.stages):
            for call in stage:
                goes_on = [whole for whole in before if call.prompt[: len(whole)] == whole]
                assert goes_on or at == 0 or name in ("tree", "workflow")
                assert call.next_s is None or call.next_steps is None
            before += [call.whole for call in stage]
    assert [job.stages[0][0].prompt for job in jobs_of(name)] == [job.stages[0][0].prompt for job in jobs]


def test_an_agent_of_a_workflow_goes_on_from_its_own_last_turn_after_five_steps() -> None:
    (job,) = jobs_of("workflow", 1)
    calls = [stage[0] for stage in job.stages]
    assert len(calls) == 20 and [call.next_steps for call in calls] == [5.0] * 15 + [None] * 5
    for first, second in zip(calls, calls[5:], strict=False):
        assert second.prompt[: len(first.whole)] == first.whole


def test_a_cell_always_has_the_same_result_and_hits_are_those_of_the_cache() -> None:
    jobs = jobs_of("react")
    calls = [call for job in jobs for stage in job.stages for call in stage]
    runs = [agents.serve(SMALL, jobs, 5000, "lru", agents.hinted(calls)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0].calls) == len(calls) and len(runs[0].jobs_s) == len(jobs)
    first = {id(job.stages[0][0]) for job in jobs}
    alone = [hit for call, hit in runs[0].calls if id(call) not in first]
    assert all(alone)  # with room for all, each step finds the one before
    slower = agents.serve(SMALL, jobs, max(len(call.whole) for call in calls) + 2, "lru", {})
    assert slower.hit_rate < runs[0].hit_rate and sum(slower.jobs_s) > sum(runs[0].jobs_s)
    assert 0 < runs[0].saved(SMALL) < 100
    tails, later = runs[0].tails(SMALL), slower.tails(SMALL)
    assert tails["prefill_p50_s"] <= tails["prefill_p90_s"] <= tails["prefill_p99_s"] < tails["first_p99_s"]
    assert later["prefill_p90_s"] > tails["prefill_p90_s"] and later["first_p90_s"] > tails["first_p90_s"]


def test_a_first_token_is_measured_from_the_arrival_and_computed_alone() -> None:
    call = agents.Call((1, 2, 3, 4), 3)
    served = agents.serve(SMALL, [agents.Job(5.0, [[call]]), agents.Job(5.0, [[call]])], 100, "lru", {})
    alone, step = SMALL.seconds(0, 4), SMALL.decode_s
    tails = served.tails(SMALL)
    assert [hit for _, hit in served.calls] == [0, 3]  # the second waits for what the first computes
    assert min(served.first_s) == pytest.approx(alone + step)
    assert max(served.first_s) > min(served.first_s)
    assert tails["prefill_p99_s"] == pytest.approx(float(np.quantile([alone, SMALL.seconds(3, 4)], 0.99)))


def test_wrong_hints_are_those_of_others_or_the_reverse() -> None:
    calls = [agents.Call((1, 2), 1, next_s=seconds) for seconds in (1.0, 60.0, 86_400.0)]
    assert [hints.next_use_s for hints in agents.hinted(calls).values()] == [1.0, 60.0, 86_400.0]
    assert sorted(hints.next_use_s or 0 for hints in agents.shuffled(calls, 1).values()) == [1.0, 60.0, 86_400.0]
    wrong = [hints.next_use_s or 0 for hints in agents.inverted(calls).values()]
    assert wrong == sorted(wrong, reverse=True)


def test_recorded_requests_keep_their_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "some.mstrace"
    Trace.of(Batch.of([[7, 8], [9], [7, 8, 10]])).save(path)
    jobs = agents.recorded(str(path), 2, 0)
    assert [job.stages[0][0].prompt for job in jobs] == [(1, 2), (3,)]
    assert [job.start_s for job in agents.recorded(str(path), 9, 0)] == [0.0, 1.0, 2.0]
    assert [job.start_s for job in agents.recorded(str(path), 2, 1)] == [1.0, 2.0]  # half of them later


def test_the_goals_are_judged_by_the_cells() -> None:
    cell = {"workload": "w", "percent": 5}
    rates = {
        ("lru", ""): 50.0,
        ("lru", "hints"): 57.0,
        ("lru", "shuffled"): 49.9,
        ("lru", "inverted"): 49.5,
        ("optimum", ""): 60.0,
    }
    rates |= {("unlimited", ""): 61.0, ("tail", ""): 49.8, ("mru", ""): 49.6}
    rates |= {("tail", "shuffled"): 49.8, ("mru", "shuffled"): 49.6}
    tails = {("lru", "hints"): 0.3, ("tail", ""): 0.2, ("mru", ""): 0.1, ("unlimited", ""): 0.1}
    rows = [
        {**cell, "policy": policy, "way": way, "hit_rate": rate, "prefill_p90_s": tails.get((policy, way), 0.4)}
        for (policy, way), rate in rates.items()
    ]
    (judged,), goals = agents.judge(rows)
    assert judged["closed"] == {"lru": pytest.approx(70)} and judged["cost"]["lru"] == pytest.approx(0.5)
    assert [(goal["measured"], goal["met"]) for goal in goals[:3]] == [
        (pytest.approx(30), True), (pytest.approx(30), True), (pytest.approx(0.5), False),
    ]  # fmt: skip
    # mru has the shortest tail and too few hits.
    assert judged["tail"] == {"lru with hints": pytest.approx(75), "tail": pytest.approx(50)}
    assert [goal["measured"] for goal in goals[5:]] == [pytest.approx(75)] * 3 + [pytest.approx(50)] * 3
    short = [row | ({"prefill_p90_s": 0.31} if row["policy"] == "unlimited" else {}) for row in rows]
    assert agents.judge(short)[0][0]["tail"] == {}, "no policy can do it there"


def test_a_run_writes_its_rows_and_goals(tmp_path: Path) -> None:
    report = Report("agents", "2026-01-01", quick=True, progress=lambda line: None)
    agents.run(replace(SMALL, workloads=("workflow",), policies=("lru",)), report)
    record = json.loads(report.write(tmp_path).read_text())
    ways = [(row["policy"], row["way"]) for row in record["rows"]]
    bounds = [("optimum", ""), ("unlimited", "")]
    assert ways == [("lru", ""), ("lru", "hints"), ("lru", "shuffled"), ("lru", "inverted"), *bounds]
    assert {goal["unit"] for goal in record["goals"]} <= {"%", "points"} and report.tables


@pytest.mark.slow
def test_a_row_is_the_mean_of_its_seeds() -> None:
    cell = {"workload": "w", "percent": 5, "policy": "lru", "way": "hints"}
    rows = [{**cell, "hit_rate": rate, "won": won} for rate, won in ((40.0, 1), (50.0, 2))]
    assert agents.averaged(rows) == {**cell, "hit_rate": 45.0, "won": 1.5}
    assert agents.averaged(rows[:1]) == rows[0]

    def rates(*seeds: int) -> list[float]:
        report = Report("agents", "2026-01-01", quick=True, progress=lambda line: None)
        agents.run(replace(SMALL, workloads=("workflow",), policies=("lru",), seeds=seeds), report)
        return [row["hit_rate"] for row in report.rows]

    each = [rates(seed) for seed in (0, 1)]
    assert each[0] != each[1]
    assert rates(0, 1) == pytest.approx([sum(both) / 2 for both in zip(*each, strict=True)])
