"""/v1/responses: over a scripted engine, by the official client, and over a real engine whose cache it hits."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from rigs.bodies import changed
from rigs.clients import named_events, served
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.errors import RequestTooLong
from mainstem.runtime.request import Delta
from mainstem.runtime.text.spelling import Spelled
from mainstem.server.apis.replies import ChunkUsage, Extras, Head
from mainstem.server.apis.responses.items import Item
from mainstem.server.apis.responses.reply import ResponseReply
from mainstem.server.apis.responses.request import RULES, ResponseRequest, read
from mainstem.server.apis.responses.tools import Tool
from mainstem.server.app import create_app
from mainstem.server.errors import internal_error
from mainstem.settings.server import ServerConfig

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "What the sky does",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SPEAKS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def client(engine: FakeEngine | None = None, *, clock: Callable[[], float] | None = None, **config: Any) -> TestClient:
    timed = {} if clock is None else {"clock": clock}
    return TestClient(create_app(engine or FakeEngine(), ServerConfig(**config), now=lambda: 1700000000.5, **timed))


def ask(server: TestClient, input: Any = "hi", key: str | None = None, **fields: Any) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.post(PATH, json={"model": "fake", "input": input, **fields}, headers=headers)


def asked(engine: FakeEngine) -> str:
    """The last prompt."""
    return engine.tokenizer.decode(engine.streams[-1].request.tokens)


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_response() -> None:
    body = ask(client(), instructions="Be kind.", metadata={"a": "b"}, temperature=0.5).json()
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "fake")
    assert (body["created_at"], body["completed_at"]) == (1700000000, 1700000000)
    assert (body["error"], body["incomplete_details"], body["store"]) == (None, None, True)
    assert (body["instructions"], body["metadata"], body["temperature"]) == ("Be kind.", {"a": "b"}, 0.5)
    (item,) = body["output"]
    assert item == {
        "type": "message",
        "id": f"msg_{body['id'].removeprefix('resp_')}_0",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello, world.", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": len("<system>Be kind.\n<user>hi\n<assistant>"),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 32},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("<system>Be kind.\n<user>hi\n<assistant>") + 13,
    }


def test_a_stream_has_the_events_of_the_reference() -> None:
    events = named_events(ask(client(FakeEngine(lambda prompt: "Hey")), stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, added, part, delta = events[0], events[2], events[3], events[4]
    assert (first["response"]["status"], first["response"]["output"], first["response"]["usage"]) == (
        "in_progress",
        [],
        None,
    )
    assert (added["item"]["status"], added["item"]["content"], added["output_index"]) == ("in_progress", [], 0)
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (delta["delta"], delta["item_id"], delta["content_index"]) == ("H", added["item"]["id"], 0)
    assert events[-4]["text"] == "Hey"
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]] and last["status"] == "completed"
    assert last["usage"]["output_tokens"] == 3


def test_logprobs_come_where_they_are_asked_for() -> None:
    server = client(FakeEngine(lambda prompt: "<think>Hm</think>Yo"), **SPEAKS)
    for asks in ({"top_logprobs": 1}, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}):
        part = ask(server, **asks).json()["output"][1]["content"][0]
        assert [entry["token"] for entry in part["logprobs"]][-2:] == ["Y", "o"]
        assert part["logprobs"][-1]["top_logprobs"][0]["token"] == "A"
        assert "H" not in [entry["token"] for entry in part["logprobs"]], "tokens of reasoning"
    bare = ask(server, include=["message.output_text.logprobs"]).json()["output"][1]["content"][0]
    assert bare["logprobs"][-1]["top_logprobs"] == []
    assert ask(server, include=["reasoning.encrypted_content"]).json()["output"][1]["content"][0]["logprobs"] == []
    deltas = [event for event in named_events(ask(server, top_logprobs=0, stream=True)) if "delta" in event]
    assert all(event.get("logprobs", []) == [] for event in deltas)


def test_the_form_of_the_answer_and_of_calls_is_held_by_a_grammar() -> None:
    engine = FakeEngine()
    server = client(engine, tool_call_parser="hermes")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    formats: list[Any] = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "place", "schema": schema, "strict": True},
    ]
    for format in formats:
        body = ask(server, text={"format": format}).json()
        assert body["text"]["format"]["type"] == format["type"]
    for choice in ("auto", "required", {"type": "function", "name": "weather"}):
        assert ask(server, tools=[WEATHER], tool_choice=choice).json()["tool_choice"]
    grammars = [stream.request.params.grammar for stream in engine.streams]
    assert [None if grammar is None else grammar.kind for grammar in grammars] == [
        None,
        "json_object",
        "json_schema",
        None,
        "lark",
        "lark",
    ]
    assert json.loads(grammars[2].text) == {**schema, "additionalProperties": False}
    assert "weather" in grammars[4].text


# --- conversations ------------------------------------------------------------------------------------------------


def test_items_become_the_turns_of_a_conversation() -> None:
    engine = FakeEngine()
    text = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be true."},
        {"type": "message", "role": "user", "content": text},
        {"type": "message", "role": "assistant", "id": "msg_x", "status": "completed", "content": [
            {"type": "output_text", "text": "three", "annotations": [], "logprobs": []}]},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ]  # fmt: skip
    assert ask(client(engine), items, instructions="Be kind.").status_code == 200
    assert asked(engine) == (
        "<system>Be kind.\nBe brief.\nBe true.\n<user>one\ntwo\n<assistant>three\n<assistant>four\n"
        "<user>five\n<assistant>"
    )


def test_what_the_assistant_thought_said_and_called_in_a_row_is_one_message() -> None:
    engine = FakeEngine()
    seen: list[Any] = []
    template = engine.tokenizer.apply_chat_template

    def spying(messages: Any, **rest: Any) -> str:
        seen.append(messages)
        return template([{**each, "content": each["content"] or ""} for each in messages], **rest)

    engine.tokenizer.apply_chat_template = spying  # type: ignore[method-assign]
    called = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [
        {"role": "user", "content": "Weather?"},
        thought,
        {"role": "assistant", "content": "I look."},
        called,
        {**called, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Both."}]},
        called,
        {"type": "function_call_output", "call_id": "c1", "output": "fog"},
        {"role": "assistant", "content": "Fog."},
        {**thought, "content": [{"type": "reasoning_text", "text": "Once more."}]},
        {"role": "assistant", "content": "Really."},
    ]
    assert ask(client(engine), items, tools=[WEATHER]).status_code == 200
    shown = json.dumps(seen[-1])
    assert [shown.count(word) for word in ("I look.", "rain", "sun", "fog")] == [1, 1, 1, 1]
    roles = [message["role"] for message in seen[-1] if message["role"] != "system"]
    assert roles == ["user", "assistant"] * 3 + ["assistant"], "this template knows no tools"
    thoughts = [message.get("reasoning_content") for message in seen[-1] if message["role"] == "assistant"]
    assert thoughts == ["Hm.", "Both.", None, "Once more."]


def test_a_response_continues_an_earlier_one() -> None:
    engine = FakeEngine(lambda prompt: "<think>Hm.</think>Yes!")
    server = client(engine, **SPEAKS)
    first = ask(server, "one", instructions="Be kind.").json()
    second = ask(server, [{"role": "user", "content": "two"}], previous_response_id=first["id"]).json()
    assert asked(engine) == "<user>one\n<assistant>Yes!\n<user>two\n<assistant>", "instructions are not carried over"
    third = ask(server, "three", previous_response_id=second["id"], instructions="Be brief.").json()
    assert third["previous_response_id"] == second["id"]
    assert asked(engine) == (
        "<system>Be brief.\n<user>one\n<assistant>Yes!\n<user>two\n<assistant>Yes!\n<user>three\n<assistant>"
    )
    other = ask(server, "other", previous_response_id=first["id"], stream=True)
    last = named_events(other)[-1]["response"]
    assert ask(server, "more", previous_response_id=last["id"]).status_code == 200
    assert asked(engine) == "<user>one\n<assistant>Yes!\n<user>other\n<assistant>Yes!\n<user>more\n<assistant>"


def test_a_call_is_answered_by_the_next_request_alone() -> None:
    engine = FakeEngine(lambda prompt: "It rains." if "rain" in prompt else CALL)
    server = client(engine, **SPEAKS)
    first = ask(server, "Weather?", tools=[WEATHER]).json()
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "rain"}
    second = ask(server, [output], tools=[WEATHER], previous_response_id=first["id"]).json()
    assert second["output"][0]["content"][0]["text"] == "It rains."
    assert asked(engine).count('"Oslo"') == 1 and "Result of weather:\nrain" in asked(engine)


def test_a_reference_stands_for_an_item_of_an_answer() -> None:
    engine = FakeEngine(lambda prompt: "Yes!")
    server = client(engine, api_key=("one", "two"))
    first = ask(server, "one", "one").json()
    items = [{"role": "user", "content": "one"}, {"type": "item_reference", "id": first["output"][0]["id"]}]
    more = {"role": "user", "content": "more"}
    assert ask(server, [*items, more], "one").status_code == 200
    assert asked(engine) == "<user>one\n<assistant>Yes!\n<user>more\n<assistant>"
    assert error_of(ask(server, items, "two"), 404)["param"] == "input[1].id", "of another client"
    twice = [*items, items[1]]
    assert error_of(ask(server, twice, "one"), 404)["param"] == "input[2].id"
    for id in ("msg_1", "msg_a_0", f"{first['output'][0]['id']}1", "___"):
        error = error_of(ask(server, [{"type": "item_reference", "id": id}], "one"), 404)
        assert (error["param"], error["code"]) == ("input[0].id", "item_not_found")


# --- what is kept -------------------------------------------------------------------------------------------------


def test_a_response_is_kept_until_it_is_deleted() -> None:
    server = client()
    body = ask(server).json()
    assert server.get(f"{PATH}/{body['id']}").json() == body
    streamed = named_events(ask(server, stream=True))[-1]["response"]
    assert server.get(f"{PATH}/{streamed['id']}").json() == streamed
    deleted = server.delete(f"{PATH}/{body['id']}")
    assert deleted.json() == {"id": body["id"], "deleted": True, "object": "response"}
    for gone in (server.get(f"{PATH}/{body['id']}"), server.delete(f"{PATH}/{body['id']}")):
        assert error_of(gone, 404)["code"] == "response_not_found"
    error = error_of(ask(server, previous_response_id=body["id"]), 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")
    assert server.get(f"{PATH}/{streamed['id']}").status_code == 200
    assert error_of(server.get(f"{PATH}/{streamed['id']}?stream=true"), 400)["param"] == "stream"


def test_a_response_expires_and_gives_way() -> None:
    now = [0.0]
    server = client(clock=lambda: now[0], response_ttl_s=60.0, response_bytes=10_000)
    first = ask(server).json()["id"]
    now[0] = 59.0
    assert server.get(f"{PATH}/{first}").status_code == 200
    now[0] = 60.0
    assert error_of(server.get(f"{PATH}/{first}"), 404)
    assert error_of(ask(server, previous_response_id=first), 404)
    ids = [ask(server, "x" * 1000).json()["id"] for _ in range(20)]
    assert server.get(f"{PATH}/{ids[-1]}").status_code == 200
    assert error_of(server.get(f"{PATH}/{ids[0]}"), 404)


def test_a_response_belongs_to_its_key() -> None:
    server = client(api_key=("one", "two"))
    id = ask(server, key="one").json()["id"]

    def bearer(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    assert error_of(server.get(f"{PATH}/{id}", headers=bearer("two")), 404)
    assert error_of(server.delete(f"{PATH}/{id}", headers=bearer("two")), 404)
    assert error_of(ask(server, key="two", previous_response_id=id), 404)
    assert error_of(server.get(f"{PATH}/{id}"), 401)
    assert error_of(server.delete(f"{PATH}/{id}"), 401)
    assert server.get(f"{PATH}/{id}", headers=bearer("one")).status_code == 200


def test_nothing_is_kept_if_asked_or_if_there_is_no_memory() -> None:
    server = client()
    body = ask(server, store=False).json()
    assert body["store"] is False
    assert error_of(server.get(f"{PATH}/{body['id']}"), 404)
    without = client(response_bytes=0)
    assert error_of(without.get(f"{PATH}/{ask(without).json()['id']}"), 404)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "required"),
        ({"input": 7}, "input", "expected"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid enum value"),
        ({"input": [{"content": "x"}]}, "input[0].role", "required"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "required"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "refusal": "y"}]}]},
            "input[0].content[0].refusal",
            "not a field of the type 'input_text'",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [{"type": "input_text", "text": "x"}]}]},
            "input[0].summary[0].type",
            "must be one of 'reasoning_text', 'summary_text'",
        ),
        ({"input": [{"role": "user", "content": "x", "txet": 1}]}, "input[0].txet", "unknown field"),
        ({"include": ["everything"]}, "include[0]", "invalid enum value"),
        ({"tools": [{"type": "web_serach"}]}, "tools[0].type", "must be one of 'function', 'custom', 'namespace'"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "mode": "auto"}},
            "tool_choice.mode",
            "not a field of the type 'function'",
        ),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "invalid enum value"),
    ],
)  # fmt: skip
def test_bad_input_is_named(fields: dict[str, Any], param: str | None, message: str) -> None:
    engine = FakeEngine()
    response = ask(client(engine), **({"input": "hi"} | fields))
    error = error_of(response, 404 if message == "not found" else 400)
    assert error["param"] == param
    assert message in error["message"]
    assert not engine.streams


ANYTHING: dict[str, Any] = {
    "model": "fake",
    "instructions": "Be kind.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "web_search_call", "status": "completed"},
        {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "x", "outcome": {"type": "timeout"}}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}]},
    ],
    "tools": [
        WEATHER,
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}}},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 5,
}
FIELDS = [*ResponseRequest.__struct_fields__, *Item.__struct_fields__, *Tool.__struct_fields__, *RULES.refused]


@pytest.mark.parametrize("seed", range(2))
def test_no_body_is_a_fault_of_the_server(seed: int) -> None:
    rng, engine = random.Random(seed), FakeEngine()
    server = client(engine)
    found = Counter[int]()
    for _ in range(150):
        response = server.post(PATH, content=changed(ANYTHING, FIELDS, rng))
        found[response.status_code] += 1
        if response.status_code != 200:
            assert error_of(response, response.status_code)["message"]
    assert set(found) <= {200, 400, 404} and min(found[200], found[400]) > 10
    assert not engine.running()


def test_an_error_of_the_engine_has_the_names_of_this_api() -> None:
    engine = FakeEngine()

    def submit(request: Any, **options: Any) -> Any:
        raise RequestTooLong("prompt", 20, 25, answer=9)

    engine.submit = submit  # type: ignore[method-assign]
    error = error_of(ask(client(engine), max_output_tokens=9), 400)
    assert "you requested 29 tokens (20 in the input, 9 in the completion)" in error["message"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


def test_errors_of_an_image_have_its_path() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    items = [{"role": "system", "content": "x"}, {"role": "developer", "content": "y"}]
    error = error_of(ask(client(), [*items, {"role": "user", "content": [image]}]), 400)
    assert error["param"] == "input[2].content[0].image_url" and "accepts text only" in error["message"]


def test_advice_is_taken_and_named_in_a_header() -> None:
    response = ask(client(), "x", truncation="auto", text={"verbosity": "low"}, reasoning={"summary": "auto"})
    assert response.status_code == 200
    assert response.headers["X-Mainstem-Ignored"] == "truncation, text.verbosity, reasoning.summary"
    neutral = ask(client(), "x", truncation="disabled", text={"verbosity": "medium"}, user=None)
    assert "X-Mainstem-Ignored" not in neutral.headers


def test_unknown_fields_are_named_in_a_header_where_they_are_tolerated() -> None:
    server = client(unknown_fields="warn")
    response = ask(server, [{"role": "user", "content": "x", "mood": "good"}], novelty=1)
    assert response.status_code == 200
    assert set(response.headers["X-Mainstem-Unknown-Fields"].split(", ")) == {"novelty", "input[0].mood"}


def test_a_failure_under_way_ends_the_stream_with_the_response_as_far_as_it_came() -> None:
    events = named_events(ask(client(), "fail!", stream=True, instructions=None))
    assert events[-1]["type"] == "response.completed", "the prompt does not end so"
    engine = FakeEngine()
    engine.tokenizer.apply_chat_template = lambda *_, **__: "fail!"  # type: ignore[method-assign]
    server = client(engine)
    events = named_events(ask(server, stream=True))
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["output"], failed["usage"]) == ("failed", [], None)
    assert failed["error"]["code"] == "server_error" and "secret" not in failed["error"]["message"]
    assert error_of(server.get(f"{PATH}/{failed['id']}"), 404), "what failed is not kept"
    assert error_of(ask(server), 500)["type"] == "server_error"


def test_what_had_come_of_a_failed_answer_is_incomplete() -> None:
    asked: Any = read(b'{"model": "m", "input": "x"}')
    reply = ResponseReply(Head("resp_1", 1, "m"), Spelled, ChunkUsage(False), Extras(generation=asked))
    reply.events(0, Delta("He", (1,)))
    failed = json.loads(reply.failing(internal_error()).split(b"data: ")[1])["response"]
    (item,) = failed["output"]
    assert (item["id"], item["status"], item["content"][0]["text"]) == ("msg_1_0", "incomplete", "He")


def test_responses_count_as_requests() -> None:
    server = client()
    ask(server)
    ask(server, n=3)
    metrics = server.get("/metrics").text
    assert 'mainstem_requests_total{outcome="stop"} 1.0' in metrics
    assert 'mainstem_requests_total{outcome="refused"} 1.0' in metrics


# --- the official client ------------------------------------------------------------------------------------------


@pytest.mark.deadline
def test_the_official_client() -> None:
    engine = FakeEngine(lambda prompt: f"<think>Hm.</think>{CALL if 'Weather' in prompt else 'Yes!'}")
    with served(engine, api_key=("key", "other"), **SPEAKS) as url:
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
        first = api.responses.create(model="fake", input="one", instructions="Be kind.")
        assert (first.status, first.output_text) == ("completed", "Yes!")
        assert first.usage is not None and first.usage.output_tokens_details.reasoning_tokens > 0
        assert api.responses.retrieve(first.id).to_dict() == first.to_dict()

        again: Any = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
        whole = api.responses.create(model="fake", input=again, store=False)
        chained = api.responses.create(model="fake", input="two", previous_response_id=first.id)
        assert chained.usage is not None and whole.usage is not None
        assert chained.usage.input_tokens == whole.usage.input_tokens
        assert chained.usage.input_tokens_details.cached_tokens > 0

        tools: Any = [WEATHER]
        with api.responses.stream(model="fake", input="Weather?", tools=tools, tool_choice="auto") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert "response.reasoning_text.delta" in kinds and "response.function_call_arguments.delta" in kinds
        call = final.output[-1]
        assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo"}
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        answer = api.responses.create(model="fake", input=result, tools=tools, previous_response_id=final.id)
        assert answer.status == "completed"
        texts = list(api.responses.create(model="fake", input="x", stream=True))
        assert texts[-1].type == "response.completed"

        with pytest.raises(openai.BadRequestError) as bad:
            api.responses.create(model="fake", input="x", background=True)
        assert bad.value.param == "background"
        with pytest.raises(openai.NotFoundError):
            api.with_options(api_key="other").responses.retrieve(first.id)
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").responses.create(model="fake", input="x")
        api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.create(model="fake", input="x", previous_response_id=first.id)


@pytest.mark.deadline
def test_the_official_client_asynchronously_without_a_socket() -> None:
    import asyncio

    async def scenario() -> None:
        transport = httpx2.ASGITransport(create_app(FakeEngine(), ServerConfig()))  # type: ignore[arg-type]
        async with httpx2.AsyncClient(transport=transport) as http:
            api = openai.AsyncOpenAI(base_url="http://mainstem/v1", api_key="none", http_client=http)
            stream = await api.responses.create(model="fake", input="x", stream=True)
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            assert text == "Hello, world."

    asyncio.run(scenario())


# --- a real engine ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_response_computes_only_what_is_new(stream: bool) -> None:
    from dataclasses import replace

    from rigs.templates import byte_tokenizer

    from bench.tiny_models import loaded, tiny
    from mainstem.runtime.engine import Engine
    from mainstem.settings.engine import EngineConfig

    tokenizer = byte_tokenizer("chatml")
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    config = EngineConfig(pages=200, page_size=4)
    with Engine(replace(loaded(model), tokenizer=tokenizer), config) as engine:
        server = TestClient(create_app(engine))

        def say(input: str, **fields: Any) -> Any:
            fields = {"model": "tiny", "max_output_tokens": 8, "temperature": 0, "stream": stream, **fields}
            reply = server.post(PATH, json={"input": input, **fields})
            assert reply.status_code == 200, reply.text
            return named_events(reply)[-1]["response"] if stream else reply.json()

        first = say("Here is a long story, once upon a time in a wood.")
        assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
        second = say("And then?", previous_response_id=first["id"])
        found = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert first["usage"]["input_tokens"] - 4 <= found < second["usage"]["input_tokens"]
        other = say("And then?", previous_response_id=first["id"], cache_salt="other")
        assert other["usage"]["input_tokens_details"]["cached_tokens"] == 0
