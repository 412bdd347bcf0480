from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.serving import tiny_folder
from transformers import PreTrainedModel

from bench.tiny_models import tiny
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.linear import GROUP, Codes, Weights, product, products
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

    def __init__(self, weight: torch.Tensor, name: str) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=weight.dtype)
        layer.weight.data = weight.clone()
        self.add_module(name, layer)

    def get_decoder(self) -> torch.nn.Module:
        return self


def quantized(weight: torch.Tensor, name: str = "layer") -> Weights:
    """Returns a weight as `quantize` leaves it, with its codes."""
    model = Alone(weight, name)
    quantize(model, "alone")
    layer: Any = model.get_submodule(name)
    return Weights(layer.weight.data, None, packed(layer))


def from_file(outputs: int, inputs: int, dtype: torch.dtype, kind: str = "Q4_1", seed: int = 0) -> torch.Tensor:
    """Returns a weight as it is read from a GGUF file with random codes, scales and minima."""
    form = GGMLQuantizationType[kind]
    numbers, size = GGML_QUANT_SIZES[form]
    drawn = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (outputs * inputs // numbers, size), generator=drawn, dtype=torch.uint8)
    factors = {"Q4_0": [1.0], "Q4_1": [1.0, -8.0], "Q4_K": [1 / 32, 1 / 4]}[kind]  # of scales and minima
    halves = ((0.5 + torch.rand(len(blocks), len(factors), generator=drawn)) / 50 * torch.tensor(factors)).half()
    blocks[:, : 2 * len(factors)] = halves.view(torch.uint8)
    if kind == "Q4_K":
        blocks[:, 4:12] |= 0xA0  # factors of 6 bits are 32 or more, so that scales and minima fit each other
    return torch.from_numpy(dequantize(blocks.numpy(), form)).view(outputs, inputs).to(dtype)


def layer_of(kind: str, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Returns a layer of 4 bits, whose numbers are those of a file ("found") or the nearest, or of 8 bits."""
    if kind == "found":
        return quantized(from_file(outputs, inputs, dtype, seed=seed))
    return quantized(random(outputs, inputs, dtype=dtype, seed=seed), "mlp" if kind == "nearest" else "layer")


def numbers_of(given: Codes, dtype: torch.dtype) -> torch.Tensor:
    """Reads codes one by one, as `Codes` describes them."""
    outputs, groups, bits = given.words.shape
    codes = np.empty((outputs, groups, GROUP), np.float32)
    for row, column, place in np.ndindex(outputs, groups, GROUP):
        if bits == 4:
            word, at = place % 8 // 2, 16 * (place % 2) + place // 8 * 4
        else:
            word, at = place // 2 % 4 + 4 * (place % 2), place // 8 * 8
        codes[row, column, place] = int(given.words[row, column, word]) >> at & 2**bits - 1
    scale = given.scales[..., :1]
    minimum = given.scales[..., 1:] if bits == 4 else -128 * scale
    return (torch.from_numpy(codes) * scale + minimum).view(outputs, groups * GROUP).to(dtype)


KINDS = {"found": 4, "nearest": 4, "8 bits": 8}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


# ---- one layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "bits"), [("mlp", 4), ("layer", 8)])
def test_codes_are_the_same_numbers_as_the_weight(name: str, bits: int, dtype: torch.dtype) -> None:
    weight = random(100, 96, dtype=dtype) * torch.logspace(-12, 12, 100).unsqueeze(1).to(dtype)
    weight[3, 32:64] = 0
    weight[5] = 0
    weight[7, 10] = 1000  # one that is much larger than its neighbours
    weight[8] *= 1e-30
    given = quantized(weight, name)
    assert given.codes is not None and given.codes.bits == bits
    assert torch.equal(numbers_of(given.codes, dtype), given.weight)
    assert (given.weight[5] == 0).all() and (given.weight[3, 32:64] == 0).all() and (given.weight[8] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_numbers_of_a_file_of_4_bits_are_found_again_to_the_last_bit(kind: str, dtype: torch.dtype) -> None:
    weight = from_file(160, 320, dtype, kind)
    weight[3] = weight[4, 0]
    weight[5] = 0
    given = quantized(weight)
    assert given.codes is not None and given.codes.bits == 4
    assert torch.equal(given.weight, weight)
    assert torch.equal(numbers_of(given.codes, dtype), weight)
    shifted = quantized(weight.roll(GROUP // 2, 1))
    assert shifted.codes is not None and shifted.codes.bits == 8, "groups that are not the file's are spaced otherwise"


def test_groups_of_a_file_that_are_not_equally_spaced_are_the_nearest_of_4_bits() -> None:
    weight = from_file(100, 320, torch.bfloat16)
    weight[7, :64] = random(64, dtype=torch.bfloat16)
    given = quantized(weight)
    assert given.codes is not None and given.codes.bits == 4
    same = given.weight == weight
    assert same[7, 64:].all() and same[:7].all() and same[8:].all()
    assert 0 < (given.weight[7, :64] - weight[7, :64]).abs().max() < 0.3


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(32, 70),
    groups=st.integers(1, 40),
    rows=st.integers(1, 12),
    threads=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["found", "8 bits"]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_product_by_codes_is_the_layers(
    outputs: int, groups: int, rows: int, threads: int, dtype: torch.dtype, kind: str, bias: bool, seed: int
) -> None:
    layer = layer_of(kind, outputs, GROUP * groups, dtype, seed)
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
@EACH_KIND
def test_codes_and_weight_give_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    layer = layer_of(kind, 299, 288, dtype)
    assert layer.codes is not None and layer.codes.bits == KINDS[kind]
    x = random(1000, 288, dtype=dtype)
    by_weight = products(x, [layer._replace(codes=None)])[0]
    for rows in range(1, FEW + 2):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(products(x[:rows], [layer])[0], by_weight[:rows])
    torch.set_num_threads(1)
    assert torch.equal(products(x, [layer])[0], by_weight)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@EACH_KIND
def test_every_code_is_the_number_of_the_weight(kind: str, dtype: torch.dtype) -> None:
    """A row of x with a single 1 reads one number of each output: no sum hides a difference."""
    layer = layer_of(kind, 200, 128, dtype)
    x = torch.eye(128, dtype=dtype)
    found = torch.cat([product(row.unsqueeze(0), layer) for row in x])
    assert torch.equal(found, layer.weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
@EACH_KIND
def test_fewer_than_eight_rows_read_the_codes_and_more_the_weight(kind: str, dtype: torch.dtype) -> None:
    layer = layer_of(kind, 100, 96, dtype)
    x = random(FEW + 1, 96, dtype=dtype)
    before = [kernels.product(x[:rows], layer) for rows in range(1, FEW + 2)]
    assert layer.codes is not None
    layer.codes.scales.mul_(2)
    after = [kernels.product(x[:rows], layer) for rows in range(1, FEW + 2)]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False] * FEW + [True]


@pytest.mark.usefixtures("instructions")
def test_layers_of_a_call_are_computed_by_codes_only_if_all_have_them() -> None:
    first, second = (layer_of(kind, 64, 64, torch.bfloat16) for kind in ("found", "8 bits"))
    x = random(2, 64, dtype=torch.bfloat16)
    assert first.codes is not None
    plain = [products(x, [layer._replace(codes=None)])[0] for layer in (first, second)]
    assert all(torch.equal(*both) for both in zip(products(x, [first, second]), plain, strict=True))
    first.codes.scales.mul_(2)
    mixed = products(x, [first, second._replace(codes=None)])
    assert all(torch.equal(ours, own) for ours, own in zip(mixed, plain, strict=True))
    assert not torch.equal(products(x, [first, second])[0], plain[0])


def test_codes_of_other_bits_or_groups_are_refused() -> None:
    layer = quantized(random(64, 96))
    assert layer.codes is not None
    with pytest.raises(BadArgument, match="bits = '5': must be 4 or 8"):
        product(random(1, 96), layer._replace(codes=layer.codes._replace(words=layer.codes.words[..., :5])))
    with pytest.raises(BadArgument, match="inputs = '33': must be a multiple of 32"):
        product(random(1, 33), Weights(random(64, 33), None, layer.codes))


def test_4_bits_lose_less_than_the_range_of_a_group_would() -> None:
    weight = random(96, 64)
    groups = weight.view(-1, GROUP)
    low, high = groups.aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    simple = (((groups - low) / scale).round() * scale + low - groups).square().mean()
    ours = (quantized(weight, "mlp").weight - weight).square().mean()
    assert ours < 0.9 * simple < 0.01


@pytest.mark.parametrize(("name", "shape", "bits"), [
    ("mlp", (64, 32), 4), ("mlp", (32, 64), 8), ("mlp", (64, 64), 8), ("attention", (64, 32), 8),
])  # fmt: skip
def test_layers_that_widen_in_an_mlp_have_4_bits_and_others_8(name: str, shape: tuple[int, int], bits: int) -> None:
    codes = quantized(random(*shape), name).codes
    assert codes is not None and codes.bits == bits


@EACH_KIND
def test_a_weight_is_quantized_a_part_at_a_time_to_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = layer_of(kind, 100, 96, torch.float32)
    monkeypatch.setattr("mainstem.runtime.models.quantization._AT_ONCE", 1000)
    parts = layer_of(kind, 100, 96, torch.float32)
    assert whole.codes is not None and parts.codes is not None
    assert torch.equal(whole.weight, parts.weight)
    assert torch.equal(whole.codes.words, parts.codes.words) and torch.equal(whole.codes.scales, parts.codes.scales)


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
        for name in ("forward", "kernel", "codes"):
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
        layer.mlp.down_proj.codes.scales.mul_(2)
    assert differ(torch.stack([*decoded(runner, random_prompts(1))]), before) > 1e-2, "the codes are what is read"


def test_codes_of_other_weights_are_not_computed_with() -> None:
    model: Any = tiny("llama")
    quantize(model, "tiny")
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)
    found, plain = exchanged(model)
    assert found.refused == 1
    assert packed(model.model.layers[0].mlp.down_proj) is None and packed(model.model.layers[0].mlp.up_proj) is not None
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
    assert torch.equal(numbers_of(shared, torch.float32), first.mlp.up_proj.weight)


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
