"""3FS through its user-space IO (USRBIO): values in the slots of one preallocated file, bypassing the kernel.

    path          slot 0 | slot 1 | ...                            slot_bytes each, one value a slot
    path.index    MAINIDX1 | slot_bytes 8 | record | record | ...  append only
    record        key 32 | slot 4 | length 4 | crc32 of these 4    length 0: the slot is free

A value is written to a free slot before its record is appended, so a process that is killed at any moment leaves whole
values or none. A truncated record is ignored. One process opens a file at a time: a tensor-parallel group has one file
per rank. Sources: https://github.com/deepseek-ai/3FS (hf3fs_fuse/io.py, src/lib/py/usrbio_binding.cc).

Not run against a real 3FS: tests use a double of its client.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import struct
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, SCANNED, Backend, BackendStats, Capabilities, Limit, Listed, check_options
from mainstem.units import parse_bytes, parse_timeout

_MAGIC = b"MAINIDX1"
_HEAD = struct.Struct("<8sQ")
_RECORD = struct.Struct("<32sIII")


class HF3FSBackend(Backend):
    """Values in one file on a 3FS mount; evicts the least recently used first.

    Every batch goes through shared memory that is registered with 3FS, with one copy: it bypasses the kernel, but 3FS
    cannot use the memory of the caller.

    Args:
        path: path of the file on a 3FS mount. The file is created if missing; the index is next to it.
        capacity_bytes: size of the file, rounded down to whole slots.
        slot_bytes: the limit for a value; each value takes this much.
        entries: number of ring entries: values that are transferred at once.
        timeout_s: timeout for one full ring.

    Raises:
        BadArgument: the sizes allow no slot, or differ from those of the existing file.
        BackendUnavailable: 3FS's client is not installed, the path is on no mount, or another process has the file.
        StorageError: the file cannot be created or read.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=False, zero_copy=False, evicts=True, overwrites=True
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int = 64 << 30,
        slot_bytes: int = 2 << 20,
        entries: int = 64,
        timeout_s: float = 5.0,
    ) -> None:
        self._io = _client()
        if not 1 <= slot_bytes <= capacity_bytes:
            raise BadArgument("slot_bytes", slot_bytes, f"from 1 to capacity_bytes, {capacity_bytes}")
        if entries < 1:
            raise BadArgument("entries", entries, "at least 1")
        mount = self._io.extract_mount_point(os.fspath(path))
        if mount is None:
            raise BackendUnavailable(f"{os.fspath(path)} is on no 3FS mount")
        self._mount = mount
        self._slot_bytes, self._entries, self._timeout_s = slot_bytes, entries, timeout_s
        self.longest = Limit(slot_bytes, "the option slot of a new file raises that")
        self._rings: dict[bool, _Ring] = {}
        self._closed = False
        self._evicted = 0
        self._lock = threading.Lock()
        with _as_storage_error("opening"):
            self._index = _Index(Path(f"{os.fspath(path)}.index"), slot_bytes, capacity_bytes // slot_bytes)
            try:
                self._file = self._open_file(path)
            except BaseException:
                self._index.close()
                raise

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`hf3fs:/mnt/3fs/kv/rank0?capacity=256GiB&slot=1MiB&entries=64&timeout=5`."""
        if not address:
            raise BadArgument("storage address", address, "a path on a 3FS mount")
        check_options(options, ("capacity", "slot", "entries", "timeout"))
        entries = options.get("entries", "64")
        if not entries.isdecimal():
            raise BadArgument("entries", entries, "a number")
        return cls(
            address,
            parse_bytes("capacity", options.get("capacity", "64GiB")),
            parse_bytes("slot", options.get("slot", "2MiB")),
            int(entries),
            parse_timeout("timeout", options.get("timeout", "5")),
        )

    @classmethod
    def open_existing(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens the file with the size that it has, if that is more than the capacity."""
        try:
            size = os.stat(address).st_size
        except OSError as error:
            raise BackendUnavailable(f"hf3fs {address}: there is no store: {error.strerror}") from error
        capacity = parse_bytes("capacity", options.get("capacity", "64GiB"))
        return cls.from_spec(address, {**options, "capacity": str(max(size, capacity))})

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Looks keys up in the index in memory."""
        with self._open():
            return [key in self._index.places for key in keys]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads the values that have the length of their buffers. Missing values do not shift the others."""
        with self._open():
            lengths: list[int] = []
            wanted = []
            for key, buffer in zip(keys, buffers, strict=True):
                slot, length = self._index.places.get(key, (0, ABSENT))
                if length == len(buffer):
                    wanted.append((len(lengths), key, slot, buffer))
                lengths.append(length)
            for batch in _cut(wanted, self._entries):
                ring = self._ring(for_read=True)
                results = self._transfer(ring, [(slot * self._slot_bytes, len(buffer)) for _, _, slot, buffer in batch])
                for place, ((at, key, _, buffer), result) in enumerate(zip(batch, results, strict=True)):
                    if result == len(buffer):
                        buffer[:] = ring.place(place)[:result]
                        self._index.places.move_to_end(key)
                    else:
                        lengths[at] = ABSENT  # a short read, or an error of this value only
            return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes values to free slots, then to the index. The last value of a repeated key counts."""
        pairs = dict(zip(keys, buffers, strict=True))
        with self._open():
            fitting = [(key, buffer) for key, buffer in pairs.items() if 0 < len(buffer) <= self._slot_bytes]
            stored: set[bytes] = set()
            for batch in _cut(fitting, min(self._entries, self._index.slots)):
                stored.update(self._write(batch))
            return [key in stored for key in keys]

    def _write(self, batch: Sequence[tuple[bytes, memoryview]]) -> list[bytes]:
        """Returns the stored keys of a batch. Slots that 3FS may still write to after an error are not used again."""
        ring = self._ring(for_read=False)
        with _as_storage_error("writing the index"):
            slots, evicted = self._index.allocate(len(batch))
        self._evicted += evicted
        batch = batch[: len(slots)]
        for place, (_, buffer) in enumerate(batch):
            ring.place(place)[: len(buffer)] = buffer
        pieces = [(slot * self._slot_bytes, len(buffer)) for slot, (_, buffer) in zip(slots, batch, strict=True)]
        results = self._transfer(ring, pieces)
        written, failed = [], []
        for (key, buffer), slot, result in zip(batch, slots, results, strict=True):
            if result == len(buffer):
                written.append((key, slot, result))
            else:
                failed.append(slot)
        self._index.free(failed)
        with _as_storage_error("writing the index"):
            self._index.add(written)
        return [key for key, _, _ in written]

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists what the index has now, the oldest first."""
        with self._open():
            found = [Listed(key, length) for key, (_, length) in self._index.places.items()]
        for at in range(0, len(found), SCANNED):
            yield found[at : at + SCANNED]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Frees slots."""
        with self._open(), _as_storage_error("writing the index"):
            self._index.drop(key for key in keys if key in self._index.places)

    def clear(self) -> None:
        """Frees every slot; the file keeps its size."""
        with self._open(), _as_storage_error("writing the index"):
            self._index.drop(list(self._index.places))

    def stats(self) -> BackendStats:
        """Returns exact counts; each value counts as a whole slot."""
        with self._open():
            entries = len(self._index.places)
            capacity = self._index.slots * self._slot_bytes
            return BackendStats(entries, entries * self._slot_bytes, capacity, self._evicted)

    def close(self) -> None:
        """Closes the file and its index, which stay as they are."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_rings()
            self._io.deregister_fd(self._file)  # before the close, or 3FS may mistake the next file for this one
            os.close(self._file)
            self._index.close()

    def _open(self) -> threading.Lock:
        if self._closed:
            raise StorageError("closed", "the 3FS store is closed")
        return self._lock

    def _open_file(self, path: str | os.PathLike[str]) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, self._index.slots * self._slot_bytes)
            self._io.register_fd(file)
        except BaseException:
            os.close(file)
            raise
        return file

    def _ring(self, *, for_read: bool) -> _Ring:
        if for_read not in self._rings:
            with _as_storage_error("making a ring"):
                self._rings[for_read] = _Ring(self._io, self._mount, self._entries, self._slot_bytes, for_read=for_read)
        return self._rings[for_read]

    def _transfer(self, ring: _Ring, pieces: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the results of reads or writes. Raises if no result is known or all failed."""
        try:
            with _as_storage_error("reading" if ring.for_read else "writing"):
                results = ring.transfer(self._file, pieces, self._timeout_s)
        except StorageError:
            self._drop_rings()  # running transfers may still write to their memory: never reuse it
            raise
        if results and all(result < 0 for result in results):
            raise _storage_error("reading" if ring.for_read else "writing", -results[0])
        return results

    def _drop_rings(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


class _Ring:
    """A ring of 3FS for one direction, with the shared memory for its values."""

    def __init__(self, io: Any, mount: str, entries: int, slot_bytes: int, *, for_read: bool) -> None:
        self.for_read = for_read
        self._slot_bytes = slot_bytes
        self._memory = SharedMemory(create=True, size=entries * slot_bytes)
        try:
            self._iovec = io.make_iovec(self._memory, mount)
            self._ring = io.make_ioring(mount, entries, for_read=for_read)
        finally:
            self._memory.unlink()  # 3FS has mapped it; the name is no longer needed

    def place(self, number: int) -> memoryview:
        """Returns the memory of one entry."""
        assert self._memory.buf is not None
        return self._memory.buf[number * self._slot_bytes : (number + 1) * self._slot_bytes]

    def transfer(self, file: int, pieces: Sequence[tuple[int, int]], timeout_s: float) -> list[int]:
        """Moves pieces, (offset in the file, length), between the file and the ring entries of the same number.

        Returns:
            For each piece its bytes, or -errno. The ring completes pieces in any order: each carries its number.

        Raises:
            TimeoutError: some pieces did not complete in time.
        """
        for number, (offset, length) in enumerate(pieces):
            start = number * self._slot_bytes
            self._ring.prepare(self._iovec[start : start + length], self.for_read, file, offset, userdata=number)
        self._ring.submit()
        done = self._ring.wait(min_results=len(pieces), timeout=timedelta(seconds=timeout_s))
        results = {piece.userdata: piece.result for piece in done}
        if len(results) < len(pieces):
            raise TimeoutError(errno.ETIMEDOUT, f"{len(pieces) - len(results)} of {len(pieces)} after {timeout_s:g} s")
        return [results[number] for number in range(len(pieces))]

    def close(self) -> None:
        """Releases the memory."""
        del self._ring, self._iovec
        self._memory.close()


class _Index:
    """Maps keys to slots, in memory and in an append-only file. Not thread-safe."""

    def __init__(self, path: Path, slot_bytes: int, slots: int) -> None:
        self.slots = slots
        self.places: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """For each key its slot and length, the least recently used first."""
        self._path, self._slot_bytes = path, slot_bytes
        self._file = self._lock_file(path)
        try:
            self._load(self._file)
            self._rewrite()
        except BaseException:
            os.close(self._file)
            raise

    def allocate(self, count: int) -> tuple[list[int], int]:
        """Returns up to `count` slots to write to, and the number of values evicted for them."""
        evicted = list(islice(self.places, max(0, count - len(self._free))))
        self.drop(evicted)
        return [self._free.pop() for _ in range(min(count, len(self._free)))], len(evicted)

    def free(self, slots: Sequence[int]) -> None:
        """Frees allocated slots that are not in use."""
        self._free.extend(slots)

    def add(self, written: Sequence[tuple[bytes, int, int]]) -> None:
        """Adds values, (key, slot, length), and frees the previous slots of their keys."""
        try:
            self._append(written)
        except OSError:
            self.free([slot for _, slot, _ in written])
            raise
        for key, slot, length in written:
            before = self.places.pop(key, None)
            if before is not None:
                self._free.append(before[0])
            self.places[key] = (slot, length)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Removes keys, which must be present, and frees their slots."""
        gone = {key: self.places[key][0] for key in keys}
        self._append([(key, slot, 0) for key, slot in gone.items()])
        for key, slot in gone.items():
            del self.places[key]
            self._free.append(slot)

    def close(self) -> None:
        """Closes the index, so that another process can open it."""
        os.close(self._file)

    @staticmethod
    def _lock_file(path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise BackendUnavailable(f"{path} is in use by another process") from error
        return file

    def _load(self, file: int) -> None:
        data = os.pread(file, os.fstat(file).st_size, 0)
        owner: dict[int, bytes] = {}
        if data[: len(_MAGIC)] == _MAGIC and len(data) >= _HEAD.size:
            found = _HEAD.unpack_from(data)[1]
            if found != self._slot_bytes:
                raise BadArgument("slot_bytes", self._slot_bytes, f"{found}, as in {self._path}")
            for key, slot, length in _records(data):
                self.places.pop(owner.pop(slot, b""), None)
                if length:
                    owner.pop(self.places.pop(key, (ABSENT, 0))[0], None)
                    owner[slot] = key
                    self.places[key] = (slot, length)
        self.places = OrderedDict((key, place) for key, place in self.places.items() if place[0] < self.slots)
        taken = {slot for slot, _ in self.places.values()}
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in taken]

    def _rewrite(self) -> None:
        """Rewrites the index with one record per value."""
        new = self._path.with_name(self._path.name + ".new")
        new.unlink(missing_ok=True)
        file = self._lock_file(new)
        try:
            head = _HEAD.pack(_MAGIC, self._slot_bytes)
            _write_all(file, head + b"".join(_pack(key, slot, length) for key, (slot, length) in self.places.items()))
            os.fsync(file)
            new.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._records = file, len(self.places)

    def _append(self, records: Sequence[tuple[bytes, int, int]]) -> None:
        if self._records + len(records) > 4 * self.slots + 1024:
            self._rewrite()
        whole, self._records = self._records, sys.maxsize  # if a record is cut now, the next call rewrites the index
        _write_all(self._file, b"".join(_pack(*record) for record in records))
        self._records = whole + len(records)


def _pack(key: bytes, slot: int, length: int) -> bytes:
    body = _RECORD.pack(key, slot, length, 0)[:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def _records(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    for at in range(_HEAD.size, len(data) - _RECORD.size + 1, _RECORD.size):
        key, slot, length, crc = _RECORD.unpack_from(data, at)
        if crc != zlib.crc32(data[at : at + _RECORD.size - 4]):
            return
        yield key, slot, length


def _write_all(file: int, data: bytes) -> None:
    """Raises `OSError` on a short write too: no record after a truncated one can be read."""
    written = os.write(file, data)
    if written != len(data):
        raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")


def _cut(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))


_CAUSES = {
    errno.ETIMEDOUT: "timeout",
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.ENOTCONN: "unreachable",
    errno.EHOSTUNREACH: "unreachable",
    errno.ECONNREFUSED: "unreachable",
    errno.ECONNRESET: "unreachable",
}


def _storage_error(what: str, code: int, message: str = "") -> StorageError:
    return StorageError(_CAUSES.get(code, "io"), f"3FS: {what}: {message or os.strerror(code)}")


@contextmanager
def _as_storage_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _storage_error(what, error.errno or errno.EIO, str(error)) from error


def _client() -> Any:
    built = "hf3fs needs 3FS's Python client, hf3fs_fuse, built from its sources: https://github.com/deepseek-ai/3FS"
    with needs("hf3fs_fuse", built):
        return importlib.import_module("hf3fs_fuse.io")
