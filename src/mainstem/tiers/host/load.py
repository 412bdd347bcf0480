"""Loads: what the host has of a prompt is copied to the device, into private pages of one lease.

The lease publishes the pages once they have arrived; no request can match what has not.
"""

from __future__ import annotations

from mainstem import _core
from mainstem._core import Lease
from mainstem.tiers.costs import LoadCost
from mainstem.tiers.host.transfer import HostMemory, Move
from mainstem.tiers.pending import ARRIVED, FAILED, PendingList


class Load:
    """A copy of host pages into private device pages of a lease. Created by `Tiers.load`.

    The pages can be read layer by layer as they arrive (`ticket`), and are published once all have arrived. A lease may
    be closed at any time: its pages are freed when the copy has ended.

    Args:
        cache: the core of the cache that it belongs to.
        memory: makes the copy.
        cost: learns what it took.

    Attributes:
        ticket: the copy's ticket.
        pages: pages of the sequence; where all layers slide, those before the window are counted but not copied.
        arrived: None while under way; then whether all pages arrived. If not, the lease's hit is unchanged.

    Raises:
        OutOfPages: the device has no room.
    """

    def __init__(
        self,
        lease: Lease,
        cache: _core.Cache | None,
        memory: HostMemory,
        page_size: int,
        pending: PendingList,
        cost: LoadCost,
    ) -> None:
        self.pages = lease.loadable // page_size
        self.arrived: bool | None = None
        self._lease, self._cache, self._pending, self._cost = lease, cache, pending, cost
        self._number, pairs = lease.begin_load()
        self._size = sum(len(source) * memory.payload_bytes(row) for row, (source, _) in enumerate(pairs))
        self.ticket = memory.up(
            [Move(row, source, target) for row, (source, target) in enumerate(pairs) if len(source)]
        )

    def wait(self) -> bool:
        """Waits until it has ended and settles it. Returns whether it arrived."""
        while self.arrived is None:
            self.ticket.wait()
            self._pending.settle([self])
        return self.arrived

    def vote(self) -> int:
        if not self.ticket.done():
            return 0
        return ARRIVED if self.ticket.error is None else FAILED

    def settle(self, outcome: int) -> None:
        self.arrived = outcome == ARRIVED
        if self.arrived and self.ticket.took_s is not None:
            self._cost.observe(self._size, self.ticket.took_s)
        self._pending.counts["loaded" if self.arrived else "load_failed"] += self.pages
        if self._lease.closed:
            assert self._cache is not None
            self._cache.end_load(self._number)
        else:
            self._lease.end_load(self.arrived)
