"""`Tiers`: moves pages to the host and to storage and back. It is a facade: each direction is a part of its own.

    device  --back up-->  host  --write-->  storage
       ^                   |  ^                |
       +------- load ------+  +--- prefetch ---+

Every part (`backup`, `load`, `write`, `prefetch`, `warm`) has its own state and limits, and adds what it begins to one
list (`pending`), which has the counts of all. `poll` settles what has ended, then asks the parts for what is due.

What has ended is applied by `PendingList.settle` only, in the order in which it began: normally at a `poll`, earlier
where a caller must wait (`Load.wait`, `make_room`). All other calls (prefetches, leases, `remove`, `flush`) change the
tree when they are made. The ranks make all these calls in the same order, so their trees stay equal. A transfer locks
the pages that it reads, and owns those that it writes until it is settled.

A part knows the parts that it uses: warming prefetches, a prefetch backs up what is before it, a backup takes room on
the host (`host`) and is written, and a waiting write gives its room up. The tiers handle ids and bytes, no tensors, and
use storage through `Store` only. One thread at a time, as in a scheduler.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mainstem import _core
from mainstem._core import Lease, Pool
from mainstem.cache.keys import Encoded, TokenLike
from mainstem.cache.namespaces import NamespaceLike, encode_namespace
from mainstem.cache.pool import PoolStats
from mainstem.cache.tree import HOST, Tree
from mainstem.errors import BadArgument, CorruptTree, OutOfPages
from mainstem.metric import Metric, each, gauge
from mainstem.tiers.costs import Costs
from mainstem.tiers.host.backup import Backups
from mainstem.tiers.host.load import Load
from mainstem.tiers.host.tier import HostPages, HostTier
from mainstem.tiers.pending import PendingList
from mainstem.tiers.prefetch.missed import LATE, Missed
from mainstem.tiers.prefetch.prefetch import Prefetch
from mainstem.tiers.storage.store import Store
from mainstem.tiers.storage.tier import StorageTier
from mainstem.tiers.storage.write import Writes

_DRAIN_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counts of the tiers, in pages unless stated otherwise.

    Args:
        host_pools: the host's pages by component, the first component first; private ones are being written to.
        host_total, host_free, host_cached, host_private: those of the first component alone.
        backed_up: copied to the host. backup_failed: the copy failed. backup_skipped: the host had no room.
        loaded: copied to the device. load_failed: the copy failed. load_skipped: the device had no room.
        prefetches: prefetches begun. prefetch_skipped: prefetches not begun, because too many were under way.
        prefetched: read from storage into the tree. prefetch_dropped: read, but not added to the tree.
        stored: written to storage. write_dropped: not written: the queue was full, or they were dropped from it.
        queued: waiting to be written, or being written.
        late: pages that storage has, or may have, and that were computed nevertheless, by cause: see `LATE`.
        prefetch_short: pages of the first component in storage that could not be used, by the component in the way.
        faults: faults of storage, by cause.
        breaker_open: whether calls to storage are stopped. breaker_openings: how often that happened.
        under_way: transfers and calls that have not ended.
        peer_requests: requests of other engines, by what was answered. peer_given_bytes: bytes of pages given to them.
        peer_faults: times that other engines did not give what was asked, by cause.
    """

    host_pools: dict[str, PoolStats]
    host_total: int
    host_free: int
    host_cached: int
    host_private: int
    backed_up: int = 0
    backup_failed: int = 0
    backup_skipped: int = 0
    loaded: int = 0
    load_failed: int = 0
    load_skipped: int = 0
    prefetches: int = 0
    prefetch_skipped: int = 0
    prefetched: int = 0
    prefetch_dropped: int = 0
    stored: int = 0
    write_dropped: int = 0
    queued: int = 0
    late: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LATE, 0))
    prefetch_short: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    breaker_open: bool = False
    breaker_openings: int = 0
    under_way: int
    peer_requests: dict[str, int] = field(default_factory=dict)
    peer_given_bytes: int = 0
    peer_faults: dict[str, int] = field(default_factory=dict)

    METRICS: ClassVar = (
        gauge("mainstem_host_pages", "Pages or slots of each component on the host, by owner",
            {("*", owner): f"host_pools.*.{owner}" for owner in ("free", "cached", "private", "total")},
            ("component", "owner")),
        Metric("mainstem_moved_pages", "Pages moved between tiers",
            {("device", "host"): "backed_up", ("host", "device"): "loaded", ("storage", "host"): "prefetched",
             ("host", "storage"): "stored"}, ("from", "to")),
        Metric("mainstem_dropped_pages", "Pages that were not moved, by reason",
            each("{}", "backup_failed", "backup_skipped", "load_failed", "load_skipped", "prefetch_dropped",
                 "write_dropped"), ("reason",)),
        Metric("mainstem_late_pages", "Pages computed although storage has (or may have) them, by cause",
            {("*",): "late.*"}, ("cause",)),
        Metric("mainstem_prefetch_short_pages", "Pages in storage that a component kept from being used",
            {("*",): "prefetch_short.*"}, ("component",)),
        Metric("mainstem_storage_faults", "Storage faults, by cause", {("*",): "faults.*"}, ("cause",)),
        Metric("mainstem_peer_requests", "Requests of other engines for pages, by outcome", {("*",): "peer_requests.*"},
            ("outcome",)),
        Metric("mainstem_peer_given_bytes", "Bytes of pages given to other engines", "peer_given_bytes"),
        Metric("mainstem_peer_faults", "Times that other engines did not give what was asked, by cause",
            {("*",): "peer_faults.*"}, ("cause",)),
        gauge("mainstem_storage_queued_pages", "Pages waiting for a write to storage", "queued"),
        gauge("mainstem_storage_breaker_open", "Whether the breaker stops calls to storage", "breaker_open"),
    )  # fmt: skip


class Tiers:
    """The tiers below the device, for one tree.

    Args:
        tree: the tree; it must have two tiers.
        pools: the pools of device pages, by component.
        store: the storage tier, if there is one.
        core: the core of the cache that creates leases; None for engines with an allocator of their own.
        sleep: waits for a number of seconds, for `drain`.

    Attributes:
        tree, host, store: as given.
        host_pools: the pools of host pages, by component.
        pending: everything under way.
        writes: the queue of writes to storage, if there is storage.
        costs: the estimates of what computing and loading take.
        prefill: that of computing, which the engine feeds; it bounds the wait for storage.

    Raises:
        BadArgument: the tree has another number of tiers, or the host another number of components or pages.
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
        sizes = host.pages or (host.memory.pages,)
        if len(sizes) != len(tree.components) or len(pools) != len(tree.components):
            raise BadArgument("pages", sizes, f"a number of pages for each of {len(tree.components)} components")
        if sizes[0] > host.memory.pages:
            raise BadArgument("pages", sizes, f"at most the {host.memory.pages} that the memory has")
        self.tree, self.host, self.store = tree, host, store
        self.host_pools = tuple(Pool(pages) for pages in sizes)
        self.costs = Costs()
        self.prefill = self.costs.prefill
        self.pending = PendingList(host.agree)
        self._polled = 0  # what was under way when the poll of this moment began
        self.writes = None if store is None else Writes(tree, host.memory, store, self.pending)
        self._core, self._sleep = core, sleep
        self._pages = HostPages(tree, host.memory, self.host_pools, self.writes)
        self._backups = Backups(host.policy, pools, self._pages, self.writes, self.pending)
        self._storage: StorageTier | None = None
        if store is not None and self.writes is not None:
            self._storage = StorageTier(store, self.writes, self._pages, self._backups, self.costs, self.pending)

    # ---------------------------------------------------------------- what a scheduler calls

    @property
    def busy(self) -> bool:
        """Whether anything is under way that `poll` will settle, or to be begun by it."""
        touched = self._core is not None and self._core.has_touched
        return touched or bool(self.pending) or (self._storage is not None and bool(self._storage.warming.left))

    @property
    def can_prefetch(self) -> bool:
        """Whether there is storage, and fewer than `max_prefetches` are under way."""
        return self._storage is not None and not self._storage.prefetches.full

    @property
    def declined(self) -> Missed | None:
        """Why the last call of `prefetch` that returned None did; None: nothing was missing."""
        return None if self._storage is None else self._storage.prefetches.declined

    @property
    def copying(self) -> bool:
        """Whether a transfer holds device pages, which it releases when it ends."""
        return bool(self._backups.flights or self.pending.of(Load))

    def poll(self) -> None:
        """Settles what has ended and begins what is due. Does not block."""
        self._polled = len(self.pending)  # a backup that has ended counts until its writes have begun
        try:
            self.pending.settle()
            if self.store is not None:
                self.store.calls.settle()
            if self._core is not None:
                self._core.settle()  # before writes begin: with "write_back" it adds some
                self._backups.begin_touched(self._core.take_touched())
            if self._storage is not None:
                self._storage.poll()
            self._pages.settle()
        finally:
            self._polled = 0

    def settle(self) -> None:
        """Evicts what owners have beyond their maxima, as far as it is not in use any more."""
        if self._core is not None:
            self._core.settle()
        self._pages.settle()

    def load(self, lease: Lease) -> Load | None:
        """Starts to copy what the host has after a lease's hit into private pages of the lease.

        Returns None if the host has fewer than `load_min_tokens`, or the device has no room. All ranks call it at the
        same point.

        Raises:
            BadArgument: the lease has reserved pages already.
            LeaseClosed: the lease has ended.
        """
        if not lease.loadable or lease.loadable < self.load_min_tokens():
            return None
        memory, cost = self.host.memory, self.costs.load
        try:
            return self.pending.add(Load(lease, self._core, memory, self.tree.page_size, self.pending, cost))
        except OutOfPages:
            self.pending.counts["load_skipped"] += lease.loadable // self.tree.page_size
            return None

    def load_min_tokens(self) -> int:
        """Returns how many tokens on the host are worth loading; fewer are computed.

        It is where both are expected to take equally long, once that is known; all ranks ask at the same point.
        """
        page_bytes = self.host.memory.payload_bytes(0)
        pages = self.costs.load_min_pages(page_bytes, self.tree.page_size)
        tokens = self.host.policy.load_min_tokens if pages is None else pages * self.tree.page_size
        return self.pending.agreed(tokens)

    def prefetch(
        self, tokens: TokenLike | Encoded, namespace: NamespaceLike = None, *, bidirectional: bool = False
    ) -> Prefetch | None:
        """Starts to look up in storage what neither device nor host has of a prompt.

        Returns None if there is no storage, too little is missing, or too many prefetches are under way.

        Args:
            bidirectional: whether the request will go on computing while its pages are read, see `Prefetch.lead`; it
                then waits only where that gains nothing.

        Raises:
            BadTokens: a token is out of range.
        """
        if self._storage is None:
            return None
        key = tokens.symbols if isinstance(tokens, Encoded) else self.tree.keys.encode(tokens)
        return self._storage.prefetches.ask(encode_namespace(namespace), key, bidirectional)

    def back_up(self, node: int, hits: int = 0) -> bool:
        """Starts to copy what the host lacks of the prefix that ends at a node, as far as it was hit `hits` times.

        Returns whether everything that the host lacked is under way or present.

        Raises:
            StaleHandle: the node was evicted.
        """
        return self._backups.begin(node, hits)

    def make_room(self, row: int, pages: int, ns: bytes = b"") -> None:
        """For "write_back": backs up what the host lacks, waits for it, then frees device pages of a component.

        `ns`: the encoded namespace that they are freed for.
        """
        self._backups.make_room(row, pages, ns)

    def flush(self) -> int:
        """Evicts every unlocked host page and returns the number freed. Storage keeps its pages."""
        return self._pages.flush()

    def forget(self, namespace: bytes) -> None:
        """Drops what was removed from a namespace: host pages, waiting writes, and pages in storage."""
        if self._storage is not None:
            self._storage.writes.forget(namespace)
        self._pages.evict_removed()

    # ---------------------------------------------------------------- restart

    def enter_identity(self) -> None:
        """Starts to enter the identity of the pages in the list of the store, and logs why others are not found.

        A full store may evict the list, so it is called from time to time. All ranks call it between the same polls.
        """
        if self._storage is not None:
            self._storage.enter_identity()

    def remember(self) -> None:
        """Stores the list of the hottest prefixes, for `warm`. All ranks call it between the same polls."""
        if self._storage is not None:
            self._storage.warming.remember()

    def warm(self) -> None:
        """Starts to prefetch the prefixes that `remember` listed, as far as the host has room."""
        if self._storage is not None:
            self._storage.warming.begin()

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
        if self._storage is not None:
            self._storage.close(timeout_s)

    # ---------------------------------------------------------------- statistics and checks

    @property
    def counts(self) -> Counter[str]:
        """The counts of the parts, without zeros."""
        return +Counter(self.pending.counts)  # copied at once, since `stats` may be called while it grows

    def stats(self) -> TierStats:
        """Returns counts up to the last poll. It changes nothing, so any thread can call it."""
        core, rows = self.tree.core, enumerate(self.host_pools)
        pools = (PoolStats.of(pool, core.counts(row, HOST)[1]) for row, pool in rows)
        pool = self.host_pools[0]
        counts: dict[str, Any] = {**self.counts, **({} if self._storage is None else self._storage.counts())}
        return TierStats(
            host_pools=dict(zip(self.tree.names, pools, strict=True)),
            host_total=pool.total,
            host_free=pool.free,
            host_cached=pool.cached,
            host_private=pool.private,
            under_way=max(len(self.pending), self._polled),
            **counts,
        )

    def check(self) -> None:
        """Verifies the pools of the host, that they agree with the tree, and what is under way; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        below = [name for name, n in self.pending.counts.items() if n < 0]
        if below:
            raise CorruptTree(f"the counts of the tiers: {below} are below 0")
        self._backups.check()
        if self._storage is not None:
            self._storage.check()
        held = (lambda row: 0) if self._storage is None else self._storage.prefetches.reader.private_pages
        self._pages.check([held(row) for row in range(len(self.host_pools))])
