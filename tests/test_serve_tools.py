"""Tools and thoughts over HTTP, by the official client: a scripted engine, and the real default model."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "Says.", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
ASK: Any = [{"role": "user", "content": "Rome?"}]
ANSWER = '{"name": "weather", "arguments": {"city": "Rome"}}'


class Served:
    """A scripted engine, and the official client of its server. `prompts` are what the engine was asked."""

    def __init__(self, answer: str, **config: Any) -> None:
        self.prompts: list[str] = []
        self._answer = answer
        self.http = TestClient(create_app(FakeEngine(self._next), ServerConfig(**config)))
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


def test_the_choice_does_not_change_the_prompt() -> None:
    served = Served(ANSWER)
    message = served.ask(tools=TOOLS, tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == (ANSWER, None)
    served.ask(tools=TOOLS)
    assert served.prompts[0] == served.prompts[1]
    assert served.ask().choices[0].message.content == ANSWER


def test_without_parallel_calls_there_is_one() -> None:
    served = Served(ANSWER + ANSWER)
    assert len(served.ask(tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_formats_and_thoughts_by_option() -> None:
    served = Served(f"I wonder.</think>\n<tool_call>{ANSWER}</tool_call>", tool_call_parser="hermes",
                    reasoning_parser="deepseek_r1")  # fmt: skip
    message = served.ask(tools=TOOLS).choices[0].message
    assert message.reasoning_content == "I wonder."
    assert message.tool_calls[0].function.name == "weather"
    assert "<tool_call>" in served.prompts[0]
    message = served.ask().choices[0].message
    assert (message.reasoning_content, message.content) == ("I wonder.", f"<tool_call>{ANSWER}</tool_call>")


def test_completions_are_plain_text() -> None:
    served = Served("a</think>b", reasoning_parser="deepseek_r1")
    assert served.api.completions.create(model="fake", prompt="x").choices[0].text == "a</think>b"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)
def test_bad_tools_are_named(fields: dict[str, Any], param: str) -> None:
    served = Served("x")
    with pytest.raises(openai.BadRequestError) as bad:
        served.ask(**fields)
    assert (bad.value.status_code, bad.value.param) == (400, param)
    assert served.prompts == []
