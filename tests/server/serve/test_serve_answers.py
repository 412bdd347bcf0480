"""Chats of many turns over a real engine: the tokens of answers are found again, by ten kinds of templates.

The next tokens are given, and are not those of the tokenizer. So without memory a hit ends where the first answer
begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from machine import eventually
from rigs.families import FAMILIES, THOUGHT, spelled, tokenizer_of, unusual
from rigs.scripted import Scripted
from rigs.slow import slow_but
from starlette.testclient import TestClient

from bench.tiny_models import HYBRIDS, loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Request
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig, SamplingParams
from mainstem.settings.server import ServerConfig

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE, TURNS, TOKENS = 4, 4, 80
MOST_UNLIKE = ("qwen", "gemma", "falcon")
TOLERANCE = 1e-3  # of log-probabilities
SYSTEM = {"role": "system", "content": "You answer at length, in words that nobody expects."}


@dataclass
class Chat:
    """A chat by HTTP, and what the engine was asked for."""

    http: TestClient
    engine: Engine
    runner: Scripted
    tokenizer: Any
    messages: list[dict[str, str]] = field(default_factory=lambda: [SYSTEM])
    asked: list[Request] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)  # of the template

    def say(self, text: str, script: list[int], **fields: Any) -> dict[str, Any]:
        """Asks, has the model answer with `script`, sends the answer back from now on, and returns the body."""
        self.messages.append({"role": "user", "content": text})
        self.runner.script.extend(script)
        body = self.post(max_tokens=len(script), chat_template_kwargs=self.variables, **fields)
        self.messages.append({key: body["choices"][0]["message"][key] for key in ("role", "content")})
        return body

    def rendered(self, messages: list[dict[str, str]]) -> str:
        """Returns the text of a prompt."""
        options = self.variables | {"tokenize": False, "add_generation_prompt": True}
        return str(self.tokenizer.apply_chat_template(messages, **options))

    def turns(self) -> dict[str, float]:
        """Returns the metric of next turns, by outcome."""
        lines = [line for line in self.http.get("/metrics").text.splitlines() if "precomputed_turns_total{" in line]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    def post(self, **fields: Any) -> dict[str, Any]:
        given = {"model": "tiny", "messages": self.messages, "temperature": 0, **fields}
        response = self.http.post("/v1/chat/completions", json=given)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


@contextmanager
def chat(family: str, model: str = "llama", changes: dict[str, Any] | None = None, **config: Any) -> Iterator[Chat]:
    tokenizer = tokenizer_of(family)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    made = replace(loaded(tiny(model, **(changes or {}), **sizes)), tokenizer=tokenizer)
    limits = EngineConfig(pages=900, page_size=PAGE, token_budget=256, draft_tokens=0, **(STATES if changes else {}))
    runners: list[Scripted] = []

    def runner(*arguments: Any) -> Scripted:
        runners.append(Scripted(*arguments))
        return runners[0]

    with Engine(made, limits, runner=runner) as engine:
        settings = ServerConfig(**{"precompute_turns": 0.0, **config})  # which would be among what was asked
        talk = Chat(TestClient(create_app(engine, settings)), engine, runners[0], tokenizer)
        submit = engine.submit
        engine.submit = lambda request, **more: talk.asked.append(request) or submit(request, **more)  # type: ignore[method-assign,func-returns-value]
        yield talk


STATES = {"state_slots": 60, "checkpoint_tokens": 0}


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def answer(talk: Chat, family: str, turn: int) -> list[int]:
    """An answer, to its end."""
    blank = FAMILIES[family].blank
    return [*unusual(talk.tokenizer, TOKENS, turn, blank), talk.tokenizer.eos_token_id]


@dataclass
class Reuse:
    """Tokens of answers in prompts: those of the newest answer, and of all."""

    newest: list[bool] = field(default_factory=list)
    all: list[bool] = field(default_factory=list)

    def add(self, talk: Chat, body: dict[str, Any]) -> None:
        """Counts which tokens of the answers in the last prompt were cached."""
        spans = answers_in(talk)
        for span in spans:
            self.all += [position < cached(body) for position in span]
        self.newest += [position < cached(body) for position in (spans[-1] if spans else [])]

    def __str__(self) -> str:
        return f"{np.mean(self.newest):.3f} of the newest answer, {np.mean(self.all):.3f} of all"


def reuse(family: str, **config: Any) -> Reuse:
    """Holds a chat without thoughts, and returns what was found of its answers."""
    counted = Reuse()
    with chat(family, **config) as talk:
        talk.variables = {"enable_thinking": False} if family == "deepseek" else {}
        for turn in range(TURNS):
            counted.add(talk, talk.say(f"Question {turn}: what is next?", answer(talk, family, turn)))
        check_against_cold(talk)
    return counted


def answers_in(talk: Chat) -> list[list[int]]:
    """Returns the positions of the tokens of each answer in the last prompt, whose text must be as it is rendered."""
    tokens, decode = talk.asked[-1].tokens.tolist(), talk.tokenizer.decode
    assert decode(tokens) == talk.rendered(talk.messages[:-1])
    text = decode(tokens)
    ends = [len(decode(tokens[: n + 1])) for n in range(len(tokens))]
    spans, at = [], 0
    for message in talk.messages[:-1]:
        if message["role"] == "assistant":
            begin = text.index(message["content"].strip(), at)
            at = begin + len(message["content"].strip())
            spans.append([n for n, end in enumerate(ends) if begin < end <= at])
    return spans


def check_against_cold(talk: Chat) -> None:
    """Compares the logits after the last prompt, over what is cached and over nothing."""
    params = SamplingParams(max_tokens=1, logprobs=20)
    warm, cold = (
        flushed_or_not(talk, flush).submit(Request(talk.asked[-1].tokens, params)).result() for flush in (False, True)
    )
    assert warm.usage.cached_tokens > 0 and cold.usage.cached_tokens == 0
    one, other = (dict(completion.logprobs[0].top) for completion in (warm, cold))
    assert one == pytest.approx(other, abs=TOLERANCE)


def flushed_or_not(talk: Chat, flush: bool) -> Engine:
    if flush:
        talk.engine.flush()
    return talk.engine


@pytest.mark.parametrize("family", slow_but(FAMILIES, *MOST_UNLIKE))
def test_answers_that_are_sent_back_are_found(family: str) -> None:
    """The figures without memory are of the same chats: what was tokenised anew is found from the third turn on."""
    found, without = reuse(family), reuse(family, remember_answers=0)
    print(f"{family}: {found}; without memory {without}")
    assert np.mean(found.newest) >= 0.95 and np.mean(found.all) >= 0.95
    assert np.mean(without.newest) < 0.7


THINKING = [family for family in FAMILIES if FAMILIES[family].thinks]


def thoughtful(talk: Chat, turn: int) -> list[int]:
    """An answer after a thought. Where the prompt has begun the thought, its beginning is left out."""
    begin, end = talk.tokenizer.convert_tokens_to_ids(list(THOUGHT))
    begun = talk.rendered(talk.messages).endswith(THOUGHT[0] + "\n")
    thought, said = unusual(talk.tokenizer, 30, 100 + turn), unusual(talk.tokenizer, TOKENS, turn)
    return [*([] if begun else [begin]), *thought, end, *said, talk.tokenizer.eos_token_id]


@pytest.mark.parametrize("family", slow_but(THINKING, "qwen"))
def test_a_turn_without_its_thought_is_computed_while_nobody_waits(family: str) -> None:
    hits = [hits_without_thoughts(family, share) for share in (0.0, 0.1)]
    for plain, computed, tokens in zip(hits[0][0], hits[1][0], hits[1][1], strict=True):
        assert plain <= tokens - TOKENS
        assert computed >= tokens - PAGE


def hits_without_thoughts(family: str, share: float) -> tuple[list[int], list[int]]:
    """Returns of each turn but the first how much was cached, and how much of it was known before."""
    hits, known = [], []
    with chat(family, precompute_turns=share) as talk:
        for turn in range(3):
            body = talk.say(f"Question {turn}: what is next?", thoughtful(talk, turn))
            expected = outcomes(started=turn + 1, used=turn) if share else {}
            eventually(partial(settled, talk, expected), 10.0)
            text = talk.rendered(talk.messages[:-1])
            assert "</think>" not in text
            hits.append(cached(body))
            known.append(len(talk.tokenizer.encode(text[: text.index(f"Question {turn}")], add_special_tokens=False)))
    return hits[1:], known[1:]


def outcomes(**counts: int) -> dict[str, float]:
    return {"started": 0.0, "unchanged": 0.0, "skipped": 0.0, "over_share": 0.0, "used": 0.0, "unused": 0.0, **counts}


def settled(talk: Chat, expected: dict[str, float]) -> bool:
    return talk.turns() == expected and not talk.engine.stats().running


def test_a_turn_is_not_computed_if_it_begins_with_what_is_cached() -> None:
    with chat("llama3", precompute_turns=0.1) as talk:
        for turn in range(2):
            talk.say(f"Question {turn}: what is next?", answer(talk, "llama3", turn))
        eventually(partial(settled, talk, outcomes(unchanged=2)), 10.0)
        assert len(talk.asked) == 2


def test_without_memory_what_is_tokenised_anew_is_computed_ahead() -> None:
    with chat("llama3", precompute_turns=0.1, remember_answers=0) as talk:
        talk.say("Question 0: what is next?", answer(talk, "llama3", 0))
        eventually(partial(settled, talk, outcomes(started=1)), 10.0)
        text = talk.rendered([*talk.messages, {"role": "user", "content": "And then?"}])
        known = talk.tokenizer.encode(text[: text.index("And then?")], add_special_tokens=False)
        assert cached(talk.say("And then?", answer(talk, "llama3", 1))) >= len(known) - PAGE


@pytest.mark.parametrize("hint", ["no_store", "one_shot"])
def test_nothing_is_kept_for_a_turn_that_will_not_come(hint: str) -> None:
    with chat("llama3", precompute_turns=0.1) as talk:
        talk.say("Question 0: what is next?", answer(talk, "llama3", 0), cache_hints={hint: True})
        assert "mainstem_answers_remembered_total 0.0" in talk.http.get("/metrics").text
        assert settled(talk, outcomes())
        talk.messages.clear()
        talk.say("Question 1: what is next?", answer(talk, "llama3", 1))
        assert "mainstem_answers_remembered_total 1.0" in talk.http.get("/metrics").text


def test_a_model_with_states_starts_at_the_end_of_its_answer() -> None:
    """What follows the answer is rendered, and so it has marks in the right places."""
    with chat("qwen", "lfm2", HYBRIDS["lfm2"]) as talk:
        for turn in range(3):
            body = talk.say(f"Question {turn}: what is next?", answer(talk, "qwen", turn))
            request = talk.asked[-1]
            begins = [talk.tokenizer.decode(request.tokens[mark:].tolist()) for mark in request.marks]
            assert any(begin.startswith(f"Question {turn}") for begin in begins)
            if turn:
                end = answers_in(talk)[-1][-1] + 1
                assert end - PAGE <= cached(body) <= end
        check_against_cold(talk)


def test_every_choice_of_a_stream_is_remembered_and_no_other_tenant_finds_it() -> None:
    with chat("qwen") as talk:
        talk.messages.append({"role": "user", "content": "Say something."})
        allowed = sorted({token for seed in range(8) for token in unusual(talk.tokenizer, 40, seed)})
        fields = {"temperature": 1, "allowed_token_ids": allowed, "max_tokens": 48, "n": 3, "seed": 5}
        body = talk.post(**fields)
        streamed = talk.http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [SYSTEM], **fields, "stream": True},
        )
        texts, unlike = ["", "", ""], 0
        for line in streamed.text.split("\n\n"):
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["delta"].get("content", "")
        for head, said in [(talk.messages, choice["message"]["content"]) for choice in body["choices"]] + [
            ([SYSTEM], text) for text in texts
        ]:
            sent = [*head, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
            tokens = {}
            for salt in ("another", None):
                answered = talk.post(messages=sent, max_tokens=1, cache_salt=salt)
                tokens[salt] = talk.asked[-1].tokens.tolist()
                assert talk.tokenizer.decode(tokens[salt]) == talk.rendered(sent)
            text = talk.rendered(sent)
            assert tokens["another"] == talk.tokenizer.encode(text, add_special_tokens=False)
            unlike += tokens["another"] != tokens[None]
            assert cached(answered) >= len(talk.tokenizer.encode(talk.rendered(head), add_special_tokens=False)) + 44
        assert unlike >= 2, "of six answers, some are not what the tokenizer would say"


def test_a_chat_that_is_removed_is_found_by_neither_tokenization() -> None:
    with chat("qwen") as talk:
        talk.say("Question 0: what is next?", answer(talk, "qwen", 0))
        said = list(talk.messages)
        talk.say("And what then, after all that was said?", answer(talk, "qwen", 1))
        known, plain = talk.asked[-1].tokens, talk.tokenizer.encode(talk.rendered(talk.messages[:-1]))
        assert known.tolist() != plain
        for tokens in (known, plain):
            talk.engine.submit(Request(tokens, SamplingParams(max_tokens=0))).result()
        removed = talk.http.post("/v1/cache/remove", json={"messages": said}).json()
        assert removed["freed_pages"] > 0
        for tokens in (known, plain):
            done = talk.engine.submit(Request(tokens, SamplingParams(max_tokens=0))).result()
            assert "And what" not in talk.tokenizer.decode(tokens[: done.usage.cached_tokens])
        talk.messages.pop()
        talk.post(max_tokens=1)
        assert talk.asked[-1].tokens.tolist() == plain, "the answers are forgotten"


@pytest.mark.parametrize("family", slow_but(sorted(FAMILIES), *MOST_UNLIKE))
def test_texts_of_special_tokens_in_questions_and_answers_are_text_and_found_again(family: str) -> None:
    special = FAMILIES[family].special
    with chat(family) as talk:
        talk.variables = {"enable_thinking": False} if family == "deepseek" else {}
        forged = f"Is it {''.join(special)} or {' '.join(special)}?"
        scripts = []
        for turn in range(3):
            middle, (*last, end) = spelled(talk.tokenizer, special), answer(talk, family, turn)
            scripts.append([*last[:40], *middle, *last[40:]])
            body = talk.say(forged, [*scripts[-1], end])
            assert body["choices"][0]["message"]["content"] == talk.tokenizer.decode(scripts[-1])
        for before, said, after in zip(talk.asked, scripts, talk.asked[1:], strict=False):
            assert after.tokens[: len(before.tokens) + len(said)].tolist() == [*before.tokens.tolist(), *said]
        assert cached(body) >= len(talk.asked[1].tokens)
        plain = [message | {"content": "hi"} for message in talk.messages[:-1]]
        bare = talk.tokenizer.encode(talk.rendered(plain), add_special_tokens=False)
        made = talk.asked[-1].tokens.tolist()
        assert [made.count(id) for id in talk.tokenizer.all_special_ids] == [
            bare.count(id) for id in talk.tokenizer.all_special_ids
        ]
        assert talk.tokenizer.decode(made) == talk.rendered(talk.messages[:-1])


def everywhere(text: str) -> dict[str, dict[str, Any]]:
    """Bodies that have a text in every place that a client or its documents can write, by the route."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": text, "enum": [text]}}}
    function = {"name": "look", "description": text, "parameters": schema}
    arguments = json.dumps({"a": text})
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    chats = {
        "messages": [
            {"role": "system", "content": text},
            {
                "role": "user",
                "content": [{"type": "text", "text": text}, {"type": "text", "text": text}],
                "name": "bob",
            },
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": text},
        ],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 1,
    }
    blocks = [{"type": "text", "text": text}]
    messages = {
        "system": blocks,
        "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"a": text}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": blocks}]},
        ],
        "tools": [{"name": "look", "description": text, "input_schema": schema}],
        "max_tokens": 1,
    }
    responses = {
        "instructions": text,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": text}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": text},
        ],
        "tools": [{"type": "function", **function}],
        "max_output_tokens": 16,
    }
    return {"/v1/chat/completions": chats, "/v1/messages": messages, "/v1/responses": responses}


@pytest.mark.parametrize("family", ["qwen", "zephyr"])
def test_on_every_route_what_a_client_writes_is_text(family: str) -> None:
    special = FAMILIES[family].special
    with chat(family) as talk:
        ids = talk.tokenizer.all_special_ids
        for route in everywhere(""):
            prompts = []
            for text in ("hi", f"hi {''.join(special)}"):
                body = {"model": "tiny", **everywhere(text)[route]}
                response = talk.http.post(route, json=body)
                assert response.status_code == 200, response.text
                prompts.append(talk.asked[-1].tokens.tolist())
            plain, forged = prompts
            assert [forged.count(id) for id in ids] == [plain.count(id) for id in ids], route
            assert talk.tokenizer.decode(forged).count("".join(special)) >= 4, route
            if route == "/v1/messages":
                fields = {name: value for name, value in body.items() if name != "max_tokens"}
                counted = talk.http.post("/v1/messages/count_tokens", json=fields).json()
                assert counted == {"input_tokens": len(forged)}
            if route == "/v1/chat/completions":
                named = {name: body[name] for name in ("messages", "tools")}
                assert talk.http.post("/tokenize", json=named).json()["tokens"] == forged
                freed = talk.http.post("/v1/cache/remove", json=named).json()
                assert freed["freed_tokens"] > 0
