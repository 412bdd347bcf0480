"""Copies between pages and the caches that transformers itself makes, for models that run as transformers runs them.

    pages, slot   --fill-->                 a fresh cache, as if it had seen the prefix        of several rows at once
    pages, slot   <--write, store_state--   a cache after a forward                            of one row

    row   [ padding | position 0, 1, ... ]      column = padding + position

Windows: transformers drops what no later query sees. A prefix that ends earlier needs it, so windows record it until it
is written.

This module knows transformers' caches and pools. It does not know leases, calls or tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from mainstem.cache.components import Component, Full
from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.paged import TOLERANCE, spread_error
from mainstem.runtime.kernels.scans import resume
from mainstem.runtime.memory.kv import KVShape, kv_shapes
from mainstem.runtime.memory.pools import Pools, counts_of, pool_sizes
from mainstem.runtime.memory.states import StateShape, prove
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.places import keeps_elsewhere, new_cache, run
from mainstem.runtime.models.refusals import prefix_refusals
from mainstem.settings.engine import EngineConfig

_TEST_TOKENS = 12
_TEST_WINDOW = 128  # the self-test's prompt is longer than windows of up to this size


class Place(NamedTuple):
    """The place of a row: the columns of padding before it, its pages by component, and the slot of its state."""

    pad: int
    tables: tuple[NDArray[np.int32], ...]
    state: int


class CacheCopies:
    """The pools of a model, and the copies between them and caches of transformers.

    Args:
        model: runs, and has caches of its configuration.
        layout: of the model.
        kv, shape: sizes of a position and of a state.
        counts: pages or slots of each component.
        page_size: positions per page.
        computation: how the model computes what is kept; see `Pools`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        kv: Mapping[str, KVShape],
        shape: StateShape | None,
        counts: Mapping[str, int],
        page_size: int,
        computation: tuple[str, ...] = (),
    ) -> None:
        self._model, self._layout, self._page_size = model, layout, page_size
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.pools = Pools(layout, kv, shape, counts, page_size, like, computation)
        self.has_states = shape is not None
        self.whole = layout.components == (Full(),)
        self._layers = [type(layer) for layer in new_cache(model.config).layers]
        self._arguments = inspect.signature(model.forward).parameters

    def new_cache(self) -> DynamicCache:
        """Returns a fresh cache that keeps what windows pass over."""
        cache = new_cache(self._model.config)
        self.record(cache)
        return cache

    def run(self, cache: DynamicCache, ids: torch.Tensor, begin: int) -> torch.Tensor:
        """Computes ids [1, n] from position `begin` on; returns the logits of the last one at least."""
        inputs: dict[str, Any] = {"input_ids": ids}
        if "position_ids" in self._arguments:
            inputs["position_ids"] = torch.arange(begin, begin + ids.shape[1], device=ids.device).unsqueeze(0)
        if "logits_to_keep" in self._arguments:
            inputs["logits_to_keep"] = 1
        logits: torch.Tensor = run(self._model, cache, **inputs).logits
        return logits[:, -1]

    def fits(self, cache: DynamicCache) -> bool:
        """Returns whether a cache has the layers of the model."""
        return [type(layer) for layer in cache.layers] == self._layers

    def common(self, ends: Sequence[tuple[int, int]], width: int) -> int:
        """Returns the column at which rows can start together, given their padding and positions; 0: none.

        A window or a state is at the end of a hit and nowhere before. With padding, a model with states takes one more
        column only, as in a step.
        """
        reached = {pad + have for pad, have in ends}
        if not any(have for _, have in ends) or (not self.whole and len(reached) > 1):
            return 0
        column = min(reached)
        if self.has_states and column < width - 1 and (len(ends) > 1 or ends[0][0]):
            return 0
        return column

    def fill(self, cache: DynamicCache, places: Sequence[Place], columns: int) -> None:
        """Makes a fresh cache one that has seen `columns` columns of each row."""
        for number, (name, component) in enumerate(self._layout.attended.items()):
            pool, layers = self.pools.paged[name], self._layout.kv_layers[name]
            if not layers:
                continue
            low = 0 if isinstance(component, Full) else max(0, columns - component.tokens + 1)
            parts = []
            for pad, tables, _ in places:
                end = max(columns - pad, 0)
                begin = min(max(component.seen_from(end), low - pad), end)
                parts.append(pool.read(tables[number], begin, end))
            for layer, rows in zip(layers, zip(*parts, strict=True), strict=True):
                keys, values = (_side_by_side(each, columns - low) for each in zip(*rows, strict=True))
                _set_past(cache.layers[layer], keys, values, columns)
        if self.pools.states is not None:
            self.pools.states.load([place.state for place in places], cache)

    def write(self, cache: DynamicCache, index: int, place: Place, begin: int, end: int) -> bool:
        """Writes positions [begin, end) of a cache's row to pages; returns whether the cache had them."""
        for number, name in enumerate(self._layout.attended):
            layers = (cache.layers[layer] for layer in self._layout.kv_layers[name])
            given = [_read_past(layer, index, place.pad + begin, place.pad + end) for layer in layers]
            if any(part is None for part in given):
                return False
            self.pools.paged[name].write(place.tables[number], begin, [part for part in given if part is not None])
        return True

    def store_state(self, cache: DynamicCache, index: int, slot: int) -> None:
        """Copies the state of a cache's row to a slot, if there are states."""
        if self.pools.states is not None:
            self.pools.states.store([slot], cache, index)

    def slides_from(self, position: int) -> int:
        """Returns from where on window pages are needed to go on at a position: a state needs the window before it."""
        return position - position % self._page_size if self.has_states else position

    # Windows: transformers drops what no later query sees, unless it records the past.

    def record(self, cache: DynamicCache) -> None:
        """Lets windows keep what they pass over."""
        for layer in _windows(cache):
            layer.record_past = True

    def recorded(self, cache: DynamicCache) -> int:
        """Returns how many columns windows keep that no later query sees."""
        kept = (layer.keys.shape[-2] - layer.sliding_window + 1 for layer in _windows(cache) if layer.keys is not None)
        return max(kept, default=0)

    def forget(self, cache: DynamicCache) -> None:
        """Drops these columns."""
        for layer in _windows(cache):
            if layer.keys is not None:
                layer.crop(0)

    def restore(self, cache: DynamicCache) -> None:
        """Lets windows drop what they pass over, as transformers does."""
        self.forget(cache)
        for layer in _windows(cache):
            layer.record_past = False


def _set_past(layer: Any, keys: torch.Tensor, values: torch.Tensor, columns: int) -> None:
    """Makes a fresh layer one that has seen `columns` columns.

    Args:
        layer: of a cache.
        keys: [rows, heads, columns, numbers], of the last columns at least that the layer keeps.
        values: likewise.
        columns: of each row.
    """
    layer.lazy_initialization(keys, values)
    if isinstance(layer, DynamicSlidingWindowLayer):
        last = slice(max(0, keys.shape[-2] - layer.sliding_window + 1), None)
        keys, values = keys[..., last, :], values[..., last, :]
        layer.cumulative_length = columns
    layer.keys, layer.values = keys, values


def _read_past(layer: Any, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns keys and values of columns [begin, end) of a row, [columns, heads, numbers]; None: some are not kept."""
    first = layer.get_seq_length() - layer.keys.shape[-2]
    if begin < first:
        return None
    columns = slice(begin - first, end - first)
    return layer.keys[row, :, columns].transpose(0, 1), layer.values[row, :, columns].transpose(0, 1)


def _windows(cache: DynamicCache) -> list[DynamicSlidingWindowLayer]:
    return [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]


def _side_by_side(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Returns [rows, heads, length, numbers] of each row's [n, heads, numbers], with zeros before those of less."""
    padded = [
        row if len(row) == length else torch.nn.functional.pad(row, (0, 0, 0, 0, length - len(row), 0)) for row in rows
    ]
    together = padded[0].unsqueeze(0) if len(padded) == 1 else torch.stack(padded)
    return together.transpose(1, 2)


class Made(NamedTuple):
    """What `copies_of` has made: the copies, the pages or slots of their pools, and what leaves the model as it was."""

    copies: CacheCopies
    sizes: Mapping[Component, int]
    undo: Callable[[], object]


def copies_of(loaded: LoadedModel, config: EngineConfig) -> Made:
    """Makes a model's pools, and tests that it goes on from what they keep.

    Raises:
        UnsupportedModel: it does not; the model is unchanged.
        BadArgument: the memory does not hold a page of each component, or the windows of one row.
    """
    model, limit = loaded.model, TOLERANCE[loaded.dtype]
    layout = Layout.of(model.config, loaded.max_context)
    if reasons := [*prefix_refusals(model, layout), *_cache_refusals(model)]:
        raise UnsupportedModel(f"{loaded.name} cannot have a prefix cache: {'; '.join(reasons)}")
    sizes = pool_sizes(loaded, config)
    shape = StateShape.of(model) if layout.state_layers else None
    undo: Callable[[], object] = _nothing
    computation: tuple[str, ...] = ("keys gathered",)
    if shape is not None:
        continuation = prove(model, shape, limit).continuation
        if continuation == "stepped":
            raise UnsupportedModel(f"{loaded.name} goes on from a state by single tokens only, unlike generate()")
        if continuation == "resumed":
            undo = resume(model) or _nothing
        computation = (*computation, f"scan {continuation}")
    try:
        kv = kv_shapes(model, layout.kv_layers)
        error = _trial_error(model, layout, kv, shape, min(loaded.max_context, _trial_length(layout)))
        if not error <= limit:
            raise UnsupportedModel(
                f"{loaded.name}: the self-test failed: after a cached prefix, logits differ from those of the whole "
                f"prompt by {error:.2g} of their spread; {limit:g} is allowed"
            )
        copies = CacheCopies(model, layout, kv, shape, counts_of(sizes), config.page_size, computation)
        return Made(copies, sizes, undo)
    except BaseException:
        undo()
        raise


def _nothing() -> None:
    """Does nothing."""


def _cache_refusals(model: PreTrainedModel) -> Iterator[str]:
    """Yields the reasons why generate() has no cache that can be filled from outside."""
    if keeps_elsewhere(model.config):
        yield "it keeps its states outside the cache that generate() makes"
    for layer in new_cache(model.config).layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and isinstance(layer, LinearAttentionCacheLayerMixin):
            yield "a layer has both a window and a state"
            return


def _trial_length(layout: Layout) -> int:
    return _TEST_TOKENS + max((row.tokens for row in layout.local.values() if row.tokens <= _TEST_WINDOW), default=0)


def _trial_error(
    model: PreTrainedModel, layout: Layout, kv: Mapping[str, KVShape], shape: StateShape | None, length: int
) -> float:
    """Returns how far the last logits of a prompt, cut and continued from pages, are from those of the whole one.

    In parts of their spread; infinity if they are not finite.
    """
    size, cut = 4, length - _TEST_TOKENS // 2
    pages = -(-length // size)
    memory = CacheCopies(model, layout, kv, shape, dict.fromkeys(layout.names, pages), size)
    table = np.arange(pages, dtype=np.int32)[::-1].copy()
    place = Place(0, tuple(table for _ in layout.attended), 0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, (1, length))
    ids = torch.from_numpy(prompt).to(model.device)
    try:
        whole = memory.run(memory.new_cache(), ids, 0).float()
        begun, fresh = memory.new_cache(), memory.new_cache()
        memory.run(begun, ids[:, :cut], 0)
        memory.write(begun, 0, place, 0, cut)
        memory.store_state(begun, 0, 0)
        memory.fill(fresh, [place], cut)
        return spread_error(memory.run(fresh, ids[:, cut:], cut).float(), whole, whole)
    except Exception as error:  # models raise all kinds
        raise UnsupportedModel(f"{model.config.model_type} does not go on from a filled cache: {error}") from error
