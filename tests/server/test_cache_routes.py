"""The routes that show and change models, adapters and the cache, over a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from rigs.app_client import PROMPT, chat, client, complete, error_of, events
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.cache.namespaces import Namespace
from mainstem.cache.retention import Kept
from mainstem.errors import BadArgument, UnsupportedModel, UpdateUnderWay
from mainstem.runtime.request import Hints, Usage
from mainstem.server.apis.replies import usage_body

REMOVAL = "/v1/cache/remove"


def test_a_model_under_names_of_its_own(tmp_path: Path) -> None:
    engine = FakeEngine()
    server = client(engine, served_model_name=("org/one", "two"))
    listed = server.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("org/one", None), ("two", None)]
    assert server.get("/v1/models/org/one").json()["id"] == "org/one"
    for name in ("org/one", "two"):
        reply = server.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert reply.json()["model"] == "org/one"
    assert {stream.request.namespace for stream in engine.streams} == {None}, "all names share prefixes"
    assert "'org/one', 'two'" in error_of(complete(server), 404)["message"]
    body = {"lora_name": "two", "lora_path": str(tmp_path)}
    assert error_of(server.post("/v1/load_lora_adapter", json=body), 400)["param"] == "lora_name"
    assert server.post("/v1/load_lora_adapter", json={**body, "lora_name": "three"}).json()["parent"] == "org/one"
    assert server.post("/v1/completions", json={"model": "three", "prompt": "a"}).json()["model"] == "three"
    with pytest.raises(BadArgument, match="served_model_name"):
        client(engine, served_model_name=("three",))


def test_the_cache_routes() -> None:
    server = client()
    complete(server)
    assert server.get("/v1/cache/tree").text == "None: 1 prompts\n"
    assert server.get("/v1/cache/stats").json()["cache"]["pools"]["full"]["cached"] == 30
    pages = len(PROMPT) // 16
    assert server.post("/v1/cache/flush").json() == {"freed_pages": pages, "freed_tokens": pages * 16}
    assert server.post("/v1/cache/flush").json() == {"freed_pages": 0, "freed_tokens": 0}


def test_a_prefix_is_removed_for_its_owner() -> None:
    engine = FakeEngine()
    server = client(engine, api_key=("k", "l"), admin_key="root")

    def remove(key: str | None, **body: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.post("/v1/cache/remove", json=body, headers=headers)

    assert remove("k", prompt=[1, 2], cache_salt="s").json() == {"freed_pages": 1, "freed_tokens": 16}
    assert remove("root", api_key="k", prompt=[1, 2], cache_salt="s").status_code == 200
    assert engine.removed[0] == engine.removed[1] != ([1, 2], None)
    assert remove("l", prompt=[1, 2], cache_salt="s").status_code == 200
    assert engine.removed[2] != engine.removed[1]
    assert remove("k", all=True).status_code == 200
    assert engine.removed[3][0] == []
    assert remove("k", prompt="some text").status_code == 200
    assert len(engine.removed[4][0]) > 0
    calls = len(engine.removed)
    assert "api_key" in error_of(remove("k", api_key="l", all=True), 400)["message"]
    assert "api_key" in error_of(remove("root", all=True), 400)["message"]
    assert "api_key" in error_of(remove("root", api_key="nobody's", all=True), 400)["message"]
    assert remove("k", prompt=3).status_code == 400
    assert remove("k", all=True, model="nothing").status_code == 404
    assert remove(None, all=True).status_code == 401
    assert len(engine.removed) == calls


def test_one_key_removes_from_the_namespace_that_it_writes_to(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.load_adapter("french", tmp_path)
    server = client(engine, api_key=("k",))
    key = {"Authorization": "Bearer k"}
    for fields in ({}, {"model": "fake"}, {"model": "french"}, {"model": "french", "cache_salt": "s"}):
        complete(server, headers=key, **fields)
        assert server.post(REMOVAL, json={"all": True, **fields}, headers=key).status_code == 200
    spaces = [stream.request.namespace for stream in engine.streams]
    assert spaces == [None, None, Namespace("french"), Namespace("french", "s")]
    assert [namespace for _, namespace in engine.removed] == spaces


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"promt": "x"}, "promt: unknown field; this route has prompt, messages, tools, model, "),
        ({"all": True, "salt": "x"}, "salt: unknown field"),
        ({}, "exactly one of prompt, messages and all = true, got none"),
        ({"all": False}, "got none"),
        ({"prompt": None, "cache_salt": "s"}, "got none"),
        ({"prompt": "x", "all": True}, "got prompt and all"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "got prompt and messages"),
        ({"all": "yes"}, "all: expected `bool`"),
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"prompt": []}, "prompt: must have at least one token"),
        ({"prompt": ""}, "at least one token"),
    ],
)
def test_a_removal_that_does_not_say_plainly_what_removes_nothing(body: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    error = error_of(client(engine).post(REMOVAL, json=body), 400)
    assert message in error["message"]
    assert error["param"] in {*body, "prompt"}
    assert engine.removed == []


def test_a_chat_names_its_prefix_by_its_messages() -> None:
    engine = FakeEngine()
    server = client(engine)
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert server.post(REMOVAL, json={"messages": said}).status_code == 200
    tokens, namespace = engine.removed[0]
    assert (engine.tokenizer.decode(tokens), namespace) == ("<system>Be brief.\n<user>hi\n", None)
    chat(server, "hi", messages=said)
    assert engine.streams[0].request.tokens.tolist()[: len(tokens)] == tokens
    said[1]["content"] = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    error = error_of(server.post(REMOVAL, json={"messages": said}), 400)
    assert error["param"] == "messages[1].content[0].image_url.url"
    assert len(engine.removed) == 1


def test_an_adapter_is_a_model(tmp_path: Path) -> None:
    engine = FakeEngine()
    server = client(engine)
    loaded = server.post("/v1/load_lora_adapter", json={"lora_name": "french", "lora_path": str(tmp_path)})
    assert loaded.status_code == 200, loaded.text
    assert (loaded.json()["id"], loaded.json()["parent"]) == ("french", "fake")
    assert engine.adapter_paths == {"french": str(tmp_path)}
    listed = server.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("fake", None), ("french", "fake")]
    assert server.get("/v1/models/french").json()["parent"] == "fake"

    def cached(model: str, **fields: Any) -> int:
        body = complete(server, model=model, **fields).json()
        assert body["model"] == model
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("fake"), cached("french"), cached("fake"), cached("french")] == [0, 0, 48, 48]
    assert [cached("french", cache_salt="s"), cached("fake", cache_salt="s")] == [0, 0]
    assert {chunk["model"] for chunk in events(complete(server, model="french", stream=True))} == {"french"}
    assert [stream.request.namespace for stream in engine.streams[:2]] == [None, Namespace(adapter="french")]

    unloaded = server.post("/v1/unload_lora_adapter", json={"lora_name": "french"})
    assert unloaded.json() == {"id": "french", "deleted": True, "object": "model"}
    assert error_of(complete(server, model="french"), 404)["message"].endswith("this server has 'fake'.")
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["fake"]


def test_adapters_that_cannot_be_had(tmp_path: Path) -> None:
    engine = FakeEngine()
    server = client(engine)

    def load(**body: Any) -> Any:
        return server.post("/v1/load_lora_adapter", json=body)

    assert error_of(load(lora_name="x", lora_path=str(tmp_path / "no")), 400)["param"] == "lora_path"
    assert error_of(load(lora_name="x"), 400)["param"] == "lora_path"
    assert error_of(load(lora_name=7, lora_path="x"), 400)["param"] == "lora_name"
    assert error_of(server.post("/v1/unload_lora_adapter", json={"lora_name": "x"}), 404)["code"] == "model_not_found"

    def unsupported(name: str, path: str) -> None:
        raise UnsupportedModel("adapter x: it does not fit the model")

    engine.load_adapter = unsupported  # type: ignore[assignment]
    assert "does not fit" in error_of(load(lora_name="x", lora_path=str(tmp_path)), 400)["message"]


HINTS = "/v1/cache/hints"


def test_a_hint_reaches_the_engine_for_the_prefix_it_names() -> None:
    engine = FakeEngine()
    server = client(engine)
    answer = server.post(HINTS, json={"action": "retain", "prompt": [1, 2], "ttl_s": 60, "cache_salt": "s"})
    assert answer.json() == {"action": "retain", "tokens": 16, "cached_tokens": 32}
    said = [{"role": "user", "content": "hi"}]
    for action in ("pin", "unpin", "demote", "end", "prefetch"):
        assert server.post(HINTS, json={"action": action, "messages": said}).status_code == 200
    assert engine.advised[0] == ("retain", [1, 2], Namespace(salt="s"), 60)
    assert {(action, namespace, ttl_s) for action, _, namespace, ttl_s in engine.advised[1:]} == {
        (action, None, None) for action in ("pin", "unpin", "demote", "end", "prefetch")
    }
    assert engine.tokenizer.decode(engine.advised[1][1]) == "<user>hi\n"


def test_an_unknown_field_in_a_hint_is_refused_wherever_it_is() -> None:
    engine = FakeEngine()
    said = [{"role": "user", "content": "hi", "nmae": "x"}]
    error = error_of(client(engine).post(HINTS, json={"action": "pin", "messages": said}), 400)
    assert (error["param"], error["code"]) == ("messages[0].nmae", "unknown_field")
    assert not engine.advised


def test_when_a_prefix_is_used_next_reaches_the_engine() -> None:
    engine = FakeEngine()
    server = client(engine)
    for times in ({"next_use_s": 60.5}, {"next_use_steps": 3}):
        assert server.post(HINTS, json={"action": "expect", "prompt": [1, 2], **times}).status_code == 200
        complete(server, cache_hints=times)
        chat(server, cache_hints=times, prompt_cache_key="a talk")
    assert [times for _, _, _, times in engine.advised] == [{"next_use_s": 60.5}, {"next_use_steps": 3}]
    given = [replace(stream.request.hints, prefixes=()) for stream in engine.streams]
    assert given == [
        Hints(next_use_s=60.5),
        Hints(next_use_s=60.5, session="a talk"),
        Hints(next_use_steps=3),
        Hints(next_use_steps=3, session="a talk"),
    ]


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ({"next_use_s": -1}, "cache_hints.next_use_s"),
        ({"next_use_s": 5, "no_store": True}, "cache_hints.next_use_s"),
        ({"next_use_steps": 1, "no_store": True}, "cache_hints.next_use_steps"),
    ],
)
def test_a_next_use_that_cannot_be_is_refused_by_its_name(hints: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    server = client(engine)
    for answer in (complete(server, cache_hints=hints), chat(server, cache_hints=hints)):
        error = error_of(answer, 400)
        assert error["param"] == param and error["message"].startswith(param)
    assert not engine.streams


@pytest.mark.parametrize(
    ("kept", "action", "status", "code"),
    [
        (Kept(0, 0), "pin", 404, "prefix_not_found"),
        (Kept(0, 0), "unpin", 404, "prefix_not_found"),
        (Kept(0, 48), "retain", 409, "hint_limit"),
        (Kept(0, 48), "prefetch", 409, "hint_limit"),
    ],
)
def test_a_hint_that_concerns_nothing_says_why(kept: Kept, action: str, status: int, code: str) -> None:
    engine = FakeEngine()
    engine.kept = kept
    body = {"action": action, "prompt": [1, 2], **({"ttl_s": 5} if action == "retain" else {})}
    error = error_of(client(engine).post(HINTS, json=body), status)
    assert error["code"] == code and error["message"].startswith(f"{action}: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1]}, "action"),
        ({"action": "keep", "prompt": [1]}, "action"),
        ({"action": "pin"}, "prompt"),
        ({"action": "pin", "prompt": [1], "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"action": "pin", "prompt": [1], "ttl": 5}, "ttl"),
        ({"action": "pin", "prompt": [1], "api_key": "k"}, "api_key"),
    ],
)
def test_a_hint_that_does_not_say_plainly_what_is_refused(body: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    assert error_of(client(engine).post(HINTS, json=body), 400)["param"] == param
    assert engine.advised == []


def test_a_client_advises_on_its_own_prefixes_only() -> None:
    engine = FakeEngine()

    def hint(server: TestClient, key: str | None, **body: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.post(HINTS, json={"action": "pin", "prompt": [1, 2], **body}, headers=headers)

    server = client(engine, api_key=("k", "l"), admin_key="root")
    for key, body in (("k", {}), ("l", {}), ("root", {"api_key": "l"})):
        assert hint(server, key, **body).status_code == 200
    mine, other, by_admin = (namespace for _, _, namespace, _ in engine.advised)
    assert mine != other == by_admin and None not in (mine, other)
    assert hint(server, "k", api_key="l").status_code == hint(server, "root").status_code == 400
    assert hint(server, "m").status_code == hint(server, None).status_code == 401
    one = client(engine, api_key=("k",), admin_key="root")  # clients of one key share
    assert hint(one, "k").status_code == hint(one, "root").status_code == 200
    assert hint(one, None).status_code == 401
    assert hint(client(engine, admin_key="root"), None).status_code == 200


def test_hints_of_a_request_reach_the_engine() -> None:
    engine = FakeEngine()
    server = client(engine)
    complete(server, cache_hints={"retain_s": 60, "one_shot": True})
    chat(server, cache_hints={"no_store": True})
    chat(server, cache_hints=None)
    assert [replace(stream.request.hints, prefixes=()) for stream in engine.streams] == [
        Hints(60, one_shot=True),
        Hints(no_store=True),
        Hints(),
    ]
    for wrong in ({"retain_s": 0}, {"retain_s": 86_401}, {"retain_s": -1}, {"retain_s": 5, "no_store": True}):
        assert error_of(complete(server, cache_hints=wrong), 400)["param"] == "cache_hints.retain_s"
    assert "ttl" in error_of(complete(server, cache_hints={"ttl": 5}), 400)["message"]
    assert len(engine.streams) == 3


def test_weights_are_changed_if_the_server_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"path": str(tmp_path)}
    assert error_of(client().post("/v1/update_weights", json=body), 404)["code"] == "no_weight_updates"
    engine = FakeEngine()
    server = client(engine, allow_weight_updates=True, api_key=("k",), admin_key="root")

    def update(key: str = "root", **body: Any) -> Any:
        return server.post("/v1/update_weights", json=body, headers={"Authorization": f"Bearer {key}"})

    assert update("k", **body).status_code == 403 and not engine.updates
    assert update(**body).json() == {"weight_version": 1}
    assert update(**body, mode="lag", lag=2).json() == {"weight_version": 2}
    assert engine.updates == [(str(tmp_path), "strict", 0), (str(tmp_path), "lag", 2)]
    assert error_of(update(path="/nowhere"), 400)["param"] == "path"
    for wrong in ({"mode": "soft"}, {"lags": 1}, {"lag": "x"}):
        error_of(update(**body, **wrong), 400)

    def busy(*_: Any, **how: Any) -> int:
        raise UpdateUnderWay("another update of the weights is under way")

    monkeypatch.setattr(engine, "update_weights", busy)
    assert error_of(update(**body), 409)["code"] == "update_under_way"


def test_an_answer_says_which_weights_made_its_tokens_once_they_have_changed() -> None:
    usage = Usage(3, 0, 5, 0.0, 0.0, 0.0)
    assert usage_body([usage], 1).weight_versions is UNSET
    changed = replace(usage, weight_versions=((0, 2), (1, 3)))
    found = msgspec.to_builtins(usage_body([changed, usage], 2).weight_versions)
    assert found == [[{"version": 0, "tokens": 2}, {"version": 1, "tokens": 3}], [{"version": 0, "tokens": 0}]]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("responses", {"input": "x"}),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
        ("score", {"text_1": "x", "text_2": "y"}),
    ],
)
def test_every_api_says_which_weights_made_an_answer(path: str, fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    server = client(engine)

    def usages(**more: Any) -> list[Any]:
        response = server.post(f"/v1/{path}", json={"model": "fake", **fields, **more})
        assert response.status_code == 200, response.text
        if not more:
            return [response.json()["usage"]]
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return [used for each in events if (used := each.get("usage") or each.get("response", {}).get("usage"))]

    assert not any("weight_versions" in each for each in usages())
    engine.weight_versions = ((2, 1), (3, 2))
    said = [{"version": 2, "tokens": 1}, {"version": 3, "tokens": 2}]
    [whole] = usages()
    assert whole["weight_versions"] == [said] * (2 if path == "score" else 1)
    if path != "score":
        options = {} if path in ("responses", "messages") else {"stream_options": {"include_usage": True}}
        assert usages(stream=True, **options)[-1]["weight_versions"] == [said]


def test_a_group_is_a_hint() -> None:
    engine = FakeEngine()
    server = client(engine)
    assert complete(server, cache_hints={"group": "g"}).status_code == 200
    assert engine.streams[0].request.hints.group == "g"
    for wrong in ("", "g" * 257):
        assert error_of(complete(server, cache_hints={"group": wrong}), 400)["param"] == "cache_hints.group"
    assert complete(server, cache_hints={"group": "g" * 256}).status_code == 200
