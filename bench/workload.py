"""The workloads of the index benchmark. Tokens are random, and everything follows from the seed.

Chats of many turns that begin with one of a few system prompts; two prompts share what their chats share:

    | system prompt | question | answer | question | answer | question |
    |<------- can be cached before the next prompt --------->|

Documents that are read repeatedly, a few often and most rarely, and never grow:

    | document | question |     | document | another question |
    |<-cached->|                |<-cached->|
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats of many turns. Lengths are in tokens.

    Args:
        seed: seed of the random numbers.
        chats: total number of chats.
        turns: prompts per chat.
        open_chats: concurrent chats; the next prompt comes from any of them.
        systems: number of system prompts.
        system_length: length of each system prompt.
        question_lengths: shortest and longest question.
        answer_length: tokens appended to the chat after each prompt.
        vocab_size: token ids are below it.
    """

    seed: int = 0
    chats: int = 400
    turns: int = 6
    open_chats: int = 32
    systems: int = 8
    system_length: int = 2048
    question_lengths: tuple[int, int] = (64, 512)
    answer_length: int = 128
    vocab_size: int = 150_000

    def prompts(self) -> Iterator[list[int]]:
        """Yields the prompts in order of arrival, `chats * turns` in total."""
        random = Random(self.seed)
        systems = [self._tokens(random, self.system_length) for _ in range(self.systems)]
        history: list[list[int]] = []
        turns_left: list[int] = []
        started = 0
        while started < self.chats or history:
            while started < self.chats and len(history) < self.open_chats:
                history.append(list(systems[random.randrange(self.systems)]))
                turns_left.append(self.turns)
                started += 1
            at = random.randrange(len(history))
            question = self._tokens_of_random_length(random)
            history[at] += question
            yield list(history[at])
            history[at] += self._tokens(random, self.answer_length)
            turns_left[at] -= 1
            if not turns_left[at]:
                del history[at], turns_left[at]

    def _tokens(self, random: Random, n: int) -> list[int]:
        return [random.randrange(self.vocab_size) for _ in range(n)]

    def _tokens_of_random_length(self, random: Random) -> list[int]:
        return self._tokens(random, random.randint(*self.question_lengths))


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents that are read repeatedly without extending them. Lengths are in tokens.

    Args:
        seed: seed of the random numbers.
        documents: number of documents; the n-th is requested in proportion to `n ** -skew` (Zipf's law).
        skew: exponent of their popularity.
        requests: total number of prompts.
        lengths: shortest and longest document, in units of 64 tokens: whole pages, so that a hit can cover all of it.
        question_lengths: shortest and longest question.
        vocab_size: token ids are below it.
    """

    seed: int = 0
    documents: int = 128
    skew: float = 1.0
    requests: int = 2400
    lengths: tuple[int, int] = (8, 40)
    question_lengths: tuple[int, int] = (1, 8)
    vocab_size: int = 150_000

    def prompts(self) -> Iterator[list[int]]:
        """Yields the prompts in order of arrival: a document and a new question each."""
        random = Random(self.seed)
        texts = [self._tokens(random, 64 * random.randint(*self.lengths)) for _ in range(self.documents)]
        shares = list(accumulate((at + 1) ** -self.skew for at in range(self.documents)))
        for _ in range(self.requests):
            (text,) = random.choices(texts, cum_weights=shares)
            yield text + self._tokens(random, random.randint(*self.question_lengths))

    def _tokens(self, random: Random, n: int) -> list[int]:
        return [random.randrange(self.vocab_size) for _ in range(n)]


WORKLOADS: dict[str, type[Chats] | type[Documents]] = {"chats": Chats, "reread": Documents}
"""Workloads by the names that tables and tasks use."""


def digest(prompts: Iterable[list[int]]) -> str:
    """Returns a fingerprint: SHA-256 over all prompts, each as its length and its tokens in 4 little-endian bytes."""
    hashed = hashlib.sha256()
    for prompt in prompts:
        hashed.update(len(prompt).to_bytes(4, "little"))
        hashed.update(array("I", prompt).tobytes())
    return hashed.hexdigest()
