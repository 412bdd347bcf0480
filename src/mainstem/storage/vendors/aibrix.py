"""Stores of AIBrix's L2 connectors: a shared folder (SHFS), or a RocksDB database on this machine.

AIBrix's cache manager takes token lists and allocates its own blocks. Its connectors, one layer below, map bytes to
bytes. This module uses the connectors: a key of Mainstem is the key of the connector, and a value may have any length.
It does not use tokens or blocks of AIBrix, and does not read what AIBrix itself stores.

A connector is a set of coroutines that work in an executor and return a `Status`. So each store has one thread with an
event loop, and a call waits for it until its timeout. A worker that ends after the timeout only touches its own copy,
because the region has released the caller's buffer by then.

The interface: aibrix-kvcache 0.8.0, `aibrix_kvcache.l2.connectors.Connector`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import load_package
from mainstem.storage.base import ABSENT, KEY_BYTES, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.framed import ClientThread
from mainstem.storage.options import Readers, parse_text, read_options
from mainstem.units import parse_timeout

T = TypeVar("T")
_OPTIONS: Readers = {
    "path": ("path", parse_text),
    "timeout": ("timeout_s", parse_timeout),
    "namespace": ("namespace", parse_text),
}
_WORKERS = 4
_KEYS = 256  # listed or deleted at once
_FULL = (errno.ENOSPC, errno.EDQUOT)


class AIBrixBackend(Backend):
    """Values in a folder or a RocksDB database, through a connector of AIBrix.

    Neither has a size limit: values stay until they are deleted, and `put` returns False when the disk is full. On a
    full disk a RocksDB database cannot delete or be opened either, until there is room again.

    Args:
        connector: "shfs": one file per value, in a folder that processes may share; "rocksdb": a database that one
            process has open at a time.
        path: path of the folder; the store is the folder `namespace` in it.
        namespace: name of that folder.
        timeout_s: above 0; a call that takes longer raises; the operation may still complete.

    Raises:
        BadArgument: unknown connector, or an invalid namespace.
        BackendUnavailable: the package is missing, or the store cannot be opened.
    """

    def __init__(
        self, connector: str, path: str | os.PathLike[str], *, namespace: str = "mainstem", timeout_s: float = 5.0
    ) -> None:
        if connector not in _KINDS:
            raise BadArgument("connector", connector, "one of " + ", ".join(_KINDS))
        if not re.fullmatch(r"\w[\w.-]*", namespace, re.ASCII):
            raise BadArgument("namespace", namespace, "letters, digits, dots, underscores and hyphens")
        self._kind = _KINDS[connector]
        self._timeout_s = timeout_s
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mainstem-aibrix")
        self._connector = self._open_connector(str(Path(path, namespace)))
        # SHFS writes all values of a key to the same temporary file and renames it, so a key has one writer at a time.
        self._writers = [asyncio.Lock() for _ in range(256)]
        self._closed = False
        self._lock = threading.Lock()
        self._thread = ClientThread("AIBrix")

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`aibrix:shfs?path=/mnt/kv&timeout=5&namespace=mainstem`, or `aibrix:rocksdb?path=/var/cache/kv`."""
        arguments = read_options(options, _OPTIONS)
        if not options.get("path"):
            raise BadArgument("storage option", "path", "the folder of the store")
        return cls(address, **arguments)

    @classmethod
    def open_existing(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens a folder only if it has one for the namespace."""
        folder = Path(options.get("path", ""), options.get("namespace", "mainstem"))
        if options.get("path") and not folder.is_dir():
            raise BackendUnavailable(f"aibrix {folder}: there is no store")
        return cls.from_spec(address, options)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the connector."""
        return self._kind.capabilities

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Checks all keys at once."""
        statuses = self._call(lambda: [self._connector.exists(key) for key in keys])
        self._raise_if_all_failed(statuses)
        return [status.is_ok() for status in statuses]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads all values at once, each through connector memory. A value that cannot be read counts as absent."""
        moved = self._move(self._connector.get, keys, buffers)
        self._raise_if_all_failed([status for status, _ in moved])
        return [_length(status, region) for status, region in moved]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes all values at once, each from a copy."""
        statuses = [status for status, _ in self._move(self._put, keys, buffers)]
        if not any(_is_full(status) for status in statuses):
            self._raise_if_all_failed(statuses)
        return [status.is_ok() for status in statuses]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes all values at once."""
        for status in self._call(lambda: [self._delete(key) for key in keys]):
            if not (status.is_ok() or _is_absent(status)):
                raise StorageError("full" if _is_full(status) else "io", f"AIBrix could not delete: {status.value}")

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists all keys in the folder or database, and reads the values for their lengths."""
        for keys in self._keys():
            lengths = self.get(keys, [memoryview(bytearray(1)) for _ in keys])
            yield [Listed(key, length) for key, length in zip(keys, lengths, strict=True) if length != ABSENT]

    def clear(self) -> None:
        """Lists all keys in the folder or database and deletes them."""
        for keys in self._keys():
            self.delete(keys)

    def _keys(self) -> Iterator[list[bytes]]:
        keys: list[bytes] = self._call(lambda: [self._in_worker(self._kind.keys)])[0]
        for at in range(0, len(keys), _KEYS):
            yield keys[at : at + _KEYS]

    def stats(self) -> BackendStats:
        """Returns no counts: they would need a listing of all values."""
        self._check_open()
        return BackendStats()

    def close(self) -> None:
        """Ends waiting calls with `StorageError("closed")`, and releases a database for other processes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.end(asyncio.sleep(0))
        closing = self._workers.submit(self._connector.close)
        self._workers.shutdown(wait=False)
        try:
            closing.result(self._timeout_s)
        except TimeoutError:  # every worker is stuck in the file system; do not wait
            return

    def _open_connector(self, path: str) -> Any:
        connector = self._kind.make(path, self._workers)
        status = connector.open()
        if not status.is_ok():
            raise BackendUnavailable(f"AIBrix could not open {path}: {status.value}")
        return connector

    def _call(self, begin: Callable[[], Sequence[Awaitable[T]]]) -> list[T]:
        """Returns the results of the awaitables that `begin` creates. `begin` runs in the thread of the loop."""

        async def all_at_once() -> list[T]:
            return list(await asyncio.gather(*begin()))

        self._check_open()
        try:
            return self._thread.run(all_at_once(), self._timeout_s)
        except StorageError:
            self._check_open()  # its workers take no more jobs after close
            raise

    def _move(
        self, move: Callable[[bytes, _Region], Awaitable[Any]], keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[tuple[Any, _Region]]:
        """Moves all values at once; then nothing touches the buffers. Returns the status and the region of each."""
        wanted = [(key, _Region(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        try:
            statuses = self._call(lambda: [move(key, region) for key, region in wanted])
        finally:
            for _, region in wanted:
                region.release()
        return [(status, region) for status, (_, region) in zip(statuses, wanted, strict=True)]

    async def _put(self, key: bytes, region: _Region) -> Any:
        async with self._writers[key[0]]:
            status = await self._connector.put(key, region)
        if _is_absent(status):  # meanwhile another process wrote this key and renamed the file
            return await self._connector.exists(key)
        return status

    async def _delete(self, key: bytes) -> Any:
        async with self._writers[key[0]]:
            return await self._connector.delete(key)

    async def _in_worker(self, work: Callable[[Any], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, self._connector)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("closed", "the AIBrix store is closed")

    def _raise_if_all_failed(self, statuses: Sequence[Any]) -> None:
        failed = [status for status in statuses if _failed(status)]
        if failed and len(failed) == len(statuses):
            raise StorageError("io", f"AIBrix: {failed[0].value}")


class _Region:
    """The memory region that a connector expects, over a buffer of the caller.

    A worker that outlives its call may use it late: by then the buffer is released.
    """

    def __init__(self, view: memoryview) -> None:
        self.length = len(view)
        self.found = ABSENT
        self._view: memoryview | None = view
        self._lock = threading.Lock()

    def fill(self, data: bytes) -> None:
        """Copies a value to the buffer, if it has the length of the buffer."""
        with self._lock:
            self.found = len(data)
            if self._view is not None and len(data) == self.length:
                self._view[:] = data

    def tobytes(self) -> bytes:
        """Returns the value to write; RocksDB accepts only bytes."""
        with self._lock:
            if self._view is None:
                raise ValueError("the call has ended")
            return bytes(self._view)

    def release(self) -> None:
        """Releases the buffer: no worker reads or writes it from now on."""
        with self._lock:
            self._view = None


# ---------------------------------------------------------------- reading a Status


def _error_number(status: Any) -> int | None:
    """Returns the errno of a status, which holds an exception or its text."""
    if isinstance(status.value, OSError):
        return status.value.errno
    named = re.search(r"\[Errno (\d+)\]", str(status.value))
    return int(named[1]) if named else None


def _is_full(status: Any) -> bool:
    return status.is_error() and (_error_number(status) in _FULL or "No space left" in str(status.value))


def _is_absent(status: Any) -> bool:
    """Returns whether the value is absent, or disappeared between two steps of the connector."""
    return status.is_not_found() or (status.is_error() and _error_number(status) == errno.ENOENT)


def _other_length(status: Any) -> int | None:
    """Returns the length of a value that does not fit. Only SHFS compares lengths; RocksDB passes any value on."""
    sizes = re.search(r"size mismatch: (\d+) != \d+", str(status.value))
    return int(sizes[1]) if sizes else None


def _failed(status: Any) -> bool:
    return not (status.is_ok() or _is_absent(status) or _other_length(status) is not None)


def _length(status: Any, region: _Region) -> int:
    if status.is_ok():
        return region.found
    other = _other_length(status)
    return ABSENT if other is None else other


# ---------------------------------------------------------------- connectors


@dataclass(frozen=True, slots=True)
class _Kind:
    """A connector.

    Args:
        make: makes the connector from the folder of the store and the executor.
        keys: lists the keys of all values in the store.
    """

    capabilities: Capabilities
    make: Callable[[str, ThreadPoolExecutor], Any]
    keys: Callable[[Any], list[bytes]]


def _import_connector(name: str) -> Any:
    """Imports a connector. The package makes uvloop the policy of the whole process; this restores the old one."""
    first = "aibrix_kvcache" not in sys.modules
    policy = asyncio.get_event_loop_policy() if first else None
    try:
        hint = "aibrix needs its client: pip install 'mainstem[aibrix]'"
        return load_package(f"aibrix_kvcache.l2.connectors.{name}", hint)
    finally:
        if first:
            asyncio.set_event_loop_policy(policy)


def _make_shfs(path: str, workers: ThreadPoolExecutor) -> Any:
    return _import_connector("shfs").SHFSConnector(path, workers)


def _shfs_keys(connector: Any) -> list[bytes]:
    names = [path.name for path in Path(connector.root_path).rglob("*") if path.is_file()]
    return [bytes.fromhex(name) for name in names if re.fullmatch(rf"[0-9a-f]{{{2 * KEY_BYTES}}}", name)]


def _make_rocksdb(path: str, workers: ThreadPoolExecutor) -> Any:
    module = _import_connector("rocksdb")
    rocksdict = load_package("rocksdict", "aibrix:rocksdb needs rocksdict: pip install 'mainstem[aibrix]'")
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    return module.RocksDBConnector(path, options, rocksdict.AccessType.read_write(), workers)


def _rocksdb_keys(connector: Any) -> list[bytes]:
    return list(connector.store.keys())


_KINDS = {
    "shfs": _Kind(
        Capabilities(persistent=True, shared=True, zero_copy=False, evicts=False, overwrites=True),
        _make_shfs,
        _shfs_keys,
    ),
    "rocksdb": _Kind(
        Capabilities(persistent=True, shared=False, zero_copy=False, evicts=False, overwrites=True),
        _make_rocksdb,
        _rocksdb_keys,
    ),
}


BACKEND = AIBrixBackend
