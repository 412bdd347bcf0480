"""Chats with a model that keeps states: those that share a system message start at its end from the second one on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rigs.templates import TEMPLATES, byte_tokenizer
from starlette.testclient import TestClient

from bench.tiny_models import HYBRIDS, loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = 4
SYSTEM = {"role": "system", "content": "You answer in one word, and never twice in the same way."}
FIRST = [
    {"role": "user", "content": "Here is a long story, once upon a time in a wood."},
    {"role": "assistant", "content": "Nice."},
]


@contextmanager
def served(template: str) -> Iterator[tuple[TestClient, Engine, Any]]:
    tokenizer = byte_tokenizer(template)
    model = tiny("lfm2", **HYBRIDS["lfm2"] | {"vocab_size": len(tokenizer), "max_position_embeddings": 1024})
    made = replace(loaded(model), tokenizer=tokenizer)
    config = EngineConfig(pages=600, page_size=PAGE, token_budget=64, state_slots=40, checkpoint_tokens=0)
    with Engine(made, config) as engine:
        # Next turns have checkpoints, too.
        yield TestClient(create_app(engine, ServerConfig(precompute_turns=0.0))), engine, tokenizer


def cached(server: TestClient, messages: list[dict[str, str]]) -> int:
    fields = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    response = server.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"last"}))
def test_the_second_chat_starts_at_the_end_of_what_it_shares(template: str) -> None:
    """Where there is no system role, two chats share their first turns."""
    head = FIRST if template == "gemma" else [SYSTEM]
    with served(template) as (server, engine, tokenizer):
        chats = [[*head, {"role": "user", "content": question}] for question in ("Who is it?", "And why?", "Then?")]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        shared = len(tokenizer.encode(texts[0][: texts[0].index("Who is it?")], add_special_tokens=False))
        expected = shared // PAGE * PAGE
        assert [cached(server, chat) for chat in chats] == [0, expected, expected]
        assert engine.stats().totals.checkpoints["mark"] >= 1


def test_a_template_that_moves_the_system_message_costs_nothing_but_the_hit() -> None:
    with served("last") as (server, _, _):
        chats = [[SYSTEM, {"role": "user", "content": question}] for question in ("Who is it?", "And why?", "Then?")]
        found = [cached(server, chat) for chat in chats]
        assert found[0] == 0 and found[1] == found[2] > 0, "alone, the last message is the first, too"


def test_the_reasons_are_exported() -> None:
    with served("chatml") as (server, engine, _):
        for question in ("Who is it?", "And why?"):
            cached(server, [SYSTEM, {"role": "user", "content": question}])
        totals = engine.stats().totals
        lines = server.get("/metrics").text.splitlines()
        for reason, count in totals.checkpoints.items():
            assert f'mainstem_prompt_checkpoints_total{{reason="{reason}"}} {float(count)}' in lines
        assert f"mainstem_stateless_tokens_total {float(totals.stateless_tokens)}" in lines
