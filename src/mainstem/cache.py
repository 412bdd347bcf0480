"""`PrefixCache` and `Lease`: who owns a page, and for how long.

    free  --reserve-->  private (one lease)  --publish-->  cached (the tree)  --evict-->  free
                           |                    |
                           +------ finish ------+--- the tree had it already: the duplicate goes back to free

free + cached + private is every page, always. Knows page ids; knows no tensors: copying a page is a function passed
in. One thread at a time, as in a scheduler.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from mainstem._core import Pool
from mainstem.errors import BadArgument, BadTokens, CorruptTree, LeaseClosed, OutOfPages, check_integer
from mainstem.keys import KeyKind, Sequence, TokenLike
from mainstem.namespaces import NamespaceLike, encode_namespace
from mainstem.policies import Policy
from mainstem.tree import Ids, Tree

log = logging.getLogger(__name__)

CopyPage = Callable[[int, int, int], None]
"""copy_page(source, target, positions): copies the KV of a page's first positions into another page."""

_NO_PAGES: Ids = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of a cache. free + cached + private = total pages; cached = locked + evictable.

    `queried` and `hit` are positions asked for and reused by leases, counted at their first `reserve`; of these,
    `partial_hit` were copied out of the inside of a page, and `partial_missed` counts leases that found no page to copy
    into. `duplicate_pages` were computed by two leases at once and given back.
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
    inserted_pages: int
    evicted_pages: int
    nodes: int
    namespaces: int


@dataclass(slots=True)
class _Counters:
    leases: int = 0
    queried: int = 0
    hit: int = 0
    partial_hit: int = 0
    partial_missed: int = 0
    duplicate_pages: int = 0


class PrefixCache:
    """A pool of pages and the tree of the prefixes that they hold.

    Args:
        pages: pages in the pool.
        page_size: positions a page.
        keys: what a token sequence is in symbols; one symbol is one position.
        policy: name of a built-in policy, or an object with one rule.
        enabled: False: nothing is matched and nothing published; all else is the same.
        copy_page: with it a hit may end inside a page, whose beginning is copied; without it hits end at page borders.

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
        pages: int,
        page_size: int = 16,
        *,
        keys: KeyKind | None = None,
        policy: str | Policy = "lru",
        enabled: bool = True,
        copy_page: CopyPage | None = None,
    ) -> None:
        pages = check_integer("pages", pages, 1, 2**31 - 1)
        if copy_page is not None and not callable(copy_page):
            raise BadArgument("copy_page", copy_page, "a function of source page, target page and positions, or None")
        self.tree = Tree(page_size, keys, policy=policy)
        self.pool = Pool(pages)
        self.page_size = page_size
        self.keys = self.tree.keys
        self.enabled = enabled
        self._copy_page = copy_page
        self._counters = _Counters()
        self._abandoned: deque[tuple[int, Ids]] = deque()

    def lease(self, tokens: TokenLike, namespace: NamespaceLike = None, *, priority: int = 0) -> Lease:
        """Matches a prompt, locks what was found, and leaves at least its last token to compute.

        Args:
            tokens: the prompt, at least one token.
            namespace: what must be equal before anything is shared.
            priority: for the policy "priority".

        Raises:
            BadTokens: the prompt is empty or holds a token out of range.
            BadArgument: the priority is no int32.
        """
        self._take_back_abandoned()
        priority = check_integer("priority", priority, -(2**31), 2**31 - 1)
        return Lease(self, tokens, encode_namespace(namespace), priority)

    def peek(self, tokens: TokenLike, namespace: NamespaceLike = None) -> int:
        """The hit, in positions, that a lease on this prompt would have now. Changes nothing.

        Raises:
            BadTokens: a token is out of range.
        """
        if not self.enabled:
            return 0
        return self._longest(self.keys.sequence(tokens), encode_namespace(namespace), self._copy_page is not None)

    def _longest(self, sequence: Sequence, namespace: bytes, inside: bool) -> int:
        """The longest hit that leaves a token to compute and cuts none; `inside`: it may end inside a page."""
        hit = sequence.floor(max(len(sequence) - 1, 0))
        while True:
            pages, partial = self.tree.core.peek(namespace, sequence.data, inside, hit)
            border = pages * self.page_size
            hit = sequence.floor(border + partial)
            if hit >= border:
                return hit
            # The match ended inside a token that must not be cut: look again, up to its beginning.

    def flush(self) -> int:
        """Evicts every prefix that no lease uses; the number of pages freed."""
        self._take_back_abandoned()
        before = self.pool.free
        while len(freed := self.tree.flush()[0]):
            self.pool.reclaim(freed)
        return self.pool.free - before

    def stats(self) -> CacheStats:
        """Counts, kept as things change."""
        self._take_back_abandoned()
        tree, pool, counters = self.tree.stats(), self.pool, self._counters
        return CacheStats(
            total_pages=pool.total,
            free_pages=pool.free,
            cached_pages=pool.cached,
            private_pages=pool.private,
            locked_pages=tree.locked_pages,
            evictable_pages=tree.evictable_pages,
            leases=counters.leases,
            queried=counters.queried,
            hit=counters.hit,
            partial_hit=counters.partial_hit,
            partial_missed=counters.partial_missed,
            duplicate_pages=counters.duplicate_pages,
            inserted_pages=tree.inserted_pages,
            evicted_pages=tree.evicted_pages,
            nodes=tree.nodes,
            namespaces=tree.namespaces,
        )

    def check(self) -> None:
        """Verifies tree and pool, and that they agree; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        self._take_back_abandoned()
        self.tree.check()
        self.pool.check()
        held = [ids for view in self.tree.nodes() for ids in view.cells["full", 0].ids.tolist()]
        wrong = [page for page in held if self.pool.owner(page) != "cached"]
        if wrong:
            raise CorruptTree(f"pages {wrong[:8]} are in the tree, but not cached in the pool")
        if len(held) != self.pool.cached:
            raise CorruptTree(f"the tree holds {len(held)} pages, but the pool has {self.pool.cached} cached")

    def _allocate(self, n: int) -> Ids:
        """n private pages, evicting what it must.

        Raises:
            OutOfPages: free and evictable pages do not reach; nothing was evicted.
        """
        self._take_back_abandoned()
        missing = n - self.pool.free
        if missing > 0:
            present, locked, _ = self.tree.core.counts(0, 0)
            if missing > present - locked:
                raise OutOfPages(n, self.pool.free, present - locked, self.pool.total)
        while self.pool.free < n:
            self.pool.reclaim(self.tree.evict(n - self.pool.free)[0])
        return self.pool.allocate(n)

    def _take_back_abandoned(self) -> None:
        while self._abandoned:
            node, private = self._abandoned.popleft()
            self._give_back(node, private)

    def _give_back(self, node: int, private: Ids) -> None:
        self.tree.core.unlock(node, 0)
        if len(private):
            self.pool.release(private)
        self._counters.leases -= 1


class Lease:
    """One sequence's hold on its prefix and on the pages it adds. Made by `PrefixCache.lease`; a context manager.

    Attributes:
        hit: positions that need no compute; less than the length of the prompt.
        hit_tokens: the same in tokens of the key kind.
        reserved: positions that have a page.
    """

    __slots__ = (
        "_appended", "_cache", "_closed", "_count", "_counted", "_namespace", "_node", "_owned", "_priority",
        "_sequence", "_table", "hit", "hit_tokens", "reserved",
    )  # fmt: skip

    def __init__(self, cache: PrefixCache, tokens: TokenLike, namespace: bytes, priority: int) -> None:
        self._closed = True  # until it holds something
        self._cache = cache
        self._namespace = namespace
        self._priority = priority
        self._sequence = cache.keys.sequence(tokens)
        if not len(self._sequence):
            raise BadTokens("the prompt is empty: a lease needs at least one position")
        self._appended = False
        self._node = 0
        self._owned = 0  # pages at the front of the table that the tree owns; the rest are private
        self._count = 0  # pages in the table, which may have room for more
        self._table = _NO_PAGES
        self.hit = self.reserved = self._take_hit() if cache.enabled else 0
        self._closed = False
        self._counted = False
        cache._counters.leases += 1
        self.hit_tokens = self._sequence.tokens_at(self.hit)

    def _take_hit(self) -> int:
        """Matches at most all but the last token and locks what it found; the hit in positions."""
        inside, source, donor = self._match(self._cache._copy_page is not None)
        try:
            if not inside or self._copy_inside(source, donor, inside):
                return self.published + inside
        except BaseException:
            self._cache.tree.core.unlock(self._node, 0)
            raise
        if not self._sequence.divisible:  # the page border may cut a token
            self._cache.tree.core.unlock(self._node, 0)
            self._match(False)
        return self.published

    def _match(self, inside: bool) -> tuple[int, int, int]:
        """Locks the whole pages of the hit; how many positions of the next page agree, its id, and its node."""
        cache, sequence = self._cache, self._sequence
        core = cache.tree.core
        most = len(sequence) - 1 if sequence.divisible else cache._longest(sequence, self._namespace, inside)
        pages, positions, node, ids, source, donor, *_ = core.match(self._namespace, sequence.data, inside, most)
        core.lock(node, 0)
        self._node, self._owned, self._count, self._table = node, pages, pages, ids
        return positions, source, donor

    def _copy_inside(self, source: int, donor: int, positions: int) -> bool:
        """Copies the beginning of a shared page into a private one; False when no page can be had."""
        cache = self._cache
        core = cache.tree.core
        assert cache._copy_page is not None
        core.lock(donor, 0)  # neither the eviction for the new page nor the copy's own code may free the source
        try:
            try:
                page = cache._allocate(1)
            except OutOfPages:
                cache._counters.partial_missed += 1
                return False
            try:
                cache._copy_page(source, int(page[0]), positions)
            except BaseException:
                cache.pool.release(page)
                raise
        finally:
            core.unlock(donor, 0)
        self._put_pages(page)
        return True

    def _count_once(self) -> None:
        """A lease counts as a question when it gets its first pages: who found no room will ask again."""
        if self._counted:
            return
        self._counted = True
        counters = self._cache._counters
        counters.queried += len(self._sequence)
        counters.hit += self.hit
        counters.partial_hit += self.hit - self.published

    @property
    def length(self) -> int:
        """Positions of the sequence: the prompt and what was appended."""
        return len(self._sequence)

    @property
    def published(self) -> int:
        """Positions of this sequence that are known to be in the tree."""
        return self._owned * self._cache.page_size

    @property
    def page_table(self) -> Ids:
        """Page ids of the sequence, int32 [pages], those of the tree first; read it again after `publish`.

        Raises:
            LeaseClosed: the lease has ended; its pages may be others' by now.
        """
        self._require_open()
        table = self._table[: self._count]
        table.flags.writeable = False
        return table

    def reserve(self, n: int) -> None:
        """Pages for n positions more; evicts what it must.

        Raises:
            OutOfPages: no room; nothing was changed.
            BadArgument: n is negative.
            LeaseClosed: the lease has ended.
        """
        self._require_open()
        n = check_integer("n", n, 0, 2**31 - 1)
        pages = -(-(self.reserved + n) // self._cache.page_size) - self._count
        if pages > 0:
            self._put_pages(self._cache._allocate(pages))
        self.reserved += n
        self._count_once()

    def _put_pages(self, pages: Ids) -> None:
        end = self._count + len(pages)
        if end > len(self._table):
            grown = np.empty(max(end, 2 * self._count), np.int32)
            grown[: self._count] = self._table[: self._count]
            self._table = grown
        self._table[self._count : end] = pages
        self._count = end

    def append(self, tokens: TokenLike) -> None:
        """Decoded tokens join the sequence.

        Raises:
            BadTokens: a token is out of range; nothing was appended.
            LeaseClosed: the lease has ended.
        """
        self._require_open()
        before = len(self._sequence)
        self._sequence.append(tokens)
        self._appended = self._appended or len(self._sequence) > before

    def publish(self, upto: int) -> None:
        """Positions [0, upto) are computed: their whole pages become visible to others now.

        Pages that another lease published first go back to the pool, and `page_table` names the tree's instead.

        Raises:
            BadArgument: upto is beyond what is reserved, or beyond the sequence.
            LeaseClosed: the lease has ended.
        """
        self._require_open()
        upto = check_integer("upto", upto, 0, min(self.reserved, self.length))
        pages = upto // self._cache.page_size
        if pages > self._owned and self._cache.enabled:
            self._hand_over(pages)

    def _hand_over(self, pages: int) -> None:
        cache = self._cache
        # The key is this lease's own, so its node lies on it: the prefix need not be read again.
        node, end, existing, theirs = cache.tree.core.insert(
            self._namespace, self._sequence.data, [self._table[:pages]], self._node, self._priority, 0,
            ready=True, verify=False, symbols=pages * cache.page_size,
        )  # fmt: skip
        if end == self._owned:
            return
        cache.tree.core.move_lock(self._node, node, 0)
        ours = self._table[self._owned : end]
        if existing > self._owned:  # another lease was first
            duplicate = ours != theirs
            cache.pool.release(ours[duplicate])
            cache.pool.publish(ours[~duplicate])
            cache._counters.duplicate_pages += int(duplicate.sum())
            self._table = self._table.copy()  # a view that was given out keeps what it showed
            self._table[self._owned : end] = theirs
        else:
            cache.pool.publish(ours)
        self._node, self._owned = node, end

    def finish(self, upto: int | None = None) -> None:
        """Publishes [0, upto), unlocks, and gives every private page back. A second call does nothing.

        Args:
            upto: positions whose KV is computed. None: all that are reserved, less the last one if tokens were
                appended, since no forward has computed the KV of a token that was only just sampled.

        Raises:
            BadArgument: see `publish`; the lease stays open.
        """
        if self._closed:
            return
        if upto is None:
            upto = max(min(self.reserved, self.length - self._appended), 0)
        if upto != self.published:
            self.publish(upto)
        self.abort()

    def abort(self) -> None:
        """Unlocks and gives every private page back; what was published stays. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._cache._give_back(self._node, self._table[self._owned : self._count])

    def _require_open(self) -> None:
        if self._closed:
            raise LeaseClosed("the lease was finished or aborted")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            # The garbage collector may run on any thread: leave the pages where the cache's own thread finds them.
            self._closed = True
            self._cache._abandoned.append((self._node, self._table[self._owned : self._count]))
            warnings.warn("a lease was neither finished nor aborted", ResourceWarning, stacklevel=2, source=self)
