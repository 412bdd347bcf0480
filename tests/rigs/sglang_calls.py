"""The calls that SGLang makes to its storage back end: recorded where it runs, replayed where it does not.

A transcript has the sessions of back ends that were opened one after the other on one store. A session has the
configuration, the pools and the calls with their results. Contents are not kept: a replay fills each page with what
depends on its key and its pool only, and compares it where it was read.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from doubles.sglang_hicache import HiCacheStorageConfig, HostPool, PoolHitPolicy, PoolName, PoolTransfer

TRANSCRIPTS = Path(__file__).parents[1] / "recorded" / "sglang-calls.json.xz"
READS, WRITES = ("batch_get_v1", "batch_get_v2", "batch_get"), ("batch_set_v1", "batch_set_v2", "batch_set")
CALLS = ("batch_exists", "batch_exists_v2", *READS, *WRITES)
CONFIG = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name")
POOL = ("layout", "page_size", "layer_num", "head_num", "head_dim", "kv_cache_dim", "start_layer", "end_layer")

Transfer = dict[str, Any]  # a `PoolTransfer` in JSON


def transcripts(path: Path = TRANSCRIPTS) -> dict[str, Any]:
    """Returns the transcripts of a file, by name."""
    kept: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return kept


def keep(recorded: Mapping[str, Any], path: Path = TRANSCRIPTS) -> None:
    """Writes a file of transcripts."""
    path.write_bytes(lzma.compress(json.dumps(recorded, sort_keys=True).encode(), preset=9))


# ---------------------------------------------------------------- recording


def record(backend: Any, config: Any) -> dict[str, Any]:
    """Records what SGLang does with a back end from now on. Returns the session, which grows."""
    session: dict[str, Any] = {
        "config": {name: getattr(config, name) for name in CONFIG},
        "pools": {str(name): _described(pool) for name, pool in backend.registered_pools.items()},
        "calls": [],
    }
    for name in CALLS:
        setattr(backend, name, _recording(name, getattr(backend, name), session["calls"]))
    return session


def _recording(name: str, real: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        asked = _asked(name, *arguments)
        result = real(*arguments, **options)
        calls.append([name, asked, _plain(result)])
        return result

    return call


def _asked(name: str, first: Any, second: Any = None, *_: Any, **__: Any) -> Any:
    """Returns what a call asks for: keys, or transfers, or both."""
    if name == "batch_exists_v2":
        return [list(first), [_transfer(each) for each in second or ()]]
    if name.endswith("_v2"):
        return [_transfer(each) for each in first]
    return [list(first), second.tolist() if name.endswith("_v1") else None]


def _transfer(each: Any) -> Transfer:
    indices = None if each.host_indices is None else each.host_indices.tolist()
    return {"name": str(each.name), "keys": each.keys, "indices": indices, "policy": each.hit_policy.value}


def _plain(result: Any) -> Any:
    if hasattr(result, "kv_hit_pages"):
        hits = {str(name): pages for name, pages in result.extra_pool_hit_pages.items()}
        return [result.kv_hit_pages, hits, result.restorable_prefix_pages]
    if isinstance(result, dict):
        return {str(name): pages for name, pages in result.items()}
    if isinstance(result, list):
        return [item if isinstance(item, bool) else item is not None for item in result]
    return result


def _described(pool: Any) -> dict[str, Any]:
    page = pool.get_dummy_flat_data_page()
    shape = {name: getattr(pool, name) for name in POOL if getattr(pool, name, None) is not None}
    return {**shape, "numbers": page.numel(), "dtype": str(page.dtype).removeprefix("torch.")}


# ---------------------------------------------------------------- replaying


def replay(module: Any, sessions: Sequence[Any], spec: str) -> None:
    """Makes the calls of a transcript again, on a new store; every result and every page that is read must be equal."""
    for session in sessions:
        config = HiCacheStorageConfig(**session["config"], extra_config={"storage": spec, "storage_secret": "s" * 16})
        backend = module.MainstemHiCache(config, {})
        pools = {name: _Pool(name, described) for name, described in session["pools"].items()}
        backend.register_mem_pool_host(pools["kv"].host)
        for name, pool in pools.items():
            backend.register_mem_host_pool_v2(pool.host, PoolName(name))
        backend.on_host_pools_registered()
        for name, asked, result in session["calls"]:
            _make(backend, pools, name, asked, result)
        assert backend.faults == {}
        backend.close()


class _Pool:
    """A double of a pool, large enough for any transcript."""

    def __init__(self, name: str, described: Mapping[str, Any]) -> None:
        shape = {key: value for key, value in described.items() if key not in ("numbers", "dtype")}
        self.name, self.dtype = name, getattr(torch, described["dtype"])
        self.host = HostPool((2, described["numbers"] // 2), 128, dtype=self.dtype, **shape)

    def content(self, key: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name} {key}".encode()))
        page = self.host.get_dummy_flat_data_page()
        return torch.randint(0, 100, page.shape, generator=generator).to(self.dtype)

    def fill(self, keys: Sequence[str], indices: Sequence[int], *, zeros: bool) -> None:
        for key, start in zip(keys, indices[:: self.host.page_size], strict=True):
            content = self.content(key)
            self.host.set_from_flat_data_page(start, torch.zeros_like(content) if zeros else content)

    def compare(self, keys: Sequence[str], indices: Sequence[int], read: Sequence[bool]) -> None:
        for key, start, there in zip(keys, indices[:: self.host.page_size], read, strict=True):
            content = self.content(key) if there else torch.zeros_like(self.content(key))
            assert torch.equal(self.host.get_data_page(start), content), f"{self.name}: page {start} is another one"


def _make(backend: Any, pools: Mapping[str, _Pool], name: str, asked: Any, result: Any) -> None:
    """Makes one call."""
    if name in ("batch_get", "batch_set"):
        keys, pool = asked[0], pools["kv"]
        if name == "batch_set":
            assert backend.batch_set(keys, [pool.content(key) for key in keys]) == result
            return
        read = backend.batch_get(keys, [pool.host.get_dummy_flat_data_page() for _ in keys])
        assert _plain(read) == result
        assert all(page is None or torch.equal(page, pool.content(key)) for key, page in zip(keys, read, strict=True))
        return
    moved = _moved(name, asked)
    for pool, keys, indices in moved:
        pools[pool].fill(keys, indices, zeros=name in READS)
    assert _plain(getattr(backend, name)(*_arguments(name, asked))) == result, name
    if name in READS:
        for pool, keys, indices in moved:
            pools[pool].compare(keys, indices, result[pool] if name.endswith("_v2") else result)


def _moved(name: str, asked: Any) -> list[tuple[str, list[str], list[int]]]:
    """Returns what a call copies: by pool, the keys and the indices."""
    if name not in (*READS, *WRITES):
        return []
    if name.endswith("_v1"):
        return [("kv", *asked)]
    return [(each["name"], each["keys"], each["indices"]) for each in asked]


def _arguments(name: str, asked: Any) -> list[Any]:
    if name == "batch_exists_v2":
        return [asked[0], [_back(each) for each in asked[1]]]
    if name.endswith("_v2"):
        return [[_back(each) for each in asked]]
    return [asked[0], None if asked[1] is None else torch.tensor(asked[1])]


def _back(each: Transfer) -> PoolTransfer:
    indices = None if each["indices"] is None else torch.tensor(each["indices"])
    return PoolTransfer(PoolName(each["name"]), indices, each["keys"], PoolHitPolicy(each["policy"]))
