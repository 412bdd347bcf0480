"""What a watched forward may call: each operation that was compared has the same bits in parts and in the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from mainstem.runtime.models import exactness
from mainstem.runtime.models.exactness import reason, watching

ROWS = 3000
SHARES = (1, 7, 64, 997)  # rows of a part
_Function = Callable[[torch.Tensor], torch.Tensor]


def positive(function: _Function) -> _Function:
    return lambda x: function(x.abs() + 1e-3)


def added(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(x)).flip(0)
    return x.index_add(0, rows, x.flip(0))


def counted(x: torch.Tensor) -> torch.Tensor:
    """Whole numbers, however many are counted."""
    counts = sum(torch.histc(part.float().clamp(-9, 9).round(), 19, -9, 9) for part in x.split(max(1, len(x) // 3)))
    return x * 0 + (counts == torch.histc(x.float().clamp(-9, 9).round(), 19, -9, 9)).all()


FUNCTIONS: dict[str, _Function] = {
    "erf": torch.erf,
    "exp": torch.exp,
    "log": positive(torch.log),
    "log1p": positive(torch.log1p),
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "polar": lambda x: torch.view_as_real(torch.polar(x.float().abs(), x.float())),
    "addcmul": lambda x: torch.addcmul(x, x + 1, x - 1),
    "index_add": added,
    "histc": counted,
}
POWERS = {
    (dtype, power): positive(lambda x, power=power: x**power)  # type: ignore[misc]
    for dtype, powers in exactness.PLAIN_POWERS.items()
    for power in powers
}
IN_BFLOAT16: dict[str, _Function] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "elu": functional.elu,
}
SUMS: dict[str, _Function] = {
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
}


def test_all_that_is_said_to_be_compared_is_compared() -> None:
    assert FUNCTIONS.keys() | {"pow", "rsqrt"} == exactness.COMPARED
    assert IN_BFLOAT16.keys() == exactness.COMPARED_IN_BFLOAT16
    assert SUMS.keys() == exactness.COMPARED_SUMS


def same(function: _Function, dtype: torch.dtype, width: int, threads: int) -> bool:
    """Compares parts with the whole: numbers of all sizes, beside each other."""
    generator = torch.Generator().manual_seed(width)
    sizes = torch.logspace(-3, 4, 29)[torch.randint(29, (ROWS, width), generator=generator)]
    x = (torch.randn(ROWS, width, generator=generator) * sizes).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = function(x)
        parts = ((torch.cat([function(part) for part in x[: 90 * size].split(size)]), size) for size in SHARES)
        return all(torch.equal(part.nan_to_num(), whole[: 90 * size].nan_to_num()) for part, size in parts)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_was_compared_has_the_same_bits_in_parts_and_in_the_whole(dtype: torch.dtype, threads: int) -> None:
    functions = {**FUNCTIONS, **SUMS, **(IN_BFLOAT16 if dtype is torch.bfloat16 else {"rsqrt": positive(torch.rsqrt)})}
    functions |= {f"pow {power}": function for (own, power), function in POWERS.items() if own is dtype}
    differing = {
        (name, width)
        for name, function in functions.items()
        for width in (8, 25, 64)
        if not same(function, dtype, width, threads)
    }
    assert differing == set()


def test_the_comparison_finds_what_has_another_code_for_a_rest() -> None:
    assert not same(functional.silu, torch.float32, 25, 1)
    assert not same(positive(torch.rsqrt), torch.bfloat16, 25, 1)


@pytest.mark.parametrize(
    ("name", "function", "dtype"),
    [
        ("silu", functional.silu, torch.float32),
        ("gelu", functional.gelu, torch.bfloat16),
        ("rsqrt", torch.rsqrt, torch.bfloat16),
        ("exp2", torch.exp2, torch.float32),
        ("sinh", torch.sinh, torch.bfloat16),
        ("celu", torch.celu, torch.float32),
        ("glu", lambda x: functional.glu(torch.cat([x, x], -1)), torch.float32),
        ("atan2", lambda x: torch.atan2(x, x.flip(-1)), torch.float32),
        ("logaddexp", lambda x: torch.logaddexp(x, x.flip(-1)), torch.float32),
        ("pow", lambda x: x.abs() ** (1 / 3), torch.float32),
        ("pow", lambda x: x.abs() ** -0.5, torch.bfloat16),
        ("pow", lambda x: 2**x, torch.float32),
        ("pow", lambda x: x**x, torch.float32),
        ("mul", lambda x: torch.complex(x, x) * torch.complex(x, x), torch.float32),
        ("add", lambda x: x.add(x, alpha=0.3), torch.float32),
        ("lgamma", torch.lgamma, torch.float32),
    ],
)
def test_what_is_on_no_list_makes_a_model_inexact(name: str, function: _Function, dtype: torch.dtype) -> None:
    with watching() as found:
        function(torch.ones(3, 25, dtype=dtype))
        torch.ones(3, 25).pow(2).mean(-1).pow(-0.5)  # as norms do
        torch.arange(9).cumsum(0).remainder(2)  # whole numbers are never rounded
    assert found.kinds == {"functions that are not known to compute each row by itself": {name}}
    assert name in str(reason(found))


def test_sums_over_the_rows_are_noticed_and_those_of_few_numbers_and_of_a_row_are_not() -> None:
    with watching() as found:
        torch.ones(4, 3, 8).mean(0)
        torch.ones(9, 3, 8).sum(1)
        torch.ones(9, 3, 8).sum(-1)
        torch.ones(9, 3, 8).softmax(-1)
        torch.ones(9, 3, dtype=torch.int64).sum(0)
    assert found.kinds == {}
    for function in (lambda x: x.mean(0), torch.sum, lambda x: x.cumsum(0), lambda x: x.softmax(1)):
        with watching() as found:
            function(torch.ones(9, 3, 8))
        assert list(found.kinds) == ["sums over the first axis"]


def test_the_module_that_calls_an_operation_is_found() -> None:
    inner = torch.nn.Sequential(torch.nn.Identity(), torch.nn.SiLU())
    outer = torch.nn.Sequential(inner, torch.nn.Identity())
    with watching(outer.modules()) as found:
        outer(torch.ones(3, 25))
    assert found.modules == [inner[1]]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in outer.modules())
