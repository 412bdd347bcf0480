"""Prompts: what is refused before it is tokenised, and how templates fail."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeTokenizer

from mainstem.errors import BadArgument, RequestTooLong
from mainstem.server.prompts import Prompts


class CountingTokenizer(FakeTokenizer):
    """Knows whether anything was tokenised, and has a token of three bytes."""

    calls = 0

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "\u2581": 1}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.calls += 1
        return super().encode(text, add_special_tokens)


def test_a_text_that_cannot_fit_is_refused_before_tokenising() -> None:
    tokenizer = CountingTokenizer()
    prompts = Prompts(tokenizer, max_context=10)
    with pytest.raises(RequestTooLong, match="31 bytes"):
        prompts.text("a" * 31)
    with pytest.raises(RequestTooLong):
        prompts.conversation([{"role": "user", "content": "ä" * 15}])
    assert tokenizer.calls == 0
    assert prompts.text("a" * 30).dtype == np.int32
    assert tokenizer.calls == 1


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(BadArgument, match="at least one token") as caught:
        Prompts(FakeTokenizer(), 10).text("")
    assert caught.value.name == "prompt"


def test_a_conversation_ends_where_the_answer_begins() -> None:
    tokenizer = FakeTokenizer()
    ids = Prompts(tokenizer, 100).conversation([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "<user>hi\n<assistant>"


def test_a_template_that_refuses() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(BadArgument, match="a system message comes first") as caught:
        Prompts(FakeTokenizer(), 100).conversation(messages)
    assert caught.value.name == "messages"


def test_spelling_half_a_character() -> None:
    prompts = Prompts(FakeTokenizer(), 100)
    assert prompts.spell(65) == "A"
    assert prompts.spell("é".encode()[0]) == "\ufffd"
