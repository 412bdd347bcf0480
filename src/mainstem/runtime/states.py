"""The states that recurrent and convolutional layers keep: one slot a sequence, all layers together.

    conv        [slots, channels, kernel]              a tensor for each layer and each of its states;
    recurrent   [slots, heads, ...]                    shapes and dtypes are the model's own, found by running one token

A slot is the state of one sequence behind one token. States are made and read through transformers' own cache objects,
whose updates are in place: so they are copied out of slots before a forward and copied back behind it, and no tensor is
ever shared between a slot and a forward. A forward goes like this:

    shape = StateShape.of(model)             None: the model keeps no state. Before its attention is exchanged
    continuation = prove(model, shape, ...)  "chunked" | "stepped", or UnsupportedModel; likewise before
    pool = StatePool(shape, slots, device)   pool.bytes_per_slot, pool.copy(source, target)
    cache = StateCache(model.config, pool)

    cache.start(1)  or  cache.load([slot])   from zeros  or  behind the state in a slot
    model(input_ids=[1, n], position_ids=[1, n], use_cache=True, **{shape.argument: cache}, ...)
    cache.store([slot])

One sequence a forward, [1, n]; or many that each go on by one token, stacked: load(slots), [R, 1], store(slots). What
starts from zeros and what goes on are never in one forward: the model asks the cache, not the row. Where `prove` says
"stepped", what is behind a state goes token by token, [R, 1]; what starts from zeros may still be [1, n].

Attention layers get from a `StateCache` just the keys and values that they gave, whichever layers are which, so that
an attention function that keeps them itself sees the new ones only. Positions are not known here: always give
`position_ids` to models that take them.

This module does not know pages, requests or who owns a slot.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.layout import refuse_outside

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Kind = Literal["conv", "recurrent"]

Continuation = Literal["chunked", "stepped"]
"""How what follows a state may be fed: several tokens a forward, or one."""

# Tokens of the self-test's prompts, and where they are cut: more than one token behind a state, then one, then two.
_CUTS = (0, 5, 9, 10, 12)


class StateTensor(NamedTuple):
    """One state of one layer.

    Args:
        layer: index in the model.
        number: of the state within the layer, for layers that keep several.
        kind: "conv" or "recurrent".
        shape: of one sequence's state, without the batch.
        dtype: may differ from the model's.
    """

    layer: int
    number: int
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateShape(NamedTuple):
    """What a model keeps for one sequence, whatever its length.

    Args:
        tensors: by layer, at least one.
        argument: what the model's forward calls its cache, "past_key_values" or "cache_params".
    """

    tensors: tuple[StateTensor, ...]
    argument: str

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that keep a state, ascending."""
        return tuple(sorted({tensor.layer for tensor in self.tensors}))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors)

    @classmethod
    def of(cls, model: PreTrainedModel) -> StateShape | None:
        """Find what `model` keeps by running one token of it; None, without running it, when it keeps no state.

        Raises:
            UnsupportedModel: it keeps a state that is not in transformers' cache object.
        """
        kind = model.config.get_text_config(decoder=True).model_type
        refuse_outside(kind)
        cache = DynamicCache(config=model.config)
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            if getattr(model, "_is_stateful", False):
                raise UnsupportedModel(f"{kind} keeps a state, but none that transformers' cache has a place for")
            return None
        argument = _cache_argument(model)
        try:
            _forward(model, argument, torch.zeros(1, 1, dtype=torch.long), 0, cache)
        except ValueError as error:  # what models raise when they want a cache of another class
            raise UnsupportedModel(f"{kind} does not run with transformers' cache: {error}") from error
        return cls(tuple(_tensors(cache, kind)), argument)


def _cache_argument(model: PreTrainedModel) -> str:
    known = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in known:
            return name
    raise UnsupportedModel(f"{type(model).__name__}: its forward takes no cache")


def _tensors(cache: Cache, kind: str) -> Iterator[StateTensor]:
    """What one token of one sequence left in `cache`."""
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        found = list(_states(layer))
        if not found:
            raise UnsupportedModel(f"{kind} keeps the state of layer {number} outside transformers' cache")
        for index, name, state in found:
            if state.shape[0] != 1:
                raise UnsupportedModel(f"{kind}: the {name} state of layer {number} is not one row a sequence")
            yield StateTensor(number, index, name, tuple(state.shape[1:]), state.dtype)


def _states(layer: LinearAttentionCacheLayerMixin) -> Iterator[tuple[int, Kind, torch.Tensor]]:
    for index in range(layer.number_of_states):
        if (state := layer.conv_states[index]) is not None:
            yield index, "conv", state
        if (state := layer.recurrent_states[index]) is not None:
            yield index, "recurrent", state


class StatePool:
    """The states of `slots` sequences, not initialised: only slots that were stored or copied to may be read.

    Args:
        shape: of one sequence's state.
        slots: how many.
        device: where the tensors lie.

    Raises:
        BadArgument: `slots` is less than 1, or there is no memory for so many.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device | str = "cpu") -> None:
        if slots < 1:
            raise BadArgument("slots", slots, "at least 1")
        self.shape = shape
        self.slots = slots
        try:
            self.tensors = tuple(torch.empty((slots, *t.shape), dtype=t.dtype, device=device) for t in shape.tensors)
        except RuntimeError as error:  # what PyTorch raises when there is no such memory
            raise BadArgument(
                "state_bytes", slots * shape.bytes_per_slot, f"memory that can be had on {device}"
            ) from error

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state."""
        return self.shape.bytes_per_slot

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.tensors[0].device

    def copy(self, source: int, target: int) -> None:
        """Copy the state in slot `source` to slot `target`.

        Raises:
            BadArgument: a slot is not in [0, slots).
        """
        for name, slot in (("source", source), ("target", target)):
            self._check(name, slot)
        with torch.inference_mode():
            for tensor in self.tensors:
                tensor[target] = tensor[source]

    def load(self, slots: Sequence[int], cache: Cache) -> None:
        """Put copies of the states in `slots` into a cache's layers, a row each.

        Raises:
            BadArgument: a slot is not in [0, slots), or there is none.
        """
        rows = self._rows(slots)
        with torch.inference_mode():
            for place, tensor in zip(self.shape.tensors, self.tensors, strict=True):
                _put(cache, place, tensor.index_select(0, rows), True)

    def store(self, slots: Sequence[int], cache: Cache) -> None:
        """Copy the states in a cache's layers, a row each, to `slots`.

        Raises:
            BadArgument: a slot is not in [0, slots), or given twice, or there is none.
        """
        if len(set(slots)) < len(slots):
            raise BadArgument("slots", slots, "different ones")
        rows = self._rows(slots)
        with torch.inference_mode():
            for place, tensor in zip(self.shape.tensors, self.tensors, strict=True):
                tensor.index_copy_(0, rows, _get(cache, place))

    def _rows(self, slots: Sequence[int]) -> torch.Tensor:
        if not slots:
            raise BadArgument("slots", slots, "at least one slot")
        for slot in slots:
            self._check("slots", slot)
        return torch.tensor(slots, dtype=torch.long, device=self.device)

    def _check(self, name: str, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise BadArgument(name, slot, f"in [0, {self.slots})")


def _layer(cache: Cache, place: StateTensor) -> Any:
    """Any: what it holds is None at first, which nobody sees."""
    return cache.layers[place.layer]


def _get(cache: Cache, place: StateTensor) -> torch.Tensor:
    layer = _layer(cache, place)
    states = layer.conv_states if place.kind == "conv" else layer.recurrent_states
    state: torch.Tensor = states[place.number]
    return state


def _put(cache: Cache, place: StateTensor, state: torch.Tensor, previous: bool) -> None:
    """Give a layer one of its states; `previous`: it goes on from there."""
    layer = _layer(cache, place)
    if place.kind == "conv":
        layer.conv_states[place.number] = state
        layer.is_conv_states_initialized[place.number] = True
        layer.conv_kernel_size[place.number] = place.shape[-1]
    else:
        layer.recurrent_states[place.number] = state
        layer.is_recurrent_states_initialized[place.number] = True
    layer.has_previous_state[place.number] = previous
    layer.dtype, layer.device = state.dtype, state.device


class StateCache(Cache):
    """A model's cache for one forward after another: states from slots, and no keys or values of its own.

    Args:
        config: of the model.
        pool: the slots.
    """

    def __init__(self, config: PreTrainedConfig, pool: StatePool) -> None:
        super().__init__(layers=[_empty(layer) for layer in DynamicCache(config=config).layers])
        self._pool = pool

    def start(self, rows: int) -> None:
        """Let the next forward begin `rows` sequences from their first token.

        Raises:
            BadArgument: `rows` is less than 1.
        """
        if rows < 1:
            raise BadArgument("rows", rows, "at least 1")
        for place in self._pool.shape.tensors:
            zeros = torch.zeros((rows, *place.shape), dtype=place.dtype, device=self._pool.device)
            _put(self, place, zeros, False)

    def load(self, slots: Sequence[int]) -> None:
        """Let the next forward go on behind copies of the states in `slots`, a row each.

        Raises:
            BadArgument: a slot is not in the pool, or there is none.
        """
        self._pool.load(slots, self)

    def store(self, slots: Sequence[int]) -> None:
        """Copy the states behind the last forward to `slots`, a row each.

        Raises:
            BadArgument: a slot is not in the pool, or given twice, or there is none.
        """
        self._pool.store(slots, self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given, never counted."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The new keys, from 0."""
        return query_length, 0


class _NewOnly(DynamicLayer):  # type: ignore[no-untyped-call]
    """An attention layer that keeps nothing: its attention function does."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class _StateAndNewOnly(LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call]
    """The same with a state."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


def _empty(layer: Any) -> Any:
    """What takes the place of transformers' own `layer` in a `StateCache`."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        both = isinstance(layer, CacheLayerMixin)
        return (_StateAndNewOnly if both else LinearAttentionLayer)(number_of_states=layer.number_of_states)
    return layer if isinstance(layer, DummyLayer) else _NewOnly()  # type: ignore[no-untyped-call]


# --- the self-test ----------------------------------------------------------------------------------------------------


def prove(model: PreTrainedModel, shape: StateShape, limit: float) -> Continuation:
    """Find out by running it how `model` goes on behind a state: cut prompts and stacked rows against whole prompts.

    Attention layers keep their KV in transformers' own cache here, so the model must still have its own attention.

    Args:
        model: as loaded.
        shape: of its states.
        limit: the largest difference of logits to take for rounding, as a part of their spread.

    Returns:
        "chunked" if several tokens may follow a state in one forward, "stepped" if only one may.

    Raises:
        UnsupportedModel: not even one token after another, or sequences side by side, give what a whole prompt gives.
    """
    with torch.inference_mode():
        trial = _Trial(model, shape)
        chunked, stepped = (trial.error(continuation) for continuation in ("chunked", "stepped"))
        name = model.config.get_text_config(decoder=True).model_type
        if stepped > limit:
            raise UnsupportedModel(
                f"{name}: behind a restored state logits differ from those of the whole prompt by {stepped:.2g} of "
                f"their spread, even token by token; {limit:g} is allowed"
            )
        stacked = trial.stacked_error()
        if stacked > limit:
            raise UnsupportedModel(
                f"{name}: with states side by side logits differ from those of each prompt alone by {stacked:.2g} of "
                f"their spread; {limit:g} is allowed"
            )
        return "chunked" if chunked <= limit and trial.uses_states() else "stepped"


class _Trial:
    """Two prompts, whole and in parts. Slots 0 and 1 are the prompts' own, 2 and 3 their states at the first cut."""

    def __init__(self, model: PreTrainedModel, shape: StateShape) -> None:
        self._model, self._shape = model, shape
        self._pool = StatePool(shape, 4, model.device)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        random = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(vocab_size, (2, _CUTS[-1]), generator=random)
        self._whole = torch.cat([_forward(model, None, prompt.unsqueeze(0), 0, None) for prompt in self._prompts])
        self._spread = float(self._whole.max() - self._whole.min())

    def error(self, continuation: Continuation) -> float:
        """The largest difference behind the first cut; leaves the states there in slots 2 and 3."""
        cuts = _CUTS if continuation == "chunked" else (0, *range(_CUTS[1], _CUTS[-1] + 1))
        return max(self._cut_error(row, cuts) for row in (0, 1))

    def _cut_error(self, row: int, cuts: tuple[int, ...]) -> float:
        cache = DynamicCache(config=self._model.config)
        error = self._step([row], cache, 0, cuts[1])
        self._pool.store([row], cache)
        self._pool.copy(row, 2 + row)
        for begin, end in itertools.pairwise(cuts[1:]):
            self._pool.load([row], cache)
            error = max(error, self._step([row], cache, begin, end))
            self._pool.store([row], cache)
        return error

    def stacked_error(self) -> float:
        """The same for both prompts side by side, token by token, from the states that were set aside."""
        cut, rows, slots = _CUTS[1], [1, 0], [3, 2]
        cache = DynamicCache(config=self._model.config)
        error = self._step(rows, cache, 0, cut)
        for position in range(cut, _CUTS[-1]):
            self._pool.load(slots, cache)
            error = max(error, self._step(rows, cache, position, position + 1))
            self._pool.store(slots, cache)
        return error

    def uses_states(self) -> bool:
        """Whether every kind of state makes a difference to the tokens behind it, when there are several of them.

        A scan that starts from zeros instead may differ by less than a low precision rounds.
        """
        kinds = {place.kind for place in self._shape.tensors}
        first = self._behind(None)
        return not any(torch.equal(self._behind(kind), first) for kind in kinds)

    def _behind(self, changed: str | None) -> torch.Tensor:
        """Logits behind the first cut of the first prompt, with one kind of state changed."""
        begin, end = _CUTS[1:3]
        cache = DynamicCache(config=self._model.config)
        self._step([0], cache, 0, begin)
        for place in self._shape.tensors:
            if place.kind == changed:
                _get(cache, place).add_(1)
        return _forward(self._model, self._shape.argument, self._prompts[:1, begin:end], begin, cache)

    def _step(self, rows: list[int], cache: Cache, begin: int, end: int) -> float:
        """Run [begin, end) of some prompts, and compare."""
        logits = _forward(self._model, self._shape.argument, self._prompts[rows, begin:end], begin, cache)
        difference = (logits - self._whole[rows, begin:end]).abs().max()
        return float(difference) / self._spread if difference.isfinite() else float("inf")


def _forward(
    model: PreTrainedModel, argument: str | None, tokens: torch.Tensor, start: int, cache: Cache | None
) -> torch.Tensor:
    """Logits [rows, n, vocab] in float32 of `tokens` [rows, n], which begin at position `start`."""
    given: dict[str, Any] = {} if argument is None else {argument: cache}
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.arange(start, start + tokens.shape[1], device=model.device)
        given["position_ids"] = positions.expand_as(tokens)
    with torch.inference_mode():
        output = model(input_ids=tokens.to(model.device), use_cache=cache is not None, **given)
    logits: torch.Tensor = output.logits.float()
    return logits
