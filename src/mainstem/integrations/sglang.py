"""Mainstem's storage as the third tier of SGLang's HiCache: `--hicache-storage-backend dynamic`.

    SGLang's tree and host pools --HiCacheStorage--> MainstemHiCache --slots--> KeyedPages --> any store

SGLang decides what is stored and what is read, and names each page by a hash over everything before it and its
namespace. This module says what a page depends on besides (`_identity`, `_describe`), and copies pages between
SGLang's pools and the slots of `KeyedPages`, which seals, verifies, and turns every fault into a miss.

See docs/sglang.md. `sglang` must be installed to import this module.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from mainstem.cache.identity import Identity
from mainstem.errors import BackendUnavailable, BadArgument, one_of
from mainstem.imports import needs
from mainstem.settings.engine import StorageConfig, StorageSecret
from mainstem.storage.base import RANK, Backend, open_backend
from mainstem.tiers.keyed import KeyedPages, Kind
from mainstem.tiers.storage.sealer import PUBLIC_SECRET, Sealer

KNOWN = ("0.5.23",)
"""The versions of SGLang that the tests ran with."""

with needs("sglang", f"mainstem.integrations.sglang needs SGLang: pip install sglang=={KNOWN[-1]}"):
    if (found := version("sglang")) not in KNOWN:
        raise BackendUnavailable(f"SGLang {found} is not known to this version of Mainstem; known: {', '.join(KNOWN)}")
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
    from sglang.srt.runtime_context import get_server_args

log = logging.getLogger(__name__)

_LIMITS = ("batch_pages", "batches", "writes", "call_timeout_s", "breaker_failures", "breaker_cooldown_s")
_OWN = ("storage", "storage_secret", "weights", *_LIMITS)
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")

# What the order and the meaning of the numbers in a pool's page depend on, as far as a pool has it.
_SHAPE = (
    "layout", "storage_format_tag", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num",
    "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "index_head_dim", "num_mamba_layers",
    "temporal_state_shape", "temporal_dtype", "conv_state_shapes", "conv_dtype", "size_per_token",
)  # fmt: skip
# Settings of the server that change the numbers and that no pool shows: fp8 formats share a dtype, for example.
_SERVER = ("dtype", "kv_cache_dtype", "quantization", "revision", "weight_version", "json_model_override_args")
# The same of what few servers set: unless it is, names are as they were without it.
_RARE = (
    "quantization_param_path", "modelopt_quant", "rl_quant_profile", "qsa_indexer_dtype",
    "enable_deepseek_v4_fp4_indexer", "enable_int8_mamba_checkpoint",
)  # fmt: skip


@dataclass(frozen=True)
class _Pool:
    """A host pool of SGLang.

    Args:
        host: the pool.
        kind: its pages in the store.
        dtype: of a flat page.
        page_size: indices per page.
    """

    host: Any
    kind: Kind
    dtype: torch.dtype
    page_size: int

    def starts(self, indices: torch.Tensor | None, pages: int) -> list[int] | None:
        """Returns the first index of each page; None if the indices are not those of `pages` pages."""
        if indices is None or indices.numel() != pages * self.page_size:
            return None
        starts: list[int] = indices[:: self.page_size].tolist()
        return starts

    def fill(self, start: int, payload: memoryview) -> None:
        """Copies a page of the pool into a slot."""
        if payload:
            page = self.host.get_data_page(start, flat=False)
            torch.frombuffer(payload, dtype=page.dtype).view(page.shape).copy_(page)

    def take(self, start: int, payload: memoryview) -> None:
        """Copies a page from a slot into the pool."""
        if payload:
            self.host.set_from_flat_data_page(start, torch.frombuffer(payload, dtype=self.dtype))


class MainstemHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """A storage back end of HiCache over any store of Mainstem's.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`. Its `extra_config` has, besides SGLang's own keys: `storage`, a
            spec (`mainstem.storage.open_backend`); `storage_secret`, at least 16 characters, or the environment
            variable MAINSTEM_STORAGE_SECRET; `weights`, any text that tells apart models of one name; and the limits
            of `mainstem.StorageConfig` that concern calls.
        kwargs: nothing that is used; SGLang passes it.

    Raises:
        BadArgument: a key is missing, unknown or invalid, or the store cannot serve that many processes.
        BackendUnavailable: the store does not open.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        options = _options(storage_config.extra_config or {})
        self._config, self._weights = storage_config, str(options.get("weights", ""))
        self._limits = StorageConfig(**{name: options[name] for name in _LIMITS if name in options})
        self._secret = _secret(options.get("storage_secret"))
        self._backend = _open(options["storage"], storage_config)
        self._pages: KeyedPages | None = None  # once a pool says what its pages are
        self._pools: dict[str, _Pool] = {}

    # ---------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the pool of the pages that `get`, `set` and the first interface mean.

        Raises:
            BadArgument: the pool has no flat pages.
            StorageError: the store cannot register memory.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Registers a pool by name; the first one is that of the KV. The same pool again changes nothing."""
        name = str(host_pool_name)
        if name in self._pools and self._pools[name].host is host_pool:
            return
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        try:
            page = host_pool.get_dummy_flat_data_page()
        except NotImplementedError as error:
            raise BadArgument("host pool", type(host_pool).__name__, "one with flat pages") from error
        if self._pages is None:
            identity = _identity(self._config, host_pool, self._weights)
            self._pages = KeyedPages(self._backend, Sealer(identity, self._secret), self._limits)
        kind = self._pages.add(_describe(self._config, host_pool, name), page.numel() * page.element_size())
        self._pools[name] = _Pool(host_pool, kind, page.dtype, host_pool.page_size)

    def on_host_pools_registered(self) -> None:
        """Logs why pages that another server stored for this model are not found, if there are any."""
        self._store.enter_identity()

    # ---------------------------------------------------------------- the first interface: pages of the KV pool

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many pages are stored, from the first."""
        (there,) = self._store.exist([(self._pools[PoolName.KV].kind, keys)])
        return _leading(there)

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Reads pages into the pool; returns which are there, without any after the first that is not intact."""
        return self._read(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the pool; returns which are stored, without any after the first that is not."""
        return self._write(PoolName.KV, keys, host_indices)

    # ---------------------------------------------------------------- the second interface: pages of several pools

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Returns which prefixes can be restored: those for which every pool has what its policy demands."""
        transfers = list(pool_transfers or ())
        pools = [self._pools[name] for name in (PoolName.KV, *(str(transfer.name) for transfer in transfers))]
        full, *others = self._store.exist([(pool.kind, keys) for pool in pools])
        pages = _leading(full)
        hits, able = {PoolName.KV: pages}, set(range(1, pages + 1))
        for transfer, there in zip(transfers, others, strict=True):
            allowed = _restorable(transfer, there[:pages])
            hits[transfer.name] = max(allowed, default=0)
            able &= allowed
        nonzero = {name: count for name, count in hits.items() if count}
        return PoolTransferResult(max(able, default=0), nonzero, sorted(able))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Reads pages into each pool; see `batch_get_v1`."""
        return {each.name: self._read(each.name, each.keys or (), each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Stores pages of each pool; see `batch_set_v1`."""
        return {each.name: self._write(each.name, each.keys or (), each.host_indices) for each in transfers}

    # ---------------------------------------------------------------- the oldest interface: tensors

    def exists(self, key: str) -> bool:
        """Returns whether a page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Reads a page into a flat tensor; returns it, or None if it is not there."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into flat tensors; returns those that are there, None for all after the first that is not."""
        pool = self._pools[PoolName.KV]
        targets = target_locations or [pool.host.get_dummy_flat_data_page() for _ in keys]
        done = self._store.read(pool.kind, keys, lambda at, payload: _bytes(targets[at]).copy_(_bytes(payload)))
        return [target if at < done else None for at, target in enumerate(targets)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a flat page; returns whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores flat pages; returns whether all are stored."""
        pool, flat = self._pools[PoolName.KV], [value.contiguous() for value in values]
        done = self._store.write(pool.kind, keys, lambda at, payload: _bytes(payload).copy_(_bytes(flat[at])))
        return done == len(keys)

    # ---------------------------------------------------------------- the rest

    @property
    def faults(self) -> dict[str, int]:
        """Counts of what went wrong, by cause; each is a miss. The first of each cause is logged."""
        return {} if self._pages is None else self._pages.faults

    def clear(self) -> bool:
        """Deletes everything in the store, of all models and servers; returns whether it did."""
        return self._store.clear()

    def close(self) -> None:
        """Closes the store; calls that do not return are abandoned."""
        if self._pages is None:
            self._backend.close()
            return
        self._pages.close()
        if faults := self._pages.faults:
            log.info("storage: faults: %s", faults)

    @property
    def _store(self) -> KeyedPages:
        assert self._pages is not None, "SGLang registers a pool first"
        return self._pages

    def _read(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools[str(name)]
        return self._copy(pool, keys, indices, self._store.read, pool.take)

    def _write(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools[str(name)]
        return self._copy(pool, keys, indices, self._store.write, pool.fill)

    def _copy(self, pool: _Pool, keys: Sequence[str], indices: torch.Tensor | None, run: Any, copy: Any) -> list[bool]:
        starts = pool.starts(indices, len(keys))
        if starts is None:
            self._store.count("refused")  # SGLang passes other indices where it had to give up
            return [False] * len(keys)
        done = run(pool.kind, keys, lambda at, payload: copy(starts[at], payload))
        return [at < done for at in range(len(keys))]


def _bytes(data: Any) -> torch.Tensor:
    flat = data if isinstance(data, torch.Tensor) else torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(torch.uint8).flatten()


def _leading(there: Sequence[bool]) -> int:
    """Returns how many are there, from the first."""
    return there.index(False) if False in there else len(there)


def _restorable(transfer: Any, there: Sequence[bool]) -> set[int]:
    """Returns the lengths of prefixes, in pages, for which a pool has what its policy demands."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(there) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        last = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(there) + 1) if all(there[max(0, end - last) : end])}
    return set()  # a policy of which nothing is known: a miss


def _options(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys that are Mainstem's.

    Raises:
        BadArgument: one is missing, unknown, or no text.
    """
    for name in extra:
        if name not in (*_OWN, *_OF_SGLANG):
            raise BadArgument("hicache-storage-backend-extra-config", name, one_of(name, _OWN))
    for name in ("storage", "storage_secret", "weights"):
        if not isinstance(extra.get(name, None if name == "storage" else ""), str):
            raise BadArgument(name, extra.get(name), "a text")
    return {name: extra[name] for name in _OWN if name in extra}


def _secret(text: str | None) -> bytes:
    """Returns the secret that is given, else that of the environment, else the public one."""
    text = os.environ.get("MAINSTEM_STORAGE_SECRET") if text is None else text
    if text is None:
        log.warning("storage has no secret: stored pages are safe from damage, not from forgery")
        return PUBLIC_SECRET
    secret = StorageSecret(storage_secret=text.encode("utf-8", "surrogateescape")).storage_secret
    assert secret is not None
    return secret


def _open(spec: str, config: Any) -> Backend:
    """Opens the store of this process: all processes share one, or each has its own, with its number for {rank}."""
    sizes = (config.pp_size, config.attn_cp_size, config.tp_size)
    ranks = (config.pp_rank, config.attn_cp_rank, config.tp_rank)
    number = config.dp_rank
    for rank, size in zip(ranks, sizes, strict=True):
        number = number * size + rank
    own = spec.replace(RANK, str(number))
    if own != spec and config.is_mla_model and config.tp_size > 1:
        raise BadArgument("storage", spec, f"a store for all ranks, without {RANK}: one of them writes for all")
    backend = open_backend(own)
    can = backend.capabilities
    if own == spec and max(sizes) > 1 and can.persistent and not can.shared:
        backend.close()
        raise BadArgument("storage", spec, f"a store that several processes can open, or one with {RANK} in its spec")
    return backend


def _identity(config: Any, pool: Any, weights: str) -> Identity:
    """Returns what all pages of a server depend on, as far as SGLang says it; the rest is in `_describe`."""
    width = getattr(pool, "kv_cache_dim", None) or getattr(pool, "head_dim", None)
    settings = _server_settings()
    return Identity(
        model=str(config.model_name),
        weights=weights,
        dtype=str(pool.dtype).removeprefix("torch."),
        quantization=settings.pop("quantization", "unknown"),
        layout=f"sglang {pool.layout}",
        shape=f"{getattr(pool, 'head_num', 1)} heads of {width}",
        attention="mla" if config.is_mla_model else "mha or gqa",
        rope="",
        tokenizer="",
        symbols="sglang page hashes",
        page_size=pool.page_size,
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        extra=(
            *(f"server_{name} {value}" for name, value in settings.items()),
            f"pp {config.pp_size}",
            f"cp {config.attn_cp_size}",
        ),
    )


def _server_settings() -> dict[str, str]:
    try:
        settings = get_server_args()
    except ValueError:  # there is no server: a test, or a controller of its own
        return {}
    rare = {name: str(value) for name in _RARE if (value := getattr(settings, name, None))}
    return {name: str(getattr(settings, name, None)) for name in _SERVER} | rare


def _describe(config: Any, pool: Any, name: str) -> str:
    """Returns what the pages of one pool on one rank depend on."""
    shape = [f"{field} {getattr(pool, field)}" for field in _SHAPE if getattr(pool, field, None) is not None]
    ranks = [f"pp {config.pp_rank} of {config.pp_size}", f"cp {config.attn_cp_rank} of {config.attn_cp_size}"]
    if not _same_on_all_ranks(pool, name):
        ranks.append(f"tp {config.tp_rank} of {config.tp_size}")
    return "; ".join([name, type(pool).__name__, *shape, *ranks])


def _same_on_all_ranks(pool: Any, name: str) -> bool:
    """Whether the ranks of a model with latent attention hold the same pages in a pool: no state, and no heads."""
    return name != PoolName.MAMBA and getattr(pool, "head_num", None) is None
