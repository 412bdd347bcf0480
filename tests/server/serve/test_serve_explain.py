"""Explanations over HTTP: mishaps that are named, by a server with a tiny model; who may know what; every route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from machine import eventually, patience
from rigs.clients import named_events
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.cache.explain import Evicted, Parted, Stretch
from mainstem.errors import StorageError
from mainstem.runtime.engine import Engine
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig, HostPolicy, HostSize, StorageConfig, TierConfig
from mainstem.settings.server import ServerConfig

PAGE = 4
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RULES = "You answer in one word, whatever the question is."
Serving = tuple[TestClient, Engine]
Start = Callable[..., AbstractContextManager[Serving]]


@pytest.fixture(scope="module")
def model() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from bench.tiny_models import loaded, tiny

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<s>": 0, "</s>": 1} | {letter: at + 2 for at, letter in enumerate(letters)}
    words |= {"ow": len(words), "low": len(words) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("o", "w"), ("l", "ow")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    spoken = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    spoken.chat_template = TEMPLATE
    made = tiny("llama", vocab_size=len(spoken), max_position_embeddings=512)
    return replace(loaded(made), tokenizer=spoken)


@pytest.fixture
def start(model: Any, one_thread: None) -> Start:
    @contextmanager
    def started(tiers: TierConfig | None = None, pages: int = 128, **config: Any) -> Iterator[Serving]:
        tiers = tiers or TierConfig()
        with Engine(model, EngineConfig(pages=pages, page_size=PAGE, explain=True, tiers=tiers)) as engine:
            yield TestClient(create_app(engine, ServerConfig(**{"precompute_turns": 0.0, **config}))), engine

    return started


def complete(server: TestClient, prompt: Any, key: str = "", **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "explain": True, **fields}
    reply = server.post("/v1/completions", json=body, headers={"x-api-key": key})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(server: TestClient, *said: tuple[str, str], **fields: Any) -> Any:
    messages = [{"role": role, "content": text} for role, text in said]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1, "explain": True, **fields}
    reply = server.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def missed(answer: Any) -> list[Any]:
    """Returns the stretches of an answer's first prompt that were computed; those of all kinds must add up."""
    [prompt, *_] = answer["explanation"]
    stretches = prompt["stretches"]
    assert [0, *(each["end"] for each in stretches)] == [
        *(each["begin"] for each in stretches),
        prompt["prompt_tokens"],
    ]
    computed = [each for each in stretches if "cause" in each]
    lost = sum(each["end"] - each["begin"] for each in computed)
    assert prompt["cached_tokens"] + lost == prompt["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert prompt["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert sum(prompt["missed_tokens"].values()) == lost
    return computed


def flood(server: TestClient, count: int = 8) -> None:
    """Other prompts, more than the device holds."""
    for number in range(count):
        complete(server, f"{number:03d}" + "z" * 90, explain=False)


def flood_as(server: TestClient, key: str, count: int = 8) -> None:
    """The same of one tenant."""
    for number in range(count):
        complete(server, f"{number}" * 300, key=key, explain=False)


def counted(server: TestClient) -> tuple[float, float, dict[str, float]]:
    """Returns prompt tokens, those found, and those missed by cause, of the metrics."""
    text = server.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}
    found = sum(value for name, value in values.items() if name.startswith("mainstem_cached_tokens_total"))
    causes = {
        name.split('"')[1]: value for name, value in values.items() if name.startswith("mainstem_misses_tokens_total")
    }
    return values["mainstem_prompt_tokens_total"], found, {name: value for name, value in causes.items() if value}


# ---------------------------------------------------------------- mishaps


def test_a_date_in_the_system_prompt(start: Start) -> None:
    with start() as (server, _):
        chat(server, ("system", f"It is the 24th. {RULES}"), ("user", "Why?"))
        first, *_ = missed(chat(server, ("system", f"It is the 25th. {RULES}"), ("user", "Why?")))
    assert first["cause"] == "parted"
    assert first["parted"]["at"] == len("<system>It is the 2")
    assert first["parted"]["instead"].startswith("4th. You")
    assert "5th" in first["text"]


def tools(*names: str, about: str = "It looks.") -> list[Any]:
    functions = [{"name": name, "description": about, "parameters": {"type": "object"}} for name in names]
    return [{"type": "function", "function": function} for function in functions]


def test_a_changed_tool_and_tools_in_another_order(start: Start) -> None:
    said = ("user", "Why?")
    with start() as (server, _):
        chat(server, said, tools=tools("find", "look"))
        changed, *_ = missed(chat(server, said, tools=tools("find", "look", about="It sees.")))
        assert changed["cause"] == "parted" and changed["parted"]["instead"].startswith("looks.")
        order, *_ = missed(chat(server, said, tools=tools("look", "find")))
        assert order["cause"] == "parted" and order["parted"]["instead"].startswith("find")
        assert order["parted"]["at"] < changed["parted"]["at"]


def test_a_token_boundary(start: Start) -> None:
    with start() as (server, _):
        complete(server, f"{RULES} What is a river's fl and so on")
        first, *_ = missed(complete(server, f"{RULES} What is a river's flow and so on"))
    assert first["cause"] == "parted" and first["parted"]["instead"].startswith("l and so on")
    assert first["parted"]["at"] == len(f"{RULES} What is a river's f"), "before the letter that both have"


def test_evicted_and_how_much_room_would_have_kept_it(start: Start) -> None:
    prompt = RULES * 2
    with start() as (server, _):
        complete(server, prompt)
        flood(server)
        body = {"model": "tiny", "prompt": prompt}
        path = "/v1/cache/explain?route=/v1/completions"
        asked, plain = (
            server.post(path + more, json=body).json()["prompts"][0]["stretches"][0] for more in ("&distances=true", "")
        )
        assert server.post(path + "&distances=1", json=body).status_code == 400
        first, *rest = missed(complete(server, prompt))
        text = server.get("/metrics").text
    assert first["cause"] == asked["cause"] == "evicted" and "kept_by_tokens" not in plain["evicted"]
    gone = first["evicted"]
    assert (gone["tier"], gone["policy"], gone["why"]) == ("device", "lru", "policy")
    assert gone["ago_s"] >= 0 and gone["idle_s"] >= 0
    assert 128 * PAGE < asked["evicted"]["kept_by_tokens"] < 128 * PAGE + 8 * 100
    regret = sum(each["end"] - each["begin"] for each in (first, *rest) if each["cause"] == "evicted")
    assert f'mainstem_regret_tokens_total{{tier="device",why="policy"}} {regret}.0' in text


def storing(prefetch: Any = "wait_complete", **limits: Any) -> TierConfig:
    given = StorageConfig(prefetch=prefetch, prefetch_min_tokens=8, **limits)
    return TierConfig(HostSize(host_ratio=1.0), HostPolicy(load_min_tokens=8), storage="memory:", limits=given)


def forgotten(server: TestClient, engine: Engine) -> None:
    """Empties device and host once storage has everything."""

    def gone() -> bool:
        stats = engine.stats()
        assert stats.tiers is not None
        if stats.tiers.under_way or stats.tiers.queued:
            engine.wake()  # so that it looks whether they have ended
            return False
        assert server.post("/v1/cache/flush").status_code == 200
        return not (engine.stats().cache.pool.cached or engine.stats().tiers.host_cached)  # type: ignore[union-attr]

    eventually(gone)


def test_too_short_for_a_threshold(start: Start) -> None:
    tiers = TierConfig(HostSize(host_ratio=4.0), HostPolicy(load_min_tokens=400))
    with start(tiers) as (server, _):
        complete(server, RULES)
        flood(server)
        first, *_ = missed(complete(server, RULES))
    assert (first["cause"], first["detail"]) == ("too_short", "host")


def test_a_late_prefetch(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(storing("best_effort")) as (server, engine):
        complete(server, RULES * 2)
        forgotten(server, engine)
        let = threading.Event()
        backend = engine._core.tiers.store.backend  # type: ignore[union-attr]
        exists = backend.exists
        monkeypatch.setattr(backend, "exists", lambda keys: exists(keys) if let.wait(patience(60)) else [])
        try:
            first, *_ = missed(complete(server, RULES * 2))
        finally:
            let.set()
    assert (first["begin"], first["cause"], first["detail"]) == (0, "late", "meanwhile")


def test_a_dead_store(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(keys: Any) -> Any:
        raise StorageError("unreachable", "nobody answers")

    with start(storing(breaker_failures=2)) as (server, engine):
        complete(server, RULES * 2)
        forgotten(server, engine)
        monkeypatch.setattr(engine._core.tiers.store.backend, "exists", dead)  # type: ignore[union-attr]
        found = []
        for _ in range(4):
            first, *_ = missed(complete(server, RULES * 2))
            found.append((first["begin"], first["cause"], first.get("detail")))
            forgotten(server, engine)
    assert found[0] == (0, "failed", "unreachable")
    assert found[-1] == (0, "failed", "breaker")


def test_storage_found_and_a_load_that_fails(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(storing()) as (server, engine):
        complete(server, RULES * 2)
        forgotten(server, engine)
        answer = complete(server, RULES * 2)
        [only] = missed(answer)
        assert only["cause"] == "partial_page"
        assert answer["explanation"][0]["stretches"][0]["tier"] == "storage"
        asked, found, causes = counted(server)
        assert asked == found + sum(causes.values())


def test_not_stored_scored_and_removed(start: Start) -> None:
    with start() as (server, _):
        complete(server, RULES, cache_hints={"no_store": True})
        first, *_ = missed(complete(server, RULES))
        assert (first["begin"], first["cause"]) == (0, "not_stored")
        [scored] = missed(complete(server, RULES, prompt_logprobs=0))
        assert scored["cause"] == "scored"
        assert server.post("/v1/cache/remove", json={"all": True}).status_code == 200
        first, *_ = missed(complete(server, RULES))
        assert first["cause"] == "removed"


def test_what_was_flushed_is_removed_and_nobody_regrets_it(start: Start) -> None:
    with start() as (server, _):
        complete(server, RULES)
        assert server.post("/v1/cache/flush").status_code == 200
        first, *_ = missed(complete(server, RULES))
        assert first["cause"] == "removed" and "evicted" not in first
        regret = [
            line for line in server.get("/metrics").text.splitlines() if line.startswith("mainstem_regret_tokens")
        ]
        assert all(line.endswith(" 0.0") for line in regret)


def test_hits_and_misses_add_up_to_prompt_tokens(start: Start) -> None:
    with start(storing()) as (server, _):
        for number in range(30):
            text = "Say " * (number % 3) + f"{number % 7}" + RULES[number % 5 :] * (1 + number % 3)
            complete(server, text, n=1 + number % 2, explain=False)
        asked, found, causes = counted(server)
    assert found > 0 and len(causes) > 2
    assert asked == found + sum(causes.values())


def test_what_a_client_missed_that_left_counts_everywhere(start: Start) -> None:
    with start() as (server, _):
        complete(server, RULES)
        flood(server)
        id = asyncio.run(left(server, {"model": "tiny", "prompt": RULES, "stream": True, "max_tokens": 100}))
        known = server.get(f"/v1/cache/explain/{id}")
        asked, found, causes = counted(server)
        [tenant] = server.get("/v1/cache/explain").json()["tenants"]
        lines = server.get("/metrics").text.splitlines()
    assert known.status_code == 200 and known.json()["prompts"][0]["missed_tokens"]["evicted"] > 0
    assert tenant["prompt_tokens"] == asked == found + sum(causes.values())
    regret = sum(float(line.split()[1]) for line in lines if line.startswith("mainstem_regret_tokens_total"))
    assert regret == causes["evicted"]
    assert 'mainstem_requests_total{outcome="cancelled"} 1.0' in lines


async def left(server: TestClient, body: dict[str, Any]) -> str:
    """Asks for a stream, and leaves after its first event; returns the id of the answer."""
    inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    first = asyncio.Event()
    texts: list[str] = []

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await first.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if text := message.get("body", b"").decode():
            texts.append(text)
            first.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(server.app(scope, receive, send), patience(60))  # type: ignore[arg-type]
    return str(json.loads(texts[0].partition("data: ")[2])["id"])


# ---------------------------------------------------------------- who may know what


def scripted(**config: Any) -> tuple[TestClient, FakeEngine]:
    engine = FakeEngine()
    engine.config = replace(engine.config, explain=True)
    return TestClient(create_app(engine, ServerConfig(served_model_name=("fake", "tiny"), **config))), engine  # type: ignore[arg-type]


LONG = "A prompt that is longer than some pages of sixteen letters each."


def test_another_key_looks_like_never_seen(start: Start) -> None:
    with start(api_key=("k", "l"), admin_key="a") as (server, _):
        complete(server, RULES, key="k")
        shown = [complete(server, text, key="l")["explanation"][0] for text in (RULES, RULES.swapcase())]
        for each in shown:
            for stretch in each["stretches"]:
                stretch.pop("text", None)
        assert shown[0] == shown[1], "neither a cause nor a count differs"


def test_what_others_use_and_public_prefixes_are_for_the_admin(tmp_path: Any) -> None:
    path = tmp_path / "public.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 64}) + "\n")
    server, engine = scripted(api_key=("k", "l"), admin_key="a", public_prefix=path)
    gone = Evicted("policy", "device", "lru", 2, 5.0, 7.0, 9, 40)
    other = b"secret"
    parted = Parted(3, b"".join(int(letter).to_bytes(4, "little") for letter in other))
    engine.why = {0: Stretch(0, 0, cause="parted", eviction=gone, parted=parted)}
    answer = complete(server, LONG, key="k")
    [stretch] = answer["explanation"][0]["stretches"]
    assert stretch["parted"] == {"at": 3} and "kept_by_tokens" not in stretch["evicted"]
    mine = server.get(f"/v1/cache/explain/{answer['id']}", headers={"x-api-key": "k"})
    assert mine.json()["prompts"] == answer["explanation"]
    whole = server.get(f"/v1/cache/explain/{answer['id']}", headers={"x-api-key": "a"}).json()
    [stretch] = whole["prompts"][0]["stretches"]
    assert stretch["parted"] == {"at": 3, "instead": "secret"}
    assert stretch["evicted"]["kept_by_tokens"] == 40 * 16
    unknown = [server.get(f"/v1/cache/explain/{id}", headers={"x-api-key": "l"}) for id in (answer["id"], "cmpl-0000")]
    assert [each.status_code for each in unknown] == [404, 404]
    assert unknown[0].json()["error"]["code"] == unknown[1].json()["error"]["code"] == "explanation_not_found"


def test_the_admin_names_the_tenant_whose_cache_is_asked_about(start: Start) -> None:
    body, path = {"model": "tiny", "prompt": RULES}, "/v1/cache/explain?route=/v1/completions&distances=true"
    with start(api_key=("k", "l"), admin_key="a") as (server, _):
        complete(server, RULES, key="k")
        flood_as(server, "k")

        def ask(bearer: str, key: str) -> Any:
            headers = {"authorization": f"Bearer {bearer}", "x-api-key": key}
            return server.post(path, json=body, headers=headers)

        for reply in (ask("a", "k"), ask("k", "a")):
            [first, *_] = reply.json()["prompts"][0]["stretches"]
            assert first["cause"] == "evicted" and first["evicted"]["kept_by_tokens"] > 0
        assert ask("a", "l").json()["prompts"][0]["stretches"][0]["cause"] == "never_seen"
        [mine, *_] = ask("k", "k").json()["prompts"][0]["stretches"]
        assert mine["cause"] == "evicted" and "kept_by_tokens" not in mine["evicted"]
        refused = server.post(path, json=body, headers={"x-api-key": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-api-key")
        assert ask("x", "y").status_code == 401


def test_how_far_back_anything_is_known_is_for_the_admin() -> None:
    server, engine = scripted(api_key=("k", "l"), admin_key="a")
    engine.why = {0: Stretch(0, 0, cause="never_seen", since_s=90.0)}
    answer = complete(server, LONG, key="k")
    [stretch] = answer["explanation"][0]["stretches"]
    assert "since_s" not in stretch
    whole = server.get(f"/v1/cache/explain/{answer['id']}", headers={"x-api-key": "a"}).json()
    assert whole["prompts"][0]["stretches"][0]["since_s"] == 90.0


def test_misses_by_tenant_need_the_admin_key() -> None:
    server, _ = scripted(api_key=("k", "l"), admin_key="a")
    ids = [complete(server, LONG, key=key)["id"] for key in ("k", "l", "l")]
    assert server.get("/v1/cache/explain", headers={"x-api-key": "k"}).status_code == 403
    assert server.get(f"/cache/explain/{ids[0]}", headers={"x-api-key": "k"}).status_code == 403
    found = server.get("/v1/cache/explain", headers={"x-api-key": "a"}).json()
    assert [each["id"] for each in found["recent"]] == ids
    assert [(each["prompt_tokens"], each["cached_tokens"]) for each in found["tenants"]] == [
        (len(LONG), 0),
        (2 * len(LONG), 48),
    ]
    assert all(
        each["cached_tokens"] + sum(each["missed_tokens"].values()) == each["prompt_tokens"]
        for each in found["tenants"]
    )
    assert server.get(f"/cache/explain/{ids[0]}", auth=("any", "a")).json()["id"] == ids[0]


# ---------------------------------------------------------------- routes


@pytest.mark.parametrize("stream", [False, True])
def test_every_route_that_generates_explains_where_it_is_asked_to(stream: bool) -> None:
    server, _ = scripted()
    turns = [{"role": "user", "content": LONG}]
    bodies = {
        "/v1/completions": {"prompt": [LONG, LONG + "!"]},
        "/v1/chat/completions": {"messages": turns},
        "/v1/responses": {"input": LONG},
        "/v1/messages": {"messages": turns, "max_tokens": 5},
    }
    for route, body in bodies.items():
        for asks in (True, False):
            asked = {"model": "fake", "stream": stream, "explain": asks, **body}
            reply = server.post(route, json=asked)
            assert reply.status_code == 200, reply.text
            shown = _explained(route, reply, stream)
            if not asks:
                assert shown is None, route
                continue
            assert len(shown) == (2 if route == "/v1/completions" else 1)
            for prompt in shown:
                assert prompt["cached_tokens"] + sum(prompt["missed_tokens"].values()) == prompt["prompt_tokens"] > 50
        assert server.post(f"/v1/cache/explain?route={route}", json={"model": "fake", **body}).status_code == 200


def _explained(route: str, reply: Any, stream: bool) -> Any:
    if not stream:
        return reply.json().get("explanation")
    if route == "/v1/responses":
        return named_events(reply)[-1]["response"].get("explanation")
    if route == "/v1/messages":
        return named_events(reply)[-2].get("explanation")
    chunks = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line and "[DONE]" not in line]
    return json.loads(chunks[-1]).get("explanation")


def test_of_several_choices_the_one_that_found_the_fewest_counts() -> None:
    server, _ = scripted()
    answer = complete(server, LONG, n=3)
    [prompt] = answer["explanation"]
    assert prompt["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_server_without_the_feature_says_so_once() -> None:
    server = TestClient(create_app(FakeEngine()))  # type: ignore[arg-type]
    reply = server.post("/v1/completions", json={"model": "fake", "prompt": "x", "explain": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "explain_off" and "--explain" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "explain"
    for ask in (server.post("/v1/cache/explain?route=/v1/completions", json={}), server.get("/v1/cache/explain/x")):
        assert (ask.status_code, ask.json()["error"]["code"]) == (404, "explain_off")
    assert complete(server, "x", explain=False, model="fake").get("explanation") is None


def test_a_body_for_no_route_is_refused() -> None:
    server, _ = scripted()
    reply = server.post("/v1/cache/explain", json={"model": "fake", "prompt": "x"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "route"


# ---------------------------------------------------------------- diagnoses


def test_diagnoses_name_the_cause_where_their_api_has_no_word() -> None:
    server, engine = scripted()
    turns = [{"role": "user", "content": LONG}]
    body = {"model": "fake", "max_tokens": 5, "messages": turns, "diagnostics": {"previous_message_id": None}}
    first = server.post("/v1/messages", json=body).json()
    engine.flush()
    engine.why = {0: Stretch(0, 0, cause="evicted", eviction=Evicted("policy", "device", "lru", 2, 5.0, 7.0, 9, None))}
    body["diagnostics"] = {"previous_message_id": first["id"]}
    again = server.post("/v1/messages", json=body).json()
    reason = again["diagnostics"]["cache_miss_reason"]
    assert (reason["type"], reason["mainstem_cause"]) == ("unavailable", "evicted")
    assert reason["cache_missed_input_tokens"] == again["usage"]["input_tokens"]
    made = server.post("/v1/responses", json={"model": "fake", "input": LONG}).json()
    engine.flush()
    options = {"comparison_response_id": made["id"]}
    asked = {"model": "fake", "input": LONG, "prompt_cache_options": options}
    found = server.post("/v1/responses", json=asked).json()["prompt_cache_diagnostics"]
    assert (found["type"], found["mainstem_cause"]) == ("unavailable", "evicted")
