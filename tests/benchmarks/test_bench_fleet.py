"""The benchmark of routers: one cache is the measure, each rule does what its name says, and its sums are right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import fleet, routers
from bench.report import Report
from mainstem.replay.trace import Batch, Trace

PATHS = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3, 7], [5, 6, 8]]


def requests(paths: list[list[int]] = PATHS, seconds: float = 10.0) -> fleet.Requests:
    batch = Batch.of(paths, time_s=[seconds * i for i in range(len(paths))], input_tokens=[4 * len(p) for p in paths])
    return fleet.read(Trace.of(batch, block_size=4))


def blocks(*path: int) -> routers.Blocks:
    return np.array(path, np.int32)


def test_one_cache_finds_the_longest_prefixes_but_never_the_last_block() -> None:
    assert fleet.found_by_one(requests(), 100) == [0, 8, 0, 12, 8]
    assert sum(fleet.found_by_one(requests(), 4)) < 28


def test_the_speed_keeps_the_fleet_busy_for_its_share() -> None:
    asked = requests()
    speed = fleet.speed_of(asked, [0] * len(PATHS), 2, 0.6)
    work_s = sum(speed.seconds(len(path), 0) for path in PATHS)
    assert work_s == pytest.approx(0.6 * 2 * 40)


@pytest.mark.parametrize("name", sorted(set(fleet.ROUTERS) - {"power of two", "dynamo"}))
def test_a_replay_with_one_replica_hits_what_one_cache_hits(name: str) -> None:
    asked = requests(seconds=1000)
    speed = fleet.Speed(0.01, 0.0)
    row = fleet.replay(asked, name, 1, 100, speed, 0)
    assert row["hit_tokens"] == sum(fleet.found_by_one(asked, 100))
    assert row["balance"] == 1.0
    assert row["first_s"] == pytest.approx(0.01 * (3 + 1 + 2 + 1 + 1) / 5)


def test_ours_sends_a_prefix_where_it_is_and_round_robin_does_not() -> None:
    asked = requests([[1, 2, 3, i] for i in range(10, 30)], 1000)
    found = {name: fleet.replay(asked, name, 4, 100, fleet.Speed(0.01, 0.0), 0) for name in ("ours", "round robin")}
    assert found["ours"]["hit_tokens"] == 19 * 12
    assert found["round robin"]["hit_tokens"] == 16 * 12


def test_queues_make_requests_wait() -> None:
    asked = requests([[i] for i in range(1, 6)], 0.0)
    row = fleet.replay(asked, "round robin", 1, 100, fleet.Speed(1.0, 0.0), 0)
    assert row["first_s"] == pytest.approx(3.0)


def test_the_hash_keeps_first_blocks_together() -> None:
    ring = routers.ConsistentHash(8)
    assert len({ring.choose(blocks(3, i)) for i in range(20)}) == 1
    assert len({ring.choose(blocks(i)) for i in range(100)}) == 8


def test_cache_aware_follows_prefixes_while_queues_are_alike() -> None:
    now_s = 0.0
    rule = routers.CacheAware(3, lambda: now_s, 512)
    first = rule.choose(blocks(1, 2, 3, 4))
    assert rule.choose(blocks(1, 2, 3, 5)) == first
    second = rule.choose(blocks(1, 7, 8, 9))  # a quarter is below the threshold: where the least was sent
    assert second != first
    for _ in range(routers.BALANCE_ABS - 1):  # two are there; the third replica has none
        assert rule.choose(blocks(1, 2, 3, 4)) == first
    assert rule.choose(blocks(1, 2, 3, 4)) != first  # the shortest queue


def test_cache_aware_drops_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "MAX_TREE_TOKENS", 4)
    now_s = 0.0
    rule = routers.CacheAware(2, lambda: now_s, 1)
    first = rule.choose(blocks(1, 2, 3, 4))
    now_s = routers.EVICTION_S
    assert rule.choose(blocks(5, 6, 7, 8)) != first
    assert rule.choose(blocks(1, 2, 3, 9)) == first
    now_s *= 2
    rule.ended(first)
    rule.choose(blocks(90, 91))  # evicts, down to four of each
    assert sum(first in seen for seen in rule._tree.values()) <= 4 + 2


def test_the_whole_benchmark_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_ROUTERS_PYTHON", str(tmp_path / "python"))
    report = Report("fleet", "2026-01-01", True, progress=lambda line: None)
    small = replace(
        fleet.QUICK,
        replicas=(2,),
        requests=60,
        blocks=600,
        workers=4,
        tokens=256,
        decisions=20,
        parts=("routers", "decision"),
    )
    fleet.run(small, report)
    written = json.loads(report.write(tmp_path).read_text())
    assert {row["router"] for row in written["rows"]} == set(fleet.ROUTERS) - {"dynamo"}
    assert len(written["rows"]) == 2 * (len(fleet.ROUTERS) - 1)
    assert [note for note in written["notes"] if "`make .venv-routers/ready`" in note] == written["notes"]
    assert len(written["notes"]) == 1
    assert all(0 <= row["share"] <= 110 and row["balance"] >= 1 for row in written["rows"])
    assert [goal["goal"] for goal in written["goals"]] == [95, 1.3, 50]
    (decision,) = written["decision"]
    assert decision["blocks"] >= 600 and 0 < decision["p50_us"] <= decision["p99_us"]
    assert report.tables


def test_a_part_alone_is_judged_alone() -> None:
    report = Report("fleet", "2026-01-01", True, progress=lambda line: None)
    fleet.run(replace(fleet.QUICK, blocks=600, workers=4, tokens=256, decisions=20, parts=("decision",)), report)
    assert [goal["goal"] for goal in report.more["goals"]] == [50] and not report.rows
