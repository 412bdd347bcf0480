"""The workload of the index benchmark: chats of many turns whose first tokens are one of a few system prompts.

    | system prompt | question | answer | question | answer | question |
    |<--------- what a cache can know of the next prompt --->|

Tokens are random, so two prompts share exactly what their chats share. Everything follows from the seed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Chats:
    """What the prompts look like. Lengths are in tokens.

    Args:
        seed: of the random stream.
        chats: chats in all.
        turns: prompts a chat.
        open_chats: chats that go on at a time; the next prompt comes from any of them.
        systems: different system prompts.
        system_length: of each of them.
        question_lengths: shortest and longest question.
        answer_length: tokens that join the chat behind each prompt.
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
        """The prompts in the order they arrive, `chats * turns` in all."""
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


def digest(prompts: Iterable[list[int]]) -> str:
    """SHA-256 over all prompts, each as its length and its tokens in 4 little-endian bytes; says which workload ran."""
    hashed = hashlib.sha256()
    for prompt in prompts:
        hashed.update(len(prompt).to_bytes(4, "little"))
        hashed.update(array("I", prompt).tobytes())
    return hashed.hexdigest()
