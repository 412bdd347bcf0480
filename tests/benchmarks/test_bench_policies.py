"""The benchmark of policies: its shapes are true to their names, and its sums are right."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench import policies, random_shapes, shapes
from bench.report import Report
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Batch, Trace


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_loops_go_round() -> None:
    assert shapes.loop(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_twice_is_twice_and_a_gap_apart() -> None:
    wanted = shapes.twice(1001, 10).tolist()
    assert wanted[:15] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 11, 1, 12]
    uses = Counter(wanted)
    assert set(uses.values()) == {1, 2}
    assert sum(count == 1 for count in uses.values()) <= 11  # those at the end


def test_popular_items_follow_zipfs_law() -> None:
    counts = np.bincount(shapes.popular(rng(), 100_000, 50, 1.0), minlength=50)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert len(counts) == 50


def test_recent_items_are_more_likely() -> None:
    wanted = shapes.recent(rng(), 20_000, 0.1).tolist()
    assert len(set(wanted)) / len(wanted) == pytest.approx(0.1, rel=0.1)
    near = sum(a == b for a, b in pairwise(wanted))
    far = sum(a == b for a, b in zip(wanted, wanted[50:], strict=False))
    assert near > 3 * far


def test_new_items_come_once_one_by_one_or_in_a_row() -> None:
    loop = shapes.loop(1000, 10)
    flooded, scanned = shapes.flooded(rng(), loop, 0.3), shapes.scanned(loop, 100, 20)
    for wanted, share in ((flooded, 0.3), (scanned, 0.2)):
        new = wanted >= 10
        assert new.mean() == pytest.approx(share, abs=0.05)
        assert np.unique(wanted[new]).size == new.sum()
    assert (scanned[:100] >= 10).tolist() == [False] * 80 + [True] * 20


def test_changed_items_share_nothing_with_earlier_ones() -> None:
    renewed = shapes.renewed(shapes.loop(9, 3), 3)
    assert renewed.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    turns = shapes.in_turns(shapes.loop(4, 3), shapes.loop(4, 2), 2)
    assert turns.tolist() == [0, 1, 3, 4, 2, 0, 3, 4]


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_follows_from_its_seed(name: str) -> None:
    one, again, other = (shapes.shape(name, 600, seed=seed).whole for seed in (1, 1, 2))
    assert len(one) == 600
    assert one.blocks.tolist() == again.blocks.tolist() != other.blocks.tolist()
    depth_of = dict(zip(one.blocks.tolist(), one.depths.tolist(), strict=True))
    assert [depth_of[block] for block in one.blocks.tolist()] == one.depths.tolist()


def test_cells_equal_replays() -> None:
    trace = Trace.of(Batch.of([[item, item + 100] for item in shapes.loop(60, 10).tolist()]))
    cells = policies.measure("a loop", lambda: trace, ["mru", "fifo"], (1, 25, 100))
    assert [(cell["policy"], cell["capacity_blocks"]) for cell in cells] == [
        (policy, capacity) for capacity in (5, 20) for policy in ("lru", "mru", "fifo")
    ]
    lru, mru, fifo, *whole = cells
    assert lru["gain"] == lru["closed"] == fifo["gain"] == 0
    assert mru["hit_rate"] == mru["gain"] == 100 * replay(trace, "mru", 5).block_hit_rate > 10
    assert 80 < mru["closed"] <= 100
    assert all(cell["gain"] == 0 and cell["closed"] is None for cell in whole)  # there is no gap


def test_summaries_have_means_ends_and_cost() -> None:
    def cell(policy: str, workload: str, gain: float, closed: float | None, cpu_s: float) -> policies.Row:
        own = {"policy": policy, "workload": workload, "percent": 5, "gain": gain, "closed": closed}
        return own | {"cpu_s": cpu_s, "lru_cpu_s": 2.0}

    cells = [cell("gittins", "one", -0.5, -5.0, 3.0), cell("gittins", "two", 2.5, 15.0, 5.0)]
    (row,) = policies.summarise([*cells, cell("gittins", "three", 1.0, None, 4.0)])
    assert (row["closed"], row["gain"], row["cost"]) == (5.0, 1.0, 2.0)
    assert row["worst"] == {"gain": -0.5, "workload": "one", "percent": 5}
    assert row["best"]["workload"] == "two"
    assert [goal["met"] for goal in policies.judge([row])] == [False, True]
    assert policies.judge([row | {"policy": "arc"}]) == []


def test_a_run_writes_a_row_a_policy_and_every_cell(tmp_path: Path) -> None:
    trace = shapes.shape("loop", 300)
    trace.save(tmp_path / "mine.mstrace")
    settings = policies.Settings(
        percents=(10, 50), policies=("lru", "arc"), accesses=2000, generated=("chat", "mix"), shapes=("loop",),
        traces=(str(tmp_path / "mine.mstrace"),), workers=2,
    )  # fmt: skip
    report = Report("policies", "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)
    policies.run(settings, report)
    written = json.loads(report.write(tmp_path).read_text())
    assert [row["policy"] for row in written["rows"]] == ["lru", "arc"]
    names = ["mine.mstrace", "chat", "mix", "loop"]
    assert [cell["workload"] for cell in written["cells"]] == [name for name in names for _ in range(4)]
    assert report.tables[0].row_count == 2


def test_generated_workloads_have_about_the_requested_length() -> None:
    for name, make in policies.workloads(policies.Settings(accesses=20_000, shapes=())):
        assert 10_000 < len(make().whole.blocks) < 40_000, name


def test_random_workloads_follow_from_their_seed() -> None:
    seeds = range(6)
    made = [random_shapes.workload(seed) for seed in seeds]
    again = [random_shapes.workload(seed) for seed in seeds]
    assert [words for _, words in made] == [words for _, words in again]
    assert all(np.array_equal(a.whole.blocks, b.whole.blocks) for (a, _), (b, _) in zip(made, again, strict=True))
    assert len({words for _, words in made}) == len(made)
    assert all(10_000 < len(trace.whole.blocks) < 400_000 for trace, _ in made)


def test_a_policy_is_compared_with_lru() -> None:
    own = random_shapes.cells("lru", 4)
    assert own and {cell.gain for cell in own} == {0}
    assert min(cell.gain for cell in random_shapes.cells("mru", 4)) < -1
