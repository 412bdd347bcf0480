"""The attention kernel for GPUs, interpreted: some shapes of those that `test_page_attention.py` draws."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from machine import DEVICE
from rigs.slow import slow_but

from bench.tiny_models import CONTEXT, FAMILIES, HYBRIDS, LATENT, VARIANTS, WINDOWED, loaded, tiny
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.paged import FULL, Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.runner import ModelRunner, attention_for
from tests.rigs.attending import EXACT, KV_HEADS, SCALE, SINKS, attend, new_rows
from tests.rigs.batches import Batch, batches
from tests.rigs.interpreted import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = KVShape(2, KV_HEADS, 8, 8)
OTHER_VALUES = SHAPE._replace(value_dim=5)


@pytest.fixture(scope="module")
def kernel() -> Attention:
    return triton_attention()


# What fails is not made smaller: the interpreter would take minutes.
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.one_of(batches(SHAPE), batches(OTHER_VALUES)),
    st.sampled_from([None, SINKS]),
    st.sampled_from([None, None, 0.5, 20.0]),
    st.sampled_from([SCALE, SCALE, 60.0]),
)
def test_results_are_those_request_by_request(
    kernel: Attention, batch: Batch, sinks: torch.Tensor | None, softcap: float | None, scale: float
) -> None:
    new = new_rows(batch.tokens, batch.pool.shape)
    expected, found = (attend(each, batch, new, scale, sinks, softcap) for each in (SdpaAttention(), kernel))
    exact = EXACT if scale == SCALE else {"atol": 2e-3, "rtol": 1e-3}
    torch.testing.assert_close(found, expected, **exact)


def compared(
    kernel: Attention, shape: KVShape, heads: int, extents: list[Extent], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of both kernels, with the constants as they are, over pages of 16."""
    chance = torch.Generator().manual_seed(0)
    pool = KVPool(shape, 1 + max(int(extent.page_table.max()) for extent in extents), 16, dtype)
    for plane in pool.planes:
        plane.copy_(torch.randn(plane.shape, generator=chance))
    tokens = sum(extent.tokens for extent in extents)
    sizes = (heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
    new = [torch.randn(tokens, *size, generator=chance).to(dtype) for size in sizes]
    batch = Batch(pool, extents, FULL, 1, 1, 128)
    results = []
    for each, device in ((SdpaAttention(), "cpu"), (kernel, DEVICE)):
        there = batch.on(device)
        plan = plan_batch(extents, there.pool)
        results.append(each.attend(0, *(rows.to(device) for rows in new), 0.1, plan).cpu())  # type: ignore[attr-defined]
    return results[0], results[1]


def table(*pages: int) -> Any:
    return np.array(pages, dtype=np.int32)


def test_more_heads_share_a_key_than_a_tile_has_rows(kernel: Attention) -> None:
    expected, found = compared(kernel, KVShape(1, 1, 8, 8), 70, [Extent(3, 20, table(1, 0))])
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("size", [80, 96, 192], ids=str)
def test_the_size_of_a_head_need_be_no_power_of_two(kernel: Attention, size: int) -> None:
    expected, found = compared(kernel, KVShape(1, 1, size, 72), 2, [Extent(2, 30, table(1, 0))])
    torch.testing.assert_close(found, expected, **EXACT)


def test_long_runs_are_divided_and_a_shared_one_is_read_once(kernel: Attention) -> None:
    shared = list(range(60))
    extents = [Extent(1, 1000, table(*shared, 60 + 3 * i, 61 + 3 * i, 62 + 3 * i)) for i in range(3)]
    expected, found = compared(kernel, KVShape(1, 1, 16, 16), 2, extents, torch.bfloat16)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_prompts_from_0_are_computed_by_pytorch_among_others(
    dtype: torch.dtype, kernel: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, for which it has a kernel that keeps no matrix of scores."""
    from mainstem.runtime.attention import triton_attention

    lengths: list[int] = []
    monkeypatch.setattr(triton_attention, "WHOLE_PROMPT", 8)
    of_pytorch = triton_attention.causal
    monkeypatch.setattr(triton_attention, "causal", lambda q, *more: (lengths.append(len(q)), of_pytorch(q, *more))[1])
    news = [Extent(12, 0, table(0)), Extent(1, 20, table(1, 2)), Extent(9, 0, table(3)), Extent(3, 0, table(4))]
    both_ways = Extent(10, 0, table(5), ((2, 6),))
    expected, found = compared(kernel, KVShape(1, 2, 8, 8), 4, [*news, both_ways], dtype)
    torch.testing.assert_close(found, expected, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=0)
    assert lengths == ([12, 9] if dtype is torch.bfloat16 else [])


def test_a_plan_is_divided_once_for_all_its_layers(kernel: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(SHAPE, 30, 4, torch.float32, DEVICE)
    for plane in pool.planes:
        plane.normal_()
    plan = plan_batch([Extent(2, 8, np.arange(3, dtype=np.int32))], pool)
    new = [rows.to(DEVICE) for rows in new_rows(2, SHAPE)]
    kernel.attend(0, new[0], new[1], new[2], SCALE, plan)
    monkeypatch.setattr(
        "mainstem.runtime.attention.triton_attention.shared_runs", lambda *_: pytest.fail("it is divided again")
    )
    kernel.attend(1, new[0], new[1], new[2], SCALE, plan)


MODELS = {
    "llama": {**FAMILIES["llama"], "num_hidden_layers": 1},  # full attention
    "mistral": WINDOWED["mistral"],  # windows
    "gemma2": WINDOWED["gemma2"],  # windows and full attention, with capped scores
    "gpt_oss": WINDOWED["gpt_oss"],  # sinks
    "mimo_v2_flash": WINDOWED["mimo_v2_flash"],  # values smaller than keys
    "llama4_text": VARIANTS["llama4_text"][1],  # chunks
    "deepseek_v3": LATENT["deepseek_v3"],  # latents
    "qwen3_next": HYBRIDS["qwen3_next"],  # states beside it
}


@pytest.mark.parametrize("family", slow_but(MODELS, "llama", "gpt_oss", "deepseek_v3"))
def test_models_attend_by_it_as_by_their_own_code(
    family: str, kernel: Attention, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The self-test compares logits, over scattered pages and in chunks. Another kernel is taken if they differ."""
    monkeypatch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: kernel)
    model: Any = tiny(family, **MODELS[family]).to(DEVICE)  # type: ignore[call-arg, arg-type]
    calls: list[int] = []
    from mainstem.runtime.attention.triton_attention import Work

    attend = Work.attend
    monkeypatch.setattr(Work, "attend", lambda *given: (calls.append(1), attend(*given)))
    ModelRunner(loaded(model), dict.fromkeys(Layout.of(model.config, CONTEXT).names, 8), 16)
    assert calls and "computed by PyTorch" not in caplog.text


FEW = ("decode", "merge", "write", "spans", "norm", "16")
"""Each kernel once; prefill and latents have that of decode, with other sizes."""


@pytest.mark.parametrize(
    ("architecture", "names"),
    [(90, FEW), *(pytest.param(architecture, (), marks=pytest.mark.slow) for architecture in (80, 90))],
    ids=["90, few", "80", "90"],
)
def test_the_kernels_are_compiled_for_gpus(architecture: int, names: tuple[str, ...], tmp_path: Path) -> None:
    """An interpreter accepts what a compiler does not. Products are those of tensor cores."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "rigs.compiled", str(architecture), *names]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = [line.split()[1:] for line in done.stdout.splitlines()]
    expected = [
        ["prefill", "True"],
        ["decode", "True"],
        ["latent", "True"],
        ["merge", "False"],
        ["write", "False"],
        ["spans", "True"],
        ["norm", "False"],
        *(["products", str(rows), "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] for rows in (16, 32, 64, 128)),
    ]
    assert found == [each for each in expected if not names or {*each} & {*names}], done.stderr


# ---------------------------------------------------------------- which kernel a device has


def test_a_cpu_has_no_kernel_for_gpus() -> None:
    assert type(attention_for(torch.device("cpu"))) is PageAttention


def test_a_gpu_has_the_kernel_in_triton(kernel: Attention) -> None:
    assert type(attention_for(torch.device("cuda"))) is type(kernel)


def test_a_gpu_without_triton_computes_by_pytorch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "mainstem.runtime.attention.triton_attention", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING):
        assert type(attention_for(torch.device("cuda"))) is SdpaAttention
    assert "Triton" in caplog.text
