"""The router of a fleet hears of the replicas' events over ZeroMQ, joins late, and outlives each of them."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from machine import eventually

from mainstem import PrefixCache
from mainstem.events.feed import Feed, Follower
from mainstem.events.publisher import Publisher
from mainstem.events.replica import Replica
from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.following import _ANSWER_S, _END, Following, _Connection
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


# ---------------------------------------------------------------- one connection, without sockets


class Wire:
    """A socket of a connection: what arrives in it, and what was sent."""

    def __init__(self) -> None:
        self.arrived: deque[list[bytes]] = deque()
        self.sent: list[int] = []

    def setsockopt(self, option: int, value: int) -> None: ...

    def subscribe(self, topic: bytes) -> None: ...

    def connect(self, address: str) -> None: ...

    def send_multipart(self, frames: tuple[bytes, bytes]) -> None:
        self.sent.append(int.from_bytes(frames[1], "big"))

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.arrived:
            raise zmq.Again
        return self.arrived.popleft()


class Sockets:
    """Makes the sockets of one connection."""

    def __init__(self) -> None:
        self.made: list[Wire] = []

    def socket(self, kind: int) -> Wire:
        self.made.append(Wire())
        return self.made[-1]


class Line:
    """A connection to a server that exists here, over a network that the test drives; it loses what a test wants."""

    def __init__(self, kept_bytes: int = 1 << 20) -> None:
        self.now_s = 1000.0
        self.feed, self.truth = Feed(self.now_s, kept_bytes), Replica()
        self.begun = 0
        self.follower = Follower()
        sockets: Any = Sockets()
        self.connection = _Connection(sockets, ("live", "replays"), self.follower, self.now_s)
        self.live, self.replays = sockets.made
        self.questions = self.replays.sent

    def restart(self) -> None:
        """The server begins anew at the same address; what is on its way still arrives."""
        self.begun += 1
        self.feed, self.truth = Feed(self.now_s + self.begun, 1 << 20), Replica()

    def publish(self, *events: Event, lost: bool = False) -> None:
        self.truth.apply(events)
        number, payload = self.feed.publish(events, self.now_s)
        if not lost:
            self.live.arrived.append([b"", number.to_bytes(8, "big"), payload])

    def answer(self, first: int) -> None:
        """Answers a question, as the server's thread does."""
        for number, payload in self.feed.replay(first, self.now_s, whole(self.truth)):
            self.replays.arrived.append([b"", number.to_bytes(8, "big"), payload])
        self.replays.arrived.append([b"", _END, b""])

    def receive(self) -> None:
        self.connection.receive_replayed()
        self.connection.receive_live(self.now_s)

    def caught_up(self) -> bool:
        known, wanted = followed(self.follower.replica), followed(self.truth)
        return known == wanted


def followed(replica: Replica) -> dict[int, set[Medium]]:
    return {hash_: block.media for hash_, block in replica.blocks.items() if block.media}


def whole(replica: Replica) -> list[Event]:
    stored = [replace(each.stored, medium=medium) for each in replica.blocks.values() for medium in sorted(each.media)]
    return [AllBlocksCleared(), *stored]


def page(number: int) -> BlockStored:
    return BlockStored((number,), None, (number,) * 4, 4, "GPU")


def test_a_router_asks_for_all_that_is_there_and_after_each_gap_for_what_it_missed() -> None:
    line = Line()
    first = line.feed.publish([], 0.0)[0]
    assert line.questions == [0]
    line.answer(line.questions.pop())
    line.receive()
    for gap in (1, 2, 3):  # one question for each
        line.publish(page(10 * gap), lost=True)
        line.publish(page(10 * gap + 1))
        line.publish(page(10 * gap + 2))
        line.receive()
        assert line.questions == [first + 1 + 3 * (gap - 1)], gap
        line.answer(line.questions.pop())
        line.receive()
        assert line.caught_up(), gap


def test_a_question_that_was_lost_is_asked_again_in_time_and_not_before() -> None:
    line = Line()
    assert line.questions == [0]
    for age, questions in ((0.0, 1), (0.99, 1), (1.0, 2), (1.99, 2), (2.0, 3)):
        line.now_s = 1000.0 + age * _ANSWER_S
        line.publish(page(questions))
        line.receive()
        assert len(line.questions) == questions, age
    line.answer(line.questions[-1])
    line.receive()
    assert line.caught_up()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_lost_repeated_or_late_is_made_good_by_the_next_heartbeats(seed: int) -> None:
    draw = random.Random(seed)
    line = Line(kept_bytes=draw.choice((0, 400, 1 << 20)))
    for turn in range(300):
        line.now_s += draw.choice((0.0, 0.1, 1.0))
        match draw.randrange(8):
            case 0 | 1 | 2:
                line.publish(page(draw.randrange(9)), lost=draw.random() < 0.3)
            case 3:
                line.publish(BlockRemoved((draw.randrange(9),), "GPU"), lost=draw.random() < 0.3)
            case 4:
                line.publish(AllBlocksCleared())
            case 5 if line.questions:
                first = line.questions.pop(0)
                if draw.random() < 0.7:  # else it is lost
                    line.answer(first)
                if draw.random() < 0.3:  # it comes twice
                    line.answer(first)
            case 6 if draw.random() < 0.1:
                line.restart()
            case _:
                line.receive()
        if turn % 100 == 99:  # nothing is lost any more; heartbeats come
            for _ in range(2):
                line.now_s += _ANSWER_S
                line.publish()
                line.receive()
                while line.questions:
                    line.answer(line.questions.pop(0))
                    line.receive()
            assert line.caught_up()
            line.follower.replica.check()
            line.feed.check()
