"""`Reader`: reads pages from storage into host pages that prefetches own, as many as they may own together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mainstem.cache.tree import Ids
from mainstem.tiers.host.backup import Backups
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.pending import PendingList
from mainstem.tiers.prefetch.missed import Cause
from mainstem.tiers.prefetch.plan import Plan
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.store import Store

log = logging.getLogger(__name__)


class Reader:
    """Reads for all prefetches, and counts what they could not bring.

    Args:
        private_pages: returns the number of host pages of a component that prefetches own.

    Attributes:
        late: pages that were computed although storage has them, or may have them, by cause.
        short: pages that the first component alone could have gone further, by the component that stood in the way.
        host, backups, store, rows, pending, private_pages: as given, for prefetches.
    """

    def __init__(
        self,
        host: HostPages,
        backups: Backups,
        store: Store,
        rows: Sequence[Row],
        pending: PendingList,
        private_pages: Callable[[int], int],
    ) -> None:
        self.late: Counter[Cause] = Counter()
        self.short: Counter[str] = Counter()
        self.host, self.backups, self.store, self.rows, self.pending = host, backups, store, tuple(rows), pending
        self.stored = {row.number: row for row in rows}
        self.private_pages = private_pages

    def allocate(self, namespace: bytes, row: int, n: int) -> Ids:
        """Allocates private pages of a component for a batch of a namespace.

        At most n, as many as a call reads, and as many as prefetches may hold; none without room.
        """
        limit = self._share(row) - self.private_pages(row)
        needed = [0] * len(self.host.pools)
        needed[row] = max(0, min(n, limit, self.store.config.batch_pages if row in self.stored else n))
        allocated = self.host.allocate(needed, namespace)
        return np.empty(0, np.int32) if allocated is None else allocated[row]

    def room(self, own: int) -> int:
        """Returns how many host pages of the first component a prefetch may hold that owns so many of them now."""
        return self._share(0) - self.private_pages(0) + own

    def read(self, row: int, names: Sequence[bytes], page_ids: Ids) -> StoreCall[int] | None:
        """Begins to read pages of a component; None: they have no content."""
        stored = self.stored.get(row)
        if stored is None:
            return None
        return self.store.read(stored, names, self.host.memory.slots(row, page_ids.tolist()))

    def note_short(self, plan: Plan, depth: int) -> tuple[int, str]:
        """Counts what stood in the way where the first component alone would have gone further.

        Returns how many pages further, and the component in the way.
        """
        pages, row = plan.in_the_way(depth)
        if not pages:
            return 0, ""
        name = self.host.tree.names[row]
        if name not in self.short:
            log.info("storage has %d pages further than its %s allows; more of this is only counted", pages, name)
        self.short[name] += pages
        return pages, name

    def _share(self, row: int) -> int:
        return max(1, int(self.host.pools[row].total * self.store.config.prefetch_host_share))
