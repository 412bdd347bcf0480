"""An estimate of what a prefill costs on this machine now, from the forwards observed so far.

    seconds = a * tokens + b * tokens * (positions that a token attends to, on average)

`a` and `b` are a least-squares fit over all forwards, with weights that decay with age. So long forwards count for more
than short ones, and the estimate follows a machine that becomes slower. The time of a forward is clamped to a few times
the expected one: a compilation or a pause of the system is not a change of speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mainstem.tiers.fit import Fit

_ENOUGH_FORWARDS = 3
_ENOUGH_TOKENS = 128
_HORIZON_TOKENS = 8192.0  # the weight of a forward falls to 1/e after this many tokens
_ALIKE = 1e-6
_MAX_FACTOR = 4.0  # a forward counts as at most this many times slower or faster than expected


class PrefillCost:
    """The estimate. It gives none before it has observed a few forwards."""

    def __init__(self) -> None:
        self._first: list[tuple[float, float, float]] = []  # the forwards before the first estimate
        self._furthest = 0.0  # most positions attended to per token; the estimate does not extrapolate beyond
        self._fit = Fit(_ALIKE)

    def observe(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """Adds a forward.

        Args:
            parts: for each of its sequences, the tokens computed and the positions before them.
            seconds: its duration; 0 is ignored.
        """
        tokens = float(sum(n for n, _ in parts))
        attended = float(sum(n * (context + n / 2) for n, context in parts))
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        if not self._fit.empty:
            self._add(tokens, attended, seconds, self._seconds(tokens, attended))
            return
        self._first.append((tokens, attended, seconds))
        seen = sum(tokens for tokens, _, _ in self._first)
        if len(self._first) >= _ENOUGH_FORWARDS and seen >= _ENOUGH_TOKENS:
            self._begin(seen)

    def seconds(self, tokens: int, context: int) -> float | None:
        """Estimates the time to compute `tokens` after `context` positions; None before the first estimate."""
        return self._seconds(tokens, tokens * (context + tokens / 2)) if not self._fit.empty else None

    def line(self) -> tuple[float, float] | None:
        """Returns the seconds for a token, and for each position that it attends to; None before the estimate."""
        return None if self._fit.empty else self._line()

    def _begin(self, seen: float) -> None:
        """Starts from the first forwards, each clamped around the median cost of a token."""
        median, below = 0.0, 0.0
        for tokens, _, seconds in sorted(self._first, key=lambda forward: forward[2] / forward[0]):
            median, below = seconds / tokens, below + tokens
            if below >= seen / 2:
                break
        for tokens, attended, seconds in self._first:
            self._add(tokens, attended, seconds, median * tokens)
        self._first = []

    def _add(self, tokens: float, attended: float, seconds: float, expected: float) -> None:
        seconds = min(max(seconds, expected / _MAX_FACTOR), expected * _MAX_FACTOR)
        kept = math.exp(-tokens / _HORIZON_TOKENS)
        self._fit.add(attended / tokens, seconds / tokens, kept, weight=tokens * tokens)
        self._furthest = max(self._furthest, attended / tokens)

    def _seconds(self, tokens: float, attended: float) -> float:
        if tokens <= 0:
            return 0.0
        a, b = self._line()
        return (a + b * min(attended / tokens, self._furthest)) * tokens

    def _line(self) -> tuple[float, float]:
        return self._fit.line() or (self._fit.mean[1], 0.0)
