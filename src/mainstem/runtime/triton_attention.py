"""Attention over the tree of a batch on a GPU: two kernels in Triton, which read pages in place.

    part      a tile of queries x a span of their keys     a result, and its log-sum-exp
    merge     the results of one query                     its whole result, and a sink if the layer has one

What requests share is attended to once: their queries are rows of one tile with the heads that share a KV head. What
is left of each request has tiles of its own. Spans divide long runs of keys, so that few queries keep a whole device
busy. Within a tile each query sees its own run of keys, so windows, chunks, regions and causal rows need no masks.

Importing this module imports Triton. None of it has run on a GPU: its tests use Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from mainstem.runtime.attention import BatchPlan, Given, SdpaAttention
from mainstem.runtime.sharing import shared_runs

# None of these was measured. A shared run is attended to at once if that spares reading this many positions.
FOLD_POSITIONS = 256

# Where windows begin at different positions, runs begin at multiples of this many positions.
BEGIN_STEP = 64

# Keys are divided so that there are about this many programs, but into spans of no fewer keys than that.
PROGRAMS = 1024
LEAST_SPAN = 256

# Keys that are in a multiprocessor's own memory at once: values take as much, and loading ahead twice that.
BLOCK_BYTES = 16 << 10

# Rows of a tile: the fewest and the most.
_FEW_ROWS, _MANY_ROWS = 16, 64

# Numbers of a tile's results for which four warps have registers.
_LIGHT = 8192

# Numbers of results that are merged at once.
MERGED = 1024


class TritonAttention(SdpaAttention):
    """Attends to keys and values where they lie, and accumulates in float32.

    Prompts of latent attention that start at 0 are expanded, and computed by PyTorch's attention.
    """

    def _attend(self, plan: BatchPlan, members: Sequence[int], given: Given, out: torch.Tensor) -> None:
        """See `SdpaAttention._attend`."""
        query, keys, values, scale, sinks, softcap = given
        name = tuple(members), sinks is not None
        if name not in plan.derived:
            plan.derived[name] = _Work.of(plan, members, query, values.plane.numbers, sinks is not None)
        work: _Work = plan.derived[name]
        k, v = (stored.plane.rows().numbers for stored in (keys, values))
        work.attend(query, k, v, scale, sinks, softcap, out)


# ---------------------------------------------------------------- which queries with which keys


class _Run(NamedTuple):
    """Rows of a batch, and positions [begin, end) of one page table, which they see if within their own bounds."""

    rows: NDArray[np.int64]
    table: NDArray[np.int32]
    begin: int
    end: int

    def page_slice(self, page_size: int) -> slice:
        """Returns the part of the table that is read."""
        return slice(self.begin // page_size, -(-self.end // page_size))


class _TileShape(NamedTuple):
    """What a program computes at once.

    Args:
        group: query heads that share a KV head.
        heads: of a group in a tile.
        rows: of a tile: rows of the batch times heads.
        keys: that are read at once.
    """

    group: int
    heads: int
    rows: int
    keys: int

    @classmethod
    def of(cls, most: int, group: int, key_bytes: int) -> _TileShape:
        """Returns the shape for runs of at most `most` rows."""
        rows = _FEW_ROWS if most * group <= _FEW_ROWS else _MANY_ROWS
        keys = 1 << max(1, BLOCK_BYTES // key_bytes).bit_length() - 1
        return cls(group, min(group, rows), rows, min(128, max(16, keys)))


class _Tile(NamedTuple):
    """Some rows of a run, the number of the run, and the positions that any of these rows sees."""

    rows: NDArray[np.int64]
    run: int
    begin: int
    end: int


def _bounds(plan: BatchPlan) -> NDArray[np.int64]:
    """Returns the begin and the end of the keys that each row of the batch sees, [rows, 2]."""
    seen = [np.stack(extent.seen(extent.start, extent.end, plan.component), 1) for extent in plan.extents]
    return np.concatenate(seen)


def _runs(plan: BatchPlan, members: Sequence[int], bounds: NDArray[np.int64]) -> Iterator[_Run]:
    """Yields what several members share, then what is left of each: together, each key of a member once."""
    size = plan.pool.page_size
    firsts = np.cumsum([0, *(extent.tokens for extent in plan.extents)]).tolist()
    rows = [np.arange(firsts[index], firsts[index + 1]) for index in members]
    tables = [plan.extents[index].page_table for index in members]
    seen = [(int(bounds[own, 0].min()), int(bounds[own, 1].max())) for own in rows]
    pages = [(begin // size, -(-end // size)) for begin, end in seen]
    shared: list[list[int]] = [[] for _ in members]
    for run in shared_runs(tables, pages, -(-FOLD_POSITIONS // size), -(-BEGIN_STEP // size)):
        begin, end = run.begin * size, min(run.end * size, max(seen[member][1] for member in run.members))
        yield _Run(np.concatenate([rows[member] for member in run.members]), tables[run.members[0]], begin, end)
        for member in run.members:
            shared[member] += [begin, end]
    for own, table, (first, last), apart in zip(rows, tables, seen, shared, strict=True):
        cuts = [first, *sorted(apart), last]
        for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
            if begin < end:
                yield _Run(own, table, begin, end)


def _tiles(runs: Sequence[_Run], bounds: NDArray[np.int64], most: int) -> Iterator[_Tile]:
    """Yields tiles of at most `most` rows; those that see nothing of their run are left out."""
    for number, run in enumerate(runs):
        for at in range(0, len(run.rows), most):
            rows = run.rows[at : at + most]
            begin, end = max(run.begin, int(bounds[rows, 0].min())), min(run.end, int(bounds[rows, 1].max()))
            if begin < end:
                yield _Tile(rows, number, begin, end)


def _divided(tiles: Sequence[_Tile], programs: int, block: int) -> list[_Tile]:
    """Returns tiles with fewer positions each, so that there is work for a device.

    Args:
        tiles: all of a batch.
        programs: of each tile.
        block: positions that a program reads at once.
    """
    positions = sum(tile.end - tile.begin for tile in tiles) * programs
    span = max(LEAST_SPAN, -(-positions // (PROGRAMS * block)) * block)
    return [
        tile._replace(begin=begin, end=min(begin + span, tile.end))
        for tile in tiles
        for begin in range(tile.begin, tile.end, span)
    ]


# ---------------------------------------------------------------- what the kernels read


@dataclass(frozen=True, slots=True)
class _Work:
    """What both kernels do in each layer of a forward.

    A row of the batch has a place for each of its partial results; these follow one another.

    Args:
        tasks: int32 [tiles, 5]: the first of its `rows`, how many, where its pages begin, its begin and its end.
        rows: int32 [n, 4]: a row of the batch, the place of its result, the begin and the end of the keys that it sees.
        page_ids: int32, of all runs one after another.
        merged: int32 [m], the rows of the batch that are computed.
        firsts: int32 [m + 1], the places of their results.
        results: float32 [places, heads, numbers]; None if each row has one result, which is whole.
        lse: float32 [places, heads], log-sum-exps.
        page_size: of the pool.
        is_latent: whether the first numbers of a key are its value.
        shape: of the tiles.
    """

    tasks: torch.Tensor
    rows: torch.Tensor
    page_ids: torch.Tensor
    merged: torch.Tensor
    firsts: torch.Tensor
    results: torch.Tensor | None
    lse: torch.Tensor | None
    page_size: int
    is_latent: bool
    shape: _TileShape

    @classmethod
    def of(
        cls, plan: BatchPlan, members: Sequence[int], query: torch.Tensor, values: torch.Tensor, has_sinks: bool
    ) -> _Work:
        """Plans the work for some extents of a batch, the `members`; with sinks, no result is whole."""
        pool, (heads, kv_heads, numbers) = plan.pool, (query.shape[1], *values.shape[2:])
        bounds = _bounds(plan)
        runs = list(_runs(plan, members, bounds))
        most = max(len(run.rows) for run in runs)
        shape = _TileShape.of(most, heads // kv_heads, pool.shape.head_dim * pool.dtype.itemsize)
        tiles = list(_tiles(runs, bounds, shape.rows // shape.heads))
        tiles = _divided(tiles, kv_heads * -(-shape.group // shape.heads), shape.keys)
        rows = np.concatenate([tile.rows for tile in tiles])
        merged, counts = np.unique(rows, return_counts=True)
        is_whole = not has_sinks and int(counts.max()) == 1
        places = rows
        if not is_whole:
            places = np.empty_like(rows)
            places[np.argsort(rows, kind="stable")] = np.arange(len(rows))
        tasks, laid_out, page_ids, computed, firsts = _upload(
            pool.device,
            _tasks(runs, tiles, pool.page_size),
            np.column_stack([rows, places, bounds[rows]]),
            np.concatenate([run.table[run.page_slice(pool.page_size)] for run in runs]),
            merged,
            np.cumsum([0, *counts]),
        )
        results = lse = None
        if not is_whole:
            results = query.new_empty(len(rows), heads, numbers, dtype=torch.float32)
            lse = query.new_empty(len(rows), heads, dtype=torch.float32)
        return cls(tasks, laid_out, page_ids, computed, firsts, results, lse, pool.page_size, pool.shape.latent, shape)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
        softcap: float | None,
        out: torch.Tensor,
    ) -> None:
        """Computes a layer: query [tokens, heads, numbers], keys and values [slots, kv_heads, numbers]."""
        query = query.contiguous()
        assert keys.is_contiguous() and out.is_contiguous() and (self.is_latent or values.is_contiguous())
        kv_heads, key_numbers, numbers = keys.shape[1], keys.shape[2], values.shape[2]
        first = numbers if self.is_latent else key_numbers
        into = out if self.results is None else self.results
        _part[(len(self.tasks), kv_heads, -(-self.shape.group // self.shape.heads))](
            query,
            keys,
            None if self.is_latent else values,
            into,
            self.lse,
            self.tasks,
            self.rows,
            self.page_ids,
            float(scale),
            KV_HEADS=kv_heads,
            GROUP=self.shape.group,
            HEADS=self.shape.heads,
            ROWS=self.shape.rows,
            KEYS=self.shape.keys,
            PAGE=self.page_size,
            FIRST=first,
            REST=key_numbers - first,
            VALUE=numbers,
            CAP=softcap,
            num_warps=4 if self.shape.rows * _padded(numbers) <= _LIGHT else 8,
        )
        if self.results is not None:
            self._whole(sinks, out)

    def _whole(self, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
        heads, numbers = out.shape[1:]
        some = max(1, MERGED // _padded(numbers))
        _merge[(-(-len(self.merged) * heads // some),)](
            self.results,
            self.lse,
            sinks,
            out,
            self.merged,
            self.firsts,
            len(self.merged),
            ALL=heads,
            VALUE=numbers,
            SOME=some,
        )


def _tasks(runs: Sequence[_Run], tiles: Sequence[_Tile], page_size: int) -> NDArray[np.int64]:
    """Returns `_Work.tasks`. A page is at the task's third number plus its index in the table."""
    used = [run.page_slice(page_size) for run in runs]
    starts = np.cumsum([0, *(part.stop - part.start for part in used)]).tolist()
    counts = [len(tile.rows) for tile in tiles]
    firsts = np.cumsum([0, *counts]).tolist()
    return np.array(
        [
            (first, count, starts[tile.run] - used[tile.run].start, tile.begin, tile.end)
            for first, count, tile in zip(firsts, counts, tiles, strict=False)
        ]
    )


def _upload(device: torch.device, *arrays: NDArray[np.integer]) -> list[torch.Tensor]:
    """Returns arrays as int32 tensors of the device, copied at once; each begins at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    pairs = list(zip(arrays, starts, strict=False))
    for array, start in pairs:
        packed.numpy()[start : start + array.size] = array.ravel()
    there = packed.to(device, non_blocking=True)
    return [there[start : start + array.size].view(array.shape) for array, start in pairs]


# ---------------------------------------------------------------- kernels


_NOTHING = tl.constexpr(-1e30)
"""The highest score of a row that has seen no key: its exponential is 0 beside any other, and it is a number."""


@triton.constexpr_function
def _padded(numbers):
    """Returns the width of a block that holds so many numbers: a power of two that Triton can multiply."""
    return max(16, 1 << (numbers - 1).bit_length())


@triton.jit
def _part(
    query,
    keys,
    values,
    out,
    lse,
    tasks,
    rows,
    page_ids,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attends from a tile of queries, in some of the heads of one KV head, to a span of keys.

    The first numbers of a key are apart from the rest, so that those of a latent are read once as key and value.
    """
    task, kv_head = tasks + 5 * tl.program_id(0), tl.program_id(1)
    count, table, end = tl.load(task + 1), page_ids + tl.load(task + 2), tl.load(task + 4)
    index = tl.arange(0, ROWS)
    head = kv_head * GROUP + tl.program_id(2) * HEADS + index % HEADS
    exists = (index // HEADS < count) & (head < (kv_head + 1) * GROUP)
    row = rows + 4 * (tl.load(task) + index // HEADS)
    low, high = tl.load(row + 2, mask=exists, other=0), tl.load(row + 3, mask=exists, other=0)
    at_query = tl.load(row, mask=exists, other=0).to(tl.int64) * (KV_HEADS * GROUP) + head
    q = _block(query, at_query, exists, FIRST, FIRST + REST)
    q_rest = _block(query + FIRST, at_query, exists, REST, FIRST + REST)
    most = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, _padded(VALUE)], tl.float32)
    for begin in range(tl.load(task + 3), end, KEYS):
        position = begin + tl.arange(0, KEYS)
        there = position < end
        slot = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64) * PAGE + position % PAGE
        at = slot * KV_HEADS + kv_head
        k = _block(keys, at, there, FIRST, FIRST + REST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _block(keys + FIRST, at, there, REST, FIRST + REST)
            scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
        scores *= scale
        if CAP is not None:  # CAP * tanh(scores / CAP)
            scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)
        sees = there[None, :] & (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        weights, before = tl.exp(scores - highest[:, None]), tl.exp(most - highest)
        total = total * before + tl.sum(weights, 1)
        v = k if values is None else _block(values, at, there, VALUE, VALUE)
        result = result * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = highest
    total = tl.where(total > 0.0, total, 1.0)  # of a row that has seen nothing
    place = tl.load(row + 1, mask=exists, other=0).to(tl.int64) * (KV_HEADS * GROUP) + head
    _put(out, place, exists, result / total[:, None], VALUE)
    if lse is not None:
        tl.store(lse + place, most + tl.log(total), mask=exists)


@triton.jit
def _merge(
    results,
    lse,
    sinks,
    out,
    merged,
    firsts,
    count,
    ALL: tl.constexpr,
    VALUE: tl.constexpr,
    SOME: tl.constexpr,
):
    """Merges the partial results of some pairs of a row and a head. A sink is one more part, without a value."""
    pair = tl.program_id(0) * SOME + tl.arange(0, SOME)
    index, head = pair // ALL, pair % ALL
    exists = index < count
    first = tl.load(firsts + index, mask=exists, other=0)
    parts = tl.load(firsts + index + 1, mask=exists, other=0) - first
    most = tl.full([SOME], _NOTHING, tl.float32)
    total = tl.zeros([SOME], tl.float32)
    if sinks is not None:
        most = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        total += 1.0
    result = tl.zeros([SOME, _padded(VALUE)], tl.float32)
    for part in range(tl.max(parts, 0)):
        has = part < parts
        at = (first + part).to(tl.int64) * ALL + head
        own = tl.load(lse + at, mask=has, other=_NOTHING)
        highest = tl.maximum(most, own)
        before, weight = tl.exp(most - highest), tl.exp(own - highest)
        total = total * before + weight
        result = result * before[:, None] + _block(results, at, has, VALUE, VALUE) * weight[:, None]
        most = highest
    total = tl.where(exists, total, 1.0)
    row = tl.load(merged + index, mask=exists, other=0).to(tl.int64)
    _put(out, row * ALL + head, exists, result / total[:, None], VALUE)


@triton.jit
def _block(base, at, exists, NUMBERS: tl.constexpr, STRIDE: tl.constexpr):
    """Loads the first numbers of rows `at`, each as long as STRIDE; 0 where none exists."""
    number = tl.arange(0, _padded(NUMBERS))[None, :]
    return tl.load(base + (at * STRIDE)[:, None] + number, mask=exists[:, None] & (number < NUMBERS), other=0.0)


@triton.jit
def _put(base, at, exists, block, NUMBERS: tl.constexpr):
    """Stores rows `at` of so many numbers, where they exist."""
    number = tl.arange(0, _padded(NUMBERS))[None, :]
    into = base + (at * NUMBERS)[:, None] + number
    tl.store(into, block.to(base.dtype.element_ty), mask=exists[:, None] & (number < NUMBERS))
