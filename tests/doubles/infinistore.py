"""A double of the client `infinistore`: the same calls, checks and errors, over one dict.

As in the real one (PyPI infinistore 0.2.35, lib.py; https://github.com/bytedance/InfiniStore, src/infinistore.cpp):
memory is identified by the exact address that was registered; the caller sets the length of a block, regardless of the
value; one missing name fails the whole read; a write replaces; the search for the end of a prefix is a binary search.
Tests change `server`.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

TYPE_RDMA, TYPE_TCP = "RDMA", "TCP"


class InfiniStoreException(Exception):
    pass


class InfiniStoreKeyNotFound(InfiniStoreException):
    pass


@dataclass
class Server:
    """One server and its faults."""

    values: dict[str, bytes] = field(default_factory=dict)
    capacity: int = 1 << 30
    down: bool = False
    frozen: threading.Event | None = None
    """No call ends until it is set."""
    code: int = 200
    """The code that reads and writes end with."""
    connections: int = 0
    registered: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """The number of blocks in each read and write."""


server = Server()


def reset() -> Server:
    server.__dict__.update(Server().__dict__)
    return server


class ClientConfig:
    def __init__(self, **kwargs: Any) -> None:
        self.connection_type = kwargs.get("connection_type")
        self.host_addr = kwargs.get("host_addr")
        self.dev_name = kwargs.get("dev_name", "mlx5_1")
        self.ib_port = kwargs.get("ib_port", 1)
        self.link_type = kwargs.get("link_type", "IB")
        self.service_port = kwargs.get("service_port")

    def verify(self) -> None:
        if self.connection_type not in (TYPE_RDMA, TYPE_TCP):
            raise Exception("Invalid connection type")
        if not self.host_addr or not self.service_port:
            raise Exception("Host address is empty or service port is 0")
        if self.link_type not in ("IB", "Ethernet"):
            raise Exception("link type should be IB or Ethernet for RDMA connection")


class InfinityConnection:
    def __init__(self, config: ClientConfig) -> None:
        config.verify()
        self.config = config
        self.rdma_connected = False
        self.memory: dict[int, int] = {}
        self.semaphore = asyncio.BoundedSemaphore(128)

    def connect(self) -> None:
        if self.rdma_connected:
            raise Exception("Already connected to remote instance")
        self._answer("Failed to initialize remote connection")
        self.rdma_connected = True
        server.connections += 1

    def close(self) -> None:
        self.rdma_connected = False

    def register_mr(self, ptr: int, size: int) -> int:
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        self.memory[ptr] = size
        server.registered.append((ptr, size))
        return 0

    def check_exist(self, key: str) -> bool:
        self._answer("Failed to check if this key exists")
        return key in server.values

    def get_match_last_index(self, keys: list[str]) -> int:
        left, right = 0, len(keys)
        while left < right:
            middle = (left + right) // 2
            left, right = (middle + 1, right) if keys[middle] in server.values else (left, middle)
        if left == 0:
            raise Exception("can't find a match")
        return left - 1

    def delete_keys(self, keys: list[str]) -> int:
        self._answer("somethings are wrong, not all the specified keys were deleted")
        return sum(server.values.pop(key, None) is not None for key in keys)

    async def rdma_write_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int) -> int:
        self._check(blocks, block_size, ptr, "write to")
        async with self.semaphore:
            await self._complete("write to")
            used = sum(map(len, server.values.values()))
            if used + block_size * len(blocks) > server.capacity:
                raise Exception("Failed to write to infinistore, ret = 507")
            for key, offset in blocks:
                server.values[key] = ctypes.string_at(ptr + offset, block_size)
        return 200

    async def rdma_read_cache_async(self, blocks: list[tuple[str, int]], block_size: int, ptr: int) -> int:
        self._check(blocks, block_size, ptr, "read to")
        async with self.semaphore:
            await self._complete("read to")
            if any(key not in server.values for key, _ in blocks):
                raise InfiniStoreKeyNotFound("some keys not found")
            for key, offset in blocks:
                after = b"\xdb" * block_size  # the server memory after the value
                ctypes.memmove(ptr + offset, (server.values[key] + after)[:block_size], block_size)
        return 200

    def _check(self, blocks: list[tuple[str, int]], block_size: int, ptr: int, what: str) -> None:
        if not self.rdma_connected:
            raise Exception("this function is only valid for connected rdma")
        if ptr not in self.memory:
            raise Exception(f"Failed to {what} infinistore, ret = -1")
        if not isinstance(block_size, int) or not 0 < block_size < 1 << 31:
            raise TypeError("incompatible function arguments")
        assert all(offset >= 0 and offset + block_size <= self.memory[ptr] for _, offset in blocks), (
            "outside the region"
        )
        server.blocks.append(len(blocks))

    async def _complete(self, what: str) -> None:
        while server.down or (server.frozen and not server.frozen.is_set()):
            await asyncio.sleep(0.005)  # a completion that never comes
        if server.code != 200:
            raise Exception(f"Failed to {what} infinistore, ret = {server.code}")

    def _answer(self, error: str) -> None:
        if server.frozen:
            server.frozen.wait()
        if server.down:
            raise Exception(error)
