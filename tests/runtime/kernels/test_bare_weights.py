from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.tiny_models import tiny
from mainstem.runtime.kernels.bare_weights import turn_weights
from mainstem.runtime.kernels.by_row import ByRow
from mainstem.runtime.kernels.linear import DTYPES, Weights, product
from tests.runtime.kernels.test_exchanges import differ, exchanged, logits
from tests.runtime.kernels.test_kernels import random

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_by_weights_of_their_own_are_the_cores(dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((9, 40), (3, 24, 40), (24,)))
    expected = product(x, Weights(weight[0], bias))
    offs = torch.tensor([2, 2, 9], dtype=torch.int32)
    with torch.inference_mode(), ByRow():
        by_linear = torch.nn.functional.linear(x, weight[0], bias)
        by_addmm = torch.addmm(bias, x, weight[0].T)
        grouped = torch._grouped_mm(x, weight.mT, offs=offs)
    assert torch.equal(by_linear, expected) and torch.equal(by_addmm, expected)
    parts = [product(x[:2], Weights(weight[0], None)), product(x[2:], Weights(weight[2], None))]
    assert torch.equal(grouped, torch.cat(parts))


def test_weights_with_outputs_last_keep_their_shape_and_numbers() -> None:
    from transformers.pytorch_utils import Conv1D

    layer: Any = Conv1D(24, 40)
    before = layer.weight.data.clone()
    turn_weights(layer)
    assert torch.equal(layer.weight, before) and layer.weight.mT.is_contiguous()


@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
def test_a_model_with_such_modules_computes_the_same_and_rows_do_not_depend_on_others(family: str) -> None:
    model: Any = tiny(family)
    _, plain = exchanged(model)
    assert differ(logits(model), plain) < 1e-5
    modules = [module for module in model.modules() if type(module).__name__ in ("MixtralExperts", "Conv1D")]
    assert modules and all("kernel" in vars(module) for module in modules)


def test_a_bias_of_one_number_for_all_outputs_is_added_by_pytorch() -> None:
    x, weight, bias = torch.randn(3, 32), torch.randn(64, 32), torch.full((1,), 5.0)
    expected = torch.addmm(bias, x, weight.t())
    with ByRow():
        ours = torch.addmm(bias, x, weight.t())
    torch.testing.assert_close(ours, expected)
