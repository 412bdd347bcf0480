from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from bench.tiny_models import VOCAB, tiny
from mainstem.runtime.kernels import decoders, functions, linear
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.segments import Segment
from tests.runtime.models.test_adapters import save
from tests.runtime.models.test_runner import full_pool, loaded

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE: dict[str, dict[str, Any]] = {"head_dim": 32, "hidden_size": 96}
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "more heads than hidden": ("llama", {"num_attention_heads": 6}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "mistral, windows": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "scaled rotation": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
}
LIMIT = {torch.float32: 2e-5, torch.bfloat16: 6e-2}  # of the spread of logits


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the layers that the kernel computes from now on."""
    rows: list[int] = []
    own = decoders._Kernel.compute

    def counting(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
        rows.append(x.shape[1])
        return own(self, x, given)

    monkeypatch.setattr(decoders._Kernel, "compute", counting)
    return rows


def tiny_of(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model whose gains and biases differ from each other, too."""
    model = tiny(family, **{**WHOLE, **changes})
    chance = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=chance)
    return model


def runner_of(model: PreTrainedModel) -> ModelRunner:
    return ModelRunner(replace(loaded(model), dtype=model.dtype), 64, 4)


def table(first: int) -> Any:
    """16 pages from `first` on, in scattered order."""
    return np.random.default_rng(first).permutation(np.arange(first, first + 16)).astype(np.int32)


def decoded(runner: ModelRunner, prompts: list[Any], adapter: Any = None) -> Iterator[torch.Tensor]:
    """Yields the logits of the last tokens of all prompts, computed one by one, after one prefill of the others."""
    size = len(prompts[0]) - 3
    tables = [(table(16 * i),) for i in range(len(prompts))]
    for prompt, pages in zip(prompts, tables, strict=True):
        runner.forward([Segment(prompt[:size], 0, pages, 0, adapter=adapter)])
    for at in range(size, size + 3):
        yield runner.forward(
            [
                Segment(prompt[at : at + 1], at, own, 1, adapter=adapter)
                for prompt, own in zip(prompts, tables, strict=True)
            ]
        )


def random_prompts(count: int, length: int = 40) -> list[Any]:
    return list(np.random.default_rng(3).integers(2, VOCAB, (count, length)).astype(np.int32))


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_computes_what_the_models_own_code_does(kind: str, dtype: torch.dtype, computed: list[int]) -> None:
    family, changes = KNOWN[kind]
    model = tiny_of(family, **changes).to(dtype)
    plain = copy.deepcopy(model).float()  # from which the own code is farther in bfloat16
    plain.set_attn_implementation("eager")
    prompts = random_prompts(3)
    runner = runner_of(model)
    assert runner.exchanged.layers == 3
    computed.clear()
    with torch.inference_mode():
        expected = plain(input_ids=torch.from_numpy(np.stack(prompts)).long()).logits.float()[:, -3:]
    found = torch.stack([*decoded(runner, prompts)], 1)
    assert computed == [37] * 9 + [3] * 9  # three layers, three prompts and three steps
    spread = float(expected.max() - expected.min())
    assert float((found - expected).abs().max()) / spread < LIMIT[dtype]


@pytest.mark.parametrize("kind", KNOWN)
def test_bfloat16_is_nearer_to_float32_than_the_models_own_code(kind: str) -> None:
    family, changes = KNOWN[kind]
    own = tiny_of(family, **changes).bfloat16()
    runner = runner_of(copy.deepcopy(own))
    prompts = random_prompts(3, 64)
    found = [runner.forward([Segment(prompt, 0, (table(0),), 64)]) for prompt in prompts]
    inputs = torch.from_numpy(np.stack(prompts)).long()
    with torch.inference_mode():
        rounded = own(input_ids=inputs).logits
        exact = own.float()(input_ids=inputs).logits
    ours, others = ((each - exact).abs().mean() for each in (torch.stack(found), rounded.float()))
    assert ours < 0.85 * others  # 0.6 to 0.77


def first_layer(model: Any, runner: ModelRunner, segments: list[Segment]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Returns the first layer, and what it was given and returned in a forward, [rows, hidden]."""
    seen: list[torch.Tensor] = []
    layer = model.model.layers[0]
    handle = layer.register_forward_hook(lambda layer, given, x: seen.extend((given[0], x)))
    runner.forward(segments)
    handle.remove()
    return layer, seen[0][0], seen[1][0]


def unrounded(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Computes a linear layer or a norm of the model by the core, without rounding its results."""
    if isinstance(module, torch.nn.Linear):
        return linear.products(x.bfloat16(), [linear.Weights(module.weight.data, None)], rounds=False)[0]
    return linear.rms_norm(x.float(), module.weight.data.float(), module.variance_epsilon, 0.0, False)


@pytest.mark.usefixtures("instructions")
def test_a_whole_layer_rounds_what_multiplies_and_nothing_else() -> None:
    model = tiny_of("qwen3").bfloat16()
    segments = [
        Segment(prompt, 0, (np.array([i], dtype=np.int32),), 1) for i, prompt in enumerate(random_prompts(12, 1))
    ]
    layer, x, found = first_layer(model, runner_of(model), segments)
    attention, mlp = layer.self_attn, layer.mlp
    value = unrounded(unrounded(x, layer.input_layernorm), attention.v_proj).bfloat16()
    heads = value.view(12, -1, 32).repeat_interleave(attention.num_key_value_groups, 1)  # each token sees itself
    x = x.float() + unrounded(heads.flatten(1), attention.o_proj)
    normed = unrounded(x, layer.post_attention_layernorm)
    opened = functions.silu(unrounded(normed, mlp.gate_proj)) * unrounded(normed, mlp.up_proj)
    assert found.dtype is torch.float32
    assert torch.equal(found, x + unrounded(opened, mlp.down_proj))


@pytest.mark.usefixtures("instructions")
def test_keys_are_rounded_when_they_are_rotated_and_values_once() -> None:
    model: Any = tiny_of("qwen3").bfloat16()
    runner = runner_of(model)
    layer, x, _ = first_layer(model, runner, [Segment(random_prompts(1)[0], 0, (np.arange(16, dtype=np.int32),), 1)])
    normed = unrounded(x, layer.input_layernorm)
    pool = full_pool(runner)
    keys, values = (part[0].flatten(0, 1)[: len(x)] for part in (pool.k, pool.v))
    own = unrounded(unrounded(normed, layer.self_attn.k_proj).view(len(x), -1, 32), layer.self_attn.k_norm).double()
    cosines, sines = (part[0, :, None] for part in model.model.rotary_emb(x[None], torch.arange(len(x))[None]))
    rotated = cosines * own + sines * torch.cat([-own[..., 16:], own[..., :16]], -1)
    same = keys.view_as(rotated) == rotated.bfloat16()
    assert same.float().mean() > 0.99  # float64 adds up otherwise
    assert torch.equal(values.flatten(1), unrounded(normed, layer.self_attn.v_proj).bfloat16())


def test_what_goes_from_layer_to_layer_is_not_rounded() -> None:
    model: Any = tiny("llama", num_hidden_layers=5, **WHOLE).bfloat16()
    layers = model.model.layers
    layers[3].mlp.register_forward_hook(lambda *given: None)  # so no kernel computes it
    runner = runner_of(model)
    seen: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, given, x: seen.append(x))
    runner.forward([Segment(random_prompts(1)[0], 0, (table(0),), 1)])
    assert [x.dtype for x in seen] == [torch.float32] * 2 + [torch.bfloat16] * 3
    assert not torch.equal(seen[0], seen[0].bfloat16().float())


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_are_one_call_a_layer(kind: str, dtype: torch.dtype, threads: int, computed: list[int]) -> None:
    family, changes = KNOWN[kind]
    # Wide enough for more than one part of the rows a thread.
    model = tiny_of(family, **{"hidden_size": 192, "intermediate_size": 320, **changes}).to(dtype)
    plain = copy.deepcopy(model).float()  # from which the own code is farther in bfloat16
    plain.set_attn_implementation("eager")
    prompts = random_prompts(3, 128)
    runner = ModelRunner(replace(loaded(model), dtype=dtype), 96, 4)
    computed.clear()
    torch.set_num_threads(threads)  # the fixture `one_thread` sets it back
    tables = [
        (np.random.default_rng(i).permutation(np.arange(32 * i, 32 * i + 32)).astype(np.int32),) for i in range(3)
    ]
    cuts = [(0, 50), (50, 128)]  # all prompts packed, twice
    found = [
        runner.forward(
            [Segment(prompt[a:b], a, pages, b - a) for prompt, pages in zip(prompts, tables, strict=True)]
        ).unflatten(0, (3, b - a))
        for a, b in cuts
    ]
    assert computed == [150] * 3 + [234] * 3
    with torch.inference_mode():
        expected = plain(input_ids=torch.from_numpy(np.stack(prompts)).long()).logits.float()
    error = (torch.cat(found, 1).float() - expected) / float(expected.max() - expected.min())
    assert float(error.abs().max()) < 2 * LIMIT[dtype]  # PyTorch's own attention in place of eager: 1.4 times
    assert float(error.square().mean().sqrt()) < LIMIT[dtype] / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_rows_than_the_mlp_takes_at_once_have_the_bits_of_each_prompt(dtype: torch.dtype) -> None:
    runner = ModelRunner(replace(loaded(tiny_of("llama").to(dtype)), dtype=dtype), 160, 4)
    prompts = random_prompts(5, 120)
    segments = [
        Segment(prompt, 0, (np.arange(32 * i, 32 * i + 32, dtype=np.int32),), 120) for i, prompt in enumerate(prompts)
    ]
    alone = [runner.forward([segment]) for segment in segments]
    assert torch.equal(runner.forward(segments), torch.cat(alone))  # 600 rows


def test_an_adapter_is_computed_by_its_own_layers(tmp_path: Path, computed: list[int]) -> None:
    model = tiny("llama", **WHOLE)
    plain = copy.deepcopy(model)
    runner = runner_of(model)
    runner.adapters.load("a", save(tmp_path / "a", 1, changes=WHOLE))
    from peft import PeftModel

    computed.clear()
    prompts = random_prompts(2)
    found = torch.stack([*decoded(runner, prompts, runner.adapters.get("a"))], 1)
    assert not computed
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "a"))
    with torch.inference_mode():
        expected = adapted(input_ids=torch.from_numpy(np.stack(prompts)).long()).logits[:, -3:]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert len([*decoded(runner, prompts)]) == 3
    assert computed == [37] * 6 + [2] * 9  # without it, the layers are as they were


# ---- what is not exchanged


def test_a_layer_with_other_code_is_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def clipped(self: Any, x: torch.Tensor) -> torch.Tensor:  # as some families do; seen in few numbers
        result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x).clamp(-8, 8)) * self.up_proj(x))
        return result

    decoders._known_code()  # of Llama as it is
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", clipped)
    assert runner_of(tiny("llama", **WHOLE)).exchanged.layers == 0


def test_another_rotation_is_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders._known_code()
    own = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: own(x))
    assert runner_of(tiny("llama", **WHOLE)).exchanged.layers == 0


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 16}, {"hidden_act": "gelu"}, {"hidden_act": "relu"}, {"intermediate_size": 100}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_kernel_cannot_compute_is_not_exchanged(changes: dict[str, Any]) -> None:
    assert runner_of(tiny("llama", **{**WHOLE, **changes})).exchanged.layers == 0


def test_a_layer_whose_parts_are_watched_is_not_exchanged() -> None:
    model: Any = tiny("llama", **WHOLE)
    seen: list[int] = []
    model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *given: seen.append(1))
    runner = runner_of(model)
    assert runner.exchanged.layers == 2
    seen.clear()
    assert len([*decoded(runner, random_prompts(1))]) == 3
    assert len(seen) == 4


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.bfloat16, 1.2)], ids=str)
@pytest.mark.parametrize("part", ["keys", "results"])
def test_a_layer_that_computes_something_else_is_not_exchanged(
    part: str, dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = decoders._Kernel.compute

    def off(self: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
        result = own(self, x, given)
        if self._index == 1:
            plan = given["paging"].plans["full"]
            (plan.pool.k[1].flatten(0, 1)[plan.slot_ids[0]] if part == "keys" else result).mul_(factor)
        return result

    monkeypatch.setattr(decoders._Kernel, "compute", off)
    exchanged = runner_of(tiny("llama", **WHOLE).to(dtype)).exchanged
    assert (exchanged.layers, exchanged.refused) == (2, 1)


def test_a_model_gets_its_own_code_back() -> None:
    model = tiny("llama", **WHOLE)
    runner_of(model)
    decoders.restore_layers(model)
    assert not any("kernel" in vars(layer) for layer in model.get_decoder().layers)
    runner_of(model)  # and again
    assert runner_of(model).exchanged.layers == 3  # a second runner of the same model


def test_a_copy_of_an_exchanged_model_computes_by_its_own_code_until_it_has_a_runner(computed: list[int]) -> None:
    model = tiny("llama", **WHOLE)
    other = copy.deepcopy(model)
    runner_of(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight, changed in zip(other.parameters(), copied.parameters(), strict=True):
            weight.mul_(1.2)  # so that the weights of the original would be noticed
            changed.copy_(weight)
    copied.set_attn_implementation("eager")
    prompts = random_prompts(2)
    computed.clear()
    with torch.inference_mode():
        inputs = torch.from_numpy(np.stack(prompts)).long()
        expected = other(input_ids=inputs).logits
        torch.testing.assert_close(copied(input_ids=inputs).logits, expected, atol=2e-4, rtol=0)
    assert not computed
    runner = runner_of(copied)
    assert runner.exchanged.layers == 3
    torch.testing.assert_close(torch.stack([*decoded(runner, prompts)], 1), expected[:, -3:], atol=2e-4, rtol=0)


@pytest.mark.model
def test_all_layers_of_the_real_model_are_one_call_in_bfloat16(smollm2: LoadedModel) -> None:
    """Numbers of its first token mostly cancel, so its own code rounds more than that of tiny models."""
    model = copy.deepcopy(smollm2.model).bfloat16()
    runner = ModelRunner(replace(smollm2, model=model, dtype=torch.bfloat16), 64, 16)
    assert (runner.exchanged.layers, runner.exchanged.refused) == (30, 0)
