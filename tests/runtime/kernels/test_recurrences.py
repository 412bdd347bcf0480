"""Scans and convolutions of recurrent layers: those of transformers, and the same bits wherever they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from mainstem.runtime.kernels import recurrences as ours

ROWS, TOKENS, HEADS, KEYS, VALUES = 2, 150, 4, 24, 37  # more tokens than two chunks; values leave a rest of a vector
CUTS = (1, 63, 64, 149)

pytestmark = pytest.mark.usefixtures("one_thread")


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + len(size)))


def delta_inputs(by_key: bool) -> dict[str, torch.Tensor]:
    heads = HEADS if by_key else HEADS // 2
    decays = (ROWS, TOKENS, HEADS, KEYS) if by_key else (ROWS, TOKENS, HEADS)
    return {
        "query": normal(ROWS, TOKENS, heads, KEYS, seed=1),
        "key": normal(ROWS, TOKENS, heads, KEYS, seed=2),
        "value": normal(ROWS, TOKENS, HEADS, VALUES, seed=3),
        "g": -normal(*decays, seed=4).abs(),
        "beta": normal(ROWS, TOKENS, HEADS, seed=5).sigmoid(),
    }


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_delta_rule_is_that_of_transformers(by_key: bool, dtype: torch.dtype) -> None:
    theirs: Callable[..., Any] = kimi.chunk_kimi_delta_attention if by_key else qwen.torch_chunk_gated_delta_rule
    given = {name: x if name == "g" else x.to(dtype) for name, x in delta_inputs(by_key).items()}
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    options["initial_state"] = normal(ROWS, HEADS, KEYS, VALUES, seed=6)
    out, state = ours.gated_delta_rule(**given, **options)
    expected, after = theirs(**given, **options)
    assert out.dtype is dtype and state is not None
    torch.testing.assert_close(out, expected, atol=1e-4 if dtype is torch.float32 else 2e-2, rtol=1e-2)
    torch.testing.assert_close(state, after, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_a_gated_delta_rule_that_is_cut_has_the_same_bits(by_key: bool, cut: int) -> None:
    given = delta_inputs(by_key)
    out, state = ours.gated_delta_rule(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    before = {name: x[:, :cut] for name, x in given.items()}
    after = {name: x[1:, cut:] for name, x in given.items()}  # of one row, by itself
    first, kept = ours.gated_delta_rule(**before, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert kept is not None and state is not None
    second, last = ours.gated_delta_rule(
        **after, initial_state=kept[1:], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert last is not None
    assert torch.equal(torch.cat([first[1:], second], 1), out[1:]) and torch.equal(last, state[1:])


def mamba_inputs(begin: int = 0, end: int = TOKENS) -> dict[str, torch.Tensor]:
    whole = {
        "hidden_states": normal(ROWS, TOKENS, HEADS, 16, seed=1),
        "dt": normal(ROWS, TOKENS, HEADS, seed=2),
        "B": normal(ROWS, TOKENS, 2, KEYS, seed=3),
        "C": normal(ROWS, TOKENS, 2, KEYS, seed=4),
    }
    return {name: x[:, begin:end] for name, x in whole.items()}


MAMBA = {"A": -normal(HEADS).exp(), "D": normal(HEADS, seed=1), "dt_bias": normal(HEADS, seed=2)}
OPTIONS: dict[str, Any] = {"dt_softplus": True, "chunk_size": 64, "return_final_states": True}


def test_the_scan_of_mamba_2_is_that_of_transformers_and_may_be_cut() -> None:
    out, state = ours.mamba2_scan(**mamba_inputs(), **MAMBA, **OPTIONS)
    expected, after = mamba2.mamba2_chunk_scan(**mamba_inputs(), **MAMBA, **OPTIONS)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(state, after, atol=1e-4, rtol=1e-3)
    for cut in CUTS:
        first, kept = ours.mamba2_scan(**mamba_inputs(0, cut), **MAMBA, **OPTIONS)
        second, last = ours.mamba2_scan(**mamba_inputs(cut), **MAMBA, **OPTIONS, initial_states=kept)
        assert torch.equal(torch.cat([first, second], 1), out) and torch.equal(last, state)


def test_a_step_of_mamba_2_has_the_bits_of_the_scan() -> None:
    out, after = ours.mamba2_scan(**mamba_inputs(), **MAMBA, **OPTIONS)
    _, state = ours.mamba2_scan(**mamba_inputs(0, TOKENS - 1), **MAMBA, **OPTIONS)
    last = {name: x[:, 0] for name, x in mamba_inputs(TOKENS - 1).items()}
    wide = (HEADS, last["hidden_states"].shape[-1])
    step = ours.mamba2_step(
        state,
        last["hidden_states"],
        last["dt"][..., None].expand(-1, -1, wide[1]),
        MAMBA["A"][:, None, None].expand(*wide, KEYS),
        last["B"],
        last["C"],
        MAMBA["D"][:, None].expand(wide),
        dt_bias=MAMBA["dt_bias"][:, None].expand(wide),
        dt_softplus=True,
    )
    assert torch.equal(step, out[:, -1]) and torch.equal(state, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_is_that_of_transformers_and_may_be_cut(dtype: torch.dtype, activation: str | None) -> None:
    x, weight, bias = normal(ROWS, 21, TOKENS).to(dtype), normal(21, 4).to(dtype), normal(21).to(dtype)
    whole = ours.convolve(x, weight, bias, activation)
    torch.testing.assert_close(whole, qwen.causal_conv1d_fn(x, weight, bias, activation), atol=1e-2, rtol=1e-2)
    state = x[..., 46:50].clone()
    steps = [ours.convolve_next(x[..., at : at + 1], state, weight, bias, activation) for at in range(50, 60)]
    assert torch.equal(torch.cat(steps, -1), whole[..., 50:60]) and torch.equal(state, x[..., 56:60])
