"""InfiniStore, a memory pool over RDMA: values under names, moved in blocks of one size.

Three properties of its client and server shape this file:

- The reader sets the length of a block: a shorter value comes with the server memory that follows it, a longer one is
  cut. So each value is stored in a frame, after its length.
- One missing name fails a whole read: then each value is read alone.
- Calls have no timeout. So they run in a thread of their own, on memory of the link, with one copy.

Sources: https://github.com/bytedance/InfiniStore, PyPI infinistore 0.2.35 (lib.py, src/infinistore.cpp). The client
needs an RDMA device on both sides.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from mainstem.errors import BadArgument, StorageError
from mainstem.imports import load_package
from mainstem.storage.base import Capabilities
from mainstem.storage.framed import OPTIONS, Frame, FramedBackend, Frames, Link
from mainstem.storage.options import parse_host, parse_text, read_options


class InfiniStoreBackend(FramedBackend):
    """Values in an InfiniStore server.

    The only batched query of the server is how long a prefix of the names it has. That does not answer for each name,
    and its binary search can miss a gap. So `exists` queries one name after the other.

    Args:
        host: IPv4 address of the server.
        port: port of its service.
        device: RDMA device of this machine.
        link: `IB` or `Ethernet`.
        namespace: prefix of every name.
        staging_bytes: size of the registered memory that values pass through; no value may be longer.
        timeout_s: timeout of one round through that memory.

    Raises:
        BadArgument: unknown link, or staging_bytes is too small.
        BackendUnavailable: the client is not installed, or cannot connect.
    """

    capabilities: ClassVar[Capabilities] = replace(FramedBackend.capabilities, batched=False)

    def __init__(
        self,
        host: str,
        port: int,
        device: str = "mlx5_0",
        link: str = "Ethernet",
        namespace: str = "mainstem",
        staging_bytes: int = 64 << 20,
        timeout_s: float = 5.0,
    ) -> None:
        if link not in ("IB", "Ethernet"):
            raise BadArgument("link", link, "IB or Ethernet")
        client = "infinistore needs its client: pip install 'mainstem[infinistore]', and libibverbs1"
        module = load_package("infinistore", client)
        where = {"host_addr": host, "service_port": port, "dev_name": device, "link_type": link}
        super().__init__(
            "InfiniStore",
            f"infinistore at {host}:{port}",
            lambda: _Link(module, where, Frames(staging_bytes)),
            namespace,
            timeout_s,
        )

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`infinistore://10.0.0.1:12345?device=mlx5_0&link=Ethernet&namespace=mainstem&staging=64MiB&timeout=5`."""
        host, port = parse_host(address, "//address:port of the server")
        own = {"device": ("device", parse_text), "link": ("link", parse_text)}
        return cls(host, port, **read_options(options, {**own, **OPTIONS}))


class _Link(Link):
    """A connection to the server."""

    def __init__(self, module: Any, where: Mapping[str, Any], frames: Frames) -> None:
        super().__init__("InfiniStore", frames)
        self._module, self._where = module, where
        self._connection: Any = None

    async def connect(self) -> None:
        config = self._module.ClientConfig(connection_type=self._module.TYPE_RDMA, **self._where)
        self._connection = self._module.InfinityConnection(config)
        self._connection.connect()
        self._connection.register_mr(self.frames.address, len(self.frames.memory))

    async def exists(self, names: Sequence[str]) -> list[bool]:
        """Makes one call for each name."""
        return [bool(self._connection.check_exist(name)) for name in names]

    async def delete(self, names: Sequence[str]) -> None:
        """Makes one call."""
        self._connection.delete_keys(names)

    async def read(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool | StorageError]:
        """Reads values of equal length in one call."""
        return [*await self._move("read", names, round_)]

    async def write(self, names: Sequence[str], round_: Sequence[Frame]) -> list[bool]:
        """Writes values of equal length in one call."""
        return await self._move("write", names, round_)

    async def close(self) -> None:
        self._connection.close()

    async def _move(self, verb: str, names: Sequence[str], round_: Sequence[Frame]) -> list[bool]:
        """Returns for each value whether it was moved."""
        by_size: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name, frame in zip(names, round_, strict=True):
            by_size[frame.size].append((name, frame.start))
        groups = [self._group(verb, group, size) for size, group in by_size.items()]
        done = {name: was_done for group in await asyncio.gather(*groups) for name, was_done in group.items()}
        return [done[name] for name in names]

    async def _group(self, verb: str, group: Sequence[tuple[str, int]], length: int) -> dict[str, bool]:
        call = getattr(self._connection, f"rdma_{verb}_cache_async")
        results: list[object] = await asyncio.gather(
            call(list(group), length, self.frames.address), return_exceptions=True
        )
        error = results[0]
        if not isinstance(error, BaseException):
            return {name: True for name, _ in group}
        missing = isinstance(error, self._module.InfiniStoreKeyNotFound)
        if missing and len(group) > 1:
            alone = [await self._group(verb, [block], length) for block in group]
            return {name: done for part in alone for name, done in part.items()}
        if missing or re.search(r"ret = 507\b", str(error)):  # no such name; no memory in the server
            return {name: False for name, _ in group}
        raise error


BACKEND = InfiniStoreBackend
