"""A double of SiMM's `simm.kv`: the same calls, checks and codes, in one dict.

As in the real one (https://github.com/scitix/SiMM, python/simm/kv and src/client): names of up to 256 bytes and values
of up to 4 MiB, or the whole batch is refused; every piece must be in a registered region; a value is written to the
start of its piece, even past the end of the piece, up to the end of the region; a batch put does not overwrite; codes
are negative numbers, and only a wrong type raises; the oldest value is evicted first. Tests change `cluster`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

KEY_BYTES, VALUE_BYTES = 256, 4 << 20
INVALID, NOT_FOUND, EXISTS, GET_FAILED, PUT_FAILED = -1000, -4003, -4005, -2101, -2100

__all__ = ["BlockView", "MrExt", "Store", "cluster", "deregister_mr", "register_mr", "reset", "set_flag"]


@dataclass
class Cluster:
    """One cluster and its faults."""

    values: dict[str, bytes] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    known_flags: tuple[str, ...] = (
        "cm_primary_node_ip",
        "cm_primary_node_port",
        "clnt_thread_pool_size",
        "clnt_sync_req_timeout_ms",
    )
    regions: list[MrExt] = field(default_factory=list)
    capacity: int = 1 << 30
    down: int = 0
    """A code that every value gets, because no server answers."""
    codes: dict[str, int] = field(default_factory=dict)
    """The code that every call returns for a name."""
    lock_limit: int = 1 << 40
    batches: list[int] = field(default_factory=list)


cluster = Cluster()


def reset() -> Cluster:
    cluster.__dict__.update(Cluster().__dict__)
    return cluster


def set_flag(name: str, value: str) -> bool:
    if not isinstance(value, str):
        raise TypeError("set_flag(): incompatible function arguments")
    cluster.flags[name] = value
    return name in cluster.known_flags


class MrExt:
    def __init__(self, start: int, size: int) -> None:
        self.start, self.end, self.registered = start, start + size, True


def register_mr(tensor: Any) -> MrExt | None:
    size = tensor.numel() * tensor.element_size()
    if size > cluster.lock_limit:
        return None
    cluster.regions.append(MrExt(tensor.data_ptr(), size))
    return cluster.regions[-1]


def deregister_mr(mr_ext: MrExt) -> bool:
    mr_ext.registered = False
    return True


class BlockView:
    def __init__(self, start: int, size: int, region: MrExt) -> None:
        if not isinstance(region, MrExt):
            raise TypeError("DataView(): incompatible constructor arguments")
        self.start, self.size, self.region = start, size, region

    @classmethod
    def from_buffer(cls, buf_ptr: int, buf_size: int, mr_ext: MrExt) -> BlockView:
        return cls(buf_ptr, buf_size, mr_ext)

    @property
    def inside(self) -> bool:
        region = self.region
        return region.registered and region.start <= self.start and self.start + self.size <= region.end


class Store:
    def __init__(self) -> None:
        if "cm_primary_node_ip" not in cluster.flags:
            raise RuntimeError("Init client messenger failed")

    def mexists(self, keys: list[str]) -> list[bool]:
        return [self.exists(key) for key in keys]

    def exists(self, key: str) -> bool:
        return not self._fault(key) and key in cluster.values

    def delete(self, key: str) -> int:
        if self._fault(key):
            return self._fault(key)
        return NOT_FOUND if cluster.values.pop(key, None) is None else 0

    def mput(self, keys: list[str], blocks: list[BlockView]) -> list[int]:
        if not self._fit(keys, blocks) or any(block.size > VALUE_BYTES for block in blocks):
            return [INVALID] * len(keys)
        cluster.batches.append(len(keys))
        return [self._put(key, block) for key, block in zip(keys, blocks, strict=True)]

    def mget(self, keys: list[str], blocks: list[BlockView]) -> list[int]:
        if not self._fit(keys, blocks):
            return [INVALID] * len(keys)
        cluster.batches.append(len(keys))
        codes = {at: self._get(keys[at], blocks[at]) for at in reversed(range(len(keys)))}  # concurrently, in no order
        return [codes[at] for at in range(len(keys))]

    def _put(self, key: str, block: BlockView) -> int:
        if not block.inside:
            return INVALID
        if self._fault(key):
            return self._fault(key)
        if key in cluster.values:
            return EXISTS
        if block.size > cluster.capacity:
            return PUT_FAILED
        while sum(map(len, cluster.values.values())) + block.size > cluster.capacity:
            del cluster.values[next(iter(cluster.values))]
        cluster.values[key] = ctypes.string_at(block.start, block.size)
        return 0

    def _get(self, key: str, block: BlockView) -> int:
        if not block.inside:
            return INVALID
        if self._fault(key):
            return self._fault(key)
        value = cluster.values.get(key)
        if value is None or block.start + len(value) > block.region.end:
            return GET_FAILED
        ctypes.memmove(block.start, value, len(value))
        return len(value)

    @staticmethod
    def _fault(key: str) -> int:
        return cluster.down or cluster.codes.get(key, 0)

    @staticmethod
    def _fit(keys: list[str], blocks: list[BlockView]) -> bool:
        return len(keys) == len(blocks) and all(1 <= len(key.encode()) <= KEY_BYTES for key in keys)
