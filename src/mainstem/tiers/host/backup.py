"""Backups: what the device has is copied to the host.

The host pages are in flight on their node until the copy is settled: then they are present, or freed if it failed. The
nodes are locked on both tiers meanwhile. The host holds a connected prefix from the root, so a copy fails if the copy
of its parents fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from mainstem._core import Pool
from mainstem.cache.tree import DEVICE, HOST, IN_FLIGHT, PRESENT, Ids
from mainstem.errors import CorruptTree, StaleHandle
from mainstem.settings.engine import HostPolicy
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.host.transfer import Move, Ticket
from mainstem.tiers.pending import ARRIVED, FAILED, PendingList
from mainstem.tiers.storage.write import Span, Writes

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Backup:
    """A copy of nodes, from the top, and the pages of each, to `targets`: host pages by component."""

    backups: Backups
    nodes: list[int]
    spans: list[Span]
    targets: list[Ids]
    ticket: Ticket
    above: _Backup | None  # the copy of the parents, until that has arrived
    below: list[_Backup] = field(default_factory=list)  # the copies that it is `above` of
    failed: bool = False

    def vote(self) -> int:
        if not self.ticket.done():
            return 0
        if self.above is not None and not self.above.failed:
            return 0  # not before its parents
        return FAILED if self.above is not None or self.ticket.error is not None else ARRIVED

    def settle(self, outcome: int) -> None:
        self.backups.end(self, outcome)


class Backups:
    """Begins and ends backups.

    Args:
        policy: when pages are backed up.
        pools: the pools of device pages, by component.
        writes: takes what has arrived; None without storage.

    Attributes:
        flights: the copies that read device pages, by node whose host pages are in flight.
    """

    def __init__(
        self, policy: HostPolicy, pools: Sequence[Pool], host: HostPages, writes: Writes | None, pending: PendingList
    ) -> None:
        self._policy, self._tree, self._core, self._pools = policy, host.tree, host.tree.core, tuple(pools)
        self._host, self._writes, self._pending = host, writes, pending
        self.flights: dict[int, _Backup] = {}

    def begin(self, node: int, hits: int = 0) -> bool:
        held = self._hold(node, hits)
        if not held:
            return not self._core.lacking(node, DEVICE, HOST, hits)
        above = self.flights.get(self._core.in_flight_above(held[-1], HOST))
        sources = [self._missing(held, row) for row in range(len(self._pools))]
        needed = [sum(map(len, by_node.values())) for by_node in sources]
        targets = self._host.allocate(needed, self._core.owner(node))
        if targets is None:
            self._pending.counts["backup_skipped"] += needed[0]
            self._release(held)
            return False
        moves = [self._attach(row, sources[row], ids) for row, ids in enumerate(targets) if sources[row]]
        ticket = self._host.memory.down(moves)
        spans = [(self._core.start(at), self._core.end(at)) for at in held]  # now: a split may move the start
        backup = self._pending.add(_Backup(self, held, spans, targets, ticket, above))
        if above is not None:
            above.below.append(backup)
        self.flights.update(dict.fromkeys(held, backup))
        return not self._core.lacking(node, DEVICE, HOST, hits)

    def begin_touched(self, nodes: Sequence[int]) -> None:
        """Begins the copies that the write policy asks for, of nodes that were matched or published."""
        if self._policy.write_policy == "write_back":
            return
        hits = self._policy.write_hits if self._policy.write_policy == "write_through_selective" else 0
        for node in dict.fromkeys(nodes):
            try:
                self.begin(node, hits)
                if self._writes is not None:
                    self._writes.again(node)
            except StaleHandle:
                continue  # evicted, or joined to the next node, which was touched too

    def make_room(self, row: int, pages: int, ns: bytes) -> None:
        component = self._tree.names[row]
        while pages > 0 and (victim := self._tree.next_victim(component, DEVICE, pages, ns)):
            size = len(self._core.own_ids(victim, row, DEVICE))
            self._tree.lock(victim, DEVICE)  # so that eviction on the host does not join this node to another
            try:
                if self.begin(victim):
                    self._wait()
            finally:
                self._tree.unlock(victim, DEVICE)
            freed = self._tree.evict_for(ns, min(pages, size), component)
            for pool, ids in zip(self._pools, freed, strict=True):
                pool.reclaim(ids)
            if not len(freed[row]):
                return
            pages -= len(freed[row])

    def end(self, backup: _Backup, outcome: int) -> None:
        """Makes its pages present, and queues them for storage; or frees them."""
        if outcome == FAILED:
            backup.failed = True
            self._pending.counts["backup_failed"] += len(backup.targets[0])
            if backup.ticket.error is not None:
                log.warning("a copy to the host failed: %s", backup.ticket.error)
            self._cancel(backup)
            return
        if self._writes is not None:  # before the commit: after it the node may be joined to what its name derives from
            self._writes.add(backup.nodes, backup.spans)
        for node in backup.nodes:
            self._core.commit(node, HOST)
        self._host.publish(backup.targets)
        self._pending.counts["backed_up"] += len(backup.targets[0])
        for below in backup.below:
            below.above = None
        self._release(backup.nodes)

    def check(self) -> None:
        """Verifies that exactly the nodes of copies under way are in flight, and that copies know their parents.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        backups = self._pending.of(_Backup)
        under_way = {node: backup for backup in backups if not backup.failed for node in backup.nodes}
        if under_way != {node: each for node, each in self.flights.items() if not each.failed}:
            raise CorruptTree("backups: exactly the nodes of copies under way are in flight")
        for backup in {*backups, *self.flights.values()}:
            if any(below.above is not backup for below in backup.below):
                raise CorruptTree("backups: a copy waits for the one above it")

    def _wait(self) -> None:
        while backups := self._pending.of(_Backup):
            for backup in backups:
                backup.ticket.wait()
            self._pending.settle(backups)

    def _hold(self, node: int, hits: int) -> list[int]:
        """Locks the nodes to copy, from the top, on both tiers. Repeats, since a lock may split where a window begins.

        Stops before a node that is being copied: pages added to it since would be settled with that copy.
        """
        held: list[int] = []
        while True:
            lacking = self._core.lacking(node, DEVICE, HOST, hits)
            missing = list(takewhile(lambda at: at not in self.flights, lacking))
            new = [at for at in missing if at not in held]
            if not new:
                return missing
            for at in new:
                self._core.lock(at, DEVICE)
                self._core.lock(at, HOST)
            held += new

    def _missing(self, nodes: Sequence[int], row: int) -> dict[int, Ids]:
        """Returns the device pages of one component that the host lacks, by node."""
        lacking = [node for node in nodes if self._core.presence(node, row, HOST) not in (PRESENT, IN_FLIGHT)]
        own = {node: self._core.own_ids(node, row, DEVICE) for node in lacking}
        return {node: ids for node, ids in own.items() if len(ids)}

    def _attach(self, row: int, sources: dict[int, Ids], target: Ids) -> Move:
        """Attaches host pages, in flight, to nodes for one component; returns the copy to make."""
        at = 0
        for node, source in sources.items():
            self._core.attach(node, row, HOST, target[at : at + len(source)], False)
            at += len(source)
        return Move(row, np.concatenate(list(sources.values())), target)

    def _cancel(self, backup: _Backup) -> None:
        """Frees what was in flight, once no copy below is under way."""
        if backup.below:
            return
        for node in reversed(backup.nodes):
            self._host.release(self._core.cancel(node, HOST))
        self._release(backup.nodes)
        if (above := backup.above) is not None:
            above.below.remove(backup)
            if above.failed:
                self._cancel(above)

    def _release(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.flights.pop(node, None)
            self._core.unlock(node, DEVICE)
            self._core.unlock(node, HOST)
