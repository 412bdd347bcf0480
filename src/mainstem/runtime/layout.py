"""What a model keeps for a prefix, layer by layer, and so which components and pools it needs.

    full attention      a key and a value of every position      pool of "full" pages
    sliding window      those of the last w positions            pool of "window" pages
    recurrent, conv     the state after the last position        pool of "state" slots

A layer may keep both a state and keys (Falcon-H1), or nothing (an MLP alone). The kinds of layers are read from the
cache that transformers itself makes for a configuration, so no model family is named here.

This module knows only configurations: no weights, no tensors, no pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mainstem.components import Component, Full, State, Window
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.kv import KVShape
from mainstem.runtime.places import new_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The components of a model and its layers.

    Args:
        components: Full first unless every attention layer slides; then Window; then State.
        kv_layers: for each component of pages, the layers that keep keys and values in its pool, ascending. A model
            without attention has full pages with no layers, which only mark which prefixes are known.
        shapes: the size of a position in the pool of each of these components.
        state_layers: layers that keep a state, ascending.
    """

    components: tuple[Component, ...]
    kv_layers: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, KVShape]
    state_layers: tuple[int, ...]

    @classmethod
    def of(cls, config: PreTrainedConfig, max_context: int, ranks: int = 1) -> Layout:
        """Reads the layout from a model's configuration.

        Args:
            config: of the model.
            max_context: positions that a sequence can have; a window of this size or more is full attention.
            ranks: processes that hold the model together; the layout is that of each.

        Raises:
            UnsupportedModel: its KV is not one key and one value for each position, layer and head, it needs two pools
                of one kind, or several ranks cannot hold it; the message says why.
            BadArgument: its KV heads are not divisible by the number of ranks.
        """
        text = config.get_text_config(decoder=True)
        _refuse(text)
        kinds = _Kinds.of(text, max_context)
        kv_layers = {Full.name: kinds.full, Window.name: kinds.sliding}
        kv_layers = {name: layers for name, layers in kv_layers.items() if layers} or {Full.name: ()}
        components: list[Component] = [Full()] if Full.name in kv_layers else []
        if kinds.window is not None:
            components.append(Window(kinds.window))
        if kinds.state:
            components.append(State())
        if ranks > 1:
            _refuse_ranks(text, kinds)
        shapes = {name: _divided(text, _shape(text, name, layers), ranks) for name, layers in kv_layers.items()}
        return cls(tuple(components), kv_layers, shapes, kinds.state)

    @property
    def window(self) -> int | None:
        """Positions that a query of a sliding layer sees, its own included; None without such layers."""
        return next((component.tokens for component in self.components if isinstance(component, Window)), None)

    @property
    def places(self) -> dict[int, tuple[str, int]]:
        """For each layer with keys: the pool, and the layer's index there."""
        return {layer: (name, i) for name, layers in self.kv_layers.items() for i, layer in enumerate(layers)}

    def bytes_per_page(self, page_size: int, dtype: torch.dtype) -> dict[str, int]:
        """Returns the bytes of a page, for each component of pages."""
        return {name: shape.bytes_per_page(page_size, dtype) for name, shape in self.shapes.items()}


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Layers by what they keep, and the window of the sliding ones."""

    full: tuple[int, ...]
    sliding: tuple[int, ...]
    state: tuple[int, ...]
    window: int | None

    @classmethod
    def of(cls, config: PreTrainedConfig, max_context: int) -> _Kinds:
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        layers = new_cache(config).layers
        state = tuple(i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin))
        reach = {i: seen for i, layer in enumerate(layers) if (seen := _reach(config, layer)) is not None}
        windows = {seen for seen in reach.values() if 0 < seen < max_context}
        if len(windows) > 1:
            raise UnsupportedModel(f"{config.model_type}: its layers slide over windows of {sorted(windows)} positions")
        sliding = tuple(i for i, seen in reach.items() if seen in windows)
        return cls(tuple(i for i in reach if i not in sliding), sliding, state, next(iter(windows), None))


def _reach(config: PreTrainedConfig, layer: object) -> int | None:
    """Returns the positions that a layer sees: 0 for all, None if it has no attention."""
    from transformers import cache_utils

    if isinstance(layer, (cache_utils.DummyLayer, cache_utils.LinearAttentionLayer)) and not isinstance(
        layer, cache_utils.DynamicLayer
    ):
        return None
    if isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
        return int(layer.sliding_window)
    if type(layer) in (cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer):
        return 0
    raise UnsupportedModel(f"{config.model_type}: a layer keeps its past as a {type(layer).__name__}")


def _refuse(config: PreTrainedConfig) -> None:
    """Raises for unsupported features that the kinds of layers do not show."""
    reasons = []
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        reasons.append("it has layers of the kind chunked_attention")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        reasons.append("its attention scores are soft-capped")
    if getattr(config, "kv_lora_rank", None) is not None:
        reasons.append("its KV is compressed (multi-head latent attention)")
    if getattr(config, "num_kv_shared_layers", None):
        reasons.append("some of its layers share the KV of others")
    if getattr(config, "attn_temperature_tuning", None):
        reasons.append("the temperature of its attention follows a token's place in the batch, not its position")
    if reasons:
        raise UnsupportedModel(f"{config.model_type}: {'; '.join(reasons)}")


def _shape(config: PreTrainedConfig, name: str, layers: Sequence[int]) -> KVShape:
    if not layers:
        return KVShape(0, 0, 0)
    shapes = {KVShape.of(config.per_layer_config[layer]) for layer in layers}
    if len(shapes) > 1:
        raise UnsupportedModel(f"{config.model_type}: its {name} attention layers have heads of different sizes")
    return shapes.pop()._replace(layers=len(layers))


def _refuse_ranks(config: PreTrainedConfig, kinds: _Kinds) -> None:
    """Raises for a model whose layers transformers cannot divide among ranks, or not always correctly."""
    if kinds.state:
        raise UnsupportedModel(
            f"{config.model_type} has recurrent or convolutional layers, which only a single process serves: "
            "transformers' plans divide some of them in ways that change the results"
        )
    if not config.base_model_tp_plan:
        raise UnsupportedModel(f"{config.model_type} cannot be divided among ranks: transformers has no plan for it")


def _divided(config: PreTrainedConfig, shape: KVShape, ranks: int) -> KVShape:
    """Returns the part of a position that each rank keeps: all heads where transformers' plan does not divide them."""
    if ranks == 1:
        return shape
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    heads = get_kv_heads_per_rank(config.base_model_tp_plan or {}, shape.kv_heads, ranks)
    if not isinstance(heads, int):
        allowed = " or ".join(str(n) for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0)
        raise BadArgument("tp", ranks, f"{allowed}, since the model has {shape.kv_heads} KV heads")
    return shape._replace(kv_heads=heads)
