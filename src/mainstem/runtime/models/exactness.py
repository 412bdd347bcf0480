"""Whether a hit changes no bit of what a model computes: which operations depend on the rows that are beside.

docs/arithmetic.md defines the arithmetic. The core's kernels keep to it, and PyTorch's do where they compute by row.
Its products, attention and convolutions choose their order of sums by the shapes that they are given. Some of its
elementwise functions give other bits in the scalar tail of a thread's share, where numbers do not fill a vector. So a
forward of the self-test is watched: a model is exact if all that PyTorch computed is known to be computed by row.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import Kernels

VERSION = 3
"""Of the arithmetic, part of the identity of stored pages: a change of any order of sums or rounding is another one."""

# By what they are called in reasons: operations whose order of sums depends on shapes.
_SUMS = {
    "products": ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "mv", "addmv", "dot", "grouped_mm"),
    "attention": ("scaled_dot_product_attention", "scaled_dot_product_flash_attention_for_cpu"),
    "convolutions": ("conv1d", "conv2d", "convolution"),
    "systems of equations": ("linalg_solve_triangular", "triangular_solve"),
}
_KINDS: Mapping[str, str] = {name: kind for kind, names in _SUMS.items() for name in names}
_OTHERS = "functions that are not known to compute each row by itself"

_COPIES = frozenset({
    "T", "alias", "arange", "as_strided", "cat", "chunk", "clone", "complex", "conj", "constant_pad_nd",
    "contiguous", "copy", "detach", "dropout", "embedding", "empty", "empty_like", "empty_strided", "expand",
    "expand_as", "fill", "flatten", "flip", "full", "full_like", "gather", "imag", "index", "index_copy",
    "index_fill", "index_put", "index_select", "item", "lift_fresh", "local_scalar_dense", "mT", "masked_fill",
    "masked_select", "movedim", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "nonzero", "numpy_T",
    "one_hot", "ones", "ones_like", "pad", "permute", "real", "repeat", "repeat_interleave", "reshape",
    "reshape_as", "resolve_conj", "resolve_neg", "roll", "scatter", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "swapaxes", "t", "to", "to_copy", "transpose", "tril", "triu", "type_as", "unbind",
    "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "where", "zero",
    "zeros", "zeros_like",
})  # fmt: skip
"""Views, copies, and what is written or read by indices: no number is computed."""

_ROUNDED = frozenset({
    "abs", "add", "all", "amax", "amin", "any", "argmax", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor",
    "ceil", "clamp", "clamp_max", "clamp_min", "diff", "div", "divide", "eq", "floor", "ge", "greater", "gt",
    "isfinite", "isinf", "isnan", "le", "less", "logical_and", "logical_not", "logical_or", "lt", "max", "maximum",
    "min", "minimum", "mul", "multiply", "ne", "neg", "reciprocal", "relu", "round", "rsub", "sign", "sort", "sqrt",
    "square", "sub", "subtract", "topk", "trunc",
})  # fmt: skip
"""IEEE 754 rounds each result once, or it is one of the given numbers."""

COMPARED = frozenset({
    "addcmul", "cos", "erf", "exp", "histc", "index_add", "log", "log1p", "polar", "pow", "rsqrt", "sin", "tanh",
})  # fmt: skip
"""Functions of single numbers whose bits were compared, wherever a number lies; tests compare them."""

COMPARED_IN_BFLOAT16 = frozenset({"silu", "sigmoid", "softplus", "mish", "elu"})
"""The same, in bfloat16 alone."""

COMPARED_SUMS = frozenset({"mean", "sum", "cumsum", "softmax", "log_softmax", "layer_norm"})
"""Functions of a row, compared for rows alone and beside others."""

# Powers that PyTorch computes by other functions, in which all numbers of a row have the same bits.
PLAIN_POWERS: Mapping[torch.dtype, tuple[float, ...]] = {
    torch.float32: (-2, -1, -0.5, 0, 0.5, 1, 2, 3),
    torch.bfloat16: (-2, -1, 0, 0.5, 1, 2, 3, 4),
}
_Kind = tuple[str, str]
_FEW = 4  # numbers that PyTorch adds in one order over the first axis, however long the others are


def arithmetic(own: Kernels = kernels) -> str:
    """Returns the name of the arithmetic of kernels: its version, and the instructions that it is for.

    The plain path is whatever a compiler makes of it, which differs by the kind of machine.
    """
    instructions = own.instructions()
    return f"{VERSION} {instructions}" + (f" {platform.machine()}" if instructions == "plain" else "")


@dataclass
class Found:
    """What PyTorch computed that is not known to be computed by row.

    Attributes:
        kinds: operations, by their kind.
        modules: those that called them.
    """

    kinds: dict[str, set[str]] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)


@contextmanager
def watching(modules: Iterable[nn.Module] = ()) -> Iterator[Found]:
    """Notes within the block what PyTorch computes that depends on shapes, or may; and which modules call it."""
    watch = Watch(_on_a_cpu)
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(watch.leave, always_call=True))
    try:
        with watch:
            yield watch.found
    finally:
        for handle in handles:
            handle.remove()


def reason(found: Found) -> str | None:
    """Says why a model is not exact in which `watching` has found this; None: it is."""
    parts = [f"{kind} ({', '.join(sorted(names))})" for kind, names in sorted(found.kinds.items())]
    return f"PyTorch computes {', '.join(parts)}" if parts else None


def shown(inexact: str | None, name: str) -> str:
    """Says whether a model is exact, and why it is not: "yes, arithmetic 3 avx512" or "no: PyTorch computes ..."."""
    return f"yes, arithmetic {name}" if inexact is None else f"no: {inexact}"


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations as they are called, and calls them.

    Args:
        kind_of: returns from an operation, its arguments and its result the kind and the name of what depends on other
            rows, or may; None: it does not.
    """

    def __init__(self, kind_of: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], _Kind | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self._kind_of = Found(), kind_of
        self._running: list[nn.Module] = []

    def enter(self, module: nn.Module, given: object) -> None:
        self._running.append(module)

    def leave(self, module: nn.Module, given: object, result: object) -> None:
        self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = self._kind_of(func, args, kwargs or {}, result)
        if found is not None:
            kind, name = found
            self.found.kinds.setdefault(kind, set()).add(name)
            if self._running and self._running[-1] not in self.found.modules:
                self.found.modules.append(self._running[-1])
        return result


def _on_a_cpu(func: Any, args: tuple[Any, ...], named: Mapping[str, Any], result: Any) -> _Kind | None:
    """See `Watch`."""
    name = func.overloadpacket.__name__.strip("_")
    kind = _kind(name, args, named, result)
    return None if kind is None else (kind, name)


def _kind(name: str, args: tuple[Any, ...], named: Mapping[str, Any], result: Any) -> str | None:
    """Returns what kind of operation depends on other rows, or may; None: it does not."""
    if name in _COPIES or not any(rounds(each) for each in (result, *args)):
        return None
    if name in _KINDS:
        return _KINDS[name]
    if name in COMPARED_SUMS:
        return None if not rounds(result) or _is_of_a_row(name, args) else "sums over the first axis"
    return None if _is_by_number(name, args, named) else _OTHERS


def _is_by_number(name: str, args: Sequence[object], named: Mapping[str, object]) -> bool:
    """Returns whether each number of a result is known to depend on numbers of the same place alone."""
    dtypes: set[torch.dtype] = {each.dtype for each in args if isinstance(each, torch.Tensor)}
    if name == "pow":
        x, power = args
        plain = PLAIN_POWERS.get(x.dtype, ()) if isinstance(x, torch.Tensor) else ()
        return power in plain if isinstance(power, int | float) else False
    if name == "rsqrt":
        return dtypes <= {torch.float32}
    if any(dtype.is_complex for dtype in dtypes) or named.get("alpha", 1) != 1:
        return False
    return name in _ROUNDED or name in COMPARED or (dtypes == {torch.bfloat16} and name in COMPARED_IN_BFLOAT16)


def rounds(value: Any) -> bool:
    """Returns whether a tensor has numbers that operations round."""
    several = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in several)


def _is_of_a_row(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether a sum is over other axes than the first: there, its order depends on how long the others are."""
    x = args[0]
    if x.dim() < 2:
        return x.dim() == 0 or len(x) <= _FEW
    if name == "layer_norm":
        return bool(len(args[1]) < x.dim())
    given = args[1] if len(args) > 1 and args[1] is not None and args[1] != [] else range(x.dim())
    axes = [axis % x.dim() for axis in ([given] if isinstance(given, int) else given)]
    if name in ("softmax", "log_softmax", "cumsum"):
        return axes == [x.dim() - 1]
    return x.shape[0] <= _FEW or 0 not in axes
