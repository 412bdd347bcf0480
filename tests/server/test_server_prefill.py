"""Requests that are sent to another server for their prompts first: what is sent, and what goes on without it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest
from rigs.fake_engine import FakeEngine
from rigs.hand_driven import Clock
from starlette.testclient import TestClient

from mainstem.errors import BadArgument
from mainstem.server.app import create_app
from mainstem.server.prefill import PrefillFirst, PrefillServer
from mainstem.settings.server import PrefillConfig, ServerConfig

PROMPT = "A prompt that is longer than two pages of sixteen tokens each."
URL = "http://127.0.0.1:9"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


class Elsewhere:
    """The other server: notes what it is asked, and answers as a test says."""

    def __init__(self, status: int | Exception = 200) -> None:
        self.status = status
        self.asked: list[tuple[str, dict[str, Any], Mapping[str, str], float]] = []

    def __call__(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
        self.asked.append((url, json.loads(body), headers, timeout_s))
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


class Rig:
    """A server that has its prompts computed elsewhere."""

    def __init__(self, elsewhere: Elsewhere, **config: Any) -> None:
        self.engine, self.clock = FakeEngine(), Clock()
        self.settings = PrefillConfig(**{"prefill_url": URL, "prefill_min_bytes": 0, **config})
        self.app = create_app(self.engine, ServerConfig(max_body_bytes=4096))  # type: ignore[arg-type]
        self.first = PrefillFirst(self.app, PrefillServer(self.settings, elsewhere), 4096, self.clock)
        self.http = TestClient(self.first)


BODIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "completion": (
        "/v1/completions",
        {"model": "fake", "prompt": PROMPT, "max_tokens": 5, "n": 2, "logprobs": 1, "cache_salt": "a"},
        {"model": "fake", "prompt": PROMPT, "max_tokens": 0, "cache_salt": "a"},
    ),
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "max_completion_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
        {**CHAT, "max_tokens": 0},
    ),
    "message": ("/v1/messages", {**CHAT, "max_tokens": 5}, {**CHAT, "max_tokens": 0}),
    "response": (
        "/v1/responses",
        {"model": "fake", "input": PROMPT, "prompt_cache_options": {"prewarm": False}},
        {"model": "fake", "input": PROMPT, "prompt_cache_options": {"prewarm": True}, "store": False},
    ),
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_prompt_alone_is_sent_first_and_the_answer_is_made_here(kind: str) -> None:
    path, body, alone = BODIES[kind]
    rig = Rig(elsewhere := Elsewhere())
    reply = rig.http.post(path, json=body, headers={"Authorization": "Bearer k", "X-Other": "1"})
    assert reply.status_code == 200, reply.text
    [(url, sent, headers, timeout_s)] = elsewhere.asked
    assert (url, sent, timeout_s) == (URL + path, alone, 30.0)
    assert headers == {"authorization": "Bearer k", "content-type": "application/json"}
    assert rig.first.counts == {"prefilled": 1}
    assert TestClient(rig.app).post(path, json=alone).status_code == 200, "the other server takes it"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, "refused"),
        (404, "refused"),
        (429, "refused"),
        (500, "failed"),
        (503, "failed"),
        (OSError("gone"), "failed"),
        (ExceptionGroup("several", [ZeroDivisionError("a bug")]), "failed"),
    ],
)
def test_whatever_goes_wrong_there_is_computed_here_and_a_server_that_fails_is_left_alone(
    status: Any, outcome: str
) -> None:
    rig = Rig(elsewhere := Elsewhere(status))
    assert [rig.http.post("/v1/chat/completions", json=CHAT).status_code for _ in range(4)] == [200] * 4
    assert rig.first.counts == ({"refused": 4} if outcome == "refused" else {"failed": 3, "skipped": 1})
    elsewhere.status = 200
    rig.clock.now_s += 4.9
    rig.http.post("/v1/chat/completions", json=CHAT)
    assert rig.first.counts["prefilled"] == (outcome == "refused")
    rig.clock.now_s += 0.1
    for _ in range(2):
        rig.http.post("/v1/chat/completions", json=CHAT)
    assert rig.first.counts["prefilled"] == 2 + (outcome == "refused")


@pytest.mark.parametrize(("took_s", "fails"), [(4.9, False), (5.0, False), (5.1, True), (5000.0, True)])
def test_a_client_that_waited_for_longer_than_five_seconds_may_have_left_because_of_it(
    took_s: float, fails: bool
) -> None:
    rig = Rig(Elsewhere())
    for _ in range(3):
        rig.first._note("gone", "", took_s)
    rig.http.post("/v1/chat/completions", json=CHAT)
    assert rig.first.counts == {"gone": 3, "skipped" if fails else "prefilled": 1}


def test_64_prompts_are_computed_elsewhere_at_a_time() -> None:
    assert PrefillServer(PrefillConfig(prefill_url=URL), Elsewhere())._limit.total_tokens == 64


def test_pages_are_read_while_the_other_server_computes() -> None:
    rig = Rig(elsewhere := Elsewhere())
    looked = threading.Semaphore(0)

    def slowly(*asked: Any) -> int:
        for _ in range(2):
            assert looked.acquire(timeout=60)
        return elsewhere(*asked)

    advise = rig.engine.advise
    rig.engine.advise = lambda *given, **rest: (advise(*given, **rest), looked.release())[0]  # type: ignore[method-assign]
    ahead = rig.app.state.generating.ahead
    first = PrefillFirst(rig.app, PrefillServer(rig.settings, slowly), 4096, rig.clock, ahead)
    with TestClient(first) as http:
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": 5, "cache_salt": "a"}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "Hello"
    action, tokens, namespace, _ = rig.engine.advised[0]
    assert (action, bytes(tokens).decode(), namespace.salt) == ("prefetch", PROMPT, "a")
    assert first.looks["done"] >= 2 and first.counts["prefilled"] == 1


def test_what_cannot_be_read_ahead_is_answered_like_any_other() -> None:
    rig = Rig(elsewhere := Elsewhere())
    ahead, looked, looks = rig.app.state.generating.ahead, threading.Semaphore(0), [1, 2]  # the second one has pages

    def slowly(*asked: Any) -> int:
        for _ in range(looks.pop(0)):
            assert looked.acquire(timeout=60)
        return elsewhere(*asked)

    def reads(*given: Any) -> Any:
        looked.release()
        return ahead(*given)

    first = PrefillFirst(rig.app, PrefillServer(rig.settings, slowly), 4096, rig.clock, reads)
    with TestClient(first) as http:
        assert http.post("/v1/completions", json={"model": "other", "prompt": PROMPT}).status_code == 404
        rig.engine.advise = lambda *given, **rest: looked.release() or 1 / 0  # type: ignore[method-assign, assignment, func-returns-value]
        assert http.post("/v1/completions", json={"model": "fake", "prompt": PROMPT}).status_code == 200
    assert (first.looks["failed"], first.counts["prefilled"]) == (1, 2)


class Fickle:
    """Computes prompts, fails, or does neither: as its mood is."""

    name, min_bytes = "fickle", 0
    mood = "hangs"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def prefill(self, scope: Any, body: bytes) -> int:
        if self.mood.startswith("hangs"):
            self._clock.now_s += 10 * (self.mood == "hangs for long")
            await anyio.sleep_forever()
        return 200 if self.mood == "works" else 500


def test_clients_that_leave_say_nothing_of_the_server() -> None:
    clock = Clock()
    fickle = Fickle(clock)
    first = PrefillFirst(create_app(FakeEngine(), ServerConfig()), fickle, 4096, clock)  # type: ignore[arg-type]
    http = TestClient(first)

    async def leave() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(CHAT).encode()}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        with anyio.move_on_after(0.01) as waiting:
            await first(scope, receive, send)
        assert waiting.cancelled_caught

    for _ in range(4):
        anyio.run(leave)
    fickle.mood = "fails"
    for _ in range(3):
        http.post("/v1/chat/completions", json=CHAT)
    assert first.counts == {"gone": 4, "failed": 3}
    clock.now_s += 6
    fickle.mood = "hangs"
    anyio.run(leave)  # the one that is tried
    fickle.mood = "works"
    http.post("/v1/chat/completions", json=CHAT)
    assert first.counts == {"gone": 5, "failed": 3, "prefilled": 1}
    fickle.mood = "hangs for long"
    for _ in range(3):
        anyio.run(leave)
    http.post("/v1/chat/completions", json=CHAT)
    assert first.counts == {"gone": 8, "failed": 3, "prefilled": 1, "skipped": 1}


def test_a_server_that_drains_has_nothing_computed() -> None:
    prefiller = PrefillServer(PrefillConfig(URL, prefill_min_bytes=0), elsewhere := Elsewhere())
    app = create_app(FakeEngine(), ServerConfig(), prefiller=prefiller)  # type: ignore[arg-type]
    with TestClient(app) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert 'mainstem_prefills_total{outcome="prefilled"} 1.0' in http.get("/metrics").text
        app.state.draining = True
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 503
    assert len(elsewhere.asked) == 1


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        (lambda http: http.get("/v1/models"), 200),
        (lambda http: http.post("/tokenize", json={"prompt": "a"}), 200),
        (lambda http: http.post("/v1/completions", content=b"{"), 400),
        (lambda http: http.post("/v1/completions", content=b"[1]"), 400),
        (lambda http: http.post("/v1/completions", content=b'{"prompt": "' + b"a" * 5000 + b'"}'), 413),
    ],
)
def test_what_has_no_prompt_is_not_sent(ask: Callable[[TestClient], Any], status: int) -> None:
    rig = Rig(elsewhere := Elsewhere())
    assert ask(rig.http).status_code == status
    assert not elsewhere.asked


def test_short_requests_are_computed_here() -> None:
    rig = Rig(elsewhere := Elsewhere(), prefill_min_bytes=200)
    assert rig.http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert not elsewhere.asked
    rig.http.post("/v1/completions", json={"model": "fake", "prompt": PROMPT * 4})
    assert len(elsewhere.asked) == 1


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"prefill_url": "somewhere"}, "prefill_url"),
        ({"prefill_url": "file:///etc/passwd"}, "prefill_url"),
        ({"prefill_url": "http://a:1/v1"}, "prefill_url"),
        ({"prefill_timeout_s": 3.0}, "prefill_timeout_s"),
        ({"prefill_url": URL, "prefill_timeout_s": 0}, "prefill_timeout_s"),
    ],
)
def test_settings_that_cannot_be_are_refused(config: dict[str, Any], name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        PrefillConfig(**config)
    assert caught.value.name == name
