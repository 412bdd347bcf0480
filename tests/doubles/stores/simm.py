"""A double of SiMM's `simm.kv`: the same calls, checks and codes, in one dict.

As in the real one (https://github.com/scitix/SiMM, python/simm/kv and src/client): names of up to 256 bytes and values
of up to 4 MiB, or the whole batch is refused; every piece must be in a registered region; a value is written to the
start of its piece, even past the end of the piece, up to the end of the region; a batch put does not overwrite; codes
are negative numbers, and only a wrong type raises; the oldest value is evicted first.
"""

from __future__ import annotations

import ctypes
from typing import Any

from doubles.stores import Framed, Service

KEY_BYTES, VALUE_BYTES = 256, 4 << 20
INVALID, NOT_FOUND, EXISTS, GET_FAILED, PUT_FAILED, DOWN = -1000, -4003, -4005, -2101, -2100, -2300
FLAGS = ("cm_primary_node_ip", "cm_primary_node_port", "clnt_thread_pool_size", "clnt_sync_req_timeout_ms")
service = Service()


def set_flag(name: str, value: str) -> bool:
    if not isinstance(value, str):
        raise TypeError("set_flag(): incompatible function arguments")
    service.told[name] = value
    return name in service.told.get("flags", FLAGS)


class MrExt:
    def __init__(self, start: int, size: int) -> None:
        self.start, self.end, self.registered = start, start + size, True


def register_mr(tensor: Any) -> MrExt | None:
    if not service.registers:
        return None
    service.regions.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return MrExt(*service.regions[-1])


def deregister_mr(mr_ext: MrExt) -> bool:
    mr_ext.registered = False
    service.regions.remove((mr_ext.start, mr_ext.end - mr_ext.start))
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
        if "cm_primary_node_ip" not in service.told:
            raise RuntimeError("Init client messenger failed")

    def mexists(self, keys: list[str]) -> list[bool]:
        service.wait()
        return [self.exists(key) for key in keys]

    def exists(self, key: str) -> bool:
        return not self._fault(key) and key in service.values

    def delete(self, key: str) -> int:
        if fault := self._fault(key) or (0 if service.deletes else -2102):
            return fault
        return NOT_FOUND if service.values.pop(key, None) is None else 0

    def mput(self, keys: list[str], blocks: list[BlockView]) -> list[int]:
        service.wait()
        if not self._fit(keys, blocks) or any(block.size > VALUE_BYTES for block in blocks):
            return [INVALID] * len(keys)
        return [self._put(key, block) for key, block in zip(keys, blocks, strict=True)]

    def mget(self, keys: list[str], blocks: list[BlockView]) -> list[int]:
        service.wait()
        if not self._fit(keys, blocks):
            return [INVALID] * len(keys)
        codes = {at: self._get(keys[at], blocks[at]) for at in reversed(range(len(keys)))}  # concurrently, in no order
        return [codes[at] for at in range(len(keys))]

    def _put(self, key: str, block: BlockView) -> int:
        if not block.inside:
            return INVALID
        if self._fault(key):
            return self._fault(key)
        if key in service.values:
            return EXISTS
        if block.size > service.capacity:
            return PUT_FAILED
        while not service.has_room(block.size):
            del service.values[next(iter(service.values))]
        service.values[key] = ctypes.string_at(block.start, block.size)
        return 0

    def _get(self, key: str, block: BlockView) -> int:
        if not block.inside:
            return INVALID
        if self._fault(key):
            return self._fault(key)
        value = service.values.get(key)
        if value is None or block.start + len(value) > block.region.end:
            return GET_FAILED
        ctypes.memmove(block.start, value, len(value))
        return len(value)

    @staticmethod
    def _fault(key: str) -> int:
        return int(service.told.get("code", DOWN) if service.down else service.codes.get(key, 0))

    @staticmethod
    def _fit(keys: list[str], blocks: list[BlockView]) -> bool:
        service.batches.append(len(keys))
        return len(keys) == len(blocks) and all(1 <= len(key.encode()) <= KEY_BYTES for key in keys)


def _reads(_: Store, keys: list[str], blocks: list[BlockView]) -> list[int]:
    return [block.size for block in blocks]


PACKAGE = "simm.kv"
SPEC = "simm://10.0.0.1:30001"
BAD = tuple(f"simm:{rest}" for rest in ("", "//host", "//h:1?thread=1", "//h:1?threads=0", "//h:1?staging=1MiB"))
FRAMED = Framed(
    110_000,
    2 * VALUE_BYTES,
    (Store, "mget", _reads),
    silent=("exists", "delete", "clear"),  # an unreachable server is an absent name to it
    failed=-1002,
)
