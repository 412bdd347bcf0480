"""Prefetches: what storage has of a prompt is copied to the host, before its request is scheduled.

    look up --found n pages--> read | read | read ... --verified, in order--> in the tree

Pages are read into private host pages. Those that arrived intact are added to the tree in order, after the prefetch's
`Anchor`. A prefetch serves every request that lacks the same page. How long its requests wait is decided in `waits`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mainstem.tiers.backup import Backups
from mainstem.tiers.host import HostPages
from mainstem.tiers.names import PageNames
from mainstem.tiers.pending import PendingList, Polled
from mainstem.tiers.prefill import PrefillCost
from mainstem.tiers.store import Store, StoreCall
from mainstem.tiers.waits import Cause, Wait
from mainstem.tree import HOST, IN_FLIGHT, PRESENT, Ids

Wanted = tuple[bytes, bytes]
"""A namespace, and the symbols up to the end of the first page that neither device nor host has."""


class Anchor:
    """The node that a prefetch's next pages follow, locked on the host.

    Args:
        host: the pages of the host.
        names: the names of the tree's pages.
        namespace, key: the prompt.
        pages: pages of the prompt that the tree has.

    Attributes:
        node: the node; 0 before the first page of a prompt.
        pages: pages of the prompt up to the node's end.
    """

    def __init__(self, host: HostPages, names: PageNames, namespace: bytes, key: bytes, pages: int) -> None:
        self._tree, self._core, self._host, self._names = host.tree, host.tree.core, host, names
        self._namespace, self._key = namespace, key
        self.node, self.pages = self._core.locate(namespace, key, pages) if pages else 0, pages
        self._core.lock(self.node, HOST)

    def look_up(self, store: Store) -> StoreCall[list[bytes]]:
        """Looks up the pages of the prompt after the node."""
        page_bytes = self._tree.page_bytes
        name = self._names.last(self._namespace, self.node)
        return store.look_up(name, self._key[self.pages * page_bytes :], page_bytes)

    @property
    def in_flight(self) -> bool:
        """Whether pages must wait, because those of the node are in flight on the host."""
        return bool(self.node) and self._core.residency(self.node, 0, HOST) == IN_FLIGHT

    def extend(self, page_ids: Ids, names: Sequence[bytes]) -> tuple[int, int]:
        """Adds private pages with these names to the tree, and follows them. Pages of the tree take precedence.

        Returns how many of the pages are in the tree then, and how many of those are the given ones; others are freed.
        """
        if not len(page_ids) or (self.node and self._core.residency(self.node, 0, HOST) != PRESENT):
            self._host.release([page_ids])
            return 0, 0
        end = self.pages + len(page_ids)
        ids = np.zeros(end, np.int32)
        ids[self.pages :] = page_ids
        key = self._key[: end * self._tree.page_bytes]
        node, length, _, theirs = self._core.insert(self._namespace, key, 0, [ids], self.node, 0, HOST, True)
        kept = length // self._tree.page_size - self.pages
        ours = np.zeros(len(page_ids), bool)
        ours[:kept] = theirs[:kept] == page_ids[:kept]
        self._host.publish([page_ids[ours]])
        self._host.release([page_ids[~ours]])
        if kept:
            self._core.lock(node, HOST)
            self._core.unlock(self.node, HOST)
            self.node = node
            self._names.keep(node, names[kept - 1])
        self.pages += kept
        return kept, int(ours.sum())

    def release(self) -> None:
        """Unlocks the node."""
        self._core.unlock(self.node, HOST)


@dataclass(eq=False)
class _Read:
    """A batch of pages being read from storage into private host pages."""

    page_ids: Ids
    call: StoreCall[int]
    good: int = 0  # pages that arrived intact, from the first
    ended: bool = False


class Prefetch:
    """A copy of a prompt's pages from storage to the host. Created by `Tiers.prefetch`.

    Attributes:
        loaded: positions that it has added to the tree so far.
        users: number of requests that want it.
        shared: whether there was ever more than one.
        wanted: whether a request asked for it; no request waits for a prefetch of `warm`.
        ended: whether no more pages will arrive.
    """

    def __init__(
        self, prefetches: Prefetches, name: Wanted, anchor: Anchor, wait: Wait, pages: int, min_pages: int
    ) -> None:
        self.users, self.loaded = 1, 0
        self.shared = self.wanted = self.ended = False
        self._prefetches, self._name, self._anchor, self._wait = prefetches, name, anchor, wait
        self._store, self._pages, self._min_pages = prefetches.store, pages, min_pages
        self._first = self._asked = anchor.pages  # pages in the tree at the start, and pages in the tree or being read
        self._keys: list[bytes] = []  # of the pages that storage has, after the first ones
        self._reads: deque[_Read] = deque()
        self._looked_up = self._cut = self._expired = False
        self._lookup = lookup = anchor.look_up(self._store)
        prefetches.pending.add(Polled(lambda: 1 + len(lookup.value) if lookup.done() else 0, self._found))
        prefetches.pending.add(Polled(self._late, self._expire))

    @property
    def waiting(self) -> bool:
        """Whether the request should wait for more."""
        return not (self.ended or self._expired or self._store.config.prefetch == "best_effort")

    def revoke(self) -> None:
        """Withdraws one request. With none left, no more reads begin; pages being read are still kept."""
        self.users -= 1

    def private_pages(self) -> int:
        """Returns the number of host pages that are being read into and not in the tree yet."""
        return sum(len(read.page_ids) for read in self._reads)

    def _late(self) -> bool:
        """Whether a request should stop waiting, as this rank sees it."""
        return self.ended or self._wait.over or self._overdue()

    def _expire(self, outcome: int) -> None:
        """Ends the wait of its requests. If storage has not answered the lookup, it is marked as slow."""
        self._expired = True
        if self.wanted and self.users > 0:
            end = self._first + len(self._keys) if self._looked_up and not self._lookup.refused else self._pages
            self._prefetches.late[self._why()] += end - self._anchor.pages
        if self.wanted and not self._looked_up:
            self._store.gave_up(self._wait.waited_s)

    def _found(self, outcome: int) -> None:
        """Takes the result of the lookup: the keys of the pages that storage has."""
        keys = self._lookup.value[: outcome - 1]
        self._looked_up = True
        self._wait.answered(len(keys), self._lookup.took_s)
        if len(keys) >= self._min_pages:
            self._keys = keys
        self._go_on()

    def _arrived(self, read: _Read, outcome: int) -> None:
        """Adds the pages that were read to the tree, in order, and begins more reads."""
        host, counts = self._prefetches.host, self._prefetches.pending.counts
        read.good, read.ended = outcome - 1, True
        while self._reads and self._reads[0].ended:
            read = self._reads.popleft()
            good = read.good if not self._cut else 0
            kept, ours = self._anchor.extend(read.page_ids[:good], self._keys[self._anchor.pages - self._first :])
            counts["prefetched"] += ours
            counts["prefetch_dropped"] += good - ours
            self.loaded += ours * host.tree.page_size
            self._cut = self._cut or kept < len(read.page_ids)
            host.release([read.page_ids[good:]])
        self._go_on()

    def _overdue(self) -> bool:
        return self._lookup.overdue() or any(read.call.overdue() for read in self._reads)

    def _why(self) -> Cause:
        """Returns why no request waits for the missing pages."""
        if self._lookup.refused or self._store.breaker.open:
            return "breaker"
        if self._cut:
            return "fault"
        return "slow" if self._store.slow and not self._overdue() else "timeout"

    def _go_on(self) -> None:
        end = self._first + len(self._keys)
        config = self._store.config
        while self.users > 0 and not self._cut and self._asked < end and len(self._reads) < config.batches:
            page_ids = self._prefetches.allocate(min(config.batch_pages, end - self._asked))
            if len(page_ids):
                self._read(page_ids)
                continue
            if self._reads:
                break  # a read under way may make room
            if self.wanted and not self._expired:
                self._prefetches.late["host_room"] += end - self._asked
            end = self._asked
            self._keys = self._keys[: end - self._first]
        if not self._reads and self._looked_up and (self._cut or self.users <= 0 or self._asked >= end):
            self.ended = True
            self._anchor.release()
            self._prefetches.end(self._name)

    def _read(self, page_ids: Ids) -> None:
        """Begins to read the next pages into these."""
        keys = self._keys[self._asked - self._first :][: len(page_ids)]
        read = _Read(page_ids, self._store.read(keys, self._prefetches.host.memory.slots(page_ids.tolist())))
        self._reads.append(read)
        self._prefetches.pending.add(Polled(partial(self._vote, read), partial(self._arrived, read)))
        self._asked += len(keys)

    def _vote(self, read: _Read) -> int:
        """Votes once a batch has been read and its pages can be added to the tree."""
        return 1 + read.call.value if read.call.done() and not self._anchor.in_flight else 0


class Prefetches:
    """Begins prefetches, limits their number and the host pages that they hold.

    Args:
        host: the pages of the host.
        backups: copies the pages before those that are read.
        store: the store.
        names: the names of the tree's pages.
        cost: the estimate of what computing takes.
        pending: the list of everything under way.

    Attributes:
        late: pages that were computed although storage has them, or may have them, by cause.
        host, store, pending: as given, for its prefetches.
    """

    def __init__(
        self, host: HostPages, backups: Backups, store: Store, names: PageNames, cost: PrefillCost, pending: PendingList
    ) -> None:
        self.late: Counter[Cause] = Counter()
        self.host, self.store, self.pending = host, store, pending
        self._tree, self._backups, self._names, self._cost = host.tree, backups, names, cost
        self._under_way: dict[Wanted, Prefetch] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether as many are under way as may be."""
        return len(self) >= self.store.config.max_prefetches

    def ask(self, namespace: bytes, key: bytes) -> Prefetch | None:
        """Begins a prefetch for a request, or returns one under way; see `Tiers.prefetch`."""
        page_bytes = self._tree.page_bytes
        pages = max(len(key) - self._tree.keys.symbol_bytes, 0) // page_bytes  # one token is always computed
        min_pages = max(1, -(-self.store.config.prefetch_min_tokens // self._tree.page_size))
        prefetch = self.begin(namespace, key[: pages * page_bytes], min_pages)
        if prefetch is not None:
            prefetch.wanted = True
        return prefetch

    def begin(self, namespace: bytes, key: bytes, min_pages: int) -> Prefetch | None:
        """Begins a prefetch of whole pages. With fewer than `min_pages` missing or found, nothing is read."""
        name, have = self._missing(namespace, key)
        pages = len(key) // self._tree.page_bytes
        if pages - have < min_pages:
            return None
        # A prefetch of the same missing page serves both.
        if (same := self._under_way.get(name)) is not None:
            same.users += 1
            same.shared = True
            return same
        if self.full:
            self.pending.counts["prefetch_skipped"] += 1
            self.late["limit"] += pages - have
            return None
        anchor = Anchor(self.host, self._names, namespace, key, have)
        if anchor.node:
            self._backups.begin(anchor.node)
        self.pending.counts["prefetches"] += 1
        wait = Wait(self.store, self._cost, self._tree.page_size, have, pages)
        self._under_way[name] = prefetch = Prefetch(self, name, anchor, wait, pages, min_pages)
        return prefetch

    def overlaps(self, namespace: bytes, key: bytes) -> bool:
        """Whether a prefetch is under way of the first page of a prefix that neither device nor host has."""
        return self._missing(namespace, key)[0] in self._under_way

    def private_pages(self) -> int:
        """Returns the number of host pages that prefetches own."""
        return sum(prefetch.private_pages() for prefetch in self._under_way.values())

    def allocate(self, n: int) -> Ids:
        """Allocates private pages of the host, at most n and as many as prefetches may hold; none without room."""
        limit = int(self.host.pools[0].total * self.store.config.prefetch_host_share)
        allocated = self.host.allocate([max(0, min(n, limit - self.private_pages()))])
        return np.empty(0, np.int32) if allocated is None else allocated[0]

    def end(self, name: Wanted) -> None:
        """Notes that a prefetch has ended."""
        del self._under_way[name]

    def _missing(self, namespace: bytes, key: bytes) -> tuple[Wanted, int]:
        """Returns the first page of a prefix that neither device nor host has, and the number of pages before it."""
        here, _, below = self._tree.core.peek(namespace, key, 0, False)
        have = (here + below) // self._tree.page_size
        return (namespace, key[: (have + 1) * self._tree.page_bytes]), have
