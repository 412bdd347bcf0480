"""A prompt as one vector: the mean of the model's last hidden states over its tokens, of length 1.

The last hidden states are those that logits are computed from. It does not know how prompts are scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Pooling:
    """The mean of one prompt, added up chunk by chunk.

    The sum has float64, so that it does not depend on the chunks beyond what their forwards differ by.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._end = 0

    def add(self, start: int, hidden: torch.Tensor) -> None:
        """Adds the hidden states of the next tokens, [n, size]. At 0 it begins anew, as after a preemption."""
        if start == 0:
            self._sum, self._end = None, 0
        assert start == self._end, f"hidden states from {start}, after those up to {self._end}"
        added = hidden.double().sum(0)
        self._sum, self._end = added if self._sum is None else self._sum + added, start + len(hidden)

    def vector(self, length: int) -> NDArray[np.float32] | None:
        """Returns the mean over a prompt of `length` tokens, divided by its norm; None if it holds NaN or infinity."""
        assert self._sum is not None and self._end == length
        mean = (self._sum / length).cpu().numpy()
        norm = float(np.linalg.norm(mean))
        return (mean / max(norm, np.finfo(np.float64).tiny)).astype(np.float32) if np.isfinite(norm) else None


@contextmanager
def last_hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Yields a list to which every forward of a transformers model adds its last hidden states, [rows, n, size]."""
    states: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, given: object, output: Any) -> None:
        states.append(output[0])

    hook = model.get_decoder().register_forward_hook(keep)
    try:
        yield states
    finally:
        hook.remove()
