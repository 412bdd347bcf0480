"""The contents of a replay's charts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mainstem.replay.info import info
from mainstem.replay.report import series
from mainstem.replay.simulate.rows import Timeline
from mainstem.replay.simulate.sweep import replay, sweep
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup

BLOCKS = [[turn % 3, 10 + turn % 6, 100 + 30 * (turn * turn % 7) + turn % 30] for turn in range(300)]
TRACE = Trace.of(Batch.of(BLOCKS, block_size=1), block_size=1, name="small")


def test_spans_are_merged_and_nothing_is_lost() -> None:
    timeline = Timeline(2.0, tuple(range(130)), tuple(at // 2 for at in range(130)))
    merged = series.merged(timeline)
    assert merged.width_s == 6.0 and len(merged.block_accesses) == 44
    assert sum(merged.block_accesses) == sum(timeline.block_accesses)
    assert sum(merged.block_hits) == sum(timeline.block_hits)
    assert series.merged(merged) == merged


def test_a_span_without_requests_has_no_rate() -> None:
    assert series.rates(Timeline(4.0, (10, 0, 4), (5, 0, 4))) == [(2.0, 0.5), (6.0, None), (10.0, 1.0)]


def test_the_lru_curve_meets_the_replay() -> None:
    found = info(TRACE)
    rows = [replay(TRACE, "lru", reuse.high) for reuse in found.reuses]
    curve = dict(series.lru_curve(found, rows))
    for row in rows:
        assert curve[row.capacity_blocks] == pytest.approx(row.block_hit_rate)


@pytest.mark.parametrize("setup", [Setup(replicas=2), Setup(host_blocks=100), Setup(ttl=5.0)])
def test_the_lru_curve_is_of_one_cache(setup: Setup) -> None:
    assert series.lru_curve(info(TRACE), [replay(TRACE, "lru", 10, setup=setup)]) == []


def test_curves_go_by_capacity() -> None:
    rows = sweep(TRACE, ["lru", "opt"], [40, 10, 20])
    blocks = series.measures(info(TRACE), rows)[0]
    for policy in ("lru", "opt"):
        points = series.curve(rows, policy, blocks)
        assert [x for x, _ in points] == [10, 20, 40]
        assert {y for _, y in points} == {row.block_hit_rate for row in rows if row.policy == policy}
    assert list(series.by_capacity(rows)) == [10, 20, 40]
    assert series.domain(rows) == pytest.approx((10 / 1.5, 40 * 1.5))


def test_shares_of_tiers_are_one() -> None:
    row = replay(TRACE, "lru", 5, setup=Setup(host_blocks=20))
    shares = series.tier_shares(row)
    assert [name for name, _ in shares] == ["device", "host", "computed"]
    assert sum(share for _, share in shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("blocks", "distinct", "written"),
    [
        (439, 43_924, "1 %"),
        (125, 1000, "12.5 %"),
        (1, 1_000_000, "0.0001 %"),
        (3000, 1000, "300 %"),
        (1, 0, "100 %"),
        (123, 100_000, "0.1 %"),
        (94, 100_000, "0.094 %"),
    ],
)
def test_a_capacity_as_a_share(blocks: int, distinct: int, written: str) -> None:
    assert series.marked(blocks, replace(info(TRACE), distinct_blocks=distinct)) == written


@pytest.mark.parametrize(
    ("span_s", "unit"),
    [(0.0, "s"), (179.0, "s"), (180.0, "min"), (3600.0, "min"), (10_800.0, "h"), (20_000.0, "h"), (1e6, "days")],
)
def test_times_are_in_a_unit_that_fits(span_s: float, unit: str) -> None:
    assert series.time_unit(span_s)[1] == unit


def test_distances_have_a_place_for_none_and_one_for_each_doubling() -> None:
    assert [series.doublings(distance) for distance in (0, 1, 2, 1024)] == [0, 1, 2, 11]
    assert next(text for _, text in series.decades(info(TRACE))) == "1"
