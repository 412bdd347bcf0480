"""Replay: real trees against an obvious model of the same rules, block by block."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.replays import Path, prefixes, some_paths

from mainstem import _core
from mainstem.cache.keys import HashKeys
from mainstem.cache.policies import BUILT_IN, NodeStats
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument
from mainstem.replay.simulate.rows import median_below
from mainstem.replay.simulate.sweep import hit_blocks, parse_capacities, parse_tiers, replay, sweep, tiers_of
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup

ALONE: tuple[int, tuple[float, float, float, float, float | None], int] = (1, (0.0, 0.0, 0.0, 0.0, None), 1)

# Ranks by creation, hits and last use of a block, in requests.
RULES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "lru": lambda created, hits, used: (used,),
    "lfu": lambda created, hits, used: (hits, used),
    "fifo": lambda created, hits, used: (created,),
    "mru": lambda created, hits, used: (-used,),
    "filo": lambda created, hits, used: (-created,),
    "slru": lambda created, hits, used: (hits >= 2, used),
    "priority": lambda created, hits, used: (used,),
}


class Block:
    def __init__(self, created: int) -> None:
        self.created = created
        self.hits = 0
        self.used = created
        self.used_s = 0.0


class Model:
    """A cache as sets of paths, one per tier. Every operation searches everything."""

    def __init__(self, policy: str, capacities: Sequence[int], ttl_s: float = math.inf) -> None:
        self.rule = RULES[policy]
        self.capacities = capacities
        self.ttl_s = ttl_s
        self.blocks: dict[Path, Block] = {}
        self.tiers: list[dict[Path, int]] = [{} for _ in capacities]  # when a block arrived, in accesses
        self.used: dict[Path, int] = {}
        self.hits = [0] * len(capacities)
        self.written = [0] * len(capacities)
        self.loaded = [0] * len(capacities)
        self.evicted = [0] * len(capacities)
        self.expired = [0] * len(capacities)
        self.ages: list[Counter[int]] = [Counter() for _ in capacities]
        self.idle: list[Counter[int]] = [Counter() for _ in capacities]
        self.requests = 0
        self.accesses = 0

    def serve(self, time_s: float, path: Path) -> int:
        self.expire(time_s)
        self.requests += 1
        self.accesses += len(path)
        names = prefixes(path)
        held = [sum(prefix in tier for prefix in names) for tier in self.tiers]
        found = max(held)
        self.count(held, len(path))
        for prefix in names[:found]:
            self.blocks[prefix].hits += 1
        for prefix in names:
            block = self.blocks.setdefault(prefix, Block(self.requests))
            block.used, block.used_s = self.requests, time_s
            self.used[prefix] = self.accesses
            for tier in self.tiers:
                tier.setdefault(prefix, self.accesses)
        for number in range(len(self.tiers)):
            self.trim(number)
        return found

    def count(self, held: list[int], n: int) -> None:
        for tier, own in enumerate(held):
            best = max(held[: tier + 1])
            self.hits[tier] += best - max([0, *held[:tier]])
            self.loaded[tier] += max(held) - best
            self.written[tier] += n - max(held) + best - own

    def trim(self, number: int) -> None:
        tier = self.tiers[number]
        while len(tier) > self.capacities[number]:
            inner = {path[:-1] for path in tier}
            leaves = [path for path in tier if path not in inner]
            victim = min(
                leaves, key=lambda p: self.rule(self.blocks[p].created, self.blocks[p].hits, self.blocks[p].used)
            )
            self.ages[number][(self.accesses - tier[victim]).bit_length()] += 1
            self.idle[number][(self.accesses - self.used[victim]).bit_length()] += 1
            self.evicted[number] += 1
            self.drop(number, victim)

    def expire(self, time_s: float) -> None:
        for number, tier in enumerate(self.tiers):
            for path in [path for path in tier if time_s - self.blocks[path].used_s > self.ttl_s]:
                self.expired[number] += 1
                self.drop(number, path)

    def drop(self, number: int, path: Path) -> None:
        del self.tiers[number][path]
        if not any(path in tier for tier in self.tiers):
            del self.blocks[path]


def some_trace(seed: int, block_size: int = 4, **columns: Any) -> tuple[Trace, list[Path], list[float]]:
    choose = random.Random(seed)
    paths = some_paths(seed, 60)
    times = [0.0]
    for _ in paths[1:]:
        times.append(times[-1] + choose.choice([0.0, 0.5, 1.0, 3.25]))
    tokens = [len(path) * block_size - choose.randrange(block_size) for path in paths]
    batch = Batch.of(paths, block_size=block_size, time_s=times, input_tokens=tokens, **columns)
    return Trace.of(batch, block_size=block_size, name="some"), paths, times


def histogram(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[i] for i in range(max(counts, default=-1) + 1))


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("seed", range(8))
def test_each_policy_does_what_the_model_does(policy: str, seed: int) -> None:
    trace, paths, times = some_trace(seed)
    for capacity in (1, 2, 5, 11, 30, 1000):
        model = Model(policy, [capacity])
        found = [model.serve(time, path) for time, path in zip(times, paths, strict=True)]
        row = replay(trace, policy, capacity)
        tokens = sum(min(hit * 4, int(n)) for hit, n in zip(found, trace.whole.input_tokens, strict=True))
        assert (row.block_hits, row.token_hits) == (sum(found), tokens)
        assert hit_blocks(trace, policy, capacity).tolist() == found
        tier = row.tiers[0]
        assert (tier.written_blocks, tier.evicted_blocks) == (model.written[0], model.evicted[0])
        assert (tier.age_accesses, tier.idle_accesses) == (histogram(model.ages[0]), histogram(model.idle[0]))
        assert sum(tier.age_s) == sum(tier.idle_s) == row.evicted_blocks
        assert row.block_accesses - row.block_hits - row.evicted_blocks == len(model.tiers[0])


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "slru"])
@pytest.mark.parametrize("seed", range(6))
def test_tiers(policy: str, seed: int) -> None:
    trace, paths, times = some_trace(seed)
    for sizes in ((2, 5), (3, 9, 20), (1, 2, 3), (5, 5, 1000)):
        model = Model(policy, sizes)
        for time, path in zip(times, paths, strict=True):
            model.serve(time, path)
        row = replay(trace, policy, sizes[0], setup=Setup(*sizes[1:]), bytes_per_token=10)
        assert [tier.block_hits for tier in row.tiers] == model.hits
        assert [tier.loaded_blocks for tier in row.tiers] == model.loaded
        assert [tier.written_blocks for tier in row.tiers] == model.written
        assert [tier.evicted_blocks for tier in row.tiers] == model.evicted
        assert [tier.age_accesses for tier in row.tiers] == list(map(histogram, model.ages))
        assert row.block_hits == sum(model.hits)
        assert row.token_hits == sum(tier.token_hits for tier in row.tiers)
        assert [tier.loaded_bytes for tier in row.tiers] == [blocks * 40 for blocks in model.loaded]
        assert [tier.written_bytes for tier in row.tiers] == [blocks * 40 for blocks in model.written]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru"])
@pytest.mark.parametrize("seed", range(6))
def test_time_to_live(policy: str, seed: int) -> None:
    trace, paths, times = some_trace(seed)
    for ttl, sizes in ((0.0, (20,)), (0.5, (20,)), (3.25, (8,)), (6.0, (1000,)), (2.0, (3, 9)), (9.0, (4, 9, 30))):
        model = Model(policy, sizes, ttl)
        for time, path in zip(times, paths, strict=True):
            model.serve(time, path)
        row = replay(trace, policy, sizes[0], setup=Setup(*sizes[1:], ttl=ttl))
        assert [tier.block_hits for tier in row.tiers] == model.hits, (ttl, sizes)
        assert [tier.expired_blocks for tier in row.tiers] == model.expired
        assert [tier.evicted_blocks for tier in row.tiers] == model.evicted
        assert row.ttl_s == ttl


@pytest.mark.parametrize("policy", BUILT_IN)
def test_every_policy_supports_a_time_to_live(policy: str) -> None:
    trace, paths, times = some_trace(2)
    endless = Model("lru", [1000], 3.0)  # without evictions, all policies have the same hits
    for time, path in zip(times, paths, strict=True):
        endless.serve(time, path)
    row = replay(trace, policy, 1000, setup=Setup(ttl=3.0))
    assert (row.block_hits, row.tiers[0].expired_blocks) == (endless.hits[0], endless.expired[0])
    for ttl, sizes in ((0.0, (20,)), (3.0, (6,)), (2.0, (3, 9)), (9.0, (4, 9, 30))):
        row = replay(trace, policy, sizes[0], setup=Setup(*sizes[1:], ttl=ttl, replicas=2, routing="hash"))
        for tier in row.tiers:
            stay = tier.written_blocks + tier.loaded_blocks - tier.evicted_blocks - tier.expired_blocks
            assert 0 <= stay <= 2 * tier.capacity_blocks


class Recent:
    """Least recently used, in Python."""

    name = "recent"

    def rank(self, node: NodeStats) -> tuple[float, float]:
        return (node.last_access, 0)


def test_a_policy_in_python_is_used() -> None:
    trace, _, _ = some_trace(3)
    for setup in (Setup(), Setup(host_blocks=9), Setup(ttl=3.0), Setup(replicas=2)):
        ours, built_in = replay(trace, Recent(), 5, setup=setup), replay(trace, "lru", 5, setup=setup)
        assert ours.policy == "recent"
        assert (ours.tiers, ours.replica_requests) == (built_in.tiers, built_in.replica_requests)


def test_each_replica_has_a_policy_of_its_own() -> None:
    class Counting:
        name = "counting"

        def __init__(self) -> None:
            self.ranked = 0

        def rank(self, node: NodeStats) -> tuple[float, float]:
            self.ranked += 1
            calls.append(self.ranked)
            return node.last_access, 0

    calls: list[int] = []
    trace = Trace.of(Batch.of([[number] for number in range(30)]))
    row = replay(trace, Counting(), 1, setup=Setup(replicas=3, routing="round-robin"))
    assert (row.evicted_blocks, row.routing) == (27, "round-robin")
    assert calls.count(1) == 3
    assert replay(trace, "lru", 1, setup=Setup(routing="hash")).routing == "", "one replica has no routing"


def test_the_error_of_a_policy_is_raised() -> None:
    class Broken:
        name = "broken"

        def rank(self, node: NodeStats) -> tuple[float, float]:
            raise ZeroDivisionError

    trace, _, _ = some_trace(1)
    with pytest.raises(BadArgument, match=r"Broken\.rank raised ZeroDivisionError"):
        replay(trace, Broken(), 5)
    with pytest.raises(BadArgument, match=r"Broken\.rank raised ZeroDivisionError"):
        sweep(trace, ["lru", Broken()], [5, 6])


# --- replicas -----------------------------------------------------------------------------------------------------


def test_round_robin_is_several_independent_caches() -> None:
    trace, paths, times = some_trace(5)
    models = [Model("lru", [6]) for _ in range(3)]
    hits = sum(models[i % 3].serve(times[i], path) for i, path in enumerate(paths))
    row = replay(trace, "lru", 6, setup=Setup(replicas=3, routing="round-robin"))
    assert (row.block_hits, row.evicted_blocks) == (hits, sum(model.evicted[0] for model in models))
    assert row.replica_requests == (20, 20, 20)


def test_by_hash_prompts_with_the_same_beginning_share_a_replica() -> None:
    trace, paths, _ = some_trace(5)
    infinite = replay(trace, "lru", 1000)
    row = replay(trace, "lru", 1000, setup=Setup(replicas=3, routing="hash"))
    assert row.block_hits == infinite.block_hits
    assert len(row.replica_requests) == 3
    assert sum(row.replica_requests) == len(paths)


def test_by_prefix_the_longest_wins_and_then_the_least_loaded() -> None:
    batch = Batch.of(
        [[1, 2], [3], [1, 5], [3, 1, 2], [7], [8]],
        time_s=[0, 0, 1, 2, 3, 3],
        input_tokens=[200, 100, 200, 300, 100, 100],
    )
    replay_of = _core.Replay(
        [Tree(1, HashKeys(8)).core for _ in range(2)], [100], math.inf, "prefix", [None, None], *ALONE
    )
    tokens = batch.input_tokens.copy()
    hits, replicas, _, _ = replay_of.feed(batch.time_s, tokens, batch.offsets, batch.blocks)
    #        idle: 0   1: less   prefix  prefix  0 and 1 have 400: the first, then the other
    assert replicas.tolist() == [0, 1, 0, 1, 0, 1]
    assert hits.tolist() == [0, 0, 1, 1, 0, 0]


def test_by_prefix_busy_replicas_are_skipped() -> None:
    same = [[1, 10 + i] for i in range(66)]  # all begin alike
    for requests, served in ((65, (65, 0)), (66, (65, 1))):
        batch = Batch.of(same[:requests], time_s=[0.0] * requests)
        assert replay(Trace.of(batch), "lru", 99, setup=Setup(replicas=2)).replica_requests == served


def test_by_prefix_one_and_a_half_times_the_mean_is_not_busy_yet() -> None:
    others = [[1000 + i] for i in range(200)]  # 100 for each replica, so that 32 more do not decide
    for requests, served in ((201, (301, 100)), (202, (301, 101))):
        batch = Batch.of(others + [[1]] * requests, time_s=[0.0] * (200 + requests))
        assert replay(Trace.of(batch), "lru", 999, setup=Setup(replicas=2)).replica_requests == served


def test_by_prefix_less_than_half_does_not_count() -> None:
    prompts = [[1, 10 + i, 20 + i] for i in range(9)]  # all begin alike
    row = replay(Trace.of(Batch.of(prompts, time_s=[0.0] * 9)), "lru", 99, setup=Setup(replicas=3))
    assert row.replica_requests == (3, 3, 3)


class Router:
    """Routes requests by prefix, as `Setup` documents it."""

    def __init__(self, replicas: list[Model]) -> None:
        self.replicas = replicas
        self.loads = [(0.0, 0.0)] * len(replicas)  # tokens, and the time of that count
        self.sizes: list[int] = []

    def serve(self, time_s: float, tokens: int, path: Path) -> int:
        loads = [load * 0.5 ** ((time_s - at_s) / 60) for load, at_s in self.loads]
        number = self.choose(time_s, path, loads)
        self.loads[number] = (loads[number] + tokens, time_s)
        self.sizes.append(tokens)
        self.replicas[number].serve(time_s, path)
        return number

    def choose(self, time_s: float, path: Path, loads: list[float]) -> int:
        if not path:
            return len(self.sizes) % len(self.replicas)
        mean = sum(loads) / len(loads)
        request = sum(self.sizes) / max(1, len(self.sizes))

        def order(number: int) -> tuple[bool, int, float]:
            busy = loads[number] > 1.5 * mean and loads[number] > mean + 32 * request
            replica = self.replicas[number]
            replica.expire(time_s)
            found = sum(path[: i + 1] in replica.tiers[0] for i in range(len(path)))
            return busy, -found if 2 * found >= len(path) else 0, loads[number]

        return min(range(len(loads)), key=order)


@pytest.mark.parametrize("gap_s", [0.0, 3839.0, 3841.0, 60_000.0])
@pytest.mark.parametrize("seed", range(4))
def test_by_prefix_each_request_goes_where_the_model_says(seed: int, gap_s: float) -> None:
    """Also after a gap of an hour, when loads are counted from a new time, and of a thousand half-lives."""
    choose = random.Random(seed)
    paths: list[Path] = []
    for _ in range(500):
        begin = (choose.choice([1, 1, 1, 2]),) * choose.randrange(1, 4)
        paths.append((*begin, *(choose.randrange(4) for _ in range(choose.randrange(4))))[: choose.choice([0, 9, 9])])
    times = np.cumsum([choose.choice([0.0, 0.0, 1.0, 3.0]) for _ in paths]) / (1 + 50 * (seed % 2))
    times[200:] += gap_s
    times[350:] += gap_s
    tokens = [choose.choice([1, 5, 40]) * max(1, len(path)) for path in paths]
    batch = Batch.of(paths, time_s=times, input_tokens=tokens)
    trees = [Tree(1, HashKeys(8)).core for _ in range(3)]
    replicas = _core.Replay(trees, [15], 50.0, "prefix", [None] * 3, *ALONE).feed(
        times, batch.input_tokens, batch.offsets, batch.blocks
    )[1]
    router = Router([Model("lru", [15], 50.0) for _ in range(3)])
    expected = [router.serve(*each) for each in zip(times.tolist(), tokens, paths, strict=True)]
    assert replicas.tolist() == expected


def test_load_is_forgotten_in_time() -> None:
    batch = Batch.of([[1], [2], [3]], time_s=[0, 600, 600], input_tokens=[1000, 10, 10])
    row = replay(Trace.of(batch, block_size=1000), "lru", 9, setup=Setup(replicas=2))
    assert row.replica_requests == (2, 1)  # ten half-lives later 1000 tokens weigh less than 10


# --- rows ---------------------------------------------------------------------------------------------------------


def test_a_row_by_tenant_kind_and_time() -> None:
    batch = Batch.of(
        [[1, 2], [1, 2], [1, 3], [9]], time_s=[0, 1, 1, 700], tenant=[1, 2, 1, 0], kind=[0, 0, 0, 0], block_size=4
    )
    trace = Trace.of(batch, block_size=4, tenants=["", "a", "b", "c"], name="small")
    row = replay(trace, "lru", 100, flops=lambda tokens, past: 2.0 * tokens + past)
    assert [
        (s.name, s.requests, s.block_accesses, s.block_hits, s.input_tokens, s.token_hits) for s in row.tenants
    ] == [
        ("", 1, 1, 0, 4, 0),
        ("a", 2, 4, 1, 16, 4),
        ("b", 1, 2, 2, 8, 8),
    ]
    assert row.kinds == ()
    assert (row.trace, row.policy, row.capacity_blocks, row.requests) == ("small", "lru", 100, 4)
    assert (row.block_hit_rate, row.token_hit_rate) == (3 / 7, 12 / 28)
    assert (row.prefill_flops, row.saved_flops) == (
        56.0,
        11.0,
    )  # past tokens cost half; one token of a full hit is computed
    assert row.timeline.width_s == 4.0
    assert (row.timeline.block_accesses[0], row.timeline.block_hits[0]) == (6, 3)
    assert (len(row.timeline.block_hits), row.timeline.block_accesses[-1]) == (176, 1)


def test_first_tokens_by_hand_with_a_tier_and_a_prompt_that_is_found_whole() -> None:
    paths = [[1, 2], [3, 4], [1, 2], [1, 2], []]
    trace = Trace.of(Batch.of(paths, block_size=10, input_tokens=[20, 15, 20, 20, 0]), block_size=10)
    setup = Setup(host_blocks=9, prefill_rate=100, load_rate=1000)
    row = replay(trace, "lru", 2, setup=setup)
    # 20 and 15 tokens are computed; then 19 are loaded from the host, then they are on the device, and the last token
    # is computed. The empty prompt has no first token.
    seconds = [0.20, 0.15, 0.019 + 0.01, 0.01]
    assert [row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s] == pytest.approx(
        np.quantile(seconds, (0.5, 0.9, 0.99)).tolist(), rel=1e-6
    )
    late = replay(trace, "lru", 2, setup=setup, flops=lambda tokens, past: tokens * (1000.0 + past + tokens / 2))
    # 1,000 tokens take 10 s, so a unit of work takes 10 / 1.5e6 s.
    seconds = [20 * 1010, 15 * 1007.5, 0.019 * 1.5e5 + 1019.5, 1019.5]
    assert late.ttft_p90_s == pytest.approx(float(np.quantile(seconds, 0.9)) / 1.5e5, rel=1e-6)


def test_an_empty_trace_and_empty_prompts() -> None:
    row = replay(Trace.of(Batch.of([])), "lru", 5)
    assert (row.requests, row.block_hit_rate, row.timeline.block_hits) == (0, 0.0, ())
    assert (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s) == (0.0, 0.0, 0.0)
    row = replay(Trace.of(Batch.of([[], [1], []])), "lru", 5, setup=Setup(replicas=2, routing="hash"))
    assert (row.requests, row.block_accesses, row.block_hits) == (3, 1, 0)

    def flops(tokens: NDArray[np.int64], past: NDArray[np.int64]) -> NDArray[np.float64]:
        assert (tokens >= 1).all() and (past >= 0).all()
        return tokens + 100.0

    row = replay(Trace.of(Batch.of([[], [1], [1], []])), "lru", 5, flops=flops)
    assert (row.prefill_flops, row.saved_flops) == (202, 0), "nothing is computed for an empty prompt"


def test_ages_and_idle_times_are_in_whole_seconds_too() -> None:
    trace = Trace.of(Batch.of([[1], [2], [1], [3], [4]], time_s=[0, 1, 20, 21.5, 100]))
    tier = replay(trace, "fifo", 2).tiers[0]
    assert tier.age_s == histogram(Counter([(21).bit_length(), (99).bit_length()]))
    assert tier.idle_s == histogram(Counter([(1).bit_length(), (99).bit_length()])), "1 was used again at 20 s"
    assert tier.age_accesses == histogram(Counter([(3).bit_length()] * 2))


def test_ages_outlive_thousands_of_requests() -> None:
    paths = [[0 if number % 2 == 0 else number] for number in range(10_101)]
    tier = replay(Trace.of(Batch.of(paths)), "fifo", 5000).tiers[0]
    assert tier.evicted_blocks > 20
    assert tier.age_accesses == histogram(Counter([(10_000).bit_length()] * tier.evicted_blocks))


def test_progress_of_a_sweep_counts_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.replay.trace._BATCH_BLOCKS", 20)
    trace, paths, _ = some_trace(3)
    calls: list[tuple[int, int]] = []
    sweep(trace, ["lru", "fifo", "opt"], [5], workers=2, progress=lambda *pair: calls.append(pair))
    assert len(calls) > 10
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (3 * len(paths), 3 * len(paths))


def test_spans_of_the_timeline_are_wide_enough_for_the_last_request() -> None:
    for last, width, spans in ((255.9, 1, 256), (256, 2, 129), (511.9, 2, 256), (512, 4, 129)):
        timeline = replay(Trace.of(Batch.of([[1], [1]], time_s=[0, last])), "lru", 5).timeline
        assert (timeline.width_s, len(timeline.block_hits)) == (width, spans)
        assert (timeline.block_accesses[-1], timeline.block_hits[-1]) == (1, 1)


def test_one_tenant_has_its_share_beside_requests_of_none() -> None:
    row = replay(Trace.of(Batch.of([[1], [1]], tenant=[0, 1]), tenants=("", "a")), "lru", 5)
    assert [(share.name, share.block_hits) for share in row.tenants] == [("", 0), ("a", 1)]


@pytest.mark.parametrize(
    ("histogram", "below"),
    [((), None), ((0, 0), None), ((3,), 1), ((1, 0, 1), 1), ((0, 1, 1), 2), ((0, 0, 3), 4), ((1, 1, 1, 2, 2), 8)],
)
def test_the_median_of_a_histogram_is_the_power_of_two_that_half_is_below(
    histogram: tuple[int, ...], below: int | None
) -> None:
    assert median_below(histogram) == below


def test_batches_make_no_difference() -> None:
    trace, paths, _ = some_trace(2)
    caches = [_core.Replay([Tree(1, HashKeys(8)).core], [7], math.inf, "prefix", [None], *ALONE) for _ in range(2)]
    whole = trace.whole
    once, *_ = caches[0].feed(whole.time_s, whole.input_tokens, whole.offsets, whole.blocks)
    often = []
    for start, stop in pairwise([0, 1, 9, 40, len(paths)]):
        part = whole.slice(start, stop)
        often += caches[1].feed(part.time_s, part.input_tokens, part.offsets, part.blocks)[0].tolist()
    assert once.tolist() == often
    assert caches[0].totals(0, 0) == caches[1].totals(0, 0)


def test_a_sweep_is_its_cells_in_order() -> None:
    trace, _, _ = some_trace(4)
    calls: list[tuple[int, int]] = []
    rows = sweep(trace, ["lru", "opt", Recent()], [3, 9], workers=3, progress=lambda *args: calls.append(args))
    assert [(row.policy, row.capacity_blocks) for row in rows] == [
        ("lru", 3), ("lru", 9), ("opt", 3), ("opt", 9), ("recent", 3), ("recent", 9)
    ]  # fmt: skip
    assert rows == sweep(trace, ["lru", "opt", Recent()], [3, 9], workers=1)
    assert rows[0] == replay(trace, "lru", 3)
    assert rows[3] == replay(trace, "opt", 9)
    assert calls[-1] == (6 * 60, 6 * 60)
    assert calls == sorted(calls)


@pytest.mark.parametrize(("new_blocks", "at_most"), [(1, 178), (2, 93), (4, 64), (6, 54), (8, 47), (20, 32)])
def test_memory_grows_with_distinct_blocks(new_blocks: int, at_most: float) -> None:
    """Bytes per block, by the number of new blocks per request; where these are few, the node dominates."""
    requests = 100_000
    blocks = np.random.default_rng(1).integers(2**63, size=requests * new_blocks, dtype=np.uint64)
    offsets = np.arange(requests + 1, dtype=np.uint64) * np.uint64(new_blocks)
    tree = Tree(1, HashKeys(8))
    core = _core.Replay([tree.core], [10**9], math.inf, "prefix", [None], *ALONE)
    peak = 0.0
    for start in range(0, requests, 1000):
        stop = start + 1000
        core.feed(
            np.zeros(1000), np.zeros(1000, np.int64), offsets[start : stop + 1] - offsets[start],
            blocks[start * new_blocks : stop * new_blocks],
        )  # fmt: skip
        if stop >= 80_000:
            peak = max(peak, (tree.held_bytes() + core.bytes()) / (stop * new_blocks))
    assert 0.9 * at_most < peak <= at_most


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Setup(ttl=-1),
        lambda: Setup(ttl=math.nan),
        lambda: Setup(replicas=0),
        lambda: Setup(replicas=5000),
        lambda: Setup(routing="random"),  # type: ignore[arg-type]
        lambda: Setup(host_blocks=0),
        lambda: Setup(router_lag=-1.0),
        lambda: Setup(prefill_rate=0.0),
        lambda: tiers_of(Setup(host_blocks=5), 6),
        lambda: tiers_of(Setup(host_blocks=5, storage_blocks=4), 3),
    ],
)
def test_setups_out_of_range(make: Callable[[], object]) -> None:
    with pytest.raises(BadArgument):
        make()


def test_bad_replays() -> None:
    trace, _, _ = some_trace(1)
    for policy, capacity, setup in (
        ("nonsense", 5, Setup()),
        ("lru", 0, Setup()),
        ("opt", 0, Setup()),
        ("opt", 5, Setup(replicas=2)),
    ):
        with pytest.raises(BadArgument):
            replay(trace, policy, capacity, setup=setup)
    with pytest.raises(BadArgument):
        sweep(trace, ["opt"], [5], setup=Setup(ttl=4))
    with pytest.raises(BadArgument):
        sweep(trace, ["lru"], [5], workers=0)


def test_the_core_checks_its_columns() -> None:
    batch = Batch.of([[1, 2], [3]])
    core = _core.Replay([Tree(1, HashKeys(8)).core], [7], math.inf, "prefix", [None], *ALONE)
    for offsets in ([0, 2], [1, 2, 3], [0, 3, 2], [0, 2, 4], []):
        broken = batch.offsets[:0] if not offsets else Batch.of([[]] * (len(offsets) - 1)).offsets.copy()
        broken[:] = offsets
        with pytest.raises(BadArgument):
            core.feed(batch.time_s, batch.input_tokens, broken, batch.blocks)
    with pytest.raises(BadArgument):
        _core.Replay([Tree(4, HashKeys(8)).core], [7], math.inf, "prefix", [None], *ALONE)
    with pytest.raises(BadArgument):
        _core.Replay([Tree(1, HashKeys(8)).core], [7, 8], math.inf, "prefix", [None], *ALONE)
    with pytest.raises(BadArgument):
        _core.Replay([], [7], math.inf, "prefix", [], *ALONE)


# --- capacities ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thousand() -> Trace:
    return Trace.of(Batch.of([[i] for i in range(1037)], block_size=16), block_size=16)


def test_capacities(thousand: Trace) -> None:
    assert parse_capacities("1%, 2.5%,50%,100%", thousand) == [10, 25, 518, 1037]
    assert parse_capacities("1000,20kblocks,2Mtok,100 tokens", thousand) == [1000, 20_000, 125_000, 6]
    assert parse_capacities("1MB,1MiB,3.2KB", thousand, bytes_per_token=100) == [625, 655, 2]
    assert parse_tiers("device=1%,host=20%,storage=1MB", thousand, 100) == {"device": 10, "host": 207, "storage": 625}


def test_percents_are_exact() -> None:
    trace = Trace.of(Batch.of([[i] for i in range(100)]))
    assert parse_capacities(",".join(f"{share}%" for share in range(1, 101)), trace) == list(range(1, 101))


@pytest.mark.parametrize(
    "text", ["", "1%,", "0", "-5", "0.01%", "ten", "10k", "10G", "5 GB", "1e3", "3tok", "5%%", "nan"]
)
def test_no_capacities(text: str, thousand: Trace) -> None:
    with pytest.raises(BadArgument):
        parse_capacities(text, thousand)


@pytest.mark.parametrize("text", ["", "host", "host=", "disk=5", "host=5,host=6", "host=5;storage=6"])
def test_no_tiers(text: str, thousand: Trace) -> None:
    with pytest.raises(BadArgument):
        parse_tiers(text, thousand)
