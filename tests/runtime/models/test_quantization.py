from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.serving import tiny_folder
from transformers import PreTrainedModel

from bench.tiny_models import tiny
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import GROUP, Int4, Weights, products
from mainstem.runtime.memory.tiers import identity_of
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.runtime.models.quantization import packed, quantize
from mainstem.runtime.parallel.ranks import Ranks
from mainstem.runtime.request import Request
from mainstem.settings.engine import EngineConfig, SamplingParams, StorageConfig, TierConfig
from tests.runtime.kernels.test_decoders import WHOLE, decoded, random_prompts, runner_of
from tests.runtime.kernels.test_exchanges import differ, exchanged, logits
from tests.runtime.kernels.test_kernels import DTYPES, ROUNDING, exact, random
from tests.runtime.models.test_adapters import save

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = 7


class Alone(torch.nn.Module):
    """A decoder of one layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=weight.dtype)
        self.layer.weight.data = weight.clone()

    def get_decoder(self) -> torch.nn.Module:
        return self


def quantized(weight: torch.Tensor) -> Weights:
    """Returns a weight as `quantize` leaves it, with its codes."""
    model = Alone(weight)
    quantize(model, "alone")
    return Weights(model.layer.weight.data, None, packed(model.layer))


def numbers_of(given: Int4) -> torch.Tensor:
    """Reads codes one by one, as `Int4` describes them."""
    outputs, groups = given.scales.shape
    words, found = given.codes.view(outputs, groups, 4).tolist(), torch.empty(outputs, groups, GROUP)
    firsts = (0, 2, 1, 3)  # the first place of each word; the others follow four apart
    for row, column, place in np.ndindex(outputs, groups, GROUP):
        word, of_word = firsts.index(place % 4), place // 4
        code = words[row][column][word] >> (4 * of_word) & 15
        found[row, column, place] = (code - 8) * given.scales[row, column]
    return found.view(outputs, groups * GROUP)


# ---- one layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_same_numbers_as_the_weight(dtype: torch.dtype) -> None:
    weight = random(40, 96, dtype=dtype) * torch.logspace(-12, 12, 40).unsqueeze(1).to(dtype)
    weight[3, 32:64] = 0
    weight[5] = 0
    weight[7, 10] = 1000  # one that is much larger than its neighbours
    given = quantized(weight)
    assert given.int4 is not None
    assert torch.equal(numbers_of(given.int4), given.weight.float())
    assert (given.weight[5] == 0).all() and (given.weight[3, 32:64] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(32, 70),
    groups=st.integers(1, 40),
    rows=st.integers(1, 12),
    threads=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_product_by_codes_is_the_layers(
    outputs: int, groups: int, rows: int, threads: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    layer = quantized(random(outputs, GROUP * groups, dtype=dtype, seed=seed))
    layer = layer._replace(bias=random(outputs, dtype=dtype, seed=seed) if bias else None)
    x = random(rows, GROUP * groups, dtype=dtype, seed=seed + 1)
    torch.set_num_threads(threads)
    try:
        ours = kernels.product(x, layer)
    finally:
        torch.set_num_threads(1)
    expected = exact(x, layer)
    assert float((ours - expected).abs().max() / expected.abs().max()) < ROUNDING[dtype]


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_weight_give_the_same_bits(dtype: torch.dtype) -> None:
    layer = quantized(random(299, 576, dtype=dtype))
    x = random(FEW + 1, 576, dtype=dtype)
    by_weight = products(x, [layer._replace(int4=None)])[0]
    for rows in range(1, FEW + 2):
        assert torch.equal(products(x[:rows], [layer])[0], by_weight[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fewer_than_eight_rows_read_the_codes_and_more_the_weight(dtype: torch.dtype) -> None:
    layer = quantized(random(64, 96, dtype=dtype))
    x = random(FEW + 1, 96, dtype=dtype)
    before = [kernels.product(x[:rows], layer) for rows in range(1, FEW + 2)]
    assert layer.int4 is not None
    layer.int4.scales.mul_(2)
    after = [kernels.product(x[:rows], layer) for rows in range(1, FEW + 2)]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False] * FEW + [True]


def test_layers_of_a_call_are_computed_by_codes_only_if_all_have_them() -> None:
    first, second = (quantized(random(64, 64, dtype=torch.bfloat16, seed=seed)) for seed in (1, 2))
    x = random(2, 64, dtype=torch.bfloat16)
    assert first.int4 is not None
    plain = [products(x, [layer._replace(int4=None)])[0] for layer in (first, second)]
    first.int4.scales.mul_(2)
    mixed = products(x, [first, second._replace(int4=None)])
    assert all(torch.equal(ours, own) for ours, own in zip(mixed, plain, strict=True))
    assert not torch.equal(products(x, [first, second])[0], plain[0])


def test_a_scale_loses_less_than_that_of_the_largest_number() -> None:
    weight = random(64, 576)
    groups = weight.view(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True) / 7
    simple = ((groups / scale).round() * scale - groups).square().mean()
    ours = (quantized(weight).weight - weight).square().mean()
    assert ours < 0.85 * simple < 0.01


def test_a_weight_is_quantized_a_part_at_a_time_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(70, 96)
    whole = quantized(weight)
    monkeypatch.setattr("mainstem.runtime.models.quantization._AT_ONCE", 1000)
    parts = quantized(weight)
    assert whole.int4 is not None and parts.int4 is not None
    assert torch.equal(whole.weight, parts.weight)
    assert torch.equal(whole.int4.codes, parts.int4.codes) and torch.equal(whole.int4.scales, parts.int4.scales)


# ---- models


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows_computes_with_the_same_weights(dtype: torch.dtype) -> None:
    model: Any = tiny("llama").to(dtype)
    plain, head = copy.deepcopy(model), model.lm_head.weight.clone()
    quantize(model, "tiny")
    assert differ(logits(model), logits(plain)) > 1e-2, "there is a loss"
    assert torch.equal(model.lm_head.weight, head), "the head stays as it is"
    found, own = exchanged(model)
    assert (found.linears, found.refused) == (22, 0)
    limit = 1e-5 if dtype is torch.float32 else 4e-2
    for rows in range(1, 13):
        prompt = torch.arange(2, 2 + rows).unsqueeze(0)
        assert differ(logits(model, prompt), logits(_without_codes(model), prompt)) < limit, rows
    assert differ(logits(model), own) < limit


def _without_codes(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    for module in other.modules():
        for name in ("forward", "kernel", "int4"):
            vars(module).pop(name, None)
    return other


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_layers_read_codes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny("llama", **WHOLE, attention_bias=True).to(dtype)
    quantize(model, "tiny")
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    runner = runner_of(model)
    assert (runner.exchanged.layers, runner.exchanged.refused) == (3, 0)
    for count in (1, 3, 4):  # each has 16 of 64 pages
        prompts = random_prompts(count)
        with torch.inference_mode():
            expected = plain(input_ids=torch.from_numpy(np.stack(prompts)).long()).logits.float()[:, -3:]
        found = torch.stack([*decoded(runner, prompts)], 1)
        assert differ(found, expected) < (2e-5 if dtype is torch.float32 else 3e-2)
    before = torch.stack([*decoded(runner, random_prompts(1))])
    for layer in model.model.layers:
        layer.mlp.down_proj.int4.scales.mul_(2)
    assert differ(torch.stack([*decoded(runner, random_prompts(1))]), before) > 1e-2, "the codes are what is read"


def test_codes_of_other_weights_are_not_computed_with() -> None:
    model: Any = tiny("llama")
    quantize(model, "tiny")
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)
    found, plain = exchanged(model)
    assert found.refused == 1
    assert differ(logits(model), plain) < 1e-5


def test_an_adapter_and_its_base_compute_over_quantized_weights(tmp_path: Path) -> None:
    model: Any = tiny("llama", **WHOLE)
    quantize(model, "tiny")
    plain = copy.deepcopy(model)
    runner = runner_of(model)
    runner.adapters.load("a", save(tmp_path / "a", 1, changes=WHOLE))
    from peft import PeftModel

    prompts = random_prompts(2)
    inputs = torch.from_numpy(np.stack(prompts)).long()
    with torch.inference_mode():
        base = plain(input_ids=inputs).logits[:, -3:]
        adapted = PeftModel.from_pretrained(plain, str(tmp_path / "a"))(input_ids=inputs).logits[:, -3:]
    found = torch.stack([*decoded(runner, prompts, runner.adapters.get("a"))], 1)
    torch.testing.assert_close(found, adapted, atol=2e-4, rtol=0)
    torch.testing.assert_close(torch.stack([*decoded(runner, prompts)], 1), base, atol=2e-4, rtol=0)


def test_a_layer_that_cannot_be_quantized_stays_as_it_is_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny("llama")
    first, second, third = model.model.layers
    first.mlp.down_proj = torch.nn.Linear(33, 64)
    second.mlp.gate_proj = torch.nn.Linear(64, 31)
    third.mlp.up_proj.weight.data[0, 0] = torch.nan
    kept = [first.mlp.down_proj, second.mlp.gate_proj, third.mlp.up_proj]
    before = [layer.weight.clone() for layer in kept]
    with caplog.at_level(logging.WARNING):
        quantize(model, "tiny")
    assert all(packed(layer) is None for layer in kept) and packed(first.mlp.up_proj) is not None
    assert all(
        torch.equal(layer.weight.nan_to_num(9), own.nan_to_num(9)) for layer, own in zip(kept, before, strict=True)
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "tiny: not quantized: 3 of 21 linear layers: layers.0.mlp.down_proj, layers.1.mlp.gate_proj, "
        "layers.2.mlp.up_proj"
    )


def test_layers_that_share_a_weight_share_its_codes() -> None:
    model: Any = tiny("llama")
    first, second, _ = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    quantize(model, "tiny")
    shared = packed(second.mlp.up_proj)
    assert shared is packed(first.mlp.up_proj) is not None
    assert torch.equal(numbers_of(shared), first.mlp.up_proj.weight)


# ---- loading, serving, storing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("llama", tmp_path_factory.mktemp("model") / "tiny", **WHOLE)


def load(folder: Path, quantization: str = "int4") -> LoadedModel:
    return load_model(str(folder), dtype="float32", quantization=quantization)


def test_a_model_is_quantized_to_the_same_each_time(folder: Path) -> None:
    stages: list[str] = []
    first = load_model(
        str(folder), dtype="float32", quantization="int4", progress=lambda stage, done, total: stages.append(stage)
    )
    assert stages[-2:] == ["quantize", "quantize"]
    second, plain = load(folder), load(folder, "none")
    weights = [identity_of(made, 4, "content").weights for made in (first, second, plain)]
    assert weights[0] == weights[1] != weights[2]


def test_what_cannot_be_computed_with_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArgument, match="quantization = 'int3': must be one of none, int4"):
        load(folder, "int3")
    with pytest.raises(BadArgument, match="none with dtype float16: float32 or bfloat16"):
        load_model(str(folder), dtype="float16", quantization="int4")
    with pytest.raises(BadArgument, match="none with several ranks"):
        load_model(str(folder), quantization="int4", ranks=Ranks(size=2))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(BadArgument, match="none on a GPU"):
            load(folder)


def test_a_model_without_a_layer_to_quantize_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "head_dim": 16, "intermediate_size": 40, "num_attention_heads": 3}
    odd = tiny_folder("llama", tmp_path / "odd", **sizes, num_key_value_heads=1)
    with pytest.raises(UnsupportedModel, match="no linear layer that can be quantized"):
        load(odd)


def answers(engine: Engine, prompts: Sequence[Any], tokens: int = 12) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    streams = [engine.submit(Request(np.array(prompt), params)) for prompt in prompts]
    return [stream.result().tokens for stream in streams]


def test_an_answer_does_not_depend_on_the_number_of_requests(folder: Path) -> None:
    prompts = random_prompts(FEW + 2)
    with Engine(load(folder), EngineConfig(pages=300, page_size=4, draft_tokens=0)) as engine:
        together = answers(engine, prompts)
    with Engine(load(folder), EngineConfig(pages=300, page_size=4, cache=False)) as engine:
        assert [answers(engine, [prompt])[0] for prompt in prompts] == together


def test_stored_pages_of_one_precision_are_never_found_by_the_other(folder: Path, tmp_path: Path) -> None:
    tiers = TierConfig(
        storage=f"file:{tmp_path / 'store'}", limits=StorageConfig(prefetch="wait_complete", prefetch_min_tokens=0)
    )
    config = EngineConfig(pages=100, page_size=4, tiers=tiers)
    prompt = Request(np.array(random_prompts(1)[0]), SamplingParams(max_tokens=1, ignore_eos=True))

    def cached(quantization: str) -> int:
        with Engine(load(folder, quantization), config) as engine:
            return engine.submit(prompt).result().usage.cached_tokens

    assert [cached(each) for each in ("none", "int4")] == [0, 0]
    assert cached("none") > 0 and cached("int4") > 0
