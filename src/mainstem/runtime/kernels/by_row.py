"""Computes row by row what PyTorch computes by the shapes that it is given.

    with ByRow():
        module(...)     products with weights, activations, gates and complex products: the same bits in any batch

A module keeps its own forward, and only these functions are exchanged in it: in routers, experts and the layers of
GPT-2, which use weights of their own, and in modules in which the self-test has noticed a function that PyTorch
computes otherwise at the end of a thread's share (`exactness`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mainstem.runtime.kernels import functions
from mainstem.runtime.kernels.bare_weights import PRODUCTS
from mainstem.runtime.kernels.linear import DTYPES

_Function = Callable[..., Any]


class ByRow(TorchFunctionMode):
    """Lets the core compute these functions inside the `with` block, where it can."""

    def __torch_function__(
        self,
        func: _Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        ours = _OURS.get(func)
        if ours is None or torch.is_grad_enabled():
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        result = ours(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _on_numbers(function: Callable[..., torch.Tensor], **fixed: object) -> _Function:
    """Returns `function` for real numbers on a CPU, where arguments of these names have these values."""

    def computed(x: Any, *others: Any, **named: Any) -> torch.Tensor | None:
        given = {**dict(zip(fixed, others, strict=False)), **named}
        ours = isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dtype in DTYPES
        if not ours or len(others) > len(fixed) or any(given[name] != fixed.get(name) for name in given):
            return None
        return function(x)

    return computed


def _gelu(x: Any, approximate: str = "none") -> torch.Tensor | None:
    """See `functions.gelu`."""
    result: torch.Tensor | None = _on_numbers(lambda x: functions.gelu(x, approximate))(x)
    return result


def _mul(a: Any, b: Any, **others: Any) -> torch.Tensor | None:
    """See `functions.complex_product`."""
    if others or not (isinstance(a, torch.Tensor) and a.is_complex()):
        return None
    known = b.is_complex() if isinstance(b, torch.Tensor) else isinstance(b, int | float)
    return functions.complex_product(a, b) if known else None


_SIGMOID, _RSQRT = _on_numbers(functions.sigmoid), _on_numbers(functions.rsqrt)
_OURS: Mapping[_Function, _Function] = {
    **PRODUCTS,
    torch.nn.functional.silu: _on_numbers(functions.silu, inplace=False),
    torch.nn.functional.gelu: _gelu,
    torch.nn.functional.softplus: _on_numbers(functions.softplus, beta=1, threshold=20),
    **dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid), _SIGMOID),
    **dict.fromkeys((torch.rsqrt, torch.Tensor.rsqrt), _RSQRT),
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__), _mul),
}
