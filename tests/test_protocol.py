"""The protocol: what is accepted, what is refused and under which name, and what is sent."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, MainstemError, OutOfPages, RequestTooLong
from mainstem.runtime.prompts import Template
from mainstem.runtime.request import Delta, TokenLogprob, Usage
from mainstem.server import protocol
from mainstem.server.protocol import ApiError, ChatReply, ChunkUsage, CompletionReply, Head

HEAD = Head("id-1", 123, "m")
USAGE = Usage(10, 4, 3, 0.0, 0.1, 0.2)


def completion(**fields: Any) -> protocol.CompletionRequest:
    return protocol.parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> protocol.ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return protocol.parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [1, [2]]])
def test_mixed_or_empty_prompts_are_refused(prompt: Any) -> None:
    request = completion(prompt=prompt)
    with pytest.raises(ApiError, match="prompt: must be a string") as caught:
        request.prompts()
    assert caught.value.detail.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stop": ["s"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 1025}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"stream_options": {"include_usages": True}}, "include_usages"),
        ({"tempreature": 0}, "tempreature"),
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
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"prompt": "hi"}, "prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(chat, **fields)
    assert error.detail.param == param
    assert param in error.detail.message


def test_neutral_fields_and_those_without_effect_are_taken() -> None:
    completion(
        echo=False, suffix=None, best_of=2, n=2, logit_bias={}, presence_penalty=0.0, user="u", metadata={"a": 1}
    )
    chat(tools=[], tool_choice="auto", response_format={"type": "text"}, store=True, service_tier="auto")
    chat(prompt_cache_key="k", user="u", stream=None, stop=None, n=None, temperature=None, cache_salt=None)


def test_unknown_fields_are_tolerated_only_if_asked_for() -> None:
    body = b'{"model": "m", "prompt": "hi", "tempreature": 0, "new": [1], "user": "u"}'
    unknown: list[str] = []
    protocol.parse_completion(body, unknown)
    assert unknown == ["tempreature", "new"]
    with pytest.raises(ApiError, match=r"tempreature: unknown field; did you mean temperature\?"):
        protocol.parse_completion(body)
    with pytest.raises(ApiError, match="echo: not supported; omit it or use false"):
        protocol.parse_completion(b'{"model": "m", "prompt": "hi", "echo": true}', [])


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


def test_how_a_chat_template_is_applied() -> None:
    assert chat().template() == Template(generation_prompt=True, continues=False)
    assert chat(continue_final_message=True).template() == Template(generation_prompt=False, continues=True)
    given = chat(add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False}).template()
    assert given == Template(generation_prompt=False, variables={"enable_thinking": False})
    with pytest.raises(BadArgument, match="continue_final_message"):
        chat(continue_final_message=True, add_generation_prompt=True).template()
    with pytest.raises(BadArgument, match="chat_template_kwargs"):
        chat(chat_template_kwargs={"tokenize": True}).template()


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="model: this field is required") as caught:
        protocol.parse_completion(b'{"prompt": "x"}')
    assert caught.value.detail.param == "model"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'{"model": NaN}', b'{"model":"\xff"}', b'{"x":' + b"[" * 100_000, b'{"a":1}x']
)
def test_a_broken_body_is_refused(body: bytes) -> None:
    for parse in (protocol.parse_completion, protocol.parse_chat):
        with pytest.raises(ApiError) as caught:
            parse(body)
        assert caught.value.status == 400


def test_parts_of_text_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert request.conversation() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_a_message_with_an_image_keeps_its_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}]
    (message,) = chat(messages=[{"role": "user", "content": parts}]).conversation()
    image = {"type": "image", "url": "data:x", "at": "messages[0].content[1].image_url.url"}
    assert message == {"role": "user", "content": [{"type": "text", "text": "one"}, image]}


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"content": [{"type": "input_audio"}]}, "messages[0].content[0].type", "input_audio"),
        ({"content": [{"type": "image_url"}]}, "messages[0].content[0].image_url", "needs the field"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}]},
            "messages[0].content[0].image_url.detail",
            "use 'auto'",
        ),
        ({"content": [{"type": "text"}]}, "messages[0].content[0].text", "needs the field"),
        ({"content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls", "not supported"),
    ],
)
def test_other_parts_are_refused(message: dict[str, Any], param: str, says: str) -> None:
    request = chat(messages=[{"role": "user", **message}])
    with pytest.raises(ApiError, match=says) as caught:
        request.conversation()
    assert caught.value.detail.param == param


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


def test_choices_have_different_seeds() -> None:
    request = completion(n=3, seed=10)
    assert [request.params(9, choice).seed for choice in range(3)] == [10, 11, 12]


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).params(100, 0).max_tokens == 7


def test_chat_logprobs() -> None:
    assert chat(logprobs=True).params(9, 0).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params(9, 0).logprobs == 4
    assert chat(logprobs=False).params(9, 0).logprobs is None
    with pytest.raises(ApiError, match="needs logprobs"):
        chat(top_logprobs=4).params(9, 0)


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"max_tokens": -1}, {"top_k": -1}])
def test_ranges_are_those_of_the_sampler(fields: dict[str, Any]) -> None:
    with pytest.raises(BadArgument) as caught:
        completion(**fields).params(100, 0)
    assert protocol.api_error(caught.value).detail.param == next(iter(fields))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadArgument("top_p", 3, "0 .. 1"), 400, None),
        (BadTokens("token 5"), 400, None),
        (RequestTooLong("too long"), 400, "context_length_exceeded"),
        (EngineFull("full"), 429, "engine_full"),
        (EngineClosed("closed"), 503, "engine_closed"),
        (OutOfPages(1, 2, 3, 4), 500, None),
    ],
)
def test_errors_of_the_layers_below(error: MainstemError, status: int, code: str | None) -> None:
    shown = protocol.api_error(error)
    body = json.loads(shown.body())
    assert (shown.status, body["error"]["code"]) == (status, code)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    if status == 500:
        assert "pages" not in body["error"]["message"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_usage_counts_a_prompt_once_and_its_least_lucky_choice(order: tuple[int, ...]) -> None:
    short = [Usage(10, 0, 3, 0, 0, 0), Usage(10, 9, 4, 0, 0, 0), Usage(10, 8, 5, 0, 0, 0, 8, 0)]
    long = [Usage(30, 16, 1, 0, 0, 0, 5, 4), Usage(30, 19, 1, 0, 0, 0), Usage(30, 24, 1, 0, 0, 0, 0, 24)]
    usage = protocol.usage_body([some[at] for some in (short, long) for at in order], choices=3)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 15, 55)
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert usage.prompt_tokens_details.cached_tokens_by_tier == protocol.CachedByTier(7, 5, 4)


def spell(token: int) -> str:
    return {1: "Hé", 2: " you", 3: "\ufffd"}[token]


LOGPROBS = (TokenLogprob(1, -0.5, ((1, -0.5), (2, float("-inf")))), TokenLogprob(3, -1.0, ()))

ANSWER = (
    Delta("Hé", (1,), LOGPROBS[:1]),
    Delta("", (3,), LOGPROBS[1:]),
    Delta("", (), (), "stop", USAGE),
)


def as_json(body: Any) -> Any:
    return json.loads(protocol.encode(body))


def test_a_whole_chat_answer() -> None:
    reply = ChatReply(HEAD, spell, ChunkUsage(False))
    body = as_json(reply.whole([ANSWER], protocol.usage_body([USAGE], 1)))
    assert (body["id"], body["created"], body["model"], body["object"]) == ("id-1", 123, "m", "chat.completion")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hé"}
    assert choice["finish_reason"] == "stop"
    first, second = choice["logprobs"]["content"]
    assert first["token"] == "Hé"
    assert first["bytes"] == list("Hé".encode())
    assert first["top_logprobs"][1] == {"token": " you", "logprob": -9999.0, "bytes": list(b" you")}
    assert second["bytes"] is None
    by_tier = {"device": 4, "host": 0, "storage": 0}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "cached_tokens_by_tier": by_tier}


def test_a_whole_completion() -> None:
    reply = CompletionReply(HEAD, spell, ChunkUsage(False))
    body = as_json(reply.whole([ANSWER], protocol.usage_body([USAGE], 1)))
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hé"
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hé", "\ufffd"]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["token_logprobs"] == [-0.5, -1.0]
    assert logprobs["top_logprobs"][0] == {"Hé": -0.5, " you": -9999.0}


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_usage_in_chunks_only_when_asked(kind: Any) -> None:
    plain, counted = kind(HEAD, spell, ChunkUsage(False)), kind(HEAD, spell, ChunkUsage(True))
    assert "usage" not in as_json(plain.chunk(0, Delta("a", (1,))))
    assert as_json(counted.chunk(0, Delta("a", (1,))))["usage"] is None
    last = as_json(counted.closing(protocol.usage_body([USAGE], 1)))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 13


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_chunks_can_carry_what_was_used_so_far(kind: Any) -> None:
    reply = kind(HEAD, spell, ChunkUsage(True, prompt_tokens=7))
    assert reply.chunk(0, Delta("", (1, 2))) is None
    used = [as_json(reply.chunk(index, Delta("a", (1,))))["usage"] for index in (0, 1)]
    assert used == [
        {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11},
    ]


def test_chat_chunks() -> None:
    reply = ChatReply(HEAD, spell, ChunkUsage(False))
    assert reply.chunk(1, Delta("", (1,))) is None, "the role comes with the first text"
    for delta in ({"role": "assistant", "content": "a"}, {"content": "a"}):
        assert as_json(reply.chunk(1, Delta("a", (1,))))["choices"][0] == {
            "index": 1,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
    assert as_json(reply.chunk(0, Delta("", (), (), "stop", USAGE)))["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
    }
    assert reply.chunk(1, Delta("", (1,))) is None
    assert as_json(reply.chunk(1, Delta("", (), (), "stop", USAGE)))["choices"][0]["finish_reason"] == "stop"


def test_offsets_go_on_over_the_chunks_of_a_choice() -> None:
    reply = CompletionReply(HEAD, spell, ChunkUsage(False))
    offsets = []
    for index, entry in ((0, LOGPROBS[0]), (1, LOGPROBS[0]), (0, LOGPROBS[1])):
        chunk = as_json(reply.chunk(index, Delta("x", (entry.token,), (entry,))))
        offsets.append(chunk["choices"][0]["logprobs"]["text_offset"])
    assert offsets == [[0], [0], [1]]


# 'a😀b', where the emoji takes three tokens and its text comes with the last one.
EMOJI = (
    Delta("a", (1,), (TokenLogprob(1, -1.0, ()),)),
    Delta("", (2,), (TokenLogprob(2, -1.0, ()),)),
    Delta("", (3,), (TokenLogprob(3, -1.0, ()),)),
    Delta("😀", (4,), (TokenLogprob(4, -1.0, ()),)),
    Delta("b", (5,), (TokenLogprob(5, -1.0, ()),)),
    Delta("", (), (), "stop", USAGE),
)


def test_offsets_count_characters_that_were_sent() -> None:
    def spelled(token: int) -> str:
        return {1: "a", 5: "b"}.get(token, "\ufffd")

    whole = as_json(
        CompletionReply(HEAD, spelled, ChunkUsage(False)).whole([EMOJI, EMOJI], protocol.usage_body([USAGE], 1))
    )
    assert whole["choices"][0]["text"] == "a😀b"
    for choice in whole["choices"]:
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    reply = CompletionReply(HEAD, spelled, ChunkUsage(False))
    chunks = [as_json(reply.chunk(0, delta))["choices"][0]["logprobs"] for delta in EMOJI[:-1]]
    assert [offset for logprobs in chunks for offset in logprobs["text_offset"]] == [0, 1, 1, 1, 2]


def test_offsets_within_one_event_never_leave_its_text() -> None:
    delta = Delta("Hé you", (1, 3, 2), (TokenLogprob(1, 0, ()), TokenLogprob(3, 0, ()), TokenLogprob(2, 0, ())))
    chunk = as_json(CompletionReply(HEAD, spell, ChunkUsage(False)).chunk(0, delta))
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3]
    short = as_json(CompletionReply(HEAD, spell, ChunkUsage(False)).chunk(0, Delta("H", (1, 2), delta.logprobs[::2])))
    assert short["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_an_event_is_one_line_of_data() -> None:
    reply = ChatReply(HEAD, spell, ChunkUsage(False))
    event = protocol.event(reply.chunk(0, Delta("two\nlines", (1,))))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
