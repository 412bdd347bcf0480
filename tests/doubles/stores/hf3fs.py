"""A double of 3FS's `hf3fs_fuse.io`: the same calls, checks and results, on a plain file.

As in the real one (https://github.com/deepseek-ai/3FS, hf3fs_fuse/io.py and src/lib/py/usrbio_binding.cc): a file must
be registered, and only once; memory must be an iovec over shared memory on this mount; a ring accepts as many pieces
as it has entries, in one direction; `wait` returns them in any order, and fewer than requested after the timeout; a
result is a number of bytes or -errno.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from doubles.stores import Service


@dataclass
class Mount(Service):
    """One mount and its faults."""

    path: str = "/"
    registered: set[int] = field(default_factory=set)
    rings: int = 0
    order: random.Random = field(default_factory=lambda: random.Random(7))
    fail: dict[int, int] = field(default_factory=dict)
    """Results to return for the piece of a number."""
    late: list[Any] = field(default_factory=list)
    """Pieces that were accepted while frozen."""
    pieces: int = 0


service = mount = Mount()


class _Iovec:
    def __init__(self, memory: memoryview, start: int, stop: int) -> None:
        self.memory, self.start, self.stop = memory, start, stop
        self.result, self.userdata = 0, None

    def __getitem__(self, at: slice) -> _Iovec:
        start, stop, step = at.indices(self.stop - self.start)
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return _Iovec(self.memory, self.start + start, self.start + max(start, stop))


class _Ring:
    def __init__(self, entries: int, for_read: bool) -> None:
        self.entries, self.for_read = entries, for_read
        self.prepared: list[tuple[_Iovec, int, int, Any]] = []
        self.running: list[tuple[_Iovec, int, int, Any]] = []

    def prepare(self, iov: _Iovec, read: bool, fd: int, off: int, userdata: Any = None) -> _Ring:
        if not isinstance(iov, _Iovec):
            raise TypeError("prepare(): incompatible function arguments")
        if read != self.for_read or fd not in mount.registered:
            raise OSError(errno.EINVAL if read != self.for_read else errno.EBADF, "hf3fs_prep_io")
        if len(self.prepared) + len(self.running) >= self.entries:
            raise OSError(errno.EAGAIN, "hf3fs_prep_io")
        self.prepared.append((iov, fd, off, userdata))
        return self

    def submit(self) -> _Ring:
        self.running += self.prepared
        mount.batches.append(len(self.prepared))
        self.prepared = []
        return self

    def wait(self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None) -> list[_Iovec]:
        if mount.frozen:
            assert timeout is not None, "this would never return"
            mount.late += self.running
            self.running = []
            return []
        done = [self._run(*piece) for piece in self.running]
        self.running = []
        mount.order.shuffle(done)
        return done

    def _run(self, iov: _Iovec, fd: int, off: int, userdata: Any) -> _Iovec:
        iov.userdata = userdata
        memory = iov.memory[iov.start : iov.stop]
        result = mount.fail.pop(mount.pieces, None)
        mount.pieces += 1
        if result is None or result > 0:
            part = memory[:result]
            result = os.preadv(fd, [part], off) if self.for_read else os.pwritev(fd, [part], off)
        iov.result = result
        return iov


def extract_mount_point(path: str) -> str | None:
    return mount.path if os.path.abspath(path).startswith(mount.path) else None


def register_fd(fd: int, flags: int = 0) -> None:
    if fd in mount.registered:
        raise OSError(errno.EINVAL, "registered already")
    os.fstat(fd)
    mount.registered.add(fd)


def deregister_fd(fd: int) -> None:
    os.fstat(fd)  # it must still be open
    mount.registered.discard(fd)


def make_iovec(shm: SharedMemory, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> _Iovec:
    if hf3fs_mount_point != mount.path or not os.path.exists(f"/dev/shm/{shm.name}"):
        raise OSError(errno.ENOENT, "iovec")
    assert shm.buf is not None
    return _Iovec(shm.buf, 0, len(shm.buf))


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> _Ring:
    if hf3fs_mount_point != mount.path:
        raise OSError(errno.ENOENT, "ioring")
    mount.rings += 1
    return _Ring(entries, for_read)


PACKAGE = "hf3fs_fuse.io"
SPEC = "hf3fs:{folder}/rank0?capacity=1GiB&entries=8"
BAD = (
    "hf3fs:",
    "hf3fs:{folder}/a?slots=3",
    "hf3fs:{folder}/a?entries=x",
    "hf3fs:{folder}/a?entries=0",
    "hf3fs:{folder}/a?capacity=1KiB&slot=2KiB",
)
