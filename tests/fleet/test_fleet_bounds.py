"""Bounds of the front and of a replica, and how long they wait: clocks and sockets are the tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from mainstem.events.feed import Follower
from mainstem.fleet.front.app import Front, Homes
from mainstem.fleet.front.asking import Ask, Head, Part
from mainstem.fleet.front.following import Following, _Connection
from mainstem.fleet.front.routing import CostRouter
from mainstem.fleet.replica import answered, wait_until_warm

GET = Ask("GET", "/v1/models", b"", (), b"")


class Time:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)

    async def sleep(self, seconds: float) -> None:
        self.nap(seconds)


class Refusing:
    """Replicas of which each refuses every request, until a time."""

    def __init__(self, time: Time, until_s: float) -> None:
        self.time, self.until_s, self.asked = time, until_s, 0

    def names(self) -> list[str]:
        return ["a"]

    def everyone(self) -> list[str]:
        return ["a"]

    async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        self.asked += 1
        if self.time.now_s < self.until_s:
            yield Head(503, (), "a")
            return
        async with aclosing(answered(_hello, ask, "a")) as pieces:
            async for piece in pieces:
                yield piece


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("until_s", "status"), [(0.25, 200), (119.9, 200), (120.0, 200), (120.25, 503), (120_000.0, 503)]
)
def test_a_request_waits_for_a_replica_for_two_minutes(until_s: float, status: int) -> None:
    time = Time()
    replicas = Refusing(time, until_s)
    front = Front(replicas, lambda *_: None, Homes(), max_body_bytes=1, clock=time, sleep=time.sleep)

    async def ask() -> int:
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return (await client.get("/v1/models")).status_code

    assert anyio.run(ask) == status
    assert time.slept == [0.25] * int(min(-(-until_s // 0.25), 480))


@pytest.mark.parametrize(("timeout_s", "ends"), [(9.75, False), (10.0, True), (20.0, True)])
def test_a_front_waits_for_what_is_under_way(timeout_s: float, ends: bool) -> None:
    time = Time()
    front = Front(Refusing(time, 0.0), lambda *_: None, Homes(), max_body_bytes=1, clock=time, sleep=time.sleep)
    front.running = 1
    nap = time.nap

    def until_ten(seconds: float) -> None:
        nap(seconds)
        front.running = int(time.now_s < 9.9)

    time.nap = until_ten  # type: ignore[method-assign]
    assert anyio.run(front.drain, timeout_s) == ends
    assert time.now_s == min(timeout_s, 10.0)


def test_the_homes_of_65536_responses_are_known() -> None:
    homes = Homes()
    for number in range(1 << 16):
        homes.put(f"{number}", "a")
    assert homes.get("0") == "a"
    for number in range(3):
        homes.put("new", "b") if number else homes.put("one more", "a")
    assert [homes.get(id) for id in ("0", "1", "2", "one more", "new")] == [None, None, "a", "a", "b"]


# ---------------------------------------------------------------- following events


class Socket:
    """Notes what is sent, and has what the test puts in."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.setsockopt = self.subscribe = self.connect = lambda *_: None

    def send_multipart(self, frames: tuple[bytes, bytes]) -> None:
        self.sent.append(int.from_bytes(frames[1], "big"))


def test_a_question_is_asked_again_after_half_a_minute_without_an_answer() -> None:
    sockets = [Socket(), Socket()]
    made_one = iter(sockets)
    context: Any = SimpleNamespace(socket=lambda kind: next(made_one))
    follower = Follower()
    made = _Connection(context, ("live", "replay"), follower, 1000.0)
    replays = sockets[1]
    assert replays.sent == [0]
    for now_s, sent in ((1000.0, 1), (1029.9, 1), (1030.0, 2), (1030.1, 2), (1059.9, 2), (1060.0, 3), (31_060.0, 4)):
        made.ask(7, now_s)
        assert len(replays.sent) == sent, now_s
    assert replays.sent == [0, 7, 7, 7]


# ---------------------------------------------------------------- a replica


@pytest.mark.parametrize(("busy", "slept"), [(0, 3), (1, 4), (100, 103)])
def test_it_is_warm_after_three_looks_with_nothing_under_way(busy: int, slept: int) -> None:
    time, looks = Time(), iter([1] * busy + [0] * 10)
    engine: Any = SimpleNamespace(
        config=SimpleNamespace(tiers=SimpleNamespace(warm=True)),
        stats=lambda: SimpleNamespace(tiers=SimpleNamespace(under_way=next(looks))),
    )
    assert wait_until_warm(engine, 100.0, time, time.nap)
    assert time.slept == [0.05] * slept


def test_a_slow_reader_lets_64_pieces_wait() -> None:
    made = 0

    async def talks(scope: Any, receive: Any, send: Any) -> None:
        nonlocal made
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            made += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def read() -> None:
        async with aclosing(answered(talks, GET, "a")) as pieces:
            await anext(pieces)  # the head
            for taken in range(3):
                for _ in range(200):
                    await asyncio.sleep(0)
                assert made == 64 + taken
                await anext(pieces)
            assert len([piece async for piece in pieces]) >= 997

    asyncio.run(read())
    assert made == 1000


@pytest.mark.parametrize(("end", "kept"), [(4095, True), (4096, True), (4097, False), (4_096_000, False)])
def test_the_id_of_a_response_is_in_its_first_4096_bytes(end: int, kept: bool) -> None:
    field = b'"id":"resp_' + b"1" * 20 + b'"'
    body = b"{" + b" " * (end - 1 - len(field)) + field + b"}"
    assert body.index(field) + len(field) == end
    homes = Homes()

    class Replies(Refusing):
        async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
            yield Head(200, (), "a")
            yield body

    front = Front(Replies(Time(), 0.0), lambda *_: None, homes, max_body_bytes=1)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://front") as client:
            assert (await client.post("/v1/responses")).content == body

    anyio.run(ask)
    assert (homes.get("resp_" + "1" * 20) == "a") == kept


def test_sixteen_million_pages_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "mainstem.fleet.front.routing._core.Routing", lambda key, page_size, capacity: made.append(capacity)
    )
    CostRouter(Time())
    CostRouter(Time(), capacity=5)
    assert made == [16 << 20, 5]


def test_a_replica_that_comes_or_goes_is_noticed_after_a_fifth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
    waits: list[int] = []

    class Poller:
        def poll(self, wait_ms: int) -> list[Any]:
            waits.append(wait_ms)
            if len(waits) == 3:
                following._closing = True
            return []

    monkeypatch.setattr(zmq, "Poller", Poller)
    monkeypatch.setattr(Following, "_run", lambda self: None)
    following = Following(lambda *_: None)
    monkeypatch.undo()
    monkeypatch.setattr(zmq, "Poller", Poller)
    following._run()
    assert waits == [200] * 3
