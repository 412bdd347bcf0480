"""Back ends in front of back ends: two at once, one that cannot be changed, names apart, values compressed.

    tee+file:/a,redis://10.0.0.1:6379/0      readonly+redis://10.0.0.1:6379/0
    prefix(team-a)+mooncake:10.0.0.1:50051   compress(zstd:3)+s3:bucket

A wrapper knows what every back end is and no one in particular: what a value holds, and whether it is still what was
put, is the reader's to know. It owns what it wraps: `close` closes it.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

from mainstem.errors import BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, KEY_BYTES, Backend, BackendStats, Capabilities

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class _Wrapper(Backend):
    """Passes everything on to one other back end.

    Args:
        inner: what stands behind.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What the inner one promises."""
        return self._inner.capabilities

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """A wrapper has no spec of its own: it is opened by `wrapper+spec`."""
        del options
        raise BadArgument("storage", address, f"wrapper+spec: {cls.__name__} stands in front of another back end")

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Announces the memory to the inner one."""
        self._inner.register(buffers)

    def exists(self, keys: Sequence[bytes]) -> int:
        """As the inner one."""
        return self._inner.exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """As the inner one."""
        return self._inner.get(keys, buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """As the inner one."""
        return self._inner.put(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        """As the inner one."""
        self._inner.delete(keys)

    def clear(self) -> None:
        """As the inner one."""
        self._inner.clear()

    def stats(self) -> BackendStats:
        """As the inner one."""
        return self._inner.stats()

    def close(self) -> None:
        """Closes the inner one."""
        self._inner.close()


class Remembered:
    """The latest keys that were put through one object: for `clear` of what cannot list its own keys.

    Args:
        limit: keys that it remembers; about 150 bytes each.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._limit = limit
        self._forgot = False
        self._lock = threading.Lock()

    def add(self, keys: Iterable[bytes]) -> None:
        """To be called before a put: what is stored although the call fails is remembered, too."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)
                self._forgot = True

    def discard(self, keys: Iterable[bytes]) -> None:
        """To be called after a delete."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self, delete: Callable[[list[bytes]], None]) -> None:
        """Deletes every key that is remembered.

        Raises:
            StorageError: more was put than is remembered; what it remembers is deleted.
        """
        with self._lock:
            keys = list(self._keys)
        delete(keys)
        self.discard(keys)
        if self._forgot:
            raise StorageError("refused", f"more than {self._limit} keys were put; the oldest are still there")


class ReadOnly(_Wrapper):
    """A store that is read, never changed: one that others fill.

    `put` answers False for every key, as a full store does, because a tier that backs up into it does nothing wrong.
    `delete` and `clear` raise: whoever calls them needs to know that the values are still there.

    Args:
        inner: what stands behind.
        brackets: none; here so that a spec with brackets is refused by name.

    Raises:
        BadArgument: something in brackets.
    """

    def __init__(self, inner: Backend, *brackets: str) -> None:
        if brackets:
            raise BadArgument("readonly", brackets[0], "without brackets")
        super().__init__(inner)
        self._closed = False

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Stores nothing."""
        self._check_open()
        return [False for _ in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Raises `StorageError`, unless there is nothing to delete."""
        self._check_open()
        if keys:
            raise StorageError("refused", "the store is read-only: nothing was deleted")

    def clear(self) -> None:
        """Raises `StorageError`."""
        self._check_open()
        raise StorageError("refused", "the store is read-only: nothing was cleared")

    def close(self) -> None:
        """Closes the inner one."""
        self._closed = True
        super().close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", "the read-only store is closed")


class Prefix(_Wrapper):
    """Keys of one name, kept apart from all other names in the same store.

    A key becomes BLAKE2b-256 over it, keyed by the name (RFC 7693, with a personalisation of ours): nobody meets
    another name's keys, by accident or on purpose, without breaking the hash.

    Nobody can tell the name from such a key, so `clear` deletes what was put through this object, as far as it
    remembers. What an earlier process or another client put stays; where the store has a prefix, folder or database of
    its own, that is the better fence.

    Args:
        inner: what stands behind.
        name: any text but the empty one.
        remembered: how many keys `clear` can delete.

    Raises:
        BadArgument: an empty name.
    """

    def __init__(self, inner: Backend, name: str = "", remembered: int = 1 << 20) -> None:
        if not name:
            raise BadArgument("prefix", name, "a name in brackets, as in prefix(team-a)+memory:")
        super().__init__(inner)
        secret = hashlib.blake2b(name.encode()).digest()
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=b"mainstem.prefix")
        self._put = Remembered(remembered)

    def exists(self, keys: Sequence[bytes]) -> int:
        """As the inner one, of this name's keys."""
        return self._inner.exists(self._keys(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """As the inner one, of this name's keys."""
        return self._inner.get(self._keys(keys), buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """As the inner one, of this name's keys."""
        own = self._keys(keys)
        self._put.add(own)
        return self._inner.put(own, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        """As the inner one, of this name's keys."""
        own = self._keys(keys)
        self._inner.delete(own)
        self._put.discard(own)

    def clear(self) -> None:
        """Deletes what was put through this object.

        Raises:
            StorageError: more was put than is remembered, or the inner one raised; some may still be there.
        """
        self._put.clear(self._inner.delete)

    def stats(self) -> BackendStats:
        """Of the whole inner store, other names included, but for the entries, which nobody counts by name."""
        inner = self._inner.stats()
        return BackendStats(None, inner.used_bytes, inner.capacity_bytes, inner.evicted)

    def _keys(self, keys: Sequence[bytes]) -> list[bytes]:
        own = []
        for key in keys:
            digest = self._hash.copy()
            digest.update(key)
            own.append(digest.digest())
        return own


class Compress(_Wrapper):
    """Values compressed without loss, one Zstandard frame (RFC 8878) a value.

    Reading takes two calls, because nobody knows how long a compressed value is: one with buffers of one byte, which no
    frame fits, to learn the lengths, then one for those that are there. So the inner store must say how long a value is
    that does not fit its buffer, as `Backend.get` promises; where it says something else, all values are absent here.

    KV in 16 bits shrinks by little. Lossy forms are not a store's to choose, since whoever put a value seals it first
    and would find the seal broken: they are codecs of the tier (`mainstem.tiers.codecs`).

    Args:
        inner: what stands behind.
        method: `zstd`, or `zstd:level` with a level from 1 (fast) to 22 (small); 3 by default.

    Raises:
        BadArgument: another method or level.
        BackendUnavailable: the package zstandard is not installed.
    """

    def __init__(self, inner: Backend, method: str = "zstd") -> None:
        name, _, level = method.partition(":")
        if name != "zstd" or (level and not (level.isascii() and level.isdigit() and 1 <= int(level) <= 22)):
            allowed = "zstd, or zstd:1 to zstd:22; int8 and fp8 lose digits, so they are codecs of the storage tier"
            raise BadArgument("compress", method, allowed)
        super().__init__(inner)
        self._level = int(level or 3)
        self._zstd = _zstandard()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What the inner one promises, but with copies."""
        inner = self._inner.capabilities
        return Capabilities(inner.persistent, inner.shared, False, inner.evicts, inner.overwrites)

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Nothing: the inner one never sees the caller's memory."""

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Stores one frame a value."""
        compressor = self._zstd.ZstdCompressor(level=self._level)  # not safe across threads, so one a call
        frames = [compressor.compress(buffer) for _, buffer in zip(keys, buffers, strict=True)]
        return self._inner.put(keys, [memoryview(bytearray(frame)) for frame in frames])

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads frames, and expands those that hold as much as their buffers; of the others it says what they hold."""
        pairs = list(zip(keys, buffers, strict=True))
        sizes = self._inner.get(keys, [memoryview(bytearray(1)) for _ in pairs])
        # A frame is hardly longer than what it holds: one that claims to be is not read, whoever wrote it.
        there = [
            at for at, (size, (_, buffer)) in enumerate(zip(sizes, pairs, strict=True)) if 1 < size <= _most(buffer)
        ]
        frames = {at: memoryview(bytearray(sizes[at])) for at in there}
        found = self._inner.get([keys[at] for at in there], list(frames.values()))
        lengths = [ABSENT if size == ABSENT or at in frames else 0 for at, size in enumerate(sizes)]
        decompressor = self._zstd.ZstdDecompressor()
        for (at, frame), size in zip(frames.items(), found, strict=True):
            if size == len(frame):
                lengths[at] = self._expand(decompressor, frame, buffers[at])
        return lengths

    def _expand(self, decompressor: Any, frame: memoryview, buffer: memoryview) -> int:
        try:
            length = int(self._zstd.frame_content_size(frame))
            if length != len(buffer):
                return length
            buffer[:] = decompressor.decompress(frame)  # allocates what the header says, which is the buffer's length
        except self._zstd.ZstdError:
            return ABSENT
        return length


def _most(buffer: memoryview) -> int:
    """As long as a frame may be: the bound of ZSTD_compressBound, rounded up, and some for other writers."""
    return len(buffer) + (len(buffer) >> 7) + 1024


def _zstandard() -> Any:
    with needs("zstandard", "compress(zstd) needs the package zstandard: pip install 'mainstem[zstd]'"):
        return importlib.import_module("zstandard")


class Tee(Backend):
    """Two stores: both are written, the first is read first.

    - `put` is True where either has the value. `get` reads from the second what the first does not have, or has in
      another length. `exists` counts keys that are in one or the other, asking in turns where they change.
    - When one fails, the other goes on: the failure is counted, and logged once, until that store answers again. A call
      raises when both fail. `delete` and `clear` raise when one fails, after the other did it: a value that one of them
      still has is still there.

    Args:
        stores: the first and the second.

    Raises:
        BadArgument: not two stores.
    """

    def __init__(self, *stores: Backend | str) -> None:
        self._stores = [store for store in stores if isinstance(store, Backend)]
        if len(stores) != 2 or len(self._stores) != 2:
            raise BadArgument("tee", len(self._stores), "two specs with a comma between, and no brackets")
        self.failures = [0, 0]
        """Calls that failed, of the first and of the second."""
        self._failing = [False, False]
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Persistent, shared and evicting as either; zero_copy as both; overwriting as the first, which is read."""
        first, second = (store.capabilities for store in self._stores)
        return Capabilities(
            persistent=first.persistent or second.persistent,
            shared=first.shared or second.shared,
            zero_copy=first.zero_copy and second.zero_copy,
            evicts=first.evicts or second.evicts,
            overwrites=first.overwrites,
        )

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """A wrapper has no spec of its own: it is opened by `tee+spec,spec`."""
        del options
        raise BadArgument("storage", address, "tee+spec,spec")

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Announces the memory to both."""
        self._either([partial(store.register, buffers) for store in self._stores])

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many keys from the first on are in one store or the other."""
        errors: list[StorageError] = []
        asked = deque((0, 1))
        at = idle = 0
        while at < len(keys) and idle < len(asked):
            count = self._try(asked[0], partial(self._stores[asked[0]].exists, keys[at:]), errors)
            if count is None:
                asked.popleft()
                continue
            at += count
            idle = 1 if count else idle + 1  # who has just counted has its own gap here: only the other can go on
            asked.rotate()
        self._raise_if_all(errors)
        return at

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads from the first, then from the second what is missing or has another length."""
        errors: list[StorageError] = []
        wanted = [len(buffer) for _, buffer in zip(keys, buffers, strict=True)]
        lengths = list(self._try(0, partial(self._stores[0].get, keys, buffers), errors) or [ABSENT] * len(wanted))
        rest = [at for at, length in enumerate(lengths) if length != wanted[at]]
        if rest:
            call = partial(self._stores[1].get, [keys[at] for at in rest], [buffers[at] for at in rest])
            for at, length in zip(rest, self._try(1, call, errors) or [lengths[at] for at in rest], strict=True):
                lengths[at] = lengths[at] if length == ABSENT else length
        self._raise_if_all(errors)
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Stores in both."""
        answers = self._either([partial(store.put, keys, buffers) for store in self._stores])
        return [any(stored) for stored in zip(*answers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes from both."""
        self._both([partial(store.delete, keys) for store in self._stores])

    def clear(self) -> None:
        """Clears both."""
        self._both([store.clear for store in self._stores])

    def stats(self) -> BackendStats:
        """The sums of both; no entries, because nobody knows how many are in both."""
        parts = self._either([store.stats for store in self._stores])
        used = _sum(part.used_bytes for part in parts)
        capacity = _sum(part.capacity_bytes for part in parts)
        return BackendStats(None, used, capacity, sum(part.evicted for part in parts))

    def close(self) -> None:
        """Closes both."""
        try:
            self._stores[0].close()
        finally:
            self._stores[1].close()

    def _either(self, calls: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
        errors: list[StorageError] = []
        answers = []
        for number, call in enumerate(calls):
            failed = len(errors)
            answer = self._try(number, call, errors)
            if len(errors) == failed:
                answers.append(cast("_Answer", answer))
        self._raise_if_all(errors)
        return answers

    def _both(self, calls: Sequence[Callable[[], None]]) -> None:
        errors: list[StorageError] = []
        for number, call in enumerate(calls):
            self._try(number, call, errors)
        if errors:
            raise errors[0]

    def _try(self, number: int, call: Callable[[], _Answer], errors: list[StorageError]) -> _Answer | None:
        """Its answer, or None with the error added to the list."""
        try:
            answer = call()
        except StorageError as error:
            errors.append(error)
            if self._note(number, failed=True):
                _log.warning("store %d of a tee fails, the other goes on: %s", number + 1, error)
            return None
        if self._note(number, failed=False):
            _log.info("store %d of a tee answers again", number + 1)
        return answer

    def _note(self, number: int, *, failed: bool) -> bool:
        """Whether this is news."""
        with self._lock:
            self.failures[number] += failed
            changed = self._failing[number] != failed
            self._failing[number] = failed
            return changed

    def _raise_if_all(self, errors: Sequence[StorageError]) -> None:
        if len(errors) == len(self._stores):
            raise errors[0]


def _sum(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if None in known else sum(part or 0 for part in known)
