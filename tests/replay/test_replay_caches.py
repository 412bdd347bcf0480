"""Replicas against a slow model, behind the fleet's own front: what each rule chooses, peers, late routers, threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.replays import Lru, Path, named, prefixes, some_paths

from mainstem import _core
from mainstem.cache.policies import NodeStats
from mainstem.errors import BadArgument
from mainstem.replay.generate import Agents, Chat, Mix, generate
from mainstem.replay.simulate.caches import Caches, RouterCosts, Served
from mainstem.replay.simulate.sweep import replay, sweep, tiers_of
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup

BLOCK = 4  # tokens
COSTS = RouterCosts(token_s=1 / 64, attended_s=1 / 4096, host_s=1 / 512, peer_s=1 / 256)


class Fleet:
    """Replicas of several tiers, and before them what the fleet's front has: its index of their events, its ranking."""

    def __init__(self, replicas: int, capacities: tuple[int, ...], peers: bool) -> None:
        self.replicas = [[Lru(capacity) for capacity in capacities] for _ in range(replicas)]
        self.peers = peers
        self.front = _core.Routing(bytes(16), BLOCK, 1 << 20)
        self.numbers = np.array([self.front.add() for _ in range(replicas)], np.int32)
        for number in self.numbers.tolist():
            pull = (0.0, COSTS.peer_s or 0.0) if peers else None
            self.front.set_times(number, (COSTS.token_s, COSTS.attended_s), (0.0, COSTS.host_s), (0.0, 0.0), pull)
            self.front.expect_for(number, math.inf)
        self.events: list[Callable[[], None]] = []

    def learn(self) -> None:
        for apply in self.events:
            apply()
        self.events = []

    def compute(self, tokens: int, blocks: int) -> float:
        known = min(blocks * BLOCK, tokens - 1)
        new = tokens - known
        return COSTS.token_s * new + COSTS.attended_s * (new * known + new * new / 2)

    def route(self, now_s: float, path: Path) -> tuple[int, int, list[int]]:
        """Returns the replica, the blocks that a peer gives it, and the blocks that the front expects of each."""
        tokens = _tokens(path)
        chosen = int(self.front.rank(b"", tokens, self.numbers, None, now_s)[0])
        reach = self.front.match(b"", tokens)[1]
        self.front.sent(chosen, b"", tokens, now_s)
        own, best = reach[chosen], max(reach)
        saved = self.compute(len(tokens), own) - self.compute(len(tokens), best)
        sooner = (best - own) * BLOCK * (COSTS.peer_s or 0.0) <= saved
        return chosen, best if self.peers and best > own and sooner else 0, reach

    def serve(self, replica: int, path: Path) -> list[int]:
        names = prefixes(path)
        found = [tier.found(names) for tier in self.replicas[replica]]
        for medium, tier in enumerate(self.replicas[replica]):
            before = set(tier.held)
            tier.serve(names)
            for each in names:
                if each not in before:
                    self._store(replica, medium, each)
            gone = [hash(each) % 2**62 for each in before.union(names).difference(tier.held)]
            self.events.append(partial(self.front.remove, replica, medium, gone))
        return [max(found[: i + 1]) - max([0, *found[:i]]) for i in range(len(found))]

    def _store(self, replica: int, medium: int, path: Path) -> None:
        *_, parent, own = [None, *named(path)]
        tokens = _tokens(path[-1:]).tolist()
        self.events.append(partial(self.front.store, replica, medium, b"", parent, [own], tokens))


def _tokens(path: Path) -> NDArray[np.int32]:
    return np.repeat(np.array(path, np.int32), BLOCK)


def some_trace(seed: int) -> tuple[Trace, list[Path]]:
    choose, paths = random.Random(seed), some_paths(seed, 150)
    times = np.cumsum([choose.choice([0.0, 0.0, 0.25, 0.5, 1.0]) for _ in paths])
    batch = Batch.of([named(path) for path in paths], block_size=BLOCK, time_s=times)
    return Trace.of(batch, block_size=BLOCK, name="some"), paths


def fed(trace: Trace, capacities: tuple[int, ...], peers: bool = False, workers: int = 1, **options: Any) -> Served:
    setup = Setup(host_blocks=capacities[1] if len(capacities) > 1 else None, **options)
    tiers = tiers_of(setup, capacities[0])
    costs = COSTS if peers else COSTS._replace(peer_s=None)
    with Caches("lru", tiers, setup, trace.block_size, costs=costs, workers=workers) as caches:
        return caches.feed(trace.whole)


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("lag_s", [0.0, 0.75])
@pytest.mark.parametrize("capacities", [(9,), (6, 14), (400, 500)])
@pytest.mark.parametrize("seed", range(3))
def test_by_cost_each_request_goes_where_the_fleets_front_sends_it(
    seed: int, capacities: tuple[int, ...], lag_s: float, peers: bool
) -> None:
    trace, paths = some_trace(seed)
    times = trace.whole.time_s.tolist()
    served = fed(trace, capacities, peers, replicas=5, routing="cost", router_lag=lag_s)
    model = Fleet(5, capacities, peers)
    window: list[int] = []
    for i, path in enumerate(paths):
        if window and (lag_s == 0 or times[i] >= times[window[0]] + lag_s):
            for each in window:
                assert model.serve(int(served.replica[each]), paths[each]) == served.hits[each].tolist()
            model.learn()
            window = []
        chosen, peer_reach, reach = model.route(times[i], path)
        assert (served.replica[i], served.peer_reach[i]) == (chosen, peer_reach), i
        if peer_reach:
            asked = int(served.peer[i])
            assert asked != chosen and reach[asked] == peer_reach
        window.append(i)
    assert len(set(served.replica.tolist())) > 3
    assert (served.peer_reach > 0).any() == peers


RULES = ["round-robin", "two-choices", "hash", "consistent-hash", "prefix", "cost"]


@pytest.mark.parametrize("routing", RULES)
@pytest.mark.parametrize("peers", [False, True])
def test_any_number_of_threads_gives_the_same(routing: Any, peers: bool) -> None:
    trace = generate(Mix(rate_per_s=20, parts=((Chat(), 3.0), (Agents(), 1.0))), 1500, seed=3)
    options = {"replicas": 7, "routing": routing, "router_lag": 1.0}
    one = fed(trace, (300, 900), peers, **options)
    for workers in (2, 3, 16):
        several = fed(trace, (300, 900), peers, workers, **options)
        for expected, found in zip(one, several, strict=True):
            assert (expected == found).all()
    assert one.hits.any() and len(set(one.replica.tolist())) > 1


@pytest.mark.parametrize("routing", ["prefix", "cost"])
def test_without_a_lag_threads_change_nothing(routing: Any) -> None:
    trace, _ = some_trace(9)
    alone, several = (fed(trace, (20,), workers=n, replicas=4, routing=routing) for n in (1, 2))
    assert all((a == b).all() for a, b in zip(alone, several, strict=True))


def test_a_sweep_of_one_cell_divides_its_replicas_among_threads() -> None:
    trace, _ = some_trace(4)
    setup = Setup(replicas=3, routing="two-choices")
    assert sweep(trace, ["lru"], [9], setup=setup, workers=2) == [replay(trace, "lru", 9, setup=setup)]


def test_of_two_choices_the_less_loaded_gets_the_request() -> None:
    same = Trace.of(Batch.of([[i] for i in range(4000)], time_s=[0.0] * 4000))
    two = replay(same, "lru", 9, setup=Setup(replicas=20, routing="two-choices")).replica_requests
    assert sum(two) == 4000 and max(two) - min(two) <= 20, (
        "at random, the largest would have about 28 more than the mean"
    )
    pair = replay(same, "lru", 9, setup=Setup(replicas=2, routing="two-choices")).replica_requests
    assert pair == (2000, 2000), "both are always drawn"


def test_of_a_consistent_hash_few_move_when_a_replica_is_added() -> None:
    trace = Trace.of(Batch.of([[i] for i in range(3000)]))

    def replicas(n: int, routing: Any) -> np.ndarray[Any, Any]:
        return fed(trace, (9,), replicas=n, routing=routing).replica

    before, after = replicas(10, "consistent-hash"), replicas(11, "consistent-hash")
    moved = before != after
    assert (after[moved] == 10).all() and 0.06 < moved.mean() < 0.12
    assert (replicas(10, "hash") != replicas(11, "hash")).mean() > 0.8
    assert np.bincount(before).min() > 240


def test_a_router_that_knows_late_sends_a_burst_apart() -> None:
    burst = Trace.of(Batch.of([[1, 2, 3, 4]] * 8, time_s=[0.0] * 8, block_size=BLOCK), block_size=BLOCK)
    at_once = fed(burst, (99,), replicas=4, routing="prefix")
    late = fed(burst, (99,), replicas=4, routing="prefix", router_lag=0.5)
    assert np.bincount(at_once.replica, minlength=4).tolist() == [8, 0, 0, 0]
    assert np.bincount(late.replica, minlength=4).tolist() == [2, 2, 2, 2]
    assert late.hits.sum() == 16, "each replica has it the second time"


def test_what_expired_is_not_asked_for() -> None:
    batch = Batch.of([[1, 2], [1, 2], [1, 2]], time_s=[0, 1, 10], block_size=BLOCK)
    trace = Trace.of(batch, block_size=BLOCK)
    served = fed(trace, (99,), peers=True, replicas=3, routing="round-robin", ttl=5.0)
    assert served.peer_reach.tolist() == [0, 2, 0] and served.peer.tolist()[1] == 0


def test_a_hot_prefix_is_computed_elsewhere_when_its_replica_is_busy() -> None:
    batch = Batch.of([[1, 2, 3, 4, 5, 6, 7, 8]] * 60, time_s=np.arange(60) / 1000, block_size=BLOCK)
    served = fed(Trace.of(batch, block_size=BLOCK), (99,), replicas=4, routing="cost")
    assert np.bincount(served.replica, minlength=4).min() >= 10


def test_a_short_prefix_that_all_share_leaves_no_replica_idle_when_there_is_work() -> None:
    prompts = [[1, *(100 * i + j for j in range(19))] for i in range(40)]

    def shares(between_s: float) -> list[int]:
        batch = Batch.of(prompts, time_s=np.arange(40) * between_s, block_size=BLOCK)
        served = fed(Trace.of(batch, block_size=BLOCK), (99,), replicas=4, routing="cost")
        shares: list[int] = np.bincount(served.replica, minlength=4).tolist()
        return shares

    assert shares(60.0) == [40, 0, 0, 0], "nobody waits: the first token is soonest where the block is"
    assert min(shares(1.0)) >= 8


def test_the_error_of_a_policy_is_raised_from_any_thread() -> None:
    class Broken:
        name = "broken"

        def rank(self, node: NodeStats) -> tuple[float, float]:
            raise ZeroDivisionError

    trace, _ = some_trace(1)
    with pytest.raises(BadArgument, match=r"Broken\.rank raised ZeroDivisionError"):
        replay(trace, Broken(), 3, setup=Setup(replicas=4, routing="round-robin"), workers=2)


def test_the_memory_of_many_replicas_grows_with_what_they_hold() -> None:
    def used(replicas: int, requests: int) -> int:
        trace = Trace.of(Batch.of([[3 * i + j for j in range(3)] for i in range(requests)], time_s=np.arange(requests)))
        setup = Setup(replicas=replicas, routing="cost", router_lag=1.0)
        with Caches("lru", tiers_of(setup, 50), setup, 1, costs=COSTS) as caches:
            caches.feed(trace.whole)
            return caches.bytes

    assert used(2, 24_000) < 1.1 * used(2, 8_000), "full caches take no more"
