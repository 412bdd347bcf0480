"""The slow, obvious model of the tree, the pool and the lease, for tests to compare the real ones with.

One record a page, found by the whole prefix that ends with it. No node, no split, no order that is kept ready: all is
found by looking at everything, and is never made faster. It knows one tier, full attention, and symbols of any hashable
kind; no bytes, no handles: a prefix is named by its key, and `None` is the prefix without a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mainstem.errors import BadArgument, LeaseClosed, NotLocked, OutOfPages, StaleHandle

Symbols = Sequence[Hashable]
Ids = Sequence[int]
Key = tuple[Hashable, tuple[tuple[Hashable, ...], ...]]  # a namespace, and the pages of a prefix


@dataclass
class Page:
    """What is known of one page. It is in flight until it is ready; its locks are those of the prefix it ends."""

    id: int
    created: int
    last_access: int = 0
    hits: int = 0
    priority: int = 0
    ready: int = True
    locks: int = 0


POLICIES: dict[str, Callable[[Page], tuple[int, ...]]] = {  # the leaf with the lowest tuple goes first
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
    """A match. `pending`: symbols in flight behind it; `partial`: symbols that agree with the beginning of `donor`."""

    key: Key | None
    pages: list[int]
    length: int
    pending: int
    partial: int
    donor: Key | None


@dataclass(frozen=True)
class Added:
    """An insertion: where it ends, how much of that stood already, and the tree's pages behind `after`."""

    key: Key | None
    length: int
    existing: int
    pages: list[int]


class ReferenceTree:
    """The tree as a dict of pages. `policy` is a name in `POLICIES`."""

    def __init__(self, page_size: int = 16, policy: str = "lru") -> None:
        self.page_size, self.rank, self.tick = page_size, POLICIES[policy], 0
        self.pages: dict[Key, Page] = {}
        self.counts: Counter[str] = Counter()

    def match(self, symbols: Symbols, namespace: Hashable = None) -> Matched:
        """The longest present prefix, touched; and what lies in flight or inside a page behind it."""
        self.tick += 1
        keys = list(self.keys(symbols, namespace))
        found = list(takewhile(self._present, keys))
        for page in self._pages_of(found):
            page.last_access = self.tick
            page.hits += 1
        flying = list(takewhile(self._in_flight, keys[len(found) :]))
        length, pending = len(found) * self.page_size, len(flying) * self.page_size
        partial, donor = self._partial(found[-1] if found else (namespace, ()), symbols[length:])
        self.counts.update(match_calls=1, queried_symbols=len(symbols), hit_symbols=length)
        ids = [page.id for page in self._pages_of(found)]
        return Matched(found[-1] if found else None, ids, length, pending, partial, donor)

    def peek(self, symbols: Symbols, namespace: Hashable = None) -> int:
        """The length of the match in symbols; nothing is touched."""
        return sum(self.page_size for _ in takewhile(self._present, self.keys(symbols, namespace)))

    def insert(self, symbols: Symbols, ids: Ids, space: Hashable = None, after: Key | None = None, **new: int) -> Added:
        """Adds the pages that are missing behind `after`, with the ids of the whole key. `new`: priority, ready."""
        self.tick += 1
        start = len(after[1]) if after else 0
        stretch = list(takewhile(lambda key: not self._in_flight(key), self.keys(symbols, space)))[start:]
        missing = [key for key in stretch if key not in self.pages]
        for key, page_id in zip(stretch, ids[start:], strict=False):
            page = self.pages.setdefault(key, Page(page_id, self.tick, **new))
            page.priority = max(page.priority, new.get("priority", 0))
        self.counts["inserted_pages"] += len(missing)
        end = start + len(stretch)
        for page in self._pages_of(self.path(stretch[-1] if stretch else None)):
            page.last_access = self.tick
        adopted = [page.id for page in self._pages_of(stretch)]
        return Added(
            stretch[-1] if stretch else after, end * self.page_size, (end - len(missing)) * self.page_size, adopted
        )

    def lock(self, key: Key | None) -> None:
        """Locks the prefix once more."""
        for page in self._pages_of(self.path(key)[-1:]):
            page.locks += 1

    def unlock(self, key: Key | None) -> None:
        """Takes one lock off the prefix. Raises `NotLocked` if it has none of its own."""
        for page in self._pages_of(self.path(key)[-1:]):
            if page.locks == 0:
                raise NotLocked(f"{key} is not locked")
            page.locks -= 1

    def commit(self, key: Key) -> None:
        """Makes the pages in flight that end at `key` present."""
        for page in self._pages_of(self._flight(key)):
            page.ready = True

    def cancel(self, key: Key) -> list[int]:
        """Removes the pages in flight that end at `key` and gives their ids back, the first page's first."""
        return [self.pages.pop(gone).id for gone in self._flight(key)]

    def evict(self, count: int) -> list[int]:
        """Removes the lowest leaf, one page after another, until `count` are gone or no leaf may go."""
        gone: list[int] = []
        while len(gone) < count and (leaves := self._leaves()):
            lowest = min(leaves, key=lambda leaf: self.rank(self.pages[leaf]))
            gone.append(self.pages.pop(lowest).id)
        self.counts["evicted_pages"] += len(gone)
        return gone

    def evictable(self) -> set[Key]:
        """The pages that repeated eviction would remove: all that no lock and no page in flight stands behind."""
        held = [key for key, page in self.pages.items() if page.locks or not page.ready]
        return set(self.pages).difference(*map(self.path, held))

    def keys(self, symbols: Symbols, namespace: Hashable) -> Iterator[Key]:
        """The key of every whole page of a sequence, the first page's first."""
        size = self.page_size
        pages = [tuple(symbols[end - size : end]) for end in range(size, len(symbols) + 1, size)]
        return ((namespace, tuple(pages[: end + 1])) for end in range(len(pages)))

    def path(self, key: Key | None) -> list[Key]:
        """The keys from the first page to `key`. Raises `StaleHandle` if there is no such page."""
        if key is not None and key not in self.pages:
            raise StaleHandle(f"{key} is gone")
        return [] if key is None else [(key[0], key[1][: end + 1]) for end in range(len(key[1]))]

    def _present(self, key: Key) -> bool:
        return key in self.pages and bool(self.pages[key].ready)

    def _in_flight(self, key: Key) -> bool:
        return key in self.pages and not self.pages[key].ready

    def _pages_of(self, keys: Sequence[Key]) -> list[Page]:
        return [self.pages[key] for key in keys]

    def _flight(self, key: Key) -> list[Key]:
        return [above for above in self.path(key) if self._in_flight(above)]

    def _leaves(self) -> set[Key]:
        return self.evictable() - {(namespace, pages[:-1]) for namespace, pages in self.pages}

    def _partial(self, above: Key, rest: Symbols) -> tuple[int, Key | None]:
        """How far `rest` agrees at most with a page that is present behind `above`, and the youngest that does so."""
        best: tuple[int, int, Key | None] = 0, 0, None
        for key in filter(self._present, self.pages):
            if (key[0], key[1][:-1]) == above:
                agree = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(key[1][-1], rest, strict=False)))
                best = max(best, (agree, self.pages[key].created, key), key=lambda found: found[:2])
        return (best[0], best[2]) if best[0] else (0, None)


@dataclass(eq=False)
class ReferenceLease:
    """One sequence in use, and the prefix that it holds locked. The pages behind `published` are its own."""

    namespace: Hashable
    symbols: list[Hashable]
    priority: int = 0
    hit: int = 0
    reserved: int = 0
    published: int = 0
    locked: Key | None = None
    table: list[int] = field(default_factory=list)
    appended: bool = False


class ReferenceCache:
    """The tree, the pool and the leases: a page is free, cached (in the tree) or private (of one lease).

    `copies`: a hit may end inside a page. Where pages are given out, `ids` says which; otherwise the lowest free ones.
    """

    def __init__(self, pages: int, tree: ReferenceTree, enabled: bool = True, copies: bool = False) -> None:
        self.tree, self.page_size, self.enabled, self.copies = tree, tree.page_size, enabled, copies
        self.total, self.free = pages, set(range(pages))
        self.leases: list[ReferenceLease] = []

    def cached(self) -> set[int]:
        """The ids of the pages that the tree holds."""
        return {page.id for page in self.tree.pages.values()}

    def private(self, lease: ReferenceLease) -> list[int]:
        """The ids of the pages that belong to the lease."""
        return lease.table[lease.published // self.page_size :]

    def lease(self, symbols: Symbols, namespace: Hashable = None, priority: int = 0, ids: Ids = ()) -> ReferenceLease:
        """Matches all but the last symbol, locks what was found, and copies the tail of a hit inside a page."""
        lease = ReferenceLease(namespace, list(symbols), priority)
        self.leases.append(lease)
        if self.enabled:
            found = self.tree.match(symbols[:-1], namespace)
            lease.hit = lease.reserved = lease.published = found.length
            lease.table, lease.locked = found.pages, found.key
            self.tree.lock(found.key)
            if self.copies and found.donor:
                self._copy(lease, found.donor, found.partial, ids)
        return lease

    def reserve(self, lease: ReferenceLease, positions: int, ids: Ids = ()) -> None:
        """Gives the lease pages for more positions. Raises `OutOfPages` when free and evictable ones do not reach."""
        self._check_open(lease)
        needed = max(0, -(-(lease.reserved + positions) // self.page_size) - len(lease.table))
        if needed > self._room():
            raise OutOfPages(needed, len(self.free), self._room() - len(self.free), self.total)
        self._take(lease, needed, ids)
        lease.reserved += positions

    def publish(self, lease: ReferenceLease, upto: int) -> None:
        """Moves the whole pages of [0, upto) into the tree, or gives them back where the tree has its own."""
        self._check_open(lease)
        if not 0 <= upto <= min(lease.reserved, len(lease.symbols)):
            raise BadArgument("upto", upto, "a position that has a page and a symbol")
        border = upto // self.page_size * self.page_size
        if not self.enabled or border <= lease.published:
            return
        first, last = lease.published // self.page_size, border // self.page_size
        after = next((key for key in self.tree.path(lease.locked) if len(key[1]) == first), None)
        added = self.tree.insert(lease.symbols[:border], lease.table, lease.namespace, after, priority=lease.priority)
        self.free |= set(lease.table[first:last]) - set(added.pages)
        lease.table[first:last] = added.pages
        self.tree.lock(added.key)
        self.tree.unlock(lease.locked)
        lease.locked, lease.published = added.key, border

    def append(self, lease: ReferenceLease, symbols: Symbols) -> None:
        """Adds decoded symbols to the sequence."""
        self._check_open(lease)
        lease.symbols += symbols
        lease.appended = lease.appended or bool(symbols)

    def finish(self, lease: ReferenceLease, upto: int | None = None) -> None:
        """Publishes [0, upto) and ends the lease; without `upto` all that has a page but a last, appended symbol."""
        if lease in self.leases:
            self.publish(lease, min(lease.reserved, len(lease.symbols) - lease.appended) if upto is None else upto)
            self.abort(lease)

    def abort(self, lease: ReferenceLease) -> None:
        """Ends the lease: its lock goes, and its private pages are free."""
        if lease in self.leases:
            self.leases.remove(lease)
            self.free.update(self.private(lease))
            self.tree.unlock(lease.locked)

    def flush(self) -> int:
        """Frees every page that no lease holds; says how many."""
        gone = self.tree.evict(len(self.tree.pages))
        self.free.update(gone)
        return len(gone)

    def _copy(self, lease: ReferenceLease, donor: Key, positions: int, ids: Ids) -> None:
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
