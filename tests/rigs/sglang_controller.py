"""SGLang's real cache controllers over pools on the CPU, without its server. Needs SGLang: `make test-sglang`."""

# ruff: noqa: E402  # what SGLang imports only for a GPU is replaced before it is imported
from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from machine import patience

from bench.peers import allow_missing

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
allow_missing()

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE = 16
LAYERS = 2
TOKENS = 512
STATES = 8

Family = Literal["mha", "mla", "hybrid"]


@contextmanager
def one_rank(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Makes SGLang believe that this is one rank of a tensor-parallel server."""
    names = {"tp": (rank, size), "pp": (0, 1), "attn_tp": (rank, size), "attn_dp": (0, 1), "attn_dcp": (0, 1)}
    values = {f"{name}_rank": own for name, (own, _) in names.items()}
    with get_parallel().override(**values, **{f"{name}_size": all_ for name, (_, all_) in names.items()}):
        yield


class Engine:
    """One controller with its pools, driven as SGLang's tree drives it.

    Args:
        spec: the store.
        family: which pools; "hybrid" has one of recurrent states besides.
        layout: of the host pool.
        v1: whether the controller calls the first interface, or the oldest one.
        options: further keys of the extra config.
    """

    def __init__(
        self,
        spec: str,
        family: Family = "mha",
        layout: str = "page_first",
        *,
        v1: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = PAGE,
        model: str = "tiny",
        **options: Any,
    ) -> None:
        self.page_size = page_size
        self.pool = _host_pool(family, layout, dtype, page_size)
        self.states: MambaPoolHost | None = None
        host: Any = self.pool.host
        if family == "hybrid":
            self.states = _state_pool(layout)
            host = HostPoolGroup(
                [
                    PoolEntry(PoolName.KV, self.pool.host, self.pool.device, lambda layer: layer, True),
                    PoolEntry(PoolName.MAMBA, self.states, None, lambda layer: layer),
                ]
            )
        controller = HybridCacheController if family == "hybrid" else HiCacheController
        self.controller = controller(
            self.pool.allocator,
            host,
            page_size,
            None,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=page_size,
            model_name=model,
            storage_backend_extra_config={
                "backend_name": "mainstem",
                "module_path": "mainstem.integrations.sglang",
                "class_name": "MainstemHiCache",
                "interface_v1": int(v1),
                "storage": spec,
                "storage_secret": "a secret of sixteen",
                **options,
            },
        )
        self.backend = self.controller.storage_backend

    def close(self) -> None:
        """Stops the controller and closes the store."""
        self.controller.detach_storage_backend()

    def fill(self, tokens: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
        """Computes KV for tokens, and a state at their end, in host memory and stores them; returns the contents.

        The contents depend on the tokens only, and on `seed`.
        """
        at = self.pool.host.alloc(len(tokens))
        pages = len(tokens) // self.page_size
        contents = [self._content(tokens[: (page + 1) * self.page_size], seed) for page in range(pages)]
        for page, content in enumerate(contents):
            self.pool.host.set_from_flat_data_page(int(at[page * self.page_size]), content)
        hashes = self.hashes(tokens)
        extra = {}
        if self.states is not None:
            slot = self.states.alloc(1)
            self.states.set_from_flat_data_page(int(slot[0]), self._state(tokens, seed))
            extra["extra_pools"] = [_state_transfer(slot, hashes[-1:])]
        self.controller.write_storage(at, list(tokens), hashes, **extra)
        self.stored = self.controller.ack_backup_queue.get(timeout=patience(60)).completed_tokens
        self.pool.host.free(at)
        if self.states is not None:
            self.states.free(slot)
        return contents

    def fetch(self, tokens: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """Prefetches tokens from storage; returns how many were found, and the pages that have arrived."""
        found, pages, _ = self._fetch(tokens)
        return found, pages

    def fetch_state(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Prefetches tokens with the state at their end; returns the state if it has arrived."""
        return self._fetch(tokens)[2]

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        """Returns SGLang's names of the pages."""
        hashes: list[str] = get_hash_str(list(tokens), None, page_size=self.page_size)
        return hashes

    def expect(self, tokens: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
        """Returns what `fill` stores, for comparison."""
        return [self._content(tokens[:end], seed) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def _fetch(self, tokens: Sequence[int]) -> tuple[int, list[torch.Tensor], torch.Tensor | None]:
        controller, extra, slot = self.controller, {}, None
        if self.states is not None:
            slot = self.states.alloc(1)
            extra["extra_pools"] = [_state_transfer(slot, [""])]
            controller.prefetch(CacheRequestHandle("request", 0), RadixKey(list(tokens)), **extra)
        else:
            controller.prefetch("request", list(tokens))
        hit = controller.prefetch_hit_queue.get(timeout=patience(60))
        found = hit.storage_hit_count
        if not found:
            if self.states is not None:
                self.states.free(slot)
            return 0, [], None
        hit.host_indices = self.pool.host.alloc(found)
        controller.prefetch_buffer.put(hit)
        arrived, state = 0, False
        end_s = time.monotonic() + patience(60)
        while time.monotonic() < end_s:
            ack = controller.ack_prefetch_queue.get(timeout=patience(60))
            if ack.completed_tokens is not None:
                arrived = ack.completed_tokens
            state = state or bool((ack.pool_hits or {}).get(PoolName.MAMBA))
            if ack.completed_req:
                break
        starts = hit.host_indices[: arrived : self.page_size].tolist()
        pages = [self.pool.host.get_data_page(start).clone() for start in starts]
        self.pool.host.free(hit.host_indices)
        if self.states is None:
            return found, pages, None
        content = self.states.get_data_page(int(slot[0]))
        self.states.free(slot)
        return found, pages, content if state else None

    def _content(self, tokens: Sequence[int], seed: int) -> torch.Tensor:
        page = self.pool.host.get_dummy_flat_data_page()
        return _numbers(tokens, seed, page.numel()).to(page.dtype)

    def _state(self, tokens: Sequence[int], seed: int) -> torch.Tensor:
        assert self.states is not None
        bytes_ = self.states.get_dummy_flat_data_page().numel()
        return _numbers(tokens, seed, bytes_ // 4).to(torch.float32).view(torch.uint8)


def _numbers(tokens: Sequence[int], seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((tuple(tokens), seed)) & 0xFFFFFFFF)
    return torch.randn(count, generator=generator)


class _Pools:
    """The pools of one family."""

    def __init__(self, device: Any, host: Any) -> None:
        self.device, self.host = device, host


def _host_pool(family: Family, layout: str, dtype: torch.dtype, page_size: int) -> Any:
    common = {"device": "cpu", "enable_memory_saver": False, "layer_num": LAYERS, "dtype": dtype}
    sizes = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": page_size, "layout": layout}
    where = {"pin_memory": False, "device": "cpu", "device_capacity_tokens": TOKENS, "start_layer": 0}
    if family == "mla":
        device = MLATokenToKVPool(TOKENS, page_size, kv_lora_rank=32, qk_rope_head_dim=16, **common)
        host = MLATokenToKVPoolHost(
            device._mla_buffer_info(), **sizes, **where, end_layer=LAYERS, target_layer_num=LAYERS
        )
    else:
        device = MHATokenToKVPool(TOKENS, page_size, head_num=2, head_dim=32, **common)
        host = MHATokenToKVPoolHost(device._mha_buffer_info(), **sizes, **where, end_layer=LAYERS)
    pools = _Pools(device, host)
    pools.allocator = PagedTokenToKVPoolAllocator(  # type: ignore[attr-defined]
        TOKENS, page_size=page_size, dtype=dtype, device="cpu", kvcache=device, need_sort=False
    )
    return pools


def _state_pool(layout: str) -> MambaPoolHost:
    temporal = torch.zeros(LAYERS, STATES, 2, 8, 4, dtype=torch.float32)
    conv = torch.zeros(LAYERS, STATES, 12, 4, dtype=torch.float32)
    info = MambaStateBufferInfo(temporal=temporal, conv=(conv,))
    return MambaPoolHost(info, 2.0, 0, device_capacity=STATES, pin_memory=False, device="cpu", layout=layout)


def _state_transfer(slot: torch.Tensor, keys: list[str]) -> PoolTransfer:
    return PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
