"""Host memory through which pages pass on their way between an engine's memory and a store, in slots of one size.

    | header | content | pad | header | content | pad | ...

A slot that a call to the store has is free again once the call has returned, however late: until then the back end may
still write to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.sealer import HEADER_BYTES

_ALIGNMENT = 128


class Slots:
    """Slots, of which none is taken. One thread at a time.

    Args:
        count: how many. They take memory only where they are used.
        content_bytes: of the longest page.
    """

    def __init__(self, count: int, content_bytes: int) -> None:
        stride = -(-(HEADER_BYTES + content_bytes) // _ALIGNMENT) * _ALIGNMENT
        self.count = count
        self.memory = memoryview(mmap.mmap(-1, count * stride))
        """All of them, for `Store.register`."""
        self.rows = np.frombuffer(self.memory, np.uint8).reshape(count, stride)
        """The bytes of each slot: [count, bytes], header and padding included."""
        self._free = list(range(count))
        self._late: list[tuple[StoreCall[Any], Sequence[int]]] = []

    @property
    def free(self) -> int:
        """How many are free."""
        late, self._late = self._late, []
        for call, slots in late:
            self.give(slots, call)
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes slots, or none if fewer are free."""
        if count > self.free:
            return []
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return taken

    def give(self, slots: Sequence[int], call: StoreCall[Any] | None = None) -> None:
        """Frees slots, once the call that has them returns."""
        if call is None or call.done():
            self._free.extend(slots)
        else:
            self._late.append((call, slots))

    def check(self, held: Sequence[int]) -> None:
        """Checks that each slot is free, or has one user.

        Args:
            held: those that were taken, and not given back.

        Raises:
            AssertionError: one is lost, or has two users.
        """
        late = [slot for _, slots in self._late for slot in slots]
        assert sorted([*self._free, *late, *held]) == list(range(self.count)), "a slot is free, or has one user"

    def views(self, slots: Sequence[int], content_bytes: int) -> list[memoryview]:
        """Returns slots as a store takes them: the header, then the content."""
        return [self.rows[slot, : HEADER_BYTES + content_bytes].data for slot in slots]
