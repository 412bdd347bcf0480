"""Drafts: guesses at how a sequence goes on, which one forward verifies together.

A row more in a forward costs little while reading the weights takes most of the time. So a step computes the next token
and a few that are likely to follow it. Those that sampling then agrees with are kept; the rest is overwritten.

Drafts come from what is there already: what followed this very text in its namespace, in the cache's tree, and else
what followed its last tokens earlier in the same text (prompt lookup decoding, as in Saxena 2023 and transformers'
`prompt_lookup_num_tokens`). Where a grammar leaves one text to go on with, that is the draft, and nothing is guessed.
None of these needs a second model.

This module knows tokens. It does not know requests, pages, grammars or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# A draft follows an earlier occurrence of as many of the last tokens as possible, but at least and at most of these.
_SHORTEST, _LONGEST = 2, 8

_PAUSE = 16  # the most steps without a draft after drafts of which nothing was kept


def look_up(known: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """Returns what followed an earlier occurrence of the last tokens, int32 [`most`], or [0] if they are new.

    The longest occurrence counts, and the last among equally long ones. What followed it may go on past the end of the
    text: then the text repeats itself, and so does the draft.

    Args:
        known: int32 [n], the text so far.
        most: the number of tokens to return.
    """
    last = len(known) - 1
    ends = np.flatnonzero(known[:last] == known[last]) if last > 0 and most > 0 else np.empty(0, np.int64)
    for back in range(1, _LONGEST):
        longer = ends[ends >= back]
        longer = longer[known[longer - back] == known[last - back]] if back <= last else longer[:0]
        if not len(longer):
            if back < _SHORTEST:
                return known[:0]
            break
        ends = longer
    if not len(ends):
        return known[:0]
    begin = int(ends[-1]) + 1
    return known[begin + np.arange(most) % (len(known) - begin)]


def begin_with(forced: Sequence[int], guess: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns a draft that begins with forced tokens: the guess if it does, and else these alone, int32 [n]."""
    n = len(forced)
    sure = np.array(forced, np.int32)
    return guess if np.array_equal(guess[:n], sure) else sure


class Pace:
    """How many tokens to draft for a sequence: more while drafts are kept, none for a while after several misses.

    Tokens that are forced do not count: they say nothing of how well guesses do.
    """

    def __init__(self) -> None:
        self._length = 2
        self._misses = 0
        self._pause = 0
        self._forced = 0

    def length(self, most: int, forced: int = 0) -> int:
        """Returns how many tokens to draft in this step, forced ones included, up to `most`; call it once a step."""
        self._forced = forced
        if self._pause:
            self._pause -= 1
            return forced
        return min(forced + self._length, most)

    def observe(self, drafted: int, kept: int) -> None:
        """Counts a draft of at least one token, of which `kept` tokens were right."""
        drafted, kept = drafted - self._forced, max(kept - self._forced, 0)
        if drafted <= 0:
            return
        if kept == drafted:
            self._length = max(self._length, 2 * drafted)
        else:
            self._length = max(1, (self._length + kept) // 2)
        self._misses = 0 if kept else self._misses + 1
        self._pause = min(2**self._misses - 1, _PAUSE) if self._misses > 1 else 0
