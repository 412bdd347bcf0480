"""`AttachPoint`: where the pages that a prefetch reads join the tree.

It knows the tree, the pages of the host and the names of stored pages. It knows nothing of reads and requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Full, State
from mainstem.cache.tree import HOST, IN_FLIGHT, PRESENT, Ids
from mainstem.tiers.host.tier import HostPages
from mainstem.tiers.prefetch.plan import Ask, Marks, Plan
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.names import PageNames
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.store import Find, Found, Store


class AttachPoint:
    """The node that a prefetch's next pages follow, locked on the host.

    Args:
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

        def search_pages(find: Find) -> list[list[bool]]:
            marks = search(lambda row, part: find(rows[row], (part - named_from).tolist()))
            return [marks[row.number][part].tolist() for row, part in asked]

        return store.look_up(self._names.last(self._namespace, at), symbols, page_bytes, pages, search_pages)

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

    def follow(self, pages: int) -> bool:
        """Moves to a later end; returns whether some tier has it."""
        node = self._locate(pages)
        if node:
            self._move(node, pages)
        return bool(node)

    def begins(self, key: bytes) -> bool:
        """Whether a prompt begins with this one's pages."""
        return key.startswith(self._key)

    def shared(self, key: bytes) -> int:
        """Returns how many whole pages a prompt has in common with this one."""
        n, page_bytes = min(len(key), len(self._key)), self._tree.page_bytes
        if key[:n] != self._key[:n]:
            ours, theirs = (np.frombuffer(each, np.uint8, n) for each in (self._key, key))
            n = int(np.flatnonzero(ours != theirs)[0])
        return n // page_bytes

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
