"""Everything under way: `Pending`s in one list, in the order in which they began, and the counts of how it went.

`settle` asks each for its vote, agrees on the votes with the other ranks, and settles what has ended on all of them.
Transfers may end in any order, and in another order on each rank. What follows from their end happens in the order in
which they began, the same on every rank.

The list knows nothing of what is under way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

Agree = Callable[[Sequence[int]], Sequence[int]]

FAILED = 1
"""The lowest vote of what has ended; 0 before."""
ARRIVED = 2


class Pending(Protocol):
    """Something under way. It ends once."""

    def vote(self) -> int:
        """Returns 0 until it has ended on this rank; then 1 or more, higher for a better outcome."""

    def settle(self, outcome: int) -> object:
        """Applies the outcome once it has ended on every rank; `outcome` is the lowest of their votes."""


def _ignore(outcome: int) -> None:
    """Does nothing."""


@dataclass(frozen=True, eq=False)
class Polled:
    """A `Pending` of two functions; by default nothing depends on its outcome."""

    vote: Callable[[], int]
    settle: Callable[[int], object] = _ignore


P = TypeVar("P", bound=Pending)


class PendingList:
    """The list.

    Args:
        agree: all-reduce that takes the element-wise minimum of the votes of all ranks; None: there is one rank.

    Attributes:
        counts: what the parts count, by the names of `TierStats`.
    """

    def __init__(self, agree: Agree | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._agree = agree
        self._items: dict[Pending, None] = {}
        self._ended: deque[tuple[Pending, int]] = deque()  # of the items, with the outcomes: to be settled next

    def __len__(self) -> int:
        return len(self._items)

    @property
    def alone(self) -> bool:
        """Whether there is one rank, which need not agree with others."""
        return self._agree is None

    def __iter__(self) -> Iterator[Pending]:
        return iter(tuple(self._items))

    def add(self, item: P) -> P:
        """Appends what has begun, and returns it."""
        self._items[item] = None
        return item

    def of(self, kind: type[P]) -> list[P]:
        """Returns what is under way of one kind."""
        return [item for item in self._items if isinstance(item, kind)]

    def agreed(self, vote: int) -> int:
        """Returns the lowest of the votes of all ranks, each of which calls this at the same point."""
        return vote if self._agree is None else self._agree([vote])[0]

    def settle(self, some: Sequence[Pending] | None = None) -> None:
        """Settles what has ended on every rank, among some items or all. What that begins is not settled yet.

        May be called while something is settled: what ended together with that, and began after it, comes first.
        """
        asked = tuple(self._items if some is None else some)
        self._settle_ended()
        while left := [item for item in asked if item in self._items]:
            votes: Sequence[int] = [int(item.vote()) for item in left]
            if self._agree is not None:
                votes = self._agree(votes)
            self._ended.extend((item, vote) for item, vote in zip(left, votes, strict=True) if vote)
            if not self._ended:
                return
            self._settle_ended()

    def _settle_ended(self) -> None:
        while self._ended:
            item, outcome = self._ended.popleft()
            del self._items[item]
            item.settle(outcome)
