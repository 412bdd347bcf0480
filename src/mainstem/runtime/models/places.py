"""The places of a model's states: the one module that knows families that keep them outside transformers' cache.

    run(model, cache, input_ids=...)     one forward, from the states in the layers of `cache`, to those after it

Everywhere else states are in the layers of a cache of transformers, whatever the model. For a family that keeps them
elsewhere, a function here moves them there and back:

    minimax           a cache class of its own
    recurrent_gemma   attributes of its modules
    rwkv              an argument, and a field of the output

Whether a model goes on correctly, `states.prove` tests. This module knows neither slots nor prompts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from mainstem.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

Kind = Literal["conv", "recurrent"]

# States of each layer of families whose layers have no kinds: all of them are recurrent.
_ALL_RECURRENT = {"rwkv": 5}

# Models whose states no function here can move.
_OUTSIDE = {"xlstm": "a cache class of its own, and computes logits of all tokens only"}


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """Returns an empty cache of transformers for a model, with a place for each of its states.

    Raises:
        UnsupportedModel: the model keeps its states where nothing else can read or write them.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer

    text = config.get_text_config(decoder=True)
    if place := _OUTSIDE.get(text.model_type):
        raise UnsupportedModel(f"{text.model_type} keeps its state in {place}")
    cache = DynamicCache(config=config)
    if states := _ALL_RECURRENT.get(text.model_type):
        cache.layers = [LinearAttentionLayer(number_of_states=states) for _ in cache.layers]
    return cache


def keeps_elsewhere(config: PreTrainedConfig) -> bool:
    """Returns whether a model's states are in the layers of a cache only between two calls of `run`."""
    return config.get_text_config(decoder=True).model_type in _PLACES


def put(layer: Any, kind: Kind, number: int, state: torch.Tensor, *, previous: bool = True) -> None:
    """Sets one state of a cache's layer; `previous`: whether the next forward continues from it."""
    if kind == "conv":
        layer.conv_states[number] = state
        layer.is_conv_states_initialized[number] = True
        layer.conv_kernel_size[number] = state.shape[-1]
    else:
        layer.recurrent_states[number] = state
        layer.is_recurrent_states_initialized[number] = True
    layer.has_previous_state[number] = previous
    layer.dtype, layer.device = state.dtype, state.device


def run(model: PreTrainedModel, cache: Cache, **inputs: Any) -> Any:
    """Runs one forward of `model`, from the states in `cache`, and leaves there those after it; returns its output.

    Raises:
        UnsupportedModel: the model takes no cache.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    return _PLACES.get(kind, _own_cache)(model, cache, {**inputs, "use_cache": True})


def _own_cache(model: Any, cache: Cache, inputs: dict[str, Any]) -> Any:
    return model(**inputs, **{_cache_argument(model.__class__): cache})


@functools.cache
def _cache_argument(kind: Any) -> str:
    known = inspect.signature(kind.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in known:
            return name
    raise UnsupportedModel(f"{kind.__name__}: its forward takes no cache")


def _minimax(model: Any, cache: Cache, inputs: dict[str, Any]) -> Any:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    own: Any = MiniMaxCache()  # type: ignore[no-untyped-call]
    own.layers, own.update = cache.layers, cache.update
    linear = dict(_linear(cache))
    states = (linear[i].recurrent_states[0] if _goes_on(linear.get(i)) else None for i in range(len(cache.layers)))
    own.linear_cache = list(states)
    output = model(**inputs, past_key_values=own)
    for i, layer in linear.items():
        put(layer, "recurrent", 0, own.linear_cache[i])
    return output


def _recurrent_gemma(model: Any, cache: Cache, inputs: dict[str, Any]) -> Any:
    blocks = {i: model.model.layers[i].temporal_block for i, _ in _linear(cache)}
    for i, layer in _linear(cache):
        goes_on = _goes_on(layer)
        blocks[i].conv1d_state = layer.conv_states[0] if goes_on else None
        blocks[i].rg_lru.recurrent_states = layer.recurrent_states[0] if goes_on else None
    output = model(**inputs, past_key_values=cache)
    for i, layer in _linear(cache):
        put(layer, "conv", 0, blocks[i].conv1d_state)
        put(layer, "recurrent", 0, blocks[i].rg_lru.recurrent_states)
        blocks[i].conv1d_state = blocks[i].rg_lru.recurrent_states = None
    return output


def _rwkv(model: Any, cache: Cache, inputs: dict[str, Any]) -> Any:
    """Moves states of [rows, hidden] from and to five tensors [rows, hidden, layers]."""
    import torch

    layers = [layer for _, layer in _linear(cache)]
    numbers = range(_ALL_RECURRENT["rwkv"])
    state = None
    if _goes_on(layers[0]):
        state = [torch.stack([layer.recurrent_states[n] for layer in layers], dim=-1) for n in numbers]
    output = model(**inputs, state=state)
    for i, layer in enumerate(layers):
        for n in numbers:
            put(layer, "recurrent", n, output.state[n][..., i])
    return output


_PLACES: Mapping[str, Callable[[Any, Cache, dict[str, Any]], Any]] = {
    "minimax": _minimax,
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": _rwkv,
}


def _linear(cache: Cache) -> Iterator[tuple[int, Any]]:
    """Yields the layers that keep a state, each with its index."""
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            yield i, layer


def _goes_on(layer: Any) -> bool:
    """Returns whether a layer, if there is one, has a state from which the next forward continues."""
    return layer is not None and bool(layer.has_previous_state[0])
