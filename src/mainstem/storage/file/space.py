"""Places in the file of values: whole grains of 4 KiB, each owned by one value or free."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

GRAIN_BYTES = 4096
"""Values start at multiples of this: a page of the page cache, so that no write has to read first."""

NOWHERE = -1
"""The offset of a value that is deleted or has no place yet."""


def rounded(length: int) -> int:
    """Rounds up to whole grains."""
    return -(-length // GRAIN_BYTES) * GRAIN_BYTES


class Entry(NamedTuple):
    """The place of a value, and its digest."""

    offset: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        """Returns where its last grain ends."""
        return self.offset + rounded(self.length)


class Piece(NamedTuple):
    """A value in a buffer, and its place in the file."""

    key: bytes
    entry: Entry
    buffer: memoryview


class Space:
    """The free parts of [0, total): runs of whole grains, never two adjacent ones. It does not know owners.

    At first nothing is free. Finding a run takes logarithmic time in the number of different sizes.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.unused = 0
        self._end_of: dict[int, int] = {}  # end of the free run that starts here
        self._start_of: dict[int, int] = {}  # start of the free run that ends here
        self._sizes: list[int] = []  # of free runs, ascending, without duplicates
        self._starts: dict[int, dict[int, None]] = {}  # by size; a dict is a set that keeps its order

    @property
    def largest(self) -> int:
        """Returns the size of the largest free run."""
        return self._sizes[-1] if self._sizes else 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields all free runs, half-open, in no order."""
        return iter(self._end_of.items())

    def grow(self, total: int) -> None:
        """Adds room at the end."""
        start, self.total = self.total, total
        self.free(start, total)

    def shrink(self, total: int) -> None:
        """Removes room at the end, which must be free."""
        start = self._start_of[self.total]
        self._remove(start, self.total)
        self._add(start, total)
        self.total = total

    def allocate(self, size: int) -> int | None:
        """Allocates the front of the smallest free run that is large enough. Returns None if there is none."""
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return None
        start = next(iter(self._starts[self._sizes[at]]))
        end = self._end_of[start]
        self._remove(start, end)
        if start + size < end:
            self._add(start + size, end)
        return start

    def free(self, start: int, end: int) -> tuple[int, int]:
        """Frees a part. Returns the free run that contains it now."""
        if start in self._start_of:
            start, middle = self._start_of[start], start
            self._remove(start, middle)
        if end in self._end_of:
            middle, end = end, self._end_of[end]
            self._remove(middle, end)
        self._add(start, end)
        return start, end

    def check(self) -> None:
        """Checks that each free run is found by its start, its end and its size, and that none is next to another.

        Raises:
            AssertionError: a rule is broken.
        """
        runs = sorted(self._end_of.items())
        assert self._start_of == {end: start for start, end in runs}, "a run is found by its end"
        sizes = [(end - start, start) for start, end in runs]
        assert sorted(sizes) == sorted((size, at) for size, found in self._starts.items() for at in found), (
            "by its size"
        )
        assert self._sizes == sorted(self._starts) and all(self._starts.values()), "sizes are listed once"
        assert self.unused == sum(size for size, _ in sizes) <= self.total, "free bytes are counted"
        ends = [0, *(at for run in runs for at in run), self.total + 1]
        assert all(before < after for before, after in zip(ends[2::2], ends[3::2], strict=False)), "runs lie apart"

    def _add(self, start: int, end: int) -> None:
        if start == end:
            return
        size = end - start
        if size not in self._starts:
            self._starts[size] = {}
            insort(self._sizes, size)
        self._starts[size][start] = None
        self._end_of[start], self._start_of[end] = end, start
        self.unused += size

    def _remove(self, start: int, end: int) -> None:
        size = end - start
        del self._starts[size][start], self._end_of[start], self._start_of[end]
        if not self._starts[size]:
            del self._starts[size], self._sizes[bisect_left(self._sizes, size)]
        self.unused -= size
