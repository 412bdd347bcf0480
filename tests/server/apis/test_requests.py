"""Requests: what is accepted, and what is refused under which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mainstem.errors import BadArgument
from mainstem.server.apis import completions
from mainstem.server.apis.chat import request as chats
from mainstem.server.apis.generation import Conversation, Generation
from mainstem.server.errors import ApiError, api_error, client_names
from mainstem.server.fields.tools import NO_TOOLS, Tool, Tooling


def completion(**fields: Any) -> Generation:
    return completions.read(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> Generation:
    messages = [{"role": "user", "content": "hi"}]
    return chats.read(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def conversation(**fields: Any) -> Conversation:
    asked = chat(**fields).prompt
    assert isinstance(asked, Conversation)
    return asked


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(**fields: Any) -> dict[str, Any]:
    call = {name: value for name, value in {**CALL, **fields}.items() if value is not None}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(completion, **fields)
    assert error.detail.param == param
    assert param in error.detail.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages[0].content"),
        ({"messages": [called(id=None)]}, "messages[0].tool_calls[0].id"),
        ({"messages": [called(type="costum")]}, "messages[0].tool_calls[0].type"),
        ({"messages": [called(function={"name": "f"})]}, "messages[0].tool_calls[0].function.arguments"),
        (
            {"messages": [called(function={"name": "f", "arguments": {}})]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [called(weight=1)]}, "messages[0].tool_calls[0].weight"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "size": 1}]}]},
            "messages[0].content[0].size",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}, tool("g", strictly=True)]},
            "tools[1].function.strictly",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "costum", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("f")], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice.function.name"),
        ({"tool_choice": named("g")}, "tool_choice.function.name"),
        (
            {"tools": [tool("f")], "tool_choice": allowed("auto", "f", "h")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": 1}}}, "response_format.json_schema.name"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(chat, **fields)
    assert error.detail.param == param
    assert param in error.detail.message


def test_tools_and_which_may_be_called() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    tools = [tool("f", description="does f", parameters=schema, strict=True), tool("g", parameters=None)]
    f, g = Tool("f", "does f", schema, strict=True), Tool("g")
    assert conversation(tools=tools).tooling == Tooling((f, g))
    assert conversation().tooling == conversation(tools=[], tool_choice="auto").tooling == NO_TOOLS
    assert conversation(tools=tools, tool_choice="none").tooling.callable == ()
    assert conversation(tools=tools, tool_choice="required", parallel_tool_calls=False).tooling == Tooling(
        (f, g), "required", parallel=False
    )
    one = conversation(tools=tools, tool_choice=named("g")).tooling
    assert (one.choice, one.callable, one.parallel) == ("required", (g,), False)
    some = conversation(tools=tools, tool_choice=allowed("auto", "f")).tooling
    assert (some.choice, some.callable, some.parallel) == ("auto", (f,), True)
    assert f.spec() == {"type": "function", "function": {"name": "f", "description": "does f", "parameters": schema}}
    assert g.spec()["function"] == {"name": "g", "parameters": {"type": "object", "properties": {}}}


def test_messages_of_a_conversation_with_tools() -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]}
    thought = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "Hm", "name": "me"}
    index = {**called(index=0), "annotations": [], "function_call": None, "audio": None, "refusal": None}
    refusal = {"role": "assistant", "refusal": "Never.", "tool_calls": []}
    assert conversation(messages=[index, result, thought, refusal]).messages == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "assistant", "content": "No.", "name": "me", "reasoning_content": "Hm"},
        {"role": "assistant", "content": "Never."},
    ]


def test_what_shapes_logits_and_text_is_passed_on() -> None:
    request = completion(
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[7],
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"3": -100},
        allowed_token_ids=[3, 4],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    params = request.params(100, 0)
    assert (params.min_tokens, params.stop_token_ids, params.allowed_token_ids) == (2, (7,), (3, 4))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -0.5, 1.5)
    assert params.logit_bias == ((3, -100.0),)
    assert params.include_stop_str_in_output and not params.skip_special_tokens


@pytest.mark.parametrize("bias", [{"x": 1}, {"-1": 1}, {"5.0": 1}, {"05": 1, "5": 1}])
def test_a_bias_is_of_a_token(bias: dict[str, float]) -> None:
    with pytest.raises((ApiError, BadArgument), match="logit_bias"):
        completion(logit_bias=bias).params(100, 0)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"model": NaN}', b'{"model":"\xff"}', b'{"x":' + b"[" * 100_000, b'{"a":1}x']
)
def test_a_broken_body_is_refused(body: bytes) -> None:
    for parse in (completions.read, chats.read):
        with pytest.raises(ApiError) as caught:
            parse(body)
        assert caught.value.status == 400


def test_parts_of_text_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = conversation(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert asked.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_a_message_with_an_image_keeps_its_parts() -> None:
    error = refused(chat, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    assert error.detail.param == "messages[0].content[0].image_url"
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}]
    (message,) = conversation(messages=[{"role": "user", "content": parts}]).messages
    image = {"type": "image", "url": "data:x", "at": "messages[0].content[1].image_url.url"}
    assert message == {"role": "user", "content": [{"type": "text", "text": "one"}, image]}


def test_defaults_are_those_of_openai() -> None:
    params = completion().params(1000, 0)
    assert (params.max_tokens, params.temperature, params.top_p, params.logprobs, params.seed) == (
        16,
        1.0,
        1.0,
        None,
        None,
    )
    assert chat().params(1000, 0).max_tokens == 1000
    assert chat().params(-5, 0).max_tokens == 1


def test_every_sampling_field_arrives() -> None:
    fields = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "stop": "x",
        "ignore_eos": True,
    }
    params = completion(**fields, logprobs=2).params(1000, 0)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (5, 0, 0.5, 7, 0.1)
    assert (params.seed, params.stop, params.ignore_eos, params.logprobs) == (3, ("x",), True, 2)
    assert completion(stop=["a", "b"]).params(9, 0).stop == ("a", "b")


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).params(100, 0).max_tokens == 7


def test_chat_logprobs() -> None:
    assert chat(logprobs=True).params(9, 0).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params(9, 0).logprobs == 4
    wrong = chat(logprobs=True, top_logprobs=21)
    with pytest.raises(BadArgument, match=r"^top_logprobs = 21: "), client_names(wrong.paths):
        wrong.params(9, 0)
    assert chat(logprobs=False).params(9, 0).logprobs is None
    with pytest.raises(ApiError, match="needs logprobs"):
        chat(top_logprobs=4).params(9, 0)


def test_what_needs_log_probabilities_of_the_prompt_or_of_the_answer() -> None:
    def asked(**fields: Any) -> tuple[int | None, int | None]:
        params = completion(**fields).params(9, 0)
        return params.prompt_logprobs, params.logprobs

    assert asked() == asked(echo=True) == asked(echo=False) == (None, None)
    assert asked(logprobs=2) == (None, 2)
    assert asked(echo=True, logprobs=2) == (2, 2)
    assert asked(echo=True, logprobs=2, prompt_logprobs=0) == (2, 2)
    assert asked(echo=True, logprobs=2, prompt_logprobs=3) == (3, 2)
    assert asked(prompt_logprobs=0) == (0, None)
    assert asked(best_of=3) == (None, 0)
    assert asked(best_of=3, n=3) == (None, None)
    assert chat(prompt_logprobs=1).params(9, 0).prompt_logprobs == 1
    assert chat(logprobs=True).params(9, 0).prompt_logprobs is None


@pytest.mark.parametrize("k", [-1, 21])
def test_prompt_logprobs_have_a_range_and_no_stream(k: int) -> None:
    with pytest.raises(BadArgument, match="prompt_logprobs"):
        chat(prompt_logprobs=k).params(9, 0)
    for ask in (chat, completion):
        with pytest.raises(ApiError, match="prompt_logprobs: cannot be streamed"):
            ask(prompt_logprobs=0, stream=True).params(9, 0)


def test_the_choices_of_a_request_have_seeds_of_their_own_also_after_the_last_seed() -> None:
    for seed, seeds in ((5, [5, 6, 7]), (2**64 - 2, [2**64 - 2, 2**64 - 1, 0]), (-2, [-2, -1, 0])):
        request = completion(seed=seed, n=3)
        assert [request.params(100, choice).seed for choice in range(3)] == seeds
    for seed in (2**64, -(2**63) - 1, 2**70):
        with pytest.raises(BadArgument, match="seed"):
            completion(seed=seed).params(100, 0)


NUMBERS = ["temperature", "top_p", "top_k", "min_p", "n", "seed", "priority", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
           "best_of"]  # fmt: skip
EXTREMES = ["2147483648", "9223372036854775808", "18446744073709551615", "18446744073709551616", "1e30", "1e308",
            "1e400", "-1e400", "5e-324", "1e-400", "-9223372036854775809", "NaN", "Infinity", "-0.0"]  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_as_it_is_or_refused_by_its_name(name: str) -> None:
    for number in EXTREMES:
        body = f'{{"model": "m", "prompt": "a", "{name}": {number}}}'.encode()
        try:
            request = completions.read(body)
            params = request.params(100, 0)
        except (BadArgument, ApiError) as error:
            detail = api_error(error).detail if isinstance(error, BadArgument) else error.detail
            refused_by = detail.param if detail.param else detail.code
            assert refused_by in (name, "invalid_json", "min_tokens" if name == "max_tokens" else None), number
        else:
            value = json.loads(number)
            assert getattr(request.request, name) in (value, float(value))
            assert getattr(params, name, value) in (value, float(value))
