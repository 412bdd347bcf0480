"""Breakpoints: which count, where they are in a prompt, what is retained for them, and what a usage says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rigs.app_client import client
from rigs.clients import named_events
from rigs.fake_engine import FakeEngine
from rigs.hand_driven import Clock
from rigs.templates import TEMPLATES, TOOL_TEMPLATES, byte_tokenizer
from starlette.testclient import TestClient

from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Prefix
from mainstem.runtime.text.prompts import Prompts, Template
from mainstem.server.apis.chat import request as chats
from mainstem.server.apis.generation import Generation
from mainstem.server.app import create_app
from mainstem.server.fields.breakpoints import TTLS, CacheOptions, Mark, counted
from mainstem.server.parsing.dialect import Dialect, speaking
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

HALF_HOUR = {"mode": "explicit", "ttl": "30m"}
PLAIN = {"mode": "explicit"}


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "It looks.", "parameters": schema}, **fields}


def chat(messages: Sequence[Any], **fields: Any) -> Generation:
    return chats.read(json.dumps({"model": "m", "messages": messages, **fields}).encode())


# ---------------------------------------------------------------- which count


def test_the_last_breakpoints_count_and_the_end_of_the_prompt_unless_only_explicit_ones_do() -> None:
    marks = [Mark(None, message=at) for at in range(6)]
    assert counted(marks, CacheOptions()) == [*marks[3:], Mark(None)]
    assert counted(marks, CacheOptions("implicit")) == [*marks[3:], Mark(None)]
    assert counted(marks, CacheOptions("explicit")) == marks[2:]
    assert counted([], CacheOptions("explicit")) == []
    assert len(counted(marks, CacheOptions())) == 4


def test_only_a_time_that_is_given_retains() -> None:
    own, without = Mark("1h", message=0), Mark(None, message=1)
    assert [mark.ttl for mark in counted([own, without], CacheOptions())] == ["1h", None, None]
    assert [mark.ttl for mark in counted([own, without], CacheOptions(ttl="30m"))] == ["1h", "30m", "30m"]
    assert without.prefix(7, 100.0) == Prefix(7)
    assert own.prefix(7, 86400.0) == Prefix(7, 3600.0, True, "1h")
    assert own.prefix(7, 100.0) == Prefix(7, 100.0, True, "1h")  # the most that the server allows
    assert {name: ttl.renewed for name, ttl in TTLS.items()} == {"5m": True, "1h": True, "30m": False, "12h": False}


# ---------------------------------------------------------------- where they are

TALK = [
    {"role": "user", "content": [part("first", prompt_cache_breakpoint=PLAIN), part("second"), part("third")]},
    {"role": "assistant", "content": "an answer", "prompt_cache_breakpoint": PLAIN},
    {"role": "user", "content": [part("and"), part("then", prompt_cache_breakpoint=HALF_HOUR)]},
]


def places(request: Generation, name: str) -> tuple[str, list[str]]:
    """Returns the text of a prompt, and what is before each mark in it."""
    tokenizer = byte_tokenizer(name)
    prompts = Prompts(tokenizer, 10_000)
    dialect: Dialect = speaking(prompts, tokenizer, ServerConfig())
    asked: Any = request.prompt
    given, tools = asked.messages, asked.tooling.tools

    def spoken(messages: Any, tools: Any) -> tuple[Any, Template]:
        taken, listed = dialect.conversation(messages, tools)
        return taken, Template(tools=listed)

    marks = request.marks
    made = prompts.prepare(
        *spoken(given, tools), [spoken(*mark.variant(given, tools)) for mark in marks if mark.inside]
    )
    whole = tokenizer.decode(made.tokens.tolist())
    ends = iter(made.partings)
    return whole, [tokenizer.decode(made.tokens[: next(ends)].tolist()) if each.inside else whole for each in marks]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_breakpoint_is_after_its_part_or_its_message(name: str) -> None:
    whole, found = places(chat(TALK), name)
    assert all(whole.startswith(before) for before in found)
    first, message, then, end = found
    assert first.endswith("first") and then.endswith("and\nthen") and end == whole
    assert "an answer" in message and "and" not in message.partition("an answer")[2]


@pytest.mark.parametrize("name", [*TOOL_TEMPLATES, "chatml", "gemma"])
def test_a_breakpoint_is_after_its_tool(name: str) -> None:
    """Some templates write tools as JSON, some their names alone, and for others an instruction lists them."""
    tools = [tool("look", prompt_cache_breakpoint=PLAIN), tool("listen", prompt_cache_breakpoint=PLAIN)]
    whole, (look, listen, _) = places(chat([{"role": "user", "content": "Now?"}], tools=tools), name)
    assert whole.startswith(look) and whole.startswith(listen) and len(look) < len(listen)
    assert "look" in look and "listen" not in look and "listen" in listen and "Now?" not in listen
    if name != "joined":
        assert look.count("required") == 1 and listen.count("required") == 2


def test_a_tool_that_is_left_out_ends_with_the_one_before_it() -> None:
    search = {"type": "web_search", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    request = chat([{"role": "user", "content": "Now?"}], tools=[search, tool("look"), search, tool("listen")])
    assert request.marks == (Mark("5m", tool=0), Mark(None))
    whole, (look, _) = places(request, "hermes")
    assert "look" in look and "listen" not in look and whole.startswith(look)


def test_cache_control_is_a_breakpoint_in_chats_too() -> None:
    """Some clients send Anthropic's field to OpenAI's routes, on messages, parts and tools."""

    def asked(name: str, own: Any, timed: Any) -> Generation:
        first = {"role": "system", "content": [part("first", **{name: own}), part("second")]}
        messages = [first, {"role": "user", "content": "x", name: timed}, {"role": "assistant", "content": "y"}]
        return chat(messages, tools=[tool("look", **{name: timed}), tool("listen")])

    found = asked("cache_control", {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}).marks
    assert found == asked("prompt_cache_breakpoint", PLAIN, {"mode": "explicit", "ttl": "1h"}).marks
    assert [mark.ttl for mark in found] == ["1h", None, "1h", None]


def test_cache_control_of_a_function_is_that_of_its_tool() -> None:
    """Users of litellm write it in either place; that of the tool counts where both have one."""
    look = tool("look")
    look["function"]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    tools = [look, tool("listen")]
    assert chat([{"role": "user", "content": "x"}], tools=tools).marks == (Mark("1h", tool=0), Mark(None))
    look["cache_control"] = {"type": "ephemeral", "ttl": "5m"}
    assert chat([{"role": "user", "content": "x"}], tools=tools).marks == (Mark("5m", tool=0), Mark(None))


def test_a_breakpoint_after_the_last_message_is_the_end_of_the_prompt() -> None:
    request = chat([{"role": "user", "content": "x", "prompt_cache_breakpoint": HALF_HOUR}])
    assert request.marks == (Mark("30m"), Mark(None))


def test_what_templates_see_has_no_breakpoints() -> None:
    asked: Any = chat(TALK).prompt
    with_marks, without = asked.messages, [{**turn} for turn in TALK]
    assert "prompt_cache_breakpoint" not in repr(with_marks)
    assert [turn["role"] for turn in with_marks] == [turn["role"] for turn in without]


# ---------------------------------------------------------------- what clients see


def asked(server: TestClient, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    body = {"model": "fake", "max_tokens": 5, **fields}
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]


LONG = "x" * 100


def test_what_is_written_is_counted_beside_what_is_found() -> None:
    server = client(FakeEngine())
    said = [{"role": "user", "content": LONG}]
    length = len(f"<user>{LONG}\n<assistant>")
    first = asked(server, messages=said)
    assert (first["cached_tokens"], first["cache_write_tokens"]) == (0, length // 16 * 16)
    assert "cache_write_tokens_by_ttl" not in first
    again = asked(server, messages=said)
    assert (again["cached_tokens"], again["cache_write_tokens"]) == (length // 16 * 16, 0)
    none = asked(server, messages=[{"role": "user", "content": "y" * 100}], prompt_cache_options={"mode": "explicit"})
    assert none["cache_write_tokens"] == 0


def test_a_time_is_passed_on_and_counted_by_its_name() -> None:
    engine = FakeEngine()
    server = client(engine)
    content = [part("a" * 40, prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"}), part("b" * 40)]
    details = asked(server, messages=[{"role": "user", "content": content}], prompt_cache_options={"ttl": "30m"})
    end = len("<user>" + "a" * 40)
    prompt = len("<user>" + "a" * 40 + "\n" + "b" * 40 + "\n<assistant>")
    assert engine.streams[-1].request.hints.prefixes == (
        Prefix(end, 43200.0, False, "12h"),
        Prefix(prompt, 1800.0, False, "30m"),
    )
    assert details["cache_write_tokens"] == prompt // 16 * 16
    assert details["cache_write_tokens_by_ttl"] == {"12h": end // 16 * 16, "30m": (prompt // 16 - end // 16) * 16}
    completed = asked(server, "/v1/completions", prompt=["p" * 64, "q" * 32], prompt_cache_options={"ttl": "30m"})
    assert completed["cache_write_tokens_by_ttl"] == {"30m": 96}


def test_beyond_the_bound_the_answer_is_the_same_and_the_usage_says_how_much_is_retained() -> None:
    engine = FakeEngine()
    engine.most_retained = 32
    details = asked(client(engine), "/v1/completions", prompt="p" * 64, prompt_cache_options={"ttl": "30m"})
    assert (details["cache_write_tokens"], details["cache_write_tokens_by_ttl"]) == (64, {"30m": 32})


def test_a_state_is_kept_where_a_breakpoint_is() -> None:
    engine = FakeEngine()
    engine.has_states = True
    content = [part("a" * 40, prompt_cache_breakpoint=HALF_HOUR), part("b" * 40)]
    asked(client(engine), messages=[{"role": "user", "content": content}])
    request = engine.streams[-1].request
    assert {prefix.end for prefix in request.hints.prefixes} == {len("<user>") + 40, len(request.tokens)}
    assert {len("<user>"), *(prefix.end for prefix in request.hints.prefixes)} == {*request.marks}


def test_a_prompt_that_is_truncated_has_its_breakpoints_where_they_are_then() -> None:
    engine = FakeEngine()
    content = [part("a" * 40, prompt_cache_breakpoint=HALF_HOUR), part("b" * 40)]
    asked(client(engine), messages=[{"role": "user", "content": content}], truncate_prompt_tokens=70)
    request = engine.streams[-1].request
    kept = request.hints.prefixes[0].end
    assert engine.tokenizer.decode(request.tokens[:kept]).endswith("a") and request.tokens[kept] == ord("\n")
    asked(client(engine), messages=[{"role": "user", "content": content}], truncate_prompt_tokens=10)
    assert [each.end for each in engine.streams[-1].request.hints.prefixes] == [10]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"ttl": "24h"}, "prompt_cache_options.ttl"),
        ({"mode": "auto"}, "prompt_cache_options.mode"),
        ({"time": "30m"}, "prompt_cache_options.time"),
        ({"prewarm": True}, "prompt_cache_options.prewarm"),
    ],
)
def test_options_that_do_not_exist_are_refused(options: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    body = {"model": "fake", "prompt": "x", "prompt_cache_options": options}
    response = client(engine).post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not engine.streams


# ---------------------------------------------------------------- a real engine

SYSTEM = "You are a careful assistant, and you know a long story of a wood."


@pytest.fixture(scope="module")
def model() -> Any:
    from bench.tiny_models import loaded, tiny

    tokenizer = byte_tokenizer("chatml")
    made = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    return replace(loaded(made), tokenizer=tokenizer)


@pytest.fixture
def serving(model: Any, one_thread: None) -> Iterator[tuple[TestClient, Engine, Clock]]:
    clock = Clock()
    with Engine(model, EngineConfig(pages=600, page_size=4, anchor_share=0.0), clock=clock) as engine:
        yield TestClient(create_app(engine, ServerConfig(api_key=("k", "l"), precompute_turns=0.0))), engine, clock


def message(server: TestClient, *messages: Any, key: str = "k", **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 4, "messages": messages, **fields}
    response = server.post("/v1/messages", json=body, headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    return dict(response.json())


def flood(server: TestClient, count: int, first: int = 0) -> None:
    """Other prompts, several times the cache."""
    for at in range(first, first + count):
        response = server.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": f"{at:04d}" + "z" * 296, "max_tokens": 1},
            headers={"x-api-key": "l"},
        )
        assert response.status_code == 200


def retained(engine: Engine) -> Any:
    for _ in range(3):  # so that a step has passed: two calls may come to the engine between the same steps
        engine.advise("demote", [2, 2, 2], "nobody")
        time.sleep(0.01)
    return engine.stats().cache.retention


def test_a_message_is_kept_for_its_time_and_a_hit_renews_it(serving: tuple[TestClient, Engine, Clock]) -> None:
    server, engine, clock = serving
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "5m"}}]
    first = message(server, {"role": "user", "content": "hi"}, system=system)["usage"]
    whole = len(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    end = len(f"<|im_start|>system\n{SYSTEM}") // 4 * 4
    assert first["cache_creation"] == {"ephemeral_5m_input_tokens": end, "ephemeral_1h_input_tokens": 0}
    assert (first["cache_read_input_tokens"], first["cache_creation_input_tokens"]) == (0, end)
    assert first["input_tokens"] == whole - end
    flood(server, 12)
    clock.now_s += 200
    again = message(server, {"role": "user", "content": "so"}, system=SYSTEM)["usage"]  # without a breakpoint
    assert end <= again["cache_read_input_tokens"] < whole - 8
    assert again["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    assert again["cache_creation_input_tokens"] == 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == whole
    clock.now_s += 299
    flood(server, 12, 20)
    assert retained(engine).prefixes == 1
    clock.now_s += 2
    assert retained(engine).prefixes == 0
    flood(server, 12, 40)
    assert message(server, {"role": "user", "content": "so"}, system=SYSTEM)["usage"]["cache_read_input_tokens"] < end


def test_a_breakpoint_without_a_time_retains_nothing(serving: tuple[TestClient, Engine, Clock]) -> None:
    server, engine, _ = serving
    control = {"cache_control": {"type": "ephemeral"}}
    used = message(server, {"role": "user", "content": [{"type": "text", "text": SYSTEM, **control}]}, **control)[
        "usage"
    ]
    assert used["cache_creation_input_tokens"] > 0
    assert used["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    assert retained(engine).prefixes == 0


def test_other_tenants_learn_nothing_from_usages(serving: tuple[TestClient, Engine, Clock]) -> None:
    server, engine, _ = serving
    control: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    said = {"role": "user", "content": SYSTEM}
    mine, other = (message(server, said, key=key, temperature=0, **control)["usage"] for key in "kl")
    assert mine == other and mine["cache_read_input_tokens"] == 0
    assert retained(engine).owners == 2


def test_a_prompt_is_computed_ahead_and_kept(serving: tuple[TestClient, Engine, Clock]) -> None:
    server, engine, clock = serving

    def respond(**fields: Any) -> Any:
        body = {"model": "tiny", "input": SYSTEM, "max_output_tokens": 4, **fields}
        response = server.post("/v1/responses", json=body, headers={"x-api-key": "k"})
        assert response.status_code == 200, response.text
        return named_events(response)[-1]["response"] if fields.get("stream") else response.json()

    for stream in (False, True):
        ahead = respond(prompt_cache_options={"prewarm": True, "ttl": "12h"}, stream=stream)
        assert (ahead["status"], ahead["output"], ahead["incomplete_details"]) == ("completed", [], None)
        assert ahead["usage"]["output_tokens"] == 0
    written = respond(prompt_cache_options={"prewarm": True, "ttl": "12h"}, input=SYSTEM * 2)["usage"]
    details = written["input_tokens_details"]
    assert details["cache_write_tokens_details"]["ttl_12h_tokens"] == details["cache_write_tokens"] > 0
    assert details["cached_tokens"] + details["cache_write_tokens"] > written["input_tokens"] - 4
    clock.now_s += 43_000
    flood(server, 12)
    assert retained(engine).prefixes == 2
    found = respond()["usage"]
    assert found["input_tokens_details"]["cached_tokens"] >= found["input_tokens"] - 4
    clock.now_s += 300
    assert retained(engine).prefixes == 0  # it is a minimum: a hit renews nothing
