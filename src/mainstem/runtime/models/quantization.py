"""Quantizes the linear layers of a decoder, by groups of neighbours:

    4 bits    number = scale code + minimum         8 bits    number = scale (code - 128)

A number is rounded to the weight's dtype, and the weight is overwritten by these numbers. So it does not matter to an
answer which of the two computes a step: few rows read the codes, which are fewer bytes, and many rows, adapters and
digests use the weight. Without a text to calibrate on, the same model gives the same numbers each time, and so its
stored pages are found again.

Layers that widen in an MLP have 4 bits, others 8, as they lose more. But files of 4 bits (GGUF's Q4_0, Q4_1, Q4_K) hold
groups of numbers that are equally spaced. These are found again to the last bit, in 4 bits.

The head and the embeddings stay as they are. This module knows linear layers. It does not know what computes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from mainstem.errors import UnsupportedModel
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import GROUP, Codes

_FEWEST = 32  # outputs: a router of experts has fewer, and its numbers decide much
_WIDENING = ("mlp", "ffn", "feed_forward", "expert")  # in the names of modules
_LIMITS = (1e-25, 1e30)  # smaller numbers become zero; a layer with larger ones stays as it is
_SHARES = (1.0, 0.94, 0.88, 0.82, 0.76)  # of a group's range that its codes may begin from: which one is best depends
_SAMPLE = 256  # groups by which a weight is known to be equally spaced
_TURNS = 24  # of finding a scale and a minimum that give all numbers of a group
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
    known: dict[int, Codes] = {}  # by weight, which several layers may share
    kept = []
    for path, layer in layers:
        weight = layer.weight
        if id(weight) not in known:
            if not _can(weight):
                kept.append(path)
                continue
            known[id(weight)] = _quantize(weight.data, _way(path, weight.data))
        vars(layer)["codes"] = known[id(weight)]
    if not known:
        raise UnsupportedModel(f"{name}: it has no linear layer that can be quantized to int4")
    if kept:
        log.warning("%s: not quantized: %d of %d linear layers: %s", name, len(kept), len(layers), ", ".join(kept))


def packed(layer: nn.Module) -> Codes | None:
    """Returns the codes of a linear layer that is quantized."""
    found: Codes | None = vars(layer).get("codes")
    return found


def _can(weight: torch.Tensor) -> bool:
    aligned = kernels.takes(weight) and weight.shape[1] % GROUP == 0
    return aligned and len(weight) >= _FEWEST and bool(weight.abs().amax() < _LIMITS[1])


def _way(path: str, weight: torch.Tensor) -> Callable[[torch.Tensor], _Fit]:
    """Returns what quantizes groups of a layer."""
    outputs, inputs = weight.shape
    sample = weight.view(-1, GROUP)[:: len(weight) * inputs // GROUP // _SAMPLE + 1]
    if _equally_spaced(sample)[1].float().mean() > 0.9:
        return _of_equally_spaced
    return _of_4_bits if outputs > inputs and any(name in path for name in _WIDENING) else _of_8_bits


def _quantize(weight: torch.Tensor, way: Callable[[torch.Tensor], _Fit]) -> Codes:
    """Overwrites a weight by the numbers of codes, and returns these."""
    outputs, inputs = weight.shape
    parts = []
    for part in torch.split(weight, max(1, _AT_ONCE // inputs)):
        part.masked_fill_(part.abs() < _LIMITS[0], 0)
        fit = way(part.view(-1, GROUP))
        part.copy_(fit.numbers(part.dtype).view_as(part))
        parts.append(fit.kept())
    words, scales = (torch.cat(each).view(outputs, inputs // GROUP, -1) for each in zip(*parts, strict=True))
    return Codes(words, scales)


class _Fit(NamedTuple):
    """Codes of groups [groups, GROUP], and the scale and the minimum of each group [groups, 1]; float32."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    def numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the numbers of the codes, as kernels read them."""
        return (self.codes * self.scale + self.minimum).to(dtype)

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns words [groups, bits], and scales of groups; see `kernels.Codes`."""
        places = self.codes.to(torch.int64).view(-1, 4, 4, 2)  # code of a word, word, parity
        places <<= self.bits * torch.arange(4).view(4, 1, 1)
        if self.bits == 8:
            return places.sum(1).mT.reshape(-1, 8).to(torch.int32), self.scale  # the lowest 32 bits
        places <<= 16 * torch.arange(2)
        return places.sum((1, 3)).to(torch.int32), torch.cat([self.scale, self.minimum], 1)

    def at(self, where: torch.Tensor) -> _Fit:
        """Returns that of some groups."""
        return _Fit(self.bits, self.codes[where], self.scale[where], self.minimum[where])

    def replace(self, where: torch.Tensor, other: _Fit) -> None:
        """Takes the groups at `where` from another fit, which has these alone."""
        for own, found in ((self.codes, other.codes), (self.scale, other.scale), (self.minimum, other.minimum)):
            own[where] = found


def _of_8_bits(groups: torch.Tensor) -> _Fit:
    scale = _rounded(groups.float().abs().amax(1, keepdim=True) / 127, 16)
    codes = _ratio(groups.float(), scale).round_().clamp_(-127, 127) + 128
    return _Fit(8, codes, scale, -128 * scale)


def _of_4_bits(groups: torch.Tensor) -> _Fit:
    """Returns the fit with the least error among some. Errors of large numbers count more."""
    groups = groups.float()
    low, high = groups.aminmax(dim=1, keepdim=True)
    weights = groups.abs() + groups.square().mean(1, keepdim=True).sqrt()
    best = _Fit(4, torch.zeros_like(groups), torch.zeros_like(low), torch.zeros_like(low))
    least = torch.full_like(low, torch.inf)
    for share in _SHARES:
        scale = (high - low) * (share / 15)
        minimum = (high + low) / 2 - 7.5 * scale
        for _ in range(2):
            codes = _ratio(groups - minimum, scale).round_().clamp_(0, 15)
            scale, minimum = _regression(groups, codes, weights)
        fit = _Fit(4, codes, scale, minimum)
        error = (weights * (fit.numbers(torch.float32) - groups).square_()).sum(1, keepdim=True)
        closer = (error < least).squeeze(1)
        best.replace(closer, fit.at(closer))
        least = torch.minimum(least, error)
    return best


def _of_equally_spaced(groups: torch.Tensor) -> _Fit:
    fit, exact = _equally_spaced(groups)
    rest = ~exact
    if rest.any():
        fit.replace(rest, _of_4_bits(groups[rest]))
    return fit


def _equally_spaced(groups: torch.Tensor) -> tuple[_Fit, torch.Tensor]:
    """Returns codes of numbers that are equally spaced, and of which groups [groups] these are all numbers, exactly."""
    fit = _Fit(4, torch.zeros(groups.shape), *torch.zeros(2, len(groups), 1))
    exact = torch.zeros(len(groups), dtype=torch.bool)
    for steps in range(15, 0, -1):  # between the least number and the largest
        left = (~exact).nonzero().squeeze(1)
        wide = groups[left].double()
        low, high = wide.aminmax(dim=1, keepdim=True)
        places = _ratio(wide - low, (high - low) / steps)
        codes = places.round()
        near = (places - codes).abs().amax(1) < 0.2
        left = left[near]
        if len(left):
            found, whole = _exactly(groups[left], codes[near])
            fit.replace(left, found)
            exact[left] = whole
    return fit, exact


def _exactly(groups: torch.Tensor, codes: torch.Tensor) -> tuple[_Fit, torch.Tensor]:
    """Looks for the scale and the minimum by which codes give all numbers; returns also for which groups they do.

    Each number that is rounded to the given one is between two bounds. So a scale leaves a range for the minimum, whose
    width is a concave function of the scale: it is looked for by halving where the function rises and where it falls.
    """
    lowest, highest = _bounds(groups)
    steps = codes.amax(1, keepdim=True)
    left = _ratio(lowest.amax(1, keepdim=True) - highest.amin(1, keepdim=True), steps)
    right = _ratio(highest.amax(1, keepdim=True) - lowest.amin(1, keepdim=True), steps)
    fit = _Fit(4, codes.float(), *torch.zeros(2, len(groups), 1))
    exact = torch.zeros(len(groups), dtype=torch.bool)
    for turn in range(_TURNS):
        rest = (~exact).nonzero().squeeze(1)
        if not len(rest):
            break
        middle = (left[rest] + right[rest]) / 2
        scale = _rounded((left[rest], right[rest], middle)[min(turn, 2)], 20)
        below, lower = (lowest[rest] - scale * codes[rest]).max(1, keepdim=True)
        above, upper = (highest[rest] - scale * codes[rest]).min(1, keepdim=True)
        found = _Fit(4, fit.codes[rest], scale.float(), ((below + above) / 2).float())
        fit.replace(rest, found)
        exact[rest] = (found.numbers(groups.dtype) == groups[rest]).all(1)
        rises = codes[rest].gather(1, lower) > codes[rest].gather(1, upper)
        left[rest] = torch.where(rises, scale, left[rest])
        right[rest] = torch.where(rises, right[rest], scale)
    return fit, exact


def _bounds(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bounds of what is rounded to each number, float64; zero has no other.

    Rounding halfway between two numbers takes the even one, so bounds of an odd one are a little nearer.
    """
    bits = numbers.view(torch.int16 if numbers.dtype is torch.bfloat16 else torch.int32)
    half = 0.5 - (bits % 2).double() * 2**-30
    wide = numbers.double()
    neighbours = ((bits + step).view(numbers.dtype).double() for step in (-1, 1))
    ends = [torch.where(numbers == 0, 0, wide + (other - wide) * half) for other in neighbours]
    return torch.minimum(*ends), torch.maximum(*ends)


def _regression(groups: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scale and minimum [groups, 1] of codes with the least squares of weighted errors."""
    total = weights.sum(1, keepdim=True)
    code, number = (_ratio((weights * each).sum(1, keepdim=True), total) for each in (codes, groups))
    away = codes - code
    weighted = weights * away
    scale = _ratio((weighted * (groups - number)).sum(1, keepdim=True), (weighted * away).sum(1, keepdim=True))
    scale = _rounded(scale, 20)
    return scale, number - scale * code


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0, a / b)


def _rounded(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns scales of so many significant bits: the product with a code is exact in float32."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**bits).round_(), exponent - bits)
