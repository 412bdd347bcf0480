"""Measures forwards for the estimate of prefill times."""

from __future__ import annotations

from collections import abc

from mainstem.runtime.sequence import Sequence
from mainstem.tiers.prefill import PrefillCost


class Meter:
    """Measures forwards.

    On a GPU, a forward that samples nothing may still run when the call returns. Its time is measured together with
    that of the next forward that samples.

    Args:
        prefill: learns from the measurements; None: nothing does.
        clock: monotonic, in seconds.
    """

    def __init__(self, prefill: PrefillCost | None, clock: abc.Callable[[], float]) -> None:
        self._prefill, self._clock = prefill, clock
        self._parts: list[tuple[int, int]] = []  # tokens of each sequence, and the positions before them
        self._began_s = 0.0

    def begin(self, scheduled: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Begins to measure a forward over these sequences, each with its number of tokens."""
        if not self._parts:
            self._began_s = self._clock()
        if any(sequence.loading for sequence, _ in scheduled):
            self.drop()  # it also waits for pages
        elif any(sequence.prefilling for sequence, _ in scheduled):
            self._parts += [(n, sequence.computed) for sequence, n in scheduled]

    def end(self) -> None:
        """Takes the time: the forward has ended."""
        if self._prefill is not None:
            self._prefill.observe(self._parts, self._clock() - self._began_s)
        self.drop()

    def drop(self) -> None:
        """Forgets what was begun."""
        self._parts = []
