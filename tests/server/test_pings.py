"""While a long prompt is computed, a stream says that it is alive; in virtual time."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from rigs.fake_engine import FakeEngine, FakeStream
from starlette.testclient import TestClient

from mainstem.runtime.request import Delta
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig
from tests.fleet.test_fleet_front import CHAT, Rig, events, front

PREFILL_S, STEP_S = 23.0, 2.0
PING = 'event: ping\ndata: {"type":"ping"}'
COMMENT = ": ping"

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi."},
    "/v1/chat/completions": {"messages": CHAT["messages"]},
    "/v1/responses": {"input": "Hi."},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 50},
}


class Time:
    """Virtual time: it goes on to the next sleeper when nobody else can."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        woken, self._count = anyio.Event(), self._count + 1
        heapq.heappush(self._sleepers, (self.now_s + seconds, self._count, woken))
        await woken.wait()

    async def run(self) -> None:
        while True:
            for _ in range(50):  # until all others wait
                await anyio.sleep(0)
            if self._sleepers:
                self.now_s, _, woken = heapq.heappop(self._sleepers)
                woken.set()
            else:
                await anyio.sleep(0.001)  # threads parse the body


class SlowStream(FakeStream):
    """Takes its time for the prompt, and for each token."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        engine: Any = self._engine
        await engine.time.sleep(engine.prefill_s)
        if engine.fails:
            yield self._last("error", 0, error="a secret of the engine")
            return
        async for delta in super().__aiter__():
            yield delta
            await engine.time.sleep(STEP_S)


class SlowEngine(FakeEngine):
    def __init__(self, time: Time, prefill_s: float = PREFILL_S) -> None:
        super().__init__(lambda prompt: "Hey")
        self.time, self.prefill_s, self.fails = time, prefill_s, False

    def submit(self, request: Any, **options: Any) -> FakeStream:
        stream = super().submit(request, **options)
        stream.__class__ = SlowStream
        return stream


def application(time: Time, engine: SlowEngine | None = None, **config: Any) -> Any:
    made: Any = engine or SlowEngine(time)
    return create_app(made, ServerConfig(**config), clock=time.clock, sleep=time.sleep)


def pieces_of(time: Time, app: Any, path: str, **fields: Any) -> list[tuple[float, str]]:
    """What the client gets of a request, and when: the status, then the pieces of the body."""
    body = json.dumps({"model": "fake", **BODIES[path], **fields}).encode()
    found: list[tuple[float, str]] = []

    async def send(message: Any) -> None:
        text = str(message["status"]) if "status" in message else message["body"].decode().rstrip("\n")
        if text:
            found.append((time.now_s, text))

    async def run() -> None:
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not given:
                await anyio.sleep_forever()
            return given.pop()

        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, "state": {}}
        async with anyio.create_task_group() as group:
            group.start_soon(time.run)
            await app({**scope, "http_version": "1.1", "asgi": {"version": "3.0"}, "scheme": "http"}, receive, send)
            group.cancel_scope.cancel()

    anyio.run(run)
    return found


def strip(text: str) -> str:
    """A piece of a stream without what differs from run to run."""
    return re.sub(r'"id":"[a-z]+[-_][^"]*"|"created(_at)?":\d+|"completed_at":\d+|"item_id":"[^"]*"', "", text)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_pings_while_its_prompt_is_computed_and_no_more(path: str) -> None:
    time = Time()
    pieces = pieces_of(time, application(time), path, stream=True)
    assert pieces[0] == (0.0, "200"), "the headers come at once"
    ping = PING if path == "/v1/messages" else COMMENT
    assert [at for at, text in pieces if text == ping] == [5.0, 10.0, 15.0, 20.0]
    assert "".join(text for at, text in pieces if at == PREFILL_S).count("H") >= 1, "the first token comes when it did"
    assert all(at in (0.0, 5.0, 10.0, 15.0, 20.0) or at >= PREFILL_S for at, _ in pieces)
    later = Time()
    quiet = pieces_of(later, application(later, ping_interval_s=0), path, stream=True)
    assert [strip(text) for _, text in pieces if text != ping] == [strip(text) for _, text in quiet]


def test_each_interval_counts_from_what_was_sent_last() -> None:
    time = Time()
    pieces = pieces_of(time, application(time, ping_interval_s=1.5), "/v1/chat/completions", stream=True)
    tokens = [PREFILL_S + STEP_S * step for step in range(4)]  # three letters, and the end
    pings = [at for at, text in pieces if text == COMMENT]
    assert [at for at in pings if at >= PREFILL_S] == [at + 1.5 for at in tokens]
    assert len([at for at in pings if at < PREFILL_S]) == PREFILL_S // 1.5


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_in_one_piece_has_none(path: str) -> None:
    time = Time()
    pieces = pieces_of(time, application(time), path)
    assert len(pieces) == 2 and pieces[0][0] >= PREFILL_S
    json.loads(pieces[1][1])


def test_no_metric_takes_a_ping_for_a_token() -> None:
    time = Time()
    app = application(time)
    pieces_of(time, app, "/v1/chat/completions", stream=True)
    text = TestClient(app).get("/metrics").text
    assert "mainstem_time_to_first_token_seconds_count 1.0" in text
    assert "mainstem_inter_token_latency_seconds_count 2.0" in text, "between three tokens"
    assert f"mainstem_inter_token_latency_seconds_sum {2 * STEP_S}" in text


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_fails_after_pings_says_so_as_without_them(path: str) -> None:
    time = Time()
    engine = SlowEngine(time)
    engine.fails = True
    pieces = pieces_of(time, application(time, engine), path, stream=True)
    assert pieces[0] == (0.0, "200") and "had an error while handling the request" in pieces[-1][1]
    assert [at for at, text in pieces if text in (PING, COMMENT)] == [5.0, 10.0, 15.0, 20.0]


@pytest.mark.parametrize("path", BODIES)
def test_the_front_of_a_fleet_passes_pings_on_and_a_stream_that_has_only_them_goes_on_elsewhere(path: str) -> None:
    def stream(dies: int | None) -> tuple[list[tuple[float, str]], Any]:
        time, rig = Time(), Rig()
        rig.apps = {name: application(time) for name in rig.names()}
        rig.dies = {} if dies is None else {"a": dies}
        made = front(rig)
        return pieces_of(time, made, path, stream=True), made.counts

    def said(pieces: list[tuple[float, str]]) -> list[str]:
        opened = {PING: 1} if path == "/v1/messages" else {}  # the stream begins with one
        found = events("\n\n".join(text for _, text in pieces[1:]))
        return [each for each in found if each not in (PING, COMMENT) or opened.pop(each, 0)]

    whole, _ = stream(None)
    assert sum(text in (PING, COMMENT) for _, text in whole) == 4
    assert whole[1][0] <= 5.0, "the headers are with the client after the first ping"
    went_on = 0
    for dies in range(1, 10):
        pieces, counts = stream(dies)
        assert said(pieces) == said(whole), f"lost after {dies} pieces"
        assert (counts.broken, counts.again + counts.continued) == (0, 1)
        went_on += counts.continued and pieces[-1][0] > 2 * PREFILL_S - 5
    assert went_on >= 2, "it was lost in its prefill, after a ping"
