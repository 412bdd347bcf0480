"""Attention over pages: packed queries of many requests, each against its own page table.

Each forward plans its batch once for each pool, and a plan serves every layer of its pool:

    packed rows   | request 0     | request 1 | r2 |        one forward over new tokens only
    span 0        rows [0, 5)     keys: its pages, [0, start + 5)
    span 1        rows [5, 8)     ...

Every query sees one run of keys. The query at position p sees [0, p + 1); with a window of w positions, it sees
[p + 1 - w, p + 1); with chunks of c positions, [p - p % c, p + 1). Earlier keys need not exist. Within a region that is
attended in both directions, such as an image, the run goes on to the end of the region. A layer may have sinks: per
head, the score of a key without a value. It may cap its scores softly, before keys are masked.

A model finds this module in transformers' table of attention functions, under `PAGED`. This name has no mask function,
so models build no masks of their own.

This module knows pages and positions. It does not know tokens, requests or the owners of pages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from mainstem.cache.components import Attended, Full
from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.latent import Latents
from mainstem.runtime.memory.kv import KVPool, Plane, run_of
from mainstem.tiers.host.transfer import LayerTicket

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGED = "mainstem_paged"

# Largest difference from plain attention that the self-test takes for rounding, relative to the logits' spread. With
# SmolLM2's 30 layers it is 1.3e-6 in float32, 1.8e-3 in float16 and 1.2e-2 in bfloat16; deeper models round more often.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Query rows that share one mask.
TILE_ROWS = 128

# Arguments of transformers' attention functions that have no effect here: positions are already in queries and keys,
# and the plan says which keys a query sees.
_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "use_cache"})


def spread_error(found: torch.Tensor, wanted: torch.Tensor, all_wanted: torch.Tensor) -> float:
    """Returns how far logits are from those wanted, in parts of the spread of all; infinite if one is not finite."""
    error = (found - wanted).abs().max() / (all_wanted.max() - all_wanted.min())
    return float(error) if error.isfinite() else float("inf")


FULL = Full()


class Extent(NamedTuple):
    """The new positions of one request: [start, start + tokens), in the pages of `page_table` (int32).

    `regions` are attended in both directions: [begin, end), of any positions, disjoint. The entries of the table before
    what the query at `start` sees are not read.
    """

    tokens: int
    start: int
    page_table: NDArray[np.int32]
    regions: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.tokens

    def is_causal(self, component: Attended) -> bool:
        """Whether all its keys are new, and every query sees those up to its own."""
        both_ways = any(low < self.end and high > self.start for low, high in self.regions)
        return self.start == 0 and component.seen_from(self.end - 1) == 0 and not both_ways

    def seen(self, first: int, last: int, component: Attended) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the begin and the end of the keys that each query at positions [first, last) sees."""
        positions = np.arange(first, last, dtype=np.int64)
        begins, ends = component.begins(positions), positions + 1
        for low, high in self.regions:
            ends[(positions >= low) & (positions < high)] = min(high, self.end)
        return begins, ends


class Tile(NamedTuple):
    """Consecutive queries of one request, and the keys that they see, computed in one call."""

    rows: slice  # of the batch
    keys: slice  # of the span's keys: all that any of the queries sees
    # [rows, 2]: the keys that each query sees, within `keys`; None: all of them.
    runs: NDArray[np.int64] | None

    def mask(self, groups: int, device: torch.device) -> torch.Tensor | None:
        """Returns which keys `groups` query heads per KV head see, bool [groups * rows, keys]; None: all of them."""
        if self.runs is None:
            return None
        begins, ends = torch.from_numpy(self.runs).to(device).unsqueeze(-1).unbind(1)
        index = torch.arange(self.keys.stop - self.keys.start, device=device)
        return ((index >= begins) & (index < ends)).repeat(groups, 1)


class Span(NamedTuple):
    """One request's part of a batch."""

    rows: slice
    page_index: slice | torch.Tensor | None  # the pages that hold its keys; None if all keys are in the batch itself
    tiles: tuple[Tile, ...]
    causal: bool  # all its keys are in the batch, and every query sees all keys up to its own

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return int(self.rows.stop - self.rows.start)

    def read(self, plane: Plane, new: torch.Tensor) -> torch.Tensor:
        """Returns the span's keys or values, [positions, kv_heads, numbers]: a view where `Plane.read` gives one."""
        return new[self.rows] if self.page_index is None else plane.read(self.page_index, new.dtype)


@dataclass(frozen=True)
class BatchPlan:
    """The plan of one forward for the layers of a pool: the slots of new keys, and the keys that each query sees."""

    pool: KVPool
    component: Attended
    extents: tuple[Extent, ...]
    slot_ids: NDArray[np.int64] = field(repr=False)  # of the new keys
    repeated: int | None = None
    """Rows of a forward that is launched again for other requests, at most so many; see `Attention.replan`."""
    derived: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False)
    """A kernel computes it in the first layer, for the others."""

    @cached_property
    def slots(self) -> slice | torch.Tensor:
        """Those of `slot_ids`, for an index."""
        return run_of(self.slot_ids, self.pool.device)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """One for each extent."""
        lasts = np.cumsum([extent.tokens for extent in self.extents]).tolist()
        pairs = zip(self.extents, lasts, strict=True)
        return tuple(_span(extent, last - extent.tokens, self.pool, self.component) for extent, last in pairs)

    def write(self, layer: int, *given: torch.Tensor) -> list[Stored]:
        """Writes what a layer gives to the batch's slots: keys and values, or latents; [tokens, kv_heads, numbers].

        Returns:
            The same, as its pages now hold it, so that a new key is for all queries what later ones will read.
        """
        planes = self.pool.layer(layer)
        return [Stored(plane, plane.write(self.slots, new)) for plane, new in zip(planes, given, strict=True)]


def plan_batch(
    extents: Sequence[Extent], pool: KVPool, component: Attended = FULL, repeated: int | None = None
) -> BatchPlan:
    """Plans one forward of `extents`, packed in this order, over a pool of this component's layers.

    Args:
        extents: the new positions of each request.
        pool: of the layers.
        component: which keys their queries see.
        repeated: see `BatchPlan`.
    """
    slots = np.concatenate([pool.slots(extent.page_table, extent.start, extent.end) for extent in extents])
    return BatchPlan(pool, component, tuple(extents), slots, repeated)


def _span(extent: Extent, row: int, pool: KVPool, component: Attended) -> Span:
    page_index, origin = None, 0
    if extent.start > 0:
        first, used = component.seen_from(extent.start) // pool.page_size, -(-extent.end // pool.page_size)
        page_index = run_of(extent.page_table[first:used].astype(np.int64), pool.device)
        origin = first * pool.page_size
    # A tile keeps its mask small, and leaves out keys after its last query.
    cuts = pairwise([*range(extent.start, extent.end, TILE_ROWS), extent.end])
    tiles = tuple(_tile(extent, first, last, row - extent.start, origin, component) for first, last in cuts)
    return Span(slice(row, row + extent.tokens), page_index, tiles, extent.is_causal(component))


def _tile(extent: Extent, first: int, last: int, shift: int, origin: int, component: Attended) -> Tile:
    """Returns the tile of the queries at positions [first, last).

    Args:
        extent: the request's new positions.
        first: position of the tile's first query.
        last: position after its last query.
        shift: the row in the batch minus the position.
        origin: position of the span's first key.
        component: which keys a query sees.
    """
    begins, ends = extent.seen(first, last, component)
    begin, end = int(begins.min()), int(ends.max())
    sees_all = begins.max() == begin and ends.min() == end
    runs = None if sees_all else np.stack([begins, ends], 1) - begin
    return Tile(slice(first + shift, last + shift), slice(begin - origin, end - origin), runs)


class Stored(NamedTuple):
    """Keys or values: those of a layer in pages, and new rows [tokens, kv_heads, numbers] of the model's dtype."""

    plane: Plane
    new: torch.Tensor


class Attention(Protocol):
    """An attention kernel. It keeps nothing between calls.

    Attributes:
        repeats: whether it can `replan`.
    """

    repeats: bool

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
        """Writes a layer's new keys and values to their slots, then attends.

        Args:
            layer: index of the layer in the plan's pool.
            query: [tokens, heads, head_dim], packed as planned.
            key: [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, value_dim].
            scale: factor of the scores before the softmax.
            plan: this forward's plan for this pool.
            sinks: [heads], the score of one more key, which every query sees and which has no value.
            softcap: a score s of a key becomes softcap * tanh(s / softcap).

        Returns:
            [tokens, heads, value_dim].
        """
        ...

    def attend_latent(
        self, layer: int, query: torch.Tensor, latents: Latents, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        """Writes what a layer keeps of the new tokens to their slots, then attends.

        Args:
            layer: index of the layer in the plan's pool, whose shape is that of a latent.
            query: [tokens, heads, head_dim] of expanded keys, packed as planned.
            latents: of the new tokens.
            scale, plan: as of `attend`.

        Returns:
            [tokens, heads, value_dim] of expanded values.
        """
        ...

    def replan(self, plan: BatchPlan, new: BatchPlan) -> bool:
        """Makes what was launched with a plan compute another one, if it is launched again.

        Both are of single tokens in one pool, with the same number of `repeated` rows. The rows of a forward after
        those of the plan's extents have no requests: their results are finite, and their keys are written nowhere.

        Returns:
            False if it cannot, for example because it has no room.
        """
        ...


class Given(NamedTuple):
    """The tensors of a kernel, besides the plan; see `Attention.attend`.

    Args:
        query: [tokens, heads, head_dim], of the whole batch.
        keys, values: of the layer: those in pages, and the new ones.
        scale, sinks, softcap: how scores become weights.
    """

    query: torch.Tensor
    keys: Stored
    values: Stored
    scale: float
    sinks: torch.Tensor | None = None
    softcap: float | None = None


class SdpaAttention:
    """PyTorch's scaled dot product attention, one call for each tile, on CPU and GPU.

    Query heads that share a KV head become rows of one matrix, so keys and values are never repeated. A span that
    starts at 0 attends to the batch's own keys. Other spans attend to their pages, in place if these are consecutive.
    """

    repeats = False

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
        keys, values = plan.write(layer, key, value)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        everyone = range(len(plan.extents))
        self._attend(plan, everyone, Given(query, keys, values, scale, sinks, softcap), out)
        return out

    def attend_latent(
        self, layer: int, query: torch.Tensor, latents: Latents, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        """See `Attention.attend_latent`."""
        (keys,) = plan.write(layer, latents.kept)
        out = query.new_empty(*query.shape[:2], latents.value.shape[2])
        absorbed = []
        for index, span in enumerate(plan.spans):
            if span.page_index is None:
                expanded = latents.key[span.rows], latents.value[span.rows]
            elif latents.absorbs(span.tokens):
                absorbed.append(index)
                continue
            else:
                expanded = latents.expand(span.read(*keys))
            _attend_span(span, query, *expanded, scale, None, None, out)
        if absorbed:  # all at once: the projection is read once
            spans = [plan.spans[index].rows for index in absorbed]
            rows = run_of(np.concatenate([np.arange(span.start, span.stop) for span in spans]), query.device)
            ours = query.new_empty(*query.shape[:2], latents.kept.shape[2])
            ours[rows] = latents.absorb(query[rows])
            found = query.new_empty(*query.shape[:2], latents.rank)
            values = Stored(Plane(keys.plane.numbers[..., : latents.rank]), keys.new[..., : latents.rank])
            self._attend(plan, absorbed, Given(ours, keys, values, scale), found)
            out[rows] = latents.project(found[rows])
        return out

    def replan(self, plan: BatchPlan, new: BatchPlan) -> bool:
        """Returns False; see `Attention.replan`."""
        return False

    def _attend(self, plan: BatchPlan, members: Sequence[int], given: Given, out: torch.Tensor) -> None:
        """Computes the rows of some extents of a plan, the `members`, into their rows of `out`."""
        for span in (plan.spans[index] for index in members):
            seen = span.read(*given.keys), span.read(*given.values)
            _attend_span(span, given.query, *seen, given.scale, given.sinks, given.softcap, out)


def _attend_span(
    span: Span,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Computes attention of a span's rows of the batch, `query`, to its own keys, into its rows of `out`."""
    if span.causal and sinks is None and softcap is None:
        out[span.rows] = causal(query[span.rows], keys, values, scale)
        return
    for tile in span.tiles:
        mask = tile.mask(query.shape[1] // keys.shape[1], query.device)
        k, v = keys[tile.keys], values[tile.keys]
        _attend_tile(query[tile.rows], k, v, scale, mask, sinks, softcap, out[tile.rows])


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes attention of a whole prompt to itself, [tokens, heads, head_dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _attend_tile(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Computes attention of a tile's queries to its keys, into `out`; all [positions, heads, head_dim]."""
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    q = grouped.reshape(1, kv_heads, -1, head_dim)
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))
    if sinks is None and softcap is None:
        result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        result = _weights(q, k, scale, mask, sinks, softcap).to(v.dtype) @ v
    by_head = result.view(*grouped.shape[:3], -1)
    out.view(rows, kv_heads, -1, by_head.shape[-1]).copy_(by_head.permute(2, 0, 1, 3))


def _weights(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """Computes what PyTorch's attention cannot: float32 weights of capped scores, or beside one sink per head.

    A cap comes before the mask: a key that is not seen has no score, not a low one. A sink is never capped. It takes
    weight but has no value.
    """
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh_() * softcap
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    rows = q.shape[2] * q.shape[1] // len(sinks)
    column = sinks.float().view(1, q.shape[1], -1, 1).repeat_interleave(rows, 2)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


@dataclass(frozen=True, slots=True)
class Paging:
    """The argument `paging`, which a forward passes through the model to its attention layers.

    A layer waits only for its own part of the transfers under way, so it computes while the next one is copied.

    Args:
        attention: the kernel.
        plans: by pool.
        places: for each layer of the model: its pool, and its index there. Layers that share keys have the same place,
            and are given the same keys, which they write once more.
        max_context: positions that a sequence can have.
        arriving: transfers to the pools that are under way.
        given: what each layer has just given to the model's cache; empty without one.
        adapted: whether an adapter's layers are in place of the model's own.
    """

    attention: Attention
    plans: Mapping[str, BatchPlan]
    places: Mapping[int, tuple[str, int]]
    max_context: int
    arriving: tuple[LayerTicket, ...] = ()
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    adapted: bool = False


class PackedPositions:
    """Stands in for transformers' cache where a model takes positions from it (Llama 4), and keeps nothing.

    Such a model takes the position of a token as its place in the batch plus the length of the cache. Here tokens of
    many requests are packed, so each token has its own length.

    Args:
        positions: int64 [1, tokens].
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._lengths = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Returns the position of each token minus its place in the batch, [tokens]."""
        return self._lengths

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *others: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what it is given: the attention function has the pages."""
        return key, value


def install(model: PreTrainedModel) -> None:
    """Makes `model` attend through the `Paging` of each forward; it can no longer run without one."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, _paged_attention)
    exchange_attention(model, PAGED)


def exchange_attention(model: PreTrainedModel, name: str) -> None:
    """Makes the text part of `model` use transformers' attention function `name`; encoders stay as they are.

    Does nothing if the model's attention cannot be exchanged.
    """
    if not model._can_set_attn_implementation():
        return
    config = model.config
    text = config.get_text_config(decoder=True)
    parts = [part for part in config.sub_configs if getattr(config, part, None) is text]
    model.set_attn_implementation({parts[0]: name} if parts else name)


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Makes the text part of `model` use transformers' own attention inside the `with` block."""
    before = text_attention(model)
    exchange_attention(model, "eager")
    try:
        yield
    finally:
        exchange_attention(model, before)


def text_attention(model: PreTrainedModel) -> str:
    """Returns the name of the attention function of the text part of `model`."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    paging: Paging | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [batch, heads, tokens, head_dim] to [batch, tokens, heads, head_dim].

    The plan holds the rows of the batch one after another.
    """
    if paging is None:
        raise UnsupportedModel(f"{type(module).__name__} got no page tables: the model does not pass arguments on")
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index not in paging.places:
        raise UnsupportedModel(f"{type(module).__name__} is layer {index}, which has no keys by its configuration")
    name, layer = paging.places[index]
    plan = paging.plans[name]
    _refuse(module, attention_mask, plan.component, paging.max_context, others)
    given = paging.given.pop(index, (key, value))
    kept = given if plan.pool.shape.latent else (key, value)
    if [(x.shape[1], x.shape[-1]) for x in kept] != plan.pool.shape.given:
        raise UnsupportedModel(f"{type(module).__name__} makes keys and values of shapes {key.shape}, {value.shape}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    for ticket in paging.arriving:
        ticket.wait_layer(index)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if plan.pool.shape.latent:
        out = paging.attention.attend_latent(layer, packed[0], Latents(module, kept, *packed[1:]), scale, plan)
    else:
        out = paging.attention.attend(layer, packed[0], packed[1], packed[2], scale, plan, s_aux, softcap)
    return out.view(len(query), -1, *out.shape[1:]), None


def _refuse(
    module: torch.nn.Module, mask: object, component: Attended, max_context: int, others: dict[str, Any]
) -> None:
    """Raises for everything that would change the scores and is not supported here."""
    name = type(module).__name__
    if mask is not None:
        raise UnsupportedModel(f"{name} passes an attention mask of its own")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal")
    asked = others.pop("sliding_window", None)
    window = component.window
    if asked is not None and asked != window and (window is not None or asked < max_context):
        expected = "all" if window is None else window
        raise UnsupportedModel(f"{name} attends to a sliding window of {asked} positions, not {expected}")
    unknown = sorted(key for key, given in others.items() if not _is_off(given) and key not in _HARMLESS)
    if unknown:
        raise UnsupportedModel(f"{name} calls its attention with {', '.join(unknown)}, which is not supported")


def _is_off(given: object) -> bool:
    """Returns whether an argument has no effect: None, False, or a rate of 0."""
    return given is None or (isinstance(given, (bool, int, float)) and not given)
