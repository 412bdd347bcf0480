"""The router of a fleet hears of the replicas' events over ZeroMQ, joins late, and outlives each of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
import zmq
from machine import eventually

from mainstem import PrefixCache
from mainstem.events.publisher import Publisher
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.following import Following
from mainstem.fleet.front.routing import CostRouter

pytestmark = pytest.mark.deadline
TOKENS = list(range(40))


class Engine:
    """A cache that publishes."""

    def __init__(self, stack: ExitStack) -> None:
        self.publisher = Publisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        stack.callback(self.publisher.close)
        self.cache = PrefixCache(pages=64, page_size=4, on_event=self.publisher.put)

    @property
    def said(self) -> dict[str, object]:
        return {"events": self.publisher.endpoint, "replay": self.publisher.replay, "page_size": 4}

    def serve(self, tokens: list[int]) -> None:
        with self.cache.lease(tokens) as lease:
            lease.reserve(len(tokens) - lease.hit)
            lease.finish(len(tokens))
        self.cache.deliver_events()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def follow(stack: ExitStack) -> tuple[CostRouter, Following]:
    router = CostRouter(time.monotonic)
    return router, stack.enter_context(closing(Following(router.apply)))


def found(router: CostRouter, tokens: list[int] = TOKENS) -> dict[str, int]:
    matched = router.match(Prompt(np.array(tokens, np.int32)))
    return {name: depths[0] for name, depths in matched.items()}


def test_a_router_that_starts_in_the_middle_knows_what_is_there(stack: ExitStack) -> None:
    a, b = Engine(stack), Engine(stack)
    a.serve(TOKENS)
    router, following = follow(stack)
    said = {"a": a.said, "b": b.said, "c": {}}
    router.follow(said)
    following.follow(said)
    eventually(lambda: found(router) == {"a": 40, "b": 0, "c": 0})
    b.serve(TOKENS[:20])
    eventually(lambda: found(router) == {"a": 40, "b": 20, "c": 0})
    a.cache.flush()
    a.cache.deliver_events()
    eventually(lambda: found(router) == {"a": 0, "b": 20, "c": 0})
    assert following.bad == 0


def test_a_replica_that_begins_anew_has_nothing_left(stack: ExitStack) -> None:
    a = Engine(stack)
    router, following = follow(stack)
    for engine in (a, Engine(stack)):  # the second one has other addresses, as one does that took its place
        said = {"a": engine.said}
        router.follow(said)
        following.follow(said)
        eventually(lambda: found(router)["a"] == 0)
        engine.serve(TOKENS)
        eventually(lambda: found(router)["a"] == 40)
    router.follow({})
    following.follow({})
    assert found(router) == {}


def test_one_that_sends_what_is_no_batch_is_counted_and_the_others_go_on(stack: ExitStack) -> None:
    a = Engine(stack)
    context = stack.enter_context(zmq.Context())
    bad = stack.enter_context(context.socket(zmq.PUB))
    port = bad.bind_to_random_port("tcp://127.0.0.1")
    router, following = follow(stack)
    said = {
        "a": a.said,
        "bad": {"events": f"tcp://127.0.0.1:{port}", "replay": "tcp://127.0.0.1:1"},
        "odd": {"events": 5},
    }
    said["worse"] = {"events": "no address", "replay": "at all"}
    router.follow(said)
    following.follow(said)

    def noticed() -> bool:
        for frames in ([b"x"], [b"", (0).to_bytes(8, "big"), b"\xc1"]):
            bad.send_multipart(frames)
        return following.bad > 1

    eventually(noticed)
    a.serve(TOKENS)
    eventually(lambda: found(router)["a"] == 40)
