"""Whether a hit changes no bit of what a model computes: which operations depend on the rows that are beside.

docs/arithmetic.md defines the arithmetic. The core's kernels keep to it, and PyTorch's do where they compute by row.
Its products, attention and convolutions choose their order of sums by the shapes that they are given. Some of its
elementwise functions give other bits in the scalar tail of a thread's share, where numbers do not fill a vector.
So a forward of the self-test is watched: a model is exact if PyTorch computed none of these.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mainstem.runtime.kernels import linear as kernels

VERSION = 2
"""Of the arithmetic, part of the identity of stored pages: a change of any order of sums or rounding is another one."""

# By what they are called in reasons: the operations whose order of sums depends on shapes.
_SUMS = {
    "products": ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "mv", "addmv", "dot", "_grouped_mm"),
    "attention": ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "convolutions": ("conv1d", "conv2d", "convolution", "_convolution"),
    "systems of equations": ("linalg_solve_triangular", "triangular_solve"),
}
_KINDS: Mapping[str, str] = {name: kind for kind, names in _SUMS.items() for name in names}

# Elementwise functions whose vector part and scalar tail differ, by dtype; docs/arithmetic.md says what was compared.
_TAILED: Mapping[torch.dtype, frozenset[str]] = {
    torch.float32: frozenset(
        {"silu", "gelu", "sigmoid", "softplus", "mish", "elu", "celu", "glu", "exp2", "sinh", "cosh"}
        | {"logaddexp", "atan2", "pow"}
    ),
    torch.bfloat16: frozenset({"gelu", "rsqrt", "sinh", "cosh", "pow"}),
    torch.complex64: frozenset({"mul"}),
}
# Powers that PyTorch computes by other functions, in which all numbers of a row have the same bits.
_PLAIN_POWERS: Mapping[torch.dtype, tuple[float, ...]] = {
    torch.float32: (-2, -1, -0.5, 0, 0.5, 1, 2, 3),
    torch.bfloat16: (-2, -1, 0, 0.5, 1, 2, 3, 4),
}
_VECTORS = {torch.float32: 32, torch.bfloat16: 64, torch.complex64: 16}  # numbers of a row that leave no rest
_FEW = 4  # numbers that PyTorch adds in one order over the first axis, however long the others are


def arithmetic() -> str:
    """Returns the name of the arithmetic of this CPU's kernels: its version, and the instructions that it is for.

    The plain path is whatever a compiler makes of it, which differs by the kind of machine.
    """
    instructions = kernels.instructions()
    return f"{VERSION} {instructions}" + (f" {platform.machine()}" if instructions == "plain" else "")


@contextmanager
def watching() -> Iterator[dict[str, set[str]]]:
    """Notes within the block what PyTorch computes that depends on shapes: operations, by their kind."""
    watch = _Watch()
    with watch:
        yield watch.found


def reason(found: Mapping[str, set[str]]) -> str | None:
    """Says why a model is not exact in which `watching` has found this; None: it is."""
    parts = [f"{kind} ({', '.join(sorted(names))})" for kind, names in sorted(found.items())]
    return f"PyTorch computes {', '.join(parts)}" if parts else None


def shown(inexact: str | None) -> str:
    """Says whether a model is exact, and why it is not: "yes, arithmetic 2 avx512" or "no: PyTorch computes ..."."""
    return f"yes, arithmetic {arithmetic()}" if inexact is None else f"no: {inexact}"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations as they are called, and calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, set[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        kind = _KINDS.get(name)
        if kind is None and _has_tail(name, args):
            kind = "elementwise functions with a scalar tail"
        if kind is None and _adds_rows(name, args):
            kind = "sums over the first axis"
        if kind is not None:
            self.found.setdefault(kind, set()).add(name)
        return func(*args, **(kwargs or {}))


def _has_tail(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether an elementwise function computes some numbers by scalar code, which gives other bits."""
    x = args[0] if args else None
    if not isinstance(x, torch.Tensor) or name not in _TAILED.get(x.dtype, ()):
        return False
    if name == "pow" and (x.dim() == 0 or (isinstance(args[1], float | int) and args[1] in _PLAIN_POWERS[x.dtype])):
        return False
    return x.dim() == 0 or x.shape[-1] % (_VECTORS[x.dtype] * _shares()) != 0


def _shares() -> int:
    """Returns by how much whole vectors are multiplied so that no share of a row's has a rest, on as many threads as
    PyTorch takes."""
    return math.lcm(*range(1, torch.get_num_threads() + 1))


def _adds_rows(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether a sum is over the first axis, whose order depends on how many numbers the others have."""
    x = args[0] if args else None
    if name not in ("sum", "mean") or not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_floating_point():
        return False
    axes = args[1] if len(args) > 1 and args[1] else range(x.dim())
    return x.shape[0] > _FEW and any(axis % x.dim() == 0 for axis in axes)
