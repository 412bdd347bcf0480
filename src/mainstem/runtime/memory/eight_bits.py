"""Keys and values in 8 bits: q * scale, with one scale for the numbers of a position and head.

    int8   scale = the greatest magnitude / 127    q an integer, in equal steps
    fp8    scale = the greatest magnitude / 448    q a float of 4 bits of exponent and 3 of mantissa (e4m3)

A scale depends on its own position and head alone. So neither the other requests of a batch nor the ranks that share a
model's heads change what a page holds.

This module knows numbers. It does not know pages.
"""

from __future__ import annotations

from typing import get_args

import torch

from mainstem.errors import BadArgument
from mainstem.settings.engine import KVCacheDtype

SCALE = torch.float32
"""The dtype of scales."""

_GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_NAMED: dict[str, torch.dtype | None] = dict(zip(get_args(KVCacheDtype), (None, *_GREATEST), strict=True))

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The number of each code."""


def eight_bits(name: str) -> torch.dtype | None:
    """Returns the dtype of the numbers in pages, by the name of the setting; None: the model's own, `auto`.

    Raises:
        BadArgument: there is none of this name.
    """
    if name not in _NAMED:
        raise BadArgument("kv_cache_dtype", name, "one of " + ", ".join(_NAMED))
    return _NAMED[name]


def quantize(given: torch.Tensor, to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns numbers of a dtype of 8 bits, and float32 scales [..., 1], of rows [..., numbers].

    A scale is at least the smallest normal number, so that zeros have one, too. A row with an infinity or a NaN is read
    as NaN.
    """
    wide = given.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _GREATEST[to]).clamp_(min=torch.finfo(SCALE).tiny)
    scales.masked_fill_(scales.isinf(), float("nan"))
    steps = wide / scales
    return (steps if to.is_floating_point else steps.round_()).to(to), scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the rows of `quantize` in a dtype: float32 products, rounded to it."""
    wide = torch.empty(numbers.shape, device=numbers.device)
    if numbers.dtype is torch.float8_e4m3fn and numbers.is_cpu:  # PyTorch takes 40 times as long to convert them
        codes = numbers.reshape(-1).view(torch.uint8).int()
        torch.index_select(_E4M3, 0, codes, out=wide.view(-1))
    else:
        wide.copy_(numbers)
    wide.mul_(scales)  # in place, in float32: with a bfloat16 factor it takes four times as long
    return wide.to(dtype)


def rounded(given: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Returns what rows [..., numbers] are after 8 bits."""
    return dequantize(*quantize(given, to), given.dtype)
