"""Prompts: what is refused before it is tokenised, and how templates fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.fake_engine import FakeTokenizer
from rigs.templates import TEMPLATES, byte_tokenizer

from mainstem.errors import BadArgument, BadTokens, RequestTooLong
from mainstem.runtime.text.prompts import WHOLE, Prompts, Template


class CountingTokenizer(FakeTokenizer):
    """Records whether anything was tokenised, and has a token of three bytes."""

    calls = 0
    templated = 0

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "\u2581": 1}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.calls += 1
        return super().encode(text, add_special_tokens)[::3]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        self.templated += 1
        return super().apply_chat_template(messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt)


def test_a_text_that_cannot_fit_is_refused_before_tokenising() -> None:
    tokenizer = CountingTokenizer()
    prompts = Prompts(tokenizer, max_context=10)
    with pytest.raises(RequestTooLong, match=r"10 tokens\. However, your prompt resulted in at least 11 tokens"):
        prompts.text("a" * 31)
    with pytest.raises(RequestTooLong):
        prompts.conversation([{"role": "user", "content": "ä" * 15}])
    assert tokenizer.calls == 0
    assert prompts.text("a" * 30).dtype == np.int32
    assert tokenizer.calls == 1


def test_a_conversation_that_cannot_fit_is_refused_before_the_template() -> None:
    tokenizer = CountingTokenizer()
    prompts = Prompts(tokenizer, max_context=10)
    with pytest.raises(RequestTooLong, match="your messages resulted in at least 11 tokens"):
        prompts.conversation([{"role": "user", "content": ""}] * 11)
    with pytest.raises(RequestTooLong, match="your messages resulted in at least 11 tokens"):
        prompts.conversation([{"role": "user", "content": "ä" * 8}] * 2)
    assert tokenizer.templated == 0


def test_a_text_of_more_tokens_than_the_context_is_refused() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.get_vocab = lambda: {"long": 0}  # type: ignore[method-assign]
    prompts = Prompts(tokenizer, max_context=10)
    assert len(prompts.text("a" * 10)) == 10
    with pytest.raises(RequestTooLong, match=r"10 tokens\. However, your prompt resulted in 11 tokens"):
        prompts.text("a" * 11)
    with pytest.raises(RequestTooLong, match="your messages resulted in 18 tokens"):
        prompts.conversation([{"role": "user", "content": ""}])


def test_token_ids() -> None:
    prompts = Prompts(FakeTokenizer(), max_context=3)
    ids = prompts.tokens([1, 2, 3])
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 3]
    with pytest.raises(RequestTooLong, match=r"length is 3 tokens\. However, your prompt resulted in 4 tokens"):
        prompts.tokens([1, 2, 3, 4])
    with pytest.raises(BadTokens, match="at least one"):
        prompts.tokens([])


def test_prompts_can_be_shared_but_not_changed() -> None:
    prompts = Prompts(FakeTokenizer(), max_context=100)
    for ids in (prompts.text("a"), prompts.tokens([1]), prompts.conversation([{"role": "user", "content": "hi"}])):
        assert not ids.flags.writeable


@pytest.mark.parametrize("text", ["a\udcffb", "\ud83d"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    prompts = Prompts(FakeTokenizer(), 100)
    with pytest.raises(BadArgument, match="UTF-8") as caught:
        prompts.text(text)
    assert caught.value.name == "prompt"
    with pytest.raises(BadArgument, match="UTF-8") as caught:
        prompts.conversation([{"role": "user", "content": text}])
    assert caught.value.name == "messages"


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(BadArgument, match="at least one token") as caught:
        Prompts(FakeTokenizer(), 10).text("")
    assert caught.value.name == "prompt"


def test_a_conversation_ends_where_the_answer_begins_or_as_a_prefix_where_the_messages_end() -> None:
    tokenizer, said = FakeTokenizer(), [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(Prompts(tokenizer, 100).conversation(said)) == "<user>hi\n<assistant>"
    prefix = Prompts(tokenizer, 100).conversation(said, WHOLE)
    assert tokenizer.decode(prefix) == "<user>hi\n"


def test_a_template_that_refuses() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(BadArgument, match="a system message comes first") as caught:
        Prompts(FakeTokenizer(), 100).conversation(messages)
    assert caught.value.name == "messages"


def test_spelling_half_a_character() -> None:
    prompts = Prompts(FakeTokenizer(), 100)
    assert prompts.spell(65) == ("A", b"A")
    assert prompts.spell("é".encode()[0]) == ("\ufffd", None), "of a tokenizer without a vocabulary"


# ---------------------------------------------------------------- marks

SYSTEM = {"role": "system", "content": "Be brief, und höflich.  "}
TURNS = [
    {"role": "user", "content": "  What is a tree?"},
    {"role": "assistant", "content": "A plant. "},
    {"role": "user", "content": "And a vine?"},
]
CHATS = {name: TURNS if name == "gemma" else [SYSTEM, *TURNS] for name in TEMPLATES}


def before_marks(prompts: Prompts, tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[str]:
    """What is before each mark of a conversation."""
    prompt = prompts.prepare(messages)
    assert list(prompt.marks) == sorted(set(prompt.marks))
    assert prompt.tokens.tolist() == prompts.conversation(messages).tolist()
    return [tokenizer.decode(prompt.tokens[:mark]) for mark in prompt.marks]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"last"}))
def test_a_mark_is_where_the_text_of_a_message_begins(name: str, slow: bool) -> None:
    tokenizer = byte_tokenizer(name)
    whole = tokenizer.apply_chat_template(CHATS[name], tokenize=False, add_generation_prompt=True)
    trims = name in ("llama3", "gemma")
    texts = [message["content"].strip() if trims else message["content"] for message in CHATS[name]]
    begins, at = [], 0
    for text in texts:
        begins.append(whole.index(text, at))
        at = begins[-1] + len(text)
    prompts = Prompts(SlowTokenizer(tokenizer) if slow else tokenizer, 4096, marks=True)  # type: ignore[arg-type]
    found = before_marks(prompts, tokenizer, CHATS[name])
    if name == "asked":
        begins = begins[1:]  # a conversation of a system message alone is refused
    if name == "mistral":
        begins = [begin for begin in begins if begin != whole.index(SYSTEM["content"])]  # the same: it writes none
    assert found == [whole[:begin] for begin in begins]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {}}}
CALLS = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "Here."},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("name", ["hermes", "nine"])
def test_marks_are_found_after_tools_and_among_calls(name: str) -> None:
    tokenizer = byte_tokenizer(name)
    prompts = Prompts(tokenizer, 4096, marks=True)
    tools = Template(tools=[TOOL])
    prompt = prompts.prepare(CALLS, tools)
    whole = prompts.render(CALLS, tools)
    assert whole.index("look") < whole.index("Where?")
    before = [tokenizer.decode(prompt.tokens[:mark]) for mark in prompt.marks]
    for text in ("Where?", "Here.", "Thanks."):
        assert whole[: whole.index(text)] in before
    assert all(whole.startswith(each) for each in before)
    without = prompts.prepare(CALLS)
    assert without.tokens.tolist() != prompt.tokens.tolist()
    assert Template(tools=[]).arguments["tools"] == []


class SlowTokenizer:
    """A tokenizer without offsets."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_mark_is_never_in_the_middle_of_what_a_template_rearranges() -> None:
    tokenizer = byte_tokenizer("last")
    found = before_marks(Prompts(tokenizer, 4096, marks=True), tokenizer, CHATS["last"])
    assert found == [
        "[user]  What is a tree?[assistant]A plant. [user]" + SYSTEM["content"] + " ",
    ]


def test_conversations_with_one_system_message_share_the_mark_at_its_end() -> None:
    for name in sorted(set(TEMPLATES) - {"gemma", "last"}):
        tokenizer = byte_tokenizer(name)
        prompts = Prompts(tokenizer, 4096, marks=True)
        one, other = (prompts.prepare([SYSTEM, {"role": "user", "content": each}]) for each in ("one", "two"))
        assert one.marks == other.marks, name
        assert one.tokens[: one.marks[-1]].tolist() == other.tokens[: one.marks[-1]].tolist(), name
        assert tokenizer.decode(other.tokens[one.marks[-1] :]).startswith("two"), name


def test_marks_cost_a_bounded_number_of_renderings_and_none_unless_wanted() -> None:
    tokenizer = CountingTokenizer()
    chat = [{"role": role, "content": str(at)} for at, role in enumerate(["user", "assistant"] * 50)]
    assert Prompts(tokenizer, max_context=4096).prepare(chat).marks == ()
    assert tokenizer.templated == 1
    assert len(Prompts(tokenizer, max_context=4096, marks=True).prepare(chat).marks) == 8
    assert tokenizer.templated == 1 + 1 + 2 * 8


# ---------------------------------------------------------------- variants

TALK = [
    {"role": "user", "content": "one question"},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "another question"},
]


def put_in(at: int, offset: int, text: str = "\ue000") -> tuple[list[Mapping[str, str]], Template]:
    """Returns a variant of the conversation."""
    said = TALK[at]["content"]
    changed = {**TALK[at], "content": said[:offset] + text + said[offset:]}
    return [*TALK[:at], changed, *TALK[at + 1 :]], Template()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_variant_parts_where_something_was_put_in(name: str, slow: bool) -> None:
    tokenizer = byte_tokenizer(name)
    prompts = Prompts(SlowTokenizer(tokenizer) if slow else tokenizer, 10_000)  # type: ignore[arg-type]
    places = [(at, offset) for at, turn in enumerate(TALK) for offset in (0, 4, len(turn["content"]))]
    made = prompts.prepare(TALK, variants=[put_in(*place) for place in places])
    assert made.tokens.tolist() == prompts.prepare(TALK).tokens.tolist()
    assert len(made.partings) == len(places)
    for (at, offset), end in zip(places, made.partings, strict=True):
        before = tokenizer.decode(made.tokens[:end].tolist())
        assert before.endswith(TALK[at]["content"][:offset]) and "\ue000" not in before
        assert before + tokenizer.decode(made.tokens[end:].tolist()) == prompts.render(TALK)
    assert list(made.partings) == sorted(made.partings) and made.partings[0] > 0


def test_a_variant_that_cannot_be_made_or_shows_no_difference_parts_nowhere() -> None:
    prompts = Prompts(byte_tokenizer("gemma"), 10_000)
    refused = [{"role": "system", "content": "x"}, *TALK], Template()
    same = TALK, Template(tools=[{"type": "function", "function": {"name": "f"}}])  # it knows no tools
    trimmed = put_in(2, len(TALK[2]["content"]), "  ")
    assert prompts.prepare(TALK, variants=[refused, same, trimmed]).partings == (0, 0, 0)
    assert prompts.prepare(TALK, variants=[]).partings == ()


# ---------------------------------------------------------------- where tokens begin


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), min_size=1, max_size=40))
def test_each_byte_begins_where_its_character_does(text: str) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokens = tokenizer.encode(text)
    found = Prompts(tokenizer, 4096).offsets(tokens, text)
    assert found == [at for at, character in enumerate(text) for _ in character.encode()]


@pytest.mark.parametrize(("text", "begins"), [("ab", [0, 0, 1]), ("<s>ab", [0, 3, 4])])
def test_a_special_token_has_a_length_only_where_the_text_shows_it(text: str, begins: list[int]) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokens = [tokenizer.bos_token_id, *tokenizer.encode("ab")]
    assert Prompts(tokenizer, 100).offsets(tokens, text) == begins
    assert Prompts(tokenizer, 100).read(tokens, skip_special=not text.startswith("<")) == text


def test_tokens_of_another_text_begin_inside_this_one() -> None:
    assert Prompts(FakeTokenizer(), 100).offsets(list(b"abcd"), "ab") == [0, 1, 2, 2]
