"""Attention on a GPU whose results have the same bits whatever is computed together (docs/arithmetic.md).

    keys      spans begin at multiples of SPAN positions, tiles of keys at multiples of their size
    queries   tiles of one size, for one row and for a thousand
    whole     a program goes through the spans of its rows, and merges them in order: prompts, and many requests
    apart     a program for each span; another kernel merges them in the same order, by the same formula

Only whole spans are folded. Which programs there are depends on the batch, and what one row goes through does not: a
key that it does not see has no weight, and adds nothing.

Kernels multiply and add in two instructions each (`enable_fp_fusion`), as no compiler then decides where it rounds.

Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from mainstem.runtime.attention.latent import Latents
from mainstem.runtime.attention.paged import BatchPlan, SdpaAttention
from mainstem.runtime.attention.triton_attention import (
    LIGHT,
    MANY_ROWS,
    NOTHING,
    Tables,
    Tiles,
    TileShape,
    TritonAttention,
    Work,
    added,
    attended,
    block,
    padded_width,
    put,
    ramp,
    runs_of,
    seen_bounds,
    whole,
)

SPAN = 256
"""Positions of a span; its size is part of the arithmetic, as on a CPU."""

# Programs that keep a device busy without dividing the keys of a row.
_ENOUGH = 256


class SpanAttention(TritonAttention):
    """Attends in spans at absolute positions, and merges them in their order. PyTorch computes nothing of it."""

    lends = False

    def attend_latent(
        self, layer: int, query: torch.Tensor, latents: Latents, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        """See `Attention.attend_latent`. PyTorch computes it: latents are not exact on a GPU."""
        return SdpaAttention().attend_latent(layer, query, latents, scale, plan)

    def _planned(self, plan: BatchPlan, members: Sequence[int], heads: int, has_sinks: bool) -> Work:
        return _SpanWork(plan, members, heads, has_sinks)


class _SpanWork(Work):
    """See `Work`. The place of a row in `Tables` is -1 where its result is whole."""

    options: Mapping[str, Any] = {"enable_fp_fusion": False}

    def _tables(self, plan: BatchPlan, members: Sequence[int]) -> tuple[TileShape, Tables, int]:
        pool, bounds = plan.pool, seen_bounds(plan)
        runs = list(runs_of(plan, members, bounds, SPAN))
        shape = TileShape.of(MANY_ROWS, self._heads // pool.shape.kv_heads, pool.shape.head_dim * pool.dtype.itemsize)
        every = np.concatenate([run.rows for run in runs])
        tiles = Tiles.of(runs, bounds[every], shape.rows // shape.heads)
        programs = len(tiles.run) * pool.shape.kv_heads * -(-shape.group // shape.heads)
        is_whole = np.zeros(len(runs), dtype=np.bool_)
        if plan.repeated is None and programs >= _ENOUGH:
            alone = np.bincount(every) == 1
            is_whole[:] = [bool(alone[run.rows].all()) for run in runs]
        tiles, kept = _by_span(tiles, is_whole[tiles.run])
        rows = every[np.repeat(tiles.first, tiles.height) + ramp(tiles.height)]
        apart = np.flatnonzero(~np.repeat(kept, tiles.height))
        begins = np.repeat(tiles.begin, tiles.height)
        places = np.full(len(rows), -1)
        places[apart[np.lexsort((begins[apart], rows[apart]))]] = np.arange(len(apart))
        merged, counts = np.unique(rows[apart], return_counts=True)
        firsts = np.cumsum([0, *counts])
        tables = self._filled(plan, runs, tiles, np.column_stack([rows, places, bounds[rows]]), merged, firsts)
        return shape, tables, max(1, len(apart))  # one kernel for all: it always has results to write

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
        """See `Work.attend`."""
        query = query.contiguous()
        assert keys.is_contiguous() and values.is_contiguous() and out.is_contiguous()
        kv_heads, key_numbers, numbers = keys.shape[1], keys.shape[2], values.shape[2]
        read, shape = self._memory.arrays, self._shape
        _spans[(self._sizes[0], kv_heads, -(-shape.group // shape.heads))](
            query,
            keys,
            values,
            sinks,
            out,
            self._results,
            self._lse,
            read.tasks,
            read.rows,
            read.page_ids,
            float(scale),
            KV_HEADS=kv_heads,
            GROUP=shape.group,
            HEADS=shape.heads,
            ROWS=shape.rows,
            KEYS=shape.keys,
            STEP=SPAN,
            PAGE=self._page_size,
            KEY=key_numbers,
            VALUE=numbers,
            CAP=softcap,
            num_warps=4 if shape.rows * padded_width(numbers) <= LIGHT else 8,
            **self.options,
        )
        if self._sizes[3]:
            self._whole(sinks, out)


def _by_span(tiles: Tiles, is_whole: NDArray[np.bool_]) -> tuple[Tiles, NDArray[np.bool_]]:
    """Returns a tile for each span of those that are not whole, and which are."""
    first, last = tiles.begin // SPAN, -(-tiles.end // SPAN)
    parts = np.where(is_whole, 1, last - first)
    divided, kept = tiles.take(np.repeat(np.arange(len(parts)), parts)), np.repeat(is_whole, parts)
    begin = (np.repeat(first, parts) + ramp(parts)) * SPAN
    begins = np.where(kept, divided.begin, np.maximum(begin, divided.begin))
    ends = np.where(kept, divided.end, np.minimum(begin + SPAN, divided.end))
    return divided._replace(begin=begins, end=ends), kept


@triton.jit
def _spans(
    query,
    keys,
    values,
    sinks,
    out,
    results,
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
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attends from a tile of queries, in some heads of one KV head, to spans of keys, one after another.

    A row whose result is whole begins with its sink.
    """
    task, kv, index = tasks + 5 * tl.program_id(0), tl.program_id(1), tl.arange(0, ROWS)
    count, table = tl.load(task + 1), page_ids + tl.load(task + 2)
    first, end = tl.load(task + 3), tl.load(task + 4)
    head = kv * GROUP + tl.program_id(2) * HEADS + index % HEADS
    exists = (index // HEADS < count) & (head < (kv + 1) * GROUP)
    row = rows + 4 * (tl.load(task) + index // HEADS)
    low, high = tl.load(row + 2, mask=exists, other=0), tl.load(row + 3, mask=exists, other=0)
    at = tl.load(row, mask=exists, other=0).to(tl.int64) * (KV_HEADS * GROUP) + head
    place = tl.load(row + 1, mask=exists, other=-1)
    is_whole = place < 0
    q = block(query, at, exists, KEY, KEY)
    most, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
        most, total = tl.where(is_whole, sink, most), tl.where(is_whole, 1.0, total)
    result = tl.zeros([ROWS, padded_width(VALUE)], tl.float32)
    for span in range(first // STEP, tl.cdiv(end, STEP)):
        key, last = tl.maximum(span * STEP, first // KEYS * KEYS), tl.minimum(end, (span + 1) * STEP)
        own, sum_, values_ = attended(
            q, q, keys, values, table, kv, low, high, key, first, last, scale, KV_HEADS, KEYS, PAGE, KEY, 0, VALUE, CAP
        )
        most, total, result = added(most, total, result, own + tl.log(sum_), values_ / sum_[:, None])
    _leave(out, results, lse, at, place, exists, most, total, result, KV_HEADS * GROUP, VALUE)


@triton.jit
def _leave(out, results, lse, at, place, exists, most, total, result, ALL: tl.constexpr, VALUE: tl.constexpr):
    """Stores results that are whole, and others with their log-sum-exps."""
    total = tl.where(total > 0.0, total, 1.0)
    weighted, is_whole = whole(result, total), place < 0
    put(out, at, exists & is_whole, weighted, VALUE)
    at_place = place.to(tl.int64) * ALL + at % ALL
    put(results, at_place, exists & (place >= 0), weighted, VALUE)
    tl.store(lse + at_place, most + tl.log(total), mask=exists & (place >= 0))
