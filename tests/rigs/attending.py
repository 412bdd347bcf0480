"""Attention of random batches by one kernel or another, for comparisons."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from machine import DEVICE

from bench.tiny_models import LATENT, tiny
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.latent import Latents
from mainstem.runtime.attention.paged import Attention, SdpaAttention, plan_batch
from mainstem.runtime.memory.kv import KVShape
from tests.rigs.batches import Batch

KV_HEADS, GROUP = 2, 3
LAYER = 1
SCALE = 0.3
EXACT = {"atol": 1e-5, "rtol": 1e-5} if DEVICE == "cpu" else {"atol": 2e-5, "rtol": 2e-5}
SINKS = torch.tensor([3.0, -2.0, 0.0, 1.0, 5.0, -1.0])


def new_rows(tokens: int, shape: KVShape, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(tokens)
    sizes = (KV_HEADS * GROUP, shape.head_dim), (KV_HEADS, shape.head_dim), (KV_HEADS, shape.value_dim)
    return [torch.randn(tokens, *size, generator=chance).to(dtype) for size in sizes]


def device_of(kernel: Attention) -> str:
    """Only what is tested needs a GPU."""
    return "cpu" if type(kernel) in (SdpaAttention, PageAttention) else DEVICE


def attend(
    kernel: Attention,
    batch: Batch,
    new: list[torch.Tensor],
    scale: float = SCALE,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Both layers of the pool compute with one plan; returns the second's results."""
    device = device_of(kernel)
    with batch.settings():
        batch, new = batch.on(device), [rows.to(device) for rows in new]
        sinks = None if sinks is None else sinks.to(device)
        plan = plan_batch([batch.written(extent) for extent in batch.extents], batch.pool, batch.component)
        for layer in range(LAYER):
            kernel.attend(layer, new[0].flip(0), new[1], new[2], scale, plan, sinks, softcap)
        return kernel.attend(LAYER, new[0], new[1], new[2], scale, plan, sinks, softcap).cpu()


@cache
def _latent_layer() -> Any:
    return copy.deepcopy(tiny("deepseek_v3", **LATENT["deepseek_v3"]).get_decoder().layers[1].self_attn)


def attend_latent(kernel: Attention, batch: Batch) -> torch.Tensor:
    device = device_of(kernel)
    chance = torch.Generator().manual_seed(batch.tokens)
    latent, rotary = (torch.randn(1, 1, batch.tokens, size, generator=chance).to(device) for size in (32, 8))
    query = torch.randn(batch.tokens, 4, 24, generator=chance).to(device)
    module, batch = _latent_layer().to(device), batch.on(device)
    with torch.inference_mode(), batch.settings():
        key, value = (x[0].transpose(0, 1) for x in module.expand_kv(latent, rotary))
        latents = Latents(module, (latent, rotary), key, value)
        plan = plan_batch([batch.written(extent) for extent in batch.extents], batch.pool, batch.component)
        return kernel.attend_latent(LAYER, query, latents, SCALE, plan).cpu()
