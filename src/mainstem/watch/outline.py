"""A tree in few rows: its largest nodes, the sums below each of them, and the pages that left since the last look.

Works on the rows of `Tree.survey`, which are numbers; the tree itself is not touched. So it may take its time, on any
thread. Slices of a survey may be from different moments: a node whose parent is not where it says is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.tree import IN_FLIGHT, PRESENT, SURVEYED, Survey

Numbers: TypeAlias = NDArray[np.int64]

SLICE = 8192
"""Places that are read at once: about a millisecond of the engine's time."""
REMOVED, DEMOTED, RETAINED = 1, 2, 4
_COLUMNS = {name: at for at, name in enumerate(SURVEYED)}
_SUMS = ("nodes", "pages", "device", "host", "flight", "locked")


def read(survey: Callable[[int, int], Survey], count: int = SLICE) -> Nodes:
    """Reads a whole tree in slices of `count` places."""
    parts: list[Numbers] = []
    names: dict[int, bytes] = {}
    first, places = 0, 1
    while first < places:
        part = survey(first, count)
        parts.append(part.rows)
        names |= part.names
        first, places = first + count, part.places
    return Nodes(np.concatenate(parts), names)


@dataclass(frozen=True)
class Nodes:
    """All nodes of a tree.

    Args:
        rows: int64 [nodes, len(SURVEYED)].
        names: the encoded namespaces, by the places of their roots.
    """

    rows: Numbers
    names: Mapping[int, bytes]

    def column(self, name: str) -> Numbers:
        """Returns one of the columns of `SURVEYED`."""
        return self.rows[:, _COLUMNS[name]]

    @cached_property
    def index(self) -> Numbers:
        """The row of the node at each place; the number of rows if there is none."""
        places = self.column("place")
        index = np.full(int(places.max(initial=0)) + 1, len(self.rows), np.int64)
        index[places] = np.arange(len(self.rows))
        return index

    @cached_property
    def above(self) -> Numbers:
        """The row of each node's parent; its own for a root; the number of rows if there is none."""
        n, mine = len(self.rows), np.arange(len(self.rows))
        parents = self.column("parent")
        known = np.where(parents < len(self.index), self.index[np.minimum(parents, len(self.index) - 1)], n)
        ends = np.append(self.column("start") + self.column("pages"), -1)
        fits = (ends[known] == self.column("start")) & (self.column("flags") & REMOVED == 0)
        return np.where(parents == 0, mine, np.where(fits, known, n))

    @cached_property
    def reached(self) -> tuple[Numbers, Numbers]:
        """The row of each node's root, and how many nodes are above it; the number of rows if it has none."""
        n = len(self.rows)
        up = np.append(self.above, n)
        depth = (up != np.arange(n + 1)).astype(np.int64)
        while not np.array_equal(further := up[up], up):
            depth, up = depth + depth[up], further
        return up[:n], depth[:n]

    @cached_property
    def below(self) -> dict[str, Numbers]:
        """Sums over each node and everything below it: `_SUMS`, and `hits`; `accessed`: the latest."""
        root, depth = self.reached
        sums = self._own()
        by_depth = np.argsort(depth, kind="stable")
        by_depth = by_depth[root[by_depth] < len(self.rows)]
        edges = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=0)) + 2))
        for level in range(len(edges) - 2, 0, -1):
            rows = by_depth[edges[level] : edges[level + 1]]
            parents = self.above[rows]
            for name, values in sums.items():
                (np.maximum if name == "accessed" else np.add).at(values, parents, values[rows])
        return sums

    def _own(self) -> dict[str, Numbers]:
        pages, device, host = self.column("pages"), self.column("device"), self.column("host")
        flying = (device == IN_FLIGHT) | (host == IN_FLIGHT)
        return {
            "nodes": (pages > 0).astype(np.int64),
            "pages": pages.copy(),
            "device": np.where(device == PRESENT, pages, 0),
            "host": np.where(host == PRESENT, pages, 0),
            "flight": np.where(flying, pages, 0),
            "locked": np.where(self.column("locks") > 0, pages, 0),
            "hits": self.column("hits").copy(),
            "accessed": self.column("accessed").copy(),
        }

    def inside(self, place: int) -> NDArray[np.bool_]:
        """Returns which rows are the node at a place, or below it; none if nothing is there."""
        n = len(self.rows)
        inside = np.zeros(n + 1, bool)
        if place < len(self.index) and self.index[place] < n:
            inside[self.index[place]] = True
            _, depth = self.reached
            for rows in np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth))[:-1]) if n else ():
                inside[rows] |= inside[self.above[rows]]
        return inside[:n]

    def largest(self, most: int, place: int | None = None) -> Numbers:
        """Returns the rows of the nodes with most pages at or below them, oldest first.

        The parent of each of them is among them, too.

        Args:
            most: nodes, at most.
            place: only at or below this node; None: everywhere.
        """
        root, depth = self.reached
        wanted = root < len(self.rows)
        if place is not None:
            wanted &= self.inside(place)
        rows = np.flatnonzero(wanted)
        order = np.lexsort((depth[rows], -self.below["pages"][rows]))
        chosen = rows[order[:most]]
        return chosen[np.lexsort((self.column("place")[chosen], self.column("created")[chosen]))]

    def rest(self, chosen: Numbers) -> dict[str, Numbers]:
        """Returns, for each of the chosen rows, `nodes` and `pages` of the rows below it that are not chosen."""
        sums: dict[str, Numbers] = {}
        drawn = np.zeros(len(self.rows) + 1, bool)
        drawn[chosen] = True
        children = chosen[drawn[self.above[chosen]] & (self.above[chosen] != chosen)]
        own = self._own()
        for name in ("nodes", "pages"):
            left = self.below[name] - own[name]
            np.subtract.at(left, self.above[children], self.below[name][children])
            sums[name] = left[chosen]
        return sums


def left_device(before: Nodes, now: Nodes) -> tuple[Numbers, Numbers]:
    """Returns the nodes that the device lost between two looks: the tick of each node's last use, and its pages.

    A node that was joined with the one below it is still there. Locked nodes are left out: while a prompt is computed,
    one node after another holds it.
    """
    same = _same(before, now)
    device = np.append(now.column("device"), 0)
    idle = (before.column("device") == PRESENT) & (before.column("locks") == 0)
    gone = np.flatnonzero(idle & (device[same] != PRESENT))
    gone = np.setdiff1d(gone, _joined(before, now, same))
    places = before.column("place")[gone]
    at = np.where(places < len(now.index), now.index[np.minimum(places, len(now.index) - 1)], len(now.rows))
    starts = np.append(now.column("start"), -1)
    stays = (starts[at] == before.column("start")[gone]) & (device[at] == PRESENT)  # shorter, under another handle
    kept = np.where(stays, np.append(now.column("pages"), 0)[at], 0)
    lost = np.maximum(before.column("pages")[gone] - kept, 0)
    return before.column("accessed")[gone][lost > 0], lost[lost > 0]


def _same(before: Nodes, now: Nodes) -> Numbers:
    """Returns the row that each node has now; the number of rows if its handle is stale."""
    handles = now.column("node")
    order = np.argsort(handles)
    wanted = before.column("node")
    at = np.minimum(np.searchsorted(handles, wanted, sorter=order), max(len(handles) - 1, 0))
    rows = order[at] if len(handles) else at
    return np.where(handles[rows] == wanted, rows, len(handles)) if len(handles) else at


def _joined(before: Nodes, now: Nodes, same: Numbers) -> Numbers:
    """Returns the rows of nodes that have become the beginning of the one below them."""
    starts = np.append(now.column("start"), np.iinfo(np.int64).max)[same]
    rows: list[int] = []
    for row in np.flatnonzero(starts < before.column("start")):
        above = int(before.above[row])
        while above < len(before.rows) and before.column("start")[above] >= starts[row]:
            rows.append(above)
            if before.above[above] == above:
                break
            above = int(before.above[above])
    return np.array(rows, np.int64)
