"""What `mainstem.integrations.sglang` uses of SGLang, as small as it can be: its interface, and pools on the CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


FORMATS = "dtype|quant|fp8|fp4|int8|rope|revision|override|layout|precision"
"""Parts of the names of the server's settings that may change the numbers of a page."""

UNREAD = {
    "the pool says it": "hicache_mem_layout mamba_ssm_dtype",
    "the order on the device, which the pool's pages do not have": "enable_page_major_kv_layout",
    "how fast, or with which rounding, the same is computed": "deepep_dispatcher_output_dtype "
    "disable_flashinfer_cutlass_moe_fp4_allgather enable_fused_qk_norm_rope enable_quant_communications "
    "enable_w4a4_mxfp4_megamoe flashinfer_mxfp4_moe_precision fp4_gemm_runner_backend fp8_gemm_runner_backend "
    "prefill_kv_cache_dequant_dtype",
    "how many slots there are": "int8_mamba_ckpt_size",
    "what is saved elsewhere": "quantize_and_serve",
    "a draft model, whose pool is another": "_speculative_draft_quantization_explicitly_set "
    "speculative_draft_kv_cache_dtype speculative_draft_model_quantization speculative_draft_model_revision "
    "speculative_enable_w4a4_mxfp4_megamoe",
}
"""Those of `FORMATS` that the integration does not read, by why pages do not depend on them."""


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "tiny"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = field(default_factory=dict)
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool


class HostPool:
    """A pool of pages or states.

    Args:
        shape: of a page, but for `layout`: where "page_first", the pages are before the layers.
        described: the attributes that SGLang's pool has.
    """

    def __init__(
        self, shape: tuple[int, ...] = (2, 16, 2, 8), pages: int = 32, page_size: int = 16, **described: Any
    ) -> None:
        self.page_size, self.layout, self.dtype, self.storage_format_tag = page_size, "page_first", torch.float32, None
        self.__dict__.update(described)
        self._shape, self._described = shape, described
        across = self.layout == "layer_first"
        self.buffer = torch.zeros((shape[0], pages, *shape[1:]) if across else (pages, *shape), dtype=self.dtype)

    def __repr__(self) -> str:
        """Says what distinguishes it, equally in every process: it names tests."""
        return f"HostPool({self._shape}, page_size={self.page_size}, {self._described})"

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._page(index)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._page(index).copy_(data_page.reshape(self._shape))

    def _page(self, index: int) -> torch.Tensor:
        number = index // self.page_size
        return self.buffer[:, number] if self.layout == "layer_first" else self.buffer[number]


class LogicalPool(HostPool):
    """A pool without content, which only counts."""

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        raise AssertionError("there is nothing to set")


@contextmanager
def installed(version: str = "0.5.23", settings: dict[str, Any] | None = None) -> Iterator[Any]:
    """Installs the double in place of SGLang, for as long as the module that it yields is used."""

    def get_server_args() -> Any:
        if settings is None:
            raise ValueError("Global server args is not set yet!")
        return SimpleNamespace(**settings)

    storage = ModuleType("sglang.srt.mem_cache.hicache_storage")
    for each in (PoolName, PoolHitPolicy, PoolTransfer, PoolTransferResult, HiCacheStorage, HiCacheStorageConfig):
        setattr(storage, each.__name__, each)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = get_server_args  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, storage.__name__, storage)
        patch.setitem(sys.modules, context.__name__, context)
        patch.setattr("importlib.metadata.version", lambda name: version)
        patch.delitem(sys.modules, "mainstem.integrations.sglang", raising=False)
        yield importlib.import_module("mainstem.integrations.sglang")
        del sys.modules["mainstem.integrations.sglang"]
