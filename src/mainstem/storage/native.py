"""Helpers for clients in native code: buffer addresses, memory registration, and a close that waits for calls.

This module depends on no client and no store: a back end passes the functions that register and deregister memory.

        registered pool                  unregistered buffers     staging (registered once)
    | page | page | page |           | a |     | b |              | a | b |         |
      used in place                    copied to staging before a put, and back after a get
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT

_Answer = TypeVar("_Answer")

ALIGNMENT_BYTES = 64
"""The alignment of values in the staging buffer: a cache line."""

Transfer = Callable[[slice, list[int], list[int]], Sequence[int]]
"""`(slice of the batch, addresses, sizes in bytes) -> one number for each value`; the client defines the numbers."""


def address_of(buffer: memoryview) -> int:
    """Returns the address of a writable buffer, or 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


class Calls:
    """Counts calls into a client, so that it is closed only when none runs. Most clients crash otherwise.

    Args:
        name: the store, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds a call into the client.

        Raises:
            StorageError: the store is closed (cause `closed`).
        """
        with self._changed:
            if self._closed:
                raise StorageError("closed", f"the {self._name} store is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Rejects new calls and waits for the running ones. Returns True on the first call only."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._running)
        return first


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


# ---------------------------------------------------------------- for clients that block and report no lengths


class ClientThread:
    """A thread that makes the calls of one client. A call that never returns blocks this thread, not the caller.

    Args:
        name: the client, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"mainstem {name}", daemon=True).start()

    def run(self, job: Coroutine[Any, Any, _Answer], timeout_s: float) -> _Answer:
        """Runs a job and waits for its result.

        Raises:
            StorageError: the one that the job raised; `timeout`: the job is still running; `unreachable`: the client
                raised any other error.
        """
        future = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            error = future.exception(timeout_s)
        except TimeoutError:
            raise StorageError("timeout", f"{self._name}: no answer in {timeout_s:g} s") from None
        if error is None:
            return future.result()
        if isinstance(error, StorageError):
            raise error
        raise StorageError("unreachable", f"{self._name}: {type(error).__name__}: {error}") from error

    def end(self) -> None:
        """Ends the thread once its client returns, if it ever does."""
        self._loop.call_soon_threadsafe(self._loop.stop)


class Frame(NamedTuple):
    """One value of a round.

    Args:
        at: its index in the batch.
        key: its key.
        buffer: the caller's buffer.
        start: its offset in the memory; the length comes first.
    """

    at: int
    key: bytes
    buffer: memoryview
    start: int


class Frames:
    """Registered memory through which values pass. Each value follows its length, so that a reader can check it.

    Args:
        size_bytes: size of the memory.
    """

    HEAD_BYTES = 8

    def __init__(self, size_bytes: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size_bytes))
        self.address = address_of(self.memory)

    def rounds(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Iterator[list[Frame]]:
        """Splits a batch into rounds that fit and hold no key twice. Skips values that do not fit alone."""
        round_: dict[bytes, Frame] = {}
        end = 0
        for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            size = self.HEAD_BYTES + len(buffer)
            if not buffer or size > len(self.memory):
                continue
            if key in round_ or end + size > len(self.memory):
                yield list(round_.values())
                round_, end = {}, 0
            round_[key] = Frame(at, key, buffer, end)
            end += -(-size // 64) * 64
        if round_:
            yield list(round_.values())

    def fill(self, round_: Sequence[Frame]) -> None:
        """Writes values into their frames."""
        for _, _, buffer, start in round_:
            head = start + self.HEAD_BYTES
            self.memory[start:head] = len(buffer).to_bytes(self.HEAD_BYTES, "little")
            self.memory[head : head + len(buffer)] = buffer

    def blank(self, round_: Sequence[Frame]) -> None:
        """Clears the lengths, so that old content does not pass for a frame."""
        for frame in round_:
            self.memory[frame.start : frame.start + self.HEAD_BYTES] = bytes(self.HEAD_BYTES)

    def take(self, frame: Frame) -> int:
        """Returns the length in a frame that was read, or `ABSENT`. Fills the buffer if it has that length."""
        head = frame.start + self.HEAD_BYTES
        length = int.from_bytes(self.memory[frame.start : head], "little")
        if length == len(frame.buffer):
            frame.buffer[:] = self.memory[head : head + length]
        return length or ABSENT
