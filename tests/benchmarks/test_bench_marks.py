"""The benchmark of marks: it serves the same prompts with marks and without, and states are kept at marks."""

from __future__ import annotations

from collections import Counter

import pytest

from bench import marks
from bench.report import Report
from mainstem.runtime.schedule.checkpoints import Reason, plan_checkpoints


def test_each_chat_is_timed_with_its_marks_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: Counter[str] = Counter()

    def counted(*args: object, **given: object) -> dict[int, Reason]:
        planned = plan_checkpoints(*args, **given)  # type: ignore[arg-type]
        reasons.update(planned.values())
        return planned

    monkeypatch.setattr("mainstem.runtime.schedule.waiting.plan_checkpoints", counted)
    report = Report("marks", "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)
    marks.run(marks.Settings(chats=2, turns=2, system=40, turn=40, hidden=32, layers=1), report)
    assert [row["chat"] for row in report.rows] == [0, 1]
    assert all(row["seconds"]["with"] > 0 < row["seconds"]["without"] for row in report.rows)
    assert reasons["mark"] > 0
    (goal,) = report.more["goals"]
    assert goal["measured"] == report.more["slower"] and goal["met"] == (report.more["slower"] <= marks.MOST_SLOWER)
