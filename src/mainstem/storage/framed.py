"""Back ends of clients that move values through memory of their own choice: EIC, InfiniStore and SiMM.

These clients block without a timeout, report no lengths, or write past the end of a value's place.

Each value is stored in a frame, after its length, and passes through memory of this module, in a thread of the client.
So a reader knows the length, and a call that ends after its deadline cannot touch the memory of the caller.

    frame    length 8, little-endian | value

    FramedBackend   batches, rounds, deadlines            Link   one connection: its thread, its memory, its calls
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, TypeVar

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, Limit
from mainstem.storage.native import address_of
from mainstem.storage.options import Readers, parse_text
from mainstem.units import parse_bytes, parse_timeout

_Answer = TypeVar("_Answer")

OPTIONS: Readers = {
    "namespace": ("namespace", parse_text),
    "staging": ("staging_bytes", parse_bytes),
    "timeout": ("timeout_s", parse_timeout),
}
"""The options that all of these back ends have."""


class Remembered:
    """Remembers the latest keys that were put through one object, for `clear` of a store that cannot list its keys.

    Args:
        limit: number of keys to remember; each takes about 150 bytes.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._limit = limit
        self._forgot = False
        self._lock = threading.Lock()

    def add(self, keys: Iterable[bytes]) -> None:
        """Adds keys. Call it before a put, since a put that fails may still store values."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)
                self._forgot = True

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drops keys. Call it after a delete."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self, delete: Callable[[list[bytes]], None]) -> None:
        """Deletes every remembered key.

        Raises:
            StorageError: more keys were put than it remembers. The remembered ones are deleted.
        """
        with self._lock:
            keys = list(self._keys)
        delete(keys)
        self.discard(keys)
        if self._forgot:
            raise StorageError("refused", f"more than {self._limit} keys were put; the oldest are still there")


class ClientThread:
    """A thread that makes the calls of one client. A call that never returns blocks this thread, not the caller.

    Args:
        name: the client, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._make_calls, name=f"mainstem {name}", daemon=True).start()

    def _make_calls(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, job: Coroutine[Any, Any, _Answer], timeout_s: float) -> _Answer:
        """Runs a job and waits for its result.

        Raises:
            StorageError: the one that the job raised; `timeout`: it takes too long, and is cancelled where it waits;
                `closed`: the thread has ended; `unreachable`: the client raised any other error.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(job, self._loop)
        except RuntimeError as ended:  # the loop is closed
            job.close()
            raise StorageError("closed", f"the {self._name} store is closed") from ended
        try:
            error = future.exception(timeout_s)
        except TimeoutError:
            future.cancel()
            raise StorageError("timeout", f"{self._name}: no answer in {timeout_s:g} s") from None
        except CancelledError as cancelled:
            raise StorageError("closed", f"the {self._name} store is closed") from cancelled
        if error is None:
            return future.result()
        if isinstance(error, StorageError):
            raise error
        raise StorageError("unreachable", f"{self._name}: {type(error).__name__}: {error}") from error

    def end(self, last: Coroutine[Any, Any, None]) -> Future[None]:
        """Cancels jobs that wait, makes a last call and ends the thread, once its client returns, if it ever does."""

        async def end() -> None:
            jobs = asyncio.all_tasks() - {asyncio.current_task()}
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            with suppress(Exception):  # of a client whose service may be gone
                await last
            self._loop.call_soon(self._loop.stop)

        return asyncio.run_coroutine_threadsafe(end(), self._loop)


class Frame(NamedTuple):
    """One value of a round.

    Args:
        at: its index in the batch.
        key: its key.
        buffer: the caller's buffer.
        start: its offset in the memory; the length comes first.
        size: the bytes that it has there, those of the length included.
    """

    at: int
    key: bytes
    buffer: memoryview
    start: int
    size: int


class Frames:
    """Memory through which values pass. Each value follows its length, so that a reader can check it.

    Args:
        size_bytes: size of the memory.
        longest_bytes: the longest frame that the client takes. It may write as much to the start of a shorter one, so
            that much memory stays free after the last. 0: it takes any, and never writes past the end of a frame.

    Raises:
        BadArgument: the memory is smaller than a page of the system, or than two of the longest frames.
    """

    HEAD_BYTES = 8

    def __init__(self, size_bytes: int, longest_bytes: int = 0) -> None:
        least = 2 * longest_bytes or mmap.PAGESIZE
        if size_bytes < least:
            raise BadArgument("staging_bytes", size_bytes, f"at least {least}")
        self.memory = memoryview(mmap.mmap(-1, size_bytes))
        self.address = address_of(self.memory)
        self._room = size_bytes - longest_bytes
        self.longest = longest_bytes or size_bytes

    def rounds(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Iterator[list[Frame]]:
        """Splits a batch into rounds that fit and hold no key twice. Skips values that do not fit alone."""
        round_: dict[bytes, Frame] = {}
        end = 0
        for at, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            size = self.HEAD_BYTES + len(buffer)
            if not buffer or size > self.longest:
                continue
            if key in round_ or end + size > self._room:
                yield list(round_.values())
                round_, end = {}, 0
            round_[key] = Frame(at, key, buffer, end, size)
            end += -(-size // 64) * 64
        if round_:
            yield list(round_.values())

    def alone(self, frame: Frame) -> Frame:
        """Returns the frame with all of the memory, for a value that may be longer than its buffer."""
        return frame._replace(start=0, size=len(self.memory))

    def fill(self, round_: Sequence[Frame]) -> None:
        """Writes values into their frames."""
        for frame in round_:
            head = frame.start + self.HEAD_BYTES
            self.memory[frame.start : head] = len(frame.buffer).to_bytes(self.HEAD_BYTES, "little")
            self.memory[head : head + len(frame.buffer)] = frame.buffer

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


class Link(ABC):
    """One connection of a client, with its thread and its memory. The coroutines run in that thread.

    They may raise anything. Then, and when one takes too long, the link is dropped and never used again.

    Args:
        name: the client, for error messages.
        frames: the memory that values pass through.
    """

    def __init__(self, name: str, frames: Frames) -> None:
        self.frames = frames
        self.thread = ClientThread(name)

    @abstractmethod
    async def connect(self) -> None:
        """Connects, and registers the memory."""

    @abstractmethod
    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name whether it has a value."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Deletes values; a missing name is not an error. No name occurs twice."""

    @abstractmethod
    async def read(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool | StorageError]:
        """Reads values into frames.

        Returns:
            For each value whether it was read. An error where it is not known to be absent: it may be longer than its
            frame.
        """

    @abstractmethod
    async def write(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool]:
        """Writes frames as values. Returns for each whether it was stored."""

    async def close(self) -> None:  # noqa: B027  # most clients have no such call
        """Closes the connection, and deregisters the memory. The link may have failed before."""


class FramedBackend(Backend):
    """Values that pass through a link, which is made anew after a failure.

    Names cannot be listed: `clear` deletes only what was put through this object.

    Args:
        name: the store, for error messages.
        where: its kind and address, for error messages.
        link: makes an unconnected link.
        namespace: prefix of every name.
        timeout_s: timeout of one round through the memory of the link.

    Raises:
        BackendUnavailable: it cannot connect.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=True, overwrites=True
    )
    remedy = "its option staging raises that"
    """The way to store longer values, for the warning about one that is too long."""

    def __init__(self, name: str, where: str, link: Callable[[], Link], namespace: str, timeout_s: float) -> None:
        self._name, self._make_link = name, link
        self._namespace, self._timeout_s = namespace, timeout_s
        self._put = Remembered()
        self._closed = False
        self._link: Link | None = None
        self._lock = threading.Lock()
        try:
            with self._lock:
                self.longest = Limit(self._open().frames.longest - Frames.HEAD_BYTES, self.remedy)
        except StorageError as error:
            raise BackendUnavailable(f"{where}: {error}") from error

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Makes the calls of `Link.exists`."""
        with self._lock:
            return self._run(self._open().exists(self._names(keys)))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads rounds of frames, each value into its own buffer."""
        lengths = [ABSENT for _ in zip(keys, buffers, strict=True)]
        with self._lock:
            for round_ in self._open().frames.rounds(keys, buffers):
                self._read_round(round_, lengths)
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes rounds of frames."""
        stored = [False for _ in zip(keys, buffers, strict=True)]
        self._put.add(keys)
        with self._lock:
            link = self._open()
            for round_ in link.frames.rounds(keys, buffers):
                link.frames.fill(round_)
                names = self._names([frame.key for frame in round_])
                for frame, done in zip(round_, self._run(link.write(names, round_)), strict=True):
                    stored[frame.at] = done
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        """Makes the calls of `Link.delete`."""
        with self._lock:
            link = self._open()
            if keys:
                self._run(link.delete(self._names(dict.fromkeys(keys))))
        self._put.discard(keys)

    def clear(self) -> None:
        """Deletes the values that were put through this object."""
        self._put.clear(self.delete)

    def stats(self) -> BackendStats:
        """Returns no counts: the client cannot query them."""
        self._check_open()
        return BackendStats()

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._closed = True
            if (closing := self._drop()) is not None:
                wait([closing], self._timeout_s)

    def _read_round(self, round_: Sequence[Frame], lengths: list[int]) -> None:
        """Reads a round. A value that failed may be longer than its frame, so it is read again with all of the memory.

        Raises:
            StorageError: nothing is known of any value of the round.
        """
        failed = self._read(round_, lengths)
        known = len(failed) < len(round_)
        for frame, _ in failed:
            again = self._read([self._open().frames.alone(frame)], lengths)
            if again and known:
                return  # the rest counts as absent
            if again:
                self._drop()
                raise again[0][1]
            known = True

    def _read(self, round_: Sequence[Frame], lengths: list[int]) -> list[tuple[Frame, StorageError]]:
        """Reads frames, and returns the errors of those that failed."""
        link = self._open()
        link.frames.blank(round_)
        answers = self._run(link.read(self._names([frame.key for frame in round_]), round_))
        failed = []
        for frame, answer in zip(round_, answers, strict=True):
            if isinstance(answer, StorageError):
                failed.append((frame, answer))
            elif answer:
                lengths[frame.at] = link.frames.take(frame)
        return failed

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", f"the {self._name} store is closed")

    def _open(self) -> Link:
        self._check_open()
        if self._link is None:
            self._link = self._make_link()
            self._run(self._link.connect())
        return self._link

    def _run(self, job: Coroutine[Any, Any, _Answer]) -> _Answer:
        assert self._link is not None
        try:
            return self._link.thread.run(job, self._timeout_s)
        except StorageError:
            self._drop()
            raise

    def _drop(self) -> Future[None] | None:
        """Drops the link, which is closed once its client returns: until then it only touches the link's memory."""
        link, self._link = self._link, None
        return None if link is None else link.thread.end(link.close())

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return [f"{self._namespace}/{key.hex()}" for key in keys]
