"""The host tier: what it is made of, `HostTier`, and its pages, `HostPages`: what is evicted when a part needs some.

`HostPages` knows pools and the tree. Of the operations that ask for pages it knows only that waiting writes give way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstem._core import Pool
from mainstem.cache.tree import HOST, Ids, Tree
from mainstem.errors import CorruptTree
from mainstem.settings.engine import HostPolicy
from mainstem.tiers.host.transfer import HostMemory
from mainstem.tiers.pending import Agree
from mainstem.tiers.storage.write import Writes


@dataclass(frozen=True, slots=True)
class HostTier:
    """The host tier of a cache.

    Args:
        memory: the host pages and the copies to and from them.
        policy: what goes to the host, and what comes back.
        pages: number of host pages of each component; None: `memory.pages` of the only one.
        agree: all-reduce that takes the element-wise minimum of the votes of all ranks. Every rank calls it equally
            often, with equally many votes. None: there is one rank.
    """

    memory: HostMemory
    policy: HostPolicy = HostPolicy()
    pages: tuple[int, ...] | None = None
    agree: Agree | None = None


class HostPages:
    """The pages of the host.

    Args:
        memory: their contents.
        writes: the queue of writes to storage, whose pages are locked; None without storage.

    Attributes:
        tree, memory, pools: as given, for the parts.
    """

    def __init__(self, tree: Tree, memory: HostMemory, pools: Sequence[Pool], writes: Writes | None) -> None:
        self.tree, self.memory, self.pools = tree, memory, tuple(pools)
        self._writes = writes

    def allocate(self, needed: Sequence[int], ns: bytes) -> list[Ids] | None:
        """Allocates so many private pages of each component, evicting others for them; None without room.

        `ns`: the encoded namespace, or its owner, that they are for.
        """
        if not all(self._make_room(row, n, ns) for row, n in enumerate(needed)):
            return None
        return [pool.allocate(n) for pool, n in zip(self.pools, needed, strict=True)]

    def publish(self, page_ids: Sequence[Ids]) -> None:
        """Hands private pages of each component to the tree."""
        for pool, ids in zip(self.pools, page_ids, strict=True):
            pool.publish(ids)
        self.settle()

    def settle(self) -> None:
        """Evicts what owners have beyond their maxima, as far as it is not in use."""
        for row, component in enumerate(self.tree.names):
            while (over := self.tree.core.beyond_maximum(row, HOST))[1]:
                freed = self.tree.evict_for(over[0], over[1], component, HOST)
                self._reclaim(freed)
                if not len(freed[row]):
                    break

    def release(self, page_ids: Sequence[Ids]) -> None:
        """Frees private pages of each component."""
        for pool, ids in zip(self.pools, page_ids, strict=True):
            pool.release(ids)

    def flush(self) -> int:
        """Evicts every unlocked page; returns how many of the first component were freed."""
        return self._reclaim(self.tree.flush(HOST))

    def evict_removed(self) -> None:
        """Frees the pages of prefixes that were removed, as far as they are no longer in use."""
        self._reclaim(self.tree.evict_removed(HOST))

    def check(self, prefetched: Sequence[int]) -> None:
        """Verifies the pools, and that they agree with the tree; slow.

        Args:
            prefetched: pages of each component that prefetches own.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        for component, pool, owned in zip(self.tree.names, self.pools, prefetched, strict=True):
            pool.check()
            cells = [view.cells[component, HOST] for view in self.tree.nodes()]
            present = [page for cell in cells if cell.present for page in cell.ids.tolist()]
            in_flight = [page for cell in cells if cell.in_flight for page in cell.ids.tolist()]
            private = pool.private - owned
            for page_ids, owner, total in ((present, "cached", pool.cached), (in_flight, "private", private)):
                wrong = [page for page in page_ids if pool.owner(page) != owner]
                if wrong or total != len(page_ids):
                    raise CorruptTree(f"host pages of {component}: {wrong[:8]} are not {owner}, or {total} are")

    def held(self, row: int) -> list[int]:
        """Returns the pages of a component that are not free."""
        pool = self.pools[row]
        return [page for page in range(pool.total) if pool.owner(page) != "free"]

    def _make_room(self, row: int, pages: int, ns: bytes) -> bool:
        """Evicts pages of a component until `pages` are free; evicts none if that is impossible."""
        missing = pages - self.pools[row].free
        if missing <= 0:
            return True
        while missing > (evictable := self.tree.core.available(row, HOST, ns)):
            if self._writes is None or missing > evictable + self._writes.waiting(row):
                return False
            self._writes.give_way()  # so that a stuck store does not occupy the host
        self._reclaim(self.tree.evict_for(ns, missing, self.tree.names[row], HOST))
        return self.pools[row].free >= pages

    def _reclaim(self, freed: Sequence[Ids]) -> int:
        for pool, ids in zip(self.pools, freed, strict=True):
            pool.reclaim(ids)
        return len(freed[0])
