"""A text with its tokens, and the places where it can be cut between two of them.

A text has many tokenizations. The tokenizer chooses one, and a model that generates the text often another; the cache
has KV for the second alone. Between two places where both can be cut, one may stand for the other:

    tokenizer    [An][ answer][ is][ sent][ back][.]
    model        [An][ ans][wer][ is][ se][nt][ back.]
    cuts of both     ^          ^    ^        ^      ^

The text of a conversation is escaped (`runtime.escapes`). This module does not know how a text is tokenised, only how
tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainstem.runtime.text.detokenizer import Detokenizer, Tokenizer
from mainstem.runtime.text.escapes import Escapes

_CONTEXT_TOKENS = 6  # before tokens whose text is compared: a blank, or a part of a character, depends on them
_REPLACEMENT = "\ufffd"
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Tokenization:
    """A text with its tokens.

    Args:
        text: what the tokens stand for.
        tokens: int32 [n].
        ends: int32 [n], ascending: the characters of the text up to the end of each token. One that ends inside a
            character counts as ending where the text can next be cut.
    """

    text: str
    tokens: NDArray[np.int32]
    ends: NDArray[np.int32]

    @staticmethod
    def of_offsets(text: str, tokens: NDArray[np.int32], offsets: NDArray[np.int32]) -> Tokenization:
        """Makes one of what a tokenizer returns.

        Args:
            text: the text.
            tokens: int32 [n].
            offsets: int32 [n, 2]: the first character of each token, and the one after its last. Tokens that are parts
                of one character all have this character.
        """
        ends = offsets[:, 1].copy()
        ends[:-1][offsets[1:, 0] < offsets[:-1, 1]] = _NEVER
        return Tokenization(text, tokens, _filled(ends))

    @staticmethod
    def of_generated(
        tokenizer: Tokenizer, tokens: Sequence[int], context: Sequence[int] | NDArray[np.int32], escapes: Escapes
    ) -> Tokenization:
        """Makes one of what a model generated; it ends before the first tokens that are no whole characters.

        Args:
            tokenizer: decodes tokens.
            tokens: what was generated; special tokens have a text, too.
            context: the tokens before them.
            escapes: tell its control tokens from their texts.
        """
        reader = Detokenizer(tokenizer, context=context, skip_special=False)
        pieces: list[str] = []
        ends: list[int] = []
        end = cut = 0
        for token in tokens:
            piece = reader.push(int(token))
            if _REPLACEMENT in piece:
                break
            pieces.append(piece)
            end += len(piece)
            ends.append(end if reader.whole else _NEVER)
            cut = len(ends) if reader.whole else cut
        filled = _filled(np.asarray(ends[:cut], np.int32))
        text = escapes.generated(tokens[: len(pieces)], pieces)[: int(filled[-1]) if cut else 0]
        return Tokenization(text, np.asarray(tokens[:cut], np.int32), filled)

    def __add__(self, other: Tokenization) -> Tokenization:
        """One text after the other."""
        ends = np.concatenate([self.ends, other.ends + np.int32(len(self.text))])
        return Tokenization(self.text + other.text, np.concatenate([self.tokens, other.tokens]), ends)

    def before(self, character: int) -> int:
        """Returns how many tokens end at or before a character."""
        return int(np.searchsorted(self.ends, character, "right"))

    def part(self, begin: int, end: int) -> Tokenization:
        """Returns the text between two characters where it can be cut, with its tokens."""
        first, last = self.before(begin) if begin else 0, self.before(end)
        return Tokenization(self.text[begin:end], self.tokens[first:last], self.ends[first:last] - np.int32(begin))

    def tail(self, count: int) -> Tokenization:
        """Returns the end of the text: `count` tokens, or fewer where it cannot be cut."""
        first = max(len(self.tokens) - count, 0)
        begin = int(self.ends[first - 1]) if first else 0
        return self.part(begin, len(self.text))

    def common_cuts(self, other: Tokenization, at: int) -> NDArray[np.int32]:
        """Returns where both can be cut, ascending, as characters of this text; some may be there twice.

        Args:
            other: of a text that this one has, at least in part.
            at: the character at which the other text begins.
        """
        same = common_length(self.text[at : at + len(other.text)], other.text)
        own = self.ends[self.before(at - 1) : self.before(at + same)]
        own = own if at else np.concatenate([[np.int32(0)], own])
        theirs = np.concatenate([[np.int32(0)], other.ends[: other.before(same)]]) + np.int32(at)
        nearest = np.searchsorted(own, theirs)
        cuts: NDArray[np.int32] = theirs[np.append(own, np.int32(-1))[nearest] == theirs]
        return cuts

    def replaced(self, begin: int, end: int, by: Tokenization) -> Tokenization:
        """Returns the same text with other tokens between two characters where it can be cut."""
        first, last = self.before(begin) if begin else 0, self.before(end)
        tokens = np.concatenate([self.tokens[:first], by.tokens, self.tokens[last:]])
        ends = np.concatenate([self.ends[:first], by.ends + np.int32(begin), self.ends[last:]])
        return Tokenization(self.text, tokens, ends)


def with_generated(
    tokenizer: Tokenizer, whole: Tokenization, known: Tokenization, at: int, since: int, escapes: Escapes
) -> tuple[Tokenization, int]:
    """Returns a tokenization with the tokens that a model generated, as far as the texts are the same.

    Only tokens between two places where both texts can be cut are replaced, and only if they decode to the text: some
    tokenizers drop characters, or report offsets that are not exact.

    Args:
        tokenizer: decodes tokens.
        whole: of a prompt.
        known: of what was generated, and of some tokens before it, in case that the first ones are cut differently.
        at: the character of the prompt at which `known` begins.
        since: the character of the prompt at which what was generated begins.
        escapes: with which both texts are escaped.

    Returns:
        The tokenization, and how many generated tokens it has; 0: it is `whole`.
    """
    cuts = whole.common_cuts(known, at)
    first = cuts[: np.searchsorted(cuts, since, "right")]
    if not len(first) or cuts[-1] <= since:
        return whole, 0
    begin, end = int(first[-1]), int(cuts[-1])
    old, new = whole.part(begin, end), known.part(begin - at, end - at)
    context = whole.tokens[: whole.before(begin)][-_CONTEXT_TOKENS:].tolist()
    if decoded(tokenizer, context + old.tokens.tolist()) != decoded(tokenizer, context) + escapes.plain(old.text):
        return whole, 0
    return whole.replaced(begin, end, new), known.before(end - at) - known.before(since - at)


def decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Returns the text of tokens as it is, special ones included."""
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def common_tokens(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Returns the length of the common beginning of two prompts, [n] and [m]."""
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if different.size else n


def common_length(one: str, other: str) -> int:
    """Returns the length of the common beginning of two texts, by bisection, which compares in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _filled(ends: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.minimum.accumulate(ends[::-1])[::-1]
