"""Measures forwards, for the estimate of what computing a prompt takes. Does not know what a forward computes."""

from __future__ import annotations

from collections import abc

from mainstem.runtime.sequence import Sequence
from mainstem.tiers.prefill import PrefillCost


class Meter:
    """Times forwards.

    Args:
        prefill: the estimate; None: nothing is measured.
        clock: in seconds.

    On a GPU, a forward that samples nothing may still run when the call returns. Its time is measured together with
    that of the next forward that samples.
    """

    def __init__(self, prefill: PrefillCost | None, clock: abc.Callable[[], float]) -> None:
        self._prefill, self._clock = prefill, clock
        self._parts: list[tuple[int, int]] = []  # tokens of each sequence, and the positions before them
        self._began_s = 0.0

    def begin(self, scheduled: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Begins a forward over these sequences, and how many tokens of each."""
        if not self._parts:
            self._began_s = self._clock()
        if any(sequence.loading for sequence, _ in scheduled):
            self.drop()  # it also waits for pages
        elif any(sequence.prefilling for sequence, _ in scheduled):
            self._parts += [(n, sequence.computed) for sequence, n in scheduled]

    def end(self) -> None:
        """Ends it, and counts it together with those before it that were not ended."""
        if self._prefill is not None:
            self._prefill.observe(self._parts, self._clock() - self._began_s)
        self.drop()

    def drop(self) -> None:
        """Forgets what was begun."""
        self._parts = []
