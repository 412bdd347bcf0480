"""An engine on one screen: a toy attention model over paged NumPy memory, with and without the cache.

The model is one attention head over random embeddings. It computes only what the lease does not hit, and the answer is
the same.
"""

from __future__ import annotations

import numpy as np

import mainstem

PAGES, PAGE_SIZE, WIDTH, VOCABULARY = 256, 8, 16, 1000
random = np.random.default_rng(0)
embedding, to_k, to_v = (random.normal(size=shape) for shape in ((VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)))


class Engine:
    """Owns the KV memory; the cache decides which pages a request uses."""

    def __init__(self) -> None:
        self.k, self.v = np.zeros((2, PAGES, PAGE_SIZE, WIDTH))
        self.computed = 0
        self.cache = mainstem.PrefixCache(PAGES, PAGE_SIZE, copy_page=self.copy_page)

    def copy_page(self, source: int, target: int, positions: int) -> None:
        for memory in (self.k, self.v):
            memory[target, :positions] = memory[source, :positions]

    def answer(self, prompt: list[int]) -> np.ndarray:
        with self.cache.lease(prompt) as lease:
            new = len(prompt) - lease.hit
            lease.reserve(new)
            positions = np.arange(lease.hit, len(prompt))
            page, offset = lease.page_table[positions // PAGE_SIZE], positions % PAGE_SIZE
            x = embedding[prompt[lease.hit :]]
            self.k[page, offset], self.v[page, offset] = x @ to_k, x @ to_v
            self.computed += new
            k, v = (m[lease.page_table].reshape(-1, WIDTH)[: len(prompt)] for m in (self.k, self.v))
            lease.finish()
        weights = np.exp(k @ x[-1] / np.sqrt(WIDTH))
        return weights @ v / weights.sum()


document = random.integers(VOCABULARY, size=100).tolist()
engine = Engine()
for question in ([1, 2, 3], [4, 5, 6], [1, 2, 7]):
    before = engine.computed
    warm = engine.answer(document + question)
    assert np.allclose(warm, Engine().answer(document + question))
    print(f"question {question}: {engine.computed - before} of {len(document + question)} tokens computed")
print(engine.cache.tree.pretty())
