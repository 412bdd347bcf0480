"""Warming: a restarted server first loads the hottest prefixes from storage, by a list that is kept there.

`hottest` encodes the list and decodes it. This module decides when it is written, whether all ranks found the same one,
and how fast its prefixes are prefetched.
"""

from __future__ import annotations

from functools import partial

from mainstem.cache.tree import HOST
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.pending import PendingList, Polled
from mainstem.tiers.prefetch import hottest
from mainstem.tiers.prefetch.prefetches import Prefetches
from mainstem.tiers.storage.store import Store

_MARKS = 1 << 60  # above every mark of a list


class _Note(Polled):
    """A write of the list."""


class Warming:
    """Keeps the list of the hottest prefixes in storage, and prefetches those that it lists.

    Attributes:
        left: the prefixes left to prefetch.
    """

    def __init__(self, host: HostPages, store: Store, prefetches: Prefetches, pending: PendingList) -> None:
        self._core, self._page_bytes, self._pools = host.tree.core, host.tree.page_bytes, host.pools
        self._store, self._prefetches, self._pending = store, prefetches, pending
        self.left = hottest.Prefixes()

    def remember(self) -> None:
        if self._pending.of(_Note):
            return  # the last list is still being written
        if spans := self._core.hot_spans(HOST):  # an empty list would replace that of another process
            content = hottest.encode(spans, self._page_bytes, self._pools[0].total)
            self._pending.add(_Note(hottest.ListWrite(self._store, content).done))

    def begin(self) -> None:
        read = hottest.ListRead(self._store, self._page_bytes, self._pools[0].total)
        self._pending.add(Polled(lambda: read.mark if read.done() else 0, partial(self._compare, read)))

    def go_on(self) -> None:
        """Prefetches the listed prefixes, few at a time, after those that requests ask for."""
        while self.left and len(self._prefetches) < max(1, self._store.config.max_prefetches // 2):
            if not all(pool.free for pool in self._pools):
                self.left = hottest.Prefixes()  # the pages on the host are hotter than the rest of the list
                return
            namespace, key = self.left.first
            if self._prefetches.overlaps(namespace, key):
                return  # a prefetch of a shared part must end first
            self.left.drop()
            self._prefetches.begin(namespace, key, min_pages=1)

    def _compare(self, read: hottest.ListRead, lowest: int) -> None:
        """Asks the ranks for the highest mark of their lists. They use the list only if the lowest mark is the same."""

        def take(outcome: int) -> None:
            if outcome == _MARKS - lowest:
                self.left = hottest.decode(read.value, self._page_bytes, self._pools[0].total)

        self._pending.add(Polled(lambda: _MARKS - read.mark, take))
