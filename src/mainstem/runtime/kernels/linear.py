"""Linear layers and norms by the core's kernels, where they are quicker than PyTorch's.

    rows                                          bfloat16          float32
    few: a decode step, or a verified draft       the core          the core, from two on
    fewer than 8, of a quantized layer            the core          the core
    more                                          PyTorch           PyTorch
    many: a prefill, where bfloat16 is slow       as float32        PyTorch

With few rows a product waits for the weights, and PyTorch reads those of bfloat16 at half of the memory's speed. With
many rows it computes. Some CPUs multiply bfloat16 at half of the speed of float32, so each weight is widened while it
is used; others are four times as fast with it (`bfloat16_is_slow`). If the CPU multiplies tiles of bfloat16 (AMX),
so does the core: up to 32 rows take little longer than one. All are as exact as PyTorch's: sums are float32, and
rounded once.

This module knows tensors. It does not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from mainstem import _core

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that the core's kernels compute with."""

_ISA = _core.kernel_isa()

# Numbers of rows for which the core is quicker.
_FEW = {torch.bfloat16: range(1, 33), torch.float32: range(2, 13)} if _ISA else {}
_MANY = 48  # rows from which it pays to widen a weight
_WIDENED = 1 << 22  # numbers of a weight that are widened at once
STEP = 32  # the core's kernels take rows of a multiple of so many numbers
GROUP = 32  # numbers of a row of a quantized weight that have one scale


class Int4(NamedTuple):
    """The numbers of a weight [outputs, inputs] in 4 bits: (code - 8) scale.

    Args:
        codes: int32 [outputs, inputs / 8]. Each group has four words of eight codes, from the lowest bits up: of places
            0, 4, ... 28; of 2, 6, ... 30; of 1, 5, ... 29; of 3, 7, ... 31.
        scales: float32 [outputs, inputs / GROUP].
    """

    codes: torch.Tensor
    scales: torch.Tensor


class Weights(NamedTuple):
    """A linear layer: weight [outputs, inputs], bias [outputs], and the same weight in 4 bits if it is quantized."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    int4: Int4 | None = None

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """The addresses of weight, bias, codes and scales; 0 for each that is absent."""
        codes, scales = (0, 0) if self.int4 is None else (self.int4.codes.data_ptr(), self.int4.scales.data_ptr())
        return self.weight.data_ptr(), 0 if self.bias is None else self.bias.data_ptr(), codes, scales


def instructions() -> str:
    """Returns the instructions that the core's kernels use: "avx512", "avx2", or "" where the machine has neither."""
    return _ISA


def most_rows(dtype: torch.dtype) -> int:
    """Returns the largest number of rows for which the core is quicker; 0: never."""
    return max(_FEW.get(dtype, (0,)))


@cache
def bfloat16_is_native() -> bool:
    """Returns whether this CPU multiplies bfloat16: tiles (AMX), or pairs in one instruction (AVX-512 BF16).

    PyTorch multiplies matrices of bfloat16 more quickly than those of float32 there.
    """
    return _core.has_dots() or torch.cpu._is_amx_tile_supported()


def bfloat16_is_slow() -> bool:
    """Returns whether PyTorch multiplies matrices of bfloat16 more slowly than those of float32 on this CPU."""
    return bool(_ISA) and not bfloat16_is_native()


def takes(tensor: torch.Tensor) -> bool:
    """Returns whether the core's kernels can read a weight where it is."""
    return (
        type(tensor.data) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype in _FEW
        and tensor.is_contiguous()
        and tensor.shape[-1] % STEP == 0
        and tensor.numel() > 0
    )


def are_few(x: torch.Tensor, quantized: bool = False) -> bool:
    """Returns whether the core computes layers that are given x, [..., inputs]."""
    inputs = x.shape[-1]
    if x.dtype not in _FEW or inputs % STEP:
        return False
    rows = x.numel() // inputs
    return rows in _FEW[x.dtype] or (quantized and 0 < rows <= _core.int4_rows)


def products(x: torch.Tensor, layers: Sequence[Weights]) -> list[torch.Tensor]:
    """Computes layers that are given the same few rows, in one call.

    Args:
        x: [..., inputs], for which `are_few`.
        layers: of its dtype; `takes` their weights.

    Returns:
        For each layer [..., outputs], contiguous.
    """
    x = x.contiguous()
    *batch, inputs = x.shape
    rows = x.numel() // inputs
    addresses, sizes = [], []
    for layer in layers:
        outputs = layer.weight.shape[0]
        assert layer.weight.shape[1] == inputs and layer.weight.dtype is x.dtype
        addresses.append((layer.addresses, outputs))
        sizes.append(rows * outputs)
    out = x.new_empty(sum(sizes))
    bfloat16 = x.dtype is torch.bfloat16
    _core.linear(x.data_ptr(), rows, inputs, addresses, out.data_ptr(), bfloat16, torch.get_num_threads())
    parts = (out,) if len(sizes) == 1 else out.split_with_sizes(sizes)
    return [part.view(*batch, -1) for part in parts]


def product(x: torch.Tensor, layer: Weights) -> torch.Tensor:
    """Computes a layer on the CPU for any number of rows: x [..., inputs] to [..., outputs], of the same dtype."""
    if are_few(x, layer.int4 is not None):
        return products(x, [layer])[0]
    if x.dtype is torch.bfloat16 and x.numel() // x.shape[-1] >= _MANY and bfloat16_is_slow():
        return _widened(x, layer)
    return linear(x, layer.weight, layer.bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds: bool) -> torch.Tensor:
    """Divides rows by the root of their mean square plus `epsilon`, and multiplies them by `weight` plus `offset`.

    Args:
        x: [..., width], of the weight's dtype.
        weight: [width], which `takes`.
        epsilon: as above.
        offset: as above.
        rounds: whether the quotient is rounded to the dtype before it is multiplied.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    assert weight.shape == (width,) and weight.dtype is x.dtype
    _core.rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        epsilon,
        offset,
        rounds,
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def _widened(x: torch.Tensor, layer: Weights) -> torch.Tensor:
    """Computes a layer in float32, some of its outputs at a time, so that little memory is needed."""
    wide = x.flatten(0, -2).float()
    out = x.new_empty(len(wide), len(layer.weight))
    size = max(1, _WIDENED // wide.shape[1])
    for begin in range(0, len(layer.weight), size):
        part = slice(begin, begin + size)
        bias = None if layer.bias is None else layer.bias[part].float()
        out[:, part] = linear(wide, layer.weight[part].float(), bias)
    return out.view(*x.shape[:-1], -1)
