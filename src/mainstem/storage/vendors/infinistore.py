"""InfiniStore, a memory pool over RDMA: values under names, moved in blocks of one size.

Three properties of its client and server shape this file:

- The reader sets the length of a block: a shorter value comes with the server memory that follows it, a longer one is
  cut. So each value is stored in a frame, after its length.
- One missing name fails a whole read: then each value is read alone.
- Calls have no timeout. So they run in a thread of their own, on memory of this back end, with one copy. A call that
  ends after the deadline cannot touch the memory of the caller; the next call opens a new connection.

    frame    length 8, little-endian | value

Sources: https://github.com/bytedance/InfiniStore, PyPI infinistore 0.2.35 (lib.py, src/infinistore.cpp). The client
needs an RDMA device on both sides. Not run against a real server: tests use a double of its client.
"""

from __future__ import annotations

import asyncio
import importlib
import mmap
import re
import threading
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, check_options
from mainstem.storage.native import ClientThread, Frame, Frames
from mainstem.storage.wrappers import Remembered
from mainstem.units import parse_bytes, parse_timeout

_Answer = TypeVar("_Answer")


class InfiniStoreBackend(Backend):
    """Values in an InfiniStore server.

    The only batched query of the server is how long a prefix of the names it has. That does not answer for each name,
    and its binary search can miss a gap. So `exists` queries one name after the other. Names cannot be listed: `clear`
    deletes only what was put through this object.

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

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=True, overwrites=True
    )

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
        if staging_bytes < mmap.PAGESIZE:
            raise BadArgument("staging_bytes", staging_bytes, f"at least {mmap.PAGESIZE}")
        self._module = _client()
        self._where = {"host_addr": host, "service_port": port, "dev_name": device, "link_type": link}
        self._namespace = namespace
        self._staging_bytes = staging_bytes
        self._timeout_s = timeout_s
        self._put = Remembered()
        self._closed = False
        self._link: _Link | None = None
        self._lock = threading.Lock()
        try:
            self.exists([])
        except StorageError as error:
            raise BackendUnavailable(f"infinistore at {host}:{port}: {error}") from error

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`infinistore://10.0.0.1:12345?device=mlx5_0&link=Ethernet&namespace=mainstem&staging=64MiB&timeout=5`."""
        host, _, port = address.removeprefix("//").rpartition(":")
        if not host or not port.isdecimal():
            raise BadArgument("storage address", address, "//address:port of the server")
        check_options(options, ("device", "link", "namespace", "staging", "timeout"))
        return cls(
            host,
            int(port),
            options.get("device", "mlx5_0"),
            options.get("link", "Ethernet"),
            options.get("namespace", "mainstem"),
            parse_bytes("staging", options.get("staging", "64MiB")),
            parse_timeout("timeout", options.get("timeout", "5")),
        )

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Makes one call for each key."""
        with self._lock:
            return self._run(self._open().exists([self._name(key) for key in keys]))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads rounds of frames, values of equal length in one read."""
        lengths = [ABSENT for _ in zip(keys, buffers, strict=True)]
        with self._lock:
            frames = self._open().frames
            for round_ in frames.rounds(keys, buffers):
                frames.blank(round_)
                for frame, done in zip(round_, self._move("read", round_), strict=True):
                    lengths[frame.at] = frames.take(frame) if done else ABSENT
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes rounds of frames, values of equal length in one write."""
        stored = [False for _ in zip(keys, buffers, strict=True)]
        self._put.add(keys)
        with self._lock:
            frames = self._open().frames
            for round_ in frames.rounds(keys, buffers):
                frames.fill(round_)
                for frame, done in zip(round_, self._move("write", round_), strict=True):
                    stored[frame.at] = done
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        """Makes one call."""
        with self._lock:
            link = self._open()
            if keys:
                self._run(link.delete([self._name(key) for key in keys]))
        self._put.discard(keys)

    def clear(self) -> None:
        """Deletes the values that were put through this object."""
        self._put.clear(self.delete)

    def stats(self) -> BackendStats:
        """Returns no counts: the client cannot query them."""
        with self._lock:
            self._open()
        return BackendStats()

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close(self._timeout_s)
                self._link = None

    def _open(self) -> _Link:
        if self._closed:
            raise StorageError("closed", "the InfiniStore store is closed")
        if self._link is None:
            self._link = _Link(self._module, self._where, self._staging_bytes)
            self._run(self._link.connect())
        return self._link

    def _run(self, job: Coroutine[Any, Any, _Answer]) -> _Answer:
        assert self._link is not None
        try:
            return self._link.thread.run(job, self._timeout_s)
        except StorageError:
            self._link.thread.end()  # a call that is still running only touches the memory of the link
            self._link = None
            raise

    def _name(self, key: bytes) -> str:
        return f"{self._namespace}/{key.hex()}"

    def _move(self, verb: str, round_: Sequence[Frame]) -> list[bool]:
        blocks = [(self._name(each.key), each.start, Frames.HEAD_BYTES + len(each.buffer)) for each in round_]
        return self._run(self._open().move(verb, blocks))


class _Link:
    """One connection with its thread and its memory. The coroutines run in that thread."""

    def __init__(self, module: Any, where: Mapping[str, Any], staging_bytes: int) -> None:
        self.thread = ClientThread("InfiniStore")
        self.frames = Frames(staging_bytes)
        self._module, self._where = module, where
        self._connection: Any = None

    async def connect(self) -> None:
        config = self._module.ClientConfig(connection_type=self._module.TYPE_RDMA, **self._where)
        self._connection = self._module.InfinityConnection(config)
        self._connection.connect()
        self._connection.register_mr(self.frames.address, len(self.frames.memory))

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [bool(self._connection.check_exist(name)) for name in names]

    async def delete(self, names: Sequence[str]) -> None:
        self._connection.delete_keys(names)

    async def move(self, verb: str, blocks: Sequence[tuple[str, int, int]]) -> list[bool]:
        """Reads or writes blocks, (name, offset, length). Returns for each whether it succeeded."""
        by_length: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name, offset, length in blocks:
            by_length[length].append((name, offset))
        groups = [self._group(verb, group, length) for length, group in by_length.items()]
        done = {name: was_done for group in await asyncio.gather(*groups) for name, was_done in group.items()}
        return [done[name] for name, _, _ in blocks]

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

    def close(self, timeout_s: float) -> None:
        async def end() -> None:
            self._connection.close()

        with suppress(StorageError):
            self.thread.run(end(), timeout_s)
        self.thread.end()


def _client() -> Any:
    with needs("infinistore", "infinistore needs its client: pip install 'mainstem[infinistore]', and libibverbs1"):
        return importlib.import_module("infinistore")
