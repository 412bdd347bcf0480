"""`PrefixCache` and `Lease`: who owns a page, and for how long.

    free  --reserve-->  private (one lease)  --publish-->  cached (the tree)  --evict-->  free
                           |                    |
                           +------ finish ------+--- the tree had it already: the duplicate goes back to free

free + cached + private is every page, always; the same holds of the pages of a sliding window and of the slots of
recurrent states, which have pools of their own. Knows ids; knows no tensors: copying a page or a state is a function
passed in. One thread at a time, as in a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from mainstem import _core
from mainstem._core import Lease, Pool
from mainstem.components import Component, Full, State, Window
from mainstem.errors import BadArgument, CorruptTree, check_integer
from mainstem.keys import Encoded, KeyKind, Sequence, TokenLike
from mainstem.namespaces import NamespaceLike, encode_namespace
from mainstem.policies import Policy
from mainstem.tiers.controller import HostTier, Tiers
from mainstem.tiers.store import Store
from mainstem.tree import Tree

__all__ = ["CacheStats", "CopyPage", "CopyState", "Lease", "PoolStats", "PrefixCache"]

CopyPage = Callable[[int, int, int], None]
"""copy_page(source, target, positions): copies the KV of a page's first positions into another page."""

CopyState = Callable[[int, int], None]
"""copy_state(source, target): copies all of a recurrent state from slot to slot."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of one component's pages or slots. free + cached + private = total; locked are some of the cached."""

    total: int
    free: int
    cached: int
    private: int
    locked: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of a cache. free + cached + private = total pages; cached = locked + evictable.

    `queried` and `hit` are positions asked for and reused by leases, counted at their first `reserve`; of these,
    `partial_hit` were copied out of the inside of a page, and `partial_missed` counts leases that found no page to copy
    into, and `host_hit` were loaded from the host. `duplicate_pages` were computed by two leases at once and given
    back. `checkpoints` are states published, `checkpoints_missed` those for which there was no slot. The pages are
    those of the first component; `pools` has every component's.
    """

    total_pages: int
    free_pages: int
    cached_pages: int
    private_pages: int
    locked_pages: int
    evictable_pages: int
    leases: int
    queried: int
    hit: int
    partial_hit: int
    partial_missed: int
    duplicate_pages: int
    host_hit: int
    inserted_pages: int
    evicted_pages: int
    nodes: int
    namespaces: int
    checkpoints: int
    checkpoints_missed: int
    pools: Mapping[str, PoolStats]


class PrefixCache:
    """A pool of pages and the tree of the prefixes that they hold.

    Args:
        pages: pages in the pool; or, of a model with several kinds of layers, how many of each component's: the first
            one has an id for each page.
        page_size: positions a page.
        keys: what a token sequence is in symbols; one symbol is one position.
        policy: what is evicted first, see `mainstem.policies.find_policy`.
        enabled: False: nothing is matched and nothing published; all else is the same.
        copy_page: with it a hit may end inside a page, whose beginning is copied; without it, and where there is more
            than full attention, hits end at page borders.
        copy_state: must be given where there are states: a lease computes with a copy of what it found.
        host: a host tier below the device; then `tiers.poll` must be called now and then.
        store: storage below the host.

    Raises:
        BadArgument: an argument out of range.

    >>> cache = PrefixCache(pages=8, page_size=2)
    >>> with cache.lease([1, 2, 3, 4, 5]) as lease:
    ...     lease.reserve(5)
    ...     lease.finish()
    >>> cache.lease([1, 2, 3, 9]).hit
    2
    """

    def __init__(
        self,
        pages: int | Mapping[Component, int],
        page_size: int = 16,
        *,
        keys: KeyKind | None = None,
        policy: str | Policy = "lru",
        enabled: bool = True,
        copy_page: CopyPage | None = None,
        copy_state: CopyState | None = None,
        host: HostTier | None = None,
        store: Store | None = None,
    ) -> None:
        sizes = _sizes(pages)
        for name, function in (("copy_page", copy_page), ("copy_state", copy_state)):
            if function is not None and not callable(function):
                raise BadArgument(name, function, "a function, or None")
        if copy_state is None and any(isinstance(row, State) for row in sizes):
            raise BadArgument("copy_state", copy_state, "a function of source and target slot where there are states")
        if store is not None and host is None:
            raise BadArgument("store", store, "None without a host tier: storage is read into host pages")
        self.tree = Tree(page_size, keys, components=tuple(sizes), tiers=1 if host is None else 2, policy=policy)
        self.pools = {row.name: Pool(n) for row, n in sizes.items()}
        self.pool = next(iter(self.pools.values()))
        self.page_size = page_size
        self.enabled = enabled
        self._copy_page = copy_page if tuple(sizes) == (Full(),) else None
        self._token_limit = self.tree.keys.token_limit
        pools = tuple(self.pools.values())
        self._core = _core.Cache(self.tree.core, pools, self._token_limit, bool(enabled))
        if copy_state is not None:
            self._core.copy_state_with(copy_state)
        self.tiers = None if host is None else Tiers(self.tree, pools, host, store, self._core)
        if self.tiers is not None and self.tiers.host.write == "write_back":
            self._core.evict_with(self.tiers.make_room)
        elif self.tree.ranks_outside:
            self._core.evict_with(partial(_evict_into, self.tree, pools))

    def lease(
        self, tokens: TokenLike, namespace: NamespaceLike = None, *, priority: int = 0, reuse: bool = True
    ) -> Lease:
        """Matches a prompt, locks what was found, and leaves at least its last token to compute.

        Args:
            tokens: the prompt, at least one token.
            namespace: what must be equal before anything is shared.
            priority: for the policy "priority".
            reuse: False: it finds nothing, so that all of the prompt is computed (for its logits, or to measure a
                miss); what it computes is published all the same.

        Raises:
            BadTokens: the prompt is empty or holds a token out of range.
            BadArgument: the priority is no int32.
            OutOfPages: there is no slot for the lease's own state; only where there are states.
        """
        name = b"" if namespace is None else encode_namespace(namespace)
        if not self._token_limit:
            return self._lease_of_kind(tokens, name, priority, reuse)
        if self._copy_page is None or not reuse:
            return Lease(self._core, name, tokens, priority, None if reuse else 0)
        lease = Lease(self._core, name, tokens, priority, None, True)
        self._copy_inside(lease)
        return lease

    def _lease_of_kind(self, tokens: TokenLike, namespace: bytes, priority: int, reuse: bool) -> Lease:
        """A lease on what must be encoded first, and must perhaps not be cut everywhere."""
        sequence = self.tree.keys.sequence()
        symbols = sequence.append(tokens)
        for inside, below in ((reuse and self._copy_page is not None, True), (False, False)):
            most = self._longest(symbols, sequence, namespace, inside, below) if reuse else 0
            lease = _KindLease(
                self._core, namespace, symbols, priority, most, inside, sequence=sequence, page_size=self.page_size
            )
            self._copy_inside(lease)
            if sequence.floor(lease.hit) == lease.hit:
                break
            lease.abort()  # no page to copy into, and the page border cuts a token
        return lease

    def _copy_inside(self, lease: Lease) -> None:
        """Lengthens the hit by the beginning of a shared page, copied into a private one, if there is room for it."""
        if self.tiers is not None and lease.loadable >= self.tiers.host.load_min_tokens:
            return  # the host has more
        try:
            copy = lease.begin_copy()
            if copy is not None and self._copy_page is not None:
                self._copy_page(*copy)
                lease.end_copy(True)
        except BaseException:
            lease.abort()
            raise

    def peek(self, tokens: TokenLike | Encoded, namespace: NamespaceLike = None) -> int:
        """The hit, in positions, that a lease on this prompt would have now. Changes nothing.

        Raises:
            BadTokens: a token is out of range.
        """
        if not self.enabled:
            return 0
        name, inside = encode_namespace(namespace), self._copy_page is not None
        if self._token_limit:
            key = tokens.symbols if isinstance(tokens, Encoded) else tokens
            pages, positions, host = self.tree.core.peek(name, key, self._token_limit, inside, -1)
            return pages + max(positions, host)
        encoded = tokens if isinstance(tokens, Encoded) else Encoded.of(self.tree.keys, tokens)
        return self._longest(encoded.symbols, encoded.sequence, name, inside, below=True)

    def _longest(self, symbols: bytes, sequence: Sequence, namespace: bytes, inside: bool, below: bool) -> int:
        """The longest hit that leaves a token to compute and cuts none.

        `inside`: it may end inside a page; `below`: it may end on the host.
        """
        hit = sequence.floor(max(len(symbols) // self.tree.keys.symbol_bytes - 1, 0))
        while True:
            border, positions, host = self.tree.core.peek(namespace, symbols, 0, inside, hit)
            border += host if below else 0
            hit = sequence.floor(border + (0 if below and host else positions))
            if hit >= border:
                return hit
            # The match ended inside a token that must not be cut: look again, up to its beginning.

    def remove(self, tokens: TokenLike, namespace: NamespaceLike = None) -> int:
        """Forgets the page that holds the last token of a prefix, and all that follows it, on device and host.

        No lease finds them from now on. Running leases keep their pages, which are the first to be evicted after them;
        one that had such a prefix for itself still publishes it. Of storage, what the tree knew of is deleted soon,
        where the back end answers; what only storage knows of stays. An empty prefix stands for the whole namespace.

        Returns:
            Device pages that are free now.

        Raises:
            BadTokens: a token is out of range.
        """
        self._core.take_back()
        before = self.pool.free
        name = encode_namespace(namespace)
        key, limit = self.tree.key_to_remove(tokens)
        if self.tree.core.remove(name, key, limit) and self.tiers is not None:
            self.tiers.forget(name)
        for pool, ids in zip(self.pools.values(), self.tree.evict_removed(), strict=True):
            pool.reclaim(ids)
        return self.pool.free - before

    def flush(self) -> int:
        """Evicts every prefix that no lease uses, from the host, too; the number of device pages freed."""
        self._core.take_back()
        before = self.pool.free
        freed = self.tree.flush()
        while any(map(len, freed)):
            for pool, ids in zip(self.pools.values(), freed, strict=True):
                pool.reclaim(ids)
            freed = self.tree.flush()
        if self.tiers is not None:
            self.tiers.flush()
        return self.pool.free - before

    def stats(self) -> CacheStats:
        """Counts, kept as things change."""
        self._core.take_back()
        tree, pool = self.tree.stats(), self.pool
        leases, queried, hit, partial_hit, partial_missed, duplicate_pages, host_hit, *states = self._core.counters()
        return CacheStats(
            total_pages=pool.total,
            free_pages=pool.free,
            cached_pages=pool.cached,
            private_pages=pool.private,
            locked_pages=tree.locked_pages,
            evictable_pages=tree.evictable_pages,
            leases=leases,
            queried=queried,
            hit=hit,
            partial_hit=partial_hit,
            partial_missed=partial_missed,
            duplicate_pages=duplicate_pages,
            host_hit=host_hit,
            inserted_pages=tree.inserted_pages,
            evicted_pages=tree.evicted_pages,
            nodes=tree.nodes,
            namespaces=tree.namespaces,
            checkpoints=states[0],
            checkpoints_missed=states[1],
            pools={name: self._pool_stats(row, pool) for row, (name, pool) in enumerate(self.pools.items())},
        )

    def _pool_stats(self, row: int, pool: Pool) -> PoolStats:
        return PoolStats(pool.total, pool.free, pool.cached, pool.private, self.tree.core.counts(row, 0)[1])

    def check(self) -> None:
        """Verifies tree and pool, and that they agree; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        self._core.take_back()
        self.tree.check()
        if self.tiers is not None:
            self.tiers.check()
        nodes = list(self.tree.nodes())
        for name, pool in self.pools.items():
            pool.check()
            held = [id for view in nodes for id in view.cells[name, 0].ids.tolist()]
            wrong = [id for id in held if pool.owner(id) != "cached"]
            if wrong:
                raise CorruptTree(f"{name} {wrong[:8]} are in the tree, but not cached in the pool")
            if len(held) != pool.cached:
                raise CorruptTree(f"the tree holds {len(held)} of {name}, but the pool has {pool.cached} cached")


def _sizes(pages: int | Mapping[Component, int]) -> dict[Component, int]:
    """Pages or slots by component, in the order of the tree's rows."""
    given: Mapping[Component, int] = pages if isinstance(pages, Mapping) else {Full(): pages}
    order = (Full, Window, State)
    if not all(isinstance(row, order) for row in given):
        raise BadArgument("pages", pages, "a number, or a number for each of Full(), Window(...) and State()")
    rows = sorted(given, key=lambda row: order.index(type(row)))
    if not rows or isinstance(rows[0], State) or len({type(row) for row in rows}) < len(rows):
        raise BadArgument("pages", pages, "those of Full() or Window(...), and at most one of each kind")
    return {row: check_integer(f"pages of {row.name}", given[row], 1, 2**31 - 1) for row in rows}


def _evict_into(tree: Tree, pools: tuple[Pool, ...], component: int, pages: int) -> None:
    for pool, ids in zip(pools, tree.evict(pages, tree.components[component].name), strict=True):
        pool.reclaim(ids)


class _KindLease(Lease):
    """A lease on a sequence whose tokens are not simply its symbols."""

    def __init__(
        self, cache: _core.Cache, ns: bytes, symbols: bytes, priority: int, most: int, inside: bool,
        *, sequence: Sequence, page_size: int,
    ) -> None:  # fmt: skip
        super().__init__(cache, ns, symbols, priority, most, inside)
        self._sequence = sequence
        self._page_size = page_size

    @property
    def hit_tokens(self) -> int:
        return self._sequence.tokens_at(self.hit)

    @property
    def reach(self) -> int:
        reach = super().reach
        while (whole := self._sequence.floor(reach)) % self._page_size or whole != reach:
            reach = whole // self._page_size * self._page_size
        return reach

    def append(self, tokens: TokenLike) -> None:
        super().append(self._sequence.append(tokens))
