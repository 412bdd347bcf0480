"""`PrefixCache` and `Lease`: who owns a page, and for how long.

    free  --reserve-->  private (one lease)  --publish-->  cached (the tree)  --evict-->  free
                           |                    |
                           +------ finish ------+--- the tree already has it: the duplicate is freed

Every page is always free, cached or private. The same holds for window pages and state slots, which have their own
pools. Knows ids, not tensors: the functions that copy a page or a state are passed in. Not thread-safe: call it from
one thread at a time, as a scheduler does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mainstem import _core
from mainstem._core import Lease, LeaseCounters, TreeStats
from mainstem.cache.components import KINDS, Component, Full, State, Window, by_name
from mainstem.cache.expected import Expected
from mainstem.cache.explain import Explanation, Stretch, within
from mainstem.cache.keys import Encoded, KeyKind, KeySequence, TokenKeys, TokenLike, TypedKeys
from mainstem.cache.namespaces import NamespaceLike, encode_namespace
from mainstem.cache.old_weights import OldWeights
from mainstem.cache.policies import Policy
from mainstem.cache.pool import Pool, PoolStats
from mainstem.cache.quotas import Quotas
from mainstem.cache.retention import Retention, RetentionStats
from mainstem.cache.tenants import Tenants
from mainstem.cache.tree import DEVICE, Tree
from mainstem.errors import BadArgument, CorruptTree, check_integer, check_rules
from mainstem.events.source import PUBLIC_SECRET, Event, Source
from mainstem.metric import Metric, each, gauge
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.storage.store import Store

__all__ = ["CacheStats", "CopyPage", "CopyState", "Lease", "PoolStats", "PrefixCache"]

CopyPage = Callable[[int, int, int], None]
"""copy_page(source, target, positions): copies the KV of the first positions of a page into another page."""

CopyState = Callable[[int, int], None]
"""copy_state(source, target): copies a whole recurrent state from slot to slot."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The counts of a cache, and what it holds.

    Args:
        leases: what leases asked for and found; `leases.hit / leases.queried` is the hit rate.
        tree: counts of the tree.
        pools: who owns the pages or slots of each component, the first component first.
        retention: what is retained.
    """

    leases: LeaseCounters
    tree: TreeStats
    pools: Mapping[str, PoolStats]
    retention: RetentionStats

    METRICS: ClassVar = (
        Metric("mainstem_prefix_cache_queries_tokens", "Prompt tokens looked up in the cache", "leases.queried"),
        Metric("mainstem_prefix_cache_hits_tokens", "Prompt tokens found in the cache", "leases.hit"),
        Metric("mainstem_evicted_pages", "Pages evicted from the cache", "tree.evicted_pages"),
        Metric("mainstem_checkpoints", "Checkpoints of recurrent states added to the cache", "leases.checkpoints"),
        Metric("mainstem_checkpoints_missed", "Checkpoints not kept because no slot was free",
            "leases.checkpoints_missed"),
        gauge("mainstem_kv_pages", "Pages of the KV pool, by owner", each("pool.{}", "free", "cached", "private"),
            ("owner",)),
        gauge("mainstem_pool_pages", "Pages or slots of each component's pool, by owner; cached includes locked",
            {("*", owner): f"pools.*.{owner}" for owner in ("free", "cached", "private", "locked", "total")},
            ("component", "owner")),
        gauge("mainstem_retained_pages", "Pages or slots of each component that are retained, by tier",
            {("*", tier): f"retention.{tier}.*" for tier in ("device", "host")}, ("component", "tier")),
        gauge("mainstem_retained_prefixes", "Prefixes that are retained for a time or pinned", "retention.prefixes"),
        gauge("mainstem_anchors", "Prefixes that are retained because sessions share them", "retention.spare"),
        gauge("mainstem_anchor_pages", "Pages of the first component up to the ends of these", "retention.spare_pages"),
        Metric("mainstem_anchors_dropped", "Prefixes that were, until others needed the room", "retention.given_way"),
    )  # fmt: skip

    @property
    def pool(self) -> PoolStats:
        """The pages of the first component."""
        return next(iter(self.pools.values()))


class PrefixCache:
    """A pool of pages and the tree of the prefixes that they hold.

    Args:
        pages: number of pages in the pool. For a model with several kinds of layers: the number for each component; the
            first one has an id for each page.
        page_size: positions per page.
        keys: how token sequences become symbols; one symbol is one position.
        policy: what is evicted first, see `mainstem.cache.policies.find_policy`.
        enabled: False: nothing is matched or published; everything else is the same.
        copy_page: with it, a hit may end inside a page, whose beginning is copied; without it, or with components other
            than full attention, hits end at page boundaries.
        copy_state: required with states: a lease computes with a copy of the state that it finds.
        host: a host tier below the device; `poll` must then be called regularly.
        store: storage below the host.
        on_event: called by `poll` with each event, in order; None: nothing is noted.
        event_secret: keys the hashes and salts of events; the same for all servers of a fleet.
        retain_share: the part of each pool that one owner may retain, 0 to 1; see `retention`.
        reserve: ids of each component, by name, that nobody may retain, or be guaranteed, on the device; by default
            half of each.
        quotas: how much of each tier each tenant has, see `Tenants.set_quotas`.
        explain_pages: how many evicted pages are remembered for `explain`, see there; None: none.

    Attributes:
        retention: what is kept for a time, or pinned.
        tenants: who shares the cache, and how much of it each has.
        expected: when prefixes are used next, as their users say.
        old_weights: what older versions of the model's weights have computed.
        events: where events come from; None without `on_event`.

    Raises:
        BadArgument: an argument out of range; with `on_event`, symbols that are no token ids, or no full attention.

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
        on_event: Callable[[Event], object] | None = None,
        event_secret: bytes = PUBLIC_SECRET,
        retain_share: float = 0.25,
        reserve: Mapping[str, int] | None = None,
        quotas: Quotas | None = None,
        explain_pages: int | None = None,
    ) -> None:
        sizes = _sizes(pages)
        for name, function in (("copy_page", copy_page), ("copy_state", copy_state), ("on_event", on_event)):
            if function is not None and not callable(function):
                raise BadArgument(name, function, "a function, or None")
        if copy_state is None and any(isinstance(row, State) for row in sizes):
            raise BadArgument("copy_state", copy_state, "a function of source and target slot if there are states")
        if store is not None and host is None:
            raise BadArgument("store", store, "None without a host tier: storage is read into host pages")
        if not 0 <= retain_share <= 1:
            raise BadArgument("retain_share", retain_share, "a number from 0 to 1")
        self.tree = Tree(page_size, keys, tuple(sizes), 1 if host is None else 2, policy, explain_pages)
        self.pools = {name: Pool(sizes[row]) for name, row in by_name(sizes).items()}
        self.pool = next(iter(self.pools.values()))
        self.page_size, self.enabled = page_size, enabled
        self._copy_page = copy_page if tuple(sizes) == (Full(),) else None
        self._token_limit = self.tree.keys.token_limit
        pools, self._on_event = tuple(self.pools.values()), on_event
        self.events: Source | None = None
        self._undelivered: deque[Event] = deque()
        if on_event is not None:
            ids = [self.pool.total] + ([] if host is None else [(host.pages or (host.memory.pages,))[0]])
            self.events = Source(self.tree, ids, event_secret)
        self._core = _core.Cache(self.tree.core, pools, self._token_limit, bool(enabled))
        if copy_state is not None:
            self._core.copy_state_with(copy_state)
        self.tiers = None if host is None else Tiers(self.tree, pools, host, store, self._core)
        if self.tiers is not None and self.tiers.host.policy.write_policy == "write_back":
            self._core.evict_with(self.tiers.make_room)
        elif self.tree.ranks_outside:
            self._core.evict_with(partial(_evict_into, self.tree, pools))
        totals = [pools] if self.tiers is None else [pools, self.tiers.host_pools]
        self._totals = [[pool.total for pool in tier] for tier in totals]
        self._reserve = dict(reserve or {})
        self.retention = Retention(
            self.tree, self._totals, retain_share, self._reserve, self.tiers, settle=self._settle
        )
        self.expected = Expected(self.tree)
        self.old_weights = OldWeights(self.tree, self.retention, self._remove)
        self.tenants = Tenants(self.tree, self._totals, self._reserve, self.retention, self._settle)
        if quotas is not None:
            self.tenants.set_quotas(quotas)

    def lease(
        self, tokens: TokenLike, namespace: NamespaceLike = None, *, priority: int = 0, most: int | None = None
    ) -> Lease:
        """Matches a prompt and locks the match, which leaves at least the last token to compute.

        Args:
            tokens: the prompt, at least one token.
            namespace: only prefixes in the same namespace are shared.
            priority: for the policy "priority".
            most: positions of the prompt that may be matched, so that the others are computed, for their logits; 0: the
                whole prompt is, also to measure a miss. Its pages are published as usual. None: all but the last.

        Raises:
            BadTokens: the prompt is empty or holds a token out of range.
            BadArgument: the priority is not an int32, or `most` is below 0.
            OutOfPages: there is no slot for the lease's own state; only with states.
        """
        if most is not None:
            most = check_integer("most", most, 0, 2**31 - 1)
        name = b"" if namespace is None else encode_namespace(namespace)
        if most != 0 and self.retention.renews:
            self.retention.hit(name, self.tree.keys.encode(tokens))
        if not self._token_limit:
            return self._lease_of_kind(tokens, name, priority, most)
        if self._copy_page is None or most == 0:
            return Lease(self._core, name, tokens, priority, most)
        lease = Lease(self._core, name, tokens, priority, most, True)
        self._copy_inside(lease)
        return lease

    def _lease_of_kind(self, tokens: TokenLike, namespace: bytes, priority: int, most: int | None) -> Lease:
        """Makes a lease on tokens that must be encoded first, and that a hit may not cut everywhere."""
        sequence = self.tree.keys.sequence()
        symbols = sequence.append(tokens)
        for inside, on_host in ((most != 0 and self._copy_page is not None, True), (False, False)):
            limit = self._longest(symbols, sequence, namespace, inside, on_host, most)
            lease = _KindLease(
                self._core, namespace, symbols, priority, limit, inside, sequence=sequence, page_size=self.page_size
            )
            self._copy_inside(lease)
            if sequence.floor(lease.hit) == lease.hit:
                break
            lease.abort()  # no page to copy into, and the page boundary cuts a token
        return lease

    def _copy_inside(self, lease: Lease) -> None:
        """Extends the hit by the beginning of a shared page, copied into a private one, if there is a page for it."""
        if self.tiers is not None and lease.loadable and lease.loadable >= self.tiers.load_min_tokens():
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
        """Returns the hit, in positions, that a lease on this prompt would have now. Changes nothing.

        Raises:
            BadTokens: a token is out of range.
        """
        if not self.enabled:
            return 0
        name, inside = encode_namespace(namespace), self._copy_page is not None
        if self._token_limit:
            key = tokens.symbols if isinstance(tokens, Encoded) else tokens
            boundary, positions, host = self.tree.core.peek(name, key, self._token_limit, inside, -1)
            return boundary + max(positions, host)
        encoded = tokens if isinstance(tokens, Encoded) else Encoded.of(self.tree.keys, tokens)
        return self._longest(encoded.symbols, encoded.sequence, name, inside, on_host=True)

    def _longest(
        self,
        symbols: bytes,
        sequence: KeySequence,
        namespace: bytes,
        inside: bool,
        on_host: bool,
        most: int | None = None,
    ) -> int:
        """Returns the longest hit, of at most `most` positions, that leaves a token to compute and cuts none.

        `inside`: it may end inside a page; `on_host`: it may end on the host.
        """
        longest = max(len(symbols) // self.tree.keys.symbol_bytes - 1, 0)
        hit = sequence.floor(longest if most is None else min(longest, most))
        while True:
            boundary, positions, host = self.tree.core.peek(namespace, symbols, 0, inside, hit)
            boundary += host if on_host else 0
            hit = sequence.floor(boundary + (0 if on_host and host else positions))
            if hit >= boundary:
                return hit
            # The match ends inside a token that must not be cut: match again, up to the beginning of that token.

    def explain(
        self, tokens: TokenLike | Encoded, namespace: NamespaceLike = None, *, distances: bool = False
    ) -> Explanation:
        """Says of each stretch of a prompt where a lease would find it now, or why it would not. Changes nothing.

        Of what is not cached, it knows what was evicted: the last `explain_pages` pages of that. Of what went before
        it knows that it may have been there (`forgotten`, of the last 64 capacities or so); with no memory, everything
        that is not cached is `forgotten`. It keeps no tokens of what is gone, only keyed hashes.

        The answer depends on the prompt's namespace alone, see `Tree.explain`.

        Args:
            distances: also count `Evicted.distance_pages`, see `Tree.explain`.

        Raises:
            BadTokens: a token is out of range.
        """
        encoded = tokens if isinstance(tokens, Encoded) else Encoded.of(self.tree.keys, tokens)
        end = len(encoded.symbols) // self.tree.keys.symbol_bytes
        if not self.enabled:
            return Explanation((Stretch(0, end, cause="disabled"),) if end else ())
        hit = self.peek(encoded, namespace)
        boundary, positions, host = self.tree.core.peek(
            encode_namespace(namespace), encoded.symbols, 0, self._copy_page is not None, -1
        )
        device = min(hit, boundary + (0 if host and host >= positions else positions))
        whole = self.tree.explain(encoded.symbols, namespace, encoded=True, distances=distances)
        return within(whole, device, hit, end)

    def poll(self, now_s: float, *, deliver: bool = True) -> bool:
        """Moves the cache on; a scheduler calls it once a step. Does not block, but for copies with "write_back".

        Settles transfers that have ended and begins what is due; ends retentions that have expired, and expectations
        that are overdue; notes the time, so that `explain` can say when something was evicted; delivers events.

        Args:
            now_s: seconds, by any clock that never goes back; the same for all ranks.
            deliver: False: `deliver_events` is called apart, for example after the step, or once a receiver has room.

        Returns:
            Whether further calls deliver more events, even if nothing happens.
        """
        self.tree.note_time(now_s)
        if self.tiers is not None:
            self.tiers.poll()
        self.retention.poll(now_s)
        self.expected.poll(now_s)
        return deliver and self.deliver_events()

    def continuation(self, symbols: NDArray[np.int32], most: int, namespace: NamespaceLike = None) -> NDArray[np.int32]:
        """Returns what followed these tokens, in the sequence used last among those that begin with them.

        A draft for speculative decoding. Changes nothing, and does not ask whether the pages are still there.

        Args:
            symbols: int32 [n], all tokens so far, with the symbols of images in their places.
            most: the largest number of tokens to return.
            namespace: only sequences of the same namespace are looked at.

        Returns:
            int32 tokens, up to an image or the end of a sequence; none if nothing begins with `symbols`.

        Raises:
            BadArgument: `most` is out of range, or the cache's keys are not tokens.
        """
        keys = self.tree.keys
        if not isinstance(keys, (TokenKeys, TypedKeys)):
            raise BadArgument("keys", keys, "TokenKeys or TypedKeys")
        key = np.asarray(symbols, np.int32).tobytes()
        ids = np.frombuffer(self.tree.continuation(key, most, namespace, encoded=True), "<u4")
        other = np.flatnonzero(ids >= keys.limit)  # symbols of images
        return ids[: other[0] if len(other) else len(ids)].astype(np.int32)

    def remove(self, tokens: TokenLike, namespace: NamespaceLike = None) -> int:
        """Removes the page that holds the last token of a prefix, and everything after it, from device and host.

        From now on no lease finds them. Open leases keep their pages, which are evicted first once those leases end; a
        lease that alone has such a prefix still publishes it. What the tree knows to be in storage is deleted soon, if
        the back end answers; what only storage knows stays. An empty prefix removes the whole namespace.

        Returns:
            The number of device pages of removed prefixes that were freed.

        Raises:
            BadTokens: a token is out of range.
        """
        return self._remove({encode_namespace(namespace): self.tree.key_to_remove(tokens)})

    def _remove(self, prefixes: Mapping[bytes, bytes]) -> int:
        """Removes the prefix with the symbols of each encoded namespace; returns the device pages freed."""
        self._core.take_back()
        before = self.pool.free
        for name, key in prefixes.items():
            if self.tree.core.remove(name, key):
                self.retention.forget_removed()
                if self.tiers is not None:
                    self.tiers.forget(name)
        for pool, ids in zip(self.pools.values(), self.tree.evict_removed(), strict=True):
            pool.reclaim(ids)
        freed = self.pool.free - before
        self._settle()  # what was removed may have been in the way of what exceeds a maximum
        return freed

    def demote(self, tokens: TokenLike, namespace: NamespaceLike = None, *, over: bool = False) -> int:
        """Makes a prefix the first to be evicted from the device, until it is used again: advice, it frees nothing now.

        It demotes everything that begins with these tokens, and of the tokens themselves the pages that no other
        sequence has. If fewer of them are cached, it demotes those, unless another sequence goes on from there.

        Args:
            over: it is not expected to be used again: its retentions and pins end, and the host evicts it first, too.

        Returns:
            The number of its positions in the tree.

        Raises:
            BadTokens: a token is out of range.
        """
        key = self.tree.keys.encode(tokens)
        nodes = self.tree.core.demote(encode_namespace(namespace), key, self.tree.tiers if over else 1)
        pages = sum(self.tree.core.end(node) - self.tree.core.start(node) for node in nodes)
        if over:
            self.retention.release(nodes)
        return pages * self.page_size

    def _settle(self) -> None:
        """Evicts what owners have beyond their maxima, as far as it is not in use any more."""
        if self.tiers is None:
            self._core.settle()
        else:
            self.tiers.settle()

    def flush(self) -> int:
        """Evicts every prefix that no lease uses, retained or not, also from the host.

        Returns:
            The number of device pages freed.
        """
        self._core.take_back()
        self.retention.clear()
        before = self.pool.free
        freed = self.tree.flush()
        while any(map(len, freed)):
            for pool, ids in zip(self.pools.values(), freed, strict=True):
                pool.reclaim(ids)
            freed = self.tree.flush()
        if self.tiers is not None:
            self.tiers.flush()
        return self.pool.free - before

    def deliver_events(self) -> bool:
        """Calls `on_event` with what has come to a tier or left it since the last call.

        `poll` does it. If it was not called for long, `AllBlocksCleared` comes first, and then
        everything that is there, in steps of about a millisecond, one a call; `events_dropped` counts the pages.

        Returns:
            Whether further calls deliver more, even if nothing happens.
        """
        if self._on_event is None or self.events is None:
            return False
        self._undelivered.extend(self.events.take())
        while self._undelivered:  # an event stays until the call has returned
            self._on_event(self._undelivered[0])
            self._undelivered.popleft()
        return self.events.waiting

    @property
    def events_dropped(self) -> int:
        """Pages that came or left without an event of their own."""
        return 0 if self.events is None else self.events.dropped

    def stats(self, *, settle: bool = True) -> CacheStats:
        """Returns the counts, which are kept up to date.

        Args:
            settle: first end leases that were dropped. False: change nothing, so that any thread may ask.
        """
        if settle:
            self._core.take_back()
        core, pools = self.tree.core, enumerate(self.pools.items())
        counts = {name: PoolStats.of(pool, core.counts(row, DEVICE)[1]) for row, (name, pool) in pools}
        return CacheStats(self._core.counters(), self.tree.stats(), counts, self.retention.stats())

    def check(self) -> None:
        """Verifies the tree and the pools, that they agree, and that the counts add up; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        self._core.take_back()
        self.tree.check()
        self.retention.check()
        if self.tiers is not None:
            self.tiers.check()
        self._check_counts()
        nodes = list(self.tree.nodes())
        for name, pool in self.pools.items():
            pool.check()
            held = [id for view in nodes for id in view.cells[name, 0].ids.tolist()]
            wrong = [id for id in held if pool.owner(id) != "cached"]
            if wrong:
                raise CorruptTree(f"ids {wrong[:8]} of {name} are in the tree, but not cached in the pool")
            if len(held) != pool.cached:
                raise CorruptTree(f"the tree holds {len(held)} of {name}, but the pool has {pool.cached} cached")

    def _check_counts(self) -> None:
        stats = self.stats(settle=False)
        leases, tree = stats.leases, stats.tree
        rules = {
            "partial_hit <= hit <= queried": leases.partial_hit <= leases.hit <= leases.queried,
            "a lease is open if a page is private": leases.open > 0 or not any(p.private for p in stats.pools.values()),
            "hit_symbols <= queried_symbols": tree.hit_symbols <= tree.queried_symbols,
            "cached = locked + evictable": tree.cached_pages == tree.locked_pages + tree.evictable_pages,
            "free + cached + private = total": all(
                pool.free + pool.cached + pool.private == pool.total and pool.locked <= pool.cached
                for pool in stats.pools.values()
            ),
        }
        check_rules(f"the counts of the cache, {stats}", rules)


def _sizes(pages: int | Mapping[Component, int]) -> dict[Component, int]:
    """Returns the number of pages or slots of each component, in the order of the tree's rows."""
    sizes: Mapping[Component, int] = pages if isinstance(pages, Mapping) else {Full(): pages}
    if not all(isinstance(row, KINDS) for row in sizes):
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise BadArgument("pages", pages, f"a number, or one for each component: objects of {kinds}")
    rows = sorted(sizes, key=lambda row: KINDS.index(type(row)))
    if not rows or not isinstance(rows[0], (Full, Window)) or len({row for row in rows if isinstance(row, State)}) > 1:
        raise BadArgument("pages", pages, "for Full() or Window(...), and for at most one State()")
    return {row: check_integer(f"pages of {name}", sizes[row], 1, 2**31 - 1) for name, row in by_name(rows).items()}


def _evict_into(tree: Tree, pools: tuple[Pool, ...], component: int, pages: int, ns: bytes) -> None:
    for pool, ids in zip(pools, tree.evict_for(ns, pages, tree.names[component]), strict=True):
        pool.reclaim(ids)


class _KindLease(Lease):
    """A lease on a sequence whose symbols are not simply its tokens."""

    def __init__(
        self, cache: _core.Cache, ns: bytes, symbols: bytes, priority: int, limit: int, inside: bool,
        *, sequence: KeySequence, page_size: int,
    ) -> None:  # fmt: skip
        super().__init__(cache, ns, symbols, priority, limit, inside)
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
