"""A store in the memory of this process: for tests, and as a model for other back ends."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

from mainstem.errors import BadArgument, StorageError
from mainstem.storage.base import ABSENT, SCANNED, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.options import check_options
from mainstem.units import parse_bytes


class MemoryBackend(Backend):
    """Keeps values in a dict and evicts the least recently used first.

    Args:
        capacity_bytes: the limit for all values together; None: no limit.

    Raises:
        BadArgument: a capacity below 1.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=False, shared=False, zero_copy=False, evicts=True, overwrites=True
    )

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise BadArgument("capacity_bytes", capacity_bytes, "at least 1, or None")
        self._capacity = capacity_bytes
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._used = 0
        self._evicted = 0
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`memory:?capacity=1GiB`."""
        if address:
            raise BadArgument("storage address", address, "empty: memory has none")
        check_options(options, ("capacity",))
        capacity = options.get("capacity")
        return cls(None if capacity is None else parse_bytes("capacity", capacity))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Looks keys up."""
        with self._open():
            return [key in self._values for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Copies values out."""
        pairs, lengths = list(zip(keys, buffers, strict=True)), []
        with self._open():
            for key, buffer in pairs:
                value = self._values.get(key)
                if value is not None:
                    self._values.move_to_end(key)
                    if len(value) == len(buffer):
                        buffer[:] = value
                lengths.append(ABSENT if value is None else len(value))
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Copies values in; evicts old ones to make room."""
        pairs, stored = list(zip(keys, buffers, strict=True)), []
        with self._open():
            for key, buffer in pairs:
                fits = self._capacity is None or len(buffer) <= self._capacity
                if fits:
                    self._drop(key)
                    self._values[key] = bytes(buffer)
                    self._used += len(buffer)
                    self._make_room()
                stored.append(fits)
        return stored

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists what it holds now, the least recently used first."""
        with self._open():
            found = [Listed(key, len(value)) for key, value in self._values.items()]
        for at in range(0, len(found), SCANNED):
            yield found[at : at + SCANNED]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes values."""
        with self._open():
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        """Deletes every value."""
        with self._open():
            self._values.clear()
            self._used = 0

    def stats(self) -> BackendStats:
        """Returns exact counts."""
        with self._open():
            return BackendStats(len(self._values), self._used, self._capacity, self._evicted)

    def close(self) -> None:
        """Drops all values."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._used = 0

    def check(self) -> None:
        """Checks that the bytes are those of the values, and within the capacity.

        Raises:
            AssertionError: they are not.
        """
        with self._lock:
            assert self._used == sum(map(len, self._values.values())), "bytes are not those of the values"
            assert self._capacity is None or self._used <= self._capacity, "more bytes than the capacity"

    def _open(self) -> threading.Lock:
        if self._closed:
            raise StorageError("closed", "the memory store is closed")
        return self._lock

    def _drop(self, key: bytes) -> None:
        self._used -= len(self._values.pop(key, b""))

    def _make_room(self) -> None:
        while self._capacity is not None and self._used > self._capacity:
            self._used -= len(self._values.popitem(last=False)[1])
            self._evicted += 1


BACKEND = MemoryBackend
