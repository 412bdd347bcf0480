"""Linear layers and norms by the core's kernels, for any number of rows.

With few rows a product waits for the weights, with many it computes; the core does both, and each number of a result is
a sum of float32 in one order, rounded once. So a row's results are the same bits whatever rows are computed with it.

This module knows tensors. It does not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch

from mainstem import _core

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that the core's kernels compute with."""

STEP = 32  # whole layers of a decoder have sizes of a multiple of so many numbers
GROUP = 32  # numbers of a row of a quantized weight that have one scale


class Codes(NamedTuple):
    """The numbers of a weight [outputs, inputs] in 4 or 8 bits: scale code + minimum in float32, rounded to its dtype.

    Args:
        words: int32 [outputs, inputs / GROUP, bits]. The number at place p of a group has the code p / 8, from the
            lowest bits up, of the half word p % 8 (4 bits), or of the word p / 2 % 4 + 4 (p % 2) (8 bits).
        scales: float32 [outputs, inputs / GROUP, scale and minimum]; in 8 bits scales alone, the minimum is -128 scale.
            A scale has at most 24 - bits significant bits.
    """

    words: torch.Tensor
    scales: torch.Tensor

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return self.words.shape[-1]


class Weights(NamedTuple):
    """A linear layer: weight [outputs, inputs], bias [outputs], and the codes of the weight if it is quantized."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    codes: Codes | None = None

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """The addresses of weight, bias, codes and scales, and the bits of a code; 0 for each that is absent."""
        weight, bias = self.weight.data_ptr(), 0 if self.bias is None else self.bias.data_ptr()
        if self.codes is None:
            return weight, bias, 0, 0, 0
        return weight, bias, self.codes.words.data_ptr(), self.codes.scales.data_ptr(), self.codes.bits


class LayerNorm(Protocol):
    """Computes norms of x [..., width] that subtract the mean; weight and bias: [width]."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        """Returns [..., width]."""


class Kernels(Protocol):
    """Kernels of one device: this module, or `triton_linear`."""

    @property
    def layer_norm(self) -> LayerNorm | None:
        """Norms that subtract the mean; None: PyTorch computes them by row."""

    def instructions(self) -> str:
        """Returns the name of what computes."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Returns whether the kernels can read a weight where it is."""

    def products(self, x: torch.Tensor, layers: Sequence[Weights], *, rounds: bool = True) -> list[torch.Tensor]:
        """See `products`."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounds: bool
    ) -> torch.Tensor:
        """See `rms_norm`."""


layer_norm: LayerNorm | None = None
"""PyTorch computes them by row on a CPU."""


def instructions() -> str:
    """Returns the instructions that the core's kernels use; see `_core.instructions`."""
    return _core.instructions()


@cache
def bfloat16_is_native() -> bool:
    """Returns whether this CPU multiplies bfloat16: tiles (AMX), or pairs in one instruction (AVX-512 BF16).

    PyTorch multiplies matrices of bfloat16 more quickly than those of float32 there.
    """
    return instructions() in ("avx512_bf16", "amx")


def takes(tensor: torch.Tensor) -> bool:
    """Returns whether the core's kernels can read a weight where it is."""
    return (
        type(tensor.data) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype in DTYPES
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )


def products(x: torch.Tensor, layers: Sequence[Weights], *, rounds: bool = True) -> list[torch.Tensor]:
    """Computes layers that are given the same rows, in one call.

    Args:
        x: [..., inputs], of one of `DTYPES`, on the CPU.
        layers: of its dtype; `takes` their weights.
        rounds: whether results are rounded to this dtype; without, they are the sums in float32.

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
    out = x.new_empty(sum(sizes), dtype=x.dtype if rounds else torch.float32)
    bfloat16 = x.dtype is torch.bfloat16
    _core.linear(x.data_ptr(), rows, inputs, addresses, out.data_ptr(), rounds, bfloat16, torch.get_num_threads())
    parts = (out,) if len(sizes) == 1 else out.split_with_sizes(sizes)
    return [part.view(*batch, len(layer.weight)) for part, layer in zip(parts, layers, strict=True)]


def product(x: torch.Tensor, layer: Weights) -> torch.Tensor:
    """Computes one layer; see `products`."""
    return products(x, [layer])[0]


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
