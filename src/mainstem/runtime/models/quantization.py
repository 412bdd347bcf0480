"""Quantizes the linear layers of a decoder to 4 bits a number, by groups of neighbours with a scale each.

    code in 0 ... 15, scale of 5 bits      number = (code - 8) scale

A number has 8 significant bits at most, as many as a bfloat16. So the layer's own weight is overwritten by the same
numbers, exactly, and it does not matter to an answer which of the two computes a step: few rows read the codes, which
are a third of the bytes, and many rows, adapters and digests use the weight. Without a text to calibrate on, the
same model gives the same numbers each time, and so its stored pages are found again.

The head and the embeddings stay as they are. This module knows linear layers. It does not know what computes them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from mainstem.errors import UnsupportedModel
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import GROUP, Int4

_FEWEST = 32  # outputs: a router of experts has fewer, and its numbers decide much
_SCALE_BITS = 5
_LIMITS = (1e-30, 1e30)  # of the largest number of a group: smaller ones are zero, larger ones stay as they are
# A group's largest number is this many scales: which one loses least depends on the others.
_STEPS = (5.6, 5.9, 6.2, 6.5, 6.8, 7.1, 7.5, 8.0, 8.5)
_AT_ONCE = 1 << 20  # numbers of a weight

log = logging.getLogger(__name__)


def quantize(model: Any, name: str) -> None:
    """Quantizes the linear layers of the decoder of `model`, and says which it cannot.

    Args:
        model: on a CPU, in float32 or bfloat16.
        name: for messages.

    Raises:
        UnsupportedModel: it can quantize none.
    """
    layers = [(name, layer) for name, layer in model.get_decoder().named_modules() if type(layer) is nn.Linear]
    known: dict[int, Int4] = {}  # by weight, which several layers may share
    kept = []
    for path, layer in layers:
        weight = layer.weight
        if id(weight) not in known:
            if not _can(weight):
                kept.append(path)
                continue
            known[id(weight)] = _quantize(weight.data)
        vars(layer)["int4"] = known[id(weight)]
    if not known:
        raise UnsupportedModel(f"{name}: it has no linear layer that can be quantized to int4")
    if kept:
        log.warning("%s: not quantized: %d of %d linear layers: %s", name, len(kept), len(layers), ", ".join(kept))


def packed(layer: nn.Module) -> Int4 | None:
    """Returns the codes of a linear layer that is quantized."""
    found: Int4 | None = vars(layer).get("int4")
    return found


def _can(weight: torch.Tensor) -> bool:
    aligned = kernels.takes(weight) and weight.shape[1] % GROUP == 0
    return aligned and len(weight) >= _FEWEST and bool(weight.abs().amax() < _LIMITS[1])


def _quantize(weight: torch.Tensor) -> Int4:
    """Overwrites a weight by numbers of 4 bits, and returns their codes."""
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs // 8, dtype=torch.int32)
    scales = torch.empty(outputs, inputs // GROUP)
    step = max(1, _AT_ONCE // inputs)
    for begin in range(0, outputs, step):
        part = weight[begin : begin + step]
        numbers, scale = _nearest(part.float().view(-1, GROUP))
        part.copy_((numbers * scale).view_as(part))
        codes[begin : begin + step] = _packed(numbers).view(len(part), -1)
        scales[begin : begin + step] = scale.view(len(part), -1)
    return Int4(codes, scales)


def _nearest(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whole numbers [groups, GROUP] from -8 to 7, and the scale [groups, 1] with the least squared error."""
    most = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    most = torch.where(most.abs() < _LIMITS[0], 0, most)
    least = torch.full_like(most, torch.inf)
    best, best_scale = torch.zeros_like(groups), torch.zeros_like(most)
    for steps in (sign * each for each in _STEPS for sign in (-1, 1)):
        scale = _rounded(most / steps)
        numbers = torch.where(scale == 0, 0, groups / scale).round_().clamp_(-8, 7)
        error = (numbers * scale - groups).square_().sum(1, keepdim=True)
        closer = error < least
        least = torch.where(closer, error, least)
        best, best_scale = torch.where(closer, numbers, best), torch.where(closer, scale, best_scale)
    return best, best_scale


def _rounded(scale: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**_SCALE_BITS).round_(), exponent - _SCALE_BITS)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the words of groups: [groups, 4] int32; see `kernels.Int4`."""
    codes = (numbers + 8).to(torch.int64).view(-1, 8, 2, 2).permute(0, 3, 2, 1)  # parity, word, place in it
    words = (codes << torch.arange(0, 32, 4)).sum(-1).view(-1, 4)
    return words.to(torch.int32)  # the lowest 32 bits
