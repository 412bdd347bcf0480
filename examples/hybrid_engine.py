"""A model of three kinds of layers over one cache: full attention, a sliding window, and a recurrent state.

Each kind has its own memory. Window pages are allocated when they are needed and freed when no layer reads them. A
state is kept where prompts end, where they fork, and at marks, where they are expected to fork: the second question
starts at the end of the document. The answer is the same with and without the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mainstem import Full, Lease, PrefixCache, State, Window
from mainstem.runtime.schedule.checkpoints import plan_checkpoints

PAGE_SIZE, WINDOW, WIDTH, VOCABULARY = 4, 10, 8, 1000
SIZES = {Full(): 200, Window(WINDOW): 24, State(): 12}
embedding = np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH))


def attend(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    weights = np.exp(keys @ query / np.sqrt(WIDTH))
    return weights @ keys / weights.sum()


class Engine:
    """Keys are values, and a state is a decaying sum: one wrong page or state makes the answer wrong."""

    def __init__(self) -> None:
        self.full, self.window, self.states = (np.full((n, PAGE_SIZE, WIDTH), np.nan) for n in SIZES.values())
        self.computed = 0
        self.cache = PrefixCache(SIZES, PAGE_SIZE, copy_state=self.copy_state)

    def copy_state(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]

    def answer(self, prompt: list[int], marks: Sequence[int] = ()) -> np.ndarray:
        with self.cache.lease(prompt) as lease:
            lease.reserve(len(prompt) - lease.hit)
            if lease.hit == 0:
                self.states[lease.state] = 0.0
            begin = lease.hit
            for end, reason in plan_checkpoints(begin, lease.reach, len(prompt), PAGE_SIZE, marks=marks).items():
                self.compute(lease, prompt, begin, end)
                lease.checkpoint(end, mark=reason == "mark")
                lease.publish(end)
                begin = end
            self.compute(lease, prompt, begin, len(prompt))
            lease.publish(len(prompt))
            return self.read(lease, embedding[prompt[-1]], len(prompt))

    def compute(self, lease: Lease, prompt: list[int], begin: int, end: int) -> None:
        lease.slide(begin, end)
        full, window, _ = lease.tables
        for position in range(begin, end):
            x, (page, offset) = embedding[prompt[position]], divmod(position, PAGE_SIZE)
            self.full[full[page], offset] = x
            self.window[window[page], offset] = x
            self.states[lease.state] = 0.9 * self.states[lease.state] + x
        self.computed += end - begin

    def read(self, lease: Lease, query: np.ndarray, length: int) -> np.ndarray:
        positions = np.arange(length)
        page, offset = positions // PAGE_SIZE, positions % PAGE_SIZE
        seen = slice(max(0, length - WINDOW), length)
        tables = lease.tables
        full = attend(query, self.full[tables[0][page], offset])
        window = attend(query, self.window[tables[1][page[seen]], offset[seen]])
        return np.concatenate([full, window, self.states[lease.state].sum(axis=0)])


document = np.random.default_rng(1).integers(VOCABULARY, size=60).tolist()
engine = Engine()
for question in ([1, 2, 3, 4, 5, 6], [4, 5, 6, 7], [7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8]):
    before = engine.computed
    warm = engine.answer(document + question, marks=[len(document)])
    assert np.allclose(warm, Engine().answer(document + question))
    assert before == 0 or engine.computed - before <= len(question), "the document is computed once"
    print(f"question {question}: {engine.computed - before} of {len(document + question)} tokens computed")
print({name: f"{pool.cached} of {pool.total}" for name, pool in engine.cache.stats().pools.items()})
