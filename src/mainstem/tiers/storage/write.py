"""Writes: pages of the host are copied to storage, from two queues with limits.

    pages    of full attention, windows and chunks, as they were backed up        the newest is dropped
    states   one at a time, the most worth first                                  the least worth is dropped

A prefix needs one state, and a state is large, so not each of them deserves a write. Those where prompts part or end go
first, and of those, and of the others, the ones that save the most tokens: those after the last state above that was
written.

A store loses single values: the least recently used, a damaged one, or all of them. So a write also asks for the page
before it, and without that writes the whole path again. And each use of a prefix asks for the windows and the state
that it needs, and writes those that are gone.

A write locks its pages on the host from the moment it is queued until it has ended or was dropped. It is dropped when
its queue is full, when a copy needs its room before it has begun, or when its prefix is removed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mainstem.cache.components import Full, State
from mainstem.cache.tree import HOST, PRESENT, Ids, Tree
from mainstem.errors import check_rules
from mainstem.tiers.host.transfer import HostMemory
from mainstem.tiers.pending import ARRIVED, FAILED, PendingList, Polled
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.names import PageNames
from mainstem.tiers.storage.rows import Row, stored_rows
from mainstem.tiers.storage.store import Part, Store, Written

Span = tuple[int, int]
"""Pages of a path: the first one, and the one after the last."""

_MAX_NODES = 1 << 16  # whose states are known to be written
_WHOLE = ARRIVED + 1  # the vote of a write of which storage has all; a full one refuses pages


@dataclass(eq=False)
class _Write:
    """A write of the pages from `begin` to a node's end, or of the state there.

    Args:
        locks: the nodes that it locks; the last one is `node`.
        spans: pages of which it may write every row; of other pages, the rows that a prefix ending at the node needs.
        before: the name of the page before `begin`; empty if this is a write of a state.
    """

    node: int
    begin: int
    locks: Sequence[int]
    spans: Sequence[Span]
    before: bytes
    names: list[bytes]
    call: StoreCall[Written] | None = None  # once it has begun
    dropped: bool = False


@dataclass(frozen=True, eq=False)
class _Queued:
    """A write in the list of what is under way."""

    writes: Writes
    write: _Write

    def vote(self) -> int:
        return self.writes.vote(self.write)

    def settle(self, outcome: int) -> None:
        self.writes.end(self.write, outcome)


class Writes:
    """The queues.

    Attributes:
        pages: pages of prompts that wait or are being written.
        names: the names of the tree's pages.
        rows: what is stored.
    """

    def __init__(self, tree: Tree, memory: HostMemory, store: Store, pending: PendingList) -> None:
        self.names = PageNames(tree.core, store.sealer, tree.page_bytes)
        self.rows = stored_rows(tree, memory)
        self._paged = tuple(row for row in self.rows if not isinstance(tree.components[row.number], State))
        self._state = next((row for row in self.rows if row not in self._paged), None)
        self._late = tuple(row for row in self._paged if not isinstance(tree.components[row.number], Full))
        self._tree, self._core, self._memory, self._store, self._pending = tree, tree.core, memory, store, pending
        self._waiting: deque[_Write] = deque()
        self._states: list[_Write] = []  # those that wait
        self._written: OrderedDict[int, None] = OrderedDict()  # nodes whose state was written, for the worth of others
        self._lost: OrderedDict[int, bytes] = OrderedDict()  # names of states that could not be written, by node
        self._running = 0
        self.pages = self._running_states = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._states) + self._running

    @property
    def queued(self) -> int:
        """Pages and states that wait or are being written."""
        return self.pages + self.states

    @property
    def states(self) -> int:
        """States that wait or are being written."""
        return len(self._states) + self._running_states

    def waiting(self, row: int) -> int:
        """Returns how many ids of a row the waiting writes may hold."""
        if isinstance(self._tree.components[row], State):
            return len(self._states) + sum(len(write.locks) for write in self._waiting)
        return sum(len(write.names) for write in self._waiting) + sum(
            self._core.end(write.node) for write in self._states
        )

    def add(self, nodes: Sequence[int], spans: Sequence[Span]) -> None:
        """Queues what was backed up.

        Args:
            nodes: nodes of a path, from the top, of which all pages may be written from the first to the last one.
            spans: the pages of each.
        """
        begin = spans[0][0]
        before, names = self.names.of(nodes[-1], begin)  # queued or not: what follows derives its names from these
        if self._core.removed(nodes[-1]):
            return
        if self._paged:
            # A lock holds a window only as far as it reaches from its node.
            locks = nodes if self._late else nodes[-1:]
            self._add_pages(_Write(nodes[-1], begin, locks, spans, before, names))
        if self._state is not None:
            for node in nodes:
                self._add_state(node, names[self._core.end(node) - begin - 1])

    def again(self, node: int) -> None:
        """Queues what a prefix that was used needs beside full attention, if storage may lack it: unless others wait.

        Raises:
            StaleHandle: the node was evicted.
        """
        lost = self._lost.pop(node, None)
        if self._core.removed(node) or not (self._late or self._state is not None):
            return
        if lost is not None:
            self._add_state(node, lost)
        elif not self._waiting and not self._states:  # a check gives way to writes
            self._add_check(node)

    def begin(self, *, everything: bool = False) -> None:
        """Begins as many waiting writes as may run at once, or all. Pages and states take turns."""
        while (self._waiting or self._states) and (everything or self._running < self._store.config.writes):
            if self._waiting:
                self._begin_pages(self._waiting.popleft())
            if self._states and (everything or self._running < self._store.config.writes):
                self._begin_state(max(self._states, key=self._worth))

    def give_way(self) -> None:
        """Drops the oldest waiting write, else the state of the least worth, so that its pages can be evicted."""
        if self._waiting:
            self._drop_pages(self._waiting[0])
        else:
            self._drop_state(min(self._states, key=self._worth))

    def forget(self, namespace: bytes) -> None:
        """Drops waiting writes of what was removed, and deletes from storage what was removed from a namespace."""
        for write in [write for write in self._waiting if self._core.removed(write.node)]:
            self._drop_pages(write)
        for write in [write for write in self._states if self._core.removed(write.node)]:
            self._drop_state(write)
        names: list[bytes] = []
        for (node, *_, start, _), _, _, removed, *_ in self._core.nodes(namespace):
            if removed:
                names += self.names.of(node, start)[1]
                self._core.note_deleted(node)
        if names:
            self._pending.add(Polled(self._store.delete(self.rows, names).done))

    def check(self) -> None:
        """Verifies that what is queued and being written is counted, and locked until it has ended.

        Raises:
            CorruptTree: names the rule that is broken.
        """
        queued = [each.write for each in self._pending.of(_Queued) if not each.write.dropped]
        running = [write for write in queued if write.call is not None]
        pages = sum(len(write.names) for write in queued if write.before)
        states = [write for write in running if not write.before]
        rules = {
            "what waits is under way": {*self._waiting, *self._states} == {*queued} - {*running},
            "pages are counted": pages == self.pages,
            "calls are counted": (len(running), len(states)) == (self._running, self._running_states),
            "a state waits once": len({write.node for write in self._states}) == len(self._states),
            "what is remembered is bounded": max(len(self._written), len(self._lost)) <= _MAX_NODES,
        }
        check_rules("writes to storage", rules)

    # ---------------------------------------------------------------- pages

    def _add_pages(self, write: _Write) -> None:
        if self.pages and self.pages + len(write.names) > self._store.config.queue_pages:
            self._pending.counts["write_dropped"] += len(write.names)
            return
        self.pages += len(write.names)
        self._waiting.append(write)
        self._queue(write)

    def _begin_pages(self, write: _Write) -> None:
        parts = [self._part(row, write) for row in self._paged]
        full = next((row for row in self._paged if isinstance(self._tree.components[row.number], Full)), None)
        # A page of full attention after a gap would never be found.
        after = (full, write.before) if full is not None and write.begin else None
        self._run(write, self._store.write([part for part in parts if part.names], after))

    def _drop_pages(self, write: _Write) -> None:
        self._waiting.remove(write)
        self.pages -= len(write.names)
        self._drop(write)

    def _part(self, row: Row, write: _Write) -> Part:
        """Returns the pages of a row that the host has and the write holds."""
        end = write.begin + len(write.names)
        mine = np.zeros(end, np.bool_)
        for first, last in write.spans:
            mine[first:last] = True
        mine[self._needed_from(row, end) :] = True
        ids = self._present(write.node, row.number, write.begin)  # a copy of some may have failed
        pages = np.flatnonzero(mine[write.begin :] & (ids >= 0))
        slots = self._memory.slots(row.number, ids[pages].tolist())
        numbers = (pages + write.begin).tolist()
        return Part(row, [write.names[page] for page in pages], slots, self._namespace(write.node), numbers)

    def _needed_from(self, row: Row, end: int) -> int:
        component = self._tree.components[row.number]
        assert not isinstance(component, State)
        return int(component.needed_from(np.array([end * self._tree.page_size]))[0]) // self._tree.page_size

    def _present(self, node: int, row: int, begin: int) -> Ids:
        """Returns the host's ids of the pages from `begin` to a node's end; -1 where they are not present."""
        core, end = self._core, self._core.end(node)
        page_ids = np.full(end - begin, -1, np.int32)
        while node and core.end(node) > begin:
            own, start = core.own_ids(node, row, HOST), core.start(node)
            if len(own):
                page_ids[max(start, begin) - begin : core.end(node) - begin] = own[max(begin - start, 0) :]
            node = core.parent(node)
        return page_ids

    # ---------------------------------------------------------------- states

    def _add_state(self, node: int, name: bytes) -> None:
        assert self._state is not None
        known = any(write.node == node for write in self._states)
        if known or not self._core.presence(node, self._state.number, HOST):
            return
        if len(self._states) >= self._store.config.queue_pages:
            self._drop_state(min(self._states, key=self._worth))
        write = _Write(node, self._core.end(node) - 1, [node], (), b"", [name])
        self._states.append(write)
        self._queue(write)

    def _begin_state(self, write: _Write) -> None:
        assert self._state is not None
        self._states.remove(write)
        ids = self._core.own_ids(write.node, self._state.number, HOST)
        slots = self._memory.slots(self._state.number, ids.tolist())
        parts = [Part(self._state, write.names, slots, self._namespace(write.node))] if len(ids) else []
        self._written[write.node] = None
        if len(self._written) > _MAX_NODES:
            self._written.popitem(last=False)
        self._running_states += 1
        self._run(write, self._store.write(parts))

    def _namespace(self, node: int) -> bytes:
        return self._core.path_key(node, self._core.end(node))[0]

    def _worth(self, write: _Write) -> tuple[bool, int]:
        """Ranks a waiting state: whether prompts part or end there, and how many pages it saves."""
        above = self._core.parent(write.node)
        while above and above not in self._written:
            above = self._core.parent(above)
        end = self._core.end(write.node)
        return self._core.ends_or_parts(write.node), end - (self._core.end(above) if above else 0)

    def _drop_state(self, write: _Write) -> None:
        self._states.remove(write)
        self._lose(write)
        self._drop(write)

    def _lose(self, write: _Write) -> None:
        self._written.pop(write.node, None)
        self._lost[write.node] = write.names[0]
        if len(self._lost) > _MAX_NODES:
            self._lost.popitem(last=False)

    # ---------------------------------------------------------------- both

    def _queue(self, write: _Write) -> None:
        for node in write.locks:
            self._core.lock(node, HOST)
        self._pending.add(_Queued(self, write))

    def _run(self, write: _Write, call: StoreCall[Written]) -> None:
        self._running += 1
        write.call = call

    def vote(self, write: _Write) -> int:
        """Returns the vote for a write; see `Pending`."""
        if write.dropped:
            return ARRIVED
        if write.call is None or not write.call.done():
            return 0
        written = write.call.value
        if written.gap or (not write.before and not written.whole):
            return FAILED
        return _WHOLE if written.whole else ARRIVED

    def end(self, write: _Write, outcome: int) -> None:
        """Ends a write. If storage lacks the page before, queues the whole path."""
        if write.call is None:
            return  # it was dropped
        self._running -= 1
        if write.before:
            self.pages -= len(write.names)
        else:
            self._running_states -= 1
        self._pending.counts["stored"] += write.call.value.pages
        if outcome == _WHOLE and write.before:
            self._core.note_written(write.node, write.begin)
        if outcome == FAILED and write.before:
            self._heal(write.node)
        elif outcome == FAILED:
            self._lose(write)
        self._unlock(write)

    def _add_check(self, node: int) -> None:
        """Queues what a prefix needs that ends at a node: what storage has of it is not written."""
        if not self._on_host(node):
            return
        end = self._core.end(node)
        begin = min((self._needed_from(row, end) for row in self._late), default=end)
        before, names = self.names.of(node, min(begin, end - 1))
        if begin < end and self._store.backend.capabilities.batched:
            self._add_pages(_Write(node, begin, [node], (), before, names))
        if self._state is not None:
            self._add_state(node, names[-1])

    def _heal(self, node: int) -> None:
        """Queues the whole path of a node, with all that the host has of it: storage has a gap in it."""
        before, names = self.names.of(node, 0)
        if self._core.removed(node):
            return
        path = [node]
        while above := self._core.parent(path[0]):
            path.insert(0, above)
        held = [at for at in path if self._on_host(at)]
        spans = [(self._core.start(at), self._core.end(at)) for at in held]
        self._add_pages(_Write(node, 0, held if self._late else [node], spans, before, names))
        if self._state is not None:
            for at in held:
                self._add_state(at, names[self._core.end(at) - 1])

    def _on_host(self, node: int) -> bool:
        return any(self._core.presence(node, row.number, HOST) == PRESENT for row in self.rows)

    def _drop(self, write: _Write) -> None:
        write.dropped = True
        self._pending.counts["write_dropped"] += len(write.names)
        self._unlock(write)

    def _unlock(self, write: _Write) -> None:
        for node in write.locks:
            self._core.unlock(node, HOST)
