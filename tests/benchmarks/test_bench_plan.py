"""The benchmark of the planner's estimate: its rows follow from FLOPs and the clock."""

from __future__ import annotations

from itertools import count

import pytest

from bench import plan
from bench.report import Report


def test_each_prefill_is_compared_with_its_estimate() -> None:
    report = Report("plan", "2026-01-01", quick=True, progress=lambda line: None)
    ticks = count()
    settings = plan.Settings(prompts=((48, 0), (24, 0), (24, 24)), layers=1, rounds=1)
    plan.run(settings, report, clock=lambda: float(next(ticks)))
    assert [(row["tokens"], row["past"]) for row in report.rows] == list(settings.prompts)
    assert [row["measured_s"] for row in report.rows] == [1.0] * 3
    yardstick, half, rest = report.rows
    assert yardstick["ratio"] == 1
    assert half["predicted_s"] == pytest.approx(half["flops"] / yardstick["flops"])
    assert half["flops"] < rest["flops"], "the same tokens see more"
    assert report.tables and report.notes
