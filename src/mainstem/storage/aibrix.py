"""Stores behind AIBrix's L2 connectors: a shared folder (SHFS), or a RocksDB on this machine.

AIBrix's cache manager takes token lists and allocates its own blocks; its connectors, one layer below, map bytes to
bytes. This module uses those: our key is the connector's key, and a value may have any length. It knows no tokens and
no blocks of AIBrix, and does not read what AIBrix itself stores.

A connector is a set of coroutines that do their work in an executor, and answers with a `Status`. So one thread runs
the event loop of a store, and a call waits for it no longer than its time-out. What a worker does later, it does to its
own copy: the region that stands for a buffer lets go of it.

The interface: aibrix-kvcache 0.8.0, `aibrix_kvcache.l2.connectors.Connector`.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, KEY_BYTES, Backend, BackendStats, Capabilities, check_options, parse_seconds

T = TypeVar("T")
_WORKERS = 4
_FULL = (errno.ENOSPC, errno.EDQUOT)


class AIBrixBackend(Backend):
    """Values in a folder or a RocksDB, through a connector of AIBrix.

    Neither is bounded: values stay until they are deleted, or `put` says False since the disk is full. A RocksDB on a
    full disk cannot delete either, nor be opened, until somebody makes room.

    Args:
        connector: "shfs": a file a value, in a folder that others may share; "rocksdb": a database that one process
            has open at a time.
        path: of the folder; the store is the folder `namespace` in it.
        namespace: a name for a folder.
        timeout_s: a call that takes longer raises; what it began may still end.

    Raises:
        BadArgument: no such connector, or a namespace that is no name.
        BackendUnavailable: the package is missing, or the store cannot be opened.
    """

    def __init__(
        self, connector: str, path: str | os.PathLike[str], *, namespace: str = "mainstem", timeout_s: float = 5.0
    ) -> None:
        if connector not in _KINDS:
            raise BadArgument("connector", connector, "one of " + ", ".join(_KINDS))
        if not re.fullmatch(r"\w[\w.-]*", namespace, re.ASCII):
            raise BadArgument("namespace", namespace, "letters, digits, dots, underscores and hyphens")
        if timeout_s <= 0:
            raise BadArgument("timeout_s", timeout_s, "above 0")
        self._kind = _KINDS[connector]
        self._timeout_s = timeout_s
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mainstem-aibrix")
        self._connector = self._open_connector(str(Path(path, namespace)))
        # SHFS writes each value of a key to one and the same file and renames it: so a key has one writer at a time.
        self._writers = [asyncio.Lock() for _ in range(256)]
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="mainstem-aibrix-loop", daemon=True).start()

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`aibrix:shfs?path=/mnt/kv&timeout=5&namespace=mainstem`, or `aibrix:rocksdb?path=/var/cache/kv`."""
        check_options(options, ("path", "timeout", "namespace"))
        if not options.get("path"):
            raise BadArgument("storage option", "path", "the folder of the store")
        timeout_s = parse_seconds("timeout", options.get("timeout", "5"))
        return cls(address, options["path"], namespace=options.get("namespace", "mainstem"), timeout_s=timeout_s)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Of the connector."""
        return self._kind.capabilities

    def exists(self, keys: Sequence[bytes]) -> int:
        """Asks for all at once."""
        statuses = self._call(lambda: [self._connector.exists(key) for key in keys])
        self._raise_if_all_failed(statuses)
        return next((at for at, status in enumerate(statuses) if not status.is_ok()), len(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads all at once, each into memory of the connector first; a value that cannot be read counts as absent."""
        wanted = [(key, _Region(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        try:
            statuses = self._call(lambda: [self._connector.get(key, region) for key, region in wanted])
        finally:
            for _, region in wanted:
                region.release()
        self._raise_if_all_failed(statuses)
        return [_length(status, region) for status, (_, region) in zip(statuses, wanted, strict=True)]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes all at once, each from a copy."""
        wanted = [(key, _Region(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        try:
            statuses = self._call(lambda: [self._put(key, region) for key, region in wanted])
        finally:
            for _, region in wanted:
                region.release()
        if not any(_is_full(status) for status in statuses):
            self._raise_if_all_failed(statuses)
        return [status.is_ok() for status in statuses]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes all at once."""
        for status in self._call(lambda: [self._delete(key) for key in keys]):
            if not (status.is_ok() or _is_absent(status)):
                raise StorageError("full" if _is_full(status) else "io", f"AIBrix could not delete: {status.value}")

    def clear(self) -> None:
        """Deletes key by key what is in the folder or the database, which takes a walk."""
        keys: list[bytes] = self._call(lambda: [self._in_worker(self._kind.keys)])[0]
        for at in range(0, len(keys), 256):
            self.delete(keys[at : at + 256])

    def stats(self) -> BackendStats:
        """Nothing: it would take a walk."""
        self._check_open()
        return BackendStats()

    def close(self) -> None:
        """Ends calls that wait, with `StorageError("closed")`, and gives a database free for other processes."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._end_loop(), self._loop)
        closing = self._workers.submit(self._connector.close)
        self._workers.shutdown(wait=False)
        try:
            closing.result(self._timeout_s)
        except TimeoutError:  # every worker hangs in the file system; nobody waits for them
            return

    def _open_connector(self, path: str) -> Any:
        connector = self._kind.make(path, self._workers)
        status = connector.open()
        if not status.is_ok():
            raise BackendUnavailable(f"AIBrix could not open {path}: {status.value}")
        return connector

    def _call(self, begin: Callable[[], Sequence[Awaitable[T]]]) -> list[T]:
        """What the awaitables that `begin` makes come to; it runs in the loop's thread."""

        async def all_at_once() -> list[T]:
            return list(await asyncio.gather(*begin()))

        self._check_open()
        call = all_at_once()
        future: Future[list[T]] = self._submit(call)
        try:
            return future.result(self._timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise StorageError("timeout", f"AIBrix: no end after {self._timeout_s:g} s") from error
        except CancelledError as error:
            raise _closed() from error
        except RuntimeError as error:  # its workers take no more since it was closed
            self._check_open()
            raise StorageError("io", f"AIBrix: {error}") from error

    def _submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError as error:  # the loop ended since
            call.close()
            raise _closed() from error

    async def _put(self, key: bytes, region: _Region) -> Any:
        async with self._writers[key[0]]:
            status = await self._connector.put(key, region)
        if _is_absent(status):  # another process wrote this key meanwhile, and took the file
            return await self._connector.exists(key)
        return status

    async def _delete(self, key: bytes) -> Any:
        async with self._writers[key[0]]:
            return await self._connector.delete(key)

    async def _in_worker(self, work: Callable[[Any], T]) -> T:
        return await self._loop.run_in_executor(self._workers, work, self._connector)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end_loop(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._loop.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _raise_if_all_failed(self, statuses: Sequence[Any]) -> None:
        failed = [status for status in statuses if _failed(status)]
        if failed and len(failed) == len(statuses):
            raise StorageError("io", f"AIBrix: {failed[0].value}")


class _Region:
    """What a connector asks of a memory region, over a buffer of the caller.

    A worker that a call no longer waits for may come to it late: then there is no buffer any more.
    """

    def __init__(self, view: memoryview) -> None:
        self.length = len(view)
        self.found = ABSENT
        self._view: memoryview | None = view
        self._lock = threading.Lock()

    def fill(self, data: bytes) -> None:
        """Takes the value read, if it has the length of the buffer."""
        with self._lock:
            self.found = len(data)
            if self._view is not None and len(data) == self.length:
                self._view[:] = data

    def tobytes(self) -> bytes:
        """The value to write; RocksDB takes nothing but bytes."""
        with self._lock:
            if self._view is None:
                raise ValueError("the call has ended")
            return bytes(self._view)

    def release(self) -> None:
        """From here on nobody reads or writes the buffer."""
        with self._lock:
            self._view = None


# ---------------------------------------------------------------- what a Status says


def _error_number(status: Any) -> int | None:
    """A connector puts the exception, or its text, into the status."""
    if isinstance(status.value, OSError):
        return status.value.errno
    named = re.search(r"\[Errno (\d+)\]", str(status.value))
    return int(named[1]) if named else None


def _is_full(status: Any) -> bool:
    return status.is_error() and (_error_number(status) in _FULL or "No space left" in str(status.value))


def _is_absent(status: Any) -> bool:
    """Also when it went between two steps of the connector."""
    return status.is_not_found() or (status.is_error() and _error_number(status) == errno.ENOENT)


def _other_length(status: Any) -> int | None:
    """SHFS compares lengths first; RocksDB gives the value to the region, whatever its length."""
    sizes = re.search(r"size mismatch: (\d+) != \d+", str(status.value))
    return int(sizes[1]) if sizes else None


def _failed(status: Any) -> bool:
    return not (status.is_ok() or _is_absent(status) or _other_length(status) is not None)


def _length(status: Any, region: _Region) -> int:
    if status.is_ok():
        return region.found
    other = _other_length(status)
    return ABSENT if other is None else other


def _closed() -> StorageError:
    return StorageError("closed", "the AIBrix store is closed")


# ---------------------------------------------------------------- connectors


@dataclass(frozen=True, slots=True)
class _Kind:
    """A connector.

    Args:
        make: from the folder of the store and the executor.
        keys: of every value in it.
    """

    capabilities: Capabilities
    make: Callable[[str, ThreadPoolExecutor], Any]
    keys: Callable[[Any], list[bytes]]


def _import_connector(name: str) -> Any:
    """The package puts uvloop under every event loop of the process as it is imported, which is not ours to do."""
    first = "aibrix_kvcache" not in sys.modules
    policy = asyncio.get_event_loop_policy() if first else None
    try:
        with needs("aibrix_kvcache", "aibrix needs its client: pip install 'mainstem[aibrix]'"):
            return importlib.import_module(f"aibrix_kvcache.l2.connectors.{name}")
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
    with needs("rocksdict", "aibrix:rocksdb needs rocksdict: pip install 'mainstem[aibrix]'"):
        rocksdict = importlib.import_module("rocksdict")
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
