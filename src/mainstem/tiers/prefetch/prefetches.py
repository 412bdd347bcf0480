"""`Prefetches`: begins prefetches for requests, one for all that lack the same page, and limits their number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mainstem.errors import CorruptTree
from mainstem.tiers.costs import Costs
from mainstem.tiers.host.backup import Backups
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.pending import PendingList
from mainstem.tiers.prefetch.attach_point import AttachPoint
from mainstem.tiers.prefetch.missed import Missed
from mainstem.tiers.prefetch.plan import Plan
from mainstem.tiers.prefetch.prefetch import Prefetch
from mainstem.tiers.prefetch.reader import Reader
from mainstem.tiers.prefetch.waits import Wait
from mainstem.tiers.storage.names import PageNames
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.store import Store

_MOST_TIMES = 16  # the configured minimum: how many tokens may be too few to look them up

Missing = tuple[bytes, bytes]
"""A namespace, and the symbols up to the end of the first page that neither device nor host has."""


class Prefetches:
    """The prefetches under way.

    Args:
        backups: copies the pages before those that are read.

    Attributes:
        reader: reads for all of them.
        declined: why the last request to `ask` got no prefetch: what of its prompt is missing; None: nothing is.
    """

    def __init__(
        self,
        host: HostPages,
        backups: Backups,
        store: Store,
        names: PageNames,
        rows: Sequence[Row],
        costs: Costs,
        pending: PendingList,
    ) -> None:
        self.declined: Missed | None = None
        self._host, self._store, self._pending = host, store, pending
        self._tree, self._names, self._costs = host.tree, names, costs
        self._under_way: dict[Missing, Prefetch] = {}
        self.reader = Reader(host, backups, store, rows, pending, self._private_pages)

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether as many are under way as may be."""
        return len(self) >= self._store.config.max_prefetches

    def ask(self, namespace: bytes, key: bytes, bidirectional: bool) -> Prefetch | None:
        """Begins a prefetch for a request, or returns one under way; see `Tiers.prefetch`."""
        page_bytes = self._tree.page_bytes
        pages = max(len(key) - self._tree.keys.symbol_bytes, 0) // page_bytes  # one token is always computed
        min_pages = max(1, -(-self._min_tokens() // self._tree.page_size))
        prefetch = self.begin(namespace, key[: pages * page_bytes], min_pages, bidirectional)
        if prefetch is not None:
            prefetch.wanted = True
        return prefetch

    def begin(self, namespace: bytes, key: bytes, min_pages: int, bidirectional: bool = False) -> Prefetch | None:
        """Begins a prefetch of whole pages. With fewer than `min_pages` missing or found, nothing is read."""
        missing, have = self._missing(namespace, key)
        pages = len(key) // self._tree.page_bytes
        self.declined = None
        if pages - have < min_pages:
            self.declined = Missed(have, pages, "unasked") if have < pages else None
            return None
        # A prefetch of the same missing page serves both.
        if (same := self._under_way.get(missing)) is not None:
            same.users += 1
            same.shared = True
            return same
        if self.full:
            self._pending.counts["prefetch_skipped"] += 1
            self.reader.late["limit"] += pages - have
            self.declined = Missed(have, pages, "limit")
            return None
        known = have if len(self._tree.components) == 1 else self._tree.core.extent(namespace, key)
        point = AttachPoint(self._host, self._names, namespace, key, known)
        if point.node:
            self.reader.backups.begin(point.node)
        self._pending.counts["prefetches"] += 1
        contents = [row in self.reader.stored for row in range(len(self._tree.components))]
        plan = Plan(self._tree.components, contents, self._tree.page_size, have, pages)
        point.mark_held(plan)
        page_bytes = self._host.memory.payload_bytes(0)
        wait = Wait(self._store, self._costs, self._tree.page_size, page_bytes, have, pages)
        end = partial(self._under_way.pop, missing)
        prefetch = Prefetch(self.reader, namespace, point, wait, plan, min_pages, bidirectional, end)
        self._under_way[missing] = prefetch
        return prefetch

    def go_on(self) -> None:
        """Adds to the tree what requests have met, and begins more reads for them."""
        for prefetch in list(self._under_way.values()):
            prefetch.go_on()

    def overlaps(self, namespace: bytes, key: bytes) -> bool:
        """Whether a prefetch is under way of the first page of a prefix that neither device nor host has."""
        return self._missing(namespace, key)[0] in self._under_way

    def check(self) -> None:
        """Verifies that each prefetch under way has not ended, and that no count of what was late is below 0.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        for prefetch in self._under_way.values():
            prefetch.check()
        ended = [missing for missing, prefetch in self._under_way.items() if prefetch.ended]
        below = [cause for cause, n in (*self.reader.late.items(), *self.reader.short.items()) if n < 0]
        if ended or below:
            raise CorruptTree(f"prefetches: {len(ended)} are under way that have ended; counts below 0: {below}")

    def _private_pages(self, row: int) -> int:
        return sum(prefetch.private_pages(row) for prefetch in self._under_way.values())

    def _min_tokens(self) -> int:
        """Returns how many tokens are worth a look-up. All ranks ask at the same point."""
        tokens = self._store.config.prefetch_min_tokens
        if self._store.config.prefetch == "wait_complete":
            return tokens
        most = _MOST_TIMES * tokens  # so that longer prompts renew the estimates
        estimate = self._costs.prefetch_min_tokens(self._host.memory.payload_bytes(0), most)
        return self._pending.agreed(tokens if estimate is None else estimate)

    def _missing(self, namespace: bytes, key: bytes) -> tuple[Missing, int]:
        """Returns the first page of a prefix that neither device nor host has, and the number of pages before it."""
        here, _, below = self._tree.core.peek(namespace, key, 0, False)
        have = (here + below) // self._tree.page_size
        return (namespace, key[: (have + 1) * self._tree.page_bytes]), have
