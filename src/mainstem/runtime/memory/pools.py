"""The memory of one model's pages and slots, and the cache over it.

    sizes = pool_sizes(loaded, config)                  pages or slots of each component
    pools = Pools(layout, kv, states, counts, ...)      their tensors
    cache = build_cache(loaded, config, pools, ...)     the tree over them, with its tiers

This module does not know requests or forwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.components import Component, Full, State, by_name
from mainstem.cache.keys import KeyKind
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument
from mainstem.events.source import PUBLIC_SECRET, Event
from mainstem.runtime.attention.paged import plain_attention
from mainstem.runtime.memory.eight_bits import eight_bits
from mainstem.runtime.memory.host import HostPool, Planes, host_pages
from mainstem.runtime.memory.kv import KVPool, KVShape, kv_shapes
from mainstem.runtime.memory.scores import KeptScores
from mainstem.runtime.memory.sizing import Need, share_out, window_pages
from mainstem.runtime.memory.states import StatePool, StateShape
from mainstem.runtime.memory.tiers import build_tiers, close_tiers
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.settings.engine import EngineConfig, HostSize
from mainstem.storage.base import Backend
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.storage.store import Store

log = logging.getLogger(__name__)

STATE_LAYER = 0
"""All states are needed before the first layer is computed, so they are copied as part of it."""


class Pools:
    """The pages, by component, and the states that forwards read and write.

    Args:
        layout: of the model.
        kv: the size of a position in each pool of pages.
        shape: of a state; None: the model keeps none.
        counts: pages or slots of each component, by name.
        page_size: positions per page.
        like: a tensor of the model's dtype, on its device.
        computation: how what they hold is computed, where another way gives other numbers; part of the identity.
        kv_cache_dtype: of the keys and values in pages; `auto`: that of `like`. Latents and states keep that.
        best: pages of full attention have scores, each with so many of the likeliest tokens; None: none have.

    Attributes:
        paged: the pools of pages, by component.
        states: the slots; None: the model keeps no state.

    Raises:
        BadArgument: `counts` lacks a component, or names one that the model does not have, or no pool holds keys that
            could have `kv_cache_dtype`.
    """

    def __init__(
        self,
        layout: Layout,
        kv: Mapping[str, KVShape],
        shape: StateShape | None,
        counts: Mapping[str, int],
        page_size: int,
        like: torch.Tensor,
        computation: tuple[str, ...] = (),
        kv_cache_dtype: str = "auto",
        best: int | None = None,
    ) -> None:
        if sorted(counts) != sorted(layout.names):
            raise BadArgument("pages", dict(counts), f"a number for each of {', '.join(layout.names)}")
        self._layout = layout
        self.computation = computation
        bits = eight_bits(kv_cache_dtype)
        if bits is not None and not any(size.layers and size.kept(like.dtype, bits) is bits for size in kv.values()):
            raise BadArgument("kv_cache_dtype", kv_cache_dtype, "auto: the model keeps latents or states, not keys")
        self.paged = {
            name: KVPool(
                size, counts[name], page_size, like.dtype, like.device, bits, best if name == Full.name else None
            )
            for name, size in kv.items()
        }
        self.states = None if shape is None else StatePool(shape, counts["state"], like.device)

    @property
    def scores(self) -> KeptScores | None:
        """The scores beside the pages of full attention; None: there are none."""
        return self.paged[Full.name].scores if Full.name in self.paged else None

    @property
    def planes(self) -> list[Planes]:
        """The tensors that the ids of each component index, in the order of the layout."""
        planes = [
            Planes(pool.planes, self._layout.kv_layers[name], 0 if pool.scores is None else 1)
            for name, pool in self.paged.items()
        ]
        if self.states is not None:
            planes.append(Planes(tuple(tensor.unsqueeze(0) for tensor in self.states.tensors), (STATE_LAYER,)))
        return planes

    def host_memory(self, size: HostSize, storage: bool) -> HostPool:
        """Allocates host pages for the pools, with the components in the same order.

        Args:
            size: of the host memory.
            storage: whether storage will read and write them.

        Raises:
            BadArgument: the size holds no page, or cannot be allocated.
        """
        return HostPool(self.planes, host_pages(size, self.planes), storage=storage)

    def copy_page(self, source: int, target: int, positions: int, component: str | None = None) -> None:
        """Copies the KV of the first `positions` positions of page `source` to page `target`.

        Args:
            source: the page to read.
            target: the page to write.
            positions: the number of positions.
            component: the component of the pages; by default the first.
        """
        self.paged[component or self._layout.names[0]].copy_page(source, target, positions)

    def copy_state(self, source: int, target: int) -> None:
        """Copies the state in slot `source` to slot `target`; called only if the model has states."""
        assert self.states is not None
        self.states.copy(source, target)

    def clear(self, component: str, ids: NDArray[np.int32]) -> None:
        """Overwrites pages of a component, or states, with zeros."""
        if component in self.paged:
            self.paged[component].clear(ids)
        elif self.states is not None:
            self.states.clear(ids)


def build_cache(
    loaded: LoadedModel,
    config: EngineConfig,
    pools: Pools,
    keys: KeyKind,
    sizes: Mapping[Component, int],
    clock: Callable[[], float],
    on_event: Callable[[Event], object] | None = None,
    backend: Backend | None = None,
) -> PrefixCache:
    """Makes the cache over a model's pools, with its tiers; see `build_tiers`. If it fails, it releases the tiers.

    Raises:
        BadArgument: a size or a spec is invalid, or the policy does not exist.
        BackendUnavailable: the store's client is not installed, or its server does not answer.
    """
    host, store = (
        build_tiers(config.tiers, pools, loaded, config.page_size, clock, backend)
        if config.tiers.exist
        else (None, None)
    )
    try:
        cache = PrefixCache(
            sizes,
            config.page_size,
            keys=keys,
            policy=config.policy,
            enabled=config.cache,
            copy_page=pools.copy_page,
            copy_state=pools.copy_state,
            host=host,
            store=store,
            on_event=on_event,
            event_secret=config.tiers.storage_secret or PUBLIC_SECRET,
            retain_share=config.retain_share,
            reserve=_reserve(loaded, config, sizes),
            explain_pages=_remembered(sizes, host) if config.explain else None,
        )
        if pools.scores is not None:
            cache.pool.freed_with(pools.scores.forget)
        if config.overwrite_freed:
            _overwrite_freed(cache, pools, host)
        return cache
    except BaseException:
        if host is not None:
            close_tiers(host, store)
        raise


def _remembered(sizes: Mapping[Component, int], host: HostTier | None) -> int:
    """Returns how many evicted pages are remembered: four times what device and host hold."""
    kept = 0 if host is None else (host.pages or (host.memory.pages,))[0]
    return 4 * (next(iter(sizes.values())) + kept)


def _cleared(memory: HostPool, row: int, store: Store | None) -> Callable[[NDArray[np.int32]], object]:
    """Returns what overwrites freed host pages, once peers are not given them any more."""
    if store is None or store.shelf is None or not memory.payload_bytes(row):
        return partial(memory.clear, row)
    forget, clear = store.shelf.forgets(memory, row), partial(memory.clear, row)

    def freed(page_ids: NDArray[np.int32]) -> None:
        forget(page_ids)
        clear(page_ids)

    return freed


def _overwrite_freed(cache: PrefixCache, pools: Pools, host: HostTier | None) -> None:
    for name, pool in cache.pools.items():
        pool.freed_with(partial(pools.clear, name))
    if cache.tiers is not None and host is not None and isinstance(host.memory, HostPool):
        for row, pool in enumerate(cache.tiers.host_pools):
            pool.freed_with(_cleared(host.memory, row, cache.tiers.store))


def _reserve(loaded: LoadedModel, config: EngineConfig, sizes: Mapping[Component, int]) -> dict[str, int]:
    """Returns the pages or slots that nobody may retain: half, or as many as the longest request needs."""
    chunk, states = min(config.token_budget, loaded.max_context), any(isinstance(row, State) for row in sizes)

    def longest(row: Component) -> int:
        if isinstance(row, State):
            return 2  # to compute with, and to keep
        tokens = None if isinstance(row, Full) else row.tokens
        if tokens is None:
            return -(-loaded.max_context // config.page_size)
        return window_pages(tokens, chunk, config.page_size, states=states)

    rows = by_name(sizes).items()
    return {name: min(sizes[row], max(sizes[row] - sizes[row] // 2, longest(row))) for name, row in rows}


def pool_sizes(loaded: LoadedModel, config: EngineConfig) -> dict[Component, int]:
    """Returns the pages or slots of each of the model's components.

    Raises:
        BadArgument: the memory does not hold a page of each, or the windows of one request.
        UnsupportedModel: its layers keep what no pool holds.
    """
    layout = Layout.of(loaded.model.config, loaded.max_context, loaded.ranks.size)
    size = config.page_size
    chunk = min(config.token_budget, loaded.max_context)
    states = bool(layout.state_layers)
    need = Need(
        local_pages={row: window_pages(row.tokens, chunk, size, states=states) for row in layout.local.values()},
        context_pages=-(-loaded.max_context // size),
        running=config.max_running,
    )
    page_bytes, slot_bytes = _bytes(loaded, layout, size, config)
    sizes = share_out(layout.components, page_bytes, slot_bytes, config, need)
    return {
        State(most_on_path=config.states_per_path) if isinstance(row, State) else row: n for row, n in sizes.items()
    }


def max_context(loaded: LoadedModel, config: EngineConfig, sizes: Mapping[Component, int]) -> int:
    """Returns the positions that one request can have: the model's limit, or the pool's, and says if that is less."""
    most = min(loaded.max_context, sizes.get(Full(), loaded.max_context) * config.page_size)
    if most < loaded.max_context and loaded.ranks.rank == 0:
        short = "%s: a request has at most %d tokens, prompt and answer together, of the model's %d"
        log.warning(f"{short}: the memory for KV holds no more", loaded.name, most, loaded.max_context)
    return most


def counts_of(sizes: Mapping[Component, int]) -> dict[str, int]:
    """Returns sizes by the names of the components."""
    return {name: sizes[row] for name, row in by_name(sizes).items()}


def id_bytes(loaded: LoadedModel, config: EngineConfig, sizes: Mapping[Component, int]) -> dict[str, int]:
    """Returns the bytes of a page, or of a slot, of each component by its name."""
    layout = Layout.of(loaded.model.config, loaded.max_context, loaded.ranks.size)
    page_bytes, slot_bytes = _bytes(loaded, layout, config.page_size, config)
    return {name: page_bytes.get(name, slot_bytes) for name in by_name(sizes)}


def _bytes(loaded: LoadedModel, layout: Layout, page_size: int, config: EngineConfig) -> tuple[dict[str, int], int]:
    """Returns the bytes of a page of each component, and of a state."""
    bits = eight_bits(config.kv_cache_dtype)
    with plain_attention(loaded.model):
        shapes = kv_shapes(loaded.model, layout.kv_layers)
        state = StateShape.of(loaded.model) if layout.state_layers else None
    pages = {
        name: shape.bytes_per_page(
            page_size, shape.kept(loaded.dtype, bits), config.keep_scores if name == Full.name else None
        )
        for name, shape in shapes.items()
    }
    return pages, 0 if state is None else state.bytes_per_slot
