"""Tools and thoughts over HTTP, by the official client: a scripted engine, and the real default model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from machine import patience
from rigs.fake_engine import FakeEngine
from rigs.serving import real_server
from rigs.templates import byte_tokenizer
from starlette.testclient import TestClient

from bench.tiny_models import loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Request
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig, SamplingParams
from mainstem.settings.server import ServerConfig

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Says.", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
BROKEN: Any = {"type": "function", "function": {"name": "broken", "parameters": {"properties": {"a": {"type": "b"}}}}}
ASK: Any = [{"role": "user", "content": "Rome?"}]
ANSWER = '{"name": "weather", "arguments": {"city": "Rome"}}'


class Served:
    """A scripted engine, and the official client of its server. `prompts` are what the engine was asked."""

    def __init__(self, answer: str, template: str | None = None, **config: Any) -> None:
        self.prompts: list[str] = []
        self._answer = answer
        self.engine: Any = FakeEngine(self._next)
        if template is not None:
            self.engine.tokenizer = byte_tokenizer(template)
        self.http = TestClient(create_app(self.engine, ServerConfig(**config)))
        self.api = openai.OpenAI(base_url="http://testserver/v1", api_key="k", http_client=self.http)

    def _next(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._answer

    def ask(self, messages: Any = ASK, **fields: Any) -> Any:
        return self.api.chat.completions.create(model="fake", messages=messages, **fields)


def test_a_call_and_its_result() -> None:
    served = Served(ANSWER)
    choice = served.ask(tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Rome"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    served.ask([*ASK, choice.message.model_dump(), result], tools=TOOLS)
    first, second = served.prompts
    assert "<system>You can call these tools" in first
    assert '"name": "time"' in first
    assert second.startswith(first.removesuffix("<assistant>")), "so that the cache finds it"
    assert second.endswith(f"<assistant>{ANSWER}\n<user>Result of weather:\nsunny\n<assistant>")


def test_streamed_calls() -> None:
    two = f'[{ANSWER}, {{"name": "time"}}]'
    served = Served(two)
    chunks = list(served.ask(tools=TOOLS, stream=True, logprobs=True, stream_options={"include_usage": True}))
    calls: dict[int, Any] = {}
    for chunk in chunks[:-1]:
        for call in chunk.choices[0].delta.tool_calls or ():
            begun = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            begun["arguments"] += call.function.arguments
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        ("weather", '{"city": "Rome"}'),
        ("time", "{}"),
    ]
    assert len({call["id"] for call in calls.values()}) == 2
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks[:-2] if chunk.choices[0].logprobs) == len(two)
    assert chunks[-1].usage.completion_tokens == len(two)


def test_the_clients_own_accumulator() -> None:
    served = Served(ANSWER)
    with served.api.chat.completions.stream(model="fake", messages=ASK, tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'


def test_each_choice_has_its_own_calls() -> None:
    served = Served(ANSWER)
    choices = served.ask(tools=TOOLS, n=2).choices
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["weather"] * 2
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id


def test_formats_and_thoughts_by_option() -> None:
    served = Served(f"I wonder.</think>\n<tool_call>{ANSWER}</tool_call>", tool_call_parser="hermes",
                    reasoning_parser="deepseek_r1")  # fmt: skip
    message = served.ask(tools=TOOLS).choices[0].message
    assert message.reasoning_content == "I wonder."
    assert message.tool_calls[0].function.name == "weather"
    assert "<tool_call>" in served.prompts[0]
    message = served.ask().choices[0].message
    assert (message.reasoning_content, message.content) == ("I wonder.", f"<tool_call>{ANSWER}</tool_call>")


def test_required_calls_are_held_by_a_grammar() -> None:
    served = Served(ANSWER)
    served.ask(tools=TOOLS, tool_choice="required")
    served.ask(tools=[BROKEN])
    form = {"type": "json_object"}
    served.ask(tools=TOOLS, response_format=form)
    served.ask(response_format=form)
    one: Any = {"type": "function", "function": {"name": "weather"}}
    served.ask(tools=TOOLS, tool_choice=one, response_format=form)
    grammars = [stream.request.params.grammar for stream in served.engine.streams]
    assert [None if grammar is None else grammar.kind for grammar in grammars] == [
        "lark", None, "lark", "json_object", "lark",
    ]  # fmt: skip
    assert "time" in grammars[0].text
    assert "time" not in grammars[4].text


def test_a_schema_that_no_grammar_holds_leaves_the_name_of_its_tool_held() -> None:
    served = Served('{"name": "broken", "arguments": {"a": 1}}')
    message = served.ask(tools=[TIME, BROKEN], tool_choice="required").choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == ['{"a": 1}']
    grammar = served.engine.streams[-1].request.params.grammar
    assert "broken" in grammar.text
    assert '"b"' not in grammar.text


STRICT: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}


def test_only_strict_tools_are_held() -> None:
    served = Served(ANSWER)
    served.ask(tools=[STRICT, BROKEN])
    served.ask(tools=[STRICT, TIME], tool_choice="none")
    served.ask(tools=[STRICT, TIME])
    served.ask(tools=[STRICT, TIME])
    held, none, again, same = (stream.request.params.grammar for stream in served.engine.streams)
    assert held is not None and none is None and again == same
    assert served.engine.grammars.compiled == 2, "it is cached"


def test_tools_are_counted_and_removed_with_a_conversation() -> None:
    served = Served("x")
    served.ask(tools=TOOLS)
    with_tools = {"messages": ASK, "tools": TOOLS}
    made = served.http.post("/tokenize", json=with_tools).json()
    assert served.http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == served.prompts[0]
    assert served.http.post("/v1/cache/remove", json=with_tools).status_code == 200
    (removed, _) = served.engine.removed[-1]
    assert bytes(removed).decode() == served.prompts[0].removesuffix("<assistant>")
    for path in ("/tokenize", "/v1/cache/remove"):
        response = served.http.post(path, json={"messages": [{**ASK[0], "nmae": "x"}]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].nmae")


@pytest.mark.parametrize("depth", [100, 900, 5000, 100_000])
@pytest.mark.parametrize("template", ["hermes", "nine", "gemma", None])
def test_deep_nesting_is_no_error_of_the_server(depth: int, template: str | None) -> None:
    served = Served("x", template=template)
    nested = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "c", "function": {"name": "f", "arguments": nested}}
    function = f'{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}'
    for messages in (ASK, [*ASK, {"role": "assistant", "tool_calls": [call]}]):
        head = json.dumps({"model": "fake", "messages": messages})[:-1]
        for rest in ("", f', "tools": [{function}]', f', "tool_choice": "required", "tools": [{function}]'):
            response = served.http.post("/v1/chat/completions", content=f"{head}{rest}}}")
            assert response.status_code in (200, 400), response.text


def test_completions_are_plain_text() -> None:
    served = Served("a</think>b", reasoning_parser="deepseek_r1")
    assert served.api.completions.create(model="fake", prompt="x").choices[0].text == "a</think>b"


# ---------------------------------------------------------------- engines


@pytest.mark.usefixtures("one_thread")
def test_an_engine_shows_special_tokens_that_are_not_hidden() -> None:
    tokenizer = byte_tokenizer("nine", ["[TOOL_CALLS]", "<other>"])
    shown, other = (tokenizer.convert_tokens_to_ids(text) for text in ("[TOOL_CALLS]", "<other>"))
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    params = SamplingParams(
        max_tokens=20,
        temperature=1.0,
        seed=3,
        allowed_token_ids=(shown, other),
        skip_special_tokens=False,
        hidden_tokens=frozenset([other]),
    )
    with Engine(replace(loaded(model), tokenizer=tokenizer), EngineConfig(pages=32)) as engine:
        made = engine.submit(Request(np.array([5, 6, 7]), params)).result(patience(60))
    assert {*made.tokens} == {shown, other}
    assert made.text == "[TOOL_CALLS]" * made.tokens.count(shown)


# ---------------------------------------------------------------- the real default model

LIGHT = {
    "type": "object",
    "properties": {
        "room": {"enum": ["kitchen", "bedroom"]},
        "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
        "on": {"type": "boolean"},
    },
    "required": ["room", "brightness", "on"],
    "additionalProperties": False,
}
SET_LIGHT: Any = {"type": "function", "function": {"name": "set_light", "description": "Sets.", "parameters": LIGHT}}


def fits(arguments: str) -> bool:
    """Whether the arguments of `set_light` are as its schema says."""
    given = json.loads(arguments)
    return (
        given.keys() == LIGHT["properties"].keys()
        and given["room"] in ("kitchen", "bedroom")
        and isinstance(given["on"], bool)
        and type(given["brightness"]) is int
        and 0 <= given["brightness"] <= 100
    )


@pytest.mark.slow
@pytest.mark.deadline
@pytest.mark.parametrize("parser", ["auto", "hermes"])
def test_the_default_model_calls_what_it_must(parser: str) -> None:
    messages: Any = [{"role": "user", "content": "Switch on the light in the kitchen, please."}]
    with real_server({"tool-call-parser": parser}) as server:
        api = openai.OpenAI(base_url=str(server.http.base_url.join("/v1")), api_key="k", max_retries=0, timeout=600)
        fields: Any = {"model": server.model, "messages": messages, "max_tokens": 200, "temperature": 1.0, "seed": 7}
        for choice in ("required", {"type": "function", "function": {"name": "set_light"}}):
            fields |= {"tools": [SET_LIGHT], "tool_choice": choice, "parallel_tool_calls": False}
            answer = api.chat.completions.create(**fields).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            (call,) = answer.message.tool_calls
            assert call.function.name == "set_light"
            assert fits(call.function.arguments), call.function.arguments
            with api.chat.completions.stream(**fields) as stream:
                for _ in stream:
                    pass
                streamed = stream.get_final_completion().choices[0]
            assert streamed.finish_reason == "tool_calls"
            (again,) = streamed.message.tool_calls or ()
            assert again.function.arguments == call.function.arguments, "the seed is the same"
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        fields |= {"messages": [*messages, answer.message.model_dump(exclude_none=True), result], "tool_choice": "none"}
        assert api.chat.completions.create(**fields).choices[0].message.content
