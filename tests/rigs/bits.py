"""Computes prompts in parts, and counts the numbers that are not the bits of a prompt computed alone and at once.

bits = Bits(runner)
bits.alone(prompt)              logits of all positions, keys and values, and the state at the end
bits.differing(prompts, ways)   numbers that differ, of each prompt, computed by forwards of some parts each
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.memory.kv import KVPool
from mainstem.runtime.memory.states import StatePool
from mainstem.runtime.models.adapters import Adapter
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.segments import Segment

Tokens = NDArray[np.int32]


class Part(NamedTuple):
    """Positions [begin, end) of a prompt, by its index."""

    prompt: int
    begin: int
    end: int


Forwards = Sequence[Sequence[Part]]
"""The parts that are computed together, forward after forward."""

Numbers = Mapping[str, torch.Tensor]
"""What a prompt's computation leaves: its logits, the rows of its pages, and its state at the end."""


class Bits:
    """Computes over scattered pages of a runner.

    Args:
        runner: with pages for all prompts of a call, and a slot for each if it keeps states.
        adapter: that computes in place of the base model.
    """

    def __init__(self, runner: ModelRunner, adapter: Adapter | None = None) -> None:
        self._runner, self._adapter = runner, adapter
        pools = runner.pools.values()
        self._paged = {name: pool for name, pool in runner.pools.items() if isinstance(pool, KVPool)}
        self._states = next((pool for pool in pools if isinstance(pool, StatePool)), None)
        pages = min(pool.pages for pool in self._paged.values())
        self._size = next(iter(self._paged.values())).page_size
        self._order = np.random.default_rng(7).permutation(pages).astype(np.int32)

    @property
    def has_states(self) -> bool:
        """Whether the model keeps a state, which is no page."""
        return self._states is not None

    def alone(self, prompt: Tokens) -> Numbers:
        """Returns what a prompt leaves that is computed in one forward, by itself."""
        return self.compute([prompt], [[Part(0, 0, len(prompt))]])[0]

    def compute(self, prompts: Sequence[Tokens], forwards: Forwards, shared: Sequence[int] = ()) -> list[Numbers]:
        """Computes prompts part by part, and returns what each leaves.

        Args:
            prompts: their parts, in order, are whole prompts but for what they share.
            forwards: as above.
            shared: positions that each prompt shares with the one before it: whole pages, whose parts it lacks.
        """
        tables = self._tables([len(prompt) for prompt in prompts], shared)
        rows: list[list[torch.Tensor]] = [[] for _ in prompts]
        for parts in forwards:
            segments = [self._segment(prompts[part.prompt], part, tables[part.prompt]) for part in parts]
            logits = torch.split(self._runner.forward(segments), [len(segment.tokens) for segment in segments])
            for part, own in zip(parts, logits, strict=True):
                rows[part.prompt].append(own)
        return [self._left(i, rows[i], tables[i], len(prompt)) for i, prompt in enumerate(prompts)]

    def _tables(self, lengths: Sequence[int], shared: Sequence[int]) -> list[Tokens]:
        tables: list[Tokens] = []
        taken = 0
        for i, length in enumerate(lengths):
            kept = shared[i] // self._size if shared else 0
            own = -(-length // self._size) - kept
            before = tables[i - 1][:kept] if kept else self._order[:0]
            tables.append(np.concatenate([before, self._order[taken : taken + own]]))
            taken += own
        assert taken <= len(self._order), "the runner has too few pages"
        return tables

    def _segment(self, prompt: Tokens, part: Part, table: Tokens) -> Segment:
        tokens = prompt[part.begin : part.end]
        return Segment(
            tokens, part.begin, (table,) * len(self._paged), len(tokens), state=part.prompt, adapter=self._adapter
        )

    def _left(self, index: int, rows: Sequence[torch.Tensor], table: Tokens, length: int) -> Numbers:
        left = {"logits": torch.cat(list(rows))} if rows else {}
        for name, pool in self._paged.items():
            for layer, (keys, values) in enumerate(pool.read(table, 0, length)):
                left[f"{name} keys {layer}"], left[f"{name} values {layer}"] = keys.clone(), values.clone()
        for number, tensor in enumerate(() if self._states is None else self._states.tensors):
            left[f"state {number}"] = tensor[index].clone()
        return left


def differing(ours: Numbers, alone: Numbers) -> dict[str, int]:
    """Returns how many numbers have other bits, by what they are; of logits, the last rows where there are fewer."""
    found = {}
    for name, own in ours.items():
        expected = alone[name][len(alone[name]) - len(own) :] if name == "logits" else alone[name]
        assert own.shape == expected.shape and own.dtype is expected.dtype
        words = {2: torch.int16, 4: torch.int32, 1: torch.uint8}[own.itemsize]
        if count := int((own.contiguous().view(words) != expected.contiguous().view(words)).sum()):
            found[name] = count
    return found


def chunks(prompt: int, begin: int, end: int, sizes: Iterator[int]) -> list[Part]:
    """Cuts [begin, end) of a prompt into parts of these sizes."""
    parts = []
    while begin < end:
        to = min(end, begin + next(sizes))
        parts.append(Part(prompt, begin, to))
        begin = to
    return parts


def interleaved(queues: Sequence[Sequence[Part]], draw: random.Random) -> list[list[Part]]:
    """Orders parts of several prompts: each forward has the next part of some of them, at least one."""
    left = [list(queue) for queue in queues]
    forwards = []
    while any(left):
        ready = [queue for queue in left if queue]
        chosen = draw.sample(ready, draw.randint(1, len(ready)))
        forwards.append([queue.pop(0) for queue in chosen])
    return forwards
