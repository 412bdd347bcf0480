"""A store on a local disk, without a server: values in one preallocated file, and a small log that locates them.

    root/  lock     held by the one process that has the store open
           values   [ value | value | free ............ | value | free ]     in grains of 4 KiB; grows in steps
           index    [ record | record | record ]                             append only; rewritten when half is dead

    put:  destroy old values -> write values -> sync values -> append records -> sync index -> announce to readers
    get:  look up -> read into the caller's buffer -> compare the digest of that buffer with the one in the record

Three rules keep the store correct after a kill or a power loss at any instruction, and after later damage:

1. A value counts only if its 128-bit digest and the checksum of its record verify. Otherwise it is a miss and dropped.
   So torn, lost or misdirected writes are harmless, and so is a reader that finds the next value in an extent.
2. A value that leaves the store (deleted, replaced, evicted) is destroyed in the same sync as the next change, before
   that change is announced: another value takes its extent, or junk overwrites its first grain. So no older state of
   the index can bring an old value back, unless the same bytes are written there again.
3. A write that started and failed counts as written: its place in the index is not reused, its extents are destroyed.

To make room, the store evicts the least recently used value, then the values after it in the file until the new value
fits. Values of one size never waste room, and values of several sizes need no size classes. Later values of a batch are
evicted first, because they are useless without the earlier ones.

The store does not know what a value means. It does not protect against someone who can write to its folder and compute
digests: against that, the caller must verify a keyed seal of its own.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import threading
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, KEY_BYTES, Backend, BackendStats, Capabilities, check_options, parse_bytes

GRAIN_BYTES = 4096
"""Values start at multiples of this: a page of the page cache, so that no write has to read first."""

RECORD = Struct("<32s16sqqQ")  # little-endian, 72 bytes
"""key, digest of the value, offset in `values` (-1: deleted), length, checksum of the fields before it."""

SLACK_RECORDS = 1024
"""The index is rewritten when it has more records than twice the live ones plus this."""

STEP_BYTES = 64 << 20
"""`values` grows by this, or by the size of a batch."""

ASK_EVERY_S = 1.0
"""The minimum time between two queries of the free disk space, if some of it must stay free."""

_DEFAULT_BYTES = 8 << 30
READ_BYTES = 1 << 20
"""Values are read together up to this size. More is another task, which an idle thread can take."""

HELD_BYTES = 64 << 10
"""Above this size xxhash releases the GIL, which a busy thread then holds for 5 ms: as long as a thousand digests."""

WRITE_BYTES = 1 << 30
"""The limit for one write call; Linux allows nearly twice as much."""

_BODY = Struct(RECORD.format[:-1])
_FORMAT = 0x6D61696E7374656D + 1  # seeds the checksum of records: records of another format version do not verify
_MAX_VECTOR = 1024  # IOV_MAX of Linux
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # with O_RDWR, opening a pipe does not block
_ZEROS = memoryview(bytes(GRAIN_BYTES))
_DISCARD = memoryview(bytearray(GRAIN_BYTES))  # receives the bytes between values
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileSystem:
    """The file system calls of the store. Each raises what its namesake in `os` raises. Tests pass one that fails."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder that only its owner can use, unless it exists."""
        try:
            path.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            return
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)

    def open(self, path: str | Path, flags: int, folder: int | None = None) -> int:
        """Opens a file in a folder. Only the owner can use a file that this creates."""
        return os.open(path, flags, 0o600, dir_fd=folder)

    def close(self, fd: int) -> None:
        """Closes a descriptor, even if it raises."""
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """Returns type, owner and size of a file."""
        return os.fstat(fd)

    def lock(self, fd: int) -> None:
        """Locks a file until it is closed. Raises `BlockingIOError` if it is locked already."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads into buffers, perhaps not all of them. Returns 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes buffers, perhaps not all of them."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """Makes written data and the file size durable."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Makes a file durable, or the names in a folder."""
        os.fsync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Allocates disk space; new space reads as zeros."""
        os.posix_fallocate(fd, offset, length)

    def free_bytes(self, fd: int) -> int:
        """Returns the bytes that unprivileged users can still write to the file system of a file."""
        found = os.fstatvfs(fd)
        return found.f_bavail * found.f_frsize

    def truncate(self, fd: int, length: int) -> None:
        """Truncates a file."""
        os.ftruncate(fd, length)

    def rename(self, old: str, new: str, folder: int) -> None:
        """Replaces a file by another one, atomically."""
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, name: str, folder: int) -> None:
        """Removes a name."""
        os.unlink(name, dir_fd=folder)


class Entry(NamedTuple):
    """Where a value is, its digest, and where its last grain ends."""

    offset: int
    length: int
    digest: bytes
    end: int


class Space:
    """The free parts of [0, total): runs of whole grains, never two adjacent ones. It does not know owners.

    Finding a run takes logarithmic time in the number of different sizes.
    """

    def __init__(self) -> None:
        self.total = 0
        self.unused = 0
        self._end_of: dict[int, int] = {}  # end of the free run that starts here
        self._start_of: dict[int, int] = {}  # start of the free run that ends here
        self._sizes: list[int] = []  # of free runs, ascending, without duplicates
        self._starts: dict[int, dict[int, None]] = {}  # by size; a dict is a set that keeps its order

    @property
    def largest(self) -> int:
        """Returns the size of the largest free run."""
        return self._sizes[-1] if self._sizes else 0

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields all free runs, half-open, in no order."""
        return iter(self._end_of.items())

    def grow(self, total: int) -> None:
        """Adds room at the end."""
        start, self.total = self.total, total
        self.free(start, total)

    def shrink(self, total: int) -> None:
        """Removes room at the end, which must be free."""
        start = self._start_of[self.total]
        self._remove(start, self.total)
        self._add(start, total)
        self.total = total

    def allocate(self, size: int) -> int | None:
        """Allocates the front of the smallest free run that is large enough. Returns None if there is none."""
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return None
        start = next(iter(self._starts[self._sizes[at]]))
        end = self._end_of[start]
        self._remove(start, end)
        if start + size < end:
            self._add(start + size, end)
        return start

    def free(self, start: int, end: int) -> tuple[int, int]:
        """Frees a part. Returns the free run that contains it now."""
        if start in self._start_of:
            start, middle = self._start_of[start], start
            self._remove(start, middle)
        if end in self._end_of:
            middle, end = end, self._end_of[end]
            self._remove(middle, end)
        self._add(start, end)
        return start, end

    def _add(self, start: int, end: int) -> None:
        if start == end:
            return
        size = end - start
        if size not in self._starts:
            self._starts[size] = {}
            insort(self._sizes, size)
        self._starts[size][start] = None
        self._end_of[start], self._start_of[end] = end, start
        self.unused += size

    def _remove(self, start: int, end: int) -> None:
        size = end - start
        del self._starts[size][start], self._end_of[start], self._start_of[end]
        if not self._starts[size]:
            del self._starts[size], self._sizes[bisect_left(self._sizes, size)]
        self.unused -= size


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

    Attributes:
        corrupt: values dropped since the store was opened because they did not verify.

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
        if capacity_bytes < GRAIN_BYTES:
            raise BadArgument("capacity_bytes", capacity_bytes, f"at least {GRAIN_BYTES}")
        if threads < 1:
            raise BadArgument("threads", threads, "at least 1")
        if min_free_bytes < 0:
            raise BadArgument("min_free_bytes", min_free_bytes, "0 or more")
        if not str(root) or "\0" in str(root):
            raise BadArgument("root", str(root), "the path of a folder")
        self._digest, self._checksum = _hashes()
        self._root = Path(root)
        self._capacity = capacity_bytes // GRAIN_BYTES * GRAIN_BYTES
        self._sync = sync
        self._min_free = min_free_bytes
        self._spare = 0  # free bytes beyond min_free at the last query, less those allocated since
        self._ask_at = -math.inf  # time of the next query
        self._io = io or FileSystem()
        self._clock = clock
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "file store")
        self._junk = memoryview(random(GRAIN_BYTES))
        self._index: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first
        self._owner: dict[int, bytes] = {}  # key of the value that starts at an offset
        self._space = Space()
        self._doomed: set[Entry] = set()  # values that left and are not destroyed yet
        self._records = 0  # places in the index that may hold one
        self._failed = False  # the last write failed
        self._clear_pending = False  # a clear is not complete on disk
        self._stale = False  # the index may name values that left and are not destroyed
        self._folder_changed = True  # a name in the folder is not synced
        self._readers = 0
        self._closed = False
        self._evicted = 0
        self.corrupt = 0
        self._lock = threading.Lock()  # guards all of the above; never held during a call to the disk
        self._idle = threading.Condition(self._lock)  # no readers
        self._write_lock = threading.Lock()  # one writer at a time
        self._fds: dict[str, int] = {}
        try:
            self._open_files()
            self._load()
        except BaseException as error:
            self._close_files()
            if isinstance(error, OSError):
                raise BackendUnavailable(f"file store {self._root}: {error.strerror or error}") from error
            raise

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`file:/var/cache/mainstem?capacity=8GiB&min_free=0&sync=batch&threads=2`; sync is `batch` or `none`.

        Without a capacity: 8 GiB, or the size of the existing file if larger. A smaller one drops values beyond it.
        """
        check_options(options, ("capacity", "min_free", "sync", "threads"))
        sync = options.get("sync", "batch")
        if sync not in ("batch", "none"):
            raise BadArgument("sync", sync, "batch or none")
        threads = options.get("threads", "2")
        if not (threads.isascii() and threads.isdigit()):
            raise BadArgument("threads", threads, "a number, at least 1")
        capacity = options.get("capacity")
        capacity_bytes = _capacity_of(Path(address)) if capacity is None else parse_bytes("capacity", capacity)
        min_free_bytes = parse_bytes("min_free", options.get("min_free", "0"))
        return cls(address, capacity_bytes, sync=sync == "batch", threads=int(threads), min_free_bytes=min_free_bytes)

    # ------------------------------------------------------------ the interface

    def exists(self, keys: Sequence[bytes]) -> int:
        """Counts the keys that are present before the first missing one."""
        with self._reading(), self._lock:
            return next((at for at, key in enumerate(keys) if key not in self._index), len(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads values directly into the buffers and verifies the content of the buffers."""
        with self._reading():
            with self._lock:
                entries = [self._index.get(key) for key in keys]
            lost = self._read_values(
                [
                    _Piece(key, entry, buffer)
                    for key, entry, buffer in zip(keys, entries, buffers, strict=True)
                    if entry is not None and entry.length == len(buffer)
                ]
            )
            with self._lock:
                for key in reversed(keys):
                    if key in self._index:
                        self._index.move_to_end(key)
        return [
            ABSENT if entry is None or key in lost else entry.length for key, entry in zip(keys, entries, strict=True)
        ]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes values directly from the buffers. A value that the store holds already is not written again."""
        values = {}  # the last value of a key that occurs twice
        for key, buffer in zip(keys, buffers, strict=True):
            _check_value(key, buffer)
            values[key] = _Value(key, buffer, self._digest(buffer))
        refused: set[bytes] = set()
        with self._writing():
            self._shrink()
            fresh = self._changed(list(values.values()))
            self._grow(sum(_rounded(len(buffer)) for _, buffer, _ in fresh))
            for batch in self._batches(fresh):
                refused |= self._store(batch)
        return [key not in refused for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Destroys values, then records it in the index."""
        with self._writing():
            with self._lock:
                gone = [key for key in dict.fromkeys(keys) if self._drop(key)]
            if gone or self._doomed:
                self._commit([], [self._record(key, _DELETED) for key in gone])

    def clear(self) -> None:
        """Truncates the values file and starts a new index."""
        with self._writing():
            with self._lock:
                self._index.clear()
                self._owner.clear()
                self._doomed.clear()
                self._space = Space()
            self._clear_pending = True
            self._finish_clear()

    def stats(self) -> BackendStats:
        """Returns exact counts; bytes are in whole grains."""
        with self._reading(), self._lock:
            return BackendStats(len(self._index), self._space.total - self._space.unused, self._capacity, self._evicted)

    def close(self) -> None:
        """Waits for running calls, then releases the store for other processes."""
        with self._write_lock:
            with self._idle:
                self._closed = True
                self._idle.wait_for(lambda: not self._readers)
            self._close_files()
            self._pool.shutdown()

    def check(self) -> None:
        """Checks that every grain is either free or owned by exactly one value.

        Raises:
            AssertionError: the check failed; the message names the broken rule.
        """
        with self._write_lock, self._lock:
            used = [(entry.offset, entry.end) for entry in self._index.values()]
            at = 0
            for start, end in sorted([*used, *self._space.runs()]):
                assert start == at, f"[{at}, {start}) is neither free nor owned, or owned twice"
                at = end
            assert at == self._space.total, f"{at} bytes are free or owned, of {self._space.total}"
            assert sum(end - start for start, end in used) + self._space.unused == self._space.total, "unused is wrong"
            owners = {entry.offset: key for key, entry in self._index.items()}
            assert owners == self._owner, "the owner of a value is not the one in the index"
            assert self._space.total <= self._capacity, "the file is larger than the capacity"

    # ------------------------------------------------------------ reading

    def _read_values(self, pieces: Sequence[_Piece]) -> set[bytes]:
        """Fills the buffers. Returns the keys of values that could not be read or did not verify."""
        runs = list(_runs(pieces, READ_BYTES))
        lost: set[bytes] = set()
        unread: list[tuple[int, OSError]] = []

        def work() -> None:
            while True:
                try:
                    first, last = runs.pop()
                except IndexError:
                    return
                try:
                    lost.update(self._read_run(pieces[first:last]))
                except OSError as error:
                    lost.update(key for key, _, _ in pieces[first:last])
                    unread.append((last - first, error))

        helpers = [self._pool.submit(work) for _ in range(min(self._threads, len(runs)) - 1)]
        try:
            work()
        finally:  # no thread may write to the caller's buffers after this call
            wait(begun := [helper for helper in helpers if not helper.cancel()])
        for helper in begun:
            helper.result()  # raises any error that is not a disk error
        if unread and sum(count for count, _ in unread) == len(pieces):
            raise _failure(f"reading from {self._root}", unread[0][1])
        return lost

    def _read_run(self, run: Sequence[_Piece]) -> set[bytes]:
        """Fills the buffers of a run. Returns the keys of values that do not verify."""
        self._read(self._fds["values"], _vector(run, _DISCARD), run[0].entry.offset)
        lost = set()
        for key, entry, buffer in run:
            if self._digest(buffer) != entry.digest:
                lost.add(key)
                self._drop_corrupt(key, entry)
        return lost

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads until the buffers are full or the file ends. Returns the number of bytes."""
        done = self._io.preadv(fd, buffers, offset)
        rest = list(buffers)
        part = done
        while part and (rest := _after(rest, part)):
            part = self._io.preadv(fd, rest, offset + done)
            done += part
        return done

    def _drop_corrupt(self, key: bytes, entry: Entry) -> None:
        with self._lock:
            if self._index.get(key) is entry:  # else it left during the read, and its extent may have a new owner
                self._drop(key)
                self.corrupt += 1

    # ------------------------------------------------------------ writing

    def _changed(self, values: Sequence[_Value]) -> list[_Value]:
        """Returns the values that the store does not hold yet, and refreshes the others."""
        fresh = []
        with self._lock:
            for value in reversed(values):
                entry = self._index.get(value.key)
                if entry is not None and entry.digest == value.digest and entry.length == len(value.buffer):
                    self._index.move_to_end(value.key)
                else:
                    fresh.append(value)
        return fresh[::-1]

    def _batches(self, values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
        """Splits values into batches of at most half the room (at least one value), so that no batch evicts itself."""
        first = size = 0
        for at, (_, buffer, _) in enumerate(values):
            room = _rounded(len(buffer))
            if at > first and size + room > self._space.total // 2:
                yield values[first:at]
                first, size = at, 0
            size += room
        if values:
            yield values[first:]

    def _store(self, values: Sequence[_Value]) -> set[bytes]:
        """Writes a batch and announces it. Returns the keys of values that have no room."""
        with self._lock:
            for key, _, _ in values:
                self._drop(key)
            offsets = self._allocate([_rounded(len(buffer)) for _, buffer, _ in values])
        placed = [
            _Piece(key, Entry(offset, length := len(buffer), digest, offset + _rounded(length)), buffer)
            for (key, buffer, digest), offset in zip(values, offsets, strict=True)
            if offset is not None
        ]
        try:
            self._commit(placed, [self._record(key, entry) for key, entry, _ in reversed(placed)])
        except BaseException:
            with self._lock:
                for _, entry, _ in placed:
                    self._free(entry)
            raise
        with self._lock:
            for key, entry, _ in reversed(placed):
                self._index[key] = entry
                self._owner[entry.offset] = key
        if len(placed) == len(values):
            return set()
        return {key for (key, _, _), offset in zip(values, offsets, strict=True) if offset is None}

    def _commit(self, pieces: Sequence[_Piece], records: Sequence[bytes]) -> None:
        """Applies changes to the disk, in the order that the module docstring gives."""
        values = self._fds["values"]
        with self._lock:
            doomed, self._doomed = self._doomed, set()
        try:
            for entry in _not_overwritten(doomed, pieces):
                self._write(values, [self._junk], entry.offset)
            pieces = sorted(pieces, key=lambda piece: piece.entry.offset)
            for first, last in _runs(pieces, WRITE_BYTES):
                self._write(values, _vector(pieces[first:last], _ZEROS), pieces[first].entry.offset)
            if self._sync and (doomed or pieces):
                self._io.fdatasync(values)
            self._append(records)
        except BaseException:
            with self._lock:
                self._doomed |= doomed
            raise

    def _append(self, records: Sequence[bytes]) -> None:
        if self._records + len(records) > 2 * len(self._index) + SLACK_RECORDS:
            self._rewrite_index()
        self._sync_folder()
        if records:
            offset = self._records * RECORD.size
            self._records += len(records)  # rule 3
            self._write(self._fds["index"], [memoryview(b"".join(records))], offset)
            if self._sync:
                self._io.fdatasync(self._fds["index"])

    def _rewrite_index(self) -> None:
        """Replaces the index atomically by one with the live records only."""
        with self._lock:
            records = [self._record(key, entry) for key, entry in self._index.items()]
        folder = self._fds["folder"]
        with suppress(FileNotFoundError):
            self._io.unlink("index.new", folder)
        fd = self._io.open("index.new", _OPEN | os.O_EXCL, folder)
        try:
            self._write(fd, [memoryview(b"".join(records))], 0)
            self._io.fsync(fd)
            self._io.rename("index.new", "index", folder)
        except BaseException:
            self._io.close(fd)
            raise
        old, self._fds["index"] = self._fds["index"], fd
        self._records = len(records)
        self._folder_changed = True
        self._stale = False
        self._io.close(old)

    def _sync_folder(self) -> None:
        if self._folder_changed:
            self._io.fsync(self._fds["folder"])
            self._folder_changed = False

    def _finish_clear(self) -> None:
        """Does the disk part of a clear."""
        self._io.truncate(self._fds["values"], 0)
        self._io.fdatasync(self._fds["values"])
        self._rewrite_index()
        self._sync_folder()
        self._clear_pending = False

    def _recover(self) -> None:
        """Completes the work that a failure left, and writes an empty record as a test, before any value is evicted."""
        if self._clear_pending:
            self._finish_clear()
        if self._stale:
            self._rewrite_index()
        if self._failed:
            self._commit([], [bytes(RECORD.size)])
            self._failed = False

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes all buffers, in as many calls as necessary."""
        rest = _after(buffers, 0)
        while rest:
            done = self._io.pwritev(fd, rest[:_MAX_VECTOR], offset)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
            rest = _after(rest, done)
            offset += done

    def _record(self, key: bytes, entry: Entry) -> bytes:
        body = _BODY.pack(key, entry.digest, entry.offset, entry.length)
        return body + self._checksum(body, _FORMAT).to_bytes(8, "little")

    # ------------------------------------------------------------ room (under the lock, except _grow and _shrink)

    def _grow(self, size: int) -> None:
        """Grows the file if no free run has this size, within the capacity and the free space of the disk."""
        with self._lock:
            total = self._space.total
            if self._space.largest >= size or total == self._capacity:
                return
        for step in (max(size, STEP_BYTES), size):
            grown = min(total + step, self._capacity)
            if grown - total > self._spare_bytes():
                continue
            try:
                self._io.allocate(self._fds["values"], total, grown - total)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
            else:
                with self._lock:
                    self._space.grow(grown)
                self._spare -= grown - total
                return

    def _shrink(self) -> None:
        """Truncates the file by as much as min_free lacks, and evicts the values there."""
        lacking = _rounded(max(0, -self._spare_bytes()))
        with self._lock:
            total = self._space.total
            cut = max(0, total - lacking)
            for key in [key for key, entry in self._index.items() if entry.end > cut]:
                self._evict(key)
        if cut == total:
            return
        self._io.truncate(self._fds["values"], cut)
        if self._sync:
            self._io.fdatasync(self._fds["values"])
        with self._lock:  # only after the sync: until then the values there are not destroyed
            self._space.shrink(cut)
            self._doomed = {entry for entry in self._doomed if entry.offset < cut}
        self._spare += total - cut

    def _spare_bytes(self) -> int:
        """Returns the free bytes of the disk beyond min_free. Negative: this many are lacking."""
        if not self._min_free:
            return self._capacity
        if (now := self._clock()) >= self._ask_at:
            self._spare = self._io.free_bytes(self._fds["values"]) - self._min_free
            self._ask_at = now + ASK_EVERY_S
        return self._spare

    def _allocate(self, sizes: Sequence[int]) -> list[int | None]:
        """Allocates room for values, contiguous if one free run is large enough. None: no room for that value."""
        size = sum(sizes)
        while self._space.unused < size <= self._space.total and self._index:
            self._evict(next(iter(self._index)))
        start = self._space.allocate(size)
        if start is not None:
            return [start + before for before in accumulate(sizes[:-1], initial=0)]
        if len(sizes) == 1:
            return [self._make_room(size)]
        half = len(sizes) // 2
        return self._allocate(sizes[:half]) + self._allocate(sizes[half:])

    def _make_room(self, size: int) -> int | None:
        """Evicts the least recently used value and those after it in the file, until one free run is large enough."""
        while (start := self._space.allocate(size)) is None and self._index and size <= self._space.total:
            run = self._evict(next(iter(self._index)))
            while run[1] - run[0] < size and run[1] in self._owner:
                run = self._evict(self._owner[run[1]])
        return start

    def _evict(self, key: bytes) -> tuple[int, int]:
        run = self._drop(key)
        assert run is not None
        self._evicted += 1
        return run

    def _drop(self, key: bytes) -> tuple[int, int] | None:
        """Removes a value: readers miss it from now on. Returns the free run with its extent; None: no such key."""
        entry = self._index.pop(key, None)
        if entry is None:
            return None
        del self._owner[entry.offset]
        return self._free(entry)

    def _free(self, entry: Entry) -> tuple[int, int]:
        self._doomed.add(entry)
        return self._space.free(entry.offset, entry.end)

    # ------------------------------------------------------------ opening and closing

    def _open_files(self) -> None:
        self._io.make_folder(self._root)
        self._fds["folder"] = self._io.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        self._check_file("folder", stat.S_IFDIR, 0o022)
        for name in ("lock", "values", "index"):
            self._fds[name] = self._io.open(name, _OPEN, self._fds["folder"])
            self._check_file(name, stat.S_IFREG, 0o077)
            if name == "lock":
                self._take_lock()

    def _check_file(self, name: str, kind: int, forbidden: int) -> None:
        """Rejects links, pipes, devices, files with a second name, and files that other users can access."""
        status = self._io.fstat(self._fds[name])
        path = self._root if name == "folder" else self._root / name
        if stat.S_IFMT(status.st_mode) != kind or (kind == stat.S_IFREG and status.st_nlink != 1):
            raise BackendUnavailable(f"file store: {path} is not a regular file with one name")
        if status.st_mode & forbidden or status.st_uid != os.geteuid():
            mode = stat.filemode(status.st_mode)
            raise BackendUnavailable(f"file store: {path} ({mode}, user {status.st_uid}) is not this user's alone")

    def _take_lock(self) -> None:
        try:
            self._io.lock(self._fds["lock"])
        except BlockingIOError as error:
            raise BackendUnavailable(f"file store: {self._root / 'lock'} is held: the store is open already") from error

    def _load(self) -> None:
        """Loads the entries of the index that can exist. Values are verified when they are read."""
        size = self._io.fstat(self._fds["values"]).st_size
        if size > self._capacity:
            self._io.truncate(self._fds["values"], self._capacity)
        self._space.total = min(size // GRAIN_BYTES * GRAIN_BYTES, self._capacity)
        for key, entry in self._scan():
            self._index.pop(key, None)
            if entry.length > 0 <= entry.offset and entry.end <= self._space.total:
                self._index[key] = entry
        self._settle_overlaps()
        if self._records != len(self._index):
            try:
                self._rewrite_index()
            except OSError:
                self._stale = self._failed = True
        self._sync_folder()

    def _scan(self) -> Iterator[tuple[bytes, Entry]]:
        """Yields the records that verify, the oldest first. Sets `_records` past the last of them."""
        index = self._fds["index"]
        size = self._io.fstat(index).st_size
        chunk = memoryview(bytearray(RECORD.size << 14))
        for start in range(0, size, len(chunk)):
            whole = self._read(index, [chunk], start) // RECORD.size
            for at, (key, digest, offset, length, checksum) in enumerate(
                RECORD.iter_unpack(chunk[: whole * RECORD.size]), start // RECORD.size
            ):
                body = chunk[at * RECORD.size - start :][: RECORD.size - 8]
                if self._checksum(body, _FORMAT) == checksum:
                    self._records = at + 1
                    yield key, Entry(offset, length, digest, offset + _rounded(length))

    def _settle_overlaps(self) -> None:
        """Keeps the later of two values in one place (the earlier one was evicted). Frees the gaps between values."""
        kept: list[tuple[int, int, bytes]] = []
        end = 0
        for offset, rank, key in sorted(
            (entry.offset, rank, key) for rank, (key, entry) in enumerate(self._index.items())
        ):
            if offset < end:
                if rank < kept[-1][1]:
                    del self._index[key]
                    continue
                del self._index[kept.pop()[2]]
            kept.append((offset, rank, key))
            end = self._index[key].end
        end = 0
        for offset, _, key in kept:
            self._space.free(end, offset)
            self._owner[offset] = key
            end = self._index[key].end
        self._space.free(end, self._space.total)

    def _close_files(self) -> None:
        for fd in self._fds.values():
            with suppress(OSError):  # it is closed anyway, and no data is waiting to be written
                self._io.close(fd)
        self._fds.clear()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StorageError("closed", f"the file store {self._root} is closed")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                self._idle.notify_all()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._write_lock, self._reading():
            try:
                self._recover()
                yield
            except OSError as error:
                self._failed = True
                raise _failure(f"writing to {self._root}", error) from error


class _Value(NamedTuple):
    """A value to store."""

    key: bytes
    buffer: memoryview
    digest: bytes


class _Piece(NamedTuple):
    """A value with its place in the file."""

    key: bytes
    entry: Entry
    buffer: memoryview


_DELETED = Entry(-1, 0, bytes(16), -1)


def _hashes() -> tuple[Callable[[memoryview], bytes], Callable[[bytes | memoryview, int], int]]:
    """Returns the digest function of values and the checksum function of records."""
    with needs("xxhash", "the file store needs xxhash: pip install 'mainstem[file]'"):
        from xxhash import xxh3_64_intdigest, xxh3_128

    def digest(value: memoryview) -> bytes:
        state = xxh3_128()
        for at in range(0, len(value), HELD_BYTES):
            state.update(value[at : at + HELD_BYTES])
        return state.digest()

    return digest, xxh3_64_intdigest


def _capacity_of(root: Path) -> int:
    """Returns the default capacity: the size of the existing file, but at least the constant."""
    try:
        return max(_DEFAULT_BYTES, (root / "values").lstat().st_size)
    except OSError:
        return _DEFAULT_BYTES


def _check_value(key: bytes, buffer: memoryview) -> None:
    if len(key) != KEY_BYTES:
        raise BadArgument("key", key, f"{KEY_BYTES} bytes")
    if not len(buffer):
        raise BadArgument("value", bytes(buffer), "at least one byte")  # an empty value has no bytes to destroy


def _failure(what: str, error: OSError) -> StorageError:
    return StorageError("full" if error.errno in _FULL else "io", f"{what}: {error.strerror or error}")


def _rounded(length: int) -> int:
    """Rounds up to whole grains."""
    return -(-length // GRAIN_BYTES) * GRAIN_BYTES


def _runs(pieces: Sequence[_Piece], limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of pieces that are contiguous in the file, up to the limit or of one piece."""
    first = start = end = 0
    for at, (_, entry, _) in enumerate(pieces):
        if entry.offset != end or entry.end - start > limit_bytes:
            if at:
                yield first, at
            first, start = at, entry.offset
        end = entry.end
    if pieces:
        yield first, len(pieces)


def _vector(pieces: Sequence[_Piece], filler: memoryview) -> list[memoryview]:
    """Returns the buffers of pieces, with filler up to whole grains."""
    buffers = []
    for _, entry, buffer in pieces:
        buffers.append(buffer)
        if gap := entry.end - entry.offset - entry.length:
            buffers.append(filler[:gap])
    return buffers


def _not_overwritten(doomed: set[Entry], pieces: Sequence[_Piece]) -> list[Entry]:
    """Returns the entries that no piece overwrites from their first byte on."""
    starts = {entry.offset for _, entry, _ in pieces}
    return [entry for entry in doomed if entry.offset not in starts]


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Returns the rest of buffers after the first `done` bytes."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *(rest for rest in buffers[at + 1 :] if len(rest))]
        done -= len(buffer)
    return []
