"""Tokenizations of one text: where they can be cut, and one in place of the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rigs.families import tokenizer_of

from mainstem.runtime.text.cuts import Tokenization, common_length, with_generated
from mainstem.runtime.text.escapes import Escapes


class Pieces:
    """A tokenizer in which a token is a text of up to three letters, or all of it is one."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def id(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        return "".join(self.texts[token] for token in token_ids)

    def divided(self, text: str, cuts: list[int]) -> Tokenization:
        """Tokenises a text that is cut at these characters, as far as it has them."""
        ends = sorted({*(cut for cut in cuts if 0 < cut < len(text)), len(text)} - {0})
        tokens = [self.id(text[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
        offsets = np.asarray(list(zip([0, *ends], ends, strict=False)), np.int32).reshape(-1, 2)
        return Tokenization.of_offsets(text, np.asarray(tokens, np.int32), offsets)


texts = st.text("ab", max_size=12)
cuts = st.lists(st.integers(0, 24))


@given(texts, texts, texts, texts, cuts, cuts, cuts)
def test_generated_tokens_stand_between_the_outermost_common_cuts(
    prompt: str, said: str, unsaid: str, then: str, own: list[int], theirs: list[int], context: list[int]
) -> None:
    """`said` comes back and `unsaid` does not; a slow model tries every pair of places."""
    tokenizer = Pieces()
    text = prompt + said + then
    whole = tokenizer.divided(text, own)
    before = tokenizer.divided(prompt, context).tail(2)
    escapes, tokens = Escapes(tokenizer), tokenizer.divided(said + unsaid, theirs).tokens.tolist()
    generated = Tokenization.of_generated(tokenizer, tokens, [], escapes)
    known, at = before + generated, len(prompt) - len(before.text)
    made, taken = with_generated(tokenizer, whole, known, at, len(prompt), escapes)
    same = common_length(known.text, text[at:])
    places = sorted(({0, *whole.ends.tolist()}) & {at + end for end in [0, *known.ends.tolist()] if end <= same})
    begins = [place for place in places if place <= len(prompt)]
    ends = [place for place in places if place > len(prompt)]
    assert made.text == tokenizer.decode(made.tokens.tolist()) == text
    if not begins or not ends:
        assert taken == 0 and made is whole
        return
    begin, end = begins[-1], ends[-1]
    expected = [*whole.tokens[whole.ends <= begin]]
    expected += [*known.tokens[(known.ends > begin - at) & (known.ends <= end - at)]]
    expected += [*whole.tokens[whole.ends > end]]
    assert made.tokens.tolist() == expected
    assert taken == sum((known.ends > len(prompt) - at) & (known.ends <= end - at))
    assert [text[:end] for end in made.ends] == [
        tokenizer.decode(made.tokens[: n + 1].tolist()) for n in range(len(made.tokens))
    ]


@given(texts, cuts, st.integers(0, 12))
def test_tails_parts_and_sums(text: str, own: list[int], count: int) -> None:
    tokenizer = Pieces()
    whole = tokenizer.divided(text, own)
    tail = whole.tail(count)
    assert tail.tokens.tolist() == whole.tokens[max(len(whole.tokens) - count, 0) :].tolist()
    assert text.endswith(tail.text) and tokenizer.decode(tail.tokens.tolist()) == tail.text
    head = whole.part(0, len(text) - len(tail.text))
    both = head + tail
    assert (both.text, both.tokens.tolist(), both.ends.tolist()) == (text, whole.tokens.tolist(), whole.ends.tolist())
    for character in range(len(text) + 1):
        assert whole.before(character) == sum(end <= character for end in whole.ends)


def test_a_text_is_not_cut_inside_a_character() -> None:
    """A token may end one character and begin the next."""
    tokenizer = tokenizer_of("qwen")
    bytes_of = {tokenizer.convert_ids_to_tokens(token): token for token in range(len(tokenizer))}
    c3, a9 = bytes_of["Ã"], bytes_of["©"]
    made = Tokenization.of_generated(tokenizer, [bytes_of["a"], c3, a9, bytes_of["b"]], [], Escapes(tokenizer))
    assert (made.text, made.ends.tolist()) == ("aéb", [1, 2, 2, 3])
    theirs = Tokenization.of_offsets("ééa", np.arange(4, dtype=np.int32), np.array([[0, 1], [0, 2], [1, 2], [2, 3]]))
    assert theirs.ends.tolist() == [2, 2, 2, 3]


def test_what_is_generated_ends_before_bytes_that_are_no_character() -> None:
    tokenizer = tokenizer_of("qwen")
    bytes_of = {tokenizer.convert_ids_to_tokens(token): token for token in range(len(tokenizer))}
    a, c3 = bytes_of["a"], bytes_of["Ã"]
    for tokens in ([a, c3], [a, c3, a, a], [a, c3, c3, a]):
        made = Tokenization.of_generated(tokenizer, tokens, [], Escapes(tokenizer))
        assert (made.text, made.tokens.tolist()) == ("a", [a])
    assert Tokenization.of_generated(tokenizer, [c3], [], Escapes(tokenizer)).text == ""


class Forgetful(Pieces):
    """A tokenizer that drops blanks, which its offsets do not say."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        return super().decode(token_ids).replace("_", "")


def test_tokens_that_do_not_decode_to_the_text_are_not_replaced() -> None:
    tokenizer = Forgetful()
    for text, replaced in (("abc", True), ("ab_c", False)):
        whole, known = tokenizer.divided(text, [2]), tokenizer.divided(text, [1, 3])
        made, taken = with_generated(tokenizer, whole, known, 0, 0, Escapes(tokenizer))
        assert (taken > 0, made is not whole) == (replaced, replaced)
