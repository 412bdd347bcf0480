"""The benchmark of a GPU, rehearsed on the CPU: every part has rows, and one that fails is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.gpu import REHEARSAL, Bench, hardware, run
from bench.report import Report
from tests.rigs.interpreted import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")


def rehearse(**parts: Any) -> tuple[Report, list[int]]:
    report = Report("gpu", "2026-01-01", quick=True, progress=lambda line: None)
    saved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        if parts:
            patch.setattr(Bench, "parts", property(lambda self: parts))
        run(REHEARSAL, report, lambda: saved.append(len(report.more)), triton_attention())
    return report, saved


def test_each_part_has_rows_and_is_saved_when_it_ends() -> None:
    report, saved = rehearse()
    assert report.failures == []
    parts = list(Bench(REHEARSAL, triton_attention()).parts)
    assert list(report.more) == ["hardware", *parts] and all(report.more.values())
    assert saved == list(range(2, 2 + len(parts)))
    assert {row["share"] / row["goal"] >= 1 for row in report.more["copies"] if row["met"]} <= {True}
    assert [row["sharers"] for row in report.more["folding"]] == [1, 2]
    assert all("TritonAttention_s" in row for row in report.more["attention"])
    assert report.more["hardware"] == [hardware("cpu")]


def test_a_part_that_fails_is_named_and_the_others_run() -> None:
    def fails() -> Iterator[dict[str, Any]]:
        yield {"first": 1.0}
        raise RuntimeError("an illegal memory access")

    report, _ = rehearse(broken=fails, whole=lambda: [{"second": 2.0}])
    assert report.failures == ["broken: RuntimeError: an illegal memory access"]
    assert report.more["broken"] == [{"first": 1.0}] and report.more["whole"] == [{"second": 2.0}]
    assert report.notes == ["failed: broken: RuntimeError: an illegal memory access"]
