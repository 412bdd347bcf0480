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
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 32, 33, 100)


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


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (5, 64), (7, 33), (37, 96), (400, 9), (300, 576)])
def test_a_row_has_the_same_bits_however_many_rows_and_layers_are_with_it(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    given, other = layer(outputs, inputs, dtype, bias), layer(29, inputs, dtype, seed=1)
    x = random(ROWS[-1], inputs, dtype=dtype)
    alone = torch.cat([product(row.unsqueeze(0), given) for row in x])
    assert close(alone, exact(x, given))
    before = torch.get_num_threads()
    try:
        for rows in ROWS:
            torch.set_num_threads(1 + rows % 2)
            assert torch.equal(product(x[-rows:], given), alone[-rows:]), rows
            assert torch.equal(products(x[:rows], [other, given])[1], alone[:rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_cancel_show_any_other_order(dtype: torch.dtype) -> None:
    """What is left of them is the rounding of each partial sum, which a single bfloat16 of a larger sum would hide."""
    half, small = random(ROWS[-1], 96, dtype=dtype), random(ROWS[-1], 96, dtype=dtype, seed=1)
    weight = random(37, 96, dtype=dtype, seed=2)
    given = Weights(torch.cat([weight, -weight, weight * 2**-12], 1), None)
    x = torch.cat([half, half, small], 1)
    alone = torch.cat([product(row.unsqueeze(0), given) for row in x])
    for rows in ROWS:
        assert torch.equal(product(x[:rows], given), alone[:rows]), rows


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 64), (7, 33), (37, 96), (400, 9), (300, 576)])
def test_sums_that_are_not_rounded_are_those_that_are(
    outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    given, other = layer(outputs, inputs, dtype, bias), layer(29, inputs, dtype, seed=1)
    x = random(ROWS[-1], inputs, dtype=dtype)
    sums = products(x, [given], rounds=False)[0]
    assert sums.dtype is torch.float32
    assert close(sums, exact(x, given))
    assert torch.equal(sums.to(dtype), product(x, given))
    for rows in ROWS:
        assert torch.equal(products(x[:rows], [other, given], rounds=False)[1], sums[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_are_computed_at_once_have_the_same_bits(dtype: torch.dtype) -> None:
    x, given = random(1600, 64, dtype=dtype), layer(9, 64, dtype)
    for rounds in (True, False):
        parts = [products(part, [given], rounds=rounds)[0] for part in x.split(700)]
        assert torch.equal(products(x, [given], rounds=rounds)[0], torch.cat(parts))


def test_a_product_keeps_the_batch_dimensions_and_reads_rows_that_are_apart() -> None:
    for dtype in DTYPES:
        given = layer(6, 32, dtype)
        x = random(2, 3, 64, dtype=dtype)[..., 32:]
        result = product(x, given)
        assert result.shape == (2, 3, 6)
        assert close(result, exact(x, given))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 33), (200, 576)])
@pytest.mark.usefixtures("instructions")
def test_an_rms_norm_follows_its_rule(rows: int, width: int, offset: float, rounds: bool, dtype: torch.dtype) -> None:
    weight, epsilon = random(width, dtype=dtype), 1e-2
    x = random(rows, width, dtype=dtype) * torch.linspace(0.01, 3, rows, dtype=dtype).unsqueeze(1)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    gain = weight.float() + offset
    expected = (scaled.to(dtype).float() if rounds else scaled) * gain
    ours = rms_norm(x, weight, epsilon, offset, rounds)
    assert ours.shape == x.shape and ours.dtype is dtype
    assert close(ours, expected.double())
    assert torch.equal(ours[-1:], rms_norm(x[-1:], weight, epsilon, offset, rounds))


def test_rounding_before_the_gain_is_another_result() -> None:
    x, weight = random(8, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16)
    twice, once = (rms_norm(x, weight, 1e-6, 0.0, rounds) for rounds in (True, False))
    own = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    assert (twice != own).float().mean() < 0.01 < (once != own).float().mean()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 32, dtype=torch.float16),
        torch.zeros(4, 64)[:, ::2],
        torch.zeros(0, 32),
        torch.zeros(4, 32, device="meta"),
    ],
    ids=["dtype", "apart", "empty", "elsewhere"],
)
def test_the_core_takes_weights_that_it_can_read_in_place_only(tensor: torch.Tensor) -> None:
    assert not kernels.takes(tensor)


def test_the_core_refuses_a_width_that_it_would_read_beyond() -> None:
    with pytest.raises(BadArgument, match="inputs"):
        _core.linear(0, 1, 33, [((1, 0, 1, 1, 4), 1)], 0, True, False, 1)
    with pytest.raises(BadArgument, match="width"):
        _core.rms_norm(0, 0, 0, 1, 0, 1e-6, 0.0, False, False, 1)
