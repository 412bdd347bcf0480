"""`Tiers`: decides which pages move to the host and to storage and back, and when.

    device  --back up-->  host  --write-->  storage
       ^                   |  ^                |
       +------- load ------+  +--- prefetch ---+

Everything under way is a `Pending` in one list, in the order in which it began. `poll` collects their votes, agrees on
them with the other ranks, and settles what has ended. So every change of the tree happens at a `poll`, in the same
order on every rank. A transfer locks the pages that it reads, and owns those that it writes until it is settled:

    back up     host pages in flight on their node; present once settled, freed after a failure
    load        private device pages of one lease, which publishes them once settled (`Load`)
    prefetch    private host pages; in the tree once settled, if their verified content arrived (`Prefetch`)
    write       host pages locked in the tree

The host holds a connected prefix from the root: a copy fails if its parent's fails. The tiers handle ids and bytes, no
tensors, and use storage through `Store` only. One thread at a time, as in a scheduler.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from mainstem import _core
from mainstem._core import Lease, Pool
from mainstem.errors import BadArgument, CorruptTree, OutOfPages, StaleHandle, check_integer
from mainstem.keys import Encoded, TokenLike
from mainstem.namespaces import NamespaceLike, encode_namespace
from mainstem.tiers import hottest
from mainstem.tiers.names import PageNames
from mainstem.tiers.prefill import PrefillCost
from mainstem.tiers.store import Store, StoreCall, Written
from mainstem.tiers.transfer import HostMemory, LayerTicket, Move, Ticket
from mainstem.tiers.waits import LATE, Cause, Wait
from mainstem.tree import IN_FLIGHT, PRESENT, Tree

log = logging.getLogger(__name__)

DEVICE, HOST = 0, 1
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
Agree = Callable[[Sequence[int]], Sequence[int]]
Ids = NDArray[np.int32]
_Wanted = tuple[bytes, bytes]  # a namespace, and the symbols up to the end of the first missing page

_DRAIN_POLL_S = 0.005
_FAILED = 1  # the lowest vote once it has ended; 0 before
_ARRIVED = 2
_MARKS = 1 << 60  # above every mark of a list


def check_host_policy(write: str, hits: int, load_min_tokens: int) -> None:
    """Checks the fields of a `HostTier` that do not depend on the memory.

    Raises:
        BadArgument: names the field and its range.
    """
    if write not in get_args(WritePolicy):
        raise BadArgument("write", write, "one of " + ", ".join(get_args(WritePolicy)))
    check_integer("hits", hits, 1, 2**31 - 1)
    check_integer("load_min_tokens", load_min_tokens, 1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class HostTier:
    """The host tier of a cache.

    Args:
        memory: the host pages and the copies to and from them.
        write: when pages are backed up: "write_through": once they are published; "write_through_selective": once
            they were hit `hits` times; "write_back": when they are evicted from the device.
        hits: for "write_through_selective".
        load_min_tokens: fewer tokens are computed rather than loaded.
        pages: number of host pages of each component; None: `memory.pages` of the only one.
        agree: all-reduce that takes the element-wise minimum of the votes of all ranks. Every rank calls it equally
            often, with equally many votes. None: there is one rank.

    Raises:
        BadArgument: names the field and its range.
    """

    memory: HostMemory
    write: WritePolicy = "write_through"
    hits: int = 2
    load_min_tokens: int = 32
    pages: tuple[int, ...] | None = None
    agree: Agree | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        check_host_policy(self.write, self.hits, self.load_min_tokens)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of the tiers, in pages unless stated otherwise.

    Args:
        host_total, host_free, host_cached, host_private: pages of the host; private ones are being written to.
        backed_up: copied to the host. backup_failed: the copy failed. backup_skipped: the host had no room.
        loaded: copied to the device. load_failed: the copy failed. load_skipped: the device had no room.
        prefetches: prefetches begun. prefetch_skipped: prefetches not begun, because too many were under way.
        prefetched: read from storage into the tree. prefetch_dropped: read, but not added to the tree.
        stored: written to storage. write_dropped: not written: the queue was full, or they were dropped from it.
        queued: waiting to be written, or being written.
        late: pages that storage has, or may have, and that were computed nevertheless, by cause: see `LATE`.
        faults: faults of storage, by cause.
        breaker_open: whether calls to storage are stopped. breaker_openings: how often that happened.
        under_way: transfers and calls that have not ended.
    """

    host_total: int
    host_free: int
    host_cached: int
    host_private: int
    backed_up: int
    backup_failed: int
    backup_skipped: int
    loaded: int
    load_failed: int
    load_skipped: int
    prefetches: int
    prefetch_skipped: int
    prefetched: int
    prefetch_dropped: int
    stored: int
    write_dropped: int
    queued: int
    late: dict[str, int]
    faults: dict[str, int]
    breaker_open: bool
    breaker_openings: int
    under_way: int


class Pending(ABC):
    """Something under way. It ends once."""

    @abstractmethod
    def vote(self) -> int:
        """Returns 0 until it has ended on this rank; then 1 or more, higher for a better outcome."""

    @abstractmethod
    def settle(self, outcome: int) -> None:
        """Applies the outcome once it has ended on every rank; `outcome` is the lowest of their votes."""


P = TypeVar("P", bound=Pending)


class Tiers:
    """The tiers below the device, for one tree.

    Args:
        tree: the tree; it must have two tiers.
        pools: the pools of device pages, by component.
        host: the host tier.
        store: the storage tier, if there is one.
        core: the core of the cache that creates leases; None for engines with an allocator of their own.
        sleep: waits for a number of seconds, for `drain`.

    Attributes:
        prefill: the estimate of what computing takes, which the engine feeds; it bounds the wait for storage.

    Raises:
        BadArgument: the tree has another number of tiers, or storage is given for more than full attention.
    """

    def __init__(
        self,
        tree: Tree,
        pools: Sequence[Pool],
        host: HostTier,
        store: Store | None = None,
        core: _core.Cache | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if tree.tiers != 2:
            raise BadArgument("tiers of the tree", tree.tiers, "2: device and host")
        if store is not None and len(tree.components) > 1:
            raise BadArgument("store", store, "None: storage holds full attention only")
        sizes = host.pages or (host.memory.pages,)
        if len(sizes) != len(tree.components) or len(pools) != len(tree.components):
            raise BadArgument("pages", sizes, f"a number of pages for each of {len(tree.components)} components")
        if sizes[0] > host.memory.pages:
            raise BadArgument("pages", sizes, f"at most the {host.memory.pages} that the memory has")
        self.tree, self.host, self.store = tree, host, store
        self.host_pools = tuple(Pool(pages) for pages in sizes)
        self.counts: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.prefill = PrefillCost()
        self._pools, self._core_cache, self._sleep = tuple(pools), core, sleep
        self._core, self._memory = tree.core, host.memory
        self._pending: list[Pending] = []
        self._flights: dict[int, _Backup] = {}  # by node whose host pages are in flight
        self._prefetches: dict[_Wanted, Prefetch] = {}
        self._writes: deque[_Write] = deque()  # waiting
        self._writing = self._queued = 0
        self._warm = hottest.Prefixes()
        self._page_bytes = tree.page_size * tree.keys.symbol_bytes
        self.names = None if store is None else PageNames(tree.core, store.sealer, self._page_bytes)
        if store is not None:
            store.register(host.memory.regions())

    # ---------------------------------------------------------------- what a scheduler calls

    @property
    def busy(self) -> bool:
        """Whether anything is under way that `poll` will settle."""
        return bool(self._pending or self._warm)

    @property
    def can_prefetch(self) -> bool:
        """Whether there is storage, and fewer than `max_prefetches` are under way."""
        return self.store is not None and len(self._prefetches) < self.store.config.max_prefetches

    @property
    def copying(self) -> bool:
        """Whether a transfer holds device pages, which it releases when it ends."""
        return any(isinstance(item, (_Backup, Load)) for item in self._pending)

    def poll(self) -> None:
        """Settles what has ended and begins what is due. Does not block."""
        self._settle(self._pending)
        self._copy_down()
        if self.store is not None:
            self._begin_writes(self.store.config.writes - self._writing)
        self._warm_up()

    def load(self, lease: Lease) -> Load | None:
        """Starts to copy what the host has after a lease's hit into private pages of the lease.

        Returns None if the host has fewer than `load_min_tokens`, or the device has no room.

        Raises:
            BadArgument: the lease has reserved pages already.
            LeaseClosed: the lease has ended.
        """
        if lease.loadable < self.host.load_min_tokens:
            return None
        pages = lease.loadable // self.tree.page_size
        try:
            number, pairs = lease.begin_load()
        except OutOfPages:
            self.counts["load_skipped"] += pages
            return None
        moves = [Move(row, source, target) for row, (source, target) in enumerate(pairs) if len(source)]
        return self._add(Load(self, lease, number, self._memory.up(moves), pages))

    def prefetch(self, tokens: TokenLike | Encoded, namespace: NamespaceLike = None) -> Prefetch | None:
        """Starts to look up in storage what neither device nor host has of a prompt.

        Returns None if there is no storage, too little is missing, or too many prefetches are under way.

        Raises:
            BadTokens: a token is out of range.
        """
        if self.store is None:
            return None
        key = tokens.symbols if isinstance(tokens, Encoded) else self.tree.keys.encode(tokens)
        pages = max(len(key) - self.tree.keys.symbol_bytes, 0) // self._page_bytes  # one token is always computed
        min_pages = max(1, -(-self.store.config.prefetch_min_tokens // self.tree.page_size))
        prefetch = self._prefetch(encode_namespace(namespace), key[: pages * self._page_bytes], min_pages)
        if prefetch is not None:
            prefetch.wanted = True
        return prefetch

    def back_up(self, node: int, hits: int = 0) -> bool:
        """Starts to copy what the host lacks of the prefix that ends at a node, as far as it was hit `hits` times.

        Returns whether everything that the host lacked is under way or present.

        Raises:
            StaleHandle: the node was evicted.
        """
        held = self._hold(node, hits)
        if not held:
            return not self._core.lacking(node, DEVICE, HOST, hits)
        above = self._flights.get(self._core.in_flight_above(held[-1], HOST))
        targets = self._host_room(held)
        if targets is None:
            for at in held:
                self._unlock_node(at)
            return False
        moves = [self._attach(held, row, ids) for row, ids in enumerate(targets)]
        ticket = self._memory.down([move for move in moves if len(move.source)])
        backup = self._add(_Backup(self, held, ticket, above, [move.target for move in moves]))
        self._flights.update(dict.fromkeys(held, backup))
        return not self._core.lacking(node, DEVICE, HOST, hits)

    def make_room(self, row: int, pages: int) -> None:
        """For "write_back": backs up what the host lacks, waits for it, then frees device pages of a component."""
        component = self.tree.components[row].name
        while pages > 0 and (victim := self.tree.next_victim(component)):
            size = len(self._core.own_ids(victim, row, DEVICE))
            self.tree.lock(victim, DEVICE)  # so that eviction on the host does not join this node to another
            try:
                if self.back_up(victim):
                    self._wait_for_backups()
            finally:
                self.tree.unlock(victim, DEVICE)
            freed = self.tree.evict(min(pages, size), component)
            for pool, ids in zip(self._pools, freed, strict=True):
                pool.reclaim(ids)
            if not len(freed[row]):
                return
            pages -= len(freed[row])

    def flush(self) -> int:
        """Evicts every unlocked host page and returns the number freed. Storage keeps its pages."""
        freed = self.tree.flush(HOST)
        for pool, ids in zip(self.host_pools, freed, strict=True):
            pool.reclaim(ids)
        return len(freed[0])

    def forget(self, namespace: bytes) -> None:
        """Drops what was removed from a namespace: host pages, waiting writes, and pages in storage."""
        if self.store is not None:
            for write in [write for write in self._writes if self._core.removed(write.node)]:
                self._writes.remove(write)
                write.give_up()
            keys = self._removed_keys(namespace)
            if keys:
                self._add(_Asked(self.store.delete(keys)))
        for pool, ids in zip(self.host_pools, self.tree.evict_removed(HOST), strict=True):
            pool.reclaim(ids)

    def _removed_keys(self, namespace: bytes) -> list[bytes]:
        assert self.names is not None
        keys: list[bytes] = []
        for (node, *_, start, _), _, _, removed, *_ in self._core.nodes(namespace):
            if removed:
                keys += self.names.of(node, start)[1]
        return keys

    # ---------------------------------------------------------------- restart

    def remember(self) -> None:
        """Stores the list of the hottest prefixes, for `warm`. All ranks call it between the same polls."""
        if self.store is None:
            return
        if any(isinstance(item, _Note) for item in self._pending):
            return  # the last list is still being written
        if spans := self._core.hot_spans(HOST):  # an empty list would replace that of another process
            content = hottest.encode(spans, self._page_bytes, self.host_pools[0].total)
            self._add(_Note(hottest.Keeping(self.store, content)))

    def warm(self) -> None:
        """Starts to prefetch the prefixes that `remember` listed, as far as the host has room."""
        if self.store is not None:
            self._add(_Warm(self, hottest.Finding(self.store, self._page_bytes, self.host_pools[0].total)))

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything under way, and what follows from it, has ended. Returns whether it has."""
        for _ in range(max(1, int(timeout_s / _DRAIN_POLL_S))):
            self.poll()
            if not self.busy:
                return True
            self._sleep(_DRAIN_POLL_S)
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the storage tier; calls that do not return within `timeout_s` are abandoned."""
        if self.store is not None:
            self._begin_writes(len(self._writes))
            self.store.close(timeout_s)

    # ---------------------------------------------------------------- statistics and checks

    def stats(self) -> TierStats:
        """Returns counts; all are maintained incrementally."""
        pool, counts, store = self.host_pools[0], self.counts, self.store
        return TierStats(
            host_total=pool.total,
            host_free=pool.free,
            host_cached=pool.cached,
            host_private=pool.private,
            backed_up=counts["backed_up"],
            backup_failed=counts["backup_failed"],
            backup_skipped=counts["backup_skipped"],
            loaded=counts["loaded"],
            load_failed=counts["load_failed"],
            load_skipped=counts["load_skipped"],
            prefetches=counts["prefetches"],
            prefetch_skipped=counts["prefetch_skipped"],
            prefetched=counts["prefetched"],
            prefetch_dropped=counts["prefetch_dropped"],
            stored=counts["stored"],
            write_dropped=counts["write_dropped"],
            queued=self._queued,
            late={cause: self.late[cause] for cause in LATE},
            faults={} if store is None else dict(store.faults),
            breaker_open=store is not None and store.breaker.open,
            breaker_openings=0 if store is None else store.breaker.openings,
            under_way=len(self._pending),
        )

    def check(self) -> None:
        """Verifies the pools of the host, and that they agree with the tree; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        for component, pool in zip(self.tree.components, self.host_pools, strict=True):
            pool.check()
            cells = [view.cells[component.name, HOST] for view in self.tree.nodes()]
            present = [page for cell in cells if cell.present for page in cell.ids.tolist()]
            in_flight = [page for cell in cells if cell.in_flight for page in cell.ids.tolist()]
            for page_ids, owner, total in ((present, "cached", pool.cached), (in_flight, "private", None)):
                wrong = [page for page in page_ids if pool.owner(page) != owner]
                if wrong or total not in (None, len(page_ids)):
                    raise CorruptTree(f"host pages of {component.name}: {wrong[:8]} are not {owner}, or {total} are")
            rest = sum(prefetch.private_pages() for prefetch in self._prefetches.values())
            if component is self.tree.components[0] and pool.private != len(in_flight) + rest:
                raise CorruptTree(f"{pool.private} host pages private: {len(in_flight)} in flight, {rest} prefetched")

    # ---------------------------------------------------------------- helpers

    def _add(self, pending: P) -> P:
        self._pending.append(pending)
        return pending

    def _settle(self, pending: Sequence[Pending]) -> None:
        """Settles those that have ended on every rank. What they begin is appended to the list."""
        while pending:
            votes: Sequence[int] = [item.vote() for item in pending]
            if self.host.agree is not None:
                votes = self.host.agree(votes)
            ended = [(item, vote) for item, vote in zip(pending, votes, strict=True) if vote]
            if not ended:
                return
            gone = {id(item) for item, _ in ended}
            self._pending = [item for item in self._pending if id(item) not in gone]
            for item, vote in ended:
                item.settle(vote)
            pending = [item for item in pending if id(item) not in gone]

    def _wait_for_backups(self) -> None:
        while backups := [item for item in self._pending if isinstance(item, _Backup)]:
            for backup in backups:
                backup.ticket.wait()
            self._settle(backups)

    def _copy_down(self) -> None:
        """Begins the copies that the write policy asks for, of what was matched or published since the last call."""
        if self._core_cache is None:
            return
        touched = self._core_cache.take_touched()
        if self.host.write == "write_back":
            return
        hits = self.host.hits if self.host.write == "write_through_selective" else 0
        for node in dict.fromkeys(touched):
            try:
                self.back_up(node, hits)
            except StaleHandle:
                continue  # evicted, or joined to the next node, which was touched too

    def _hold(self, node: int, hits: int) -> list[int]:
        """Locks the nodes to copy, from the top, on both tiers. Repeats, since a lock may split where a window begins.

        Stops before a node that is being copied: pages added to it since would be settled with that copy.
        """
        held: list[int] = []
        while True:
            lacking = self._core.lacking(node, DEVICE, HOST, hits)
            missing = list(takewhile(lambda at: at not in self._flights, lacking))
            new = [at for at in missing if at not in held]
            if not new:
                return missing
            for at in new:
                self._core.lock(at, DEVICE)
                self._core.lock(at, HOST)
            held += new

    def _unlock_node(self, node: int) -> None:
        self._core.unlock(node, DEVICE)
        self._core.unlock(node, HOST)

    def _host_room(self, nodes: Sequence[int]) -> list[Ids] | None:
        """Allocates host pages for what nodes hold on the device only, by component; None without room."""
        rows = range(len(self.host_pools))
        needed = [sum(len(self._missing(node, row)) for node in nodes) for row in rows]
        if not all(self._make_host_room(row, n) for row, n in zip(rows, needed, strict=True)):
            self.counts["backup_skipped"] += needed[0]
            return None
        return [pool.allocate(n) for pool, n in zip(self.host_pools, needed, strict=True)]

    def _make_host_room(self, row: int, pages: int) -> bool:
        """Evicts host pages until `pages` are free; evicts none if that is impossible."""
        missing = pages - self.host_pools[row].free
        if missing <= 0:
            return True
        waiting = sum(write.pages for write in self._writes)
        while missing > self._evictable(row):
            if not self._writes or missing > self._evictable(row) + waiting:
                return False
            waiting -= self._writes[0].pages
            self._writes.popleft().give_up()  # so that a stuck store does not occupy the host
        freed = self.tree.evict(missing, self.tree.components[row].name, HOST)
        for pool, ids in zip(self.host_pools, freed, strict=True):
            pool.reclaim(ids)
        return self.host_pools[row].free >= pages

    def _evictable(self, row: int) -> int:
        present, locked, _ = self._core.counts(row, HOST)
        return present - locked

    def _missing(self, node: int, row: int) -> Ids:
        """Returns the device pages of a node that the host lacks."""
        if self._core.residency(node, row, HOST) in (PRESENT, IN_FLIGHT):
            return np.empty(0, np.int32)
        return self._core.own_ids(node, row, DEVICE)

    def _attach(self, nodes: Sequence[int], row: int, ids: Ids) -> Move:
        """Attaches host pages, in flight, to nodes for one component; returns the copy to make."""
        sources, at = [np.empty(0, np.int32)], 0
        for node in nodes:
            source = self._missing(node, row)
            if len(source):
                self._core.attach(node, row, HOST, ids[at : at + len(source)], False)
                sources.append(source)
                at += len(source)
        return Move(row, np.concatenate(sources), ids)

    # storage

    def _prefetch(self, namespace: bytes, key: bytes, min_pages: int) -> Prefetch | None:
        """Begins a prefetch of whole pages. With fewer than `min_pages` missing or found, nothing is read."""
        assert self.store is not None
        name, have = self._wanted(namespace, key)
        if len(key) // self._page_bytes - have < min_pages:
            return None
        # A prefetch of the same missing page serves both.
        if (same := self._prefetches.get(name)) is not None:
            same.users += 1
            same.shared = True
            return same
        if len(self._prefetches) >= self.store.config.max_prefetches:
            self.counts["prefetch_skipped"] += 1
            self.late["limit"] += len(key) // self._page_bytes - have
            return None
        anchor = self._core.locate(namespace, key, have) if have else 0
        self._core.lock(anchor, HOST)
        if anchor:
            self.back_up(anchor)
        self.counts["prefetches"] += 1
        self._prefetches[name] = prefetch = Prefetch(self, name, key, have, anchor, min_pages)
        prefetch.begin()
        return prefetch

    def _wanted(self, namespace: bytes, key: bytes) -> tuple[_Wanted, int]:
        """Returns the first page of a prefix that neither device nor host has, and the number of pages before it."""
        here, _, below = self._core.peek(namespace, key, 0, False)
        have = (here + below) // self.tree.page_size
        return (namespace, key[: (have + 1) * self._page_bytes]), have

    def _prefetch_room(self) -> int:
        """Returns how many more host pages prefetches may hold."""
        assert self.store is not None
        limit = int(self.host_pools[0].total * self.store.config.host_fraction)
        return limit - sum(prefetch.private_pages() for prefetch in self._prefetches.values())

    def _write(self, node: int, begin: int, named: tuple[bytes, list[bytes]]) -> None:
        """Queues the pages from `begin` to a node's end for storage; drops them if the queue has no room."""
        assert self.store is not None
        if self._core.removed(node):
            return
        parent, keys = named
        pages = len(keys)
        if self._queued and self._queued + pages > self.store.config.queue_pages:
            self.counts["write_dropped"] += pages
            return
        self._core.lock(node, HOST)
        self._queued += pages
        self._writes.append(self._add(_Write(self, node, begin, parent if begin else None, keys)))

    def _begin_writes(self, limit: int) -> None:
        while self.store is not None and self._writes and limit > 0:
            limit -= 1
            self._writing += 1
            self._writes.popleft().begin(self.store)

    def _warm_up(self) -> None:
        """Prefetches the listed prefixes, few at a time, after those that requests ask for."""
        while (
            self._warm
            and self.store is not None
            and len(self._prefetches) < max(1, self.store.config.max_prefetches // 2)
        ):
            if not self.host_pools[0].free:
                self._warm = hottest.Prefixes()  # the pages on the host are hotter than the rest of the list
                return
            namespace, key = self._warm.first
            if self._wanted(namespace, key)[0] in self._prefetches:
                return  # a prefetch of a shared part must end first
            self._warm.drop()
            self._prefetch(namespace, key, min_pages=1)


class _Backup(Pending):
    """A copy of nodes to the host. It fails if the copy of their parents fails."""

    def __init__(
        self, tiers: Tiers, nodes: list[int], ticket: Ticket, above: _Backup | None, targets: list[Ids]
    ) -> None:
        self.ticket = ticket
        self._tiers, self._nodes, self._targets = tiers, nodes, targets
        self._above, self._failed = above, False
        self._begin = tiers._core.start(nodes[0])  # a split may move it
        self._below: list[_Backup] = []  # not ended
        if above is not None:
            above._below.append(self)

    def vote(self) -> int:
        if not self.ticket.done():
            return 0
        if self._above is not None and not self._above._failed:
            return 0  # not before its parents
        return _FAILED if self._above is not None or self.ticket.error is not None else _ARRIVED

    def settle(self, outcome: int) -> None:
        tiers = self._tiers
        if outcome == _FAILED:
            self._failed = True
            tiers.counts["backup_failed"] += len(self._targets[0])
            if self.ticket.error is not None:
                log.warning("a copy to the host failed: %s", self.ticket.error)
            self._cancel()
            return
        # Named before the commit, written or not: after it the node may be joined to what its name derives from.
        named = None if tiers.names is None else tiers.names.of(self._nodes[-1], self._begin)
        for node in self._nodes:
            tiers._core.commit(node, HOST)
        for pool, ids in zip(tiers.host_pools, self._targets, strict=True):
            pool.publish(ids)
        tiers.counts["backed_up"] += len(self._targets[0])
        if named is not None:
            tiers._write(self._nodes[-1], self._begin, named)
        for backup in self._below:
            backup._above = None
        self._end()

    def _cancel(self) -> None:
        """Frees what was in flight, once no copy below is under way."""
        if self._below:
            return
        tiers = self._tiers
        for node in reversed(self._nodes):
            for pool, ids in zip(tiers.host_pools, tiers._core.cancel(node, HOST), strict=True):
                pool.release(ids)
        self._end()
        if self._above is not None:
            self._above._below.remove(self)
            if self._above._failed:
                self._above._cancel()

    def _end(self) -> None:
        for node in self._nodes:
            del self._tiers._flights[node]
        for node in self._nodes:
            self._tiers._unlock_node(node)


class Load(Pending):
    """A copy of host pages into private device pages of a lease. Created by `Tiers.load`.

    The pages can be read layer by layer as they arrive (`ticket`), and are published once all have arrived. A lease may
    be closed at any time: its pages are freed when the copy has ended.

    Attributes:
        ticket: the copy's ticket.
        pages: pages of the sequence; where all layers slide, those before the window are counted but not copied.
        arrived: None while under way; then whether all pages arrived. If not, the lease's hit is unchanged.
    """

    def __init__(self, tiers: Tiers, lease: Lease, number: int, ticket: LayerTicket, pages: int) -> None:
        self.ticket, self.pages = ticket, pages
        self.arrived: bool | None = None
        self._tiers, self._lease, self._number = tiers, lease, number

    def wait(self) -> bool:
        """Waits until it has ended and settles it. Returns whether it arrived."""
        while self.arrived is None:
            self.ticket.wait()
            self._tiers._settle([self])
        return self.arrived

    def vote(self) -> int:
        """Votes once the copy has ended."""
        if not self.ticket.done():
            return 0
        return _ARRIVED if self.ticket.error is None else _FAILED

    def settle(self, outcome: int) -> None:
        """Publishes the pages if they arrived."""
        self.arrived = outcome == _ARRIVED
        self._tiers.counts["loaded" if self.arrived else "load_failed"] += self.pages
        if self._lease.closed:
            assert self._tiers._core_cache is not None
            self._tiers._core_cache.end_load(self._number)
        else:
            self._lease.end_load(self.arrived)


class Prefetch:
    """A copy of a prompt's pages from storage to the host. Created by `Tiers.prefetch`.

        look up --found n pages--> read | read | read ... --verified, in order--> in the tree

    Attributes:
        loaded: positions that it has added to the tree so far.
        users: number of requests that want it.
        shared: whether there was ever more than one.
        wanted: whether a request asked for it; no request waits for a prefetch of `warm`.
    """

    def __init__(self, tiers: Tiers, name: _Wanted, key: bytes, have: int, anchor: int, min_pages: int) -> None:
        assert tiers.store is not None and tiers.names is not None
        self.users, self.loaded, self.shared, self.wanted = 1, 0, False, False
        self._tiers, self._store, self._names, self._name = tiers, tiers.store, tiers.names, name
        self._namespace, self._key, self._min_pages = name[0], key, min_pages
        self._anchor = anchor  # the node that the next pages follow, locked on the host
        self._have = self._asked = have  # pages in the tree, and pages in the tree or being read
        self._keys: list[bytes] = []
        self._first = have
        self._reads: deque[_Read] = deque()
        self._looked_up = self._cut = self._ended = self._expired = False
        self._pages = len(key) // tiers._page_bytes
        self._wait = Wait(self._store, tiers.prefill, tiers.tree.page_size, have, self._pages)

    @property
    def waiting(self) -> bool:
        """Whether the request should wait for more."""
        return not (self._ended or self._expired or self._store.config.prefetch == "best_effort")

    @property
    def ended(self) -> bool:
        """Whether no more pages will arrive."""
        return self._ended

    def revoke(self) -> None:
        """Withdraws one request. With none left, no more reads begin; pages being read are still kept."""
        self.users -= 1

    def begin(self) -> None:
        """Begins the lookup."""
        tiers = self._tiers
        parent = self._names.last(self._namespace, self._anchor)
        missing = self._key[self._have * tiers._page_bytes :]
        self._lookup = self._store.look_up(parent, missing, tiers._page_bytes)
        tiers._add(_Lookup(self, self._lookup))
        tiers._add(_Expiry(self))

    def late(self) -> bool:
        """Whether a request should stop waiting, as this rank sees it."""
        return self._ended or self._wait.over or self._overdue()

    def expire(self) -> None:
        """Ends the wait of its requests. If storage has not answered the lookup, it is marked as slow."""
        self._expired = True
        if self.wanted and self.users > 0:
            end = self._first + len(self._keys) if self._looked_up and not self._lookup.refused else self._pages
            self._tiers.late[self._why()] += end - self._have
        if self.wanted and not self._looked_up:
            self._store.gave_up(self._wait.waited_s)

    def _overdue(self) -> bool:
        return self._lookup.overdue() or any(read.call.overdue() for read in self._reads)

    def _why(self) -> Cause:
        """Returns why no request waits for the missing pages."""
        if self._lookup.refused or self._store.breaker.open:
            return "breaker"
        if self._cut:
            return "fault"
        return "slow" if self._store.slow and not self._overdue() else "timeout"

    def looked_up(self, keys: list[bytes]) -> None:
        """Takes the result of the lookup: the keys of the pages that storage has."""
        self._looked_up = True
        self._wait.answered(len(keys), self._lookup.took_s)
        if len(keys) >= self._min_pages:
            self._keys = keys
        self._go_on()

    def arrived(self) -> None:
        """Adds the pages that were read to the tree, in order, and begins more reads."""
        while self._reads and self._reads[0].ended:
            read = self._reads.popleft()
            good = read.good if not self._cut else 0
            kept = self._adopt(read.page_ids[:good])
            self._cut = self._cut or kept < len(read.page_ids)
            self._tiers.host_pools[0].release(read.page_ids[good:])
        self._go_on()

    @property
    def anchored(self) -> bool:
        """Whether pages can be added after the anchor: not while the anchor itself is in flight on the host."""
        return not self._anchor or self._tiers._core.residency(self._anchor, 0, HOST) != IN_FLIGHT

    def private_pages(self) -> int:
        """Returns the number of host pages that are being read into and not in the tree yet."""
        return sum(len(read.page_ids) for read in self._reads)

    def _go_on(self) -> None:
        end = self._first + len(self._keys)
        config = self._store.config
        while self.users > 0 and not self._cut and self._asked < end and len(self._reads) < config.batches:
            if self._read(min(config.batch_pages, end - self._asked)):
                continue
            if self._reads:
                break  # a read under way may make room
            if self.wanted and not self._expired:
                self._tiers.late["host_room"] += end - self._asked
            end = self._asked
            self._keys = self._keys[: end - self._first]
        if not self._reads and self._looked_up and (self._cut or self.users <= 0 or self._asked >= end):
            self._end()

    def _read(self, n: int) -> bool:
        tiers, pool = self._tiers, self._tiers.host_pools[0]
        n = min(n, tiers._prefetch_room())
        if n <= 0 or not tiers._make_host_room(0, n):
            return False
        page_ids = pool.allocate(n)
        keys = self._keys[self._asked - self._first :][:n]
        call = self._store.read(keys, tiers._memory.slots(page_ids.tolist()))
        self._reads.append(tiers._add(_Read(self, page_ids, call)))
        self._asked += n
        return True

    def _adopt(self, page_ids: Ids) -> int:
        """Adds intact pages after the anchor; returns how many are in the tree then. Existing pages take precedence."""
        tiers, pool = self._tiers, self._tiers.host_pools[0]
        end = self._have + len(page_ids)
        if not len(page_ids):
            return 0
        if self._anchor and tiers._core.residency(self._anchor, 0, HOST) != PRESENT:
            pool.release(page_ids)
            tiers.counts["prefetch_dropped"] += len(page_ids)
            return 0
        ids = np.zeros(end, np.int32)
        ids[self._have :] = page_ids
        key = self._key[: end * tiers._page_bytes]
        node, length, _, theirs = tiers._core.insert(self._namespace, key, 0, [ids], self._anchor, 0, HOST, True)
        kept = length // tiers.tree.page_size - self._have
        ours = np.zeros(len(page_ids), bool)
        ours[:kept] = theirs[:kept] == page_ids[:kept]
        pool.publish(page_ids[ours])
        pool.release(page_ids[~ours])
        tiers.counts["prefetched"] += int(ours.sum())
        tiers.counts["prefetch_dropped"] += int((~ours).sum())
        self.loaded += int(ours.sum()) * tiers.tree.page_size
        if kept:
            tiers._core.lock(node, HOST)
            tiers._core.unlock(self._anchor, HOST)
            self._anchor = node
            self._names.keep(node, self._keys[self._have + kept - 1 - self._first])
        self._have += kept
        return kept

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._tiers._core.unlock(self._anchor, HOST)
            del self._tiers._prefetches[self._name]


class _Lookup(Pending):
    def __init__(self, prefetch: Prefetch, call: StoreCall[list[bytes]]) -> None:
        self._prefetch, self._call = prefetch, call

    def vote(self) -> int:
        return 1 + len(self._call.value) if self._call.done() else 0

    def settle(self, outcome: int) -> None:
        self._prefetch.looked_up(self._call.value[: outcome - 1])


class _Read(Pending):
    """A batch of pages being read from storage into private host pages."""

    def __init__(self, prefetch: Prefetch, page_ids: Ids, call: StoreCall[int]) -> None:
        self.page_ids, self.call = page_ids, call
        self.good, self.ended = 0, False
        self._prefetch = prefetch

    def vote(self) -> int:
        return 1 + self.call.value if self.call.done() and self._prefetch.anchored else 0

    def settle(self, outcome: int) -> None:
        self.good, self.ended = outcome - 1, True
        self._prefetch.arrived()


class _Expiry(Pending):
    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch

    def vote(self) -> int:
        return int(self._prefetch.late())

    def settle(self, outcome: int) -> None:
        self._prefetch.expire()


class _Write(Pending):
    """A write of a node's pages to storage. They are locked on the host."""

    def __init__(self, tiers: Tiers, node: int, begin: int, parent: bytes | None, keys: list[bytes]) -> None:
        self.node, self.pages = node, len(keys)
        self._tiers, self._begin = tiers, begin
        self._parent, self._keys = parent, keys
        self._call: StoreCall[Written] | None = None
        self._given_up = False

    def begin(self, store: Store) -> None:
        core, memory = self._tiers._core, self._tiers._memory
        slots = memory.slots(core.ids(self.node, 0, HOST)[self._begin :].tolist())
        self._call = store.write(self._parent, self._keys, slots)

    def give_up(self) -> None:
        """Drops a write that is waiting."""
        self._given_up = True
        self._tiers._queued -= self.pages
        self._tiers.counts["write_dropped"] += self.pages
        self._tiers._core.unlock(self.node, HOST)

    def vote(self) -> int:
        if self._given_up:
            return _ARRIVED
        if self._call is None or not self._call.done():
            return 0
        return _FAILED if self._call.value.gap else _ARRIVED

    def settle(self, outcome: int) -> None:
        if self._given_up:
            return
        tiers = self._tiers
        assert self._call is not None
        tiers._writing -= 1
        tiers._queued -= self.pages
        tiers.counts["stored"] += self._call.value.pages
        if outcome == _FAILED and tiers.names is not None:
            tiers._write(self.node, 0, tiers.names.of(self.node, 0))  # the whole path
        tiers._core.unlock(self.node, HOST)


class _Asked(Pending):
    """A call to the store whose result nothing depends on."""

    def __init__(self, asked: hottest.Keeping | StoreCall[bool]) -> None:
        self._asked = asked

    def vote(self) -> int:
        return int(self._asked.done())

    def settle(self, outcome: int) -> None:
        """Does nothing."""


class _Note(_Asked):
    """A write of the list of the hottest prefixes."""


class _Warm(Pending):
    """A read of the list of the hottest prefixes. Ranks use it only if lowest and highest mark are the same."""

    def __init__(self, tiers: Tiers, finding: hottest.Finding, lowest: int | None = None) -> None:
        self._tiers, self._finding, self._lowest = tiers, finding, lowest

    def vote(self) -> int:
        if not self._finding.done():
            return 0
        return self._finding.mark if self._lowest is None else _MARKS - self._finding.mark

    def settle(self, outcome: int) -> None:
        tiers = self._tiers
        if self._lowest is None:
            tiers._add(_Warm(tiers, self._finding, outcome))
        elif outcome == _MARKS - self._lowest:
            tiers._warm = hottest.decode(self._finding.value, tiers._page_bytes, tiers.host_pools[0].total)
