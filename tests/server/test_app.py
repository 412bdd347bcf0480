"""The application: in process against a scripted engine, and one real server driven by the official client."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from machine import patience
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.cache.namespaces import Namespace
from mainstem.cache.retention import Kept
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.request import Hints
from mainstem.server.apis import bodies
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig

PROMPT = "A prompt that is longer than two pages of sixteen tokens each."


def client(engine: FakeEngine | None = None, **config: Any) -> TestClient:
    return TestClient(create_app(engine or FakeEngine(), ServerConfig(**config)))


def complete(server: TestClient, prompt: Any = PROMPT, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return server.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields}, headers=headers)


def chat(server: TestClient, content: Any = "hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", json={"model": "fake", "messages": messages, **fields})


def events(response: Any) -> list[Any]:
    """The JSON of every event; the last must be [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    datas = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


# --- generating ---------------------------------------------------------------------------------------------------


def test_a_completion() -> None:
    body = complete(client()).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello, world.", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 13,
        "total_tokens": len(PROMPT) + 13,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "cached_tokens_by_tier": {"device": 0, "host": 0, "storage": 0},
            "cache_write_tokens": len(PROMPT) // 16 * 16,
        },
    }


def test_a_chat() -> None:
    engine = FakeEngine(lambda prompt: f"[{prompt}]")
    body = chat(client(engine)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "[<user>hi\n<assistant>]"}
    assert engine.streams[0].request.params.max_tokens == 4096 - len("<user>hi\n<assistant>")


def test_token_ids_and_lists_of_prompts() -> None:
    engine = FakeEngine(lambda prompt: prompt.upper())
    server = client(engine)
    assert complete(server, [97, 98]).json()["choices"][0]["text"] == "AB"
    body = complete(server, ["ab", "cd"], n=2).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "AB"), (1, "AB"), (2, "CD"), (3, "CD")]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 8


def test_cached_tokens_and_salts() -> None:
    server = client()

    def cached(**fields: Any) -> int:
        return int(complete(server, **fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 48]
    assert [cached(cache_salt="one"), cached(cache_salt="two"), cached(cache_salt="one")] == [0, 0, 48]
    assert cached() == 48


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cached", [(48, 0, 16), (16, 48, 0), (0, 16, 48)])
def test_usage_says_what_the_least_lucky_choice_found(cached: tuple[int, ...], stream: bool) -> None:
    engine = FakeEngine()
    finds = iter(cached)
    engine._look_up = lambda request: next(finds)  # type: ignore[method-assign]
    response = complete(client(engine), n=3, max_tokens=2, stream=stream, stream_options={"include_usage": True})
    usage = (events(response)[-1] if stream else response.json())["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 6)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_of_a_chat() -> None:
    response = chat(client(), stream=True, stream_options={"include_usage": True})
    chunks = events(response)
    first, *others = (chunk["choices"][0]["delta"] for chunk in chunks[:-1])
    assert first == {"role": "assistant", "content": "H"}
    assert all("role" not in delta for delta in others)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == "Hello, world."
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 13
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_that_counts_as_it_goes() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(complete(client(), ["ab", "c"], n=2, stream=True, max_tokens=2, stream_options=options))
    used = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert used[0] == (3, 1) and used[-1] == used[-2] == (3, 8)
    assert [count for _, count in used[:-1]] == sorted(count for _, count in used[:-1])
    only = events(complete(client(), stream=True, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in only), "without include_usage"


def test_a_stream_without_usage() -> None:
    chunks = events(complete(client(), stream=True, max_tokens=2))
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_of_several_choices() -> None:
    chunks = events(complete(client(FakeEngine(str.upper)), ["ab", "cd"], stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "AB", 1: "CD"}


def test_logprobs_of_both_kinds() -> None:
    server = client()
    tokens = chat(server, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert tokens[0]["token"] == "H"
    assert tokens[0]["top_logprobs"][0]["token"] == "A"
    assert complete(server, logprobs=0).json()["choices"][0]["logprobs"]["text_offset"] == list(range(13))


def test_an_echo_with_log_probabilities_as_a_harness_asks_for_it() -> None:
    """lm_eval sums what comes after the context, and asks whether each token was the likeliest."""
    engine = FakeEngine(lambda prompt: "!")
    context, answers = list(b"What? "), [list(b"yes"), list(b"no")]
    given = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    body = complete(client(engine), [context + answer for answer in answers], **given).json()
    for answer, choice in zip(answers, body["choices"], strict=True):
        logprobs = choice["logprobs"]
        whole = bytes([*context, *answer, *b"!"]).decode()
        assert choice["text"] == whole and logprobs["tokens"] == [*whole]
        assert logprobs["text_offset"] == [*range(len(whole))]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert sum(logprobs["token_logprobs"][len(context) : -1]) == -sum(range(6, 6 + len(answer)))
        shown = zip([*whole][1:], logprobs["top_logprobs"][1:], strict=True)
        assert all(top.keys() == {"A", token} for token, top in shown)
    assert all(stream.request.params.prompt_logprobs == 1 for stream in engine.streams)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_an_answer(stream: bool) -> None:
    reply = complete(client(), "Hi", echo=True, max_tokens=0, logprobs=0, stream=stream)
    choices = [choice for event in events(reply) for choice in event["choices"]] if stream else reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "Hi"
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choices[-1]["finish_reason"] == "length"


def test_an_echo_is_what_was_sent_or_what_was_left_of_it() -> None:
    server = client(FakeEngine(lambda prompt: "!"))
    for prompt, most, text in (("Hé", None, "Hé!"), ("Hé", 9, "Hé!"), ("Hey", 2, "ey!"), ([72, 105], None, "Hi!")):
        body = complete(server, prompt, echo=True, truncate_prompt_tokens=most).json()
        assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == (text, None)
    offsets = complete(server, "Héy", echo=True, logprobs=0).json()["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2, 3], "both halves of a character begin where it does"
    assert error_of(complete(server, [72, 300], echo=True), 400)["param"] == "prompt"


def test_log_probabilities_of_a_prompt() -> None:
    server = client()
    shown = [None, {"98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}}]
    assert complete(server, "ab", prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"] == shown
    assert len(chat(server, prompt_logprobs=2).json()["prompt_logprobs"]) == len("<user>hi\n<assistant>")
    assert error_of(complete(server, "ab", prompt_logprobs=0, stream=True), 400)["param"] == "prompt_logprobs"
    assert error_of(chat(server, prompt_logprobs=21), 400)["param"] == "prompt_logprobs"


@pytest.mark.parametrize("seed", [None, 5])
def test_a_prompt_with_several_choices_is_scored_once(seed: int | None) -> None:
    engine = Graded()
    given = {"seed": seed, "max_tokens": 2, "prompt_logprobs": 1, "echo": True, "logprobs": 1}
    body = complete(client(engine), ["abc", "de"], n=2, best_of=3, **given).json()
    alone = [complete(client(), prompt, **given).json()["choices"][0] for prompt in ("abc", "de")]
    for i, choice in enumerate(body["choices"]):
        assert choice["prompt_logprobs"] == alone[i // 2]["prompt_logprobs"]
        assert choice["logprobs"]["token_logprobs"][:2] == alone[i // 2]["logprobs"]["token_logprobs"][:2]
    asked = [stream.request.params.prompt_logprobs for stream in engine.streams]
    assert asked == [1, None, None, 1, None, None]
    engine = FakeEngine()
    reply = complete(client(engine), "abc", n=2, echo=True, logprobs=0, max_tokens=1, stream=True)
    shown = [choice for event in events(reply) for choice in event["choices"] if choice["text"].startswith("abc")]
    assert [choice["logprobs"]["token_logprobs"] for choice in shown] == [[None, -1.0, -2.0]] * 2
    assert [stream.request.params.prompt_logprobs for stream in engine.streams] == [0, 0]


class Graded(FakeEngine):
    """The log-probability of each answer's tokens is that of its place among the requests."""

    grades = (-3.0, -1.0, -2.0, -0.5, -4.0, -0.25)

    def submit(self, request: Any, **options: Any) -> Any:
        stream = super().submit(request, **options)
        grade, plain = self.grades[len(self.streams) - 1], stream._logprobs
        stream._logprobs = lambda token: tuple(replace(entry, logprob=grade) for entry in plain(token))
        return stream


@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_best_of_several_answers(logprobs: int | None) -> None:
    engine = Graded()
    body = complete(client(engine), ["a", "b"], n=2, best_of=3, logprobs=logprobs, max_tokens=4).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    if logprobs is None:
        assert all(choice["logprobs"] is None for choice in body["choices"])
    else:
        firsts = [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]]
        assert firsts == [-1.0, -2.0, -0.25, -0.5]
    assert body["usage"]["completion_tokens"] == 6 * 4
    assert body["usage"]["prompt_tokens"] == 2
    assert error_of(complete(client(), ["a"] * 30, best_of=5), 400)["param"] == "best_of"


def test_priority_stop_and_seeds_arrive() -> None:
    engine = FakeEngine()
    body = complete(client(engine), priority=3, stop=["wor"], n=2, seed=5).json()
    assert body["choices"][0]["text"] == "Hello, "
    assert [stream.request.priority for stream in engine.streams] == [3, 3]
    assert [stream.request.params.seed for stream in engine.streams] == [5, 6]


# --- refusing -----------------------------------------------------------------------------------------------------


def test_errors_have_the_openai_form() -> None:
    server = client(FakeEngine(max_context=100))
    assert error_of(complete(server, n=0), 400)["param"] == "n"
    assert error_of(complete(server, temperature=-1), 400)["param"] == "temperature"
    assert error_of(complete(server, [999]), 400)["param"] == "prompt"
    assert error_of(complete(server, ""), 400)["param"] == "prompt"
    assert error_of(complete(server, [[]]), 400)["param"] == "prompt"
    assert error_of(complete(server, ["a"] * 129), 400)["param"] == "n"
    assert error_of(complete(server, "a" * 101), 400)["code"] == "context_length_exceeded"
    assert error_of(complete(server, max_tokens=100), 400)["code"] == "context_length_exceeded"
    assert error_of(server.post("/v1/completions", content=b"{"), 400)["code"] == "invalid_json"
    assert error_of(server.post("/v1/completions", json={"model": "x", "prompt": "a"}), 404)["param"] == "model"
    assert error_of(server.get("/v1/models/x"), 404)["code"] == "model_not_found"
    assert error_of(server.get("/v1/nothing"), 404)["message"] == "There is no endpoint at /v1/nothing."
    refusal = server.get("/v1/completions")
    assert error_of(refusal, 405)["message"] == "/v1/completions does not accept GET: use POST."
    assert refusal.headers["allow"] == "POST"


def test_a_template_that_refuses_is_a_400() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    response = client().post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert error_of(response, 400)["param"] == "messages"


def test_a_full_engine_is_a_429_and_takes_none_of_the_choices() -> None:
    engine = FakeEngine(max_waiting=2)
    response = complete(client(engine), n=3)
    assert error_of(response, 429)["code"] == "engine_full"
    assert response.headers["retry-after"] == "1"
    assert [stream.cancelled for stream in engine.streams] == [True, True]


def test_a_prompt_that_cannot_fit_is_refused_before_the_next_one_is_tokenised() -> None:
    engine = FakeEngine(max_context=100)
    calls: list[str] = []
    encode = engine.tokenizer.encode

    def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        calls.append(text)
        return encode(text) * 200

    engine.tokenizer.encode = counted  # type: ignore[method-assign]
    assert error_of(complete(client(engine), ["a", "b", "c"]), 400)["code"] == "context_length_exceeded"
    assert calls == ["a"]


def test_long_token_ids_with_many_choices_are_refused_before_they_are_copied() -> None:
    """Copies of the prompt would show in the peak; the parsed list alone takes 8 bytes per token."""
    tokens = 300_000
    body = b'{"model":"fake","n":128,"prompt":[' + b",".join([b"1"] * tokens) + b"]}"
    server = client(FakeEngine(max_context=100))
    tracemalloc.start()
    try:
        response = server.post("/v1/completions", content=body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert peak < 6 * 8 * tokens


def test_too_many_messages_are_refused_before_the_template() -> None:
    engine = FakeEngine(max_context=100)
    engine.tokenizer.apply_chat_template = None  # type: ignore[assignment, method-assign]
    messages = [{"role": "user", "content": ""}] * 101
    response = client(engine).post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert error_of(response, 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("ask", [complete, chat])
def test_an_unknown_field_is_refused_unless_warnings_were_chosen(ask: Any) -> None:
    engine = FakeEngine()
    error = error_of(ask(client(engine), tempreature=0), 400)
    assert (error["param"], error["code"]) == ("tempreature", "unknown_field")
    assert "did you mean temperature?" in error["message"]
    assert not engine.streams
    for stream in (False, True):
        response = ask(client(unknown_fields="warn"), tempreature=0, **{"a\r\nb": 1}, stream=stream)
        assert response.status_code == 200
        assert response.headers["X-Mainstem-Unknown-Fields"] == "tempreature, a%0D%0Ab"
    inside: dict[str, Any] = {
        "stream_options": {"include_usages": True},
        "response_format": {"type": "text", "json_shema": {}},
        "structured_outputs": {"choices": ["a"]},
        "cache_hints": {"oneshot": True},
    }
    for name, value in inside.items():
        unknown = f"{name}.{[*value][-1]}"
        error = error_of(ask(client(), **{name: value}), 400)
        assert (error["param"], error["code"]) == (unknown, "unknown_field")
        assert "did you mean" in error["message"]
        warned = ask(client(unknown_fields="warn"), **{name: value}).headers["X-Mainstem-Unknown-Fields"]
        assert warned == unknown
    said = [{"role": "user", "content": "hi", "nmae": "x"}]
    warned = chat(client(unknown_fields="warn"), messages=said).headers["X-Mainstem-Unknown-Fields"]
    assert warned == "messages[0].nmae"
    assert "X-Mainstem-Unknown-Fields" not in ask(client(unknown_fields="warn")).headers


def test_a_model_of_text_alone_says_so_before_it_speaks_of_an_images_detail() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}}
    error = error_of(chat(client(), messages=[{"role": "user", "content": [image]}]), 400)
    assert (error["param"], error["code"]) == ("messages[0].content[0].image_url.url", "unsupported_content")
    assert "accepts text only" in error["message"]


def test_a_history_of_another_servers_answers_is_taken_and_named() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
    said = {"role": "assistant", "content": "x", "tool_calls": [{**call, "index": 0}], "thinking_blocks": [{}]}
    asks = [{"role": "user", "content": "a"}, said, {"role": "tool", "tool_call_id": "c", "content": "b"}]
    response = chat(client(), messages=asks, stream=True, stream_options={"include_obfuscation": True})
    assert response.status_code == 200
    at = "messages[1]"
    calls = (f"{at}.tool_calls[0].function.parsed_arguments", f"{at}.tool_calls[0].index")
    named = ["stream_options.include_obfuscation", f"{at}.thinking_blocks", *calls]
    assert sorted(response.headers["X-Mainstem-Ignored"].split(", ")) == sorted(named)


def test_how_much_to_think_is_taken_by_chats_and_named_where_the_model_has_no_switch() -> None:
    for stream in (False, True):
        response = chat(client(), reasoning_effort="high", thinking={"type": "enabled"}, verbosity="low", stream=stream)
        assert response.status_code == 200
        assert response.headers["X-Mainstem-Ignored"] == "verbosity, thinking, reasoning_effort"
    quiet = chat(client(), reasoning_effort="none", thinking={"type": "disabled"}, verbosity="medium")
    assert "X-Mainstem-Ignored" not in quiet.headers
    assert error_of(chat(client(), thinking={"type": "much"}), 400)["param"] == "thinking.type"


def test_the_end_of_a_prompt_can_be_kept_alone() -> None:
    body = complete(client(FakeEngine(lambda prompt: f"[{prompt}]")), "abcdef", truncate_prompt_tokens=2).json()
    assert body["choices"][0]["text"] == "[ef]"
    assert body["usage"]["prompt_tokens"] == 2
    body = complete(client(FakeEngine(lambda prompt: f"[{prompt}]")), "abcdef", truncate_prompt_tokens=9).json()
    assert body["choices"][0]["text"] == "[abcdef]"


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_prompt_that_is_cut_may_be_longer_than_the_context_before(ask: Any) -> None:
    engine = FakeEngine(max_context=60)
    server, long = client(engine), "a" * 200 + "end"
    body = ask(server, long, truncate_prompt_tokens=30, max_tokens=5).json()
    assert body["usage"]["prompt_tokens"] == 30
    assert "end" in engine.tokenizer.decode(engine.streams[-1].request.tokens)
    assert ask(server, long, truncate_prompt_tokens=61, max_tokens=5).status_code == 400
    assert error_of(ask(server, long, max_tokens=5), 400)["param"] == ("prompt" if ask is complete else "messages")


def test_a_chat_can_continue_its_last_message_and_set_variables_of_the_template() -> None:
    def answer(**fields: Any) -> Any:
        return chat(client(FakeEngine(lambda prompt: f"[{prompt}]")), **fields).json()["choices"][0]["message"][
            "content"
        ]

    assert answer(add_generation_prompt=False) == "[<user>hi\n]"
    assert answer(continue_final_message=True) == "[<user>hi]"
    assert answer(chat_template_kwargs={"hint": "think: "}) == "[think: <user>hi\n<assistant>]"
    for fields in ({"chat_template_kwargs": {"tokenize": True}}, {"chat_template_kwargs": {"unknown": 1}}):
        error_of(chat(client(), **fields), 400)
    error = error_of(chat(client(), continue_final_message=True, add_generation_prompt=True), 400)
    assert error["param"] == "continue_final_message"


def test_words_are_banned_at_the_beginning_and_after_a_blank() -> None:
    engine = FakeEngine()
    complete(client(engine), bad_words=["no", " so"])
    assert engine.streams[0].request.params.bad_words == (tuple(b"no"), tuple(b" no"), tuple(b" so"))


def test_choices_are_counted_over_all_prompts() -> None:
    engine = FakeEngine(max_waiting=1000)
    assert error_of(complete(client(engine), ["ab"] * 3, n=50, max_tokens=1), 400)["param"] == "n"
    assert not engine.streams
    assert complete(client(engine), ["ab"] * 2, n=64, max_tokens=1).status_code == 200


def test_choices_share_one_prompt() -> None:
    engine = FakeEngine()
    complete(client(engine), n=3)
    assert len({id(stream.request) for stream in engine.streams}) == 1
    complete(client(engine), n=2, seed=1)
    first, second = (stream.request for stream in engine.streams[3:])
    assert (first.params.seed, second.params.seed) == (1, 2)
    assert np.shares_memory(first.tokens, second.tokens)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("size", [1001, 1500, 5000])
def test_a_large_body_is_refused_while_it_is_read(size: int, declared: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for start in range(0, size, 100):
            yield b"x" * min(100, size - start)

    server = client(max_body_bytes=1000)
    response = server.post("/v1/completions", content=b"x" * size if declared else chunks())
    assert error_of(response, 413)["code"] == "body_too_large"
    assert server.post("/v1/completions", content=b"{" + b" " * 999).status_code == 400


def test_a_body_that_says_it_is_far_too_large_is_not_read() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", b"2001")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(create_app(FakeEngine(), ServerConfig(max_body_bytes=1000))(scope, receive, send))
    assert sent[0]["status"] == 413


def test_what_is_over_the_limit_is_not_kept() -> None:
    alive: set[int] = set()
    peak = 0

    class Chunk(bytes):
        def __init__(self, *_: object) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    async def receive() -> dict[str, Any]:
        nonlocal peak
        peak = max(peak, len(alive))
        return {"type": "http.request", "body": Chunk(b"x" * 100), "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(create_app(FakeEngine(), ServerConfig(max_body_bytes=1000))(scope, receive, send))
    assert sent[0]["status"] == 413
    assert 10 <= peak <= 12


def test_keys() -> None:
    engine = FakeEngine()
    server = client(engine, api_key=("first-key", "second-key"))
    refusal = complete(server)
    assert error_of(refusal, 401)["code"] == "invalid_api_key"
    assert refusal.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer other", "Bearer ", "Basic first-key", "first-key", "Bearer first-keyx"):
        assert complete(server, headers={"Authorization": wrong}).status_code == 401
    assert not engine.streams

    def cached(key: str) -> int:
        body = complete(server, headers={"Authorization": f"Bearer {key}"}).json()
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("first-key"), cached("second-key"), cached("first-key"), cached("second-key")] == [0, 0, 48, 48]


@pytest.mark.parametrize(
    ("key", "admin", "draining", "status"),
    [(None, False, False, 401), ("wrong", False, False, 401), ("right", False, True, 503), ("right", True, False, 403)],
)
def test_a_body_is_not_read_for_a_client_that_is_refused_anyway(
    key: str | None, admin: bool, draining: bool, status: int
) -> None:
    app = create_app(FakeEngine(), ServerConfig(api_key=("right",), admin_key="admin"))
    app.state.draining = draining
    closed_to_them = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/cache/remove"]
    for path in (
        closed_to_them
        if admin
        else ["/v1/completions", "/v1/chat/completions", *(closed_to_them if status == 401 else [])]
    ):
        read: list[str] = []
        sent: list[Any] = []

        async def receive(read: list[str] = read) -> dict[str, Any]:
            read.append("a part of the body")
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        asyncio.run(app(scope, receive, send))
        assert (sent[0]["status"], read) == (status, [])


def test_namespaces_reveal_nothing_about_keys() -> None:
    def namespace() -> str:
        engine = FakeEngine()
        complete(client(engine, api_key=("first-key", "second-key")), headers={"Authorization": "Bearer first-key"})
        return repr(engine.streams[0].request.namespace)

    one, other = namespace(), namespace()
    assert "first-key" not in one
    assert hashlib.sha256(b"first-key").hexdigest() not in one
    assert one != other  # each server has its own secret


CACHE_ROUTES = [("POST", "/v1/cache/flush"), ("GET", "/v1/cache/stats"), ("GET", "/v1/cache/tree")]
REMOVAL = "/v1/cache/remove"
WITH_A_BODY = [REMOVAL, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]


@pytest.mark.parametrize(
    ("api_key", "admin_key", "shown", "expected"),
    [
        ((), None, None, 200),
        (("k",), None, None, 401),
        (("k",), None, "k", 200),
        (("k", "l"), None, "k", 403),
        (("k", "l"), None, None, 401),
        (("k", "l"), "root", "k", 403),
        (("k", "l"), "root", "root", 200),
        (("k", "l"), "root", "other", 401),
        (("k",), "root", "k", 403),
        (("k",), "root", "root", 200),
        ((), "root", None, 401),
        ((), "root", "root", 200),
        (("k",), "k", "k", 200),
    ],
)
def test_who_may_see_the_cache(
    api_key: tuple[str, ...], admin_key: str | None, shown: str | None, expected: int
) -> None:
    server = client(api_key=api_key, admin_key=admin_key)
    headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
    for method, path in [*CACHE_ROUTES, *(("POST", path) for path in WITH_A_BODY)]:
        response = server.request(method, path, headers=headers)
        is_own = path == REMOVAL and len(api_key) > 1 and shown in api_key
        admitted = 400 if path in WITH_A_BODY else 200  # bodies are empty
        status = admitted if is_own or expected == 200 else expected
        assert response.status_code == status, (path, response.text)
        if status == 403:
            assert "--admin-key" in error_of(response, 403)["message"]


def test_the_admin_key_is_no_tenant() -> None:
    server = client(api_key=("k",), admin_key="root")
    assert complete(server, headers={"Authorization": "Bearer root"}).status_code == 401


def test_models_need_the_key_too_and_health_does_not() -> None:
    server = client(api_key=("k",))
    for path in ("/v1/models", "/v1/models/fake"):
        assert server.get(path).status_code == 401
        assert server.get(path, headers={"Authorization": "Bearer k"}).status_code == 200
    assert server.get("/health").status_code == 200


def test_one_key_shares_with_itself_under_no_name() -> None:
    engine = FakeEngine()
    complete(client(engine, api_key=("k",)), headers={"Authorization": "Bearer k"})
    assert engine.streams[0].request.namespace is None


def test_a_failing_generation_reveals_nothing_but_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = client()
    assert error_of(complete(server, "fail!"), 500)["type"] == "server_error"
    assert "a secret of the engine" in caplog.text
    chunks = events(complete(server, "fail!", stream=True))
    assert "secret" not in json.dumps(chunks)
    assert chunks[-1]["error"]["type"] == "server_error"


# --- the other routes ---------------------------------------------------------------------------------------------


def test_models() -> None:
    listed = client().get("/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "fake"
    assert listed["data"][0]["max_model_len"] == 4096
    assert client().get("/v1/models/fake").json()["id"] == "fake"


def test_a_model_under_names_of_its_own(tmp_path: Path) -> None:
    engine = FakeEngine()
    server = client(engine, served_model_name=("org/one", "two"))
    listed = server.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("org/one", None), ("two", None)]
    assert server.get("/v1/models/org/one").json()["id"] == "org/one"
    for name in ("org/one", "two"):
        reply = server.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert reply.json()["model"] == "org/one"
    assert {stream.request.namespace for stream in engine.streams} == {None}, "all names share prefixes"
    assert "'org/one', 'two'" in error_of(complete(server), 404)["message"]
    body = {"lora_name": "two", "lora_path": str(tmp_path)}
    assert error_of(server.post("/v1/load_lora_adapter", json=body), 400)["param"] == "lora_name"
    assert server.post("/v1/load_lora_adapter", json={**body, "lora_name": "three"}).json()["parent"] == "org/one"
    assert server.post("/v1/completions", json={"model": "three", "prompt": "a"}).json()["model"] == "three"
    with pytest.raises(BadArgument, match="served_model_name"):
        client(engine, served_model_name=("three",))


ORIGIN = {"Origin": "https://chat.example.org"}
PREFLIGHT = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("allowed", ["https://chat.example.org", "*"])
def test_scripts_of_an_allowed_origin(allowed: str) -> None:
    server = client(cors_origin=("https://other.example.org", allowed), api_key=("k",))
    asked = server.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200, "a preflight has no key"
    assert asked.headers["access-control-allow-origin"] in (allowed, ORIGIN["Origin"])
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    with_key = {**ORIGIN, "Authorization": "Bearer k"}
    for reply in (complete(server, headers=with_key), complete(server, headers=with_key, stream=True)):
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == allowed
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
    refused = complete(server, headers=ORIGIN)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == allowed


@pytest.mark.parametrize("origins", [(), ("https://other.example.org",)])
def test_scripts_of_other_origins(origins: tuple[str, ...]) -> None:
    server = client(cors_origin=origins)
    asked = server.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == (400 if origins else 405)
    for reply in (asked, complete(server, headers=ORIGIN)):
        assert "access-control-allow-origin" not in reply.headers


def test_the_cache_routes() -> None:
    server = client()
    complete(server)
    assert server.get("/v1/cache/tree").text == "None: 1 prompts\n"
    assert server.get("/v1/cache/stats").json()["cache"]["pools"]["full"]["cached"] == 30
    pages = len(PROMPT) // 16
    assert server.post("/v1/cache/flush").json() == {"freed_pages": pages, "freed_tokens": pages * 16}
    assert server.post("/v1/cache/flush").json() == {"freed_pages": 0, "freed_tokens": 0}


def test_a_prefix_is_removed_for_its_owner() -> None:
    engine = FakeEngine()
    server = client(engine, api_key=("k", "l"), admin_key="root")

    def remove(key: str | None, **body: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.post("/v1/cache/remove", json=body, headers=headers)

    assert remove("k", prompt=[1, 2], cache_salt="s").json() == {"freed_pages": 1, "freed_tokens": 16}
    assert remove("root", api_key="k", prompt=[1, 2], cache_salt="s").status_code == 200
    assert engine.removed[0] == engine.removed[1] != ([1, 2], None)
    assert remove("l", prompt=[1, 2], cache_salt="s").status_code == 200
    assert engine.removed[2] != engine.removed[1]
    assert remove("k", all=True).status_code == 200
    assert engine.removed[3][0] == []
    assert remove("k", prompt="some text").status_code == 200
    assert len(engine.removed[4][0]) > 0
    calls = len(engine.removed)
    assert "api_key" in error_of(remove("k", api_key="l", all=True), 400)["message"]
    assert "api_key" in error_of(remove("root", all=True), 400)["message"]
    assert "api_key" in error_of(remove("root", api_key="nobody's", all=True), 400)["message"]
    assert remove("k", prompt=3).status_code == 400
    assert remove("k", all=True, model="nothing").status_code == 404
    assert remove(None, all=True).status_code == 401
    assert len(engine.removed) == calls


def test_one_key_removes_from_the_namespace_that_it_writes_to(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.load_adapter("french", tmp_path)
    server = client(engine, api_key=("k",))
    key = {"Authorization": "Bearer k"}
    for fields in ({}, {"model": "fake"}, {"model": "french"}, {"model": "french", "cache_salt": "s"}):
        complete(server, headers=key, **fields)
        assert server.post(REMOVAL, json={"all": True, **fields}, headers=key).status_code == 200
    spaces = [stream.request.namespace for stream in engine.streams]
    assert spaces == [None, None, Namespace("french"), Namespace("french", "s")]
    assert [namespace for _, namespace in engine.removed] == spaces


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"promt": "x"}, "promt: unknown field; this route has prompt, messages, tools, model, "),
        ({"all": True, "salt": "x"}, "salt: unknown field"),
        ({}, "exactly one of prompt, messages and all = true, got none"),
        ({"all": False}, "got none"),
        ({"prompt": None, "cache_salt": "s"}, "got none"),
        ({"prompt": "x", "all": True}, "got prompt and all"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "got prompt and messages"),
        ({"all": "yes"}, "all: expected `bool`"),
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"prompt": []}, "prompt: must have at least one token"),
        ({"prompt": ""}, "at least one token"),
    ],
)
def test_a_removal_that_does_not_say_plainly_what_removes_nothing(body: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    error = error_of(client(engine).post(REMOVAL, json=body), 400)
    assert message in error["message"]
    assert error["param"] in {*body, "prompt"}
    assert engine.removed == []


def test_a_chat_names_its_prefix_by_its_messages() -> None:
    engine = FakeEngine()
    server = client(engine)
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert server.post(REMOVAL, json={"messages": said}).status_code == 200
    tokens, namespace = engine.removed[0]
    assert (engine.tokenizer.decode(tokens), namespace) == ("<system>Be brief.\n<user>hi\n", None)
    chat(server, "hi", messages=said)
    assert engine.streams[0].request.tokens.tolist()[: len(tokens)] == tokens
    said[1]["content"] = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    error = error_of(server.post(REMOVAL, json={"messages": said}), 400)
    assert error["param"] == "messages[1].content[0].image_url.url"
    assert len(engine.removed) == 1


def test_an_adapter_is_a_model(tmp_path: Path) -> None:
    engine = FakeEngine()
    server = client(engine)
    loaded = server.post("/v1/load_lora_adapter", json={"lora_name": "french", "lora_path": str(tmp_path)})
    assert loaded.status_code == 200, loaded.text
    assert (loaded.json()["id"], loaded.json()["parent"]) == ("french", "fake")
    assert engine.adapter_paths == {"french": str(tmp_path)}
    listed = server.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [("fake", None), ("french", "fake")]
    assert server.get("/v1/models/french").json()["parent"] == "fake"

    def cached(model: str, **fields: Any) -> int:
        body = complete(server, model=model, **fields).json()
        assert body["model"] == model
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("fake"), cached("french"), cached("fake"), cached("french")] == [0, 0, 48, 48]
    assert [cached("french", cache_salt="s"), cached("fake", cache_salt="s")] == [0, 0]
    assert {chunk["model"] for chunk in events(complete(server, model="french", stream=True))} == {"french"}
    assert [stream.request.namespace for stream in engine.streams[:2]] == [None, Namespace(adapter="french")]

    unloaded = server.post("/v1/unload_lora_adapter", json={"lora_name": "french"})
    assert unloaded.json() == {"id": "french", "deleted": True, "object": "model"}
    assert error_of(complete(server, model="french"), 404)["message"].endswith("this server has 'fake'.")
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["fake"]


def test_adapters_that_cannot_be_had(tmp_path: Path) -> None:
    engine = FakeEngine()
    server = client(engine)

    def load(**body: Any) -> Any:
        return server.post("/v1/load_lora_adapter", json=body)

    assert error_of(load(lora_name="x", lora_path=str(tmp_path / "no")), 400)["param"] == "lora_path"
    assert error_of(load(lora_name="x"), 400)["param"] == "lora_path"
    assert error_of(load(lora_name=7, lora_path="x"), 400)["param"] == "lora_name"
    assert error_of(server.post("/v1/unload_lora_adapter", json={"lora_name": "x"}), 404)["code"] == "model_not_found"

    def unsupported(name: str, path: str) -> None:
        raise UnsupportedModel("adapter x: it does not fit the model")

    engine.load_adapter = unsupported  # type: ignore[assignment]
    assert "does not fit" in error_of(load(lora_name="x", lora_path=str(tmp_path)), 400)["message"]


def test_draining_refuses_and_fails_the_health_check() -> None:
    app = create_app(FakeEngine())
    server = TestClient(app)
    assert server.get("/health").json() == {"status": "ok"}
    app.state.draining = True
    assert server.get("/health").status_code == 503
    assert error_of(complete(server), 503)["code"] == "draining"
    assert server.get("/metrics").status_code == 200


def test_a_closed_engine_is_a_503() -> None:
    engine = FakeEngine()
    engine.close()
    assert error_of(complete(client(engine)), 503)["code"] == "engine_closed"


@pytest.mark.parametrize("draining", [False, True])
def test_a_failed_engine_fails_the_health_check_at_once(draining: bool) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    app.state.draining = draining
    engine.failure = RuntimeError("a secret of the engine")
    response = TestClient(app).get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "failed"})


def test_an_engine_that_fails_under_way() -> None:
    server = client()
    chunks = events(complete(server, "crash!", stream=True))
    assert chunks[-1]["error"]["code"] == "engine_closed"
    assert "secret" not in json.dumps(chunks)
    assert error_of(complete(server, "crash!"), 503)["code"] == "engine_closed"


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 65536},
        {"port": -1},
        {"max_body_bytes": 0},
        {"drain_timeout_s": -1},
        {"api_key": ("",)},
        {"api_key": ("a b",)},
        {"admin_key": ""},
        {"admin_key": "a b"},
        {"served_model_name": ("",)},
        {"cors_origin": ("example.org",)},
        {"cors_origin": ("https://example.org/path",)},
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(fields))):
        ServerConfig(**fields)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_key=("secret",), admin_key="secret"))


# --- clients that go, and the event loop --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels(stream: bool) -> None:
    engine = FakeEngine(step_s=0.02)
    app = create_app(engine)
    body = json.dumps({"model": "fake", "prompt": "x", "stream": stream, "n": 2}).encode()
    gone = asyncio.Event()
    inbox: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def scenario() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        task = asyncio.create_task(app(scope, receive, send))
        while len(engine.streams) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        gone.set()
        await asyncio.wait_for(task, patience(5))

    asyncio.run(scenario())
    assert [stream.cancelled for stream in engine.streams] == [True, True]
    assert 'mainstem_requests_total{outcome="cancelled"} 2.0' in TestClient(app).get("/metrics").text


class Stuck:
    """Wraps a function whose calls wait until they are released."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, threading.Semaphore(0)
        self.released = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.release()
        assert self.released.wait(patience(10))
        return self.function(*args, **kwargs)

    def wait(self, calls: int = 1) -> None:
        assert all(self.calls.acquire(timeout=patience(10)) for _ in range(calls))


TEXT: dict[str, Any] = {"prompt": "some text"}


@pytest.mark.deadline
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"model": "fake", **TEXT}), (REMOVAL, TEXT)])
def test_a_slow_tokenizer_does_not_hold_up_the_others(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.tokenizer.encode = stuck = Stuck(engine.tokenizer.encode)  # type: ignore[method-assign]
    _serves_others(engine, stuck, path, body)


@pytest.mark.deadline
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", *WITH_A_BODY])
def test_a_slow_parser_does_not_hold_up_the_others(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(bodies.msgspec.json.decode)
    monkeypatch.setattr(bodies.msgspec.json, "decode", stuck)
    _serves_others(FakeEngine(), stuck, path, {})


def _serves_others(engine: FakeEngine, stuck: Stuck, path: str, body: dict[str, Any]) -> None:
    with TestClient(create_app(engine)) as server:
        worker = threading.Thread(target=server.post, args=(path,), kwargs={"json": body})
        worker.start()
        stuck.wait()
        started = time.monotonic()
        assert server.get("/health").status_code == 200
        assert time.monotonic() - started < patience(5)
        stuck.released.set()
        worker.join()


@pytest.mark.deadline
def test_removals_that_wait_for_the_engine_do_not_hold_up_the_others() -> None:
    engine = FakeEngine()
    engine.remove = stuck = Stuck(engine.remove)  # type: ignore[method-assign]
    answers: list[Any] = []
    with TestClient(create_app(engine)) as server:
        removals = [threading.Thread(target=server.post, args=(REMOVAL,), kwargs={"json": TEXT}) for _ in range(4)]
        other = threading.Thread(target=lambda: answers.append(complete(server)))
        for removal in removals:
            removal.start()
        stuck.wait(calls=4)
        other.start()
        other.join(patience(5))
        answered = len(answers)
        stuck.released.set()
        for thread in (*removals, other):
            thread.join()
    assert answered == 1


# --- a real server ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_the_server_over_the_real_engine(smollm2: Any) -> None:
    """Chats, streams, reuse, salts and flushes, with real weights."""
    from mainstem.runtime.engine import Engine, EngineConfig

    document = "The harbour of Kelder Point has room for ninety boats. " * 20
    with Engine(smollm2, EngineConfig(pages=256)) as engine:
        server = TestClient(create_app(engine, ServerConfig()))

        def ask(question: str, **fields: Any) -> Any:
            messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
            fields = {"model": engine.name, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
            return server.post("/v1/chat/completions", json=fields)

        first = ask("How many boats fit in?").json()
        second = ask("What is the harbour called?").json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 200 < cached < second["usage"]["prompt_tokens"]
        other = ask("What is the harbour called?", cache_salt="other").json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert other["choices"][0]["message"] == second["choices"][0]["message"]

        chunks = events(ask("What is the harbour called?", stream=True, stream_options={"include_usage": True}))
        streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        assert streamed == second["choices"][0]["message"]["content"]

        probed = ask("How many boats fit in?", logprobs=True, top_logprobs=2).json()["choices"][0]
        tokens = probed["logprobs"]["content"]
        assert "".join(token["token"] for token in tokens).startswith(probed["message"]["content"])
        assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in tokens)
        assert error_of(ask("x", max_tokens=10_000), 400)["code"] == "context_length_exceeded"

        metrics = server.get("/metrics").text
        assert 'mainstem_requests_total{outcome="' in metrics
        assert server.get("/v1/cache/stats").json()["totals"]["cached_tokens"] >= cached
        assert server.get("/v1/cache/tree").text.strip()
        freed = server.post("/v1/cache/flush").json()
        assert freed["freed_pages"] > 0
        assert freed["freed_tokens"] == 16 * freed["freed_pages"]


SERVER = """
import logging, sys
from pathlib import Path
from rigs.fake_engine import FakeEngine
from mainstem.errors import EngineClosed
from mainstem.server.serving import bind, serve
from mainstem.settings.server import RecordConfig, ServerConfig

class Mortal(FakeEngine):
    def submit(self, request, **options):
        if bytes(request.tokens.tolist()) == b"die!":
            self.failure = RuntimeError("out of memory")
        return super().submit(request, **options)

logging.basicConfig(level=logging.INFO)
record = RecordConfig(*map(Path, sys.argv[2:]))
config = ServerConfig(port=0, api_key=("key",), max_body_bytes=1 << 20, record=record)
try:
    serve(Mortal(step_s=float(sys.argv[1])), config, bind(config))
except EngineClosed as error:
    sys.exit(f"ended badly: {error}")
print("ended well", flush=True)
"""


class RealServer:
    """A server process on a free port, which may record."""

    def __init__(self, step_s: float, *record: Path) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(step_s), *record],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self.process.stderr is not None
        log = ""
        for line in self.process.stderr:
            log += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                self.served_at = line
                break
        else:
            raise AssertionError(log)
        self.port = int(found[1])
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="key", max_retries=0)

    def __enter__(self) -> RealServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.deadline
def test_the_official_client_and_the_end_of_the_server_with_its_engine() -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    with RealServer(step_s=0) as server:
        wanted = r"float32, \d+ threads?, 100 KV pages for 1600 tokens, 9 state slots"
        assert re.search(f"{wanted}$", server.served_at.rstrip())
        api = server.client
        assert [model.id for model in api.models.list()] == ["fake"]

        def ask(**extra: Any) -> Any:
            return api.chat.completions.create(model="fake", messages=messages, max_tokens=5, **extra)

        answer = ask()
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert ask().usage.prompt_tokens_details.cached_tokens >= 48
        assert ask(extra_body={"cache_salt": "other"}).usage.prompt_tokens_details.cached_tokens == 0
        assert ask(logprobs=True, top_logprobs=1).choices[0].logprobs.content[0].token == "H"

        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
        assert chunks[-1].usage.completion_tokens == 5
        many = api.completions.create(model="fake", prompt=["a", "b"], n=2)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]

        with pytest.raises(openai.BadRequestError) as bad:
            ask(temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            api.completions.create(model="another", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            api.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.APIStatusError) as large:
            api.completions.create(model="fake", prompt="a" * (3 << 19))
        assert large.value.status_code == 413
        with pytest.raises(openai.APIError, match="The server had an error"):
            list(api.completions.create(model="fake", prompt="fail!", stream=True))

        api.completions.create(model="fake", prompt="die!")
        assert server.process.wait(patience(10)) == 1
        assert server.process.stderr is not None
        assert server.process.stderr.read().count("ended badly: the engine failed: RuntimeError: out of memory") == 1


@pytest.mark.deadline
def test_sigterm_drains_and_loses_nothing_of_a_recording(tmp_path: Path) -> None:
    with RealServer(0.1, tmp_path / "record") as server:
        started = threading.Event()
        text: list[str] = []

        def follow() -> None:
            for chunk in server.client.completions.create(model="fake", prompt="a", stream=True):
                text.append(chunk.choices[0].text)
                started.set()

        follower = threading.Thread(target=follow)
        follower.start()
        assert started.wait(patience(10))
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience(5)
        while _health(server.port) != 503:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as refused:
            server.client.completions.create(model="fake", prompt="b")
        assert refused.value.status_code == 503
        follower.join(patience(10))
        assert "".join(text) == "Hello, world."
        assert server.process.wait(patience(10)) == 0
        assert server.process.stdout is not None
        assert "ended well" in server.process.stdout.read()
    _, *lines = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert [(line["finish"], line["output_tokens"]) for line in lines] == [("stop", 13)]


def _health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience(5))
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mainstem")


HINTS = "/v1/cache/hints"


def test_a_hint_reaches_the_engine_for_the_prefix_it_names() -> None:
    engine = FakeEngine()
    server = client(engine)
    answer = server.post(HINTS, json={"action": "retain", "prompt": [1, 2], "ttl_s": 60, "cache_salt": "s"})
    assert answer.json() == {"action": "retain", "tokens": 16, "cached_tokens": 32}
    said = [{"role": "user", "content": "hi"}]
    for action in ("pin", "unpin", "demote", "end", "prefetch"):
        assert server.post(HINTS, json={"action": action, "messages": said}).status_code == 200
    assert engine.advised[0] == ("retain", [1, 2], Namespace(salt="s"), 60)
    assert {(action, namespace, ttl_s) for action, _, namespace, ttl_s in engine.advised[1:]} == {
        (action, None, None) for action in ("pin", "unpin", "demote", "end", "prefetch")
    }
    assert engine.tokenizer.decode(engine.advised[1][1]) == "<user>hi\n"


def test_an_unknown_field_in_a_hint_is_refused_wherever_it_is() -> None:
    engine = FakeEngine()
    said = [{"role": "user", "content": "hi", "nmae": "x"}]
    error = error_of(client(engine).post(HINTS, json={"action": "pin", "messages": said}), 400)
    assert (error["param"], error["code"]) == ("messages[0].nmae", "unknown_field")
    assert not engine.advised


def test_when_a_prefix_is_used_next_reaches_the_engine() -> None:
    engine = FakeEngine()
    server = client(engine)
    for times in ({"next_use_s": 60.5}, {"next_use_steps": 3}):
        assert server.post(HINTS, json={"action": "expect", "prompt": [1, 2], **times}).status_code == 200
        complete(server, cache_hints=times)
        chat(server, cache_hints=times, prompt_cache_key="a talk")
    assert [times for _, _, _, times in engine.advised] == [{"next_use_s": 60.5}, {"next_use_steps": 3}]
    given = [replace(stream.request.hints, prefixes=()) for stream in engine.streams]
    assert given == [
        Hints(next_use_s=60.5),
        Hints(next_use_s=60.5, session="a talk"),
        Hints(next_use_steps=3),
        Hints(next_use_steps=3, session="a talk"),
    ]


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ({"next_use_s": -1}, "cache_hints.next_use_s"),
        ({"next_use_s": 86_401}, "cache_hints.next_use_s"),
        ({"next_use_s": 5, "no_store": True}, "cache_hints.next_use_s"),
        ({"next_use_steps": -1}, "cache_hints.next_use_steps"),
        ({"next_use_steps": 1e7}, "cache_hints.next_use_steps"),
        ({"next_use_steps": 1, "no_store": True}, "cache_hints.next_use_steps"),
        ({"next_use_s": 5, "next_use_steps": 1}, "cache_hints.next_use_steps"),
    ],
)
def test_a_next_use_that_cannot_be_is_refused_by_its_name(hints: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    server = client(engine)
    for answer in (complete(server, cache_hints=hints), chat(server, cache_hints=hints)):
        error = error_of(answer, 400)
        assert error["param"] == param and error["message"].startswith(param)
    assert not engine.streams


@pytest.mark.parametrize(
    ("kept", "action", "status", "code"),
    [
        (Kept(0, 0), "pin", 404, "prefix_not_found"),
        (Kept(0, 0), "unpin", 404, "prefix_not_found"),
        (Kept(0, 48), "retain", 409, "hint_limit"),
        (Kept(0, 48), "prefetch", 409, "hint_limit"),
    ],
)
def test_a_hint_that_concerns_nothing_says_why(kept: Kept, action: str, status: int, code: str) -> None:
    engine = FakeEngine()
    engine.kept = kept
    body = {"action": action, "prompt": [1, 2], **({"ttl_s": 5} if action == "retain" else {})}
    error = error_of(client(engine).post(HINTS, json=body), status)
    assert error["code"] == code and error["message"].startswith(f"{action}: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1]}, "action"),
        ({"action": "keep", "prompt": [1]}, "action"),
        ({"action": "pin"}, "prompt"),
        ({"action": "pin", "prompt": [1], "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"action": "pin", "prompt": [1], "ttl": 5}, "ttl"),
        ({"action": "pin", "prompt": [1], "api_key": "k"}, "api_key"),
    ],
)
def test_a_hint_that_does_not_say_plainly_what_is_refused(body: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    assert error_of(client(engine).post(HINTS, json=body), 400)["param"] == param
    assert engine.advised == []


def test_a_client_advises_on_its_own_prefixes_only() -> None:
    engine = FakeEngine()

    def hint(server: TestClient, key: str | None, **body: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return server.post(HINTS, json={"action": "pin", "prompt": [1, 2], **body}, headers=headers)

    server = client(engine, api_key=("k", "l"), admin_key="root")
    for key, body in (("k", {}), ("l", {}), ("root", {"api_key": "l"})):
        assert hint(server, key, **body).status_code == 200
    mine, other, by_admin = (namespace for _, _, namespace, _ in engine.advised)
    assert mine != other == by_admin and None not in (mine, other)
    assert hint(server, "k", api_key="l").status_code == hint(server, "root").status_code == 400
    assert hint(server, "m").status_code == hint(server, None).status_code == 401
    one = client(engine, api_key=("k",), admin_key="root")  # clients of one key share
    assert hint(one, "k").status_code == hint(one, "root").status_code == 200
    assert hint(one, None).status_code == 401
    assert hint(client(engine, admin_key="root"), None).status_code == 200


def test_hints_of_a_request_reach_the_engine() -> None:
    engine = FakeEngine()
    server = client(engine)
    complete(server, cache_hints={"retain_s": 60, "one_shot": True})
    chat(server, cache_hints={"no_store": True})
    chat(server, cache_hints=None)
    assert [replace(stream.request.hints, prefixes=()) for stream in engine.streams] == [
        Hints(60, one_shot=True),
        Hints(no_store=True),
        Hints(),
    ]
    for wrong in ({"retain_s": 0}, {"retain_s": 86_401}, {"retain_s": -1}, {"retain_s": 5, "no_store": True}):
        assert error_of(complete(server, cache_hints=wrong), 400)["param"] == "cache_hints.retain_s"
    assert "ttl" in error_of(complete(server, cache_hints={"ttl": 5}), 400)["message"]
    assert len(engine.streams) == 3
