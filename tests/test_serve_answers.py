"""Chats of many turns over a real engine: the tokens of answers are found again, by ten kinds of templates.

The next tokens are given, and are not those of the tokenizer. So without memory a hit ends where the first answer
begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from machine import eventually
from rigs.families import FAMILIES, THOUGHT, tokenizer_of, unusual
from rigs.scripted import Scripted
from starlette.testclient import TestClient

from bench.tiny_models import HYBRIDS, loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Request
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig, SamplingParams
from mainstem.settings.server import ServerConfig

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE, TURNS, TOKENS = 4, 4, 80
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

    def say(self, text: str, script: list[int], **fields: Any) -> dict[str, Any]:
        """Asks, has the model answer with `script`, sends the answer back from now on, and returns the body."""
        self.messages.append({"role": "user", "content": text})
        self.runner.script.extend(script)
        body = self.post(max_tokens=len(script), **fields)
        self.messages.append({key: body["choices"][0]["message"][key] for key in ("role", "content")})
        return body

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
    limits = EngineConfig(pages=900, page_size=PAGE, token_budget=256, draft_tokens=0, **(changes and STATES or {}))
    runners: list[Scripted] = []

    def runner(*arguments: Any) -> Scripted:
        runners.append(Scripted(*arguments))
        return runners[0]

    with Engine(made, limits, runner=runner) as engine:
        talk = Chat(TestClient(create_app(engine, ServerConfig(**config))), engine, runners[0], tokenizer)
        submit = engine.submit
        engine.submit = lambda request, **more: talk.asked.append(request) or submit(request, **more)  # type: ignore[method-assign,func-returns-value]
        yield talk


STATES = {"state_slots": 60, "checkpoint_tokens": 0}


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def script(talk: Chat, family: str, turn: int) -> list[int]:
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
    """Holds a chat, and returns what was found of its answers."""
    counted = Reuse()
    with chat(family, **config) as talk:
        for turn in range(TURNS):
            counted.add(talk, talk.say(f"Question {turn}: what is next?", script(talk, family, turn)))
        check_against_cold(talk)
    return counted


def answers_in(talk: Chat) -> list[list[int]]:
    """Returns the positions of the tokens of each answer in the last prompt, whose text must be as it is rendered."""
    tokens, decode = talk.asked[-1].tokens.tolist(), talk.tokenizer.decode
    text = talk.tokenizer.apply_chat_template(talk.messages[:-1], tokenize=False, add_generation_prompt=True)
    assert decode(tokens) == text
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


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_are_sent_back_are_found(family: str) -> None:
    found, without = reuse(family), reuse(family, remember_answers=0)
    print(f"{family}: {found}; without memory {without}")
    assert np.mean(found.newest) >= 0.95 and np.mean(found.all) >= 0.95
    assert np.mean(without.newest) < 0.2
