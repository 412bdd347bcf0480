"""Fields of requests: each that a client can send is honoured, without effect, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.shared_params import FunctionDefinition

from mainstem.server.fields import INSIDE, REFUSED, WITHOUT_EFFECT, Inside, Refused, check_fields
from mainstem.server.requests import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCall,
    FunctionSpec,
    Message,
    ToolCall,
    ToolChoice,
    ToolSpec,
)

KINDS = {
    CompletionRequest: {*get_type_hints(completion_create_params.CompletionCreateParamsBase), "stream"},
    ChatRequest: {*get_type_hints(chat_create_params.CompletionCreateParamsBase), "stream"},
}

PARTS = (*get_args(chat.ChatCompletionContentPartParam), chat.ChatCompletionContentPartRefusalParam)
CHOICES = (chat.ChatCompletionNamedToolChoiceParam, chat.ChatCompletionAllowedToolChoiceParam)
INNER: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("messages", Message, get_args(chat.ChatCompletionMessageParam)),
    ("content", ContentPart, PARTS),
    ("tool_calls", ToolCall, (chat.ChatCompletionMessageFunctionToolCallParam,)),
    ("function", FunctionCall, (Function,)),
    ("tools", ToolSpec, (chat.ChatCompletionFunctionToolParam,)),
    ("function", FunctionSpec, (FunctionDefinition,)),
    ("tool_choice", ToolChoice, CHOICES),
]
"""Objects in requests: the field that they are in, our type, and the client's."""


def check(kind: Any = CompletionRequest, tolerated: list[str] | None = None, **fields: Any) -> None:
    check_fields(json.dumps(fields).encode(), kind, tolerated)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_the_openai_client_is_classified(kind: Any) -> None:
    """A new version of the client with a new field fails here."""
    assert len(KINDS[kind]) > 15
    assert not KINDS[kind] - {*kind.__struct_fields__} - WITHOUT_EFFECT.keys() - REFUSED.keys()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_field_is_in_two_classes(kind: Any) -> None:
    honoured = {*kind.__struct_fields__}
    assert not honoured & WITHOUT_EFFECT.keys() and not honoured & REFUSED.keys()
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()


@pytest.mark.parametrize(("name", "kind", "clients"), INNER, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_inside_is_in_one_class(name: str, kind: Any, clients: tuple[Any, ...]) -> None:
    others = INSIDE.get(name, Inside())
    known = {field for client in clients for field in get_type_hints(client)}
    assert not known - {*kind.__struct_fields__} - others.without_effect.keys() - others.refused.keys()
    assert not {*kind.__struct_fields__} & (others.without_effect.keys() | others.refused.keys())
    assert not others.without_effect.keys() & others.refused.keys()


def test_fields_inside_are_checked_wherever_they_are() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}", "output": 1}, "index": 0}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(Refused, match=r"^messages\[1\].tool_calls\[0\].function.output: unknown field$"):
        check(ChatRequest, messages=messages)
    unknown: list[str] = []
    check(
        ChatRequest, unknown, messages=messages, tools=[{"function": {"name": "f", "parameters": {"any": 1}}, "new": 1}]
    )
    assert unknown == ["messages[1].tool_calls[0].function.output", "tools[0].new"]
    with pytest.raises(Refused, match=r"did you mean content\?"):
        check(ChatRequest, messages=[{"contents": "x"}])
    with pytest.raises(Refused, match=r"^messages\[0\].function_call: not supported; omit it$"):
        check(ChatRequest, messages=[{"function_call": {"name": "f"}}])
    check(ChatRequest, messages=[{"function_call": None, "annotations": [1]}], chat_template_kwargs={"any": {"x": 1}})


def rows(route: str, without_effect: Mapping[str, str], refused: Mapping[str, tuple[object, ...]]) -> list[str]:
    idle = [f"| {route} | `{name}` | without effect: {what} |" for name, what in without_effect.items()]
    return idle + [
        f"| {route} | `{name}` | refused, except {' and '.join(f'`{json.dumps(value)}`' for value in values)} |"
        for name, values in refused.items()
    ]


def table() -> str:
    """The documentation's table of fields."""
    honoured = [
        f"| {route} | {', '.join(f'`{name}`' for name in sorted(kind.__struct_fields__))} | honoured |"
        for route, kind in (("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest))
    ]
    inner = [
        f"| in `{name}` | {', '.join(f'`{field}`' for field in sorted(kind.__struct_fields__))} | honoured |"
        for name, kind, _ in INNER
    ]
    others = [row for name, fields in INSIDE.items() for row in rows(f"in `{name}`", *fields)]
    both = rows("both", WITHOUT_EFFECT, REFUSED)
    return "\n".join(["| route | field | |", "|---|---|---|", *honoured, *both, *inner, *others])


def test_the_documentation_lists_every_field() -> None:
    text = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    assert text.partition("<!-- fields -->\n")[2].partition("\n<!-- /fields -->")[0] == table()


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_fields_without_effect_take_any_value(name: str) -> None:
    for value in (None, "x", {"a": [1]}, True):
        check(**{name: value})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for neutral in REFUSED[name]:
        check(**{name: neutral})
    for value in ({"something": 1}, "something", 7):
        with pytest.raises(Refused, match=f"^{name}: not supported; omit it") as caught:
            check(**{name: value})
        assert (caught.value.name, caught.value.code) == (name, "unsupported_parameter")


def test_false_is_not_zero() -> None:
    with pytest.raises(Refused, match="echo: not supported; omit it or use false"):
        check(echo=0)
    with pytest.raises(Refused, match="length_penalty"):
        check(length_penalty=True)
    check(length_penalty=1.0)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tempreature", "temperature"),
        ("max_token", "max_tokens"),
        ("respons_format", "response_format"),
        ("meta_data", "metadata"),
        ("xyzzy", None),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(name: str, nearest: str | None) -> None:
    with pytest.raises(Refused) as caught:
        check(**{name: 1})
    assert str(caught.value) == f"{name}: unknown field" + (f"; did you mean {nearest}?" if nearest else "")
    assert (caught.value.name, caught.value.code) == (name, "unknown_field")


def test_unknown_fields_are_listed_in_order_where_they_are_tolerated() -> None:
    unknown: list[str] = []
    check(tolerated=unknown, new=1, model="m", prompt="p", old={}, user="u")
    assert unknown == ["new", "old"]
    with pytest.raises(Refused, match="functions"):
        check(tolerated=unknown, functions=[{}])


def test_fields_of_the_other_route_are_unknown() -> None:
    with pytest.raises(Refused, match="messages"):
        check(CompletionRequest, messages=[])
    with pytest.raises(Refused, match="prompt"):
        check(ChatRequest, prompt="x")
