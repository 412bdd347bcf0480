"""Replicas and their router against a slow, obvious model: what each rule chooses, peers, late routers, and threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mainstem.cache.policies import NodeStats
from mainstem.errors import BadArgument
from mainstem.replay.generate import Agents, Chat, Mix, generate
from mainstem.replay.simulate.caches import Caches, RouterCosts, Served
from mainstem.replay.simulate.sweep import replay, sweep, tiers_of
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.replay import Setup

Path = tuple[int, ...]
BLOCK = 4  # tokens
COSTS = RouterCosts(token_s=1 / 64, pair_s=1 / 4096, below_s=1 / 128, peer_s=1 / 64)  # dyadic, so that sums are exact


class Lru:
    """One tier of a replica: paths, the least recently used first. Of one request the deepest goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.paths: list[Path] = []

    def found(self, path: Path) -> int:
        return sum(path[: i + 1] in self.paths for i in range(len(path)))

    def serve(self, path: Path) -> None:
        prefixes = [path[: i + 1] for i in range(len(path))]
        self.paths = [each for each in self.paths if each not in prefixes] + prefixes[::-1]
        self.paths = self.paths[max(0, len(self.paths) - self.capacity) :]


class Fleet:
    """Replicas of several tiers, and a router that chooses by cost with what it knew at the start of a window."""

    def __init__(self, replicas: int, capacities: tuple[int, ...], peers: bool) -> None:
        self.replicas = [[Lru(capacity) for capacity in capacities] for _ in range(replicas)]
        self.free_s = [0.0] * replicas
        self.loads = [0.0] * replicas
        self.peers = peers
        self.known: list[list[list[Path]]] = []

    def learn(self) -> None:
        self.known = [[list(tier.paths) for tier in replica] for replica in self.replicas]

    def reach(self, replica: int, path: Path, tiers: int = 3) -> int:
        known = self.known[replica][:tiers]
        return max(sum(path[: i + 1] in tier for i in range(len(path))) for tier in known)

    def compute(self, tokens: int, blocks: int) -> float:
        known = min(blocks * BLOCK, tokens - 1)
        new = tokens - known
        return COSTS.token_s * new + COSTS.pair_s * (new * known + new * (new + 1) / 2)

    def pulls(self, replica: int, path: Path, tokens: int) -> int:
        """Returns the blocks that a peer would give."""
        own, best = self.reach(replica, path), max(self.reach(each, path) for each in range(len(self.replicas)))
        saved = self.compute(tokens, own) - self.compute(tokens, best)
        return best if self.peers and best > own and (best - own) * COSTS.peer_s <= saved else 0

    def service(self, replica: int, path: Path, tokens: int) -> float:
        own, below = self.reach(replica, path), self.reach(replica, path) - self.reach(replica, path, 1)
        best = self.pulls(replica, path, tokens) or own
        return below * COSTS.below_s + (best - own) * COSTS.peer_s + self.compute(tokens, best)

    def route(self, now_s: float, path: Path, tokens: int) -> tuple[int, int]:
        replicas = range(len(self.replicas))
        expected = [max(0.0, self.free_s[r] - now_s) + self.service(r, path, tokens) for r in replicas]
        near = [r for r in replicas if expected[r] <= 1.125 * min(expected)]
        chosen = min(near, key=lambda r: (self.loads[r], r))
        self.free_s[chosen] = max(now_s, self.free_s[chosen]) + self.service(chosen, path, tokens)
        self.loads[chosen] += tokens * 2.0 ** (now_s / 60)
        return chosen, self.pulls(chosen, path, tokens)

    def serve(self, replica: int, path: Path) -> list[int]:
        found = [tier.found(path) for tier in self.replicas[replica]]
        for tier in self.replicas[replica]:
            tier.serve(path)
        return [max(found[: i + 1]) - max([0, *found[:i]]) for i in range(len(found))]


def some_trace(seed: int, requests: int = 150) -> tuple[Trace, list[Path]]:
    choose = random.Random(seed)
    paths: list[Path] = []
    for _ in range(requests):
        begin = choose.choice(paths)[: choose.randrange(8)] if paths and choose.random() < 0.6 else ()
        path = begin + tuple(choose.randrange(3) for _ in range(choose.randrange(1, 6)))
        paths.append(choose.choice(paths) if paths and choose.random() < 0.2 else path)
    times = np.cumsum([choose.choice([0.0, 0.0, 0.25, 0.5, 1.0]) for _ in paths])
    tokens = [len(path) * BLOCK - choose.randrange(BLOCK) for path in paths]
    names = [[hash(path[: i + 1]) % 2**63 for i in range(len(path))] for path in paths]
    batch = Batch.of(names, block_size=BLOCK, time_s=times, input_tokens=tokens)
    return Trace.of(batch, block_size=BLOCK, name="some"), paths


def fed(trace: Trace, capacities: tuple[int, ...], peers: bool = False, workers: int = 1, **options: Any) -> Served:
    setup = Setup(host_blocks=capacities[1] if len(capacities) > 1 else None, **options)
    tiers = tiers_of(setup, capacities[0])
    with Caches("lru", tiers, setup, trace.block_size, costs=COSTS, peers=peers, workers=workers) as caches:
        return caches.feed(trace.whole)


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("lag_s", [0.0, 0.75])
@pytest.mark.parametrize("capacities", [(9,), (6, 14), (400, 500)])
@pytest.mark.parametrize("seed", range(3))
def test_by_cost_each_request_goes_where_the_model_says(
    seed: int, capacities: tuple[int, ...], lag_s: float, peers: bool
) -> None:
    trace, paths = some_trace(seed)
    times, tokens = trace.whole.time_s.tolist(), trace.whole.input_tokens.tolist()
    served = fed(trace, capacities, peers, replicas=5, routing="cost", router_lag=lag_s)
    model = Fleet(5, capacities, peers)
    model.learn()
    window: list[int] = []
    for i, path in enumerate(paths):
        if window and (lag_s == 0 or times[i] >= times[window[0]] + lag_s):
            for each in window:
                assert model.serve(int(served.replica[each]), paths[each]) == served.hits[each].tolist()
            model.learn()
            window = []
        chosen, reach = model.route(times[i], path, tokens[i])
        assert (served.replica[i], served.peer_reach[i]) == (chosen, reach), i
        if reach:
            asked = int(served.peer[i])
            assert asked != chosen and model.reach(asked, path) == reach
        window.append(i)
    assert len(set(served.replica.tolist())) == 5
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


def test_a_short_prefix_that_all_share_leaves_no_replica_idle() -> None:
    prompts = [[1, *(100 * i + j for j in range(19))] for i in range(40)]
    batch = Batch.of(prompts, time_s=np.arange(40) * 60.0, block_size=BLOCK)
    served = fed(Trace.of(batch, block_size=BLOCK), (99,), replicas=4, routing="cost")
    assert np.bincount(served.replica).tolist() == [10, 10, 10, 10], (
        "all have time; one block of twenty is not worth it"
    )


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

    assert used(2, 60_000) < 1.1 * used(2, 20_000), "full caches take no more"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing": "random"}, "routing = 'random': must be one of round-robin, two-choices"),
        ({"replicas": 5000}, "replicas = 5000: must be an integer from 1 to 4096"),
        ({"router_lag": -1.0}, "router_lag = -1.0: must be a number, 0 or more"),
        ({"prefill_rate": 0.0}, "prefill_rate = 0.0: must be a number"),
    ],
)
def test_settings_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    make: Callable[..., Setup] = Setup
    with pytest.raises(BadArgument, match=message):
        make(**options)
