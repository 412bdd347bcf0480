"""Attention over pages: packed queries of many requests, each against its own page table.

A batch is planned once a forward and the plan serves every layer:

    packed rows   | request 0     | request 1 | r2 |        one forward over new tokens only
    span 0        rows [0, 5)     keys: its pages, [0, start + 5)
    span 1        rows [5, 8)     ...

The causal mask is right-aligned: query i of a span sees the keys of positions [0, start + i + 1). A model reaches this
module through transformers' table of attention functions, under `PAGED`, a name that has no mask function, so that
models build no mask of their own.

This module knows pages and positions; it does not know tokens, requests or who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from mainstem.errors import UnsupportedModel
from mainstem.runtime.kv import KVPool
from mainstem.tiers.transfer import LayerTicket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = "mainstem_paged"

# Rows of queries that share one mask. Blocks keep masks small and leave out keys behind a block's last query.
BLOCK_ROWS = 128

# Arguments of transformers' attention functions that change nothing here, whatever they hold: positions are already in
# queries and keys, and attention is causal.
_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal"})


class Extent(NamedTuple):
    """The new positions of one request: [start, start + tokens), in the pages of `page_table` (int32)."""

    tokens: int
    start: int
    page_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive queries of one request that are attended to in one call."""

    rows: slice
    length: int  # keys that the last of them sees
    mask: torch.Tensor | None  # additive, [groups * rows, length]; None where all keys are seen


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of a batch."""

    rows: slice
    pages: slice | torch.Tensor | None  # where its keys lie; None when all of them are in the batch itself
    blocks: tuple[Block, ...]

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """The span's pages of a layer's cache, [positions, kv_heads, head_dim]: a view where they are consecutive."""
        assert self.pages is not None
        pages = cache[self.pages] if isinstance(self.pages, slice) else cache.index_select(0, self.pages)
        return pages.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What every layer of one forward needs to know: where new keys go, and what each query sees."""

    pool: KVPool
    slots: slice | torch.Tensor
    spans: tuple[Span, ...]

    def write(self, cache: torch.Tensor, new: torch.Tensor) -> None:
        """Put `new` [tokens, kv_heads, head_dim] into the batch's slots of a layer's cache."""
        flat = cache.flatten(0, 1)
        if isinstance(self.slots, slice):
            flat[self.slots] = new
        else:
            flat.index_copy_(0, self.slots, new)


def plan_batch(extents: Sequence[Extent], pool: KVPool, heads: int) -> BatchPlan:
    """Plan one forward of `extents`, packed in this order, for a model with `heads` query heads."""
    slots = np.concatenate([_slots(extent, pool.page_size) for extent in extents])
    masks = _Masks(extents, heads // pool.shape.kv_heads, pool)
    spans = []
    row = 0
    for extent in extents:
        spans.append(_span(extent, row, pool, masks))
        row += extent.tokens
    return BatchPlan(pool, _run(slots, pool.device), tuple(spans))


def _slots(extent: Extent, page_size: int) -> NDArray[np.int64]:
    positions = np.arange(extent.start, extent.start + extent.tokens, dtype=np.int64)
    return extent.page_table[positions // page_size].astype(np.int64) * page_size + positions % page_size


def _run(ids: NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Consecutive ids as a slice, for a view instead of a copy; others as an index tensor."""
    first = int(ids[0])
    if np.array_equal(ids, np.arange(first, first + len(ids))):
        return slice(first, first + len(ids))
    return torch.from_numpy(ids).to(device, non_blocking=True)


def _span(extent: Extent, row: int, pool: KVPool, masks: _Masks) -> Span:
    rows = slice(row, row + extent.tokens)
    if extent.start == 0:
        return Span(rows, None, ())
    used = -(-(extent.start + extent.tokens) // pool.page_size)
    pages = _run(extent.page_table[:used].astype(np.int64), pool.device)
    blocks = []
    for first in range(0, extent.tokens, BLOCK_ROWS):
        count = min(BLOCK_ROWS, extent.tokens - first)
        seen = extent.start + first + count
        blocks.append(Block(slice(row + first, row + first + count), seen, masks.get(count, seen)))
    return Span(rows, pages, tuple(blocks))


class _Masks:
    """Masks of a batch, one for each number of rows: right-aligned, so a shorter one is a view of the longest."""

    def __init__(self, extents: Sequence[Extent], groups: int, pool: KVPool) -> None:
        self._longest = max(extent.start + extent.tokens for extent in extents)
        self._groups = groups
        self._pool = pool
        self._by_rows: dict[int, torch.Tensor] = {}

    def get(self, rows: int, length: int) -> torch.Tensor | None:
        if rows == 1:
            return None
        if rows not in self._by_rows:
            mask = torch.zeros(rows, self._longest, dtype=self._pool.dtype, device=self._pool.device)
            mask[:, -rows:].fill_(float("-inf")).triu_(1)
            self._by_rows[rows] = mask.repeat(self._groups, 1)
        return self._by_rows[rows][:, self._longest - length :]


class Attention(Protocol):
    """An attention kernel. It keeps nothing between calls."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        """Write a layer's new keys and values to their slots, then attend.

        Args:
            layer: index of the layer in the pool.
            query: [tokens, heads, head_dim], packed as planned.
            key: [tokens, kv_heads, head_dim].
            value: like `key`.
            scale: factor of the scores before the softmax.
            plan: of this forward.

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class SdpaAttention:
    """PyTorch's scaled dot product attention, a call for each span; on CPU and GPU.

    Query heads that share a KV head become rows of one matrix, so keys and values are never repeated. A span that
    starts at 0 attends to the batch's own keys; others to their pages, in place where those are consecutive.
    """

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        """See `Attention.attend`."""
        keys, values = plan.pool.layer(layer)
        plan.write(keys, key)
        plan.write(values, value)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for span in plan.spans:
            if span.pages is None:
                out[span.rows] = _causal(query[span.rows], key[span.rows], value[span.rows], scale)
                continue
            span_keys, span_values = span.read(keys), span.read(values)
            for block in span.blocks:
                _attend_block(query[block.rows], span_keys, span_values, scale, block, out[block.rows])
        return out


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of a whole prompt to itself, [tokens, heads, head_dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _attend_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, block: Block, out: torch.Tensor
) -> None:
    """Attention of a block's queries to the first `block.length` keys, into `out`; all [positions, heads, head_dim]."""
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    q = grouped.reshape(1, kv_heads, -1, head_dim)
    k = keys[: block.length].transpose(0, 1).unsqueeze(0)
    v = values[: block.length].transpose(0, 1).unsqueeze(0)
    result = scaled_dot_product_attention(q, k, v, attn_mask=block.mask, scale=scale)
    out.view(rows, kv_heads, -1, head_dim).copy_(result.view(grouped.shape).permute(2, 0, 1, 3))


@dataclass(frozen=True, slots=True)
class Paging:
    """What a forward hands through the model to its attention layers, as the argument `paging`.

    A layer waits for its own part of what is arriving only, so that it is computed while the next one is on its way.
    """

    attention: Attention
    plan: BatchPlan
    max_context: int
    arriving: tuple[LayerTicket, ...] = ()


def install(model: PreTrainedModel) -> None:
    """Make `model` attend through the `Paging` that each forward is given; it can no longer run without one."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _paged_attention)
    model.set_attn_implementation(PAGED)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paging: Paging | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, tokens, head_dim] to [1, tokens, heads, head_dim]."""
    if paging is None:
        raise UnsupportedModel(f"{type(module).__name__} was given no page tables: it does not pass arguments on")
    _refuse(module, attention_mask, paging.max_context, others)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < paging.plan.pool.shape.layers:
        raise UnsupportedModel(f"{type(module).__name__} says no layer index in [0, {paging.plan.pool.shape.layers})")
    packed = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    expected = (len(packed[0]), *paging.plan.pool.shape[1:])
    if not packed[1].shape == packed[2].shape == expected:
        raise UnsupportedModel(f"{type(module).__name__} makes keys and values of {key.shape}, {value.shape}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    for ticket in paging.arriving:
        ticket.wait_layer(layer)
    return paging.attention.attend(layer, packed[0], packed[1], packed[2], scale, paging.plan).unsqueeze(0), None


def _refuse(module: torch.nn.Module, mask: object, max_context: int, others: dict[str, Any]) -> None:
    """Raise for everything that would change the scores and is not done here."""
    name = type(module).__name__
    if mask is not None:
        raise UnsupportedModel(f"{name} brings an attention mask of its own")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal")
    window = others.pop("sliding_window", None)
    if window is not None and window < max_context:
        raise UnsupportedModel(f"{name} attends to a sliding window of {window} positions")
    unknown = sorted(key for key, given in others.items() if not _is_off(given) and key not in _HARMLESS)
    if unknown:
        raise UnsupportedModel(f"{name} asks its attention for {', '.join(unknown)}")


def _is_off(given: object) -> bool:
    """Whether an argument asks for nothing: None, False, or a rate of 0."""
    return given is None or (isinstance(given, (bool, int, float)) and not given)
