"""Latent attention: absorbed queries find what expanded keys and values give, and who is absorbed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.tiny_models import LATENT, tiny
from mainstem.runtime.attention.latent import Latents

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, PREFIX = 5, 13


def attention_of(family: str) -> Any:
    return copy.deepcopy(tiny(family, **LATENT[family]).get_decoder().layers[1].self_attn)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents_of(module: Any) -> Latents:
    given = random(1, 1, TOKENS, 32), random(1, 1, TOKENS, 8)
    key, value = (x[0].transpose(0, 1) for x in module.expand_kv(*given))
    return Latents(module, given, key, value)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1) for x in (query, keys, values))
    return scaled_dot_product_attention(q, k, v, scale=0.3).transpose(0, 1)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_absorbed_queries_find_what_expanded_keys_and_values_give(family: str) -> None:
    latents = latents_of(attention_of(family))
    query, kept = random(TOKENS, 4, 24), random(PREFIX, 1, 40)
    expanded = attend(query, *latents.expand(kept))
    heads = kept.expand(-1, 4, -1)
    absorbed = latents.project(attend(latents.absorb(query), heads, heads[..., : latents.rank]))
    assert absorbed.shape == expanded.shape == (TOKENS, 4, 12)
    torch.testing.assert_close(absorbed, expanded, atol=2e-6, rtol=1e-5)


def test_what_is_kept_expands_to_what_the_layer_made_of_it() -> None:
    latents = latents_of(attention_of("deepseek_v3"))
    assert latents.kept.shape == (TOKENS, 1, 40)
    keys, values = latents.expand(latents.kept)
    assert torch.equal(keys, latents.key)
    assert torch.equal(values, latents.value)


def test_few_tokens_are_absorbed_and_many_expand() -> None:
    """A pair costs 72 numbers absorbed and 36 expanded; expanding a position costs 32 x 28 for each head."""
    latents = latents_of(attention_of("deepseek_v3"))
    assert [tokens for tokens in range(1, 100) if latents.absorbs(tokens)] == list(range(1, 25))


class _Quantized(torch.nn.Linear):
    pass


@pytest.mark.parametrize("layer", [_Quantized(32, 112, bias=False), torch.nn.Linear(32, 112)], ids=["kind", "bias"])
def test_only_a_plain_projection_is_absorbed(layer: torch.nn.Module) -> None:
    module = attention_of("deepseek_v3")
    module.kv_b_proj = layer
    assert not latents_of(module).absorbs(1)
