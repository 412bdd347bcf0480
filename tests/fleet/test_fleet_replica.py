"""A replica of a fleet in this process: what it has when it takes its first request, and what it tells of itself."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from machine import eventually
from rigs.hand_driven import Clock
from rigs.serving import tiny_folder, unlike

from mainstem.errors import EngineClosed
from mainstem.fleet.front.asking import Ask, Head, Part, Piece, Prompt, ReplicaLost
from mainstem.fleet.front.following import Following
from mainstem.fleet.front.routing import CostRouter, Estimate
from mainstem.fleet.replica import DRAIN, PEERS, PrefillReplicas, Replica, wait_until_warm
from mainstem.fleet.replica import PROMPT as PROMPT_OF
from mainstem.runtime.request import Request
from mainstem.settings.engine import TierConfig
from mainstem.settings.fleet import FleetConfig, PrefillSize, read_fleet
from mainstem.tiers.controller import TierStats

pytest.importorskip("zmq", reason="pyzmq is not installed")

LONG = 160
PROMPT = Prompt(np.array([1], np.int32))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> FleetConfig:
    folder = tmp_path_factory.mktemp("fleet")
    given = {
        "model": str(tiny_folder("llama", folder / "tiny")),
        "store": f"shared+file:{folder / 'store'}?capacity=64MiB",
        "engine": {"kv_bytes": "4MiB"},
        "load": {"threads": 1},
    }
    config = read_fleet(given, {}, folder, "none")
    alone = replace(config.engine.tiers, storage=str(config.engine.tiers.storage).removeprefix("shared+"))
    return replace(config, engine=replace(config.engine, tiers=alone))  # one process needs no owner of the store


@pytest.fixture(scope="module")
def replica(config: FleetConfig) -> Iterator[Replica]:
    """The second replica; the first one has written what it computed."""
    with closing(Replica(config, "a", 1)) as first:
        assert cached(first) == 0
        eventually(lambda: tiers(first).host_cached >= LONG // 16)
    with closing(Replica(config, "b", 1)) as second:
        yield second


def cached(replica: Replica, seed: int = 1) -> int:
    body = {"model": "tiny", "prompt": unlike(seed, LONG), "max_tokens": 1}
    head, reply = asked(replica, Ask("POST", "/v1/completions", body=json.dumps(body).encode(), prompt=PROMPT))
    assert head.status == 200, reply
    return int(json.loads(reply)["usage"]["prompt_tokens_details"]["cached_tokens"])


def tiers(replica: Replica) -> TierStats:
    found = replica._engine.stats().tiers
    assert found is not None
    return found


def asked(replica: Replica, ask: Ask) -> tuple[Head, bytes]:
    async def run() -> list[Any]:
        return [piece async for piece in replica.ask(ask)]

    head, *pieces = anyio.run(run)
    return head, b"".join(each.body if isinstance(each, Piece) else each for each in pieces)


def test_a_new_replica_is_warm_before_it_takes_requests(replica: Replica) -> None:
    assert tiers(replica).host_cached >= LONG // 16
    assert tiers(replica).prefetched >= LONG // 16
    assert cached(replica) == (LONG - 1) // 16 * 16


def test_it_says_where_peers_and_routers_find_it_and_takes_the_addresses_of_others(replica: Replica) -> None:
    where = replica.where()
    assert where["peer"].startswith("127.0.0.1:") and where["events"].startswith("tcp://127.0.0.1:")
    assert (where["peers"], where["queued"], where["costs"]["pull"]) == (True, 0, where["costs"]["read"])
    head, _ = asked(replica, Ask(PEERS, "/", body=json.dumps(["127.0.0.1:1"]).encode(), to="b"))
    assert head.status == 200
    assert asked(replica, Ask(PEERS, "/", body=b"[]", to="b"))[0].status == 200
    assert asked(replica, Ask("GET", "/version", to="another"))[0].status == 421
    assert set(replica.seen()) == {"prompt", "cached", "evicted"}


def without_a_store(config: FleetConfig) -> FleetConfig:
    """Replicas that can read from each other alone, and wait for that."""
    tiers = config.engine.tiers
    peers = replace(tiers.peers, peer_share=1.0, peers_later=True, peer_timeout_s=30.0)
    limits = replace(tiers.limits, prefetch="wait_complete", prefetch_min_tokens=16, call_timeout_s=60.0)
    tiers = replace(tiers, storage=None, warm=False, peers=peers, limits=limits)
    return replace(config, engine=replace(config.engine, tiers=tiers))


def test_what_one_replica_has_computed_another_one_reads_from_it(config: FleetConfig) -> None:
    config = without_a_store(config)
    with closing(Replica(config, "c", 1)) as first, closing(Replica(config, "d", 1)) as second:
        assert cached(first) == 0
        eventually(lambda: tiers(first).host_cached >= LONG // 16)
        where = first.where()
        assert where["identity"] == second.where()["identity"]
        asked(second, Ask(PEERS, "/", body=json.dumps([where["peer"]]).encode()))
        assert cached(second) == (LONG - 1) // 16 * 16
        eventually(lambda: tiers(second).prefetched >= (LONG - 1) // 16)  # there is no store: it can only be the peer's


def test_prompts_are_computed_by_others_and_answered_here(config: FleetConfig) -> None:
    config = without_a_store(config)
    with closing(Replica(config, "p", 1, role="prefill")) as computes:
        others = Others(computes)
        prefiller = PrefillReplicas(others, PrefillSize(min_bytes=LONG, timeout_s=600.0))
        with closing(Replica(config, "d", 1, prefiller=prefiller)) as answers:
            assert (computes.where()["role"], answers.where()["role"]) == ("prefill", "both")
            asked(answers, Ask(PEERS, "/", body=json.dumps([computes.where()["peer"]]).encode()))
            assert cached(answers, 2) == (LONG - 1) // 16 * 16
            eventually(lambda: tiers(answers).prefetched >= (LONG - 1) // 16)  # it can only be the other one's
            others.lost = True
            assert cached(answers, 3) == 0
            short = Ask("POST", "/v1/completions", body=b'{"model": "tiny", "prompt": [5, 6], "max_tokens": 1}')
            assert asked(answers, short)[0].status == 200
            asked(answers, Ask(DRAIN, "/"))
            refused = json.dumps({"model": "tiny", "prompt": unlike(4, LONG), "max_tokens": 1}).encode()
            assert asked(answers, Ask("POST", "/v1/completions", body=refused))[0].status == 503
    assert [ask.prompt is PROMPT for ask in others.asked] == [True] * 2


HEADERS = ((b"authorization", b"Bearer k"), (b"x-request-id", b"mine"), (b"content-length", b"1000"))
SCOPE: dict[str, Any] = {"path": "/v1/completions", "headers": HEADERS, "state": {PROMPT_OF: PROMPT}}


def prefilled(others: Others, timeout_s: float = 600.0) -> int:
    made = PrefillReplicas(others, PrefillSize(timeout_s=timeout_s))
    return anyio.run(made.prefill, SCOPE, b"{}")


def test_a_prompt_is_asked_for_with_what_the_client_sent() -> None:
    others = Others(statuses=[200])
    assert prefilled(others) == 200
    assert others.asked == [Ask("POST", "/v1/completions", headers=HEADERS[:2], body=b"{}", prompt=PROMPT)]


def test_what_they_refuse_is_known() -> None:
    assert prefilled(Others(statuses=[400])) == 400


@pytest.mark.parametrize("status", [503, 421])
def test_a_prompt_goes_to_another_one_when_one_drains(status: int) -> None:
    others = Others(statuses=[status, 200])
    assert prefilled(others) == 200
    assert [ask.avoid for ask in others.asked] == [frozenset(), {"p"}]
    assert prefilled(Others(statuses=[status, 503])) == 503
    assert prefilled(Others(statuses=[status])) == status  # the other one is lost


def test_nobody_waits_for_more_than_was_said() -> None:
    with pytest.raises(TimeoutError):
        prefilled(Others(hangs=True), timeout_s=0.01)


def test_nobody_waits_when_the_last_of_them_has_gone() -> None:
    with pytest.raises(OSError, match="none of them answered"):
        prefilled(Others(hangs=True, there=3))
    with pytest.raises(OSError, match="none of them runs"):
        prefilled(others := Others(there=0, hangs=True))
    assert not others.asked


class Others:
    """One replica that computes prompts, or does not: see `Replicas`. It is there for a number of looks, and lost after
    its last status."""

    def __init__(
        self, replica: Replica | None = None, statuses: list[int] | None = None, *, hangs: bool = False, there: int = -1
    ) -> None:
        self._replica, self._statuses, self._hangs, self._there = replica, statuses or [], hangs, there
        self.lost = False
        self.asked: list[Ask] = []

    def names(self) -> list[str]:
        self._there -= 1
        return [] if self._there == -1 else ["p"]

    everyone = names

    async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        self.asked.append(ask)
        if self._hangs:
            await anyio.sleep_forever()
        if self.lost or (self._replica is None and len(self.asked) > len(self._statuses)):
            raise ReplicaLost("p")
        if self._replica is None:
            yield Head(self._statuses[len(self.asked) - 1], (), "p")
            return
        async with aclosing(self._replica.ask(ask)) as pieces:
            async for piece in pieces:
                yield piece


def test_a_router_counts_what_a_replica_could_read_from_another_one_if_it_says_that_it_reads_from_others(
    replica: Replica,
) -> None:
    said = {"b": replica.where(), "new": replica.where() | {"store": None, "events": None}}
    router = CostRouter(time.monotonic, page_size=16)
    with closing(Following(router.apply)) as following:

        def new(**wrong: Any) -> Estimate:
            router.follow({name: each | wrong for name, each in said.items()})
            (found,) = router.estimates(prompt, ["new"])
            return found

        prompt = Prompt(np.array(unlike(1, LONG), np.int32))
        router.follow(said)
        following.follow(said)
        eventually(lambda: router.match(prompt)["b"][1] >= (LONG - 1) // 16 * 16)
        costs = {"prefill": (1e-3, 0.0), "pull": (0.0, 1e-6)}
        assert new(costs=costs).cached >= (LONG - 1) // 16 * 16
        assert new(costs=costs, peers=False).cached == 0


def test_a_router_passes_over_a_replica_that_says_that_prompts_wait(config: FleetConfig, replica: Replica) -> None:
    slow = replace(config.engine, token_budget=1, tiers=TierConfig())
    with closing(Replica(replace(config, engine=slow, warm_timeout_s=0.0), "busy", 1)) as busy:
        prompts = [Request(np.array(unlike(seed, LONG), np.int32)) for seed in range(10, 40)]
        streams = [busy._engine.submit(each) for each in prompts]
        eventually(lambda: busy.where()["queued"] > 10 * LONG)
        router = CostRouter(time.monotonic)
        said = {"a": busy.where(), "b": replica.where()}
        assert not said["a"]["peers"] and said["b"]["peers"]
        router.follow({**said, "a": said["a"] | {"queued": 0}})
        assert router.order(None, ["a", "b"]) == ["a", "b"]
        router.follow(said)
        assert router.order(None, ["a", "b"]) == ["b", "a"]
        for stream in streams:
            stream.cancel()
        eventually(lambda: busy.where()["queued"] == 0)


def test_one_that_is_told_to_go_says_that_another_one_should_take_its_place(replica: Replica) -> None:
    replica.check_health()
    assert asked(replica, Ask(DRAIN, "/"))[0].status == 200
    assert replica.where()["draining"]
    with pytest.raises(EngineClosed, match="drains"):
        replica.check_health()


@pytest.mark.parametrize(("under_way", "waits"), [([3, 1, 0, 0, 0, 9], 5), ([0, 1, 0, 0, 0], 5), ([1] * 99, 99)])
def test_waiting_for_what_is_read_ends_when_nothing_is_under_way_or_the_time_is_over(
    under_way: list[int], waits: int
) -> None:
    clock, left = Clock(), iter(under_way)
    config = SimpleNamespace(tiers=SimpleNamespace(warm=True))
    stats = lambda: SimpleNamespace(tiers=SimpleNamespace(under_way=next(left)))  # noqa: E731
    engine: Any = SimpleNamespace(config=config, stats=stats)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now_s += seconds

    assert wait_until_warm(engine, 98.5 * 0.05, clock, sleep) == (waits < 99)
    assert len(slept) == waits
    config.tiers.warm = False
    assert wait_until_warm(engine, 1.0, clock, sleep)
    assert len(slept) == waits
