"""Functions of single numbers by the core: their values, and their bits wherever a number lies."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mainstem import _core
from mainstem.errors import BadArgument
from mainstem.runtime.kernels import functions
from mainstem.runtime.kernels.by_row import ByRow

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 3e-7, torch.bfloat16: 2**-8}
_Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, tuple[_Function, _Function]] = {
    "silu": (functions.silu, nn.functional.silu),
    "gelu": (functions.gelu, nn.functional.gelu),
    "gelu, tanh": (lambda x: functions.gelu(x, "tanh"), lambda x: nn.functional.gelu(x, approximate="tanh")),
    "sigmoid": (functions.sigmoid, torch.sigmoid),
    "softplus": (functions.softplus, nn.functional.softplus),
}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All that a bfloat16 can be between -60 and 60, in no order; as many others in float32."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    every = every[every.float().abs() < 60]
    every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    return every if dtype is torch.bfloat16 else every.float() * 1.00117


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_values_of_pytorch(name: str, dtype: torch.dtype) -> None:
    ours, theirs = FUNCTIONS[name]
    x = numbers(dtype)
    result, expected = ours(x), theirs(x.double())
    assert result.dtype is dtype and result.shape == x.shape
    size = expected.abs().maximum(x.double().abs()) if name.startswith(("silu", "gelu")) else expected.abs()
    error = (result.double() - expected).abs() / size.clamp_min(1e-30)
    assert float(error.max()) < ROUNDING[dtype] * (1 if dtype is torch.bfloat16 else 4)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_has_the_same_bits_wherever_it_lies(name: str, dtype: torch.dtype, threads: int) -> None:
    ours, _ = FUNCTIONS[name]
    x = numbers(dtype).repeat(2)
    x = x[: len(x) // 64 * 64]
    alone = torch.cat([ours(part) for part in x.split(64)])  # whole vectors
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (1, 7, 33, 997, 4097, 50_003, len(x)):
            parts = x[: 400 * size].split(size)
            assert torch.equal(torch.cat([ours(part) for part in parts]), alone[: 400 * size]), size
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("instructions")
def test_limits_are_those_of_the_functions() -> None:
    ends = torch.tensor([-math.inf, math.inf, 0.0, -1e4, 1e4])
    assert functions.sigmoid(ends).tolist() == [0, 1, 0.5, 0, 1]
    assert functions.softplus(ends).tolist() == [0, math.inf, pytest.approx(math.log(2)), 0, 1e4]
    for name, (ours, _) in FUNCTIONS.items():
        assert bool(ours(torch.tensor([math.nan])).isnan()), name


def test_complex_products_and_roots_are_those_of_pytorch() -> None:
    a, b = (torch.randn(3, 25, dtype=torch.complex64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    assert torch.allclose(functions.complex_product(a, b), a * b, rtol=1e-6)
    x = numbers(torch.bfloat16).abs().clamp_min(1e-3)
    assert torch.equal(functions.rsqrt(x), x.double().rsqrt().bfloat16())


class _Gate(nn.Module):
    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> list[torch.Tensor]:
        rotated = torch.view_as_real(torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2)) * rotation)
        functional = nn.functional
        return [
            x.sigmoid(),
            torch.sigmoid(x),
            functional.sigmoid(x),
            functional.silu(x),
            nn.SiLU()(x),
            functional.gelu(x),
            functional.gelu(x, approximate="tanh"),
            functional.softplus(x),
            x.abs().bfloat16().rsqrt(),
            torch.rsqrt(x.abs().bfloat16()),
            rotated.flatten(-2),
        ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_within_by_row_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Rows of six numbers: each begins elsewhere in a vector, and the last ones are in a rest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1001, 6, generator=generator).to(dtype)
    rotation = torch.polar(torch.ones(1001, 3), torch.randn(1001, 3, generator=generator))
    module = _Gate()
    with torch.inference_mode():
        plain = module(x, rotation)
        with ByRow():
            whole = module(x, rotation)
            parts = [module(part, angles) for part, angles in zip(x.split(7), rotation.split(7), strict=True)]
    for i, (ours, own) in enumerate(zip(whole, plain, strict=True)):
        assert torch.allclose(ours.float(), own.float(), rtol=2**-7, atol=1e-6), i
        assert torch.equal(torch.cat([part[i] for part in parts]), ours), i


def test_by_row_leaves_to_pytorch_what_the_core_has_no_function_for() -> None:
    x = torch.randn(3, 7)
    with torch.inference_mode(), ByRow():
        for ours, own in (
            (nn.functional.softplus(x, beta=2.0), torch.log1p(torch.exp(2 * x)) / 2),
            (torch.sigmoid(x.double()), 1 / (1 + torch.exp(-x.double()))),
            (torch.sigmoid(torch.ones(2, dtype=torch.int64)), torch.full((2,), 0.7310586)),
            (x * x, x.square()),
        ):
            assert torch.allclose(ours, own, atol=1e-6) and ours.dtype is own.dtype
    given = x.clone().requires_grad_()
    with ByRow():
        nn.functional.silu(given).sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None


def test_a_function_that_is_unknown_is_refused() -> None:
    with pytest.raises(BadArgument, match="name"):
        _core.apply("erf", 0, 0, 0, False, 1)
