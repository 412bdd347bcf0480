"""What a prefill costs on this machine, as it is now: an estimate from the forwards that were seen.

    seconds = a * tokens + b * tokens * (positions that a token attends to, in the mean)

`a` and `b` are least squares over all forwards, the older ones at less and less weight, so long forwards say more than
short ones, and a machine that becomes slower is followed. A forward that took many times what was expected counts as
if it had taken a few times as long: a compilation or a pause of the system is no change of speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_ENOUGH_FORWARDS = 3
_ENOUGH_TOKENS = 128
_HORIZON_TOKENS = 8192.0  # behind so many others a forward counts for a third
_MOST_OFF = 4.0  # times the expected, up or down, that one forward can say


class PrefillCost:
    """The estimate. It knows nothing before it has seen a few forwards."""

    def __init__(self) -> None:
        self._first: list[tuple[float, float, float]] = []  # what was seen before it knows anything
        self._knows = False
        self._furthest = 0.0  # positions attended to, a token: beyond them nothing is extrapolated
        self._nn = self._nx = self._xx = self._ns = self._xs = 0.0

    def observe(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """One forward.

        Args:
            parts: of each sequence in it the tokens that were computed, and the positions before them.
            seconds: that it took; nothing is learned from 0.
        """
        tokens = float(sum(n for n, _ in parts))
        attended = float(sum(n * (context + n / 2) for n, context in parts))
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        if self._knows:
            self._add(tokens, attended, seconds, self._seconds(tokens, attended))
            return
        self._first.append((tokens, attended, seconds))
        seen = sum(tokens for tokens, _, _ in self._first)
        if len(self._first) >= _ENOUGH_FORWARDS and seen >= _ENOUGH_TOKENS:
            self._begin(seen)

    def seconds(self, tokens: int, context: int) -> float | None:
        """How long computing so many tokens takes behind so many positions; None: it does not know."""
        return self._seconds(tokens, tokens * (context + tokens / 2)) if self._knows else None

    def _begin(self, seen: float) -> None:
        """From the first forwards, each of them held to the token that is in the middle of all by its cost."""
        middle, below = 0.0, 0.0
        for tokens, _, seconds in sorted(self._first, key=lambda forward: forward[2] / forward[0]):
            middle, below = seconds / tokens, below + tokens
            if below >= seen / 2:
                break
        for tokens, attended, seconds in self._first:
            self._add(tokens, attended, seconds, middle * tokens)
        self._first, self._knows = [], True

    def _add(self, tokens: float, attended: float, seconds: float, expected: float) -> None:
        seconds = min(max(seconds, expected / _MOST_OFF), expected * _MOST_OFF)
        kept = math.exp(-tokens / _HORIZON_TOKENS)
        self._nn = kept * self._nn + tokens * tokens
        self._nx = kept * self._nx + tokens * attended
        self._xx = kept * self._xx + attended * attended
        self._ns = kept * self._ns + tokens * seconds
        self._xs = kept * self._xs + attended * seconds
        self._furthest = max(self._furthest, attended / tokens)

    def _seconds(self, tokens: float, attended: float) -> float:
        return self._at(min(attended / tokens, self._furthest)) * tokens if tokens > 0 else 0.0

    def _at(self, attended: float) -> float:
        """Seconds a token that attends to so many positions."""
        both = self._nn * self._xx - self._nx * self._nx
        if both <= 1e-6 * self._nn * self._xx:  # all forwards were alike
            return self._by_tokens()
        a = (self._ns * self._xx - self._xs * self._nx) / both
        b = (self._xs * self._nn - self._ns * self._nx) / both
        if b < 0:
            return self._by_tokens()
        return self._xs / self._xx * attended if a < 0 else a + b * attended

    def _by_tokens(self) -> float:
        return self._ns / self._nn
