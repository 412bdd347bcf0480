"""The estimates of what computing and loading take: `PrefillCost`, `LoadCost`, and `Costs`, which has all of a rank.

    computing   seconds = a * tokens + b * tokens * (positions that a token attends to, on average)
    loading     seconds = latency + bytes / rate

Both are least-squares fits over what was observed, with weights that decay, so that they follow a machine, store or
link that becomes slower. A forward's weight decays with the tokens computed since, and long forwards count for more
than short ones. A load's weight decays with each further load. An observation is clamped to a multiple of the expected
one: a compilation, a pause of the system or a stall is not a change of speed. Several loads in a row that are as far
off, all in one direction, are: then the fit begins anew.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


class _Fit:
    """A line through observations, y = a + b * x with neither below 0, by least squares over decaying weights.

    Args:
        alike: xs whose relative variance is at most this say nothing about the slope.
        flat: whether y is the same for all x then; otherwise it is proportional to x.
        max_factor: an observation counts as at most this many times slower or faster than expected.
    """

    def __init__(self, alike: float, flat: bool, max_factor: float) -> None:
        self._alike, self._flat, self._max_factor = alike, flat, max_factor
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float, kept: float, weight: float = 1.0) -> None:
        """Adds an observation; what is left of the weights of earlier ones is `kept`."""
        self._weight = kept * self._weight + weight
        self._x = kept * self._x + weight * x
        self._y = kept * self._y + weight * y
        self._xx = kept * self._xx + weight * x * x
        self._xy = kept * self._xy + weight * x * y

    def clamped(self, seconds: float, expected_s: float) -> float:
        return min(max(seconds, expected_s / self._max_factor), expected_s * self._max_factor)

    def line(self) -> tuple[float, float] | None:
        """Returns a and b; None: nothing was observed."""
        if not self._weight:
            return None
        spread = self._weight * self._xx - self._x * self._x
        if spread <= self._alike * self._weight * self._xx:
            return (self._y / self._weight, 0.0) if self._flat else (0.0, self._y / self._x)
        b = (self._weight * self._xy - self._x * self._y) / spread
        if b < 0:
            return self._y / self._weight, 0.0
        a = (self._y - b * self._x) / self._weight
        return (a, b) if a >= 0 else (0.0, self._xy / self._xx)


class PrefillCost:
    """What a prefill costs on this machine now. There is no estimate before a few forwards."""

    _ENOUGH_FORWARDS, _ENOUGH_TOKENS = 3, 128
    _HORIZON_TOKENS = 8192.0
    """The weight of a forward falls to 1/e after this many tokens."""

    def __init__(self) -> None:
        self._first: list[tuple[float, float, float]] = []  # the forwards before the first estimate
        self._furthest = 0.0  # most positions attended to per token; the estimate does not extrapolate beyond
        self._fit = _Fit(alike=1e-6, flat=True, max_factor=4.0)

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
        if (expected := self._seconds(tokens, attended)) is not None:
            self._add(tokens, attended, seconds, expected)
            return
        self._first.append((tokens, attended, seconds))
        seen = sum(tokens for tokens, _, _ in self._first)
        if len(self._first) >= self._ENOUGH_FORWARDS and seen >= self._ENOUGH_TOKENS:
            self._begin(seen)

    def seconds(self, tokens: int, context: int) -> float | None:
        """Estimates the time to compute `tokens` after `context` positions; None before the first estimate."""
        return self._seconds(tokens, tokens * (context + tokens / 2))

    def line(self) -> tuple[float, float] | None:
        """Returns the seconds for a token, and for each position that it attends to; None before the estimate."""
        return self._fit.line()

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
        pace_s = self._fit.clamped(seconds, expected) / tokens
        self._fit.add(attended / tokens, pace_s, math.exp(-tokens / self._HORIZON_TOKENS), weight=tokens * tokens)
        self._furthest = max(self._furthest, attended / tokens)

    def _seconds(self, tokens: float, attended: float) -> float | None:
        if (line := self._fit.line()) is None:
            return None
        return (line[0] + line[1] * min(attended / tokens, self._furthest)) * tokens if tokens > 0 else 0.0


class LoadCost:
    """What a load from one tier costs. There is no estimate before a few loads."""

    _ENOUGH = 3
    _KEPT = 0.95
    """What is left of the weight of a load after another one."""

    def __init__(self) -> None:
        self._new: list[tuple[float, float]] = []  # before the first estimate, or far from the present one
        self._slower = False  # in which direction
        self._fit = self._new_fit()

    def _new_fit(self) -> _Fit:
        return _Fit(alike=1e-3, flat=False, max_factor=2.0)

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return self.line() is not None

    def observe(self, size: int, seconds: float) -> None:
        """Adds an observation.

        Args:
            size: bytes that have arrived.
            seconds: since the first of them was asked for; 0 or less is ignored.
        """
        if size <= 0 or not 0 < seconds < math.inf:
            return
        expected = self.seconds(size) or 0.0
        if self._fit.clamped(seconds, expected) == seconds:
            self._new = []
        elif self.known and (seconds > expected) != self._slower:
            self._new, self._slower = [(size, seconds)], seconds > expected
        else:
            self._new.append((size, seconds))
        if len(self._new) == self._ENOUGH:
            self._begin()
        elif self.known:
            self._add(size, seconds, expected)

    def seconds(self, size: int) -> float | None:
        """Estimates the time until this many bytes have arrived; None before the first estimate."""
        return None if (line := self.line()) is None else line[0] + line[1] * size

    def line(self) -> tuple[float, float] | None:
        """Returns the latency, and the seconds for a byte; None before the first estimate."""
        return self._fit.line()

    def _begin(self) -> None:
        """Starts from the newest observations, each clamped around the median time of a byte."""
        self._fit = self._new_fit()
        pace = sorted(seconds / size for size, seconds in self._new)[self._ENOUGH // 2]
        for size, seconds in self._new:
            self._add(size, seconds, pace * size)
        self._new = []

    def _add(self, size: float, seconds: float, expected: float) -> None:
        self._fit.add(size, self._fit.clamped(seconds, expected), self._KEPT)


_MOST_PAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class Costs:
    """All estimates of one rank.

    Args:
        prefill: computing.
        look_up: asking storage what it has, of any size: counted as 1.
        read: from storage to the host, all calls of a prefetch together.
        load: from the host to the device.
    """

    prefill: PrefillCost = field(default_factory=PrefillCost)
    look_up: LoadCost = field(default_factory=LoadCost)
    read: LoadCost = field(default_factory=LoadCost)
    load: LoadCost = field(default_factory=LoadCost)

    def lines(self, token_bytes: float) -> dict[str, tuple[float, float] | None]:
        """Returns what routers ask for: the seconds of `prefill` for a token and for each position that it attends to;
        latency and seconds for a token of `load` (host to device) and `read` (storage to host). None: not known yet."""

        def of_tokens(line: tuple[float, float] | None, before_s: float) -> tuple[float, float] | None:
            return None if line is None else (before_s + line[0], line[1] * token_bytes)

        asked_s = self.look_up.seconds(1) or 0.0
        return {
            "prefill": self.prefill.line(),
            "load": of_tokens(self.load.line(), 0.0),
            "read": of_tokens(self.read.line(), asked_s),
        }

    def load_min_pages(self, page_bytes: int, page_size: int) -> int | None:
        """Returns the fewest pages of a prompt's beginning that are loaded as soon as computed; None: not known."""
        if not self.load.known or self.prefill.seconds(0, 0) is None:
            return None

        def as_soon(pages: int) -> bool:
            load_s, compute_s = self.load.seconds(pages * page_bytes), self.prefill.seconds(pages * page_size, 0)
            return load_s is not None and compute_s is not None and load_s <= compute_s

        return 1 + bisect_left(range(1, _MOST_PAGES), True, key=as_soon)

    def prefetch_min_tokens(self, page_bytes: int, most: int) -> int | None:
        """Returns how many tokens are computed while storage answers and sends a page, or `most`; None: not known."""
        asked_s, read_s = self.look_up.seconds(1), self.read.seconds(page_bytes)
        if asked_s is None or read_s is None or self.prefill.seconds(0, 0) is None:
            return None
        return self.computed_within(asked_s + read_s, 0, most)

    def computed_within(self, seconds: float, context: int, most: int) -> int:
        """Returns how many positions after `context` are computed in this time, at most `most`."""
        return bisect_right(range(1, most + 1), seconds, key=lambda n: self.prefill.seconds(n, context) or 0.0)
