"""Products of modules that use their weights themselves: routers, experts, and the layers of GPT-2.

These have code of their own between their products, so their forward stays, and only the products are exchanged
(`by_row`): linear(x, weight), addmm(bias, x, weight), grouped and batched products, where the core reads the weights in
place. A row of a result has the same bits whatever rows are computed with it, as in `linear`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import Weights


def uses_weights(module: nn.Module) -> bool:
    """Returns whether a module may multiply by weights of its own. Mixers that have linear layers, too, do not."""
    matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() in (2, 3)]
    others = type(module) is nn.Linear or isinstance(module, (nn.Embedding, nn.Conv1d))
    others |= any(isinstance(child, nn.Linear) for child in module.children())
    return bool(matrices) and not others and all(weight.device.type == "cpu" for weight in matrices)


def turn_weights(module: nn.Module) -> None:
    """Lays weights that have their outputs last so that those of an output are neighbours; their shape stays."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    is_batched = code is not None and "bmm" in code.co_names
    if getattr(module, "is_transposed", False) or type(module).__name__ == "Conv1D" or is_batched:
        for weight in module.parameters(recurse=False):
            if weight.dim() in (2, 3) and type(weight.data) is torch.Tensor:
                weight.data = weight.data.mT.contiguous().mT


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if not _takes(x, weight) or not (bias is None or (_takes(x, bias) and bias.shape == weight.shape[:1])):
        return None
    return kernels.product(x, Weights(weight, bias))


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **scales: Any) -> torch.Tensor | None:
    return None if scales or bias.dim() != 1 else _linear(x, weight.mT, bias)


def _grouped(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, **others: Any) -> Any:
    """Computes rows [offs[i - 1], offs[i]) of x times matrix i of `weight` [matrices, inputs, outputs]."""
    if offs is None or weight.dim() != 3 or any(other is not None for other in others.values()):
        return None
    if not _takes(x, weight.mT):
        return None
    out = x.new_zeros(len(x), weight.shape[-1])
    begin = 0
    for matrix, end in zip(weight.mT, offs.tolist(), strict=True):
        if begin < end:
            out[begin:end] = kernels.product(x[begin:end], Weights(matrix, None))
        begin = end
    return out


def _bmm(x: torch.Tensor, weight: torch.Tensor, **others: Any) -> torch.Tensor | None:
    """Computes x [matrices, rows, inputs] times `weight` [matrices, inputs, outputs]."""
    if others or x.dim() != 3 or x.shape[1] == 0 or not all(_takes(x, matrix) for matrix in weight.mT):
        return None
    return torch.stack(
        [kernels.product(part, Weights(matrix, None)) for part, matrix in zip(x, weight.mT, strict=True)]
    )


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    return _linear(x, weight.mT) if weight.dim() == 2 and x.dim() > 1 else None


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype is weight.dtype and x.device.type == "cpu" and x.shape[-1] > 0 and kernels.takes(weight)


PRODUCTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.addmm: _addmm,
    torch.bmm: _bmm,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul),
    **({torch._grouped_mm: _grouped} if hasattr(torch, "_grouped_mm") else {}),
}
"""By what they replace; each returns None where the core cannot compute it."""
