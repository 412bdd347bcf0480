"""The layout of a model's cache: what each layer keeps for a prefix, and so which components and pools it needs.

    full attention      a key and a value of every position      pool of "full" pages
    sliding window      those of the last w positions            pool of "window" pages; one for each w
    chunks              those of the chunk of c positions        pool of "chunked" pages; one for each c
    recurrent, conv     the state after the last position        pool of "state" slots

A layer may keep both a state and keys (Falcon-H1), or nothing: an MLP alone, or a layer that reads the keys of an
earlier one (Gemma 3n). The kinds of layers are read from the cache that transformers itself makes for a configuration,
so no model family is named here.

This module knows only configurations: no weights, no tensors, no pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mainstem.cache.components import KINDS, Attended, Chunked, Component, Full, Local, State, Window, by_name
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.models.places import new_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The components of a model and its layers.

    Args:
        components: Full first unless every attention layer slides; then a Window for each size and a Chunked for each
            size, the longest first; then State.
        kv_layers: for each component of pages, by name, the layers that keep keys and values in its pool, ascending. A
            model without full attention and windows has full pages with no layers, which only mark which prefixes are
            known.
        state_layers: layers that keep a state, ascending.
        shared: for each layer that keeps nothing and attends to an earlier layer's keys: that layer.
    """

    components: tuple[Component, ...]
    kv_layers: Mapping[str, tuple[int, ...]]
    state_layers: tuple[int, ...]
    shared: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: PreTrainedConfig, max_context: int, ranks: int = 1) -> Layout:
        """Reads the layout from a model's configuration.

        Args:
            config: of the model.
            max_context: positions that a sequence can have; a window of this size or more is full attention.
            ranks: processes that hold the model together; the layout is that of each.

        Raises:
            UnsupportedModel: its layers keep what no pool holds, or several ranks cannot hold it; the message says why.
            BadArgument: its KV heads are not divisible by the number of ranks.
        """
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        text = config.get_text_config(decoder=True)
        layers = dict(enumerate(new_cache(text).layers))
        state = tuple(i for i, layer in layers.items() if isinstance(layer, LinearAttentionCacheLayerMixin))
        attended = {i: row for i in layers if (row := _attended(text, i, layers[i], max_context)) is not None}
        if ranks > 1:
            _check_ranks(text, ranks, list(attended))
        local = {row for row in attended.values() if isinstance(row, Local)}
        order = sorted(local, key=lambda row: (KINDS.index(type(row)), -row.tokens))
        full = Full() in attended.values() or not any(isinstance(row, Window) for row in local)
        paged = by_name([*([Full()] if full else []), *order])
        kv_layers = {name: tuple(i for i, kept in attended.items() if kept == row) for name, row in paged.items()}
        return cls((*paged.values(), *([State()] if state else [])), kv_layers, state, _shared(text))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components."""
        return tuple(by_name(self.components))

    @property
    def attended(self) -> dict[str, Attended]:
        """The components of pages, by name."""
        return by_name(row for row in self.components if not isinstance(row, State))

    @property
    def local(self) -> dict[str, Local]:
        """The components of which a query sees only the last positions, by name."""
        return {name: row for name, row in self.attended.items() if not isinstance(row, Full)}

    @property
    def places(self) -> dict[int, tuple[str, int]]:
        """For each layer that attends: the pool, and the index there of the layer whose keys it reads."""
        own = {layer: (name, i) for name, layers in self.kv_layers.items() for i, layer in enumerate(layers)}
        return own | {layer: own[keeper] for layer, keeper in self.shared.items()}


def _attended(config: PreTrainedConfig, index: int, layer: object, max_context: int) -> Attended | None:
    """Returns the component of a layer's keys and values; None if it keeps none."""
    from transformers import cache_utils

    without_keys = cache_utils.LinearAttentionLayer, getattr(cache_utils, "DummyLayer", ())  # 5.17 has no such class
    if isinstance(layer, without_keys) and not isinstance(layer, cache_utils.DynamicLayer):
        return None
    if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
        tokens, kinds = int(layer.sliding_window), getattr(config, "layer_types", None)
        if not 0 < tokens < max_context:
            return Full()
        own = config.per_layer_config[index]
        chunked = kinds[index] == "chunked_attention" if kinds else getattr(own, "sliding_window", None) is None
        return Chunked(tokens) if chunked else Window(tokens)  # one class of transformers' cache keeps both
    if isinstance(layer, cache_utils.DynamicIndexedLayer):
        what = "chooses keys by a sparse index, and in transformers chooses others in chunks than in a whole prompt"
        raise UnsupportedModel(f"{config.model_type}: it {what}")
    if type(layer) in (cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer):
        return Full()
    raise UnsupportedModel(f"{config.model_type}: a layer keeps its past as a {type(layer).__name__}")


def _shared(config: PreTrainedConfig) -> dict[int, int]:
    """Returns the layers that attend to the keys of the last layer of their type that stores its keys for others."""
    modes = getattr(config, "kv_sharing_modes", None) or ()
    stores: dict[str, int] = {}
    shared = {}
    for layer, mode in enumerate(modes):
        if mode == "store":
            stores[config.layer_types[layer]] = layer
        elif mode == "reuse":
            shared[layer] = stores[config.layer_types[layer]]
        elif mode is not None:
            raise UnsupportedModel(f"{config.model_type}: layer {layer} shares keys by the rule {mode}")
    return shared


def _check_ranks(config: PreTrainedConfig, ranks: int, layers: Sequence[int]) -> None:
    """Raises for a model whose layers transformers cannot divide among ranks. `division` proves the others."""
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    plan = config.base_model_tp_plan
    if not plan:
        raise UnsupportedModel(f"{config.model_type} cannot be divided among ranks: transformers has no plan for it")
    latent = getattr(config, "kv_lora_rank", None) is not None
    for own in (config.per_layer_config[layer] for layer in layers):
        heads, kind = int(own.num_attention_heads), "heads"
        if latent:  # whole on every rank; a plan may divide the heads that are expanded from it
            fits = heads % ranks == 0 or not any(name.endswith("kv_b_proj") for name in plan)
        else:
            heads, kind = int(getattr(own, "num_key_value_heads", None) or heads), "KV heads"
            fits = isinstance(get_kv_heads_per_rank(plan, heads, ranks), int)
        if not fits:
            allowed = " or ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise BadArgument("tp", ranks, f"{allowed}, since the model has {heads} {kind}")
