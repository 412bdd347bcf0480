"""The states of recurrent and convolutional layers: one slot per sequence, all layers together.

    conv        [slots, channels, kernel]              a tensor for each layer and each of its states;
    recurrent   [slots, heads, ...]                    shapes and dtypes are the model's own, found by running one token

A slot holds the state of one sequence after one of its tokens. States are made and read through transformers' own cache
objects, which update in place. So states are copied out of slots before a forward and back after it, and a slot and a
forward never share a tensor. A forward goes like this:

    shape = StateShape.of(model)             None: the model keeps no state. Before its attention is exchanged
    proof = prove(model, shape, ...)         how it goes on, or UnsupportedModel; likewise before
    pool = StatePool(shape, slots, device)   shape.bytes_per_slot, pool.copy(source, target)
    cache = StateCache(model.config, pool)

    cache.start(1)  or  cache.load([slot])   from zeros  or  from the state in a slot
    run(model, cache, input_ids=[1, n], position_ids=[1, n], ...)                                 of `places`
    cache.store([slot])

A forward runs one sequence, [1, n], or many that each go on by one token, stacked: load(slots), [R, 1], store(slots).
Sequences that start from zeros and sequences that go on never share a forward: the model asks the cache, not the row.
If `prove` finds "stepped", a sequence goes on token by token, [R, 1]; from zeros it may still run [1, n]. If it finds
that rows are not independent, each goes on by itself, [1, n].

A `StateCache` returns to attention layers only the keys and values that they gave, whichever layers are which, so an
attention function that keeps them itself sees only the new ones. This module does not know positions: always pass
`position_ids` to models that take them.

It does not know pages, requests or the owners of slots, nor does it check slots: `SegmentRules` does.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.paged import spread_error
from mainstem.runtime.kernels.recurrences import exchange_scans
from mainstem.runtime.kernels.scans import is_resumed, resume
from mainstem.runtime.models.caches import Passing
from mainstem.runtime.models.places import Kind, new_cache, put, run
from mainstem.runtime.parallel.ranks import ONE_RANK, Ranks, largest
from mainstem.runtime.readiness import too_large

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Continuation = Literal["chunked", "resumed", "stepped"]
"""How many tokens may follow a state in one forward: several; several, by our own scan (`scans`); only one."""

# Tokens of the self-test's prompts, and where they are cut: several tokens after a state, then one, then two.
_CUTS = (0, 5, 9, 10, 12)

# At low precision a wrong scan may differ by less than the limit. So it is compared with the rounding of the same
# model's single steps. Right scans of tiny models rounded at most as much.
_TIMES_STEPPED = 3
_LEAST_OF_LIMIT = 0.1  # where steps do not round at all


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
    """The state that a model keeps for one sequence of any length.

    Args:
        tensors: by layer, at least one.
    """

    tensors: tuple[StateTensor, ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors)

    @classmethod
    def of(cls, model: PreTrainedModel) -> StateShape | None:
        """Runs one token to find the state that `model` keeps. Returns None, without running it, if it keeps none.

        Raises:
            UnsupportedModel: it keeps a state that is not in transformers' cache object, nor in a place that is known.
        """
        kind = model.config.get_text_config(decoder=True).model_type
        cache = new_cache(model.config)
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            if getattr(model, "_is_stateful", False):
                raise UnsupportedModel(f"{kind} keeps a state, but none that transformers' cache has a place for")
            return None
        try:
            _forward(model, torch.zeros(1, 1, dtype=torch.long), 0, cache)
        except ValueError as error:  # raised by models that require a cache of another class
            raise UnsupportedModel(f"{kind} does not run with transformers' cache: {error}") from error
        return cls(tuple(_tensors(cache, kind)))


def _tensors(cache: Cache, kind: str) -> Iterator[StateTensor]:
    """Yields the states that one token of one sequence left in `cache`."""
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        states = list(_states(layer))
        if not states:
            raise UnsupportedModel(f"{kind} keeps the state of layer {number} outside transformers' cache")
        for index, name, state in states:
            if state.shape[0] != 1:
                raise UnsupportedModel(f"{kind}: the {name} state of layer {number} is not one row per sequence")
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
        slots: the number of slots.
        device: of the tensors.

    Raises:
        BadArgument: the memory cannot be allocated.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.slots = slots
        try:
            self.tensors = tuple(torch.empty((slots, *t.shape), dtype=t.dtype, device=device) for t in shape.tensors)
        except RuntimeError as error:  # PyTorch's error for a failed allocation
            raise too_large("kv_bytes", slots * shape.bytes_per_slot, device) from error

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tensors[0].device

    def copy(self, source: int, target: int) -> None:
        """Copies the state in slot `source` to slot `target`."""
        with torch.inference_mode():
            for tensor in self.tensors:
                tensor[target] = tensor[source]

    def clear(self, slots: NDArray[np.int32]) -> None:
        """Overwrites the states in `slots` with zeros."""
        with torch.inference_mode():
            for tensor in self.tensors:
                tensor[slots.tolist()] = 0

    def load(self, slots: Sequence[int], cache: Cache) -> None:
        """Copies the states in `slots` into a cache's layers, one row each."""
        rows = self._rows(slots)
        with torch.no_grad():  # outside of `inference_mode` a forward may not change tensors that were made inside it
            for spec, tensor in zip(self.shape.tensors, self.tensors, strict=True):
                put(cache.layers[spec.layer], spec.kind, spec.number, tensor.index_select(0, rows), previous=True)

    def store(self, slots: Sequence[int], cache: Cache, first: int = 0) -> None:
        """Copies the states in a cache's layers, one row each from row `first` on, to `slots`, all different."""
        rows = self._rows(slots)
        with torch.inference_mode():
            for spec, tensor in zip(self.shape.tensors, self.tensors, strict=True):
                tensor.index_copy_(0, rows, _get(cache, spec)[first : first + len(slots)])

    def _rows(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self.device)


def _get(cache: Cache, spec: StateTensor) -> torch.Tensor:
    layer: Any = cache.layers[spec.layer]  # its states are None at first, but never when they are read
    states = layer.conv_states if spec.kind == "conv" else layer.recurrent_states
    state: torch.Tensor = states[spec.number]
    return state


class StateCache(Passing):
    """A model's cache for successive forwards: it takes states from slots, and keeps no keys or values.

    Args:
        config: of the model.
        pool: the slots.
    """

    def __init__(self, config: PreTrainedConfig, pool: StatePool) -> None:
        super().__init__(config)
        self._pool = pool

    def start(self, rows: int) -> None:
        """Prepares the next forward to start `rows` sequences from their first token."""
        for spec in self._pool.shape.tensors:
            zeros = torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=self._pool.device)
            put(self.layers[spec.layer], spec.kind, spec.number, zeros, previous=False)

    def load(self, slots: Sequence[int]) -> None:
        """Prepares the next forward to continue from copies of the states in `slots`, one row each."""
        self._pool.load(slots, self)

    def store(self, slots: Sequence[int]) -> None:
        """Copies the states after the last forward to `slots`, one row each."""
        self._pool.store(slots, self)


# --- the self-test ----------------------------------------------------------------------------------------------------


class Proof(NamedTuple):
    """How a model goes on from states.

    Args:
        continuation: how many tokens may follow a state in one forward. If it is "resumed", the model has our scans.
        stacked: whether sequences that go on may share a forward, one row each.
    """

    continuation: Continuation
    stacked: bool


def prove(
    model: PreTrainedModel, shape: StateShape, limit: float, ranks: Ranks = ONE_RANK, *, exact: bool = False
) -> Proof:
    """Tests how `model` continues from a state: compares cut prompts and stacked rows with whole prompts.

    Attention layers keep their KV in transformers' own cache here, so the model must still have its own attention.

    Args:
        model: as loaded.
        shape: of its states.
        limit: the largest difference of logits to take for rounding, as a fraction of their spread. For several tokens
            and for rows it is three times what single steps differ by: at most `limit`, at least a tenth of it.
        ranks: those that hold the model together; all of them come to the same proof.
        exact: whether the model's scans are exchanged for those of `recurrences`, if they compute the same.

    Raises:
        UnsupportedModel: even token by token, results differ from a whole prompt's.
    """
    with torch.inference_mode():
        trial = _Trial(model, shape, ranks)
        undo = exchange_scans(model) if exact else None
        stepped = trial.error(stepped=True)
        if undo is not None and stepped > limit:
            undo()
            stepped = trial.error(stepped=True)
        name = model.config.get_text_config(decoder=True).model_type
        if stepped > limit:
            raise UnsupportedModel(
                f"{name}: after a restored state, logits differ from those of the whole prompt by {stepped:.2g} of "
                f"their spread, even token by token; {limit:g} is allowed"
            )
        limit = min(limit, max(_TIMES_STEPPED * stepped, _LEAST_OF_LIMIT * limit))
        stacked = trial.stacked_error() <= limit
        return Proof(_continuation(model, trial, limit), stacked)


def _continuation(model: PreTrainedModel, trial: _Trial, limit: float) -> Continuation:
    if trial.goes_on(limit):
        return "resumed" if is_resumed(model) else "chunked"
    undo = resume(model)
    if undo is None:
        return "stepped"
    if trial.goes_on(limit):
        return "resumed"
    undo()
    return "stepped"


class _Trial:
    """Two prompts, whole and in parts. Slots 0 and 1 hold their current states, 2 and 3 those at the first cut."""

    def __init__(self, model: PreTrainedModel, shape: StateShape, ranks: Ranks) -> None:
        self._model, self._shape, self._ranks = model, shape, ranks
        self._pool = StatePool(shape, 4, model.device)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        random = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(vocab_size, (2, _CUTS[-1]), generator=random)
        self._whole = torch.cat([_forward(model, prompt.unsqueeze(0), 0, None) for prompt in self._prompts])

    def goes_on(self, limit: float) -> bool:
        """Returns whether several tokens may follow a state."""
        return self.error() <= limit and self.uses_states()

    def error(self, stepped: bool = False) -> float:
        """Returns the largest difference after the first cut; leaves the states at this cut in slots 2 and 3."""
        cuts = (0, *range(_CUTS[1], _CUTS[-1] + 1)) if stepped else _CUTS
        return largest(self._ranks, max(self._cut_error(row, cuts) for row in (0, 1)))

    def _cut_error(self, row: int, cuts: tuple[int, ...]) -> float:
        cache = new_cache(self._model.config)
        error = self._step([row], cache, 0, cuts[1])
        self._pool.store([row], cache)
        self._pool.copy(row, 2 + row)
        for begin, end in itertools.pairwise(cuts[1:]):
            self._pool.load([row], cache)
            error = max(error, self._step([row], cache, begin, end))
            self._pool.store([row], cache)
        return error

    def stacked_error(self) -> float:
        """Returns the same for both prompts side by side, token by token, from the states in slots 2 and 3."""
        cut, rows, slots = _CUTS[1], [1, 0], [3, 2]
        cache = new_cache(self._model.config)
        error = self._step(rows, cache, 0, cut)
        for position in range(cut, _CUTS[-1]):
            self._pool.load(slots, cache)
            error = max(error, self._step(rows, cache, position, position + 1))
            self._pool.store(slots, cache)
        return largest(self._ranks, error)

    def uses_states(self) -> bool:
        """Returns whether every kind of state affects a run of several tokens after it.

        At low precision, a scan that ignores the state and starts from zeros may differ by less than rounding does.
        """
        kinds = dict.fromkeys(spec.kind for spec in self._shape.tensors)  # in the same order on every rank
        unchanged = self._logits_after_cut(None)
        unused = [torch.equal(self._logits_after_cut(kind), unchanged) for kind in kinds]
        return not largest(self._ranks, any(unused))

    def _logits_after_cut(self, changed: str | None) -> torch.Tensor:
        """Returns logits after the first cut of the first prompt, with one kind of state changed."""
        begin, end = _CUTS[1:3]
        cache = new_cache(self._model.config)
        self._step([0], cache, 0, begin)
        for spec in self._shape.tensors:
            if spec.kind == changed:
                _get(cache, spec).add_(1)
        return _forward(self._model, self._prompts[:1, begin:end], begin, cache)

    def _step(self, rows: list[int], cache: Cache, begin: int, end: int) -> float:
        """Runs [begin, end) of some prompts, and returns the largest difference from the whole ones."""
        logits = _forward(self._model, self._prompts[rows, begin:end], begin, cache)
        return spread_error(logits, self._whole[rows, begin:end], self._whole)


def _forward(model: PreTrainedModel, tokens: torch.Tensor, start: int, cache: Cache | None) -> torch.Tensor:
    """Returns float32 logits [rows, n, vocab] of `tokens` [rows, n], which begin at position `start`."""
    inputs: dict[str, Any] = {"input_ids": tokens.to(model.device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.arange(start, start + tokens.shape[1], device=model.device)
        inputs["position_ids"] = positions.expand_as(tokens)
    with torch.inference_mode():
        output = model(use_cache=False, **inputs) if cache is None else run(model, cache, **inputs)
    logits: torch.Tensor = output.logits.float()
    return logits
