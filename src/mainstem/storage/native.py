"""Helpers for clients in native code: buffer addresses, and memory registration.

This module depends on no client and no store: a back end passes the functions that register and deregister memory.

        registered pool                  unregistered buffers     staging (registered once)
    | page | page | page |           | a |     | b |              | a | b |         |
      used in place                    copied to staging before a put, and back after a get
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from mainstem.errors import StorageError

ALIGNMENT_BYTES = 64
"""The alignment of values in the staging buffer: a cache line."""

Transfer = Callable[[slice, list[int], list[int]], Sequence[int]]
"""`(slice of the batch, addresses, sizes in bytes) -> one number for each value`; the client defines the numbers."""


def address_of(buffer: memoryview) -> int:
    """Returns the address of a writable buffer, or 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


@dataclass(slots=True)
class _Part:
    """A contiguous part of a batch whose unregistered buffers fit into the staging buffer together.

    Args:
        start: index of its first value in the batch.
        addresses: address of each value for the client.
        sizes: size of each value in bytes.
        copies: for each unregistered buffer its index in this part, the buffer, and its piece of staging memory.
    """

    start: int
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    copies: list[tuple[int, memoryview, memoryview]] = field(default_factory=list)

    def run(self, transfer: Transfer) -> Sequence[int]:
        return transfer(slice(self.start, self.start + len(self.sizes)), self.addresses, self.sizes)


class Memory:
    """Memory that is registered with a client, and one staging buffer for all other memory.

    Args:
        register: `(address, size)` registers memory with the client, or raises `StorageError`.
        deregister: `(address, size)` undoes that.
        staging_bytes: size of the staging buffer, which is allocated on first use; the limit for a value that needs it.
    """

    def __init__(
        self, register: Callable[[int, int], None], deregister: Callable[[int, int], None], staging_bytes: int
    ) -> None:
        self._register = register
        self._deregister = deregister
        self._staging_bytes = staging_bytes
        self._staging: memoryview | None = None
        self._regions: list[tuple[int, int, memoryview]] = []  # start, end, and the buffer, to keep it alive
        self._lock = threading.Lock()  # guards changes of the regions
        self._staging_lock = threading.Lock()  # guards the staging buffer: one batch uses it at a time
        self.staged = 0
        """Values that went through the staging buffer: 0 if all pools are registered."""

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers memory with the client, once. It is kept alive until `close`.

        Raises:
            StorageError: the client refuses it.
        """
        for buffer in buffers:
            with self._lock:
                if self._known(buffer) is None:
                    start = address_of(buffer)
                    self._register(start, len(buffer))
                    region = (start, start + len(buffer), buffer)
                    self._regions = sorted([*self._regions, region], key=lambda each: each[:2])

    def send(self, buffers: Sequence[memoryview], transfer: Transfer) -> list[int]:
        """Runs a transfer out of buffers. Unregistered buffers go through the staging buffer.

        Returns:
            The numbers from `transfer`, one for each buffer.

        Raises:
            StorageError: an unregistered value is longer than the staging buffer.
        """

        def run(part: _Part) -> Sequence[int]:
            for _, buffer, piece in part.copies:
                piece[:] = buffer
            return part.run(transfer)

        return self._each_part(buffers, run)

    def receive(self, buffers: Sequence[memoryview], transfer: Transfer) -> list[int]:
        """Like `send`, into buffers. An unregistered buffer is written only if its number is its length."""

        def run(part: _Part) -> Sequence[int]:
            lengths = part.run(transfer)
            for at, buffer, piece in part.copies:
                if lengths[at] == len(buffer):
                    buffer[:] = piece
            return lengths

        return self._each_part(buffers, run)

    def close(self) -> None:
        """Deregisters all memory. No transfer may be running."""
        for start, end, _ in self._regions:
            self._deregister(start, end - start)
        self._regions = []
        self._staging = None

    def _each_part(self, buffers: Sequence[memoryview], run: Callable[[_Part], Sequence[int]]) -> list[int]:
        known = [self._known(buffer) for buffer in buffers]
        with self._staging_lock if None in known else nullcontext():
            return [number for part in self._parts(buffers, known) for number in run(part)]

    def _parts(self, buffers: Sequence[memoryview], known: Sequence[int | None]) -> Iterator[_Part]:
        """Splits a batch where the staging buffer is full. Each part ends before the next one is made."""
        part, used = _Part(0), 0
        for at, (buffer, address) in enumerate(zip(buffers, known, strict=True)):
            if address is None and used + len(buffer) > self._staging_bytes and part.copies:
                yield part
                part, used = _Part(at), 0
            if address is None:
                piece = self._piece(used, len(buffer))
                part.copies.append((len(part.sizes), buffer, piece))
                address = address_of(piece)
                used += -(-len(buffer) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            part.addresses.append(address)
            part.sizes.append(len(buffer))
        if part.sizes:
            yield part

    def _piece(self, start: int, size: int) -> memoryview:
        if size > self._staging_bytes:
            limit = f"the staging buffer has {self._staging_bytes}; make it larger or register the value's memory"
            raise StorageError("refused", f"a value of {size} bytes: {limit}")
        if self._staging is None:
            staging = memoryview(mmap.mmap(-1, self._staging_bytes))
            self.register([staging])
            self._staging = staging
        self.staged += 1
        return self._staging[start : start + size]

    def _known(self, buffer: memoryview) -> int | None:
        """Returns the address of a registered buffer, or None for any other."""
        start = address_of(buffer)
        at = bisect_right(self._regions, start, key=lambda region: region[0]) - 1
        inside = at >= 0 and start + len(buffer) <= self._regions[at][1]
        return start if inside or not len(buffer) else None
