"""The benchmark of attention: its rows follow from the clock, and its requests share what they say."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from bench import attention
from bench.attention import Settings, Shape
from bench.report import Report


def run(*shapes: Shape, **changes: Any) -> Report:
    report = Report("attention", "2026-01-01", quick=True, progress=lambda line: None)
    ticks = count()
    settings = Settings(shapes=shapes, page_sizes=(4,), dtypes=("float32",), layers=2, rounds=2, **changes)
    attention.run(settings, report, clock=lambda: float(next(ticks)))
    return report


def test_each_shape_is_a_ratio_of_two_times() -> None:
    report = run(Shape(2, 8, 5), Shape(1, 0, 3, 2))
    assert [row["shape"] for row in report.rows] == [
        "2 behind 8, 5 own, decode",
        "1 sharing nothing, 3 own, 2 new tokens",
    ]
    for row in report.rows:
        assert (row["folded_s"], row["by_request_s"]) == (1.0, 1.0)
        assert row["lowest"] == row["ratio"] == row["highest"] == 1.0
    assert report.tables


@pytest.mark.parametrize(("shape", "shared"), [(Shape(3, 8, 5), 2), (Shape(3, 0, 5, 4), 0)], ids=str)
def test_tables_of_a_shape_share_its_prefix_and_nothing_else(
    shape: Shape, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[list[int]] = []

    class _Watching:
        def attend(self, layer: int, query: torch.Tensor, *others: Any) -> torch.Tensor:
            plan = others[-1]
            tables[:] = [extent.page_table.tolist() for extent in plan.extents]
            assert all(extent.end == shape.shared + shape.own + shape.new for extent in plan.extents)
            assert query.shape == (shape.requests * shape.new, 9, 64)
            return query

    monkeypatch.setattr(attention, "_KERNELS", dict.fromkeys(("folded", "by_request"), _Watching()))
    run(shape)
    assert all(table[:shared] == list(range(shared)) for table in tables)
    own = [page for table in tables for page in table[shared:]]
    assert len({*own}) == len(own) and {*own}.isdisjoint(range(shared))


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    run(Shape(1, 0, 3))
    assert torch.get_num_threads() == before
