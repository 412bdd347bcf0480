"""The application, in process over a scripted engine: what it generates, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rigs.app_client import called, chat, client, complete, error_of, events
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig


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


def test_a_stream_that_counts_as_it_goes() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(complete(client(), ["ab", "c"], n=2, stream=True, max_tokens=2, stream_options=options))
    used = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert used[0] == (3, 1) and used[-1] == used[-2] == (3, 8)
    assert [count for _, count in used[:-1]] == sorted(count for _, count in used[:-1])
    only = events(complete(client(), stream=True, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in only), "without include_usage"


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


@pytest.mark.parametrize("start", [None, 0, 1, 2, 4, 5])
def test_log_probabilities_of_a_prompt_from_a_place_on(start: int | None) -> None:
    server, before = client(), max(start or 0, 1)
    expected = [None] * before + [-float(at) for at in range(before, 5)]
    choice = complete(server, "abcde", prompt_logprobs=0, logprob_start=start).json()["choices"][0]
    assert [found and next(iter(found.values()))["logprob"] for found in choice["prompt_logprobs"]] == expected
    for stream in (False, True):
        given = {"echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
        reply = complete(server, "abcde", logprob_start=start, **given)
        first = events(reply)[0] if stream else reply.json()
        logprobs = first["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][:5] == expected and logprobs["tokens"][:5] == [*"abcde"]
        assert [top is None for top in logprobs["top_logprobs"][:5]] == [value is None for value in expected]
    asked = chat(server, prompt_logprobs=0, logprob_start=start).json()["prompt_logprobs"]
    assert [found is None for found in asked] == [at < before for at in range(len(asked))]


def test_a_place_behind_the_prompt_is_refused() -> None:
    refused = error_of(complete(client(), "abc", echo=True, logprobs=0, logprob_start=4), 400)
    assert refused["param"] == "logprob_start" and "at most 3" in refused["message"]
    assert error_of(complete(client(), "abc", prompt_logprobs=0, logprob_start=-1), 400)["param"] == "logprob_start"
    assert complete(client(), "abc", logprob_start=4).status_code == 200  # says nothing without log-probabilities


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


def test_errors_name_what_is_wrong() -> None:
    assert error_of(complete(client(), [[]]), 400)["param"] == "prompt"
    assert error_of(complete(client(), ["a"] * 129), 400)["param"] == "n"
    assert error_of(client().get("/v1/models/x"), 404)["code"] == "model_not_found"


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
    async def receive() -> dict[str, Any]:
        raise AssertionError("the body is read")

    app = create_app(FakeEngine(), ServerConfig(max_body_bytes=1000))
    assert asyncio.run(called(app, receive, headers=[(b"content-length", b"2001")]))[0]["status"] == 413


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

    app = create_app(FakeEngine(), ServerConfig(max_body_bytes=1000))
    assert asyncio.run(called(app, receive))[0]["status"] == 413
    assert 10 <= peak <= 12


def test_a_failing_generation_reveals_nothing_but_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = client()
    assert error_of(complete(server, "fail!"), 500)["type"] == "server_error"
    assert "a secret of the engine" in caplog.text
    chunks = events(complete(server, "fail!", stream=True))
    assert "secret" not in json.dumps(chunks)
    assert chunks[-1]["error"]["type"] == "server_error"


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


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mainstem")
