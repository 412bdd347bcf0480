"""Loads: what the host has of a prompt is copied to the device, into private pages of one lease.

The lease publishes the pages once they have arrived; no request can match what has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mainstem import _core
from mainstem._core import Lease
from mainstem.errors import OutOfPages
from mainstem.tiers.pending import ARRIVED, FAILED, Pending, PendingList
from mainstem.tiers.transfer import HostMemory, LayerTicket, Move


class Load(Pending):
    """A copy of host pages into private device pages of a lease. Created by `Tiers.load`.

    The pages can be read layer by layer as they arrive (`ticket`), and are published once all have arrived. A lease may
    be closed at any time: its pages are freed when the copy has ended.

    Attributes:
        ticket: the copy's ticket.
        pages: pages of the sequence; where all layers slide, those before the window are counted but not copied.
        arrived: None while under way; then whether all pages arrived. If not, the lease's hit is unchanged.
    """

    def __init__(self, ticket: LayerTicket, pages: int, pending: PendingList, end: Callable[[Load], object]) -> None:
        self.ticket, self.pages = ticket, pages
        self.arrived: bool | None = None
        self._pending, self._end = pending, end

    def wait(self) -> bool:
        """Waits until it has ended and settles it. Returns whether it arrived."""
        while self.arrived is None:
            self.ticket.wait()
            self._pending.settle([self])
        return self.arrived

    def vote(self) -> int:
        """Votes once the copy has ended."""
        if not self.ticket.done():
            return 0
        return ARRIVED if self.ticket.error is None else FAILED

    def settle(self, outcome: int) -> None:
        """Publishes the pages if they arrived."""
        self.arrived = outcome == ARRIVED
        self._end(self)


class Loads:
    """Begins and ends loads.

    Args:
        memory: makes the copies.
        pending: the list of everything under way.
        cache: the core of the cache that the leases belong to; None if there are no leases.
        page_size: positions per page.
        min_tokens: fewer tokens are computed rather than loaded.

    Attributes:
        counts: `loaded`, `load_failed`, `load_skipped`.
    """

    def __init__(
        self, memory: HostMemory, pending: PendingList, cache: _core.Cache | None, page_size: int, min_tokens: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._memory, self._pending, self._cache = memory, pending, cache
        self._page_size, self._min_tokens = page_size, min_tokens

    @property
    def under_way(self) -> bool:
        """Whether a copy writes to device pages."""
        return bool(self._pending.of(Load))

    def begin(self, lease: Lease) -> Load | None:
        """See `Tiers.load`."""
        if lease.loadable < self._min_tokens:
            return None
        pages = lease.loadable // self._page_size
        try:
            number, pairs = lease.begin_load()
        except OutOfPages:
            self.counts["load_skipped"] += pages
            return None
        moves = [Move(row, source, target) for row, (source, target) in enumerate(pairs) if len(source)]
        ticket = self._memory.up(moves)
        return self._pending.add(Load(ticket, pages, self._pending, lambda load: self._end(load, lease, number)))

    def _end(self, load: Load, lease: Lease, number: int) -> None:
        self.counts["loaded" if load.arrived else "load_failed"] += load.pages
        if lease.closed:
            assert self._cache is not None
            self._cache.end_load(number)
        else:
            lease.end_load(bool(load.arrived))
