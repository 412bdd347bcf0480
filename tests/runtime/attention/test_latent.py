"""Latent attention: which queries are absorbed. `test_page_attention.py` compares absorbed and expanded ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bench.tiny_models import LATENT, tiny
from mainstem.runtime.attention.latent import Latents

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 5


def attention_of(family: str) -> Any:
    return copy.deepcopy(tiny(family, **LATENT[family]).get_decoder().layers[1].self_attn)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def latents_of(module: Any) -> Latents:
    given = random(1, 1, TOKENS, 32), random(1, 1, TOKENS, 8)
    key, value = (x[0].transpose(0, 1) for x in module.expand_kv(*given))
    return Latents(module, given, key, value)


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
