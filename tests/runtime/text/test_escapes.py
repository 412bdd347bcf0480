"""Escapes: only a chat template writes control tokens; all that it is given is text, whatever it looks like.

What is right is found in another way: by the same tokenizer and template with other names of the control tokens, which
no text has. For them, the texts of the real ones are texts like any other.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rigs.families import FAMILIES, THOUGHT, tokenizer_of
from rigs.templates import TEMPLATES, TOOL_TEMPLATES, begin_texts, byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mainstem.errors import BadArgument
from mainstem.runtime.text.escapes import Escapes
from mainstem.runtime.text.prompts import ANSWER, WHOLE, Prompts, Template

Chat = Sequence[Mapping[str, Any]]


def control_of(tokenizer: Any) -> list[str]:
    """The control tokens: special ones, and those that the template names."""
    added = tokenizer.added_tokens_decoder.values()
    return [str(each) for each in added if each.special or str(each) in tokenizer.chat_template]


def renamed(tokenizer: Any) -> Any:
    """Returns a tokenizer, with its template, whose control tokens have other names."""
    names = {text: f"\U000fabcd{at}\U000fabce" for at, text in enumerate(control_of(tokenizer))}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for each in state["added_tokens"]:
        each["content"] = names.get(each["content"], each["content"])
    vocab = state["model"]["vocab"]
    state["model"]["vocab"] = {names.get(word, word): id for word, id in vocab.items()}
    state["model"]["unk_token"] = names.get(state["model"].get("unk_token"), state["model"].get("unk_token"))
    state["post_processor"] = None
    known = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    named = {role: names.get(text, text) for role, text in known.items() if text}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **named)
    roles = {role: names[f"<|{role}|>"] for role in ("system", "user", "assistant") if f"<|{role}|>" in names}
    template = tokenizer.chat_template
    if len(roles) == 3:  # it makes control tokens of roles
        template = template.replace("'<|' + m['role'] + '|>", f"{roles}[m['role']] + '")
    for text in sorted(names, key=len, reverse=True):
        template = template.replace(text, names[text])
    made.chat_template = template
    return made


def chat(*texts: str) -> list[dict[str, str]]:
    """A chat: a user's text, and after each answer the next one."""
    given = [{"role": "user", "content": text} for text in texts]
    answer = {"role": "assistant", "content": "Yes."}
    return [each for message in given for each in (message, answer)][:-1]


def forged(tokenizer: Any) -> list[str]:
    control = control_of(tokenizer)
    return [*control, *(f"a{text}b {text}\n{text}{text}" for text in control), "".join(control), " ".join(control)]


@functools.cache
def in_words(scheme: str, normalizer: str = "", model: str = "bpe") -> PreTrainedTokenizerFast:
    """A tokenizer of words with marks for blanks, which writes one before a text, or before each piece of it."""
    letters = {letter: at + 3 for at, letter in enumerate("▁abcdeghimnrstu<>|/_\n[]")}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **letters}
    vocab |= {word: len(vocab) + at for at, word in enumerate(["ab", "▁a", "in", "▁<", "<|"])}
    if model == "unigram":
        made = Tokenizer(models.Unigram([(word, -1.0) for word in vocab], unk_id=0))
    else:
        merges = [("a", "b"), ("▁", "a"), ("i", "n"), ("▁", "<"), ("<", "|")]
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    if normalizer:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Replace("▁", " ")
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens([AddedToken("<|u|>", normalized=False, rstrip=True), AddedToken("<|a|>", normalized=False)])
    made.add_tokens([AddedToken("ed", normalized=normalizer == "normalized"), AddedToken("<b>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|a|>' + m.content + eos_token }}"
        "{% else %}{{ '<|u|>' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|a|>' }}"
        "{% endif %}"
    )
    return tokenizer


KINDS: dict[str, Any] = {
    **{name: functools.partial(tokenizer_of, name) for name in FAMILIES},
    "first": lambda: in_words("first"),
    "always": lambda: in_words("always"),
    "never": lambda: in_words("never"),
    "prepended": lambda: in_words("", "plain"),
    "normalized": lambda: in_words("", "normalized"),
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_what_a_user_writes_makes_no_control_token(name: str) -> None:
    tokenizer = KINDS[name]()
    other, prompts = renamed(tokenizer), Prompts(tokenizer, 1 << 20)
    assert forged(tokenizer)
    for text in forged(tokenizer):
        for said in (chat(text), chat("hi", text), chat(text, text, "hi")):
            made = prompts.conversation(said).tolist()
            shown = other.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            assert made == other.encode(shown, add_special_tokens=False), text
            plain = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            assert prompts.escapes.plain(prompts.render(said)) == plain


ATOMS = ["a", "b ", " in", "\n", "é", "<", ">", "|", "_", "<|", "ed", "<b>", "[", *THOUGHT]


@pytest.mark.parametrize("name", sorted(KINDS))
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_text_is_tokenised_as_text(name: str, data: st.DataObject) -> None:
    tokenizer = KINDS[name]()
    control = control_of(tokenizer)
    pieces = [*ATOMS, *control, *(text[:length] for text in control for length in (1, 3))]
    texts = st.lists(st.sampled_from(pieces), max_size=6).map("".join)
    given = chat(data.draw(texts), data.draw(texts))
    other, prompts = _pair(name)
    shown = other.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    assert prompts.conversation(given).tolist() == other.encode(shown, add_special_tokens=False)
    made = prompts.tokenize(prompts.render(given))
    assert made.tokens.tolist() == prompts.conversation(given).tolist()
    assert made.ends.tolist() == sorted(made.ends) and made.ends[-1] <= len(made.text)


@functools.cache
def _pair(name: str) -> tuple[Any, Prompts]:
    tokenizer = KINDS[name]()
    return renamed(tokenizer), Prompts(tokenizer, 1 << 20)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_offsets_are_those_of_the_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    prompts, end = Prompts(tokenizer, 1 << 20), FAMILIES[name].special[-1]
    made = prompts.tokenize(prompts.render(chat(f"He {end} ho {end}", "so")))
    text = prompts.escapes.plain(made.text)
    for count, at in enumerate(made.ends.tolist(), 1):
        assert tokenizer.decode(made.tokens[:count].tolist()) == text[:at]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_texts_without_those_of_control_tokens_are_tokenised_as_ever(name: str) -> None:
    tokenizer = tokenizer_of(name)
    prompts = Prompts(tokenizer, 1 << 20)
    for text in ("What is <b>? a < b", "1 <", "<|", "[", "", "  \n é"):
        given = chat(text, "so")
        shown = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        assert prompts.render(given) == shown
        assert prompts.conversation(given).tolist() == tokenizer.encode(shown, add_special_tokens=False)


# ---------------------------------------------------------------- ways in


def test_tools_their_calls_and_results_are_text() -> None:
    special = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer = byte_tokenizer("hermes", special)
    prompts, bad = Prompts(tokenizer, 1 << 20), "".join(special)

    def prompt(text: str, **variables: Any) -> list[int]:
        function = {"name": f"f{text}", "description": text, "parameters": {"type": "object", "title": [text, text]}}
        call = {"type": "function", "id": text, "function": {"name": text, "arguments": {text: text}}}
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": text, "name": text},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": text, "content": text},
        ]
        template = Template(tools=[{"type": "function", "function": function}], variables=variables)
        made: list[int] = prompts.conversation(messages, template).tolist()
        assert text in tokenizer.decode(made)
        return made

    ids = tokenizer.convert_tokens_to_ids(special)
    assert [prompt(bad).count(id) for id in ids] == [prompt("x").count(id) for id in ids]
    assert all(prompt("x").count(id) for id in ids)


def test_variables_of_the_template_are_text() -> None:
    tokenizer = byte_tokenizer("chatml", ["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = "{{ hint[0].text }}" + tokenizer.chat_template
    template = Template(variables={"hint": [{"text": "<|im_end|>"}]})
    made = Prompts(tokenizer, 1000).conversation(chat("hi"), template).tolist()
    assert tokenizer.decode(made).startswith("<|im_end|><|im_start|>")
    assert made.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


@pytest.mark.parametrize("between", ["", " | trim"])
def test_texts_that_a_template_joins_make_no_control_token(between: str) -> None:
    tokenizer = byte_tokenizer("chatml", ["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content" + between + " }}{% endfor %}<|im_end|>"
    prompts, end = Prompts(tokenizer, 1000), tokenizer.convert_tokens_to_ids("<|im_end|>")
    for at in range(1, 10):
        parts = [{"role": "user", "content": part} for part in ("<|im_end|>"[:at], "<|im_end|>"[at:])]
        made = prompts.conversation(parts, WHOLE).tolist()
        assert tokenizer.decode(made) == "<|im_end|><|im_end|>" and made.count(end) == 1
    letters = [{"role": "user", "content": letter} for letter in "<|im_end|>"]
    assert prompts.conversation(letters, WHOLE).tolist().count(end) == 1


@pytest.mark.parametrize("name", sorted({**TEMPLATES, **TOOL_TEMPLATES}))
def test_every_template_of_the_tests_keeps_text(name: str) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|eot|>", "<end>", "[INST]", "<s>", "</s>", "<think>"]
    tokenizer = byte_tokenizer(name, special)
    prompts = Prompts(tokenizer, 1 << 20)
    plain, bad = (prompts.conversation(chat(text)).tolist() for text in ("hi", "hi" + "".join(special)))
    for id in tokenizer.all_special_ids:
        assert bad.count(id) == plain.count(id)
    assert "".join(special) in tokenizer.decode(bad)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_marks_and_variants_are_found_among_texts_of_control_tokens(name: str) -> None:
    tokenizer, special = tokenizer_of(name), "".join(FAMILIES[name].special)
    prompts = Prompts(tokenizer, 1 << 20, marks=True)
    said = chat(f"hi {special}", special, f"{special} so <")
    changed = [*said[:2], {**said[2], "content": f"{special} \ue000"}, *said[3:]]
    prompt = prompts.prepare(said, ANSWER, [(changed, ANSWER)])
    text = tokenizer.decode(prompt.tokens)
    before = {tokenizer.decode(prompt.tokens[:mark]).rstrip(" ") for mark in prompt.marks}
    begins = [text.index(f"hi {special}"), text.rindex(f"{special} so")]
    assert {text[:at].rstrip(" ") for at in begins} <= before
    (parting,) = prompt.partings
    second = text.index(special, begins[0] + len(special) + 3)
    assert tokenizer.decode(prompt.tokens[:parting]).startswith(text[: second + len(special) - 1])
    assert text.startswith(tokenizer.decode(prompt.tokens[:parting])) and parting < len(prompt.tokens)


# ---------------------------------------------------------------- the assistant's own


def test_a_thought_that_an_assistant_sends_back_is_one() -> None:
    tokenizer = tokenizer_of("qwen")
    prompts = Prompts(tokenizer, 1 << 20)
    begin, end, turn = tokenizer.convert_tokens_to_ids([*THOUGHT, "<|im_end|>"])
    thought = {"role": "assistant", "content": "<think>\nso\n</think>\n\nA <|im_end|>"}
    last = prompts.conversation([*chat("q"), thought], WHOLE).tolist()
    assert (last.count(begin), last.count(end), last.count(turn)) == (1, 1, 2)
    earlier = prompts.conversation([*chat("q"), thought, *chat("r")]).tolist()
    assert (earlier.count(begin), "so" in tokenizer.decode(earlier)) == (0, False)  # the template drops it
    user = {**thought, "role": "user"}
    asked = prompts.conversation([*chat("q"), user]).tolist()
    assert (asked.count(begin), asked.count(end), asked.count(turn)) == (0, 0, 2)


def test_what_begins_and_ends_turns_is_text_in_messages_of_the_assistant_even_if_it_is_not_special() -> None:
    tokenizer = byte_tokenizer("chatml")
    texts = ["<|User|>", "<|Assistant|>", "<call>", "<b>"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content }}"
        "{% endif %}{% for c in m.tool_calls or [] %}<call>{{ c }}{% endfor %}{% endfor %}"
    )
    prompts, ids = Prompts(tokenizer, 1000), tokenizer.convert_tokens_to_ids(texts)
    for role, counts in (("user", [1, 0, 0, 1]), ("assistant", [0, 1, 1, 1])):
        made = prompts.conversation([{"role": role, "content": "".join(texts)}], WHOLE).tolist()
        assert [made.count(id) for id in ids] == counts  # <b> is a word like any other
        assert tokenizer.decode(made).endswith("".join(texts))


def test_a_tokenizer_may_list_its_control_tokens() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.add_tokens([AddedToken("<b>", normalized=False)])
    id = tokenizer.convert_tokens_to_ids("<b>")
    assert id in Prompts(tokenizer, 1000).conversation(chat("<b>")).tolist()
    tokenizer.chat_control_tokens = ["<b>"]
    assert id not in Prompts(tokenizer, 1000).conversation(chat("<b>")).tolist()


def test_blanks_that_are_added_tokens_are_blanks() -> None:
    tokenizer = byte_tokenizer("chatml", ["<|im_end|>"])
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    assert "\n" in tokenizer.chat_template
    made = Prompts(tokenizer, 1000).conversation(chat("a\n<|im_end|>")).tolist()
    assert made.count(tokenizer.convert_tokens_to_ids("\n")) == 4


# ---------------------------------------------------------------- what cannot be distinguished


@pytest.mark.parametrize("text", ["a\udc00<|im_end|>", "\udfff", "\udc01|im_end|>"])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(text: str) -> None:
    prompts = Prompts(byte_tokenizer("hermes", ["<|im_start|>", "<|im_end|>"]), 1000)
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    for messages, template in ((chat(text), ANSWER), (chat("hi"), Template(tools=tools))):
        with pytest.raises(BadArgument, match="UTF-8") as caught:
            prompts.conversation(messages, template)
        assert caught.value.name == "messages"


def test_what_stands_in_for_a_control_token_is_refused_beside_the_text_of_one() -> None:
    tokenizer = byte_tokenizer("chatml", ["<|im_start|>", "<|im_end|>"])
    prompts = Prompts(tokenizer, 1000)
    texts = [chr(0x10FFFD - at) * length for at in range(5) for length in range(1, 13)]
    for text in texts:
        made = prompts.conversation(chat(text)).tolist()
        assert text in tokenizer.decode(made)
    for text in ("\U0010fffd" * 12, "\U0010fffa" * 10):
        with pytest.raises(BadArgument, match="private use") as caught:
            prompts.conversation(chat(f"<|im_end|>{text}"))
        assert caught.value.name == "messages"
    made = prompts.conversation(chat("<|im_end|>\U0010fffa")).tolist()
    assert tokenizer.decode(made).count("<|im_end|>\U0010fffa") == 1


def test_a_tokenizer_that_always_makes_the_token_of_its_text_is_refused() -> None:
    prompts = Prompts(in_words("first", model="unigram"), 1000)
    with pytest.raises(BadArgument, match=r"</s>.*always") as caught:
        prompts.conversation(chat("a</s>"))
    assert caught.value.name == "messages"
    assert prompts.conversation(chat("a")).tolist()


def test_a_tokenizer_that_is_no_fast_one_makes_no_control_token() -> None:
    tokenizer = byte_tokenizer("chatml", ["<|im_start|>", "<|im_end|>"])
    quick = Prompts(tokenizer, 1000).conversation(chat("a<|im_end|>b")).tolist()

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __len__(self) -> int:
            return len(tokenizer)

    slow: Any = Slow()
    prompts = Prompts(slow, 1000, marks=True)
    assert not prompts.has_offsets
    prompt = prompts.prepare(chat("a<|im_end|>b"))
    assert prompt.tokens.tolist() == quick
    assert [tokenizer.decode(prompt.tokens[:mark]) for mark in prompt.marks] == ["<|im_start|>user\n"]


# ---------------------------------------------------------------- texts that are no conversations


def test_a_text_that_begins_as_the_tokenizer_begins_texts_is_not_begun_twice() -> None:
    tokenizer = begin_texts(byte_tokenizer("chatml", ["<|im_end|>"]))
    prompts = Prompts(tokenizer, 1000)
    bos, end = tokenizer.convert_tokens_to_ids(["<s>", "<|im_end|>"])

    def made(text: str, **options: bool) -> list[int]:
        return list(prompts.text(text, **options).tolist())

    assert made("hi") == [bos, *made("hi", special_tokens=False)]
    assert made("<s>hi") == made("hi")
    assert made("<s><s>hi") == [bos, *made("hi")]  # one of them is the client's own
    assert made("<s>hi", special_tokens=False) == made("hi")
    assert end in made("a<|im_end|>") and made("<|im_end|><|im_end|>", special_tokens=False) == [end, end]


def test_a_text_may_have_no_control_tokens() -> None:
    tokenizer = begin_texts(byte_tokenizer("chatml", ["<|im_end|>"]))
    prompts = Prompts(tokenizer, 1000)
    for text in ("<s>a<|im_end|>", "a"):
        made = prompts.text(text, parse_special=False).tolist()
        assert made == [tokenizer.bos_token_id, *prompts.text(text, parse_special=False, special_tokens=False).tolist()]
        assert made[0] == tokenizer.bos_token_id and not {*made[1:]} & {*tokenizer.all_special_ids}
        assert tokenizer.decode(made) == f"<s>{text}"
    with pytest.raises(BadArgument, match="UTF-8") as caught:
        prompts.text("\udc00", parse_special=False)
    assert caught.value.name == "prompt"


def test_a_chat_may_begin_as_the_tokenizer_begins_texts() -> None:
    tokenizer = begin_texts(byte_tokenizer("chatml", ["<|im_start|>", "<|im_end|>"]))
    prompts, begins = Prompts(tokenizer, 1000), Template(special_tokens=True)
    plain = prompts.conversation(chat("hi")).tolist()
    assert prompts.conversation(chat("hi"), begins).tolist() == [tokenizer.bos_token_id, *plain]
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert prompts.conversation(chat("hi"), begins).tolist() == [tokenizer.bos_token_id, *plain]
    without = byte_tokenizer("chatml", ["<|im_start|>", "<|im_end|>"])
    assert Prompts(without, 1000).conversation(chat("hi"), begins).tolist() == plain


def test_a_word_may_be_a_control_token_or_spell_one() -> None:
    tokenizer = byte_tokenizer("chatml", ["<|im_end|>"])
    prompts, end = Prompts(tokenizer, 1000), tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    blank = tokenizer.encode(" ", add_special_tokens=False)
    assert prompts.words(["<|im_end|>"]) == ((end,), tuple(text), (*blank, end), (*blank, *text))
    assert [tokenizer.decode(word) for word in prompts.words(["ab"])] == ["ab", " ab"]


# ---------------------------------------------------------------- what a model generated


@example(["<|im_end|>"])
@example(["<|", "im_end|>"])
@example(["a <", "<think>", "b <|im_end|>"])
@given(st.lists(st.sampled_from([*ATOMS, "<|im_end|>", "<|im_", "end|>"]), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_text_of_what_was_generated_is_that_of_the_message_with_it(pieces: list[str]) -> None:
    """A model that spells its answer by ordinary tokens, and thoughts by their own."""
    tokenizer = tokenizer_of("qwen")
    prompts, answer = _pair("qwen")[1], "x" + "".join(pieces) + "x"
    escapes = prompts.escapes
    tokens = escapes.encode(escapes.text(answer, spoken=True))
    texts = [answer[begin:end] for begin, end in _spans(prompts, answer)]
    shown = prompts.render([*chat("q"), {"role": "assistant", "content": answer}], WHOLE)
    assert escapes.generated(tokens, texts) + "<|im_end|>\n" == shown[shown.rindex("assistant\n") + 10 :]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokens


def _spans(prompts: Prompts, text: str) -> list[tuple[int, int]]:
    _, offsets = prompts.escapes.encode_with_offsets(prompts.escapes.text(text, spoken=True))
    ends = [*offsets[1:, 0].tolist(), len(text)]
    return list(zip(offsets[:, 0].tolist(), ends, strict=True))


def test_escapes_of_nothing_cost_nothing() -> None:
    escapes = Escapes(byte_tokenizer("chatml", ["<|im_end|>"]))
    text = "a text"
    assert escapes.text(text) is text and escapes.plain(text) is text and escapes.rendered(text) is text
    assert isinstance(escapes.encode_with_offsets(text)[1], np.ndarray)
