"""Functions of single numbers, by the core: the same bits wherever a number lies in a tensor.

PyTorch computes most numbers of a tensor by vectors, and what does not fill one, at the end of a row or of a thread's
share, by other code, which rounds otherwise.

This module knows tensors. It does not know models.
"""

from __future__ import annotations

import torch

from mainstem import _core
from mainstem.runtime.kernels.linear import DTYPES


def silu(x: torch.Tensor) -> torch.Tensor:
    """Returns x times its logistic function."""
    return _applied("silu", x)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Returns x times the normal distribution's share below it; approximately, if `approximate` is "tanh"."""
    return _applied("gelu_tanh" if approximate == "tanh" else "gelu", x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns the logistic function of x."""
    return _applied("sigmoid", x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of 1 + e^x."""
    return _applied("softplus", x)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """Returns 1 / sqrt(x), rounded once; in float32, PyTorch's have no other code."""
    return x.float().rsqrt().to(x.dtype)


def complex_product(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """Returns complex numbers times complex ones, or one real, by real products and sums, each of them rounded."""
    if not isinstance(b, torch.Tensor):
        return torch.complex(a.real * b, a.imag * b)
    real, imaginary = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return torch.complex(real, imaginary)


def _applied(name: str, x: torch.Tensor) -> torch.Tensor:
    """Applies a function of the core to numbers on the CPU; the result has their dtype, and is contiguous."""
    given = (x if x.dtype in DTYPES else x.float()).contiguous()
    out = torch.empty_like(given)
    bfloat16, threads = given.dtype is torch.bfloat16, torch.get_num_threads()
    _core.apply(name, given.data_ptr(), out.data_ptr(), given.numel(), bfloat16, threads)
    return out.to(x.dtype)
