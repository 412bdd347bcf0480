"""Writes: pages of the host are copied to storage, from a queue with a limit.

A write locks its pages on the host from the moment it is queued until it has ended or was dropped. It is dropped when
the queue is full, when a copy needs its room before it has begun, or when its prefix is removed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from mainstem.tiers.names import PageNames
from mainstem.tiers.pending import ARRIVED, FAILED, PendingList, Polled
from mainstem.tiers.store import Store, StoreCall, Written
from mainstem.tiers.transfer import HostMemory
from mainstem.tree import HOST, Tree


@dataclass(eq=False)
class _Write:
    """A write of the pages from `begin` to a node's end."""

    node: int
    begin: int
    parent: bytes | None
    keys: list[bytes]
    call: StoreCall[Written] | None = None  # once it has begun
    dropped: bool = False


class Writes:
    """The queue.

    Args:
        tree: the tree.
        memory: the host pages.
        store: the store.
        pending: the list of everything under way.

    Attributes:
        queued: pages that wait or are being written.
        names: the names of the tree's pages.
    """

    def __init__(self, tree: Tree, memory: HostMemory, store: Store, pending: PendingList) -> None:
        self.queued = 0
        self.names = PageNames(tree.core, store.sealer, tree.page_bytes)
        self._core, self._memory, self._store, self._pending = tree.core, memory, store, pending
        self._waiting: deque[_Write] = deque()
        self._running = 0

    def __len__(self) -> int:
        return len(self._waiting) + self._running

    @property
    def waiting_pages(self) -> int:
        """Pages that wait."""
        return sum(len(write.keys) for write in self._waiting)

    def add(self, node: int, begin: int) -> None:
        """Queues the pages from `begin` to a node's end; drops them if the queue has no room."""
        parent, keys = self.names.of(node, begin)  # queued or not: what follows derives its names from these
        if self._core.removed(node):
            return
        if self.queued and self.queued + len(keys) > self._store.config.queue_pages:
            self._pending.counts["write_dropped"] += len(keys)
            return
        self._core.lock(node, HOST)
        self.queued += len(keys)
        write = _Write(node, begin, parent if begin else None, keys)
        self._waiting.append(write)
        self._pending.add(Polled(partial(self._vote, write), partial(self._end, write)))

    def begin(self, *, everything: bool = False) -> None:
        """Begins as many waiting writes as may run at once, or all."""
        while self._waiting and (everything or self._running < self._store.config.writes):
            write = self._waiting.popleft()
            self._running += 1
            slots = self._memory.slots(self._core.ids(write.node, 0, HOST)[write.begin :].tolist())
            write.call = self._store.write(write.parent, write.keys, slots)

    def drop_oldest(self) -> None:
        """Drops the write that has waited longest, so that its pages can be evicted."""
        self._drop(self._waiting.popleft())

    def forget(self, namespace: bytes) -> None:
        """Drops waiting writes of what was removed, and deletes from storage what was removed from a namespace."""
        for write in [write for write in self._waiting if self._core.removed(write.node)]:
            self._waiting.remove(write)
            self._drop(write)
        keys: list[bytes] = []
        for (node, *_, start, _), _, _, removed, *_ in self._core.nodes(namespace):
            if removed:
                keys += self.names.of(node, start)[1]
        if keys:
            self._pending.add(Polled(self._store.delete(keys).done))

    def _vote(self, write: _Write) -> int:
        if write.dropped:
            return ARRIVED
        if write.call is None or not write.call.done():
            return 0
        return FAILED if write.call.value.gap else ARRIVED

    def _end(self, write: _Write, outcome: int) -> None:
        """Ends a write; if storage lacks the page before, queues the whole path."""
        if write.call is None:
            return  # it was dropped
        self._running -= 1
        self.queued -= len(write.keys)
        self._pending.counts["stored"] += write.call.value.pages
        if outcome == FAILED:
            self.add(write.node, 0)
        self._core.unlock(write.node, HOST)

    def _drop(self, write: _Write) -> None:
        write.dropped = True
        self.queued -= len(write.keys)
        self._pending.counts["write_dropped"] += len(write.keys)
        self._core.unlock(write.node, HOST)
