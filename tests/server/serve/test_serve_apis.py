"""What a model says reaches clients of every API alike, streamed and whole, and is taken back as it came."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.apis import APIS, USER, ApiReply, Tool
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

WRITE = Tool("write", {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}})
TIME = Tool("time", {"type": "object", "properties": {}})
TOOLS = (WRITE, TIME)
WAYS = [(name, streamed) for name in APIS for streamed in (False, True)]
every_way = pytest.mark.parametrize(("api", "streamed"), WAYS)


def server(answer: str, format: str = "hermes") -> TestClient:
    config = ServerConfig(tool_call_parser=format, reasoning_parser="qwen3")  # type: ignore[arg-type]
    return TestClient(create_app(FakeEngine(lambda prompt: answer), config))


def call(arguments: str, name: str = "write") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def said(api: str, streamed: bool, answer: str, **asked: Any) -> ApiReply:
    return APIS[api].ask(server(answer), TOOLS, stream=streamed, **asked)


# ---------------------------------------------------------------- what a client asks for

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORMS: dict[str, dict[str, Any]] = {
    "chats": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
CHOICES: dict[str, list[Any]] = {  # no call, any call, and one of time
    "chats": ["none", "required", {"type": "function", "function": {"name": "time"}}],
    "responses": ["none", "required", {"type": "function", "name": "time"}],
    "messages": [{"type": "none"}, {"type": "any"}, {"type": "tool", "name": "time"}],
}
ALONE: dict[str, dict[str, Any]] = {
    "chats": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("api", APIS)
def test_what_a_grammar_holds(api: str) -> None:
    engine = FakeEngine(lambda prompt: call("{}", "time"))
    served = TestClient(create_app(engine, ServerConfig(tool_call_parser="hermes")))
    APIS[api].ask(served, TOOLS)
    for choice in CHOICES[api]:
        APIS[api].ask(served, TOOLS, tool_choice=choice)
    APIS[api].ask(served, (replace(WRITE, strict=True), TIME))
    APIS[api].ask(served, **FORMS[api])
    requests = [stream.request for stream in engine.streams]
    free, none, some, one, strict, form = (request.params.grammar for request in requests)
    assert free is none is None
    for grammar, names in ((some, True), (one, False), (strict, True)):
        assert grammar is not None and grammar.kind == "lark" and ("write" in grammar.text) == names
    assert form is not None and json.loads(form.text) == {**SCHEMA, "additionalProperties": False}
    assert len({request.tokens.tobytes() for request in requests[:-1]}) == 1, "so that the cache finds it"


@every_way
def test_without_parallel_calls_there_is_one(api: str, streamed: bool) -> None:
    answer = said(api, streamed, call("{}", "time") * 2, **ALONE[api])
    assert (answer.calls, answer.ended) == ([("time", "{}")], "calls")


@every_way
def test_no_call_is_one_where_none_is_chosen(api: str, streamed: bool) -> None:
    answer = said(api, streamed, call("{}", "time"), tool_choice=CHOICES[api][0])
    assert (answer.text, answer.calls) == (call("{}", "time"), [])


# ---------------------------------------------------------------- calls

SLIPS = {
    "a line break in a text": ('{"path": "a.py", "text": "import os\nprint(1)\n"}', "import os\nprint(1)\n"),
    "a tab": ('{"path": "a.py", "text": "a\tb"}', "a\tb"),
    "a comma at the end": ('{"path": "a.py", "text": "x",}', "x"),
    "Python": ("{'path': 'a.py', 'text': 'it\\'s'}", "it's"),
    "half a character": ('{"path": "a.py", "text": "x\\ud83d"}', "x\ufffd"),
    "an expression": ('{"path": "a.py", "text": "\\d+"}', "\\d+"),
    "a text of JSON": ("\"{'path': 'a.py', 'text': 'x',}\"", "x"),
    "a great number": ('{"path": "a.py", "text": "x", "n": 123456789012345678901234567890}', "x"),
}


@every_way
@pytest.mark.parametrize("slip", SLIPS)
def test_arguments_are_json_and_what_was_meant(api: str, streamed: bool, slip: str) -> None:
    written, meant = SLIPS[slip]
    answer = said(api, streamed, "I write." + call(written))
    ((name, arguments),) = answer.calls
    assert (name, answer.text, answer.ended) == ("write", "I write.", "calls")
    given = json.loads(arguments)
    assert (given["path"], given["text"]) == ("a.py", meant)
    assert given.get("n", 123456789012345678901234567890) == 123456789012345678901234567890


def test_a_number_beyond_those_of_json_comes_as_it_was_written() -> None:
    reply = server(call('{"n": 1e400}', "time")).post(
        "/v1/messages", json={"model": "fake", **APIS["messages"].body(TOOLS, 400, [], [USER])}
    )
    assert '"input":{"n": 1e400}' in reply.text


BROKEN = {
    "no end": '<tool_call>{"name": "write", "arguments": {"path": "a.py',
    "no arguments": '<tool_call>{"name": "write"',
    "a quote too many": call('{"path": "a "b".py"}'),
    "no object": call("7"),
    "no value": call('{"path": a.py}'),
}


@every_way
@pytest.mark.parametrize("why", BROKEN)
def test_what_cannot_be_called_is_text_and_does_not_end_as_a_call(api: str, streamed: bool, why: str) -> None:
    answer = said(api, streamed, f"I write. {BROKEN[why]}")
    assert (answer.text, answer.ended) == (f"I write. {BROKEN[why]}", "stop")
    assert answer.calls == [] or (streamed and api != "responses"), "a stream had begun it"


@every_way
def test_a_broken_call_beside_one_that_is_whole(api: str, streamed: bool) -> None:
    broken = call('{"path": a.py}')
    answer = said(api, streamed, call('{"path": "a"}') + broken)
    assert answer.text == broken
    assert answer.ended == "stop" or api == "responses", "not all that the model meant can be done"
    assert json.loads(answer.calls[0][1]) == {"path": "a"}
    assert len(answer.calls) == 1 or (streamed and api != "responses")


@every_way
def test_a_call_that_is_cut_at_the_limit(api: str, streamed: bool) -> None:
    answer = said(api, streamed, "I write. " + call('{"path": "a.py"}'), most=60)
    assert answer.ended == "length"
    if api == "messages" and not streamed:  # its arguments are an object: there is no half of one
        assert answer.calls == [] and answer.text == ("I write. " + call('{"path": "a.py"}'))[:60]
    else:
        assert (answer.text, [name for name, _ in answer.calls]) == ("I write.", ["write"])


# ---------------------------------------------------------------- stop texts

THOUGHT = "<think>\nQuestion: six times seven.\n\nThat is 42, user.\n</think>\n\n42 of them, Rome."


@every_way
@pytest.mark.parametrize("stop", ["Question:", "\n\n", "user", "</think>", "<think>"])
def test_a_stop_text_in_a_thought_does_not_count(api: str, streamed: bool, stop: str) -> None:
    answer = said(api, streamed, THOUGHT, stop=[stop])
    assert answer.thought == "Question: six times seven.\n\nThat is 42, user."
    assert (answer.text, answer.ended) == ("42 of them, Rome.", "stop")


@every_way
def test_a_stop_text_in_the_answer_counts_also_if_it_was_thought(api: str, streamed: bool) -> None:
    answer = said(api, streamed, THOUGHT, stop=["Rome", "42 of", "six"])
    assert (answer.text, answer.ended) == ("", "42 of" if api == "messages" else "stop")
    assert answer.thought.endswith("user.")


@every_way
@pytest.mark.parametrize("stop", ["a.py", '"}', "write", "\n", "<tool_call>", "}", "arguments"])
def test_a_stop_text_in_a_call_or_its_form_does_not_count(api: str, streamed: bool, stop: str) -> None:
    answer = said(api, streamed, "I do.\n" + call('{"path": "a.py"}') + "\n" + call("{}", "time"), stop=[stop])
    assert (answer.text, answer.ended) == ("I do.", "calls")
    assert [(name, json.loads(given)) for name, given in answer.calls] == [("write", {"path": "a.py"}), ("time", {})]


@every_way
def test_a_stop_text_before_a_call_ends_the_answer(api: str, streamed: bool) -> None:
    answer = said(api, streamed, "I do it. Yes." + call("{}", "time"), stop=["it."])
    assert (answer.text, answer.calls, answer.thought) == ("I do ", [], "")
    assert answer.ended == ("it." if api == "messages" else "stop")


@every_way
def test_blanks_before_the_end_are_text_and_may_be_a_stop_text(api: str, streamed: bool) -> None:
    assert said(api, streamed, "a b\n\n", stop=["\n\n"]).text == "a b"
    assert said(api, streamed, "a b\n\n", stop=["\n\n"], most=5).ended == ("\n\n" if api == "messages" else "stop")


@every_way
def test_calls_that_are_required_come_whatever_the_stop_text(api: str, streamed: bool) -> None:
    choice = {"type": "any"} if api == "messages" else "required"
    answer = said(api, streamed, call("{}", "time"), stop=["\n", "time", "{"], tool_choice=choice)
    assert (answer.calls, answer.ended) == ([("time", "{}")], "calls")


@every_way
@pytest.mark.parametrize("strict", [False, True])
def test_calls_of_a_tool_are_required_whose_schema_no_grammar_holds(
    api: str, streamed: bool, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
    choice = {"type": "any"} if api == "messages" else "required"
    made, tools = server(call('{"ids": []}', "f")), [Tool("f", schema, strict)]
    if strict:
        body = {"model": "fake", "stream": streamed, "tool_choice": choice, **APIS[api].body(tools, 400, [], [USER])}
        reply = made.post(APIS[api].path, json=body)
        assert reply.status_code == 400 and "uniqueItems" in reply.text
        return
    answer = APIS[api].ask(made, tools, stream=streamed, tool_choice=choice)
    assert (answer.calls, answer.ended) == ([("f", '{"ids": []}')], "calls")
    assert "the tool f are not held to all of its schema: no grammar holds uniqueItems" in caplog.text


def test_the_stop_text_can_be_part_of_the_answer() -> None:
    for streamed in (False, True):
        answer = said("chats", streamed, THOUGHT, stop=["Rome"], include_stop_str_in_output=True)
        assert (answer.text, answer.ended) == ("42 of them, Rome", "stop")


def test_nothing_is_generated_after_the_stop_text() -> None:
    for streamed in (False, True):
        engine = FakeEngine(lambda prompt: "<think>x</think>One. Two. Three.")
        served = TestClient(create_app(engine, ServerConfig(reasoning_parser="qwen3")))
        body = {"model": "fake", "messages": [USER], "stop": ["Two"], "stream": streamed}
        reply = served.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
        assert f'"completion_tokens":{len("<think>x</think>One. Two")}' in reply.text


# ---------------------------------------------------------------- what is said is taken back

PARTS = [
    "<think>\nHm.\n</think>", "<think>", "</think>", "Yes. ", "\n\n", " ", "é", call("{}", "time"),
    call('{"path": "a"}'), call("{'path': 'it\\'s\n',}"), call("7"), call('{"path": a}'),
    '<tool_call>{"name": "write", "arguments": {"pa',
    "<tool_call>", "</tool_call>", '{"name"', "\x00", "Stop",
]  # fmt: skip


@settings(deadline=None, max_examples=10)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=5),
    most=st.integers(1, 200),
    stop=st.sampled_from([(), ("Stop",), ("\n",), ("a", "}")]),
    alone=st.booleans(),
)
def test_every_answer_is_the_same_in_a_stream_and_comes_back(
    parts: list[str], most: int, stop: tuple[str, ...], alone: bool
) -> None:
    served = server("".join(parts))
    for api in APIS.values():
        answers = [api.ask(served, TOOLS, stream=streamed, most=most, stop=stop) for streamed in (False, True)]
        whole, streamed = answers
        assert (streamed.thought, streamed.ended) == (whole.thought, whole.ended)
        if api.path != "/v1/messages" or whole.ended != "length":
            assert streamed.text == whole.text
            came = iter(streamed.calls)  # a stream also has calls whose arguments turned out to be wrong
            assert all(each in came for each in whole.calls)
        if whole.ended == "calls":
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
            assert streamed.calls == whole.calls
        for answer in answers:
            results = [] if alone else api.results(answer.kept)
            api.ask(served, TOOLS, most=1, history=[USER, *answer.kept, *results, USER])
            plain = {
                "role": "assistant",
                "content": answer.kept[0].get("content") if api.path.endswith("completions") else "",
            }
            APIS["chats"].ask(served, TOOLS, most=1, history=[USER, plain, USER])
            for other in APIS.values():
                text = {"role": "assistant", "content": answer.text}
                other.ask(served, TOOLS, most=1, history=[USER, text, USER])


@every_way
@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_turn_of_the_assistant_is_taken(api: str, streamed: bool, content: Any) -> None:
    if content is None and api != "chats":
        return  # their reference has none
    said(api, streamed, "Yes.", history=[USER, {"role": "assistant", "content": content}, USER])
