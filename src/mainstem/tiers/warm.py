"""What a restarted server loads from storage first: the list of the hottest prefixes, kept, found and prefetched.

The list's bytes are the matter of `hottest`; here is when it is written, whether all ranks found the same one, and how
fast its prefixes are prefetched.
"""

from __future__ import annotations

from mainstem._core import Pool
from mainstem.tiers import hottest
from mainstem.tiers.pending import Pending, PendingList, Unused
from mainstem.tiers.prefetch import Prefetches
from mainstem.tiers.store import Store
from mainstem.tree import HOST, Tree

_MARKS = 1 << 60  # above every mark of a list


class _Note(Unused):
    """A write of the list."""


class _Find(Pending):
    """A read of the list. Ranks use it only if lowest and highest mark are the same."""

    def __init__(self, warming: Warming, finding: hottest.Finding, lowest: int | None = None) -> None:
        self._warming, self._finding, self._lowest = warming, finding, lowest

    def vote(self) -> int:
        if not self._finding.done():
            return 0
        return self._finding.mark if self._lowest is None else _MARKS - self._finding.mark

    def settle(self, outcome: int) -> None:
        if self._lowest is None:
            self._warming.compare(self._finding, outcome)
        elif outcome == _MARKS - self._lowest:
            self._warming.take(self._finding.value)


class Warming:
    """Keeps the list of the hottest prefixes in storage, and prefetches those that it lists.

    Args:
        tree: the tree.
        pool: the host pages.
        store: the store.
        prefetches: prefetches.
        pending: the list of everything under way.
    """

    def __init__(self, tree: Tree, pool: Pool, store: Store, prefetches: Prefetches, pending: PendingList) -> None:
        self._tree, self._pool, self._store = tree, pool, store
        self._prefetches, self._pending = prefetches, pending
        self._left = hottest.Prefixes()

    @property
    def under_way(self) -> bool:
        """Whether prefixes are left to prefetch."""
        return bool(self._left)

    def remember(self) -> None:
        """See `Tiers.remember`."""
        if self._pending.of(_Note):
            return  # the last list is still being written
        if spans := self._tree.core.hot_spans(HOST):  # an empty list would replace that of another process
            content = hottest.encode(spans, self._tree.page_bytes, self._pool.total)
            self._pending.add(_Note(hottest.Keeping(self._store, content).done))

    def begin(self) -> None:
        """See `Tiers.warm`."""
        self._pending.add(_Find(self, hottest.Finding(self._store, self._tree.page_bytes, self._pool.total)))

    def compare(self, finding: hottest.Finding, lowest: int) -> None:
        """Asks the ranks for the highest mark of what they found, once they know the lowest."""
        self._pending.add(_Find(self, finding, lowest))

    def take(self, content: bytes) -> None:
        """Takes a list that all ranks have found."""
        self._left = hottest.decode(content, self._tree.page_bytes, self._pool.total)

    def go_on(self) -> None:
        """Prefetches the listed prefixes, few at a time, after those that requests ask for."""
        while self._left and len(self._prefetches) < max(1, self._store.config.max_prefetches // 2):
            if not self._pool.free:
                self._left = hottest.Prefixes()  # the pages on the host are hotter than the rest of the list
                return
            namespace, key = self._left.first
            if self._prefetches.overlaps(namespace, key):
                return  # a prefetch of a shared part must end first
            self._left.drop()
            self._prefetches.begin(namespace, key, min_pages=1)
