"""Hints by HTTP over a real engine: what they change, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rigs.families import tokenizer_of
from rigs.serving import unlike
from starlette.testclient import TestClient

from bench.tiny_models import loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES, LENGTH = 1000, 300
HINTS = "/v1/cache/hints"


@contextmanager
def serving() -> Iterator[TestClient]:
    tokenizer = tokenizer_of("llama3")
    made = replace(loaded(tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)), tokenizer=tokenizer)
    with Engine(made, EngineConfig(pages=PAGES, page_size=1, draft_tokens=0)) as engine:
        yield TestClient(create_app(engine, ServerConfig(precompute_turns=0.0)))


@pytest.fixture
def http() -> Iterator[TestClient]:
    """A server whose only client has asked for many pages, and so may stake some."""
    with serving() as client:
        for number in range(25):
            ask(client, 100 + number, 900, cache_hints={"next_use_s": 10})
        assert client.post("/v1/cache/flush").status_code == 200
        yield client


@pytest.fixture(scope="module")
def refusing() -> Iterator[TestClient]:
    """A server for what is refused whatever a client may stake."""
    with serving() as client:
        yield client


def ask(http: TestClient, number: int, length: int = LENGTH, **fields: Any) -> int:
    """Asks; returns how many tokens of the prompt were cached."""
    body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": unlike(number, length), "max_tokens": 1}
    answer = http.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def expect(http: TestClient, number: int, **times: Any) -> Any:
    return http.post(HINTS, json={"action": "expect", "prompt": unlike(number, LENGTH), **times})


def in_the_request(http: TestClient, **times: Any) -> None:
    ask(http, 3, cache_hints=times)


def by_the_route(http: TestClient, **times: Any) -> None:
    ask(http, 3)
    answer = expect(http, 3, **times)
    assert answer.json() == {"action": "expect", "tokens": LENGTH, "cached_tokens": LENGTH}


@pytest.mark.parametrize(
    ("say", "times"),
    [
        (in_the_request, {"next_use_s": 5000}),
        (by_the_route, {"next_use_steps": 100_000}),
        (by_the_route, {"next_use_s": 50}),
    ],
)
def test_what_is_used_late_gives_way_to_what_is_used_soon(
    http: TestClient, say: Callable[..., None], times: dict[str, float]
) -> None:
    for other in (1, 2):
        ask(http, other, cache_hints={"next_use_s": 100})
    say(http, **times)
    ask(http, 4)  # there is room for three
    late = times != {"next_use_s": 50}
    assert (ask(http, 3) < LENGTH - 1) == late


@pytest.mark.parametrize(
    ("times", "param"),
    [
        ({}, "next_use_s"),
        ({"next_use_s": -1}, "next_use_s"),
        ({"next_use_s": 86_401}, "next_use_s"),
        ({"next_use_s": "soon"}, "next_use_s"),
        ({"next_use_steps": -1}, "next_use_steps"),
        ({"next_use_steps": 1e7}, "next_use_steps"),
        ({"next_use_s": 5, "next_use_steps": 1}, "next_use_steps"),
        ({"next_use_s": 5, "ttl_s": 5}, "ttl_s"),
        ({"next_use": 5}, "next_use"),
    ],
)
def test_a_time_that_cannot_be_is_refused_by_its_name(refusing: TestClient, times: dict[str, Any], param: str) -> None:
    ask(refusing, 1)
    answer = expect(refusing, 1, **times)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and param in answer.json()["error"]["message"]
    if times and "ttl_s" not in times:
        model = refusing.get("/v1/models").json()["data"][0]["id"]
        answer = refusing.post("/v1/completions", json={"model": model, "prompt": [5, 6], "cache_hints": times})
        assert answer.status_code == 400, answer.text
        assert param in answer.json()["error"]["message"]


def test_other_actions_have_no_next_use(refusing: TestClient) -> None:
    ask(refusing, 1)
    for action in ("retain", "pin", "unpin", "demote", "end", "prefetch"):
        times = {"ttl_s": 5} if action == "retain" else {}
        body = {"action": action, "prompt": unlike(1, LENGTH), "next_use_s": 5, **times}
        answer = refusing.post(HINTS, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "next_use_s"), action


def test_nothing_is_expected_of_what_is_not_cached(refusing: TestClient) -> None:
    answer = expect(refusing, 9, next_use_s=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "prefix_not_found")
