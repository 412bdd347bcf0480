"""How the queries of a batch and the keys that they see are put into few calls of an attention kernel.

    shared run    queries of all requests that share pages     one call, no mask: every query sees all of the run
    long run      a request's pages that are consecutive       one call, no mask: keys are a view of the pool
    rest          what is left of each request                 gathered, and padded to one call for many requests
    own           a long prompt's new tokens                   one call, causal: keys are those of the batch

A query whose keys are in several calls gets a partial result of each. A run is cut at what all its queries see, so only
the rest needs masks, and each query sees at least one key in each of its calls.

This module knows pages, positions and slots. It does not know layers, scores or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.runtime.attention.paged import BatchPlan, Extent, tile_starts
from mainstem.runtime.attention.sharing import shared_runs
from mainstem.runtime.memory.kv import KVPool, run_of

# The least gains that are worth one call more, measured in docs/decisions.md. A shared run is folded if that saves
# reading this many bytes of keys and values again. All keys of a request are a view of their own, and not gathered with
# those of others, if they are consecutive and have this many bytes. Consecutive ones among others are apart if they
# have this many.
FOLD_BYTES = 768 << 10
VIEW_BYTES = 256 << 10
CUT_BYTES = 2 << 20

# Keys and values that one call gathers, if they are of more than one request: what is read again soon after stays in a
# core's own cache.
GATHER_BYTES = 1 << 20

# If windows begin at different positions, runs begin at multiples of this many positions.
BEGIN_STEP = 64

# Positions whose keys the core's kernel adds up before it merges them with others (kernels/spans.h).
SPAN = 256

# Parts in one call may be filled up by half, and by this many keys.
_SLACK = 32

Piece = slice | NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max  # the position of a key that only fills a row: no query sees it


@dataclass(frozen=True, slots=True)
class Call:
    """Groups of queries, each with keys of its own, computed in one call.

    Args:
        rows: of the batch, those of all groups one after another; some may be there twice, to fill a group.
        groups: the number of groups, which have equally many rows, and equally many keys.
        slots: the keys of all groups; None: the new keys of `rows`, and each query sees those up to its own.
        mask: [groups, 1, rows of a group * heads that share a KV head, keys], additive; sizes may be 1.
        places: where partial results go among all, one for each of `rows`; None: these results are whole.
    """

    rows: slice | torch.Tensor
    groups: int
    slots: slice | torch.Tensor | None
    mask: torch.Tensor | None
    places: slice | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Fold:
    """The calls of a batch, and which of its rows have several partial results.

    Partial results are numbered level by level: level * len(merged) + index in `merged`.
    """

    calls: tuple[Call, ...]
    merged: slice | torch.Tensor
    rows: int  # of `merged`
    levels: int


class _Queries(NamedTuple):
    """Queries of one request, at consecutive positions, and the keys [begin, end) that each sees."""

    row: int  # of the first
    table: NDArray[np.int32]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    seen: tuple[int, int]  # all keys that any of them sees; without those of the batch, if `causal`
    common: tuple[int, int]  # those that all of them see; of several queries, none of their own
    causal: bool  # each sees the new keys up to its own, read from the batch


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys that some queries see."""

    members: tuple[int, ...]
    slots: NDArray[np.int64]  # empty: the new keys of the batch
    positions: NDArray[np.int64]  # of the slots
    alone: bool  # one call has this part only


def fold(plan: BatchPlan, members: Sequence[int], group: int, partial: bool, causal: bool) -> Fold:
    """Returns the calls for the queries of some extents.

    Args:
        plan: of the batch.
        members: indices of its extents.
        group: query heads that share a KV head.
        partial: whether all results are partial, to be merged with something else.
        causal: whether the kernel computes causal calls; it has no log-sum-exps of them.
    """
    queries = list(_queries(plan, members, partial, causal))
    most = max(1, GATHER_BYTES // _position_bytes(plan.pool))
    calls = _gather(_parts(plan.pool, queries), queries, most)
    several = np.bincount([member for call in calls for part in call for member in part.members]) > 1
    merged = set(range(len(queries)) if partial else np.flatnonzero(several).tolist())
    for call in calls:
        together = {member for part in call for member in part.members}
        if not merged.isdisjoint(together):
            merged |= together  # a call has partial results, or none
    return _Assembly(plan.pool, queries, sorted(merged), group).fold(calls)


# ---------------------------------------------------------------- queries


def _queries(plan: BatchPlan, members: Sequence[int], partial: bool, causal: bool) -> Iterator[_Queries]:
    rows = np.cumsum([0, *(extent.tokens for extent in plan.extents)]).tolist()
    for index in members:
        extent = plan.extents[index]
        if _is_causal(extent, plan, partial, causal):
            begins = np.zeros(extent.tokens, dtype=np.int64)
            known = (0, extent.start)
            yield _Queries(rows[index], extent.page_table, begins, begins + extent.start, known, known, True)
            continue
        for first, last in pairwise([*tile_starts(extent, plan.component), extent.end]):
            begins, ends = extent.seen(first, last, plan.component)
            seen = int(begins.min()), int(ends.max())
            common = seen if last - first == 1 else (int(begins.max()), min(first, int(ends.min())))
            yield _Queries(rows[index] + first - extent.start, extent.page_table, begins, ends, seen, common, False)


def _is_causal(extent: Extent, plan: BatchPlan, partial: bool, causal: bool) -> bool:
    """Returns whether the new tokens attend to each other in a causal call, read from the batch."""
    return causal and not partial and extent.is_causal(plan.component)


# ---------------------------------------------------------------- parts


def _parts(pool: KVPool, queries: Sequence[_Queries]) -> Iterator[_Part]:
    """Yields the parts of all queries: together, those of a query have each key that it sees once."""
    view, cut = (-(-count // _position_bytes(pool)) for count in (VIEW_BYTES, CUT_BYTES))
    for members, positions, slots in _runs(pool, queries, FOLD_BYTES):
        query = queries[members[0]]
        if len(members) == 1:
            if query.causal:
                none = np.empty(0, dtype=np.int64)
                yield _Part(members, none, none, alone=True)
            if len(slots) >= view and (np.diff(slots) == 1).all():
                yield _Part(members, slots, positions, alone=True)
                continue
        common = (positions >= query.common[0]) & (positions < query.common[1])
        for piece, alone in _pieces(slots, common, cut):
            yield _Part(members, slots[piece], positions[piece], alone or len(members) > 1)


def _runs(
    pool: KVPool, queries: Sequence[_Queries], least_bytes: int
) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64], NDArray[np.int64]]]:
    """Yields keys and who sees them: their positions and slots. First what queries share, then what is left of each.

    Args:
        pool: of the keys.
        queries: all of them.
        least_bytes: of keys and values that a shared run spares reading again.
    """
    size = pool.page_size
    pages = [(-(-query.common[0] // size), query.common[1] // size) for query in queries]
    least = -(-least_bytes // (_position_bytes(pool) * size))
    shared: list[list[int]] = [[] for _ in queries]
    for run in shared_runs([query.table for query in queries], pages, least, -(-BEGIN_STEP // size)):
        bounds = [run.begin * size, run.end * size]
        yield run.members, *_read(pool, queries[run.members[0]], bounds)
        for member in run.members:
            shared[member] += bounds
    for index, query in enumerate(queries):
        yield (index,), *_read(pool, query, [query.seen[0], *sorted(shared[index]), query.seen[1]])


def _read(pool: KVPool, query: _Queries, bounds: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the positions from each first of two bounds to the second, and their slots."""
    gaps = [(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]
    positions = [np.arange(begin, end) for begin, end in gaps]
    slots = [pool.slots(query.table, begin, end) for begin, end in gaps]
    if len(gaps) == 1:
        return positions[0], slots[0]
    none = [np.empty(0, dtype=np.int64)]
    return np.concatenate(none + positions), np.concatenate(none + slots)


def _pieces(slots: NDArray[np.int64], common: NDArray[np.bool_], least: int) -> Iterator[tuple[Piece, bool]]:
    """Yields indices of slots, and whether they are a view: `least` or more consecutive common ones; then the rest."""
    if len(slots) < least:
        if len(slots):
            yield slice(None), False
        return
    bounds = np.concatenate([[0], np.flatnonzero((np.diff(slots) != 1) | np.diff(common)) + 1, [len(slots)]])
    long = np.diff(bounds) >= least
    long[long] = common[bounds[:-1][long]]
    for at in np.flatnonzero(long).tolist():
        yield slice(bounds[at], bounds[at + 1]), True
    if not long.all():
        yield np.flatnonzero(np.repeat(~long, np.diff(bounds))), False


def _position_bytes(pool: KVPool) -> int:
    """Returns the bytes of a position in one layer, keys and values."""
    return pool.shape.kv_heads * sum(pool.shape.planes) * pool.kept.itemsize


def _gather(parts: Iterable[_Part], queries: Sequence[_Queries], most: int) -> list[list[_Part]]:
    """Returns the parts of each call: one, or some of nearly the same number of rows, and `most` keys together."""
    calls: list[list[_Part]] = []
    rest: list[tuple[int, int, _Part]] = []
    for part in parts:
        if part.alone:
            calls.append([part])
        else:
            rest.append((len(queries[part.members[0]].begins), len(part.slots), part))
    rest.sort(key=lambda sized: sized[:2], reverse=True)
    while rest:
        rows = rest[0][0]
        keys = max(count for n, count, _ in rest if 2 * n >= rows)
        fits = [2 * n >= rows and 2 * count + _SLACK >= keys for n, count, _ in rest]
        chosen = sorted((part for (_, _, part), fit in zip(rest, fits, strict=True) if fit), key=lambda p: p.members)
        at_once = max(1, most // keys)
        calls += [chosen[first : first + at_once] for first in range(0, len(chosen), at_once)]
        rest = [sized for sized, fit in zip(rest, fits, strict=True) if not fit]
    return calls


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
    queries = [_whole(plan, index, rows[index]) for index in members]
    few = [query for query in queries if len(query.begins) <= most]
    seen = [_seen(plan.pool, [query], *query.seen) for query in queries if len(query.begins) > most]
    size = plan.pool.page_size
    step = SPAN // math.gcd(SPAN, size)  # pages from the begin of a span to the next begin that is one of a page
    pages = [(-(-query.common[0] // size), query.common[1] // size // step * step) for query in few]
    least = -(-least_bytes // (_position_bytes(plan.pool) * size))
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
        bounds = [query.seen[0], *sorted(taken), query.seen[1]]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        seen += [_seen(plan.pool, [query], begin, end) for begin, end in pairs if begin < end]
    return seen


def _whole(plan: BatchPlan, index: int, row: int) -> _Queries:
    """Returns the queries of an extent."""
    extent = plan.extents[index]
    begins, ends = extent.seen(extent.start, extent.end, plan.component)
    seen, common = (int(begins.min()), int(ends.max())), (int(begins.max()), int(ends.min()))
    return _Queries(row, extent.page_table, begins, ends, seen, common, False)


def _seen(pool: KVPool, queries: Sequence[_Queries], begin: int, end: int) -> Seen:
    """Returns the keys at some positions for some queries."""
    rows = np.concatenate([query.row + np.arange(len(query.begins)) for query in queries])
    begins, ends = (np.concatenate([getattr(query, name) for query in queries]) for name in ("begins", "ends"))
    bounds = (np.clip(bound, begin, end).astype(np.int32) for bound in (begins, ends))
    return Seen(begin, pool.slots(queries[0].table, begin, end), rows.astype(np.int32), *bounds)


# ---------------------------------------------------------------- calls


class _Assembly:
    """Makes calls of parts.

    Args:
        pool: of the keys.
        queries: all of them.
        merged: indices of those that have partial results.
        group: query heads that share a KV head.
    """

    def __init__(self, pool: KVPool, queries: Sequence[_Queries], merged: Sequence[int], group: int) -> None:
        self._pool, self._queries, self._group = pool, queries, group
        sizes = [len(queries[index].begins) for index in merged]
        offsets = np.cumsum([0, *sizes]).tolist()
        self._places = dict(zip(merged, offsets, strict=False))  # where the next partial results of each go
        self._rows = offsets[-1]
        self._merged = [np.arange(size) + queries[index].row for index, size in zip(merged, sizes, strict=True)]

    def fold(self, calls: Sequence[Sequence[_Part]]) -> Fold:
        """Makes all calls; the longest come first."""
        made = tuple(self._call(parts) for parts in calls)
        levels = max((place // self._rows for place in self._places.values()), default=0)
        rows = np.concatenate(self._merged) if self._merged else np.empty(0, dtype=np.int64)
        return Fold(made, run_of(rows, self._pool.device), self._rows, levels)

    def _call(self, parts: Sequence[_Part]) -> Call:
        members = [member for part in parts for member in part.members]
        counts = [len(self._queries[member].begins) for member in members]
        taken = [np.arange(count) for count in counts]
        if len(parts) > 1:  # groups are equally large: the last row of a smaller one is there several times
            taken = [np.minimum(np.arange(max(counts)), count - 1) for count in counts]
        pairs = list(zip(members, taken, strict=True))
        rows = np.concatenate([self._queries[member].row + own for member, own in pairs])
        places = None
        if members[0] in self._places:
            places = self._index(np.concatenate([self._places[member] + own for member, own in pairs]))
            for member in members:
                self._places[member] += self._rows
        if not len(parts[0].slots):
            return Call(self._index(rows), 1, None, None, places)
        slots, positions = _padded(parts)
        shared = len(members) > len(parts)  # its members see all of it, as a single query sees its own part
        mask = None if shared or (len(parts) == 1 and len(rows) == 1) else self._mask(positions, pairs)
        return Call(self._index(rows), len(parts), self._index(slots.ravel()), mask, places)

    def _mask(
        self, positions: NDArray[np.int64], pairs: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> torch.Tensor | None:
        """Returns which keys at positions [groups, keys] the rows of each group see; None if all see all."""
        begins = np.stack([self._queries[member].begins[own] for member, own in pairs])
        ends = np.stack([self._queries[member].ends[own] for member, own in pairs])
        if positions.min() >= begins.max() and positions.max() < ends.min():
            return None
        keys = positions[:, None]
        seen = torch.from_numpy((keys >= begins[..., None]) & (keys < ends[..., None])).to(self._pool.device)
        mask = torch.zeros(seen.shape, dtype=self._pool.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(self._group, 1)
        return mask.unsqueeze(1)

    def _index(self, ids: NDArray[np.int64]) -> slice | torch.Tensor:
        return run_of(ids, self._pool.device)


def _padded(parts: Sequence[_Part]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns slots and positions of some parts, [parts, keys]; shorter ones repeat a slot at a position never seen."""
    if len(parts) == 1:
        return parts[0].slots[None], parts[0].positions[None]
    most = max(len(part.slots) for part in parts)
    slots = np.empty((len(parts), most), dtype=np.int64)
    positions = np.full((len(parts), most), _NEVER)
    for row, at, part in zip(slots, positions, parts, strict=True):
        row[: len(part.slots)], row[len(part.slots) :] = part.slots, part.slots[-1]
        at[: len(part.slots)] = part.positions
    return slots, positions
