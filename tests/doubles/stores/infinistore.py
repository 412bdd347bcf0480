"""A double of the client `infinistore`: the same calls, checks and errors, over one dict.

As in the real one (PyPI infinistore 0.2.35, lib.py; https://github.com/bytedance/InfiniStore, src/infinistore.cpp):
memory is identified by the exact address that was registered; the caller sets the length of a block, regardless of the
value; one missing name fails the whole read; a write replaces; the search for the end of a prefix is a binary search.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

from doubles.stores import Framed, Service

TYPE_RDMA, TYPE_TCP = "RDMA", "TCP"
service = Service()


class InfiniStoreException(Exception):
    pass


class InfiniStoreKeyNotFound(InfiniStoreException):
    pass


class ClientConfig:
    def __init__(self, **options: Any) -> None:
        self.__dict__.update({"dev_name": "mlx5_1", "ib_port": 1, "link_type": "IB", **options})
        self.told = options

    def verify(self) -> None:
        if self.told.get("connection_type") not in (TYPE_RDMA, TYPE_TCP):
            raise Exception("Invalid connection type")
        if not self.told.get("host_addr") or not self.told.get("service_port"):
            raise Exception("Host address is empty or service port is 0")
        if self.told.get("link_type", "IB") not in ("IB", "Ethernet"):
            raise Exception("link type should be IB or Ethernet for RDMA connection")


class InfinityConnection:
    def __init__(self, config: ClientConfig) -> None:
        config.verify()
        service.told |= config.told
        self.rdma_connected = False
        self.memory: dict[int, int] = {}
        self.semaphore = asyncio.BoundedSemaphore(128)

    def connect(self) -> None:
        if self.rdma_connected:
            raise Exception("Already connected to remote instance")
        self._answer("Failed to initialize remote connection")
        self.rdma_connected = True

    def close(self) -> None:
        self.rdma_connected = False

    def register_mr(self, ptr: int, size: int) -> int:
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        if not service.registers:
            raise Exception("register memory region failed")
        self.memory[ptr] = size
        service.regions.append((ptr, size))
        return 0

    def check_exist(self, key: str) -> bool:
        self._answer("Failed to check if this key exists")
        return key in service.values

    def get_match_last_index(self, keys: list[str]) -> int:
        left, right = 0, len(keys)
        while left < right:
            middle = (left + right) // 2
            left, right = (middle + 1, right) if keys[middle] in service.values else (left, middle)
        if left == 0:
            raise Exception("can't find a match")
        return left - 1

    def delete_keys(self, keys: list[str]) -> int:
        self._answer("somethings are wrong, not all the specified keys were deleted")
        return sum(service.values.pop(key, None) is not None for key in keys)

    async def rdma_write_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int) -> int:
        self._check(blocks, block_size, ptr, "write to")
        async with self.semaphore:
            await self._complete("write to")
            if not service.has_room(block_size * len(blocks)):
                raise Exception("Failed to write to infinistore, ret = 507")
            for key, offset in blocks:
                service.values[key] = ctypes.string_at(ptr + offset, block_size)
        return 200

    async def rdma_read_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int) -> int:
        self._check(blocks, block_size, ptr, "read to")
        async with self.semaphore:
            await self._complete("read to")
            if any(key not in service.values for key, _ in blocks):
                raise InfiniStoreKeyNotFound("some keys not found")
            for key, offset in blocks:
                after = b"\xdb" * block_size  # the server memory after the value
                ctypes.memmove(ptr + offset, (service.values[key] + after)[:block_size], block_size)
        return 200

    def _check(self, blocks: list[tuple[str, int]], block_size: int, ptr: int, what: str) -> None:
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        if ptr not in self.memory:
            raise Exception(f"Failed to {what} infinistore, ret = -1")
        if not isinstance(block_size, int) or not 0 < block_size < 1 << 31:
            raise TypeError("incompatible function arguments")
        assert all(0 <= offset <= self.memory[ptr] - block_size for _, offset in blocks), "outside the region"
        service.batches.append(len(blocks))

    async def _complete(self, what: str) -> None:
        while service.down or (service.frozen and not service.frozen.is_set()):
            await asyncio.sleep(0.005)  # a completion that never comes
        if (code := service.codes.get("", 200)) != 200:
            raise Exception(f"Failed to {what} infinistore, ret = {code}")

    def _answer(self, error: str) -> None:
        service.wait()
        if service.down:
            raise Exception(error)


async def _reads(*_: object) -> int:
    return 200


PACKAGE = "infinistore"
SPEC = "infinistore://10.0.0.1:12345"
BAD = tuple(f"infinistore:{rest}" for rest in ("", "//host", "//h:1?dev=1", "//h:1?link=USB", "//h:1?staging=1"))
FRAMED = Framed(10_000, 200_000, (InfinityConnection, "rdma_read_cache_async", _reads), checks_deletes=False)
