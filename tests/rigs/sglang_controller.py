"""SGLang's real cache controllers over pools on the CPU, without its server. Needs SGLang: `make test-sglang`."""

# ruff: noqa: E402  # what SGLang imports only for a GPU is replaced before it is imported
from __future__ import annotations

import os
import threading
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
WINDOW = 2  # pages

Family = Literal["mha", "mla", "hybrid"]


@contextmanager
def one_rank(rank: int = 0, size: int = 1) -> Iterator[None]:
    """Makes SGLang believe that this is one rank of a tensor-parallel server."""
    names = {"tp": (rank, size), "pp": (0, 1), "attn_tp": (rank, size), "attn_dp": (0, 1), "attn_dcp": (0, 1)}
    values = {f"{name}_rank": own for name, (own, _) in names.items()}
    with get_parallel().override(**values, **{f"{name}_size": all_ for name, (_, all_) in names.items()}):
        yield


class _Side:
    """A pool besides that of the KV.

    Args:
        name: its name.
        host: the pool.
        last: of how many pages at the end of a prefix it has content; 0: of every page, at the indices of the KV.
    """

    def __init__(self, name: PoolName, host: Any, last: int) -> None:
        self.name, self.host, self.last = name, host, last

    def transfer(self, keys: list[str]) -> PoolTransfer:
        """Allocates room; returns what SGLang's tree asks its controller for."""
        if not self.last:
            return PoolTransfer(self.name, indices_from_pool=PoolName.KV)
        indices = self.host.alloc(self.last * self.host.page_size)
        return PoolTransfer(self.name, indices, keys=keys[-self.last :], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def starts(self, transfer: PoolTransfer, of_kv: torch.Tensor) -> list[int]:
        """Returns the first index of each page of a transfer."""
        indices = transfer.host_indices if self.last else of_kv
        starts: list[int] = indices[:: self.host.page_size].tolist()
        return starts

    def free(self, transfer: PoolTransfer) -> None:
        if self.last:
            self.host.free(transfer.host_indices)


class Engine:
    """One controller with its pools, driven as SGLang's tree drives it.

    Args:
        spec: the store.
        family: which pools; "hybrid" has recurrent states, a window and an indexer besides the KV.
        layout: of the host pools.
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
        device, self.host = _pools(family, layout, dtype, page_size)
        self.sides: list[_Side] = []
        group: Any = self.host
        if family == "hybrid":
            self.sides = [
                _Side(PoolName.MAMBA, _state_pool(layout), 1),
                _Side(PoolName.SWA, _pools("mha", layout, dtype, page_size)[1], WINDOW),
                _Side(PoolName.INDEXER, _pools("mha", layout, dtype, page_size, head_num=1)[1], 0),
            ]
            entries = [PoolEntry(side.name, side.host, None, lambda layer: layer) for side in self.sides]
            group = HostPoolGroup([PoolEntry(PoolName.KV, self.host, device, lambda layer: layer, True), *entries])
        allocator = PagedTokenToKVPoolAllocator(
            TOKENS, page_size=page_size, dtype=dtype, device="cpu", kvcache=device, need_sort=False
        )
        self.controller = (HybridCacheController if family == "hybrid" else HiCacheController)(
            allocator,
            group,
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

    def fill(self, tokens: Sequence[int], seed: int = 0) -> int:
        """Stores what `expect` returns for tokens; returns how many tokens SGLang counts as stored."""
        hashes = get_hash_str(list(tokens), None, page_size=self.page_size)
        at = self.host.alloc(len(tokens))
        _set(self.host, at[:: self.page_size].tolist(), self.expect(tokens, seed))
        transfers = [side.transfer(hashes) for side in self.sides]
        for side, transfer in zip(self.sides, transfers, strict=True):
            _set(side.host, side.starts(transfer, at), self.expect(tokens, seed, side))
        self.controller.write_storage(at, list(tokens), hashes, **_extra(transfers))
        stored: int = self.controller.ack_backup_queue.get(timeout=patience(60)).completed_tokens
        self.host.free(at)
        for side, transfer in zip(self.sides, transfers, strict=True):
            side.free(transfer)
        return stored

    def fetch(self, tokens: Sequence[int], **namespace: str) -> tuple[int, list[torch.Tensor]]:
        """Prefetches tokens from storage; returns how many were found, and the pages that have arrived."""
        found, pages, _ = self.fetch_all(tokens, **namespace)
        return found, pages

    def fetch_all(
        self, tokens: Sequence[int], **namespace: str
    ) -> tuple[int, list[torch.Tensor], list[list[torch.Tensor]]]:
        """Does the same; returns besides, for each other pool, the pages that have arrived."""
        controller = self.controller
        transfers = [side.transfer([""] * WINDOW) for side in self.sides]
        request: Any = CacheRequestHandle("request", 0) if self.sides else "request"
        controller.prefetch(request, RadixKey(list(tokens), **namespace), **_extra(transfers))
        hit = controller.prefetch_hit_queue.get(timeout=patience(60))
        found: int = hit.storage_hit_count
        pages, others = [], [[] for _ in self.sides]
        if found:
            hit.host_indices = self.host.alloc(found)
            controller.prefetch_buffer.put(hit)
            arrived, hits = self._arrived()
            pages = _get(self.host, hit.host_indices[: arrived : self.page_size].tolist())
            for side, transfer, other in zip(self.sides, transfers, others, strict=True):
                count = hits.get(side.name, 0) if side.last else len(pages)
                other += _get(side.host, side.starts(transfer, hit.host_indices)[:count])
            self.host.free(hit.host_indices)
        for side, transfer in zip(self.sides, transfers, strict=True):
            side.free(transfer)
        return found, pages, others

    def expect(self, tokens: Sequence[int], seed: int = 0, side: _Side | None = None) -> list[torch.Tensor]:
        """Returns the pages of tokens in a pool. They depend on the tokens up to their end, and on `seed`."""
        ends = list(range(self.page_size, len(tokens) + 1, self.page_size))
        name, host = (side.name, side.host) if side else (PoolName.KV, self.host)
        page = host.get_dummy_flat_data_page()
        contents = []
        for end in ends[-side.last :] if side else ends:
            generator = torch.Generator().manual_seed(hash((tuple(tokens[:end]), seed, len(name))) & 0xFFFFFFFF)
            contents.append(torch.randint(0, 100, page.shape, generator=generator).to(page.dtype))
        return contents

    def _arrived(self) -> tuple[int, dict[str, int]]:
        """Waits for the end of a prefetch; returns how many tokens have arrived, and how many pages of other pools."""
        arrived, hits = 0, {}
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=patience(60))
            arrived = arrived if ack.completed_tokens is None else ack.completed_tokens
            hits.update(ack.pool_hits or {})
            if ack.completed_req:
                return arrived, hits


def _extra(transfers: list[PoolTransfer]) -> dict[str, Any]:
    return {"extra_pools": transfers} if transfers else {}


def _set(host: Any, starts: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
    for start, content in zip(starts, contents, strict=True):
        host.set_from_flat_data_page(start, content)


def _get(host: Any, starts: Sequence[int]) -> list[torch.Tensor]:
    return [host.get_data_page(start).clone() for start in starts]


def _pools(family: Family, layout: str, dtype: torch.dtype, page_size: int, head_num: int = 2) -> tuple[Any, Any]:
    """Returns a pool of device pages and one of host pages."""
    common = {"device": "cpu", "enable_memory_saver": False, "layer_num": LAYERS, "dtype": dtype}
    sizes = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": page_size, "layout": layout}
    sizes |= {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
    plain = {"pin_memory": False, "device": "cpu"}
    if family == "mla":
        latents = MLATokenToKVPool(TOKENS, page_size, kv_lora_rank=32, qk_rope_head_dim=16, **common)
        info = latents._mla_buffer_info()
        return latents, MLATokenToKVPoolHost(info, **sizes, **plain, target_layer_num=LAYERS)
    heads = MHATokenToKVPool(TOKENS, page_size, head_num=head_num, head_dim=32, **common)
    return heads, MHATokenToKVPoolHost(heads._mha_buffer_info(), **sizes, **plain)


def _state_pool(layout: str) -> MambaPoolHost:
    temporal = torch.zeros(LAYERS, STATES, 2, 8, 4, dtype=torch.float32)
    conv = torch.zeros(LAYERS, STATES, 12, 4, dtype=torch.float32)
    info = MambaStateBufferInfo(temporal=temporal, conv=(conv,))
    return MambaPoolHost(info, 2.0, 0, device_capacity=STATES, pin_memory=False, device="cpu", layout=layout)
