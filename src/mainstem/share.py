"""`Share`: a part of the time that passes, for work that nobody waits for, or that is for others."""

from __future__ import annotations

import time
from collections.abc import Callable

from mainstem.errors import BadArgument

_BURST_S = 0.05


class Share:
    """A part of the time that passes.

    Over any `t` seconds no more than `part * t + burst_s` and one piece of work are spent, however much is asked.

    Args:
        part: of the time, above 0, up to 1.
        burst_s: seconds that were not spent and are kept for later.
        clock: monotonic time in seconds.
    """

    def __init__(self, part: float, burst_s: float = _BURST_S, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < part <= 1:
            raise BadArgument("share", part, "a number above 0, up to 1")
        self._part, self._burst_s, self._clock = part, burst_s, clock
        self._left_s, self._then_s = burst_s, clock()

    def allows(self) -> bool:
        """Whether work may begin now."""
        now_s = self._clock()
        self._left_s = min(self._burst_s, self._left_s + self._part * (now_s - self._then_s))
        self._then_s = now_s
        return self._left_s > 0

    def spend(self, seconds: float) -> None:
        """Notes what a piece of work took; less than 0 gives that back."""
        self._left_s -= seconds
