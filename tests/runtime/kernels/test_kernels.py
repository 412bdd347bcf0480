import math

import pytest
import torch
from torch.nn.functional import linear

from mainstem import _core
from mainstem.errors import BadArgument
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import Weights, product, products, rms_norm

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
ROWS = (1, 2, 3, 7, 8, 9, 12, 13, 16, 17, 32, 33, 47, 48, 100)
NEEDS_ISA = pytest.mark.skipif(not kernels.instructions(), reason="the machine has neither AVX-512 nor AVX2")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def layer(outputs: int, inputs: int, dtype: torch.dtype, bias: bool = True, seed: int = 0) -> Weights:
    return Weights(
        random(outputs, inputs, dtype=dtype, seed=seed), random(outputs, dtype=dtype, seed=seed) if bias else None
    )


def exact(x: torch.Tensor, of: Weights) -> torch.Tensor:
    return linear(x.double(), of.weight.double(), None if of.bias is None else of.bias.double())


def close(ours: torch.Tensor, exactly: torch.Tensor) -> bool:
    return float((ours.double() - exactly).abs().max() / exactly.abs().max()) < ROUNDING[ours.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (5, 64), (37, 96), (300, 576)])
def test_a_product_is_the_layers_for_any_number_of_rows(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    given = layer(outputs, inputs, dtype, bias)
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype)
        result = product(x, given)
        assert result.shape == (rows, outputs) and result.dtype is dtype
        assert close(result, exact(x, given)), rows


@pytest.mark.skipif(not _core.has_tiles(), reason="the machine has no tiles of bfloat16")
@pytest.mark.parametrize(("outputs", "inputs"), [(17, 96), (48, 64), (300, 576)])
def test_by_tiles_a_row_has_the_same_bits_however_many_rows_are_with_it(outputs: int, inputs: int) -> None:
    x, given = random(100, inputs, dtype=torch.bfloat16), layer(outputs, inputs, torch.bfloat16)
    (whole,) = products(x, [given])
    assert close(whole, exact(x, given))
    for rows in range(1, 100):
        assert torch.equal(products(x[:rows], [given])[0], whole[:rows]), rows


def test_a_width_that_the_core_does_not_take_is_computed_too() -> None:
    for dtype in DTYPES:
        x, given = random(4, 33, dtype=dtype), layer(7, 33, dtype)
        assert not kernels.takes(given.weight)
        assert close(product(x, given), exact(x, given))


def test_a_wide_weight_is_widened_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WIDENED", 200)
    monkeypatch.setattr(kernels, "bfloat16_is_slow", lambda: True)
    x, given = random(64, 64, dtype=torch.bfloat16), layer(37, 64, torch.bfloat16)
    assert close(product(x, given), exact(x, given))


def test_a_product_keeps_the_batch_dimensions_and_reads_rows_that_are_apart() -> None:
    for dtype in DTYPES:
        given = layer(6, 32, dtype)
        x = random(2, 3, 64, dtype=dtype)[..., 32:]
        result = product(x, given)
        assert result.shape == (2, 3, 6)
        assert close(result, exact(x, given))


@NEEDS_ISA
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_are_given_the_same_are_computed_as_each_alone(dtype: torch.dtype) -> None:
    layers = [layer(n, 64, dtype, bias=n != 5, seed=n) for n in (9, 5, 1, 700)]
    x = random(3, 64, dtype=dtype)
    for together, one in zip(products(x, layers), layers, strict=True):
        assert torch.equal(together, products(x, [one])[0])
        assert close(together, exact(x, one))


@NEEDS_ISA
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows_or_on_the_number_of_threads(dtype: torch.dtype) -> None:
    given = layer(999, 576, dtype)
    x = random(16, 576, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [products(row.unsqueeze(0), [given])[0] for row in x]
        torch.set_num_threads(2)
        for rows in range(1, 17):
            assert torch.equal(products(x[:rows], [given])[0], torch.cat(alone[:rows]))
    finally:
        torch.set_num_threads(before)


@NEEDS_ISA
def test_numbers_that_are_none_stay_so() -> None:
    given = Weights(torch.eye(32, dtype=torch.bfloat16), None)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    for number in (math.nan, math.inf, -math.inf):
        x[0, 3] = number
        result = products(x, [given])[0]
        assert result[0].isnan().any(), "infinity times zero"
    largest = torch.finfo(torch.bfloat16).max
    doubled = products(torch.full((1, 32), largest, dtype=torch.bfloat16), [given._replace(weight=given.weight * 4)])
    assert doubled[0].isinf().all()


@NEEDS_ISA
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_an_rms_norm_follows_its_rule(rows: int, offset: float, rounds: bool, dtype: torch.dtype) -> None:
    weight, epsilon = random(576, dtype=dtype), 1e-2
    x = random(rows, 576, dtype=dtype) * torch.linspace(0.01, 3, rows, dtype=dtype).unsqueeze(1)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    gain = weight.float() + offset
    expected = (scaled.to(dtype).float() if rounds else scaled) * gain
    ours = rms_norm(x, weight, epsilon, offset, rounds)
    assert ours.shape == x.shape and ours.dtype is dtype
    assert close(ours, expected.double())


@NEEDS_ISA
def test_rounding_before_the_gain_is_another_result() -> None:
    x, weight = random(8, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16)
    twice, once = (rms_norm(x, weight, 1e-6, 0.0, rounds) for rounds in (True, False))
    own = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    assert (twice != own).float().mean() < 0.01 < (once != own).float().mean()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 32, dtype=torch.float16),
        torch.zeros(4, 33),
        torch.zeros(4, 64)[:, ::2],
        torch.zeros(0, 32),
        torch.zeros(4, 32, device="meta"),
    ],
    ids=["dtype", "width", "apart", "empty", "elsewhere"],
)
def test_the_core_takes_weights_that_it_can_read_in_place_only(tensor: torch.Tensor) -> None:
    assert not kernels.takes(tensor)


def test_the_core_refuses_a_width_that_it_would_read_beyond() -> None:
    with pytest.raises(BadArgument, match="inputs"):
        _core.linear(0, 1, 33, [], 0, False, 1)
    with pytest.raises(BadArgument, match="width"):
        _core.rms_norm(0, 0, 0, 1, 0, 1e-6, 0.0, False, False, 1)
