"""What a model computes for a token: counted from its weights, and checked by hand."""

from __future__ import annotations

import pytest

from bench.tiny_models import tiny
from mainstem.runtime.models.flops import flops_of


def test_a_dense_model() -> None:
    flops = flops_of(tiny("llama"))  # three layers, 4 heads of 16, 2 of them for keys and values, a hidden size of 64
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3
    assert flops.token == 2 * 3 * layer
    assert flops.pair == 4 * 3 * 64
    assert flops.of(2) == 2 * flops.token + 3 * flops.pair


def test_experts_count_as_far_as_a_token_uses_them() -> None:
    one, all_ = (flops_of(tiny("mixtral", num_local_experts=4, num_experts_per_tok=used)).token for used in (1, 4))
    assert all_ - one == pytest.approx(2 * 3 * 3 * 3 * 64 * 96)


def test_windows_count_no_attention() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    assert flops_of(tiny("qwen3", layer_types=kinds, head_dim=16)).pair == 4 * 1 * 64
    assert flops_of(tiny("mamba", num_attention_heads=..., num_key_value_heads=..., intermediate_size=...)).pair == 0
