"""Shared pages: the forest of a batch, from its page tables alone.

    table 0    7 8 9 | 3 4 | 1          7 8 9   of 0, 1 and 2
    table 1    7 8 9 | 3 4 | 2          3 4     of 0 and 1
    table 2    7 8 9 | 5 6

A page id names KV once within a pool: equal ids at the same index of two tables are the same KV at the same positions.

This module knows page ids. It does not know positions, requests or tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """Pages [begin, end) of some tables, which are equal there."""

    members: tuple[int, ...]
    begin: int
    end: int

    @property
    def spared(self) -> int:
        """The pages that need not be read again if all members read the run at once."""
        return (len(self.members) - 1) * (self.end - self.begin)


def shared_runs(
    tables: Sequence[NDArray[np.int32]], parts: Sequence[tuple[int, int]], least: int = 1, step: int = 1
) -> list[Run]:
    """Returns the runs that at least two tables share, each as long as all its members share it.

    Runs of one table are disjoint. Members that part after a run may go on to share others, in smaller groups. Tables
    that have parted are taken to stay apart, as prefixes do.

    Args:
        tables: page ids.
        parts: for each table, the pages [begin, end) that may be shared, which have ids of 0 or more.
        least: runs that spare fewer pages are left out, but their members may share others.
        step: parts begin at multiples of it: the pages before the next one are left out. If many begin at different
            pages, as windows do, fewer beginnings make less work.
    """
    begins = [-(-begin // step) * step for begin, _ in parts]
    ends = [end for _, end in parts]
    if len(tables) < 2:
        return []
    ids = np.empty((len(tables), max(0, *ends)), dtype=np.int32)
    ids[:] = -1 - np.arange(len(tables), dtype=np.int32)[:, None]  # equal to no other
    for row, table, begin, end in zip(ids, tables, begins, ends, strict=True):
        row[begin:end] = table[begin:end]
    runs: dict[tuple[int, ...], list[Run]] = {}
    for first, last in pairwise([*sorted({*begins}), ids.shape[1]]):
        for run in _forest(ids[:, :last], first):
            _extend(runs.setdefault(run.members, []), run)
    return [run for group in runs.values() for run in group if run.spared >= least]


def rest_of(seen: tuple[int, int], shared: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields begins and ends of what is left of what is seen, without `shared`: the begin and the end of each run."""
    bounds = [seen[0], *sorted(shared), seen[1]]
    return ((begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end)


def _forest(ids: NDArray[np.int32], begin: int) -> Iterator[Run]:
    """Yields the runs of rows that are equal from column `begin` on, level by level."""
    width = ids.shape[1]
    waiting = [(np.arange(len(ids)), begin)]
    while waiting:
        rows, begin = waiting.pop()
        if begin >= width:
            continue
        order = rows[np.argsort(ids[rows, begin], kind="stable")]
        parted = np.flatnonzero(np.diff(ids[order, begin])) + 1
        for group in np.split(order, parted):
            if len(group) < 2:
                continue
            equal = (ids[group[1:], begin:] == ids[group[0], begin:]).all(0)
            end = width if equal.all() else begin + int(equal.argmin())
            yield Run(tuple(group.tolist()), begin, end)
            waiting.append((group, end))


def _extend(runs: list[Run], run: Run) -> None:
    """Appends a run to those of the same members, or joins it to the last if it begins where that ends."""
    if runs and runs[-1].end == run.begin:
        run = run._replace(begin=runs.pop().begin)
    runs.append(run)
