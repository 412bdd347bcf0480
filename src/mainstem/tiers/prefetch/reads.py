"""`Reads`: the pages that one prefetch has yet to read, and its calls to storage that have not been dealt with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from mainstem.cache.tree import Ids
from mainstem.errors import CorruptTree
from mainstem.tiers.pending import Polled
from mainstem.tiers.prefetch.reader import Reader
from mainstem.tiers.storage.calls import StoreCall

Run = tuple[int, int, int]
"""Pages of a prompt: the row, the first page, and the one after the last."""


@dataclass(eq=False)
class Read:
    """A batch of pages of one component, read from storage into private host pages; None: they have no content."""

    row: int
    begin: int
    page_ids: Ids
    call: StoreCall[int] | None
    good: int = 0  # pages that arrived intact, from the first
    failed: bool = False  # the call as a whole
    ended: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.page_ids)

    @property
    def done(self) -> bool:
        return self.call is None or self.call.done()

    @property
    def fault(self) -> str | None:
        return None if self.call is None else self.call.fault

    def vote(self) -> int:
        """Returns 1 if the call failed as a whole; otherwise 2 + the number of intact pages, from the first."""
        if self.call is None:
            return 2 + len(self.page_ids)
        return 1 if self.call.failed else 2 + self.call.value


class Reads:
    """The reads of one prefetch.

    Args:
        may_settle: whether pages that have been read can be dealt with now.
        on_end: called with each read once it has ended on every rank.

    Attributes:
        left: pages that no read has begun for, in the order in which they are read.
    """

    def __init__(self, reader: Reader, may_settle: Callable[[], bool], on_end: Callable[[Read], object]) -> None:
        self._reader, self._may_settle, self._on_end = reader, may_settle, on_end
        self.left: deque[Run] = deque()
        self._begun: deque[Read] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, row: int, begin: int, names: Sequence[bytes], page_ids: Ids) -> None:
        """Begins to read pages from `begin` on."""
        read = Read(row, begin, page_ids, self._reader.read(row, names, page_ids))
        self._begun.append(read)
        self._reader.pending.add(Polled(partial(self._vote, read), partial(self._settle, read)))

    @property
    def all_done(self) -> bool:
        """Whether no call is under way."""
        return all(read.done for read in self._begun)

    @property
    def overdue(self) -> bool:
        """Whether a call has exceeded its deadline."""
        return any(read.call is not None and read.call.overdue() for read in self._begun)

    def private_pages(self, row: int) -> int:
        """Returns the number of host pages of a component that are being read into."""
        return sum(len(read.page_ids) for read in self._begun if read.row == row)

    def check(self) -> None:
        """Verifies that no page is read, or left to read, twice.

        Raises:
            CorruptTree: one is.
        """
        spans = sorted([*self.left, *((read.row, read.begin, read.end) for read in self._begun)])
        if any(one[0] == other[0] and one[2] > other[1] for one, other in pairwise(spans)):
            raise CorruptTree("a prefetch: a page is read once")

    @property
    def under_way(self) -> int:
        """Pages that are being read."""
        return sum(len(read.page_ids) for read in self._begun)

    def spans_left(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns what is left to read within [begin, end)."""
        return _within(((first, last) for _, first, last in self.left), begin, end)

    def spans(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns what is being read or left to read within [begin, end)."""
        return _within(((read.begin, read.end) for read in self._begun), begin, end) + self.spans_left(begin, end)

    def cut(self, begin: int, end: int) -> None:
        """Takes pages out of those left to read."""
        parts = [part for row, b, e in self.left for part in ((row, b, min(e, begin)), (row, max(b, end), e))]
        self.left = deque(part for part in parts if part[1] < part[2])

    def put_back(self, begin: int, end: int) -> None:
        """Adds pages of the first component to those left to read."""
        self.left = deque(sorted([*self.left, (0, begin, end)]))

    def take_in_order(self) -> Iterator[Read]:
        """Yields and drops the reads that have ended, up to the first that has not."""
        while self._begun and self._begun[0].ended:
            yield self._begun.popleft()

    def take_ended(self) -> list[Read]:
        """Returns and drops the reads that have ended."""
        ended = [read for read in self._begun if read.ended]
        self._begun = deque(read for read in self._begun if not read.ended)
        return ended

    def _vote(self, read: Read) -> int:
        return read.vote() if read.done and self._may_settle() else 0

    def _settle(self, read: Read, outcome: int) -> None:
        read.good, read.failed, read.ended = max(0, outcome - 2), outcome == 1, True
        self._on_end(read)


def _within(spans: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    cut = ((max(first, begin), min(last, end)) for first, last in spans)
    return [span for span in cut if span[0] < span[1]]
