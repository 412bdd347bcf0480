"""Diagnoses: why a request cannot use the prefix of an earlier one; over a scripted engine, in both APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rigs.app_client import client
from rigs.clients import named_events
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.cache.namespaces import Namespace
from mainstem.runtime.request import ImageInput, PreparedPrompt
from mainstem.server.kept.response_store import ResponseStore
from mainstem.server.watch.diagnosis import Comparison, Finding, Fingerprint, Shape

PAGE = 4
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
REST = {"role": "user", "content": [{"type": "text", "text": "and then"}]}
RULES = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}


def fingerprint(
    tokens: Sequence[int],
    messages: Sequence[dict[str, Any]] = (USER,),
    tools: Sequence[dict[str, Any]] = (),
    namespace: Namespace | None = None,
    images: tuple[ImageInput, ...] = (),
) -> Fingerprint:
    prompt = PreparedPrompt(np.array(tokens, np.int32), images)
    return Shape.of(messages, tools).fingerprint(prompt, namespace, PAGE)


TEN = list(range(10))
OTHER = [*range(5), 99, *range(6, 20)]


@pytest.mark.parametrize(
    ("earlier", "now", "finding"),
    [
        (fingerprint(TEN), fingerprint([*TEN, 11, 12], (USER, REST)), Finding("same", 0, 8)),
        (fingerprint(TEN), fingerprint(TEN), Finding("same", 0, 8)),
        (fingerprint(TEN[:8]), fingerprint(TEN[:8]), Finding("same", 0, 4)),  # one token is always computed
        (fingerprint(TEN), fingerprint(OTHER, (REST,)), Finding("messages", 4, 8)),
        (fingerprint(TEN, (USER, REST)), fingerprint(OTHER, (USER,)), Finding("messages", 4, 8)),
        (fingerprint(TEN), fingerprint(OTHER, (USER, REST)), Finding("unknown", 4, 8)),
        (fingerprint(TEN), fingerprint(OTHER, (RULES, USER)), Finding("system", 4, 8)),
        (fingerprint(TEN), fingerprint(OTHER, (USER,), [{"name": "f"}]), Finding("tools", 4, 8)),
        (fingerprint(TEN), fingerprint(OTHER, (RULES, REST), [{"name": "f"}]), Finding("system", 4, 8)),
        (fingerprint(TEN), fingerprint(TEN, namespace=Namespace("adapter")), Finding("model", 8, 8)),
        (fingerprint(TEN), fingerprint(TEN, namespace=Namespace(salt="s")), Finding("unknown")),
        (fingerprint(TEN), fingerprint([7], (REST,)), Finding("messages")),
        (fingerprint([7]), fingerprint(TEN, (REST,)), Finding("same")),  # less than a page: nothing could be found
        (None, fingerprint(TEN), Finding("not_found")),
    ],
)
def test_the_first_difference_is_named(earlier: Fingerprint | None, now: Fingerprint, finding: Finding) -> None:
    assert now.compare(earlier) == finding


def test_places_in_a_body_make_no_difference_and_images_do() -> None:
    placed = [{"role": "user", "content": [{"type": "image", "url": "data:x", "at": at}]} for at in ("here", "there")]
    assert fingerprint(TEN, placed[:1]) == fingerprint(TEN, placed[1:]), "where in a body it was makes no difference"
    assert fingerprint(TEN, tools=[{"at": 1}]) != fingerprint(TEN, tools=[{"at": 2}])
    one, other = (ImageInput(2, 6, bytes([mark]) * 16, {}) for mark in (1, 2))
    found = fingerprint(TEN, (REST,), images=(other,)).compare(fingerprint(TEN, images=(one,)))
    assert found == Finding("messages", 8, 8)


def test_what_is_kept_is_for_its_owner_and_counts_what_it_takes() -> None:
    long = fingerprint(list(range(4000)))
    assert long.size > 16 * 1000
    store = ResponseStore[Fingerprint](long.size + 100, 10.0)
    shape = Shape.of((USER,), ())

    def cause(owner: bytes | None) -> str:
        found = Comparison(shape, "a", keeps=False).of("other", long, store, owner)
        assert found is not None
        return found.cause

    assert Comparison(shape, None, otherwise=Finding("same")).of("a", long, store, b"one") == Finding("same")
    assert (cause(b"one"), cause(b"two"), cause(None)) == ("same", "not_found", "not_found")
    assert Comparison(shape, None).of("b", long, store, b"two") is None
    assert store.size <= long.size + 100


# --- what clients see ---------------------------------------------------------------------------------------------

LONG = "Be kind, and know that this is longer than two pages."
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}


def message(server: TestClient, text: str = "hi", key: str = "none", **fields: Any) -> Any:
    turns = [{"role": "user", "content": text}]
    body = {"model": "fake", "max_tokens": 50, "system": LONG, "messages": turns, **fields}
    response = server.post("/v1/messages", json=body, headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    return named_events(response)[0]["message"] if fields.get("stream") else response.json()


def reason(server: TestClient, earlier: Any, **fields: Any) -> Any:
    answer = message(server, diagnostics={"previous_message_id": earlier["id"]}, **fields)
    return answer["diagnostics"] and answer["diagnostics"]["cache_miss_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_why_it_missed(stream: bool) -> None:
    server = client()
    plain = message(server, stream=stream)
    assert "diagnostics" not in plain
    first = message(server, diagnostics={"previous_message_id": None}, stream=stream)
    assert first["diagnostics"] is None
    assert reason(server, plain, stream=stream) == {"type": "previous_message_not_found"}  # it did not opt in
    assert reason(server, first, stream=stream) is None
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    more = [*said, {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}]
    assert reason(server, first, stream=stream, messages=more) is None
    changed = reason(server, first, stream=stream, text="bye")
    assert changed["type"] == "messages_changed"
    assert 0 <= changed["cache_missed_input_tokens"] <= 16
    gone = reason(server, first, stream=stream, system="Be brief, " * 6)
    assert gone["type"] == "system_changed" and gone["cache_missed_input_tokens"] >= 48
    assert reason(server, first, stream=stream, tools=[WEATHER])["type"] == "tools_changed"
    assert reason(server, first, stream=stream, cache_salt="s") == {"type": "unavailable"}
    variables = {"hint": "think"}  # of the template: no part of what is compared
    assert reason(server, first, stream=stream, chat_template_kwargs=variables) == {"type": "unavailable"}


def test_a_message_of_another_key_is_not_found() -> None:
    server = client(api_key=("k", "l"))
    first = message(server, key="k", diagnostics={})
    assert reason(server, first, key="l") == {"type": "previous_message_not_found"}
    assert reason(server, first, key="k") is None


def test_an_adapter_is_another_model(tmp_path: Any) -> None:
    engine = FakeEngine()
    engine.load_adapter("french", tmp_path)
    server = client(engine)
    first = message(server, diagnostics={})
    found = reason(server, first, model="french")
    assert found["type"] == "model_changed" and found["cache_missed_input_tokens"] >= 48


def respond(server: TestClient, input: Any = "hi", key: str = "none", **fields: Any) -> Any:
    body = {"model": "fake", "instructions": LONG, "input": input, **fields}
    response = server.post("/v1/responses", json=body, headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    return named_events(response)[-1]["response"] if fields.get("stream") else response.json()


def diagnosed(server: TestClient, earlier: Any, **fields: Any) -> Any:
    options = {"comparison_response_id": earlier["id"], **fields.pop("prompt_cache_options", {})}
    return respond(server, **fields, prompt_cache_options=options)["prompt_cache_diagnostics"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_says_whether_it_hit_and_why_it_missed(stream: bool) -> None:
    engine = FakeEngine()
    server = client(engine)
    first = respond(server, stream=stream)
    assert first["prompt_cache_diagnostics"] is None
    assert diagnosed(server, first, stream=stream) == {"type": "cache_hit"}
    assert diagnosed(server, first, stream=stream, input="x", previous_response_id=first["id"]) == {"type": "cache_hit"}
    changed = diagnosed(server, first, stream=stream, instructions="Be brief, whatever they say, and be quick.")
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    assert changed["cache_missed_tokens"] == changed["comparison_reusable_tokens"] >= 32
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
    assert diagnosed(server, first, stream=stream, tools=tools)["reason"] == "tools_changed"
    assert diagnosed(server, {"id": "resp_0"}, stream=stream) == {"type": "comparison_response_not_found"}
    assert diagnosed(server, first, stream=stream, cache_salt="s") == {"type": "unavailable"}
    engine.flush()
    assert diagnosed(server, first, stream=stream) == {"type": "unavailable"}  # evicted: there is no word for it


def test_a_response_that_is_not_stored_or_of_another_key_is_not_found() -> None:
    server = client(api_key=("k", "l"))
    unstored, stored = respond(server, key="k", store=False), respond(server, key="k")
    missing = {"type": "comparison_response_not_found"}
    assert diagnosed(server, unstored, key="k") == diagnosed(server, stored, key="l") == missing
    assert diagnosed(server, stored, key="k") == {"type": "cache_hit"}


def test_a_response_repeats_the_key_and_the_options_that_were_applied() -> None:
    server = client()
    body = respond(server, prompt_cache_key="agents", prompt_cache_options={"ttl": "30m", "mode": "explicit"})
    assert body["prompt_cache_key"] == "agents"
    assert body["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert respond(server, prompt_cache_options={})["prompt_cache_options"] is None


# --- the official clients -----------------------------------------------------------------------------------------
