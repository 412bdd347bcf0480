"""Everything under way: `Pending`s in one list, in the order in which they began.

A poll asks each for its vote, agrees on the votes with the other ranks, and settles what has ended on all of them. So
completions may come in any order, while what follows from them happens in the same order on every rank.

The list knows nothing of what is under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Agree = Callable[[Sequence[int]], Sequence[int]]

FAILED = 1
"""The lowest vote of what has ended; 0 before."""
ARRIVED = 2


class Pending(ABC):
    """Something under way. It ends once."""

    @abstractmethod
    def vote(self) -> int:
        """Returns 0 until it has ended on this rank; then 1 or more, higher for a better outcome."""

    @abstractmethod
    def settle(self, outcome: int) -> None:
        """Applies the outcome once it has ended on every rank; `outcome` is the lowest of their votes."""


class Unused(Pending):
    """Something whose result nothing depends on; `done` says whether it has ended."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self._done = done

    def vote(self) -> int:
        """Votes once it has ended."""
        return int(self._done())

    def settle(self, outcome: int) -> None:
        """Does nothing."""


P = TypeVar("P", bound=Pending)


class PendingList:
    """The list.

    Args:
        agree: all-reduce that takes the element-wise minimum of the votes of all ranks; None: there is one rank.
    """

    def __init__(self, agree: Agree | None = None) -> None:
        self._agree = agree
        self._items: list[Pending] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._items)

    def add(self, item: P) -> P:
        """Appends what has begun, and returns it."""
        self._items.append(item)
        return item

    def of(self, kind: type[P]) -> list[P]:
        """Returns what is under way of one kind."""
        return [item for item in self._items if isinstance(item, kind)]

    def settle(self, some: Sequence[Pending] | None = None) -> None:
        """Settles what has ended on every rank, among some items or all. What that begins is not settled yet."""
        left = self._items if some is None else some
        while left:
            votes: Sequence[int] = [item.vote() for item in left]
            if self._agree is not None:
                votes = self._agree(votes)
            ended = [(item, vote) for item, vote in zip(left, votes, strict=True) if vote]
            if not ended:
                return
            gone = {id(item) for item, _ in ended}
            self._items = [item for item in self._items if id(item) not in gone]
            for item, vote in ended:
                item.settle(vote)
            left = [item for item in left if id(item) not in gone]
