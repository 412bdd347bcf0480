"""The offline optimum against every possible choice of evictions."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
from rigs.replays import Path, prefixes

from mainstem.errors import BadArgument
from mainstem.replay.simulate.optimum import Optimum
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup


def best_hits(paths: list[Path], capacity: int) -> int:
    """Returns the most hits of any policy, by trying each set of blocks that may be kept after each request."""

    def rooted(kept: frozenset[Path]) -> bool:
        return all(len(path) == 1 or path[:-1] in kept for path in kept)

    @cache
    def most(request: int, cached: frozenset[Path]) -> int:
        if request == len(paths):
            return 0
        own = prefixes(paths[request])
        hits = sum(prefix in cached for prefix in own)
        there = cached.union(own)
        kept = map(frozenset, combinations(sorted(there), min(capacity, len(there))))
        return hits + max(most(request + 1, choice) for choice in kept if rooted(choice))

    return most(0, frozenset())


def small_paths(choose: random.Random) -> list[Path]:
    width, depth = choose.randrange(1, 4), choose.randrange(1, 4)
    requests = choose.randrange(2, 9)
    return [tuple(choose.randrange(width) for _ in range(choose.randrange(1, depth + 1))) for _ in range(requests)]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_beats_it_on_small_trees(seed: int) -> None:
    choose = random.Random(seed)
    worse = 0
    for _ in range(150):
        paths = small_paths(choose)
        trace = Trace.of(Batch.of(paths))
        capacity = choose.randrange(1, 5)
        best = Optimum(trace).replay(capacity).block_hits
        assert best == best_hits(paths, capacity), (paths, capacity)
        worse += replay(trace, "lru", capacity).block_hits < best
    assert worse > 15  # otherwise the trees are too easy to distinguish them


def test_a_block_is_evicted_only_after_those_below_it() -> None:
    """Blocks 1 to 3 are reused at the same time, so the choice among them makes all the difference."""
    optimum = Optimum(Trace.of(Batch.of([[1, 2, 3], [4], [4], [1, 2, 3], [1, 5], [1, 2]])))
    assert optimum.hit_blocks(3).tolist() == [0, 0, 1, 2, 1, 2]
    assert optimum.hit_blocks(2).tolist() == [0, 0, 1, 1, 1, 2]
    assert optimum.hit_blocks(1).tolist() == [0, 0, 1, 0, 1, 1]


def test_a_block_is_kept_until_its_last_use_and_no_longer() -> None:
    """Prompts of one block each, as in Belady's setting: 1 is reused before 2, 2 before 3, and 3 before 4."""
    optimum = Optimum(Trace.of(Batch.of([[1], [2], [3], [4], [1], [2], [3], [4]])))
    assert optimum.hit_blocks(2).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert optimum.hit_blocks(3).tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert [optimum.replay(capacity).evicted_blocks for capacity in (1, 2, 3, 4)] == [6, 4, 2, 0]


def test_no_policy_beats_it() -> None:
    choose = random.Random(7)
    for _ in range(20):
        paths = [tuple(choose.randrange(3) for _ in range(choose.randrange(1, 8))) for _ in range(80)]
        trace = Trace.of(Batch.of(paths))
        optimum = Optimum(trace)
        before = 0
        for capacity in (1, 3, 10, 40, 1000):
            best = optimum.replay(capacity)
            for policy in ("lru", "lfu", "fifo", "mru", "filo", "slru"):
                row = replay(trace, policy, capacity)
                assert row.block_hits <= best.block_hits
                assert (row.block_accesses, row.input_tokens) == (best.block_accesses, best.input_tokens)
            assert best.block_hits >= before
            before = best.block_hits
        assert before == replay(trace, "lru", 1000).block_hits


def test_a_row_by_hand() -> None:
    batch = Batch.of([[1, 2], [3], [1, 2], [3]], block_size=4, input_tokens=[7, 4, 7, 4])
    row = Optimum(Trace.of(batch, block_size=4)).replay(2, flops=lambda tokens, past: tokens + 0.0)
    # Keep 1 and 3, or 1 and 2: either way two blocks are hit, and one prompt in full.
    assert (row.policy, row.block_hits, row.evicted_blocks) == ("opt", 2, 2)
    assert row.tiers[0].written_blocks == 4
    slow = Optimum(Trace.of(batch, block_size=4)).replay(2, setup=Setup(prefill_rate=1))
    assert slow.ttft_p50_s == pytest.approx(1e4 * row.ttft_p50_s) and 1 < slow.ttft_p50_s < 7
    assert (row.prefill_flops, row.saved_flops) == (22.0, row.token_hits - 1.0)  # one token of a full hit is computed


def test_equal_names_on_other_paths_are_other_blocks() -> None:
    trace = Trace.of(Batch.of([[1, 2], [3, 2], [1, 2]]))
    assert Optimum(trace).replay(10).block_hits == 2


def test_capacity_is_checked() -> None:
    with pytest.raises(BadArgument):
        Optimum(Trace.of(Batch.of([[1]]))).replay(0)


def test_an_empty_trace() -> None:
    assert Optimum(Trace.of(Batch.of([[]]))).replay(3).block_hit_rate == 0.0
