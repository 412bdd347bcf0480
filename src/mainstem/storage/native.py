"""What clients in native code need: addresses of buffers, memory that they know, and a close after the last call.

It knows no client and no store; a back end hands it the two verbs with which its client learns and forgets memory.

        registered pool                  loose buffers            staging (told of once)
    | page | page | page |           | a |     | b |              | a | b |         |
      address as it is                 copied there before a put, and back after a get
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
"""Where values begin in the staging buffer: a cache line."""

Transfer = Callable[[slice, list[int], list[int]], Sequence[int]]
"""`(which of the batch, addresses, sizes in bytes) -> a number for each`; the numbers are the client's."""


def address_of(buffer: memoryview) -> int:
    """Where a writable buffer lies, with no copy; 0 of an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


class Calls:
    """Counts calls into a client, so that it is closed when none runs: most crash otherwise.

    Args:
        name: of the store, for the message.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each call into the client.

        Raises:
            StorageError: `closed`.
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
        """Lets no call in any more and waits for those that run. True the first time, and only then."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._running)
        return first


@dataclass(slots=True)
class _Part:
    """A run of a batch whose loose buffers fit into the staging buffer together.

    Args:
        start: its first place in the batch.
        addresses: where the client finds each value.
        sizes: in bytes.
        loans: of each loose buffer its place in this run, the buffer, and the piece of staging that stands for it.
    """

    start: int
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    loans: list[tuple[int, memoryview, memoryview]] = field(default_factory=list)

    def run(self, transfer: Transfer) -> Sequence[int]:
        return transfer(slice(self.start, self.start + len(self.sizes)), self.addresses, self.sizes)


class Memory:
    """Memory that a client was told of, and one staging buffer for all other.

    Args:
        tell: `(address, size)` registers memory with the client; raises `StorageError` if it cannot.
        forget: `(address, size)` takes that back.
        staging_bytes: of the staging buffer, which is allocated when the first loose buffer comes; no single loose
            value may be longer.
    """

    def __init__(
        self, tell: Callable[[int, int], None], forget: Callable[[int, int], None], staging_bytes: int
    ) -> None:
        self._tell = tell
        self._forget = forget
        self._staging_bytes = staging_bytes
        self._staging: memoryview | None = None
        self._regions: list[tuple[int, int, memoryview]] = []  # first, behind the last, and what keeps it alive
        self._lock = threading.Lock()  # who changes the regions
        self._staging_lock = threading.Lock()  # who uses the staging buffer: one batch at a time
        self.staged = 0
        """Values that went through the staging buffer: with all pools registered it stays 0."""

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Tells the client of memory, once; it is kept alive until `close`.

        Raises:
            StorageError: the client refuses it.
        """
        for buffer in buffers:
            with self._lock:
                if self._known(buffer) is None:
                    first = address_of(buffer)
                    self._tell(first, len(buffer))
                    region = (first, first + len(buffer), buffer)
                    self._regions = sorted([*self._regions, region], key=lambda each: each[:2])

    def send(self, buffers: Sequence[memoryview], transfer: Transfer) -> list[int]:
        """Runs a transfer out of buffers, loose ones through the staging buffer.

        Returns:
            The numbers of `transfer`, one for each buffer.

        Raises:
            StorageError: a loose value is longer than the staging buffer.
        """

        def run(part: _Part) -> Sequence[int]:
            for _, buffer, piece in part.loans:
                piece[:] = buffer
            return part.run(transfer)

        return self._each_part(buffers, run)

    def receive(self, buffers: Sequence[memoryview], transfer: Transfer) -> list[int]:
        """Runs a transfer into buffers; a loose one is written only where its number is its length. Else as `send`."""

        def run(part: _Part) -> Sequence[int]:
            lengths = part.run(transfer)
            for at, buffer, piece in part.loans:
                if lengths[at] == len(buffer):
                    buffer[:] = piece
            return lengths

        return self._each_part(buffers, run)

    def close(self) -> None:
        """Has the client forget all of it. No transfer may run."""
        for first, behind, _ in self._regions:
            self._forget(first, behind - first)
        self._regions = []
        self._staging = None

    def _each_part(self, buffers: Sequence[memoryview], run: Callable[[_Part], Sequence[int]]) -> list[int]:
        places = [self._known(buffer) for buffer in buffers]
        with self._staging_lock if None in places else nullcontext():
            return [number for part in self._parts(buffers, places) for number in run(part)]

    def _parts(self, buffers: Sequence[memoryview], places: Sequence[int | None]) -> Iterator[_Part]:
        """Cuts a batch where the staging buffer is full; each part is over before the next one is made."""
        part, used = _Part(0), 0
        for at, (buffer, place) in enumerate(zip(buffers, places, strict=True)):
            if place is None and used + len(buffer) > self._staging_bytes and part.loans:
                yield part
                part, used = _Part(at), 0
            if place is None:
                piece = self._piece(used, len(buffer))
                part.loans.append((len(part.sizes), buffer, piece))
                place = address_of(piece)
                used += -(-len(buffer) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            part.addresses.append(place)
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
        """The address of a buffer that the client can reach; None of a loose one."""
        first = address_of(buffer)
        at = bisect_right(self._regions, first, key=lambda region: region[0]) - 1
        inside = at >= 0 and first + len(buffer) <= self._regions[at][1]
        return first if inside or not len(buffer) else None


# ---------------------------------------------------------------- for clients that block and say no lengths


class ClientThread:
    """A thread that makes one client's calls: one that never returns costs this thread, not the caller.

    Args:
        name: of the client, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"mainstem {name}", daemon=True).start()

    def run(self, job: Coroutine[Any, Any, _Answer], timeout_s: float) -> _Answer:
        """Runs a job to its end.

        Raises:
            StorageError: as the job did; `timeout`: it has not ended; `unreachable`: any other error of the client.
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
        """Lets the thread end when its client returns, if ever."""
        self._loop.call_soon_threadsafe(self._loop.stop)


class Frame(NamedTuple):
    """One value on its way.

    Args:
        at: its place in the batch.
        key: its key.
        buffer: the caller's.
        start: where it lies in the memory, its length first.
    """

    at: int
    key: bytes
    buffer: memoryview
    start: int


class Frames:
    """Memory that a client knows, for values on their way: each one behind its length, so that a reader can tell.

    Args:
        size_bytes: of all of it.
    """

    HEAD_BYTES = 8

    def __init__(self, size_bytes: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, size_bytes))
        self.address = address_of(self.memory)

    def rounds(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Iterator[list[Frame]]:
        """Cuts a batch into what fits at once, no key twice in one; leaves out what does not fit alone."""
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
        """Writes the frames of values."""
        for _, _, buffer, start in round_:
            head = start + self.HEAD_BYTES
            self.memory[start:head] = len(buffer).to_bytes(self.HEAD_BYTES, "little")
            self.memory[head : head + len(buffer)] = buffer

    def blank(self, round_: Sequence[Frame]) -> None:
        """Makes sure that nothing which lay there before passes for a frame."""
        for frame in round_:
            self.memory[frame.start : frame.start + self.HEAD_BYTES] = bytes(self.HEAD_BYTES)

    def take(self, frame: Frame) -> int:
        """What a frame that was read says of its length; fills the buffer if that is its own."""
        head = frame.start + self.HEAD_BYTES
        length = int.from_bytes(self.memory[frame.start : head], "little")
        if length == len(frame.buffer):
            frame.buffer[:] = self.memory[head : head + length]
        return length or ABSENT
