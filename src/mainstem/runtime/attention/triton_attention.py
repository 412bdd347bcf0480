"""Attention over the tree of a batch on a GPU: two kernels in Triton, which read pages in place.

    part      a tile of queries x a span of their keys     a result, and its log-sum-exp
    merge     the results of one query                     its whole result, and a sink if the layer has one

Attention over shared pages is computed once: their queries are rows of one tile with the heads that share a KV head.
The rest of each request has tiles of its own. Spans divide long runs of keys, so that few queries keep a whole device
busy. Within a tile each query sees its own run of keys, so windows, chunks, regions and causal rows need no masks.

Importing this module imports Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from mainstem.runtime.attention.paged import BatchPlan, Given, SdpaAttention, causal
from mainstem.runtime.attention.sharing import rest_of, shared_runs

# Measured on an H100 (docs/decisions.md). A shared run is attended to at once if that spares so many positions.
FOLD_POSITIONS = 256

# Prompts that start at 0 and have so many tokens are computed by PyTorch's kernels, which take 0.7 of the time.
WHOLE_PROMPT = 512

# If windows begin at different positions, runs begin at multiples of this many positions.
BEGIN_STEP = 64

# Keys are divided so that there are about this many programs, but into spans of no fewer keys than that.
PROGRAMS = 1024
LEAST_SPAN = 256

# Keys that are in a multiprocessor's own memory at once: values take as much, and loading ahead twice that.
BLOCK_BYTES = 16 << 10

# Rows of a tile: the fewest and the most.
FEW_ROWS, MANY_ROWS = 16, 64

# Numbers of a tile's results for which four warps have registers.
LIGHT = 8192

# Numbers of results that are merged at once, and of keys that are written.
MERGED = 1024
WRITTEN = 2048


class TritonAttention(SdpaAttention):
    """Attends to keys and values where they lie, and accumulates in float32.

    Long prompts that start at 0, and all of latent attention that do, are computed by PyTorch's attention.
    """

    repeats = True
    lends = True
    """Whether PyTorch's attention computes long prompts."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        plan: BatchPlan,
        sinks: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        out = query.new_empty(*query.shape[:2], value.shape[2])
        is_lent = self.lends and sinks is None and softcap is None and _is_fused(query, value)
        if is_lent and (whole := _whole_prompts(plan)):
            plan.write(layer, key, value)
            with sdpa_kernel(_FUSED):
                for rows in whole.values():
                    out[rows] = causal(query[rows], key[rows], value[rows], scale)
        else:
            whole = {}
        members = [index for index in range(len(plan.extents)) if index not in whole]
        if not members:
            return out
        keys, values = (plane.numbers.flatten(0, 1) for plane in plan.pool.layer(layer))
        work = self._work(plan, members, query.shape[1], sinks is not None)
        if not whole:
            work.write(key, value, keys, values)
        work.attend(query, keys, values, scale, sinks, softcap, out)
        return out

    def replan(self, plan: BatchPlan, new: BatchPlan) -> bool:
        """See `Attention.replan`."""
        return all(work.replan(new) for work in plan.derived.values())

    def _attend(self, plan: BatchPlan, members: Sequence[int], given: Given, out: torch.Tensor) -> None:
        """See `SdpaAttention._attend`."""
        query, keys, values, scale, sinks, softcap = given
        work = self._work(plan, members, query.shape[1], sinks is not None)
        k, v = (stored.plane.numbers.flatten(0, 1) for stored in (keys, values))
        work.attend(query, k, v, scale, sinks, softcap, out)

    def _work(self, plan: BatchPlan, members: Sequence[int], heads: int, has_sinks: bool) -> Work:
        """Returns what the kernels do for some extents of a batch, planned at the first call."""
        name = tuple(members), heads, has_sinks
        if name not in plan.derived:
            assert plan.repeated is None or len(members) == len(plan.extents)
            plan.derived[name] = self._planned(plan, members, heads, has_sinks)
        work: Work = plan.derived[name]
        return work

    def _planned(self, plan: BatchPlan, members: Sequence[int], heads: int, has_sinks: bool) -> Work:
        return Work(plan, members, heads, has_sinks)


# Not cuDNN's, which PyTorch may prefer: it makes a plan for each new length of a prompt, for tens of milliseconds.
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _is_fused(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch has a kernel for prompts of these sizes that keeps no matrix of scores."""
    numbers = query.shape[2]
    fits = numbers == value.shape[2] <= 256 and numbers % 8 == 0
    return fits and query.dtype in (torch.float16, torch.bfloat16)


def _whole_prompts(plan: BatchPlan) -> dict[int, slice]:
    """Returns the rows of the long prompts of a batch whose queries see all keys up to their own."""
    found, end = {}, 0
    for index, extent in enumerate(plan.extents):
        begin, end = end, end + extent.tokens
        if extent.tokens >= WHOLE_PROMPT and extent.is_causal(plan.component):
            found[index] = slice(begin, end)
    return found


# ---------------------------------------------------------------- which queries with which keys


class Run(NamedTuple):
    """Rows of a batch, and positions [begin, end) of one page table, which they see if within their own bounds."""

    rows: NDArray[np.int64]
    table: NDArray[np.int32]
    begin: int
    end: int

    def page_slice(self, page_size: int) -> slice:
        """Returns the part of the table that is read."""
        return slice(self.begin // page_size, -(-self.end // page_size))


class TileShape(NamedTuple):
    """The part that a program computes at once.

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
    def of(cls, most: int, group: int, key_bytes: int) -> TileShape:
        """Returns the shape for runs of at most `most` rows."""
        rows = FEW_ROWS if most * group <= FEW_ROWS else MANY_ROWS
        keys = 1 << max(1, BLOCK_BYTES // key_bytes).bit_length() - 1
        return cls(group, min(group, rows), rows, min(128, max(16, keys)))


def seen_bounds(plan: BatchPlan) -> NDArray[np.int64]:
    """Returns the begin and the end of the keys that each row of the batch sees, [rows, 2]."""
    if all(extent.tokens == 1 and not extent.regions for extent in plan.extents):
        positions = np.array([extent.start for extent in plan.extents], dtype=np.int64)
        return np.column_stack([plan.component.begins(positions), positions + 1])
    seen = [np.stack(extent.seen(extent.start, extent.end, plan.component), 1) for extent in plan.extents]
    return np.concatenate(seen)


def runs_of(
    plan: BatchPlan, members: Sequence[int], bounds: NDArray[np.int64], step: int | None = None
) -> Iterator[Run]:
    """Yields what several members share, then what is left of each: together, each key of a member once.

    Args:
        plan: of the batch.
        members: its extents that are attended to.
        bounds: see `seen_bounds`.
        step: what is shared begins and ends at multiples of so many positions; None: at pages.
    """
    size = plan.pool.page_size
    firsts = np.cumsum([0, *(extent.tokens for extent in plan.extents)])
    lows, highs = np.minimum.reduceat(bounds[:, 0], firsts[:-1]), np.maximum.reduceat(bounds[:, 1], firsts[:-1])
    numbers, cuts = np.arange(len(bounds)), firsts.tolist()
    rows = [numbers[cuts[index] : cuts[index + 1]] for index in members]
    tables = [plan.extents[index].page_table for index in members]
    seen = list(zip(lows[list(members)].tolist(), highs[list(members)].tolist(), strict=True))
    pages = [(begin // size, -(-end // size)) for begin, end in seen]
    shared: list[list[int]] = [[] for _ in members]
    for run in shared_runs(tables, pages, -(-FOLD_POSITIONS // size), -(-BEGIN_STEP // size)):
        begin, end = run.begin * size, min(run.end * size, max(seen[member][1] for member in run.members))
        if step is not None:
            begin, end = -(-begin // step) * step, end // step * step
        if begin >= end:
            continue
        yield Run(np.concatenate([rows[member] for member in run.members]), tables[run.members[0]], begin, end)
        for member in run.members:
            shared[member] += [begin, end]
    for own, table, whole_run, apart in zip(rows, tables, seen, shared, strict=True):
        for begin, end in rest_of(whole_run, apart):
            yield Run(own, table, begin, end)


class Tiles(NamedTuple):
    """Tiles of rows of runs, one number each in every array; `first` is an index into the rows of all runs.

    Each tile has `height` rows, and the positions [begin, end) of its run that any of them sees.
    """

    run: NDArray[np.int64]
    first: NDArray[np.int64]
    height: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    @classmethod
    def of(cls, runs: Sequence[Run], bounds: NDArray[np.int64], most: int) -> Tiles:
        """Returns tiles of at most `most` rows; those that see nothing of their run are left out.

        Args:
            runs: of a batch.
            bounds: the keys that each row of the runs sees, [rows of all runs, 2].
            most: rows of a tile.
        """
        lengths = np.array([len(run.rows) for run in runs])
        counts = -(-lengths // most)
        run, at = np.repeat(np.arange(len(runs)), counts), ramp(counts) * most
        first = (np.cumsum(lengths) - lengths)[run] + at
        begins, ends = (np.array(side) for side in zip(*((run.begin, run.end) for run in runs), strict=True))
        begin = np.maximum(begins[run], np.minimum.reduceat(bounds[:, 0], first))
        end = np.minimum(ends[run], np.maximum.reduceat(bounds[:, 1], first))
        return cls(run, first, np.minimum(most, lengths[run] - at), begin, end).take(np.flatnonzero(begin < end))

    def divided(self, programs: int, block: int) -> Tiles:
        """Returns tiles with fewer positions each, so that there is work for a device.

        Args:
            programs: of each tile.
            block: positions that a program reads at once.
        """
        positions = int((self.end - self.begin).sum()) * programs
        span = max(LEAST_SPAN, -(-positions // (PROGRAMS * block)) * block)
        parts = -(-(self.end - self.begin) // span)
        tiles = self.take(np.repeat(np.arange(len(parts)), parts))
        begin = tiles.begin + ramp(parts) * span
        return tiles._replace(begin=begin, end=np.minimum(begin + span, tiles.end))

    def take(self, tiles: NDArray[np.int64]) -> Tiles:
        """Returns the tiles with these numbers."""
        return Tiles(*(each[tiles] for each in self))


def ramp(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns 0, 1, ... for each count, one after another: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


# ---------------------------------------------------------------- what the kernels read


class Tables(NamedTuple):
    """The arrays that the kernels read of a plan, as integers of 32 bits.

    A row of the batch has a place for each of its partial results; these follow one another.

    Args:
        tasks: [tiles, 5]: the first of its `rows`, how many, where its pages begin, its begin and its end.
        rows: [n, 4]: a row of the batch, the place of its result, the begin and the end of the keys that it sees.
        page_ids: of all runs one after another.
        merged: [m], the rows of the batch that are computed.
        firsts: [m + 1], the places of their results.
        slots: of the new keys of the whole batch; -1: the row has none.
    """

    tasks: NDArray[np.integer]
    rows: NDArray[np.integer]
    page_ids: NDArray[np.integer]
    merged: NDArray[np.integer]
    firsts: NDArray[np.integer]
    slots: NDArray[np.integer]

    @property
    def sizes(self) -> list[int]:
        """How long each array is."""
        return [len(array) for array in self]

    def room(self, rows: int) -> list[int]:
        """Returns how long the arrays are in memory that is filled again for other plans of at most so many rows."""
        tasks, places, page_ids = (max(least, _power(len(array))) for array, least in zip(self, _LEAST, strict=False))
        return [tasks, places, page_ids, rows, rows + 1, rows]

    def padded(self, sizes: Sequence[int]) -> Tables:
        """Returns longer arrays: further tasks have no rows, and further rows of the batch have no keys."""
        more = [size - len(array) for array, size in zip(self, sizes, strict=True)]
        tasks, rows = (np.pad(each, ((0, n), (0, 0))) for each, n in zip(self[:2], more, strict=False))
        merged = np.concatenate([self.merged, len(self.merged) + np.arange(more[3])])
        firsts = np.pad(self.firsts, (0, more[4]), mode="edge")
        slots = np.pad(self.slots, (0, more[5]), constant_values=-1)
        return Tables(tasks, rows, np.pad(self.page_ids, (0, more[2])), merged, firsts, slots)


# Tasks, rows and pages for which memory has room that is filled again.
_LEAST = 128, 256, 2048


def _power(number: int) -> int:
    """Returns the least power of two that is no less."""
    return 1 << (number - 1).bit_length()


class Work:
    """The work of the kernels in each layer of a forward.

    Args:
        plan: of the forward. If it is repeated, memory has room for other requests.
        members: its extents that are attended to.
        heads: of queries.
        has_sinks: whether each row has a sink. Then no result is whole.

    Attributes:
        options: how kernels are compiled.
    """

    options: Mapping[str, Any] = {}

    def __init__(self, plan: BatchPlan, members: Sequence[int], heads: int, has_sinks: bool) -> None:
        self._heads = heads
        self._page_size, self._is_latent = plan.pool.page_size, plan.pool.shape.latent
        self._merges = has_sinks or plan.repeated is not None
        self._shape, tables, partial = self._tables(plan, members)
        self._sizes = tables.sizes if plan.repeated is None else tables.room(plan.repeated)
        self._memory = Memory(plan.pool.device, [(size, *array.shape[1:]) for array, size in self._each(tables)])
        self._memory.fill(tables.padded(self._sizes))
        self._results: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None
        if partial:
            of = partial if plan.repeated is None else self._sizes[1], heads
            self._results = torch.empty(*of, plan.pool.shape.value_dim, dtype=torch.float32, device=plan.pool.device)
            self._lse = torch.empty(of, dtype=torch.float32, device=plan.pool.device)

    def _each(self, tables: Tables) -> Iterator[tuple[NDArray[np.integer], int]]:
        return zip(tables, self._sizes, strict=True)

    def replan(self, plan: BatchPlan) -> bool:
        """Makes the launches of another plan those of this one, all extents of it; returns False if they cannot be."""
        shape, tables, _ = self._tables(plan, range(len(plan.extents)))
        if shape != self._shape or any(len(array) > size for array, size in self._each(tables)):
            return False
        self._memory.fill(tables.padded(self._sizes))
        return True

    def _tables(self, plan: BatchPlan, members: Sequence[int]) -> tuple[TileShape, Tables, int]:
        """Returns how a plan is divided, and how many results are merged: none if each row has one, which is whole."""
        pool, bounds = plan.pool, seen_bounds(plan)
        kv_heads = pool.shape.kv_heads
        runs = list(runs_of(plan, members, bounds))
        most = max(len(run.rows) for run in runs)
        shape = TileShape.of(most, self._heads // kv_heads, pool.shape.head_dim * pool.dtype.itemsize)
        every = np.concatenate([run.rows for run in runs])
        tiles = Tiles.of(runs, bounds[every], shape.rows // shape.heads)
        tiles = tiles.divided(kv_heads * -(-shape.group // shape.heads), shape.keys)
        rows = every[np.repeat(tiles.first, tiles.height) + ramp(tiles.height)]
        merged, counts = np.unique(rows, return_counts=True)
        is_whole = not self._merges and int(counts.max()) == 1
        places = rows
        if not is_whole:
            places = np.empty_like(rows)
            places[np.argsort(rows, kind="stable")] = np.arange(len(rows))
        firsts = np.cumsum([0, *counts])
        tables = self._filled(plan, runs, tiles, np.column_stack([rows, places, bounds[rows]]), merged, firsts)
        return shape, tables, 0 if is_whole else len(rows)

    @staticmethod
    def _filled(
        plan: BatchPlan,
        runs: Sequence[Run],
        tiles: Tiles,
        rows: NDArray[np.int64],
        merged: NDArray[np.int64],
        firsts: NDArray[np.int64],
    ) -> Tables:
        """Returns the tables of tiles of runs; see `Tables` for the others."""
        size = plan.pool.page_size
        used = [run.page_slice(size) for run in runs]
        lengths = np.array([part.stop - part.start for part in used])
        at = np.cumsum(lengths) - lengths - np.array([part.start for part in used])
        page_ids = np.concatenate([run.table[part] for run, part in zip(runs, used, strict=True)])
        tasks = [np.cumsum(tiles.height) - tiles.height, tiles.height, at[tiles.run], tiles.begin, tiles.end]
        return Tables(np.column_stack(tasks), rows, page_ids, merged, firsts, plan.slot_ids)

    def write(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes a layer's new keys and values, [tokens, kv_heads, numbers], to their slots."""
        assert key.stride(2) == value.stride(2) == 1 and keys.is_contiguous() and values.is_contiguous()
        tokens, kv_heads, numbers = key.shape
        some = max(1, WRITTEN // padded_width(numbers))
        _write[(-(-tokens * kv_heads // some),)](
            key,
            value,
            keys,
            values,
            self._memory.arrays.slots,
            tokens,
            *key.stride()[:2],
            *value.stride()[:2],
            KV_HEADS=kv_heads,
            KEY=numbers,
            VALUE=value.shape[2],
            SOME=some,
        )

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
        query = query if query.stride(2) == 1 else query.contiguous()
        assert keys.is_contiguous() and out.is_contiguous() and (self._is_latent or values.is_contiguous())
        kv_heads, key_numbers, numbers = keys.shape[1], keys.shape[2], values.shape[2]
        first = numbers if self._is_latent else key_numbers
        read, shape = self._memory.arrays, self._shape
        into = out if self._results is None else self._results
        _part[(self._sizes[0], kv_heads, -(-shape.group // shape.heads))](
            query,
            keys,
            None if self._is_latent else values,
            into,
            self._lse,
            read.tasks,
            read.rows,
            read.page_ids,
            float(scale),
            *query.stride()[:2],
            KV_HEADS=kv_heads,
            GROUP=shape.group,
            HEADS=shape.heads,
            ROWS=shape.rows,
            KEYS=shape.keys,
            PAGE=self._page_size,
            FIRST=first,
            REST=key_numbers - first,
            VALUE=numbers,
            CAP=softcap,
            num_warps=4 if shape.rows * padded_width(numbers) <= LIGHT else 8,
        )
        if self._results is not None:
            self._whole(sinks, out)

    def _whole(self, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
        heads, numbers = out.shape[1:]
        some, read = max(1, MERGED // padded_width(numbers)), self._memory.arrays
        merge[(-(-self._sizes[3] * heads // some),)](
            self._results,
            self._lse,
            sinks,
            out,
            read.merged,
            read.firsts,
            self._sizes[3],
            ALL=heads,
            VALUE=numbers,
            SOME=some,
            **self.options,
        )


class Memory:
    """Tables in the memory of a device, which are copied there at once; each begins at a multiple of 16 bytes.

    Attributes:
        arrays: int32 tensors.
    """

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        self._there = torch.empty(self._starts[-1], dtype=torch.int32, device=device)
        parts = zip(self._starts, sizes, shapes, strict=False)
        self.arrays: Any = Tables(*(self._there[at : at + size].view(shape) for at, size, shape in parts))  # type: ignore[arg-type]

    def fill(self, tables: Tables) -> None:
        """Copies tables of these shapes, in the order of the stream."""
        packed = torch.empty(self._there.shape, dtype=torch.int32, pin_memory=self._there.is_cuda)
        for array, start in zip(tables, self._starts, strict=False):
            packed.numpy()[start : start + array.size] = array.ravel()
        self._there.copy_(packed, non_blocking=True)


# ---------------------------------------------------------------- kernels


NOTHING = tl.constexpr(-1e30)
"""The highest score of a row that has seen no key: its exponential is 0 beside any other, and it is a number."""


@triton.constexpr_function
def padded_width(numbers):
    """Returns the width of a block that holds so many numbers: a power of two that Triton can multiply."""
    return max(16, 1 << (numbers - 1).bit_length())


@triton.jit
def attended(
    q,
    q_rest,
    keys,
    values,
    table,
    kv_head,
    low,
    high,
    begin,
    first,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attends from a tile of queries to the keys [begin, end), of which those before `first` are not read.

    Returns the highest score of each row, the sum of its weights, which is 1 if it has seen nothing, and of weighted
    values.
    """
    most, total = tl.full([q.shape[0]], NOTHING, tl.float32), tl.zeros([q.shape[0]], tl.float32)
    result = tl.zeros([q.shape[0], padded_width(VALUE)], tl.float32)
    for at_key in range(begin, end, KEYS):
        position = at_key + tl.arange(0, KEYS)
        there = position < end
        if first is not None:
            there &= position >= first
        page = tl.load(table + position // PAGE, mask=there, other=0).to(tl.int64)
        at = (page * PAGE + position % PAGE) * KV_HEADS + kv_head
        k = block(keys, at, there, FIRST, FIRST + REST)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            rest = tl.trans(block(keys + FIRST, at, there, REST, FIRST + REST))
            scores += tl.dot(q_rest, rest, input_precision="ieee")
        scores *= scale
        if CAP is not None:  # CAP * tanh(scores / CAP)
            scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)
        sees = there[None, :] & (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        weights, before = tl.exp(scores - highest[:, None]), tl.exp(most - highest)
        total = total * before + tl.sum(weights, 1)
        v = k if values is None else block(values, at, there, VALUE, VALUE)
        result = result * before[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = highest
    return most, tl.where(total > 0.0, total, 1.0), result


@triton.jit
def added(most, total, result, own, weighted):
    """Adds a partial result with the log-sum-exp `own` to what a row has of those before it."""
    highest = tl.maximum(most, own)
    before, weight = tl.exp(most - highest), tl.exp(own - highest)
    return highest, total * before + weight, result * before[:, None] + weighted * weight[:, None]


@triton.jit
def whole(result, total):
    """Returns weighted values as one result. A part alone stays as it is, and zeros have no sign, which parts without
    weight would change."""
    return tl.div_rn(result, tl.broadcast_to(total[:, None], result.shape)) + 0.0


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
    row_stride,
    head_stride,
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
    task, kv_head, index = tasks + 5 * tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    count, table, end = tl.load(task + 1), page_ids + tl.load(task + 2), tl.load(task + 4)
    head = kv_head * GROUP + tl.program_id(2) * HEADS + index % HEADS
    exists = (index // HEADS < count) & (head < (kv_head + 1) * GROUP)
    row = rows + 4 * (tl.load(task) + index // HEADS)
    low, high = tl.load(row + 2, mask=exists, other=0), tl.load(row + 3, mask=exists, other=0)
    at_query = tl.load(row, mask=exists, other=0).to(tl.int64) * row_stride + head * head_stride
    q = block(query, at_query, exists, FIRST, 1)
    q_rest = block(query + FIRST, at_query, exists, REST, 1)
    most, total, result = attended(
        q,
        q_rest,
        keys,
        values,
        table,
        kv_head,
        low,
        high,
        tl.load(task + 3),
        None,
        end,
        scale,
        KV_HEADS,
        KEYS,
        PAGE,
        FIRST,
        REST,
        VALUE,
        CAP,
    )
    place = tl.load(row + 1, mask=exists, other=0).to(tl.int64) * (KV_HEADS * GROUP) + head
    put(out, place, exists, result / total[:, None], VALUE)
    if lse is not None:
        tl.store(lse + place, most + tl.log(total), mask=exists)


@triton.jit
def _write(
    key,
    value,
    keys,
    values,
    slots,
    tokens,
    key_row,
    key_head,
    value_row,
    value_head,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    SOME: tl.constexpr,
):
    """Writes the new keys and values of some pairs of a token and a KV head to their slots."""
    pair = tl.program_id(0) * SOME + tl.arange(0, SOME)
    token, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    exists, at = slot >= 0, slot * KV_HEADS + head
    put(keys, at, exists, block(key, token * key_row + head * key_head, exists, KEY, 1), KEY)
    put(values, at, exists, block(value, token * value_row + head * value_head, exists, VALUE, 1), VALUE)


@triton.jit
def merge(
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
    most = tl.full([SOME], NOTHING, tl.float32)
    total = tl.zeros([SOME], tl.float32)
    if sinks is not None:
        most = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        total += 1.0
    result = tl.zeros([SOME, padded_width(VALUE)], tl.float32)
    for part in range(tl.max(parts, 0)):
        has = part < parts
        at = (first + part).to(tl.int64) * ALL + head
        own = tl.load(lse + at, mask=has, other=NOTHING)
        most, total, result = added(most, total, result, own, block(results, at, has, VALUE, VALUE))
    total = tl.where(total > 0.0, total, 1.0)  # of a row without keys
    row = tl.load(merged + index, mask=exists, other=0).to(tl.int64)
    put(out, row * ALL + head, exists, whole(result, total), VALUE)


@triton.jit
def block(base, at, exists, NUMBERS: tl.constexpr, STRIDE: tl.constexpr):
    """Loads the first numbers of rows that begin at `at` times STRIDE; 0 where none exists."""
    number = tl.arange(0, padded_width(NUMBERS))[None, :]
    return tl.load(base + (at * STRIDE)[:, None] + number, mask=exists[:, None] & (number < NUMBERS), other=0.0)


@triton.jit
def put(base, at, exists, block, NUMBERS: tl.constexpr):
    """Stores rows `at` of so many numbers, where they exist."""
    number = tl.arange(0, padded_width(NUMBERS))[None, :]
    into = base + (at * NUMBERS)[:, None] + number
    tl.store(into, block.to(base.dtype.element_ty), mask=exists[:, None] & (number < NUMBERS))
