"""The catalog of the store: which value is where, which was used when, and what leaves to make room. In memory only.

To make room, the catalog evicts the least recently used value, then the values after it in the file until the new
value fits. Values of one size never waste room, and values of several sizes need no size classes. Later values of a
batch are evicted first, because they are useless without the earlier ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from mainstem.storage.base import BackendStats
from mainstem.storage.file.space import Entry, Piece, Space, rounded


class Catalog:
    """The values of a store by key. Several threads may call it at once; one of them changes what it holds.

    A value that leaves is doomed until its bytes are destroyed: the catalog reuses its place, but an index may name it.

    Attributes:
        corrupt: values dropped because they did not verify.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first
        self._owner: dict[int, bytes] = {}  # key of the value that starts at an offset
        self._space = Space()
        self._doomed: set[Entry] = set()
        self._evicted = 0
        self.corrupt = 0

    def load(self, entries: Iterable[tuple[bytes, Entry]], total: int) -> int:
        """Takes the entries of an index, the oldest first, if they can exist in a file of `total` bytes.

        Returns how many of them cannot.
        """
        self._space = Space(total)
        gone: set[bytes] = set()
        for key, entry in entries:
            self._entries.pop(key, None)
            gone.discard(key)
            if entry.length > 0 <= entry.offset:  # else it was deleted
                if entry.end <= total:
                    self._entries[key] = entry
                else:
                    gone.add(key)
        end = 0
        for key in self._settle_overlaps():
            entry = self._entries[key]
            self._space.free(end, entry.offset)
            self._owner[entry.offset] = key
            end = entry.end
        self._space.free(end, total)
        return len(gone)

    def _settle_overlaps(self) -> list[bytes]:
        """Keeps the later of two values in one place (the earlier one was evicted). Returns all keys by place."""
        kept: list[tuple[int, bytes]] = []
        end = 0
        for rank, key in sorted(enumerate(self._entries), key=lambda item: self._entries[item[1]].offset):
            entry = self._entries[key]
            if entry.offset < end:
                if rank < kept[-1][0]:
                    del self._entries[key]
                    continue
                del self._entries[kept.pop()[1]]
            kept.append((rank, key))
            end = entry.end
        return [key for _, key in kept]

    # ------------------------------------------------------------ looking up

    def __len__(self) -> int:
        """Counts the values."""
        return len(self._entries)

    def items(self) -> list[tuple[bytes, Entry]]:
        """Returns all values, the least recently used first."""
        with self._lock:
            return list(self._entries.items())

    def find(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Returns where the values of these keys are."""
        with self._lock:
            return [self._entries.get(key) for key in keys]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks values as used now, the first of them last."""
        with self._lock:
            for key in reversed(keys):
                if key in self._entries:
                    self._entries.move_to_end(key)

    def fresh(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the values that it does not hold yet, and marks the others as used now."""
        found = self.find([piece.key for piece in pieces])
        held = {
            piece.key
            for piece, entry in zip(pieces, found, strict=True)
            if entry is not None and (entry.length, entry.digest) == (piece.entry.length, piece.entry.digest)
        }
        self.touch([piece.key for piece in pieces if piece.key in held])
        return [piece for piece in pieces if piece.key not in held]

    @property
    def total(self) -> int:
        """Returns the size of the file."""
        return self._space.total

    @property
    def largest(self) -> int:
        """Returns the size of the largest free run."""
        with self._lock:
            return self._space.largest

    def stats(self, capacity_bytes: int) -> BackendStats:
        """Returns exact counts; bytes are in whole grains."""
        with self._lock:
            used = self._space.total - self._space.unused
            return BackendStats(len(self._entries), used, capacity_bytes, self._evicted)

    def check(self) -> None:
        """Checks that every grain is either free or owned by exactly one value. Not during `placing`.

        Raises:
            AssertionError: the check failed; the message names the broken rule.
        """
        with self._lock:
            self._space.check()
            assert not self._doomed.intersection(self._entries.values()), "what is to be destroyed is nobody's"
            used = [(entry.offset, entry.end) for entry in self._entries.values()]
            at = 0
            for start, end in sorted([*used, *self._space.runs()]):
                assert start == at, f"[{at}, {start}) is neither free nor owned, or owned twice"
                at = end
            assert at == self._space.total, f"{at} bytes are free or owned, of {self._space.total}"
            assert sum(end - start for start, end in used) + self._space.unused == self._space.total, "unused is wrong"
            owners = {entry.offset: key for key, entry in self._entries.items()}
            assert owners == self._owner, "the owner of a value is not the one in the catalog"

    # ------------------------------------------------------------ values come

    @contextmanager
    def placing(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Drops the old values of these keys and allocates room for the new ones, while the caller writes them.

        At the end readers find them; the first counts as used last. If the caller fails, their places are freed.

        Yields:
            The pieces that have a place now. There is no room for the others.
        """
        with self._lock:
            for piece in pieces:
                self._drop(piece.key)
            offsets = self._allocate([rounded(piece.entry.length) for piece in pieces])
        placed = [
            piece._replace(entry=piece.entry._replace(offset=offset))
            for piece, offset in zip(pieces, offsets, strict=True)
            if offset is not None
        ]
        try:
            yield placed
        except BaseException:
            with self._lock:
                for piece in placed:
                    self._free(piece.entry)
            raise
        with self._lock:
            for key, entry, _ in reversed(placed):
                self._entries[key] = entry
                self._owner[entry.offset] = key

    def grow(self, total: int) -> None:
        """Adds room at the end."""
        with self._lock:
            self._space.grow(total)

    def _allocate(self, sizes: Sequence[int]) -> list[int | None]:
        """Allocates room for values, contiguous if one free run is large enough. None: no room for that value."""
        size = sum(sizes)
        while self._space.unused < size <= self._space.total and self._entries:
            self._evict(next(iter(self._entries)))
        start = self._space.allocate(size)
        if start is not None:
            return [start + before for before in accumulate(sizes[:-1], initial=0)]
        if len(sizes) == 1:
            return [self._make_room(size)]
        half = len(sizes) // 2
        return self._allocate(sizes[:half]) + self._allocate(sizes[half:])

    def _make_room(self, size: int) -> int | None:
        """Evicts the least recently used value and those after it in the file, until one free run is large enough."""
        while (start := self._space.allocate(size)) is None and self._entries and size <= self._space.total:
            run = self._evict(next(iter(self._entries)))
            while run[1] - run[0] < size and run[1] in self._owner:
                run = self._evict(self._owner[run[1]])
        return start

    # ------------------------------------------------------------ values leave

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        """Removes values: readers miss them from now on. Returns the keys that it held."""
        with self._lock:
            return [key for key in keys if self._drop(key)]

    def drop_corrupt(self, pieces: Iterable[Piece]) -> None:
        """Removes values that did not verify, unless they left already, and their places may have new owners."""
        with self._lock:
            for key, entry, _ in pieces:
                if self._entries.get(key) is entry:
                    self._drop(key)
                    self.corrupt += 1

    def clear(self) -> None:
        """Removes everything and all room. Nothing is doomed: the file is to be truncated."""
        with self._lock:
            self._entries.clear()
            self._owner.clear()
            self._doomed.clear()
            self._space = Space()

    def evict_beyond(self, end: int) -> None:
        """Evicts the values that reach beyond a place in the file."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.end > end]:
                self._evict(key)

    def shrink(self, total: int) -> None:
        """Removes the room beyond `total`, where the bytes are destroyed and no value is."""
        with self._lock:
            self._space.shrink(total)
            self._doomed = {entry for entry in self._doomed if entry.offset < total}

    @contextmanager
    def destroying(self) -> Iterator[set[Entry]]:
        """Yields the doomed values, which the caller destroys. If it fails, they stay doomed."""
        with self._lock:
            doomed, self._doomed = self._doomed, set()
        try:
            yield doomed
        except BaseException:
            with self._lock:
                self._doomed |= doomed
            raise

    def _evict(self, key: bytes) -> tuple[int, int]:
        run = self._drop(key)
        assert run is not None
        self._evicted += 1
        return run

    def _drop(self, key: bytes) -> tuple[int, int] | None:
        """Removes a value. Returns the free run with its extent; None: no such key."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        del self._owner[entry.offset]
        return self._free(entry)

    def _free(self, entry: Entry) -> tuple[int, int]:
        self._doomed.add(entry)
        return self._space.free(entry.offset, entry.end)
