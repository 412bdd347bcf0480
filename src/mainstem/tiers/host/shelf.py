"""The shelf: which host pages hold sealed values, so that peers can be given them.

A page's slot holds a sealed value from when it was written to storage, or read from it, until the page is freed. The
shelf knows slots by their keys, and copies no page but for a peer. It reads a slot without a lock: a copy counts only
if the page was not freed meanwhile, as pages are forgotten before anybody else gets them.

Device pages are not served: they are written by the model at any moment, and leave the host no later than the
device with "write_through", so that they would add little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mainstem.cache.tree import Ids
from mainstem.errors import CorruptTree
from mainstem.storage.base import ABSENT, Backend
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.native import address_of
from mainstem.storage.peer import PeerServer
from mainstem.tiers.host.transfer import HostMemory

_NOTE_BYTES = 64 << 20  # of what is no page, without a store


class Shelf:
    """Sealed values in host pages. Any number of threads. It is a `mainstem.storage.peer.Source`.

    Attributes:
        server: serves its values to peers, until `close`; None: nobody does.
    """

    def __init__(self) -> None:
        self.server: PeerServer | None = None
        self._slots: dict[bytes, memoryview] = {}
        self._keys: dict[int, bytes] = {}  # by the addresses of slots
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def place(self, values: Iterable[tuple[bytes, memoryview]]) -> None:
        """Notes that slots hold sealed values, each with its key."""
        with self._lock:
            for key, slot in values:
                at = address_of(slot)
                self._drop(at)
                if key in self._slots:  # another page holds it, too
                    self._keys.pop(address_of(self._slots[key]), None)
                self._slots[key], self._keys[at] = slot, key

    def forget(self, slots: Sequence[memoryview]) -> None:
        """Notes that slots will hold something else."""
        with self._lock:
            for slot in slots:
                self._drop(address_of(slot))

    def forgets(self, memory: HostMemory, row: int) -> Callable[[Ids], None]:
        """Returns what is to be called with the pages of a row when they have become free."""
        return lambda page_ids: self.forget(memory.slots(row, page_ids.tolist()))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Gives these values no more."""
        with self._lock:
            for key in keys:
                if key in self._slots:
                    self._drop(address_of(self._slots[key]))

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        slots = [self._slots.get(key) for key in keys]
        return [ABSENT if slot is None else len(slot) for slot in slots]

    def copy(self, key: bytes, length: int) -> bytearray | None:
        slot = self._slots.get(key)
        if slot is None or len(slot) != length:
            return None
        copy = bytearray(slot)
        with self._lock:
            return copy if self._slots.get(key) is slot else None

    @property
    def counts(self) -> dict[str, int]:
        return {} if self.server is None else dict(self.server.counts)

    def check(self, held: Sequence[memoryview]) -> None:
        """Verifies that it knows each slot by one key, and none of a page that is free.

        Args:
            held: the slots of host pages that are not free.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        with self._lock:
            keys = {address_of(slot): key for key, slot in self._slots.items()}
            if keys != self._keys:
                raise CorruptTree("shelf: a slot has the key that it is found by, and no other")
            if keys.keys() - set(map(address_of, held)):
                raise CorruptTree("shelf: the page of a slot is free")

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def _drop(self, at: int) -> None:
        key = self._keys.pop(at, None)
        if key is not None:
            del self._slots[key]


class AndStore:
    """The values of a shelf, else of a store that peers cannot read themselves. It is a `mainstem.storage.peer.Source`.

    A store that fails has nothing.

    Args:
        shelf: asked first.
        store: its values are sealed, as those of the shelf are.
    """

    def __init__(self, shelf: Shelf, store: Backend) -> None:
        self._shelf, self._store = shelf, store

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        lengths = self._shelf.lengths(keys)
        lacking = [at for at, length in enumerate(lengths) if length == ABSENT]
        buffers = [memoryview(bytearray(1)) for _ in lacking]  # too short for any, so only lengths are read
        for at, length in zip(lacking, self._get([keys[at] for at in lacking], buffers), strict=True):
            lengths[at] = length
        return lengths

    def copy(self, key: bytes, length: int) -> bytearray | None:
        if (value := self._shelf.copy(key, length)) is not None:
            return value
        value = bytearray(length)
        return value if self._get([key], [memoryview(value)]) == [length] else None

    def _get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        try:
            return list(self._store.get(keys, buffers)) if keys else []
        except Exception:  # noqa: BLE001  # third-party code; the engine's own calls count it
            return [ABSENT] * len(keys)


class HostOnly(MemoryBackend):
    """Stands in for the store of an engine that has peers and no store: it keeps notes, and finds pages on the shelf.

    Args:
        shelf: has the pages.
    """

    capabilities = replace(MemoryBackend.capabilities, overwrites=False)

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(_NOTE_BYTES)
        self._shelf = shelf

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [there or key in self._shelf for key, there in zip(keys, super().exists(keys), strict=True)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Copies values out: of the shelf, else of the notes."""
        lengths = super().get(keys, buffers)
        for at, (key, buffer, length) in enumerate(zip(keys, buffers, lengths, strict=True)):
            if length == ABSENT:
                value = self._shelf.copy(key, len(buffer))
                lengths[at] = self._shelf.lengths([key])[0] if value is None else len(buffer)
                if value is not None:
                    buffer[:] = value
                elif lengths[at] == len(buffer):
                    lengths[at] = ABSENT  # it came only now
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Keeps notes; what is on the shelf stays there."""
        placed = [key in self._shelf for key in keys]
        stored = []
        for key, buffer, there in zip(keys, buffers, placed, strict=True):
            stored.append(there or super().put([key], [buffer])[0])
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        super().delete(keys)
        self._shelf.remove(keys)
