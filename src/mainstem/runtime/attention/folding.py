"""Pages that the queries of a batch see: those that several requests share are there once for all of them.

    shared   spans of keys that several requests see      the queries of all of them
    rest     what is left of each request                 its own queries

This module knows pages, positions and slots. It does not know layers, scores or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstem.runtime.attention.paged import BatchPlan
from mainstem.runtime.attention.sharing import rest_of, shared_runs
from mainstem.runtime.memory.kv import KVPool

# Positions whose keys the core's kernel adds up before it merges them with others (kernels/spans.h).
SPAN = 256


class Seen(NamedTuple):
    """Keys at consecutive positions, and the rows of a batch that see some of them.

    Args:
        first: position of the first key.
        slots: int64, of the keys.
        rows: int32.
        begins, ends: int32, for each row the positions that it sees.
    """

    first: int
    slots: NDArray[np.int64]
    rows: NDArray[np.int32]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]


class _Queries(NamedTuple):
    """The queries of one request, and the keys [begin, end) that each sees."""

    row: int  # of the first
    table: NDArray[np.int32]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def seen(self) -> tuple[int, int]:
        """All keys that any of them sees."""
        return int(self.begins.min()), int(self.ends.max())


def seen_keys(plan: BatchPlan, members: Sequence[int], most: int, least_bytes: int) -> list[Seen]:
    """Returns what the queries of some extents see, in the pages: what several share is there once for all of them.

    A shared run begins and ends at multiples of `SPAN` positions, so that a query sees no span in two parts.

    Args:
        plan: of the batch, whose new keys are in their slots.
        members: indices of its extents.
        most: new tokens of an extent whose keys are shared with others.
        least_bytes: of keys and values in a layer that are worth a part of their own, times those who share them.
    """
    rows = np.cumsum([0, *(extent.tokens for extent in plan.extents)]).tolist()
    queries = [_queries(plan, index, rows[index]) for index in members]
    few = [query for query in queries if len(query.begins) <= most]
    seen = [_seen(plan.pool, [query], *query.seen) for query in queries if len(query.begins) > most]
    size, shape = plan.pool.page_size, plan.pool.shape
    step = SPAN // math.gcd(SPAN, size)  # pages from the begin of a span to the next begin that is one of a page
    pages = [(-(-int(query.begins.max()) // size), int(query.ends.min()) // size // step * step) for query in few]
    least = -(-least_bytes // (shape.kv_heads * sum(shape.planes) * plan.pool.kept.itemsize * size))
    shared: list[list[int]] = [[] for _ in few]
    for run in shared_runs([query.table for query in few], pages, 1, step):
        # Where others part from its members within a span, it begins with that span, as they share what is before, too.
        whole = run._replace(begin=run.begin // step * step, end=run.end // step * step)
        if whole.spared < max(least, 1):
            continue
        bounds = [whole.begin * size, whole.end * size]
        seen.append(_seen(plan.pool, [few[member] for member in whole.members], *bounds))
        for member in whole.members:
            shared[member] += bounds
    for query, taken in zip(few, shared, strict=True):
        seen += [_seen(plan.pool, [query], begin, end) for begin, end in rest_of(query.seen, taken)]
    return seen


def _queries(plan: BatchPlan, index: int, row: int) -> _Queries:
    """Returns the queries of an extent."""
    extent = plan.extents[index]
    return _Queries(row, extent.page_table, *extent.seen(extent.start, extent.end, plan.component))


def _seen(pool: KVPool, queries: Sequence[_Queries], begin: int, end: int) -> Seen:
    """Returns the keys at some positions for some queries."""
    rows = np.concatenate([query.row + np.arange(len(query.begins)) for query in queries])
    begins, ends = (np.concatenate([getattr(query, name) for query in queries]) for name in ("begins", "ends"))
    bounds = (np.clip(bound, begin, end).astype(np.int32) for bound in (begins, ends))
    return Seen(begin, pool.slots(queries[0].table, begin, end), rows.astype(np.int32), *bounds)
