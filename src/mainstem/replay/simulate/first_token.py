"""The time to the first token of replayed requests: loading what a lower tier had, and computing what none had.

    seconds = tokens found on a lower tier / load rate + work of the tokens found nowhere / prefill rate

Nothing waits: a replay has no queue. Without a model, a token is the same work at every position. With one, the rate is
that of a prompt of `RATED_TOKENS` tokens, and a token that attends to more takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Flops: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
"""`flops(tokens, past)`: FLOPs of computing `tokens` tokens, 1 or more of each prompt, after `past` cached ones;
element-wise, like `ModelShape.prefill_flops`."""

RATED_TOKENS = 1000
"""Tokens of the prompt at which a prefill rate is stated."""

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The speed of a replica.

    Args:
        rate: tokens per second that it computes.
        load_rate: tokens per second that it loads from its lower tiers.
        flops: the work of a prefill; None: that of its tokens, wherever they are.
    """

    rate: float
    load_rate: float
    flops: Flops | None = None

    def seconds(
        self, tokens: NDArray[np.int64], device: NDArray[np.int64], found: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Returns [requests] seconds to the first token. The last token of a prompt is always computed.

        Args:
            tokens: [requests] of each prompt, 1 or more.
            device: [requests] of these, found on the device.
            found: [requests] found on any tier.
        """
        past = np.minimum(found, tokens - 1)
        loaded = np.maximum(past - device, 0) / self.load_rate
        if self.flops is None:
            return loaded + (tokens - past) / self.rate
        rated = self.flops(np.array([RATED_TOKENS]), np.array([0])) / RATED_TOKENS
        seconds: NDArray[np.float64] = loaded + self.flops(tokens - past, past) / (rated * self.rate)
        return seconds
