"""Attention over the tree of a batch, against attention request by request, which `test_attention.py` tests.

Every shape is drawn for both kernels: Triton's interpreter computes the one for GPUs, and `make test-gpu` compiles it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import DEVICE

from bench.tiny_models import LATENT, tiny
from mainstem.runtime.attention.latent import Latents
from mainstem.runtime.attention.paged import Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.attention.tree import TreeAttention
from mainstem.runtime.memory.kv import KVPool, KVShape
from tests.rigs.batches import Batch, batches
from tests.rigs.interpreted import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 8
LAYER = 1
SCALE = 0.3
SHAPE = KVShape(2, KV_HEADS, HEAD_DIM, HEAD_DIM)
OTHER_VALUES = SHAPE._replace(value_dim=5)
EXACT = {"atol": 3e-6, "rtol": 1e-5} if DEVICE == "cpu" else {"atol": 2e-5, "rtol": 2e-5}

SINKS = torch.tensor([3.0, -2.0, 0.0, 1.0, 5.0, -1.0])


def new_rows(tokens: int, shape: KVShape, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    sizes = (KV_HEADS * GROUP, shape.head_dim), (KV_HEADS, shape.head_dim), (KV_HEADS, shape.value_dim)
    return [torch.randn(tokens, *size, generator=chance).to(dtype) for size in sizes]


@pytest.fixture(scope="module", params=["tree", pytest.param("triton", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest) -> Attention:
    return TreeAttention() if request.param == "tree" else triton_attention()


def attend(
    kernel: Attention,
    batch: Batch,
    new: list[torch.Tensor],
    scale: float = SCALE,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Both layers of the pool compute with one plan; returns the second's results. Only what is tested needs a GPU."""
    device = "cpu" if type(kernel) is SdpaAttention else DEVICE
    with batch.settings():
        batch, new = batch.on(device), [rows.to(device) for rows in new]
        sinks = None if sinks is None else sinks.to(device)
        plan = plan_batch([batch.written(extent) for extent in batch.extents], batch.pool, batch.component)
        for layer in range(LAYER):
            kernel.attend(layer, new[0].flip(0), new[1], new[2], scale, plan, sinks, softcap)
        return kernel.attend(LAYER, new[0], new[1], new[2], scale, plan, sinks, softcap).cpu()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.one_of(batches(SHAPE), batches(OTHER_VALUES)),
    st.sampled_from([None, SINKS]),
    st.sampled_from([None, None, 0.5, 20.0]),
)
def test_results_are_those_request_by_request(
    kernel: Attention, batch: Batch, sinks: torch.Tensor | None, softcap: float | None
) -> None:
    new = new_rows(batch.tokens, batch.pool.shape)
    expected = attend(SdpaAttention(), batch, new, sinks=sinks, softcap=softcap)
    found = attend(kernel, batch, new, sinks=sinks, softcap=softcap)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, **EXACT)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(SHAPE), st.sampled_from([None, SINKS * 100]))
def test_large_scores_do_not_overflow(kernel: Attention, batch: Batch, sinks: torch.Tensor | None) -> None:
    """Scores of some hundreds, whose exponentials float32 does not hold."""
    new = new_rows(batch.tokens, batch.pool.shape)
    expected = attend(SdpaAttention(), batch, new, scale=60.0, sinks=sinks)
    found = attend(kernel, batch, new, scale=60.0, sinks=sinks)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)], ids=str)
def test_half_precision_is_as_exact_as_request_by_request(kernel: Attention, dtype: torch.dtype, bound: float) -> None:
    """Both are within one bound of float32 with the same inputs; values are of the size of 1."""

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(batches(SHAPE, dtype), st.sampled_from([None, SINKS]))
    def check(batch: Batch, sinks: torch.Tensor | None) -> None:
        new = new_rows(batch.tokens, batch.pool.shape, dtype)
        found = [attend(each, batch, new, sinks=sinks) for each in (SdpaAttention(), kernel)]
        exact = batch.on("cpu", torch.float32)
        truth = attend(SdpaAttention(), exact, [x.float() for x in new], sinks=sinks)
        for result in found:
            assert (result.float() - truth).abs().max() < bound

    check()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches(SHAPE), st.data())
def test_another_request_in_the_batch_changes_only_the_rounding(
    kernel: Attention, batch: Batch, data: st.DataObject
) -> None:
    new = new_rows(batch.tokens, batch.pool.shape)
    together = attend(kernel, batch, new)
    left_out = data.draw(st.integers(0, len(batch.extents) - 1))
    others = [i for i in range(len(batch.extents)) if i != left_out] or [0]
    rows = np.split(np.arange(batch.tokens), np.cumsum([extent.tokens for extent in batch.extents])[:-1])
    kept = torch.from_numpy(np.concatenate([rows[i] for i in others]))
    fewer = replace(batch, extents=[batch.extents[i] for i in others])
    torch.testing.assert_close(attend(kernel, fewer, [x[kept] for x in new]), together[kept], **EXACT)


@cache
def latent_layer() -> Any:
    return copy.deepcopy(tiny("deepseek_v3", **LATENT["deepseek_v3"]).get_decoder().layers[1].self_attn)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(KVShape(2, 1, 40, 32, latent=True), regions=False))
def test_latents_are_folded_when_queries_are_absorbed(kernel: Attention, batch: Batch) -> None:
    """Up to 24 new tokens are absorbed; prompts from the start expand their own keys."""
    expected, found = (attend_latent(each, batch) for each in (SdpaAttention(), kernel))
    torch.testing.assert_close(found, expected, **EXACT)


def attend_latent(kernel: Attention, batch: Batch) -> torch.Tensor:
    device = "cpu" if type(kernel) is SdpaAttention else DEVICE
    chance = torch.Generator().manual_seed(batch.tokens)
    latent, rotary = (torch.randn(1, 1, batch.tokens, size, generator=chance).to(device) for size in (32, 8))
    query = torch.randn(batch.tokens, 4, 24, generator=chance).to(device)
    module, batch = latent_layer().to(device), batch.on(device)
    with torch.inference_mode(), batch.settings():
        key, value = (x[0].transpose(0, 1) for x in module.expand_kv(latent, rotary))
        latents = Latents(module, (latent, rotary), key, value)
        plan = plan_batch([batch.written(extent) for extent in batch.extents], batch.pool, batch.component)
        return kernel.attend_latent(LAYER, query, latents, SCALE, plan).cpu()


def test_scores_by_hand_are_computed_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(OTHER_VALUES, 30, 4, torch.float32)
    for plane in pool.planes:
        plane.normal_()
    tables = [np.array([*range(20), 20 + i], dtype=np.int32) for i in range(4)]
    extents = [Extent(2, 80, table) for table in tables]
    batch = Batch(pool, extents, plan_batch(extents, pool).component, 1, 1000, 128)
    new = new_rows(8, OTHER_VALUES)
    expected = attend(SdpaAttention(), batch, new)
    monkeypatch.setattr("mainstem.runtime.attention.tree._SCORES_BYTES", 4 * KV_HEADS * 80 * 7)
    torch.testing.assert_close(attend(TreeAttention(), batch, new), expected, **EXACT)


def test_a_plan_is_folded_once_for_all_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(SHAPE, 30, 4, torch.float32)
    pool.k.normal_()
    pool.v.normal_()
    plan = plan_batch([Extent(2, 8, np.arange(3, dtype=np.int32))], pool)
    new = new_rows(2, SHAPE)
    TreeAttention().attend(0, new[0], new[1], new[2], SCALE, plan)
    monkeypatch.setattr("mainstem.runtime.attention.tree.fold", lambda *_: pytest.fail("it is folded again"))
    TreeAttention().attend(1, new[0], new[1], new[2], SCALE, plan)
