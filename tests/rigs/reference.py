"""A slow, obvious model of the tree, the pool and the lease, which tests compare with the real ones.

It keeps one record per page, with the whole prefix that the page ends. It has no nodes, splits or maintained orders:
every answer is a scan of everything, and is never optimised. It models one tier, full attention, and symbols of any
hashable type. It has no bytes or handles: a prefix is its last page, and `None` is the empty prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mainstem.errors import BadArgument, LeaseClosed, NotLocked, OutOfPages, StaleHandle

Symbols = Sequence[Hashable]
Ids = Sequence[int]
Key = tuple[Hashable, tuple[tuple[Hashable, ...], ...]]  # a namespace, and the pages of a prefix


@dataclass(eq=False)
class Page:
    """The record of one page. A page is in flight until it is ready; its locks are those of the prefix that it ends.

    `above` is the previous page. A page is `demoted` until it is used again. `top` is the first removed page of its
    path, or None; no match finds a page with a `top`.
    """

    key: Key
    id: int
    created: int
    above: Page | None = None
    last_access: int = 0
    hits: int = 0
    priority: int = 0
    ready: int = True
    locks: int = 0
    demoted: bool = False
    top: Page | None = None

    def path(self) -> list[Page]:
        """Returns the pages from the first one to this one."""
        return [*(self.above.path() if self.above else ()), self]


POLICIES: dict[str, Callable[[Page], tuple[int, ...]]] = {  # the leaf with the lowest tuple is evicted first
    "lru": lambda page: (page.last_access,),
    "lfu": lambda page: (page.hits, page.last_access),
    "fifo": lambda page: (page.created,),
    "mru": lambda page: (-page.last_access,),
    "filo": lambda page: (-page.created,),
    "slru": lambda page: (page.hits >= 2, page.last_access),
    "slru:1": lambda page: (page.hits >= 1, page.last_access),
    "slru:4": lambda page: (page.hits >= 4, page.last_access),
    "priority": lambda page: (page.priority, page.last_access),
}


@dataclass(frozen=True)
class Matched:
    """A match. `pending`: symbols in flight after it; `partial`: symbols that agree with the beginning of `donor`."""

    end: Page | None
    page_ids: list[int]
    length: int
    pending: int
    partial: int
    donor: Page | None


@dataclass(frozen=True)
class Added:
    """An insertion: its end, the symbols that existed before, the tree's page ids after `after`, and the new pages."""

    end: Page | None
    length: int
    existing: int
    page_ids: list[int]
    added: list[Page]


class ReferenceTree:
    """The tree as a list of pages. `policy` is a name in `POLICIES`."""

    def __init__(self, page_size: int = 16, policy: str = "lru") -> None:
        self.page_size, self.rank, self.tick = page_size, POLICIES[policy], 0
        self.pages: list[Page] = []
        self.counts: Counter[str] = Counter()

    def match(self, symbols: Symbols, namespace: Hashable = None) -> Matched:
        """Returns and refreshes the longest present prefix, with what is in flight or inside a page after it."""
        self.tick += 1
        there = self._along(symbols, namespace)
        found = list(takewhile(lambda page: page.ready, there))
        for page in found:
            page.hits += 1
            page.demoted = False
        self.touch(found)
        in_flight = list(takewhile(lambda page: not page.ready, there[len(found) :]))
        length, pending = len(found) * self.page_size, len(in_flight) * self.page_size
        partial, donor = self._partial(found[-1] if found else None, symbols[length:], namespace)
        self.counts.update(match_calls=1, queried_symbols=len(symbols), hit_symbols=length)
        return Matched(found[-1] if found else None, [page.id for page in found], length, pending, partial, donor)

    def peek(self, symbols: Symbols, namespace: Hashable = None) -> int:
        """Returns the length of the match in symbols; refreshes nothing."""
        return sum(self.page_size for _ in takewhile(lambda page: page.ready, self._along(symbols, namespace)))

    def insert(
        self, symbols: Symbols, ids: Ids, space: Hashable = None, after: Page | None = None, **new: int
    ) -> Added:
        """Inserts the pages missing after `after`; `ids` are those of the whole key. `new`: priority, ready."""
        self.tick += 1
        path = after.path() if after else []
        start, added = len(path), []
        for key, page_id in list(zip(self.keys(symbols, space), ids, strict=False))[start:]:
            above = path[-1] if path else None
            page = self._child(key, above, self.pages)
            if page is None:
                # A cancelled page may still be the parent of removed pages: then its record is used again.
                page = self._child(key, above, {page for below in self.pages for page in below.path()})
                page = page or Page(key, page_id, self.tick, above, top=above.top if above else None)
                page.id, page.created, page.hits, page.ready = page_id, self.tick, 0, new.get("ready", True)
                page.priority = new.get("priority", 0)
                self.pages.append(page)
                added.append(page)
            page.priority, page.demoted = max(page.priority, new.get("priority", 0)), False
            path.append(page)
        self.counts["inserted_pages"] += len(added)
        self.touch(path if path[start:] else ())
        end = len(path) * self.page_size
        ids = [page.id for page in path[start:]]
        return Added(path[-1] if path else None, end, end - len(added) * self.page_size, ids, added)

    def touch(self, path: Sequence[Page]) -> None:
        """Refreshes the pages of a prefix: they are now the most recently used."""
        for page in path:
            page.last_access = self.tick

    def lock(self, page: Page | None) -> None:
        """Locks a prefix. Raises `StaleHandle` if it is gone."""
        if page and page not in self.pages:
            raise StaleHandle(f"{page.key} is gone")
        if page:
            page.locks += 1

    def unlock(self, page: Page | None) -> None:
        """Releases one lock of a prefix. Raises `NotLocked` if it has none of its own."""
        if page and page.locks == 0:
            raise NotLocked(f"{page.key} is not locked")
        if page:
            page.locks -= 1

    def commit(self, flight: Sequence[Page]) -> None:
        """Makes pages in flight present."""
        for page in flight:
            page.ready = True

    def cancel(self, flight: Sequence[Page]) -> list[int]:
        """Drops pages in flight and removes what follows them; returns their ids in order."""
        self.pages = [page for page in self.pages if page not in flight]
        self._remove([page for page in self.pages if set(flight).intersection(page.path())])
        return [page.id for page in flight]

    def remove(self, symbols: Symbols, namespace: Hashable = None) -> None:
        """Removes the page that holds the last symbol of a prefix and all after it; without symbols, the namespace."""
        starts = list(symbols)
        for page in list(self.pages):
            tokens = [token for front in page.key[1] for token in front]
            if page.key[0] == namespace and len(tokens) >= len(starts) and tokens[: len(starts)] == starts:
                self._remove([page])

    def evict(self, count: int, only_removed: bool = False) -> list[int]:
        """Evicts the leaf page of the lowest rank, again and again, until `count` are gone or none can be evicted."""
        gone: list[int] = []
        while len(gone) < count and (leaves := [page for page in self._leaves() if page.top or not only_removed]):
            lowest = min(leaves, key=self._turn)
            self.pages.remove(lowest)
            gone.append(lowest.id)
        self.counts["evicted_pages"] += len(gone)
        return gone

    def _turn(self, page: Page) -> tuple[int, ...]:
        """Returns the sort key of eviction: removed pages go first, then demoted ones, then as the policy says."""
        if page.top or page.demoted:
            return (0 if page.top else 1, page.last_access)
        return (2, *self.rank(page))

    def demote(self, symbols: Symbols, namespace: Hashable = None) -> list[Page]:
        """Demotes what begins with these symbols, and what only that begins with; returns its pages."""
        path, whole = self._along(symbols, namespace), len(symbols) // self.page_size
        tail = tuple(symbols[whole * self.page_size :])
        last = path[-1] if path else None
        below = [page for page in self.pages if page.above is last and page.key[0] == namespace and not page.top]
        like = [page for page in below if page.key[1][-1][: len(tail)] == tail] if len(path) == whole and tail else []
        if not like and (last is None or (below and (tail or len(path) < whole))):
            return []
        tops = like or path[-1:]
        demoted = [page for page in self.pages if {*tops}.intersection(page.path()) and not page.top]
        if like and len(like) == len(below) and last:
            demoted.append(last)
        for page in reversed(path[:-1] if not like or len(like) == len(below) else []):
            if sum(other.above is page and not other.top for other in self.pages) > 1:
                break
            demoted.append(page)
        for page in demoted:
            page.demoted = True
        return demoted

    def evictable(self) -> set[Page]:
        """Returns the pages that repeated eviction takes: no page at or after them is locked or in flight."""
        held = [page for page in self.pages if page.locks or not page.ready]
        return set(self.pages).difference(*(page.path() for page in held))

    def keys(self, symbols: Symbols, namespace: Hashable) -> Iterator[Key]:
        """Yields the key of every whole page of a sequence, in order."""
        size = self.page_size
        pages = [tuple(symbols[end - size : end]) for end in range(size, len(symbols) + 1, size)]
        return ((namespace, tuple(pages[: end + 1])) for end in range(len(pages)))

    def present(self, symbols: Symbols, namespace: Hashable = None) -> list[Page]:
        """Returns the pages of a prefix that a match would find."""
        return list(takewhile(lambda page: page.ready, self._along(symbols, namespace)))

    def _along(self, symbols: Symbols, namespace: Hashable) -> list[Page]:
        found: list[Page] = []
        for key in self.keys(symbols, namespace):
            page = self._child(key, found[-1] if found else None, self.pages)
            if page is None:
                break
            found.append(page)
        return found

    def _child(self, key: Key, above: Page | None, pages: Iterable[Page]) -> Page | None:
        top = above.top if above else None
        return next((page for page in pages if page.key == key and page.above is above and page.top is top), None)

    def _remove(self, pages: Sequence[Page]) -> None:
        """Removes pages and what follows them, unless they are removed already."""
        going = [page for page in self.pages if not page.top and set(pages).intersection(page.path())]
        for page in going:
            page.top = next(above for above in page.path() if above in going)

    def _leaves(self) -> set[Page]:
        return self.evictable() - {page.above for page in self.pages}

    def _partial(self, above: Page | None, rest: Symbols, namespace: Hashable) -> tuple[int, Page | None]:
        """Returns how far a present page after `above` agrees with `rest` at most, and the youngest such page."""
        best: tuple[int, int, Page | None] = 0, 0, None
        for page in self.pages:
            if page.ready and not page.top and page.above is above and page.key[0] == namespace:
                agree = sum(
                    1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(page.key[1][-1], rest, strict=False))
                )
                best = max(best, (agree, page.created, page), key=lambda found: found[:2])
        return (best[0], best[2]) if best[0] else (0, None)


@dataclass(eq=False)
class ReferenceLease:
    """One sequence in use and the prefix that it locks. The pages after `published` are private."""

    namespace: Hashable
    symbols: list[Hashable]
    priority: int = 0
    hit: int = 0
    reserved: int = 0
    published: int = 0
    locked: Page | None = None
    table: list[int] = field(default_factory=list)
    appended: bool = False


class ReferenceCache:
    """The tree, the pool and the leases: a page is free, cached (in the tree) or private (of one lease).

    `copies`: a hit may end inside a page. An owner, here a namespace, retains at most `share` of the pages, and all of
    them at most half. Where pages are allocated, `ids` says which; by default the lowest free ones.
    """

    def __init__(
        self, pages: int, tree: ReferenceTree, enabled: bool = True, copies: bool = False, share: float = 0.25
    ) -> None:
        self.tree, self.page_size, self.enabled, self.copies = tree, tree.page_size, enabled, copies
        self.total, self.free = pages, set(range(pages))
        self.leases: list[ReferenceLease] = []
        self.share, self.now = share, -math.inf
        self.retained: dict[Page, tuple[float, bool]] = {}  # by last page: until when, and whether pinned besides

    def cached(self) -> set[int]:
        """Returns the ids of the pages that the tree holds."""
        return {page.id for page in self.tree.pages}

    def private(self, lease: ReferenceLease) -> list[int]:
        """Returns the ids of the private pages of a lease."""
        return lease.table[lease.published // self.page_size :]

    def lease(
        self, symbols: Symbols, namespace: Hashable = None, priority: int = 0, ids: Ids = (), most: int | None = None
    ) -> ReferenceLease:
        """Matches all but the last symbol or so many, locks the match, and copies the tail of a hit inside a page."""
        lease = ReferenceLease(namespace, list(symbols), priority)
        self.leases.append(lease)
        if self.enabled:
            found = self.tree.match(symbols[:-1][:most], namespace)
            lease.hit = lease.reserved = lease.published = found.length
            lease.table, lease.locked = found.page_ids, found.end
            self.tree.lock(found.end)
            if self.copies and found.donor:
                self._copy(lease, found.donor, found.partial, ids)
        return lease

    def reserve(self, lease: ReferenceLease, positions: int, ids: Ids = ()) -> None:
        """Allocates pages for more positions. Raises `OutOfPages` if the free and evictable pages are too few."""
        self._check_open(lease)
        needed = max(0, -(-(lease.reserved + positions) // self.page_size) - len(lease.table))
        if needed > self._room():
            raise OutOfPages(needed, len(self.free), self._room() - len(self.free), self.total)
        self._take(lease, needed, ids)
        lease.reserved += positions

    def publish(self, lease: ReferenceLease, upto: int) -> None:
        """Moves the whole pages of [0, upto) into the tree, or frees them where the tree has its own."""
        self._check_open(lease)
        if not 0 <= upto <= min(lease.reserved, len(lease.symbols)):
            raise BadArgument("upto", upto, "a position that has a page and a symbol")
        boundary = upto // self.page_size * self.page_size
        if not self.enabled or boundary <= lease.published:
            return
        first, last = lease.published // self.page_size, boundary // self.page_size
        after = lease.locked.path()[first - 1] if lease.locked and first else None
        added = self.tree.insert(lease.symbols[:boundary], lease.table, lease.namespace, after, priority=lease.priority)
        self.free |= set(lease.table[first:last]) - set(added.page_ids)
        lease.table[first:last] = added.page_ids
        self.tree.lock(added.end)
        self.tree.unlock(lease.locked)
        lease.locked, lease.published = added.end, boundary

    def append(self, lease: ReferenceLease, symbols: Symbols) -> None:
        """Appends decoded symbols to the sequence."""
        self._check_open(lease)
        lease.symbols += symbols
        lease.appended = lease.appended or bool(symbols)

    def finish(self, lease: ReferenceLease, upto: int | None = None) -> None:
        """Publishes [0, upto) and ends the lease; by default all that has a page, less a last, appended symbol."""
        if lease in self.leases:
            self.publish(lease, min(lease.reserved, len(lease.symbols) - lease.appended) if upto is None else upto)
            self.abort(lease)

    def abort(self, lease: ReferenceLease) -> None:
        """Ends the lease: refreshes and unlocks its prefix, and frees its private pages."""
        if lease in self.leases:
            self.leases.remove(lease)
            self.free.update(self.private(lease))
            self.tree.tick += lease.locked is not None
            self.tree.touch(lease.locked.path() if lease.locked else ())
            self.tree.unlock(lease.locked)

    def kept(self, namespace: Hashable = ...) -> set[Page]:
        """Returns the pages that are retained, in one namespace or in all."""
        pages = {page for end in self.retained for page in end.path()}
        return {page for page in pages if namespace is ... or page.key[0] == namespace}

    def retain(
        self, symbols: Symbols, namespace: Hashable = None, until: float = -math.inf, pinned: bool = False
    ) -> tuple[int, int]:
        """Retains what is cached of a prefix, as far as it fits; returns its length, and that of what is cached."""
        found = self.tree.present(symbols, namespace)
        kept = self.kept()
        room = min(int(self.total * self.share) - len(self.kept(namespace)), self.total // 2 - len(kept))
        end, length = None, 0
        for page in found:
            room -= page not in kept
            if room < 0:
                break
            end, length = page, length + self.page_size
        if end:
            self._retain(end, until, pinned)
        return length, len(found) * self.page_size

    def unpin(self, symbols: Symbols, namespace: Hashable = None) -> int:
        """Ends the pin of the longest prefix that has one; returns its length."""
        pinned = [page for page in self.tree.present(symbols, namespace) if self.retained.get(page, (0, False))[1]]
        if not pinned:
            return 0
        self.retained[pinned[-1]] = self.retained[pinned[-1]][0], False
        self.expire(self.now)
        return len(pinned[-1].path()) * self.page_size

    def expire(self, now: float) -> None:
        """Ends what is retained no longer."""
        self.now = max(self.now, now)
        for end, (until, pinned) in list(self.retained.items()):
            if until <= self.now and not pinned:
                self._release(end)

    def demote(self, symbols: Symbols, namespace: Hashable = None, over: bool = False) -> int:
        """Demotes a prefix, and if it is over ends what is retained of it; returns the length of what is demoted."""
        demoted = self.tree.demote(symbols, namespace)
        for end in self.retained.keys() & set(demoted) if over else ():
            self._release(end)
        return len(demoted) * self.page_size

    def expect(self, symbols: Symbols, namespace: Hashable = None) -> int:
        """Returns the length of a prefix in the tree.

        When it is used next changes nothing here: whoever says so has not asked for enough pages to stake one.
        """
        return len(self.tree.present(symbols, namespace)) * self.page_size

    def _retain(self, end: Page, until: float, pinned: bool) -> None:
        if end in self.retained:
            until, pinned = max(until, self.retained[end][0]), pinned or self.retained[end][1]
        else:
            self.tree.lock(end)
        self.retained[end] = until, pinned

    def _release(self, end: Page) -> None:
        del self.retained[end]
        self.tree.unlock(end)

    def remove(self, symbols: Symbols, namespace: Hashable = None) -> int:
        """Removes what starts with a prefix; returns how many pages that frees. What is left of it stays retained."""
        self.tree.remove(symbols, namespace)
        for end, (until, pinned) in list(self.retained.items()):
            if end.top:
                left = [page for page in end.path() if not page.top]
                self._release(end)
                if left:
                    self._retain(left[-1], until, pinned)
        gone = self.tree.evict(len(self.tree.pages), only_removed=True)
        self.free.update(gone)
        return len(gone)

    def flush(self) -> int:
        """Frees every cached page that no lease holds, retained or not; returns how many."""
        for end in list(self.retained):
            self._release(end)
        gone = self.tree.evict(len(self.tree.pages))
        self.free.update(gone)
        return len(gone)

    def _copy(self, lease: ReferenceLease, donor: Page, positions: int, ids: Ids) -> None:
        self.tree.lock(donor)
        if self._room() > 0:
            self._take(lease, 1, ids)
            lease.hit = lease.reserved = lease.hit + positions
        self.tree.unlock(donor)

    def _room(self) -> int:
        return len(self.free) + len(self.tree.evictable())

    def _take(self, lease: ReferenceLease, count: int, ids: Ids) -> None:
        self.free.update(self.tree.evict(count - len(self.free)))
        taken = list(ids) or sorted(self.free)[:count]
        self.free.difference_update(taken)
        lease.table += taken

    def _check_open(self, lease: ReferenceLease) -> None:
        if lease not in self.leases:
            raise LeaseClosed("the lease has ended")
