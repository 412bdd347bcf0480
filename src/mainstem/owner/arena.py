"""The arena: the places of values in the shared memory of an owner, which are in use, and what is evicted for others.

Memory is allocated in whole grains of 4 KiB, as in the file store. To make room, the least recently used value is
evicted, then those after it in memory, until the new one fits. So values of any sizes need no size classes. A value
that is pinned, because a client copies it or because it is not written yet, is never evicted. Knows offsets, no bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mainstem.storage.file.space import GRAIN_BYTES, Space, rounded


@dataclass(slots=True, eq=False)
class Value:
    """A value in the arena.

    Args:
        offset: its first byte.
        length: its bytes.
        key: the key under which it is found; None: it is not published yet, or was dropped or replaced.
        pins: users that keep it where it is.
    """

    offset: int
    length: int
    key: bytes | None = None
    pins: int = 1

    @property
    def end(self) -> int:
        return self.offset + rounded(self.length)


class Arena:
    """The values in [0, total). One thread at a time.

    A value begins as private memory of its writer, pinned once. `publish` gives it a key. It is freed when it has
    neither a key nor a pin.

    Args:
        total_bytes: the size of the memory; what does not fill a grain is not used.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total = total_bytes // GRAIN_BYTES * GRAIN_BYTES
        self.evicted = 0
        self._space = Space()
        self._space.grow(self.total)
        self._published: dict[bytes, Value] = {}
        self._unpinned: OrderedDict[bytes, Value] = OrderedDict()  # published; the least recently used first
        self._at: dict[int, Value] = {}  # every value, by its offset

    def __len__(self) -> int:
        return len(self._published)

    @property
    def used(self) -> int:
        """Returns the bytes that values take, in whole grains."""
        return self.total - self._space.unused

    @property
    def pinned(self) -> int:
        """Counts the values in use."""
        return len(self._at) - len(self._unpinned)

    @property
    def pins(self) -> int:
        """Counts all pins of all values."""
        return sum(value.pins for value in self._at.values())

    def find(self, key: bytes) -> Value | None:
        return self._published.get(key)

    def lengths(self) -> dict[bytes, int]:
        """Returns the length of each value that has a key."""
        return {key: value.length for key, value in self._published.items()}

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks values as used now, the first of them last: the later ones of a chain are useless without it."""
        for key in reversed(keys):
            if key in self._unpinned:
                self._unpinned.move_to_end(key)

    def allocate(self, length: int) -> Value | None:
        """Allocates a private value of at least one byte and pins it. Evicts what it must.

        Returns None if there is no room beside what is pinned. Then it has evicted little more than twice the size.
        """
        size = rounded(length)
        if size > self.total:
            return None
        unused, checked = self._space.unused, False
        while (start := self._space.allocate(size)) is None and self._unpinned:
            if not checked and self._space.unused - unused >= 2 * size:  # what is pinned may be everywhere
                if not self._fits_beside_pinned(size):
                    return None
                checked = True
            run = self._evict(next(iter(self._unpinned.values())))
            while run[1] - run[0] < size and (after := self._at.get(run[1])) is not None and not after.pins:
                run = self._evict(after)
        if start is None:
            return None
        value = self._at[start] = Value(start, length)
        return value

    def publish(self, key: bytes, value: Value) -> None:
        """Makes a private value that of a key, and drops the one before. It stays pinned."""
        assert value.key is None and value.pins
        self.drop(key)
        value.key = key
        self._published[key] = value

    def pin(self, value: Value) -> None:
        """Keeps a value where it is, whatever becomes of its key."""
        if not value.pins:
            assert value.key is not None
            del self._unpinned[value.key]
        value.pins += 1

    def unpin(self, values: Sequence[Value]) -> None:
        """Ends one pin of each value. The first of them counts as used last."""
        for value in reversed(values):
            assert value.pins > 0
            value.pins -= 1
            if value.pins:
                continue
            if value.key is None:
                self._free(value)
            else:
                self._unpinned[value.key] = value

    def drop(self, key: bytes) -> None:
        """Makes a key absent. Users that have pinned its value may read on."""
        value = self._published.pop(key, None)
        if value is None:
            return
        value.key = None
        if not value.pins:
            del self._unpinned[key]
            self._free(value)

    def clear(self) -> None:
        for key in list(self._published):
            self.drop(key)

    def check(self) -> None:
        """Checks that every grain is either free or part of exactly one value, and that each value is where it belongs.

        Raises:
            AssertionError: the check failed; the message names the broken rule.
        """
        self._space.check()
        end = 0
        for start, stop in sorted([*((value.offset, value.end) for value in self._at.values()), *self._space.runs()]):
            assert start == end, f"[{end}, {start}) is neither free nor owned, or owned twice"
            end = stop
        assert end == self.total, f"{end} bytes are free or owned, of {self.total}"
        for offset, value in self._at.items():
            assert offset == value.offset, "a value is listed at another place"
            assert value.pins or value.key is not None, "a value has neither a key nor a pin, and is not free"
            assert value.key is None or self._published.get(value.key) is value, "a value has the key of another"
        unpinned = {key for key, value in self._published.items() if not value.pins}
        assert unpinned == set(self._unpinned), "what may be evicted is not what is not pinned"
        assert {id(value) for value in self._published.values()} <= {id(value) for value in self._at.values()}

    def _fits_beside_pinned(self, size: int) -> bool:
        end = 0
        for value in sorted((value for value in self._at.values() if value.pins), key=lambda value: value.offset):
            if value.offset - end >= size:
                return True
            end = value.end
        return self.total - end >= size

    def _evict(self, value: Value) -> tuple[int, int]:
        """Evicts a value. Returns the free run that contains its place now."""
        assert value.key is not None
        del self._published[value.key], self._unpinned[value.key]
        self.evicted += 1
        return self._free(value)

    def _free(self, value: Value) -> tuple[int, int]:
        del self._at[value.offset]
        return self._space.free(value.offset, value.end)
