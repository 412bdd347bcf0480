"""The file store: the order of its steps, and what a failure leaves to do. The package describes files and rules."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError, check_integer
from mainstem.storage.base import ABSENT, KEY_BYTES, SCANNED, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.calls import Calls
from mainstem.storage.file.catalog import Catalog
from mainstem.storage.file.disk import FULL, FileSystem, Folder, Reserve
from mainstem.storage.file.hashes import hashes
from mainstem.storage.file.index import EMPTY, Index
from mainstem.storage.file.space import GRAIN_BYTES, NOWHERE, Entry, Piece, rounded
from mainstem.storage.file.values import Values
from mainstem.storage.options import Readers, parse_number, read_options
from mainstem.units import parse_bytes, show_bytes

log = logging.getLogger(__name__)

STEP_BYTES = 64 << 20
"""`values` grows by this, or by the size of a batch."""

DEFAULT_BYTES = 8 << 30
_CAUSES = {
    **dict.fromkeys(FULL, "full"),
    errno.ETIMEDOUT: "timeout",
    **dict.fromkeys((errno.ENOTCONN, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET), "unreachable"),
}
_MAX = 2**63 - 1
_DELETED = Entry(NOWHERE, 0, bytes(16))


class FileBackend(Backend):
    """Values on a local disk, with a size limit; evicts the least recently used first. One process has it open.

    Each put syncs the values of a batch once and their records (some KiB) once. When writing fails, the store continues
    to read. A later put first checks that the disk accepts writes again, before it evicts anything.

    Args:
        root: the folder of the store, for nothing else. It is made with its parents if missing, for its owner only.
        capacity_bytes: the limit for all values, each rounded up to 4 KiB. The index is extra: at most 144 bytes a
            value plus 72 KiB, and half as much again during a rewrite. The values file grows up to this limit. A
            smaller capacity than last time drops the values beyond it.
        sync: whether `put` and `delete` return only when the data is on disk. Without it, values survive the end of
            the process but not of the machine: then the newest may be lost, or a replaced one may reappear.
        threads: threads that read a batch of several MiB, with the caller's: one reads while another computes digests.
        min_free_bytes: bytes to leave free on the file system. The store does not grow into them. If others use them,
            it truncates its file and drops the values there. It checks when it writes, at most once a second. A value
            that then has no room is refused; existing values can still be read and replaced.
        io: file system calls.
        clock: returns the time in seconds.
        random: returns n random bytes, the junk that destroys old values.

    Raises:
        BadArgument: the capacity is below one grain, threads below 1, min_free_bytes negative, or root not a path.
        BackendUnavailable: xxhash is not installed, another process has the store open, or the folder or one of its
            files cannot be opened, is not a regular file, or can be changed by another user.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=False, zero_copy=True, evicts=True, overwrites=True
    )

    def __init__(
        self,
        root: Path | str,
        capacity_bytes: int,
        *,
        sync: bool = True,
        threads: int = 2,
        min_free_bytes: int = 0,
        io: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        check_integer("capacity_bytes", capacity_bytes, GRAIN_BYTES, _MAX)
        check_integer("threads", threads, 1, _MAX)
        check_integer("min_free_bytes", min_free_bytes, 0, _MAX)
        if not str(root) or "\0" in str(root):
            raise BadArgument("root", str(root), "the path of a folder")
        self._digest, checksum = hashes()
        self._capacity = capacity_bytes // GRAIN_BYTES * GRAIN_BYTES
        self._sync = sync
        self._folder = Folder(Path(root), io or FileSystem())
        self._reserve = Reserve(self._folder, min_free_bytes, clock)
        self._index = Index(self._folder, checksum)
        self._values = Values(self._folder, self._digest, random(GRAIN_BYTES), threads)
        self._catalog = Catalog()
        self._failed = False  # the last write failed
        self._clear_pending = False  # a clear is not complete on disk
        self._stale = False  # the index may name values that left and are not destroyed
        self._write_lock = threading.Lock()  # one writer at a time
        self._calls = Calls(f"the file store {self._folder.root}")
        try:
            self._folder.open()
            self._load()
        except BaseException as error:
            self._folder.close()
            if isinstance(error, OSError):
                raise BackendUnavailable(f"file store {root}: {error.strerror or error}") from error
            raise

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`file:/var/cache/mainstem?capacity=8GiB&min_free=0&sync=batch&threads=2`; sync is `batch` or `none`.

        Without a capacity: 8 GiB, or the size of the existing file if larger. A smaller one drops values beyond it,
        and logs how many.
        """
        arguments = read_options(options, _OPTIONS)
        arguments.setdefault("capacity_bytes", capacity_of(Path(address), DEFAULT_BYTES))
        return cls(address, **arguments)

    @classmethod
    def open_existing(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens the store with the size that its file has, if that is more than the capacity."""
        try:
            size = rounded((Path(address) / "values").lstat().st_size)
        except OSError as error:
            raise BackendUnavailable(f"file store {address}: there is no store: {error.strerror}") from error
        if "capacity" in options:
            options = {**options, "capacity": str(max(size, parse_bytes("capacity", options["capacity"])))}
        return cls.from_spec(address, options)

    @property
    def corrupt(self) -> int:
        """Counts the values dropped since the store was opened because they did not verify."""
        return self._catalog.corrupt

    # ------------------------------------------------------------ the interface

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Looks keys up in the catalog, in memory."""
        with self._reading():
            return [entry is not None for entry in self._catalog.find(keys)]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads values directly into the buffers and verifies the content of the buffers."""
        with self._reading():
            entries = self._catalog.find(keys)
            pieces = [
                Piece(key, entry, buffer)
                for key, entry, buffer in zip(keys, entries, buffers, strict=True)
                if entry is not None and entry.length == len(buffer)
            ]
            corrupt, unread = self._values.read(pieces)
            self._catalog.drop_corrupt(corrupt)
            self._catalog.touch(keys)
        lost = {piece.key for piece in corrupt + unread}
        return [
            ABSENT if entry is None or key in lost else entry.length for key, entry in zip(keys, entries, strict=True)
        ]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes values directly from the buffers. A value that the store holds already is not written again."""
        pieces = {}  # the last value of a key that occurs twice
        for key, buffer in zip(keys, buffers, strict=True):
            _check_value(key, buffer)
            pieces[key] = Piece(key, Entry(NOWHERE, len(buffer), self._digest(buffer)), buffer)
        refused: set[bytes] = set()
        with self._writing():
            self._shrink()
            fresh = self._catalog.fresh(list(pieces.values()))
            self._grow(sum(rounded(piece.entry.length) for piece in fresh))
            for batch in _batches(fresh, self._catalog.total // 2):
                refused |= self._store(batch)
        return [key not in refused for key in keys]

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists what the catalog has now, the least recently used first."""
        with self._reading():
            found = self._catalog.items()
        for at in range(0, len(found), SCANNED):
            yield [Listed(key, entry.length) for key, entry in found[at : at + SCANNED]]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Destroys values, then records it in the index."""
        with self._writing():
            gone = self._catalog.drop(keys)
            self._commit([], [self._index.record(key, _DELETED) for key in gone])

    def clear(self) -> None:
        """Truncates the values file and starts a new index."""
        with self._writing():
            self._catalog.clear()
            self._clear_pending = True
            self._recover()

    def stats(self) -> BackendStats:
        """Returns exact counts; bytes are in whole grains."""
        with self._reading():
            return self._catalog.stats(self._capacity)

    def close(self) -> None:
        """Waits for running calls, then releases the store for other processes."""
        with self._write_lock:
            self._calls.close()
            self._folder.close()
            self._values.close()

    def check(self) -> None:
        """Checks that every grain is either free or owned by exactly one value.

        Raises:
            AssertionError: the check failed; the message names the broken rule.
        """
        with self._write_lock:
            self._catalog.check()
            assert self._catalog.total <= self._capacity, "the file is larger than the capacity"

    # ------------------------------------------------------------ writing

    def _store(self, pieces: Sequence[Piece]) -> set[bytes]:
        """Writes a batch and announces it. Returns the keys of values that have no room."""
        with self._catalog.placing(pieces) as placed:
            self._commit(placed, [self._index.record(key, entry) for key, entry, _ in reversed(placed)])
        return {piece.key for piece in pieces} - {piece.key for piece in placed}

    def _commit(self, pieces: Sequence[Piece], records: Sequence[bytes]) -> None:
        """Applies changes to the disk, in the order that the package docstring gives."""
        with self._catalog.destroying() as doomed:
            self._values.write(pieces, doomed)
            if self._sync and (doomed or pieces):
                self._folder.sync("values")
            if self._index.is_long(len(self._catalog), len(records)):
                self._index.rewrite(self._catalog.items())
            self._folder.sync_names()
            if records:
                self._index.append(records)
                if self._sync:
                    self._folder.sync("index")

    def _recover(self) -> None:
        """Completes the work that a failure left, and writes an empty record as a test, before any value is evicted."""
        if self._clear_pending:
            self._folder.truncate("values", 0)
            self._folder.sync("values")
            self._clear_pending, self._stale = False, True
        if self._stale:
            self._index.rewrite(self._catalog.items())
            self._stale = False
            self._folder.sync_names()
        if self._failed:
            self._commit([], [EMPTY])
            self._failed = False

    def _grow(self, size: int) -> None:
        """Grows the file if no free run has this size, within the capacity and the free space of the disk."""
        total = self._catalog.total
        if self._catalog.largest >= size or total == self._capacity:
            return
        for step in (max(size, STEP_BYTES), size):
            grown = min(total + step, self._capacity)
            if self._reserve.extend(total, grown):
                self._catalog.grow(grown)
                return

    def _shrink(self) -> None:
        """Truncates the file by as much as the reserve lacks, and evicts the values there."""
        total = self._catalog.total
        cut = max(0, total - rounded(self._reserve.lacking_bytes()))
        if cut == total:
            return
        self._catalog.evict_beyond(cut)
        self._folder.truncate("values", cut)
        if self._sync:
            self._folder.sync("values")
        self._catalog.shrink(cut)  # only after the sync: until then the values there are not destroyed
        self._reserve.returned(total - cut)

    # ------------------------------------------------------------ opening and closing

    def _load(self) -> None:
        """Loads the entries of the index that can exist. Values are verified when they are read."""
        size = self._folder.size("values")
        gone = self._catalog.load(self._index.load(), min(size // GRAIN_BYTES * GRAIN_BYTES, self._capacity))
        store, has = f"file store {self._folder.root}", show_bytes(size)
        if size > self._capacity:
            log.warning(
                "%s: cut from %s to its capacity of %s: %d values gone", store, has, show_bytes(self._capacity), gone
            )
            self._folder.truncate("values", self._capacity)
        elif gone:
            log.warning("%s: its file ends after %s: %d values beyond that are gone", store, has, gone)
        self._stale = len(self._index) != len(self._catalog)
        try:
            self._recover()
        except OSError:
            self._failed = True
        self._folder.sync_names()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._calls.call():
            try:
                yield
            except OSError as error:
                raise _failure(f"reading from {self._folder.root}", error) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._write_lock, self._reading():
            try:
                self._recover()
                yield
            except OSError as error:
                self._failed = True
                raise _failure(f"writing to {self._folder.root}", error) from error


def capacity_of(root: Path, least_bytes: int) -> int:
    """Returns the capacity of a store that is given none: the size of its file, but at least a default."""
    try:
        return max(least_bytes, (root / "values").lstat().st_size)
    except OSError:
        return least_bytes


def _parse_sync(name: str, text: str) -> bool:
    if text not in ("batch", "none"):
        raise BadArgument(name, text, "batch or none")
    return text == "batch"


_OPTIONS: Readers = {
    "capacity": ("capacity_bytes", parse_bytes),
    "min_free": ("min_free_bytes", parse_bytes),
    "sync": ("sync", _parse_sync),
    "threads": ("threads", parse_number),
}


def _check_value(key: bytes, buffer: memoryview) -> None:
    if len(key) != KEY_BYTES:
        raise BadArgument("key", key, f"{KEY_BYTES} bytes")
    if not len(buffer):
        raise BadArgument("value", bytes(buffer), "at least one byte")  # an empty value has no bytes to destroy


def _failure(what: str, error: OSError) -> StorageError:
    return StorageError(_CAUSES.get(error.errno or 0, "io"), f"{what}: {error.strerror or error}")


def _batches(pieces: Sequence[Piece], limit_bytes: int) -> Iterator[Sequence[Piece]]:
    """Splits values into batches of at most half the room (at least one value), so that no batch evicts itself."""
    first = size = 0
    for at, piece in enumerate(pieces):
        room = rounded(piece.entry.length)
        if at > first and size + room > limit_bytes:
            yield pieces[first:at]
            first, size = at, 0
        size += room
    if pieces:
        yield pieces[first:]
