"""Prompts for the benchmarks of the engine: random tokens, so that prompts share only their intended prefixes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.request import Request
from mainstem.runtime.stream import Stream
from mainstem.settings.engine import SamplingParams


class Prompts:
    """Random token sequences from a model's vocabulary.

    Args:
        loaded: the model.
        seed: seed of the random numbers.
    """

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocab_size = int(loaded.model.config.vocab_size)

    def tokens(self, n: int) -> NDArray[np.int32]:
        """Returns n new token ids."""
        return self._random.integers(self._vocab_size, size=n, dtype=np.int32)

    def extend(self, prefix: NDArray[np.int32], n: int) -> NDArray[np.int32]:
        """Returns a prefix followed by n new tokens."""
        return np.concatenate([prefix, self.tokens(n)])


def submit(engine: Engine, tokens: NDArray[np.int32], new_tokens: int) -> Stream:
    """Submits a request for exactly `new_tokens` new tokens."""
    return engine.submit(Request(tokens, SamplingParams(max_tokens=new_tokens, ignore_eos=True)))
