"""The front of a fleet over real applications with scripted engines: what is tried again, and what is merged."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import httpx
import pytest
from rigs.fake_engine import FakeEngine, FakeTokenizer

from mainstem.fleet.asking import Ask, Head, ReplicaLost
from mainstem.fleet.front import Front, Homes
from mainstem.fleet.reading import Reading
from mainstem.fleet.replica import answered
from mainstem.server.app import create_app
from mainstem.settings.fleet import FleetConfig

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi."}]}


class Rig:
    """Replicas in this process. `dies[name]`: after so many pieces of each answer; `asked`: who was asked what."""

    def __init__(self, names: Sequence[str] = ("a", "b")) -> None:
        self.engines: dict[str, Any] = {name: FakeEngine() for name in names}
        self.apps = {name: create_app(engine) for name, engine in self.engines.items()}
        self.dies: dict[str, int] = {}
        self.asked: list[tuple[str, Ask]] = []

    def names(self) -> list[str]:
        return list(self.apps)

    async def ask(self, ask: Ask) -> AsyncGenerator[Head | bytes, None]:
        names = [ask.to] if ask.to else [name for name in self.apps if name not in ask.avoid] or self.names()
        home = None if ask.prompt is None else ask.prompt.replica
        name = home if home in names else names[0]
        self.asked.append((name, ask))
        count = 0
        async with aclosing(answered(self.apps[name], ask, name)) as pieces:
            async for piece in pieces:
                if self.dies.get(name) == count:
                    raise ReplicaLost(name)
                count += 1
                yield piece


def front(rig: Rig, **options: Any) -> Front:
    homes = Homes()
    reading = Reading(FleetConfig(), FakeTokenizer(), "fake", 4096, homes.get)  # type: ignore[arg-type]
    given: dict[str, Any] = {"max_body_bytes": 1 << 20, "sleep": _no_sleep, **options}
    return Front(rig, reading.read, homes, **given)


async def _no_sleep(seconds: float) -> None:
    await anyio.sleep(0)


def calls(made: Front, use: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(made)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await use(client)

    return anyio.run(run)


def post(made: Front, path: str, body: Any) -> httpx.Response:
    reply: httpx.Response = calls(made, lambda client: client.post(path, json=body))
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_whose_replica_dies_before_its_first_token_is_sent_again(path: str, stream: bool) -> None:
    rig = Rig()
    rig.dies = {"a": 2 if stream and path == "/v1/messages" else 1}  # the head, and what opens a stream
    made = front(rig)
    reply = post(made, path, {**CHAT, "max_tokens": 50, "stream": stream})
    assert reply.status_code == 200
    assert reply.headers["x-mainstem-replica"] == "b"
    assert "Hello" in reply.text or "H" in reply.text
    assert (made.counts.again, made.counts.broken) == (1, 0)


@pytest.mark.parametrize(
    ("path", "last"),
    [("/v1/chat/completions", "data: [DONE]"), ("/v1/messages", "event: error"), ("/v1/responses", "event: error")],
)
def test_a_stream_whose_replica_dies_later_ends_with_one_error_event(path: str, last: str) -> None:
    rig = Rig()
    rig.dies = {"a": 5}
    made = front(rig)
    body = {"model": "fake", "input": "Hi.", "stream": True} if path == "/v1/responses" else {**CHAT, "stream": True}
    reply = post(made, path, {**body, "max_tokens": 50} if path == "/v1/messages" else body)
    assert reply.status_code == 200
    assert last in reply.text[-400:]
    assert "has ended" in reply.text
    assert made.counts.broken == 1


def test_one_that_drains_or_is_full_is_passed_over() -> None:
    rig = Rig()
    rig.apps["a"].state.service.draining = True
    assert post(front(rig), "/v1/chat/completions", CHAT).headers["x-mainstem-replica"] == "b"
    rig = Rig()
    rig.engines["a"].max_waiting = 0
    assert post(front(rig), "/v1/chat/completions", CHAT).headers["x-mainstem-replica"] == "b"
    rig.engines["b"].max_waiting = 0
    assert post(front(rig), "/v1/chat/completions", CHAT).status_code == 429


def test_a_request_that_kills_every_replica_is_given_up() -> None:
    rig = Rig()
    rig.dies = {"a": 0, "b": 0}
    reply = post(front(rig), "/v1/completions", {"model": "fake", "prompt": "Hi."})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_replica")
    assert len(rig.asked) == 3


def test_errors_of_a_client_are_the_replicas_and_are_not_tried_again() -> None:
    rig = Rig()
    assert post(front(rig), "/v1/completions", {"model": "other", "prompt": "Hi."}).status_code == 404
    assert post(front(rig), "/v1/completions", {"prompt": 3}).status_code == 400
    assert len(rig.asked) == 2


def test_a_body_that_is_too_large_is_refused() -> None:
    reply = post(front(Rig(), max_body_bytes=10), "/v1/messages", CHAT)
    assert reply.status_code == 413
    assert reply.json()["type"] == "error"


def test_prompts_are_read_with_their_namespace() -> None:
    rig = Rig()
    post(front(rig), "/v1/completions", {"model": "fake", "prompt": "Hi.", "cache_salt": "s", "prompt_cache_key": "k"})
    prompt = rig.asked[0][1].prompt
    assert prompt is not None
    assert bytes(prompt.tokens.tolist()) == b"Hi."
    assert prompt.namespace is not None and prompt.namespace.salt == "s"
    assert prompt.session == "k"


def test_a_response_is_found_at_its_replica() -> None:
    rig = Rig()
    rig.dies = {"a": 0}
    made = front(rig)
    first = post(made, "/v1/responses", {"model": "fake", "input": "Hi."})
    assert first.headers.get("x-mainstem-replica") == "b", first.text
    rig.dies = {}
    id_ = first.json()["id"]
    got = calls(made, lambda client: client.get(f"/v1/responses/{id_}"))
    assert (got.status_code, got.headers["x-mainstem-replica"]) == (200, "b")
    after = post(made, "/v1/responses", {"model": "fake", "input": "And?", "previous_response_id": id_})
    assert (after.status_code, after.headers["x-mainstem-replica"]) == (200, "b")
    assert calls(front(rig), lambda client: client.get(f"/v1/responses/{id_}")).status_code == 200  # asks all


def test_what_concerns_every_cache_goes_to_all() -> None:
    made = front(Rig())
    flushed = post(made, "/v1/cache/flush", {})
    assert flushed.json() == {"freed_pages": 0, "freed_tokens": 0}
    assert set(calls(made, lambda client: client.get("/v1/cache/stats")).json()["replicas"]) == {"a", "b"}
    tree = calls(made, lambda client: client.get("/v1/cache/tree")).text
    assert "replica a:" in tree and "replica b:" in tree
    metrics = calls(made, lambda client: client.get("/metrics")).text
    assert metrics.count("# TYPE mainstem_requests_total") <= 1
    assert 'replica="a"' in metrics and 'replica="b"' in metrics
    for line in metrics.splitlines():
        assert line.startswith("#") or "replica=" in line, line


def test_a_front_that_drains_refuses_generations_alone() -> None:
    made = front(Rig())
    assert anyio.run(made.drain, 1.0)
    assert post(made, "/v1/completions", {"model": "fake", "prompt": "Hi."}).json()["error"]["code"] == "draining"
    assert calls(made, lambda client: client.get("/health")).status_code == 503
    assert calls(made, lambda client: client.get("/v1/models")).status_code == 200
