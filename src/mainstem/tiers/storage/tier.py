"""The storage tier, `StorageTier`: a store, and the parts that move pages to it and from it."""

from __future__ import annotations

from typing import Any

from mainstem.tiers.costs import Costs
from mainstem.tiers.host.backup import Backups
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.pending import PendingList, Polled
from mainstem.tiers.prefetch.missed import LATE
from mainstem.tiers.prefetch.prefetches import Prefetches
from mainstem.tiers.prefetch.warm import Warming
from mainstem.tiers.storage.store import Store
from mainstem.tiers.storage.write import Writes


class StorageTier:
    """The parts of one store.

    Args:
        writes: the queue of writes.
        backups: copies the pages before those that are prefetched.

    Attributes:
        store, writes, prefetches, warming: the parts.

    Raises:
        StorageError: the memory of the host cannot be registered.
    """

    def __init__(
        self, store: Store, writes: Writes, host: HostPages, backups: Backups, costs: Costs, pending: PendingList
    ) -> None:
        self.store, self.writes, self._host, self._pending = store, writes, host, pending
        self.prefetches = Prefetches(host, backups, store, writes.names, writes.rows, costs, pending)
        self.warming = Warming(host, store, self.prefetches, pending)
        store.register(host.memory.regions())
        for row in writes.rows:
            store.check_length(row, host.memory.payload_bytes(row.number))
            if store.shelf is not None:
                host.pools[row.number].freed_with(store.shelf.forgets(host.memory, row.number))

    def poll(self) -> None:
        """Begins what is due."""
        self.prefetches.go_on()
        self.writes.begin()
        self.warming.go_on()

    def enter_identity(self) -> None:
        """Starts to enter the identity of the pages in the list of the store, and logs why others are not found."""
        call = self.store.enter_identity()
        self._pending.add(Polled(lambda: int(call.done()), lambda _: self.store.explain(call.value)))

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, and ends the store."""
        self.writes.begin(everything=True)
        self.store.close(timeout_s)

    def check(self) -> None:
        """Verifies the queue of writes, what prefetches count, and what the shelf gives to peers; slow.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        self.writes.check()
        self.prefetches.check()
        if self.store.shelf is not None:
            self.store.shelf.check(self._held_slots())

    def _held_slots(self) -> list[memoryview]:
        """Returns the slots of the host pages that are not free."""
        return [
            slot
            for row in self.writes.rows
            for slot in self._host.memory.slots(row.number, self._host.held(row.number))
        ]

    def counts(self) -> dict[str, Any]:
        """Returns its part of `TierStats`."""
        store = self.store
        counts: dict[str, Any] = {
            "queued": self.writes.queued,
            "late": {cause: self.prefetches.reader.late[cause] for cause in LATE},
            "prefetch_short": dict(self.prefetches.reader.short),
            **store.calls.stats(),
        }
        if store.shelf is not None:
            requests = store.shelf.counts
            counts["peer_given_bytes"] = requests.pop("bytes", 0)
            requests.pop("values", None)
            counts |= {"peer_requests": requests, "peer_faults": store.peer_faults}
        return counts
