"""/v1/responses: over a scripted engine, by the official client, and over a real engine whose cache it hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from rigs.clients import named_events, served
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.runtime.request import Delta
from mainstem.runtime.text.spelling import Spelled
from mainstem.server.apis.replies import ChunkUsage, Extras, Head
from mainstem.server.apis.responses.reply import ResponseReply
from mainstem.server.apis.responses.request import read
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
    settings = ServerConfig(**{"precompute_turns": 0.0, **config})  # which would be rendered between requests
    return TestClient(create_app(engine or FakeEngine(), settings, now=lambda: 1700000000.5, **timed))


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
        ({"input": [{"content": "x"}]}, "input[0].role", "required"),
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
        ({"tools": [{"type": "web_serach"}]}, "tools[0].type", "must be one of 'function', 'custom', 'namespace'"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather", "mode": "auto"}},
            "tool_choice.mode",
            "not a field of the type 'function'",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(fields: dict[str, Any], param: str | None, message: str) -> None:
    engine = FakeEngine()
    response = ask(client(engine), **({"input": "hi"} | fields))
    error = error_of(response, 404 if message == "not found" else 400)
    assert error["param"] == param
    assert message in error["message"]
    assert not engine.streams


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
    reply = ResponseReply(Head("resp_1", 1, "m"), Spelled, ChunkUsage(False), Extras(asked))
    reply.events(0, Delta("He", (1,)))
    failed = json.loads(reply.failing(internal_error()).split(b"data: ")[1])["response"]
    (item,) = failed["output"]
    assert (item["id"], item["status"], item["content"][0]["text"]) == ("msg_1_0", "incomplete", "He")


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


# --- a real engine ------------------------------------------------------------------------------------------------
