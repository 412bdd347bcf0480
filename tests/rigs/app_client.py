"""A client of the application over a scripted engine, and the bodies of its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

PROMPT = "A prompt that is longer than two pages of sixteen tokens each."


def client(engine: FakeEngine | None = None, **config: Any) -> TestClient:
    """Returns a client of a server that asks the engine and the template only for what the test asks: no next turns."""
    return TestClient(create_app(engine or FakeEngine(), ServerConfig(**{"precompute_turns": 0.0, **config})))


def complete(server: TestClient, prompt: Any = PROMPT, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return server.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields}, headers=headers)


def chat(server: TestClient, content: Any = "hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", json={"model": "fake", "messages": messages, **fields})


async def called(
    app: Any, receive: Any, path: str = "/v1/completions", headers: Sequence[tuple[bytes, bytes]] = ()
) -> list[Any]:
    """Posts as an ASGI server does; returns the messages that the application sends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [*headers], "query_string": b""}
    await app(scope, receive, send)
    return sent


def events(response: Any) -> list[Any]:
    """The JSON of every event; the last must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    datas = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])
