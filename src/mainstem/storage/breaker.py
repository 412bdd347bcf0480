"""The breaker: calls to what fails repeatedly are not made for a while."""

from __future__ import annotations

from collections.abc import Callable


class Breaker:
    """Stops calls to a store that fails repeatedly.

    closed --failures--> open --cool-down--> one call is tried --success--> closed
                           ^-----------------------failure--+
    """

    def __init__(self, failures: int, cooldown_s: float, clock: Callable[[], float]) -> None:
        self._limit, self._cooldown_s, self._clock = failures, cooldown_s, clock
        self._failures = 0
        self._closed_until_s = 0.0  # while open: when the next call may be tried
        self._trying = False
        self.openings = 0

    @property
    def open(self) -> bool:
        """Whether calls are stopped."""
        return self._failures >= self._limit

    def allow(self) -> bool:
        """Whether a call may be made now. If so, the caller reports its end: `succeed`, `fail` or `release`."""
        if not self.open:
            return True
        if self._trying or self._clock() < self._closed_until_s:
            return False
        self._trying = True
        return True

    def succeed(self) -> None:
        """Reports a call that succeeded."""
        self._failures, self._trying = 0, False

    def release(self) -> None:
        """Reports a call that was given up, which says nothing of the store."""
        self._trying = False

    def fail(self) -> None:
        """Reports a call that failed."""
        was_open = self.open
        self._failures += 1
        self._trying = False
        if self.open:
            self._closed_until_s = self._clock() + self._cooldown_s
            self.openings += not was_open
