import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from bench.tiny_models import FAMILIES, HYBRIDS, tiny
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.exchanges import Exchanged, exchange, restore, sharing

PROMPT = torch.arange(2, 10).unsqueeze(0)
PLAIN = Exchanged()


def logits(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=prompt, use_cache=False).logits.float()
    return result


def exchanged(model: PreTrainedModel) -> tuple[Exchanged, torch.Tensor]:
    """Exchanges the modules of a model; returns what was exchanged, and logits of its own code."""
    with sharing(model) as given:
        plain = logits(model)
    return exchange(model, given), plain


def differ(ours: torch.Tensor, plain: torch.Tensor) -> float:
    return float((ours - plain).abs().max() / (plain.max() - plain.min()))


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the numbers of layers of the calls of the core, which are counted from now on."""
    calls: list[int] = []
    own = kernels.products

    def counting(x: torch.Tensor, layers: Sequence[kernels.Weights], **named: bool) -> list[torch.Tensor]:
        calls.append(len(layers))
        return own(x, layers, **named)

    monkeypatch.setattr(kernels, "products", counting)
    return calls


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("llama")


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exchanged_model_computes_what_its_own_code_does(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, **{**FAMILIES, **HYBRIDS}[family]).to(dtype)
    found, plain = exchanged(model)
    limit = 1e-5 if dtype is torch.float32 else 4e-2
    assert differ(logits(model), plain) < limit
    assert found.linears > 0 and found.refused == 0
    strides = [weight.stride() for weight in model.parameters()]
    restore(model)
    # PyTorch may add up the products of a weight that was turned for the core in another order. It stays turned.
    unturned = strides == [weight.stride() for weight in tiny(family, **{**FAMILIES, **HYBRIDS}[family]).parameters()]
    assert torch.equal(logits(model), plain) if unturned else differ(logits(model), plain) < limit
    assert unturned or family == "gpt2"


@pytest.mark.parametrize(("family", "norms"), [("llama", 7), ("mistral", 7), ("qwen3", 13), ("gemma3_text", 19)])
def test_the_norms_of_a_family_are_recognized_by_what_they_compute(family: str, norms: int) -> None:
    model = tiny(family, head_dim=32)
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, mean=1.0, std=0.3)
    found, plain = exchanged(model)
    assert (found.norms, found.refused) == (norms, 0)
    assert differ(logits(model), plain) < 1e-5


def test_what_is_given_the_same_is_one_call(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found, plain = exchanged(model)
    calls = calls_of(monkeypatch)
    assert differ(logits(model), plain) < 1e-5
    assert calls == [3, 1, 2, 1] * 3 + [1]  # queries, keys and values; gate and up; the head
    assert (found.linears, found.shared) == (22, 9)


def test_logits_are_not_rounded(model: PreTrainedModel) -> None:
    own = model.bfloat16()
    _, plain = exchanged(own)
    with torch.inference_mode():
        found = own(input_ids=PROMPT, use_cache=False).logits
    assert found.dtype is torch.float32
    assert torch.equal(plain, plain.bfloat16().float()) and not torch.equal(found, found.bfloat16().float())
    assert differ(found, plain) < 4e-2
    with torch.inference_mode():
        assert torch.equal(copy.deepcopy(own)(input_ids=PROMPT, use_cache=False).logits, found)


def test_nothing_is_kept_between_forwards(model: PreTrainedModel) -> None:
    exchanged(model)
    for prompt in (PROMPT, PROMPT + 20, PROMPT):
        ours = logits(model, prompt)
        restore(model)
        assert differ(ours, logits(model, prompt)) < 1e-5
        exchanged(model)


def test_a_norm_that_no_rule_reproduces_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "rms_norm", lambda x, *rule: x)
    found, plain = exchanged(model)
    assert found == Exchanged(22, 0, 9, 7)
    assert differ(logits(model), plain) < 1e-5


def test_a_layer_that_takes_its_input_changed_is_given_it_changed(model: PreTrainedModel) -> None:
    """Queries are computed for x; then x is another tensor, and keys must not be those of before."""
    exchanged(model)
    attention: Any = model.model.layers[0].self_attn
    x = torch.randn(1, 3, 64)
    with torch.inference_mode():
        attention.q_proj(x)
        other = x + 1
        assert differ(attention.k_proj(other), nn.functional.linear(other, attention.k_proj.weight)) < 1e-5


def test_weights_and_their_names_are_what_they_were(model: PreTrainedModel) -> None:
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.state_dict().items()}
    exchanged(model)
    after = model.state_dict()
    assert [*after] == [*before]
    for name, (place, weight) in before.items():
        assert after[name].data_ptr() == place and torch.equal(after[name], weight)


def test_changed_weights_are_used(model: PreTrainedModel) -> None:
    _, plain = exchanged(model)
    layer: Any = model.model.layers[1]
    for weight in (layer.mlp.up_proj.weight, layer.input_layernorm.weight):
        weight.data.mul_(2)
    ours = logits(model)
    assert differ(ours, plain) > 1e-2
    restore(model)
    assert differ(ours, logits(model)) < 1e-5


def test_a_copy_of_a_model_computes_with_its_own_weights(model: PreTrainedModel) -> None:
    _, plain = exchanged(model)
    other: Any = copy.deepcopy(model)
    other.model.layers[0].self_attn.k_proj.weight.data.zero_()
    other.model.norm.weight.data.mul_(3)
    assert differ(logits(model), plain) < 1e-5
    assert differ(logits(other), plain) > 1e-2
    changed = logits(other)
    restore(other)
    assert differ(changed, logits(other)) < 1e-5


def test_gradients_are_those_of_the_models_own_code(model: PreTrainedModel) -> None:
    exchanged(model)
    weights = [model.model.layers[0].self_attn.q_proj.weight, model.model.norm.weight]  # type: ignore[union-attr]
    ours = torch.autograd.grad(model(input_ids=PROMPT).logits.sum(), weights)
    restore(model)
    for one, other in zip(ours, torch.autograd.grad(model(input_ids=PROMPT).logits.sum(), weights), strict=True):
        torch.testing.assert_close(one, other)


class _Quantized(nn.Linear):
    """A layer that knows itself what it computes."""


def test_other_kinds_of_layers_stay_as_they_are(model: PreTrainedModel) -> None:
    layer: Any = model.model.layers[0]
    layer.mlp.down_proj.__class__ = _Quantized
    layer.self_attn.o_proj.forward = lambda x: torch.zeros_like(x)
    found, plain = exchanged(model)
    assert found.linears == 20
    assert differ(logits(model), plain) < 1e-5


def test_a_dtype_without_kernels_stays_as_it_is() -> None:
    assert exchanged(tiny("llama").to(torch.float64))[0] == PLAIN


def test_hooks_of_a_layer_still_run(model: PreTrainedModel) -> None:
    exchanged(model)
    seen: list[torch.Size] = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *call: seen.append(call[2].shape))  # type: ignore[union-attr]
    logits(model)
    assert seen == [(1, 8, 96)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_norm_rounds_when_its_family_does(family: str) -> None:
    model = tiny(family, head_dim=32).to(torch.bfloat16)
    norm: Any = model.model.norm
    nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        own = norm(x)
        exchanged(model)
        assert "forward" in vars(norm)
        assert (norm(x) != own).float().mean() < 0.01
