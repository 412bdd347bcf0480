"""Prefetches: what storage has of a prompt is copied to the host, before its request is scheduled.

    look up --deepest end n--> read | read | read ... --verified, in order--> in the tree

One lookup asks for every component of every page that could be of use, or for fewer, where each is a request. The
prefetch then aims at the deepest end from which all components can go on (`plan`), and reads what the host lacks for
that: full attention from the front, then windows, then the state. Pages are read into private host pages. Those that
arrived intact are added to the tree, at the prefetch's `Anchor`. If one did not, the prefetch aims at the deepest end
that is left: what has arrived stays.

A prefetch serves every request that lacks the same page. How long its requests wait is decided in `waits`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mainstem.components import Full, State
from mainstem.tiers.backup import Backups
from mainstem.tiers.host import HostPages
from mainstem.tiers.names import PageNames
from mainstem.tiers.pending import PendingList, Polled
from mainstem.tiers.plan import Ask, Marks, Plan
from mainstem.tiers.prefill import PrefillCost
from mainstem.tiers.rows import Row
from mainstem.tiers.store import Find, Found, Store, StoreCall
from mainstem.tiers.waits import Cause, Wait
from mainstem.tree import HOST, IN_FLIGHT, PRESENT, Ids

log = logging.getLogger(__name__)

Missing = tuple[bytes, bytes]
"""A namespace, and the symbols up to the end of the first page that neither device nor host has."""


class Anchor:
    """The node that a prefetch's next pages follow, locked on the host.

    Args:
        host: the pages of the host.
        names: the names of the tree's pages.
        namespace, key: the prompt.
        pages: pages of the prompt that some tier has of the first component.

    Attributes:
        node: the node; 0 before the first page of a prompt.
        pages: pages of the prompt up to the node's end.
        connected: whether a prefix needs all pages of the first component.
    """

    def __init__(self, host: HostPages, names: PageNames, namespace: bytes, key: bytes, pages: int) -> None:
        self._tree, self._core, self._host, self._names = host.tree, host.tree.core, host, names
        self._namespace, self._key = namespace, key
        self.connected = isinstance(host.tree.components[0], Full)
        self.node, self.pages = self._locate(pages), pages
        self._core.lock(self.node, HOST)
        self._named_from = 0
        self._named: list[bytes] = []  # the names of the pages from there on

    def look_up(
        self, store: Store, asked: Sequence[tuple[Row, NDArray[np.int64]]], search: Callable[[Ask], list[Marks]]
    ) -> StoreCall[Found]:
        """Looks up pages of the prompt, by row; by a search where each of them is a request."""
        first = min((int(pages[0]) for _, pages in asked if len(pages)), default=self.pages)
        at = self.node
        while at and self._core.end(at) > first:
            at = self._core.parent(at)
        self._named_from = self._core.end(at) if at else 0
        page_bytes = self._tree.page_bytes
        symbols = self._key[self._named_from * page_bytes :]
        named_from, rows = self._named_from, {row.number: row for row, _ in asked}
        pages = [(row, (part - named_from).tolist()) for row, part in asked]

        def found(find: Find) -> list[list[bool]]:
            marks = search(lambda row, part: find(rows[row], (part - named_from).tolist()))
            return [marks[row.number][part].tolist() for row, part in asked]

        return store.look_up(self._names.last(self._namespace, at), symbols, page_bytes, pages, found)

    def take(self, names: list[bytes]) -> None:
        """Takes the names of the pages that were looked up."""
        self._named = names

    def names(self, begin: int, end: int) -> list[bytes]:
        """Returns the names of pages [begin, end)."""
        return self._named[begin - self._named_from : end - self._named_from]

    def mark_held(self, plan: Plan) -> None:
        """Marks what the host has, or is being given, up to the node."""
        for row, held in enumerate(plan.held):
            held[:] = False
            if row == 0 and self.connected:
                held[: self.pages] = True
            elif self.node:
                held[: self.pages] = self._core.ids(self.node, row, HOST) >= 0

    @property
    def in_flight(self) -> bool:
        """Whether pages must wait, because those of the node are in flight on the host."""
        rows = range(len(self._tree.components)) if self.node else ()
        return any(self._core.presence(self.node, row, HOST) == IN_FLIGHT for row in rows)

    def place(self, row: int, begin: int, page_ids: Ids) -> tuple[int, int]:
        """Adds private pages of a component to the tree, from page `begin` of the prompt on.

        Those of the first component come first, in order. Pages of the tree take precedence.

        Returns how many of the pages are in the tree then, and how many of those are the given ones; others are freed.
        """
        broken = self.connected and self.node and self._core.presence(self.node, 0, HOST) != PRESENT
        kept, ours = 0, np.zeros(len(page_ids), bool)
        if len(page_ids) and not broken:
            kept = self._insert(begin, page_ids, ours) if row == 0 else self._attach(row, begin, page_ids, ours)
        self._host.pools[row].publish(page_ids[ours])
        self._host.pools[row].release(page_ids[~ours])
        return kept, int(ours.sum())

    def back_to(self, pages: int) -> None:
        """Moves to an earlier end."""
        if pages < self.pages:
            self._move(self._locate(pages), pages)

    def release(self) -> None:
        """Unlocks the node."""
        self._core.unlock(self.node, HOST)

    def _locate(self, pages: int) -> int:
        return self._core.locate(self._namespace, self._key, pages) if pages else 0

    def _move(self, node: int, pages: int) -> None:
        self._core.lock(node, HOST)
        self._core.unlock(self.node, HOST)
        self.node, self.pages = node, pages

    def _insert(self, begin: int, page_ids: Ids, ours: Marks) -> int:
        """Adds pages of the first component; see `place`."""
        after, first, end = self.node, self.pages, begin + len(page_ids)
        if begin < first:  # a window may have gaps
            after = first = 0
        columns = [np.full(0 if isinstance(each, State) else end, -1, np.int32) for each in self._tree.components]
        if self.connected:
            columns[0][:] = 0  # before `after`
        columns[0][begin:] = page_ids
        key = self._key[: end * self._tree.page_bytes]
        node, length, _, theirs = self._core.insert(self._namespace, key, 0, columns, after, 0, HOST, True)
        length //= self._tree.page_size
        kept = max(0, length - begin)
        ours[:kept] = theirs[begin - first : length - first] == page_ids[:kept]
        if length > self.pages:
            self._move(node, length)
        if kept:
            self._names.keep(node, self.names(length - 1, length)[0])
            self._core.note_written(node, begin)  # storage has them
        return kept

    def _attach(self, row: int, begin: int, page_ids: Ids, ours: Marks) -> int:
        """Adds pages of another component to nodes that are there; see `place`."""
        core, end = self._core, begin + len(page_ids)
        whole = isinstance(self._tree.components[row], State)
        if not whole:
            self._locate(begin)  # splits a node there
        last = at = self._locate(end)
        while at and (core.end(at) == end if whole else core.end(at) > begin):
            if not core.presence(at, row, HOST):
                mine = slice(0, 1) if whole else slice(core.start(at) - begin, core.end(at) - begin)
                core.attach(at, row, HOST, page_ids[mine], True)
                ours[mine] = True
            at = core.parent(at)
        return len(page_ids) if last else 0


@dataclass(eq=False)
class _Read:
    """A batch of pages of one component, read from storage into private host pages; None: they have no content."""

    row: int
    begin: int
    page_ids: Ids
    call: StoreCall[int] | None
    good: int = 0  # pages that arrived intact, from the first
    ended: bool = False

    @property
    def done(self) -> bool:
        return self.call is None or self.call.done()

    @property
    def intact(self) -> int:
        return len(self.page_ids) if self.call is None else self.call.value


class Prefetch:
    """A copy of a prompt's pages from storage to the host. Created by `Tiers.prefetch`.

    Attributes:
        loaded: positions that can be used because of it so far.
        users: number of requests that want it.
        shared: whether there was ever more than one.
        wanted: whether a request asked for it; no request waits for a prefetch of `warm`.
        ended: whether no more pages will arrive.
    """

    def __init__(
        self, prefetches: Prefetches, missing: Missing, anchor: Anchor, wait: Wait, plan: Plan, min_pages: int
    ) -> None:
        self.users, self.loaded = 1, 0
        self.shared = self.wanted = self.ended = False
        self._prefetches, self._missing, self._anchor, self._wait = prefetches, missing, anchor, wait
        self._store, self._plan, self._min_pages = prefetches.store, plan, min_pages
        self._depth = self._promised = plan.have  # the end that it aims at, and that storage seemed to have at first
        self._left: deque[tuple[int, int, int]] = deque()  # pages to read for that: row, begin, end
        self._reads: deque[_Read] = deque()
        self._looked_up = self._aimed = self._aiming = self._expired = False
        self._faulty = self._crowded = False  # a page did not arrive; the host had no room
        self._broken = False  # a page of the reads under way did not arrive: those after it are not used
        self._lost = False  # because storage does not have it, rather than because the host has lost what is before it
        self._offer: int | None = None  # the deepest end, as this rank sees it
        self._asked = [(row, plan.asked(row.number)) for row in prefetches.rows]
        every_end = not (prefetches.pending.alone or plan.any_end)
        search = partial(plan.search, every_end=every_end)
        self._lookup = lookup = anchor.look_up(self._store, self._asked, search)
        prefetches.pending.add(Polled(lambda: self._answer() if lookup.done() else 0, self._found))
        prefetches.pending.add(Polled(self._late, self._expire))

    @property
    def waiting(self) -> bool:
        """Whether the request should wait for more."""
        return not (self.ended or self._expired or self._store.config.prefetch == "best_effort")

    def revoke(self) -> None:
        """Withdraws one request. With none left, no more reads begin; pages being read are still kept."""
        self.users -= 1

    def private_pages(self, row: int) -> int:
        """Returns the number of host pages of a component that are being read into and not in the tree yet."""
        return sum(len(read.page_ids) for read in self._reads if read.row == row)

    # ---------------------------------------------------------------- how long to wait

    def _late(self) -> bool:
        """Whether a request should stop waiting, as this rank sees it."""
        return self.ended or self._wait.over or self._overdue()

    def _expire(self, outcome: int) -> None:
        """Ends the wait of its requests. If storage has not answered the lookup, it is marked as slow."""
        self._expired = True
        if self.wanted and self.users > 0:
            end = self._promised if self._looked_up and not self._lookup.refused else self._plan.pages
            self._prefetches.late[self._why()] += end - self._usable
        if self.wanted and not self._looked_up:
            self._store.gave_up(self._wait.waited_s)

    def _overdue(self) -> bool:
        calls = (read.call for read in self._reads)
        return self._lookup.overdue() or any(call is not None and call.overdue() for call in calls)

    def _why(self) -> Cause:
        """Returns why no request waits for the missing pages."""
        if self._lookup.refused or self._store.breaker.open:
            return "breaker"
        if self._faulty:
            return "fault"
        if self._crowded:
            return "host_room"
        return "slow" if self._store.slow and not self._overdue() else "timeout"

    @property
    def _usable(self) -> int:
        """The end from which a request can go on because of it."""
        if self._plan.any_end:
            return self._anchor.pages
        whole = self._looked_up and not (self._left or self._reads or self._aiming)
        return self._depth if whole else self._plan.have

    # ---------------------------------------------------------------- what to aim at

    def _answer(self) -> int:
        """Votes for the deepest end, once storage has answered."""
        if self._offer is None:
            found = self._lookup.value
            self._anchor.take(found.names)
            for (row, pages), there in zip(self._asked, found.there, strict=False):  # nothing, if the call failed
                self._plan.stored[row.number][pages] = there
            self._offer = self._plan.deepest(self._plan.pages)
        return 1 + self._offer

    def _found(self, outcome: int) -> None:
        """Takes the result of the lookup."""
        self._looked_up = True
        self._wait.answered(outcome - 1 - self._plan.have, self._lookup.took_s)
        self._agreed(self._plan.pages, outcome)

    def _propose(self, most: int) -> None:
        """Aims at the deepest end of at most `most` pages that every rank can reach."""
        offer = self._plan.deepest(most)
        if self._prefetches.pending.alone:
            self._aim(offer)
        else:
            self._aiming = True
            self._prefetches.pending.add(Polled(lambda: 1 + offer, partial(self._agreed, most)))

    def _agreed(self, most: int, outcome: int) -> None:
        """Aims at the lowest offer of the ranks. If it is below `most`, a rank that offered more may lack it."""
        self._aiming, depth = False, outcome - 1
        if self._prefetches.pending.alone or self._plan.any_end or depth in (most, self._plan.have):
            self._aim(depth)
        else:
            self._propose(depth)

    def _aim(self, depth: int) -> None:
        """Begins to read what an end needs."""
        if not self._aimed:
            self._aimed = True
            self._prefetches.note_short(self._plan, depth)
            if depth - self._plan.have < self._min_pages:
                depth = self._plan.have
            self._promised = depth
        self._depth = depth
        self._anchor.back_to(depth)
        self._anchor.mark_held(self._plan)
        self._left = deque(self._plan.missing(depth) if depth > self._plan.have else ())
        self._go_on()

    # ---------------------------------------------------------------- reads

    def _go_on(self) -> None:
        """Begins more reads; ends if there are none."""
        config = self._store.config
        while self.users > 0 and not self._broken and self._left and len(self._reads) < config.batches:
            row, begin, end = self._left[0]
            page_ids = self._prefetches.allocate(row, end - begin)
            if len(page_ids):
                self._read(row, begin, page_ids)
            elif self._reads:
                break  # a read under way may make room
            else:
                self._do_without_room(row)
                return
        if not self._reads and self._looked_up and not self._aiming and (self.users <= 0 or not self._left):
            self.ended = True
            if not self._plan.any_end:
                self.loaded = (self._usable - self._plan.have) * self._prefetches.host.tree.page_size
            self._anchor.release()
            self._prefetches.end(self._missing)

    def _read(self, row: int, begin: int, page_ids: Ids) -> None:
        """Begins to read the next pages into these."""
        _, _, end = self._left.popleft()
        last = begin + len(page_ids)
        if last < end:
            self._left.appendleft((row, last, end))
        call = self._prefetches.read(row, self._anchor.names(begin, last), page_ids)
        read = _Read(row, begin, page_ids, call)
        self._reads.append(read)
        self._prefetches.pending.add(Polled(partial(self._vote, read), partial(self._arrived, read)))

    def _vote(self, read: _Read) -> int:
        """Votes once a batch has been read and its pages can be added to the tree."""
        return 1 + read.intact if read.done and not self._anchor.in_flight else 0

    def _arrived(self, read: _Read, outcome: int) -> None:
        """Adds the pages that were read to the tree, in order, and begins more reads."""
        host, counts = self._prefetches.host, self._prefetches.pending.counts
        read.good, read.ended = outcome - 1, True
        while self._reads and self._reads[0].ended:
            read = self._reads.popleft()
            good = read.good if not self._broken else 0
            kept, ours = self._anchor.place(read.row, read.begin, read.page_ids[:good])
            counts["prefetched"] += ours
            counts["prefetch_dropped"] += good - ours
            if self._plan.any_end:
                self.loaded += ours * host.tree.page_size
            host.pools[read.row].release(read.page_ids[good:])
            if kept < len(read.page_ids) and not self._broken:
                self._broken = self._faulty = True
                self._plan.stored[read.row][read.begin + kept] = False
                self._lost = kept == good  # else the host has lost what is before it
        if self._broken and not self._reads:
            self._aim_again()
        else:
            self._go_on()

    def _aim_again(self) -> None:
        """Aims at what is left without a page that did not arrive."""
        self._broken = False
        if self._lost:
            self._anchor.mark_held(self._plan)
            self._propose(self._depth)
        else:
            self._left.clear()
            self._depth = self._plan.have
            self._go_on()

    def _do_without_room(self, row: int) -> None:
        """Aims at what is left if the host has no room for more pages of a component."""
        most = self._anchor.pages if row == 0 and self._anchor.connected else self._plan.have
        if self.wanted and not self._expired:
            self._prefetches.late["host_room"] += self._depth - most
        self._promised, self._crowded = most, True
        self._propose(most)


class Prefetches:
    """Begins prefetches, limits their number and the host pages that they hold.

    Args:
        host: the pages of the host.
        backups: copies the pages before those that are read.
        store: the store.
        names: the names of the tree's pages.
        rows: what is stored.
        cost: the estimate of what computing takes.
        pending: the list of everything under way.

    Attributes:
        late: pages that were computed although storage has them, or may have them, by cause.
        short: pages that the first component alone could have gone further, by the component that stood in the way.
        host, store, rows, pending: as given, for its prefetches.
    """

    def __init__(
        self,
        host: HostPages,
        backups: Backups,
        store: Store,
        names: PageNames,
        rows: Sequence[Row],
        cost: PrefillCost,
        pending: PendingList,
    ) -> None:
        self.late: Counter[Cause] = Counter()
        self.short: Counter[str] = Counter()
        self.host, self.store, self.rows, self.pending = host, store, tuple(rows), pending
        self._tree, self._backups, self._names, self._cost = host.tree, backups, names, cost
        self._stored = {row.number: row for row in rows}
        self._under_way: dict[Missing, Prefetch] = {}

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
        missing, have = self._missing(namespace, key)
        pages = len(key) // self._tree.page_bytes
        if pages - have < min_pages:
            return None
        # A prefetch of the same missing page serves both.
        if (same := self._under_way.get(missing)) is not None:
            same.users += 1
            same.shared = True
            return same
        if self.full:
            self.pending.counts["prefetch_skipped"] += 1
            self.late["limit"] += pages - have
            return None
        known = have if len(self._tree.components) == 1 else self._tree.core.extent(namespace, key)
        anchor = Anchor(self.host, self._names, namespace, key, known)
        if anchor.node:
            self._backups.begin(anchor.node)
        self.pending.counts["prefetches"] += 1
        contents = [row in self._stored for row in range(len(self._tree.components))]
        plan = Plan(self._tree.components, contents, self._tree.page_size, have, pages)
        anchor.mark_held(plan)
        wait = Wait(self.store, self._cost, self._tree.page_size, have, pages)
        self._under_way[missing] = prefetch = Prefetch(self, missing, anchor, wait, plan, min_pages)
        return prefetch

    def overlaps(self, namespace: bytes, key: bytes) -> bool:
        """Whether a prefetch is under way of the first page of a prefix that neither device nor host has."""
        return self._missing(namespace, key)[0] in self._under_way

    def private_pages(self, row: int) -> int:
        """Returns the number of host pages of a component that prefetches own."""
        return sum(prefetch.private_pages(row) for prefetch in self._under_way.values())

    def allocate(self, row: int, n: int) -> Ids:
        """Allocates private pages of a component for a batch.

        At most n, as many as a call reads, and as many as prefetches may hold; none without room.
        """
        config = self.store.config
        limit = max(1, int(self.host.pools[row].total * config.prefetch_host_share)) - self.private_pages(row)
        needed = [0] * len(self.host.pools)
        needed[row] = max(0, min(n, limit, config.batch_pages if row in self._stored else n))
        allocated = self.host.allocate(needed)
        return np.empty(0, np.int32) if allocated is None else allocated[row]

    def read(self, row: int, names: Sequence[bytes], page_ids: Ids) -> StoreCall[int] | None:
        """Begins to read pages of a component; None: they have no content."""
        stored = self._stored.get(row)
        if stored is None:
            return None
        return self.store.read(stored, names, self.host.memory.slots(row, page_ids.tolist()))

    def note_short(self, plan: Plan, depth: int) -> None:
        """Counts what stood in the way where the first component alone would have gone further."""
        pages, row = plan.in_the_way(depth)
        if not pages:
            return
        name = self._tree.names[row]
        if name not in self.short:
            log.info("storage has %d pages further than its %s allows; more of this is only counted", pages, name)
        self.short[name] += pages

    def end(self, missing: Missing) -> None:
        """Notes that a prefetch has ended."""
        del self._under_way[missing]

    def _missing(self, namespace: bytes, key: bytes) -> tuple[Missing, int]:
        """Returns the first page of a prefix that neither device nor host has, and the number of pages before it."""
        here, _, below = self._tree.core.peek(namespace, key, 0, False)
        have = (here + below) // self._tree.page_size
        return (namespace, key[: (have + 1) * self._tree.page_bytes]), have
