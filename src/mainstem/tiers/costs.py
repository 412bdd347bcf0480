"""What computing and loading cost, as far as is known: `Costs`, and `LoadCost`, the twin of `PrefillCost`.

    seconds = latency + bytes / rate

A load is estimated from what has arrived so far: a least-squares fit, with weights that decay with each observation, so
it follows a store or link that becomes slower. An observation is clamped to a multiple of the expected one: a stall is
not a change of speed. Several in a row that are as far off, all in one direction, are: then the fit begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mainstem.tiers.fit import Fit
from mainstem.tiers.prefill import PrefillCost

_ENOUGH = 3  # observations
_KEPT = 0.95  # what is left of the weight of an observation after another one
_MAX_FACTOR = 2.0  # an observation counts as at most this many times slower or faster than expected
_MOST_PAGES = 1 << 16
_ALIKE = 1e-3  # sizes that vary less than this say nothing about the latency


class LoadCost:
    """The estimate for one tier. It gives none before it has a few observations."""

    def __init__(self) -> None:
        self._new: list[tuple[float, float]] = []  # before the first estimate, or far from the present one
        self._slower = False  # in which direction
        self._fit = Fit(_ALIKE)

    @property
    def known(self) -> bool:
        """Whether there is an estimate."""
        return not self._fit.empty

    def observe(self, size: int, seconds: float) -> None:
        """Adds an observation.

        Args:
            size: bytes that have arrived.
            seconds: since the first of them was asked for; 0 or less is ignored.
        """
        if size <= 0 or not 0 < seconds < math.inf:
            return
        expected = self._seconds(size) if self.known else 0.0
        if expected / _MAX_FACTOR <= seconds <= expected * _MAX_FACTOR:
            self._new = []
        elif self.known and (seconds > expected) != self._slower:
            self._new, self._slower = [(size, seconds)], seconds > expected
        else:
            self._new.append((size, seconds))
        if len(self._new) == _ENOUGH:
            self._begin()
        elif self.known:
            self._add(size, seconds, expected)

    def seconds(self, size: int) -> float | None:
        """Estimates the time until this many bytes have arrived; None before the first estimate."""
        return self._seconds(size) if self.known else None

    def line(self) -> tuple[float, float] | None:
        """Returns the latency, and the seconds for a byte; None before the first estimate."""
        return self._line() if self.known else None

    def _begin(self) -> None:
        """Starts from the newest observations, each clamped around the median time of a byte."""
        self._fit = Fit(_ALIKE)
        pace = sorted(seconds / size for size, seconds in self._new)[_ENOUGH // 2]
        for size, seconds in self._new:
            self._add(size, seconds, pace * size)
        self._new = []

    def _add(self, size: float, seconds: float, expected: float) -> None:
        seconds = min(max(seconds, expected / _MAX_FACTOR), expected * _MAX_FACTOR)
        self._fit.add(size, seconds, _KEPT)

    def _seconds(self, size: float) -> float:
        latency, pace = self._line()
        return latency + pace * size

    def _line(self) -> tuple[float, float]:
        size, seconds = self._fit.mean
        return self._fit.line() or (0.0, seconds / size)


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
        low, high = 1, _MOST_PAGES
        while low < high:
            pages = (low + high) // 2
            load_s, compute_s = self.load.seconds(pages * page_bytes), self.prefill.seconds(pages * page_size, 0)
            assert load_s is not None and compute_s is not None
            low, high = (low, pages) if load_s <= compute_s else (pages + 1, high)
        return low

    def prefetch_min_tokens(self, page_bytes: int, most: int) -> int | None:
        """Returns how many tokens are computed while storage answers and sends a page, or `most`; None: not known."""
        asked_s, read_s = self.look_up.seconds(1), self.read.seconds(page_bytes)
        if asked_s is None or read_s is None or self.prefill.seconds(0, 0) is None:
            return None
        return self.computed_within(asked_s + read_s, 0, most)

    def computed_within(self, seconds: float, context: int, most: int) -> int:
        """Returns how many positions after `context` are computed in this time, at most `most`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if (self.prefill.seconds(middle, context) or 0.0) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low
