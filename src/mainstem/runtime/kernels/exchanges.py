"""Exchanges the linear layers and norms of a model for kernels.

    with sharing(model) as given:           which layers are given the same tensor
        model(...)
    exchanged = exchange(model, given)      from here on the model computes by kernels
    restore(model)                          as it was

A module keeps its class, its weights and its hooks; only its `forward` changes. So whatever reads weights, wraps layers
or copies the model finds what it always found. Layers that are given the same tensor (queries, keys and values; gate
and up) are computed by one call of the core when the first of them is called, and the others return their part of it.

A linear layer is known by its class. Families write norms of their own, so a norm is exchanged for the rule that
reproduces its results; one that no rule reproduces stays as it is. Only the text part of a model is exchanged: on a CPU
for the core, on a GPU for the kernels in Triton that `--exact` asks for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import nn

from mainstem.runtime.kernels import linear as core
from mainstem.runtime.kernels.bare_weights import turn_weights, uses_weights
from mainstem.runtime.kernels.by_row import ByRow
from mainstem.runtime.kernels.linear import Kernels, Weights
from mainstem.runtime.models.quantization import packed

# Largest difference from a module's own results that is rounding, relative to the largest of them.
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

_EPSILONS = ("variance_epsilon", "eps", "epsilon")  # the names that families give it
_OFFSETS = (0.0, 1.0)  # what they add to the weight of a norm
_SCALES = (1.0, 1e-3, 30.0)  # of the rows that test a norm: in the smallest, epsilon counts

Given = Mapping[nn.Module, Sequence[int]]
"""The tensors that each linear layer was given, by number."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The modules of a model that kernels compute.

    Args:
        linears, norms: their numbers.
        shared: linear layers that are computed when another one is called.
        refused: norms whose results no rule reproduced, and layers of the decoder, which stay as they were; and linear
            layers whose weight has changed since it was quantized, which lose their codes.
        layers: of the decoder that are one call; see `decoders`.
        instructions: what the kernels are made of.
    """

    linears: int = 0
    norms: int = 0
    shared: int = 0
    refused: int = 0
    layers: int = 0
    instructions: str = field(default="", compare=False)

    @property
    def any(self) -> bool:
        """Whether kernels compute anything."""
        return self.linears + self.norms > 0

    def __str__(self) -> str:
        """One line for the log."""
        if not self.any:
            return "no kernels"
        shared = f"{self.linears} linear layers in {self.linears - self.shared} calls"
        whole = f"; {self.layers} layers of the decoder, each in one call" if self.layers else ""
        return f"{self.instructions} kernels compute {shared}, and {self.norms} norms{whole}"


@contextmanager
def sharing(model: nn.Module) -> Iterator[Given]:
    """Notes the tensors that linear layers are given inside the `with` block."""
    given: dict[nn.Module, list[int]] = {}
    last: list[torch.Tensor] = []  # layers that share a tensor are called one after another
    count = 0

    def note(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if not last or last[0] is not arguments[0]:
            last[:] = [arguments[0]]
            count += 1
        given.setdefault(layer, []).append(count)

    handles = [layer.register_forward_pre_hook(note) for layer in _modules(model) if type(layer) is nn.Linear]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def exchange(model: Any, given: Given, kernels: Kernels = core) -> Exchanged:
    """Makes kernels compute the modules of `model` that they can.

    Args:
        model: in eval mode.
        given: what `sharing` found in a forward.
        kernels: of the device.
    """
    modules = [module for module in _modules(model) if "forward" not in vars(module)]
    head = model.get_output_embeddings()  # its results are logits, which no weight multiplies
    groups = [_Group(layers, kernels, rounds=[*layers] != [head]) for layers in _groups(modules, given, kernels)]
    generator = torch.Generator().manual_seed(0)
    stale = [layer for group in groups for layer in group.layers if _has_other_codes(layer, generator)]
    for layer in stale:
        vars(layer).pop("codes")
    for group in groups:
        for layer in group.layers:
            _install(layer, _linear, group)
    norms = [module for module in modules if _is_norm(module, kernels)]
    ours = [module for module in norms if _proven_norm(module, generator, kernels)]
    for module in modules if kernels is core else ():
        if uses_weights(module):
            turn_weights(module)
            compute_by_row(module)
    linears = sum(len(group.layers) for group in groups)
    shared, refused = linears - len(groups), len(norms) - len(ours) + len(stale)
    return Exchanged(linears, len(ours), shared, refused, instructions=kernels.instructions())


def exchange_linear(layer: nn.Module, beside: Any) -> None:
    """Makes kernels compute a linear layer that was added to a model later, as an adapter's, beside one of its own."""
    kernels = beside.kernel.kernels if isinstance(getattr(beside, "kernel", None), _Group) else core
    if type(layer) is nn.Linear and "forward" not in vars(layer) and kernels.takes(layer.weight):
        _install(layer, _linear, _Group([layer], kernels))


def compute_by_row(module: nn.Module) -> bool:
    """Makes the core compute what would depend on other rows in a module (`by_row`); False: it does already."""
    if "kernel" in vars(module):
        return False
    _install(module, _by_row, vars(module).get("forward"))
    return True


def restore(model: nn.Module) -> None:
    """Makes a model compute by its own code again."""
    for module in model.modules():
        if is_exchanged(module):
            restore_module(module)


def restore_module(module: nn.Module) -> None:
    """Makes an exchanged module compute as before."""
    forward, kernel = vars(module).pop("forward"), vars(module).pop("kernel")
    if forward.__func__ is _by_row and kernel is not None:
        vars(module).update(forward=kernel)


def _modules(model: Any) -> list[nn.Module]:
    """Returns the modules of the text part of a model."""
    head = model.get_output_embeddings()
    return [*model.get_decoder().modules(), *([] if head is None else [head])]


# ---- linear layers


class _Group:
    """Layers that are given the same tensor.

    Args:
        layers: in the order in which they are called.
        kernels: compute them.
        rounds: whether results have the layers' dtype; they are float32 otherwise.
    """

    def __init__(self, layers: Sequence[nn.Linear], kernels: Kernels, *, rounds: bool = True) -> None:
        self.layers, self.kernels, self._rounds = tuple(layers), kernels, rounds
        self._given: torch.Tensor | None = None
        self._results: dict[nn.Linear, torch.Tensor] = {}  # that have not been asked for

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        memo[id(self)] = group = _Group((), self.kernels, rounds=self._rounds)  # a module, which cannot be copied
        group.layers = deepcopy(self.layers, memo)
        return group

    def result(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Returns what one of them makes of x."""
        if x is not self._given or layer not in self._results:
            results = self.kernels.products(x, [weights_of(each) for each in self.layers], rounds=self._rounds)
            self._given, self._results = x, dict(zip(self.layers, results, strict=True))
        result = self._results.pop(layer)
        if not self._results:
            self._given = None
        return result


def weights_of(layer: nn.Linear) -> Weights:
    """Returns what kernels read of a linear layer."""
    own = layer._parameters  # nn.Module looks for attributes slowly
    weight = own["weight"]
    assert weight is not None
    return Weights(weight, own["bias"], packed(layer))


def _has_other_codes(layer: nn.Linear, generator: torch.Generator) -> bool:
    """Returns whether the codes of a layer are not its weight's: it has been changed since."""
    by_codes = weights_of(layer)
    if by_codes.codes is None:
        return False
    x = torch.randn(1, layer.in_features, generator=generator).to(layer.weight)
    ways = (by_codes, by_codes._replace(codes=None))
    return not torch.equal(*(core.products(x, [each], rounds=False)[0] for each in ways))


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The `forward` of an exchanged linear layer."""
    if torch.is_grad_enabled() or x.dtype is not layer._parameters["weight"].dtype:
        return nn.Linear.forward(layer, x)  # which says what is wrong
    group: _Group = layer.kernel
    return group.result(layer, x)


def _groups(modules: Sequence[nn.Module], given: Given, kernels: Kernels) -> list[list[nn.Linear]]:
    """Returns the linear layers that kernels can compute; those that were always given the same are in one group."""
    groups: dict[object, list[nn.Linear]] = {}
    for module in modules:
        if type(module) is nn.Linear and kernels.takes(module.weight):
            groups.setdefault(tuple(given.get(module, ())) or module, []).append(module)
    return list(groups.values())


# ---- norms


@dataclass(frozen=True, slots=True)
class _Rule:
    """The differences between the norms of families; see `linear.rms_norm`, and `linear.LayerNorm` if `centred`."""

    kernels: Kernels
    epsilon: float
    offset: float
    rounds: bool
    centred: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rule:
        return self

    def computed(self, x: torch.Tensor, module: Any) -> torch.Tensor:
        """Returns what the module makes of x."""
        weight = module._parameters["weight"]
        if self.centred:
            assert self.kernels.layer_norm is not None
            return self.kernels.layer_norm(x, weight, module._parameters["bias"], self.epsilon)
        return self.kernels.rms_norm(x, weight, self.epsilon, self.offset, self.rounds)


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The `forward` of an exchanged norm."""
    if torch.is_grad_enabled() or hidden_states.dtype is not module._parameters["weight"].dtype:
        own: torch.Tensor = type(module).forward(module, hidden_states)
        return own
    rule: _Rule = module.kernel
    return rule.computed(hidden_states, module)


def _is_norm(module: nn.Module, kernels: Kernels) -> bool:
    """Returns whether a module looks like an RMS norm: one vector of weights, an epsilon, and one argument.

    Or is a norm that subtracts the mean, if there is a kernel for it.
    """
    weight = module._parameters.get("weight")
    if type(module) is nn.LayerNorm:
        return kernels.layer_norm is not None and weight is not None and weight.dim() == 1 and kernels.takes(weight)
    return (
        [*module.named_parameters()] == [("weight", weight)]
        and weight is not None
        and weight.dim() == 1
        and kernels.takes(weight)
        and _epsilon(module) is not None
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((float(given) for given in found if isinstance(given, float)), None)


def _proven_norm(module: nn.Module, generator: torch.Generator, kernels: Kernels) -> bool:
    """Exchanges a norm for the rule that reproduces its results best, if one does."""
    weight: Any = module.weight
    epsilon = _epsilon(module)
    assert epsilon is not None
    rows = torch.randn(len(_SCALES), len(weight), generator=generator) * torch.tensor(_SCALES).unsqueeze(1)
    x = rows.to(weight)
    rules = [_Rule(kernels, epsilon, offset, rounds) for offset, rounds in product(_OFFSETS, (False, True))]
    if type(module) is nn.LayerNorm:
        rules = [_Rule(kernels, epsilon, 0.0, False, centred=True)]
    with torch.inference_mode():
        plain = module(x)
        errors = [_error(rule.computed(x, module), plain) for rule in rules]
    best = min(range(len(rules)), key=errors.__getitem__)
    if not errors[best] <= _ROUNDING[x.dtype]:
        return False
    _install(module, _norm, rules[best])
    return True


# ---- all


def _by_row(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a module whose own runs with functions of the core in place of some of PyTorch's."""
    own = module.kernel
    with ByRow():
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)


def _install(module: nn.Module, forward: Callable[..., torch.Tensor], kernel: object) -> None:
    """Makes `forward` that of a module, as a method: so copies of the module have their own."""
    vars(module).update(forward=MethodType(forward, module), kernel=kernel)


def is_exchanged(module: nn.Module) -> bool:
    """Returns whether kernels compute a module's products or its norm, or functions in it."""
    own = vars(module).get("forward")
    return isinstance(own, MethodType) and own.__func__ in (_linear, _norm, _by_row)


def rounding_error(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Returns the largest difference of any row, relative to what is rounding; infinite if shapes or dtypes differ."""
    if ours.dtype is not plain.dtype or ours.shape != plain.shape:
        return float("inf")
    return _error(ours, plain) / _ROUNDING[plain.dtype]


def _error(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Returns the largest difference of any row, relative to its largest number."""
    difference, size = (ours.float() - plain.float()).abs().amax(-1), plain.float().abs().amax(-1)
    return float((difference / size.clamp_min(1e-30)).max())
