"""3FS through its user-space IO (USRBIO): the file store, whose values bypass the kernel on their way.

    file store    folders, index, digests, room                       as on a local disk
    Usrbio        reads and writes of the file `values`               in pieces, through shared memory that 3FS knows

A ring takes a number of pieces at once and completes them in any order, so each piece carries its number. A ring that
does not answer is dropped with its memory; what it still writes is found by the digests of the file store. One process
opens a folder at a time: a tensor-parallel group has one for each rank.

Sources: https://github.com/deepseek-ai/3FS (hf3fs_fuse/io.py, src/lib/py/usrbio_binding.cc).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.imports import load_package
from mainstem.storage.base import Capabilities
from mainstem.storage.file import FileBackend, FileSystem
from mainstem.storage.file.backend import capacity_of
from mainstem.storage.options import parse_number, read_options
from mainstem.units import parse_bytes, parse_timeout

_DEFAULT_BYTES = 64 << 30
_BUILT = "hf3fs needs 3FS's Python client, hf3fs_fuse, built from its sources: https://github.com/deepseek-ai/3FS"


class HF3FSBackend(FileBackend):
    """Values in a folder on a 3FS mount; evicts the least recently used first.

    Args:
        path: the folder, on a 3FS mount. It is made if missing.
        capacity_bytes: the limit for all values.
        slot_bytes: size of a piece; longer values take several.
        entries: number of ring entries: pieces that are transferred at once.
        timeout_s: timeout for one full ring.

    Raises:
        BadArgument: a size is out of its range.
        BackendUnavailable: 3FS's client is not installed, the path is on no mount, or the folder cannot be opened.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=False, zero_copy=False, evicts=True, overwrites=True
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int = _DEFAULT_BYTES,
        slot_bytes: int = 2 << 20,
        entries: int = 64,
        timeout_s: float = 5.0,
    ) -> None:
        if not 1 <= slot_bytes <= capacity_bytes:
            raise BadArgument("slot_bytes", slot_bytes, f"from 1 to capacity_bytes, {capacity_bytes}")
        if entries < 1:
            raise BadArgument("entries", entries, "at least 1")
        client = load_package("hf3fs_fuse.io", _BUILT)
        mount = client.extract_mount_point(os.fspath(path))
        if mount is None:
            raise BackendUnavailable(f"{os.fspath(path)} is on no 3FS mount")
        super().__init__(
            Path(path), capacity_bytes, threads=1, io=Usrbio(client, mount, entries, slot_bytes, timeout_s)
        )

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`hf3fs:/mnt/3fs/kv/rank0?capacity=256GiB&slot=1MiB&entries=64&timeout=5`."""
        if not address:
            raise BadArgument("storage address", address, "a path on a 3FS mount")
        readers = {
            "capacity": ("capacity_bytes", parse_bytes),
            "slot": ("slot_bytes", parse_bytes),
            "entries": ("entries", parse_number),
            "timeout": ("timeout_s", parse_timeout),
        }
        capacity = {"capacity_bytes": capacity_of(Path(address), _DEFAULT_BYTES)}
        return cls(address, **capacity | read_options(options, readers))


class Usrbio(FileSystem):
    """The calls of the file system, with reads and writes of `values` through rings.

    Args:
        client: the module `hf3fs_fuse.io`.
        mount: the mount point.
        entries: pieces at once.
        piece_bytes: the longest piece.
        timeout_s: of one full ring.
    """

    def __init__(self, client: Any, mount: str, entries: int, piece_bytes: int, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._make: Callable[[bool], _Ring] = lambda for_read: _Ring(
            client, mount, entries, piece_bytes, for_read=for_read
        )
        self._rings: dict[bool, _Ring] = {}
        self._values = -1  # the descriptor of the file `values`
        self._lock = threading.Lock()

    def open(self, path: str | Path, flags: int, folder: int | None = None) -> int:
        fd = super().open(path, flags, folder)
        if path == "values":
            try:
                self._client.register_fd(fd)
            except BaseException:
                super().close(fd)
                raise
            self._values = fd
        return fd

    def close(self, fd: int) -> None:
        if fd == self._values:
            with self._lock:
                self._drop_rings()
            self._client.deregister_fd(fd)  # before the close, or 3FS may mistake the next file for this one
            self._values = -1
        super().close(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Sets the length only: 3FS has no call to allocate."""
        self.truncate(fd, offset + length)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move(buffers, offset, for_read=True) if fd == self._values else super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd == self._values:
            return self._move(buffers, offset, for_read=False)
        return super().pwritev(fd, buffers, offset)

    def _move(self, buffers: Sequence[memoryview], offset: int, *, for_read: bool) -> int:
        with self._lock:
            if for_read not in self._rings:
                self._rings[for_read] = self._make(for_read)
            ring = self._rings[for_read]
            size = min(sum(map(len, buffers)), ring.size)
            if not for_read:
                _copy(buffers, ring.memory[:size], for_read)
            try:
                done = ring.transfer(self._values, offset, size, self._timeout_s)
            except OSError:
                self._drop_rings()  # running transfers may still write to their memory: never reuse it
                raise
            if for_read:
                _copy(buffers, ring.memory[:done], for_read)
            return done

    def _drop_rings(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()


class _Ring:
    """A ring of 3FS for one direction, with the shared memory for its pieces."""

    def __init__(self, client: Any, mount: str, entries: int, piece_bytes: int, *, for_read: bool) -> None:
        self._for_read, self._piece_bytes, self.size = for_read, piece_bytes, entries * piece_bytes
        self._shared = SharedMemory(create=True, size=self.size)
        try:
            self._iovec = client.make_iovec(self._shared, mount)
            self._ring = client.make_ioring(mount, entries, for_read=for_read)
        finally:
            self._shared.unlink()  # 3FS has mapped it; the name is no longer needed
        assert self._shared.buf is not None
        self.memory = self._shared.buf

    def transfer(self, fd: int, offset: int, size: int, timeout_s: float) -> int:
        """Moves `size` bytes between the file and the memory. Returns how many were moved, from the first.

        Raises:
            OSError: the first piece failed, or some did not complete in time.
        """
        starts = range(0, size, self._piece_bytes)
        for start in starts:
            place = self._iovec[start : min(start + self._piece_bytes, size)]
            self._ring.prepare(place, self._for_read, fd, offset + start, userdata=start)
        self._ring.submit()
        ended = self._ring.wait(min_results=len(starts), timeout=timedelta(seconds=timeout_s))
        results = {piece.userdata: piece.result for piece in ended}
        if len(results) < len(starts):
            late = len(starts) - len(results)
            raise TimeoutError(errno.ETIMEDOUT, f"3FS: {late} of {len(starts)} pieces after {timeout_s:g} s")
        done = 0
        for start in starts:
            if (result := results[start]) < 0 and not start:
                raise OSError(-result, f"3FS: {os.strerror(-result)}")
            done += max(0, result)
            if result < min(self._piece_bytes, size - start):
                break
        return done

    def close(self) -> None:
        """Releases the memory."""
        self.memory.release()
        del self._ring, self._iovec
        self._shared.close()


def _copy(buffers: Sequence[memoryview], memory: memoryview, into: bool) -> None:
    """Copies between buffers, one after the other, and memory, as far as it reaches."""
    at = 0
    for buffer in buffers:
        place = memory[at : at + len(buffer)]
        if into:
            buffer[: len(place)] = place
        else:
            place[:] = buffer[: len(place)]
        at += len(place)


BACKEND = HF3FSBackend
