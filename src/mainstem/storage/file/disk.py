"""The folder of a store: its files, which belong to one process of one user, and the space that it may take.

It does not know what the files contain.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mainstem.errors import BackendUnavailable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that say that there is no room."""

ASK_EVERY_S = 1.0
"""The minimum time between two queries of the free disk space, if some of it must stay free."""

_MAX_VECTOR = 1024  # IOV_MAX of Linux
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # with O_RDWR, opening a pipe does not block


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


class Folder:
    """The files of a store by name. All calls raise `OSError`.

    Args:
        root: the folder.
        io: file system calls.
    """

    def __init__(self, root: Path, io: FileSystem) -> None:
        self.root = root
        self._io = io
        self._fds: dict[str, int] = {}
        self._changed = True  # a name is not synced

    def open(self) -> None:
        """Opens the folder and its files, and makes them if missing. `close` closes them, also after an error.

        Raises:
            BackendUnavailable: another process has them open, or they are not this user's alone.
        """
        self._io.make_folder(self.root)
        self._fds["folder"] = self._io.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self._check("folder", stat.S_IFDIR, 0o022)
        for name in ("lock", "values", "index"):
            self._fds[name] = self._io.open(name, _OPEN, self._fds["folder"])
            self._check(name, stat.S_IFREG, 0o077)
            if name == "lock":
                self._lock()

    def close(self) -> None:
        """Closes all files, which releases the lock."""
        for fd in self._fds.values():
            self._close(fd)
        self._fds.clear()

    def read(self, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads until the buffers are full or the file ends. Returns the number of bytes."""
        done = 0
        while buffers and (part := self._io.preadv(self._fds[name], buffers, offset + done)):
            buffers = _after(buffers, part)
            done += part
        return done

    def write(self, name: str, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes all buffers, in as many calls as necessary."""
        self._write(self._fds[name], buffers, offset)

    def sync(self, name: str) -> None:
        """Makes the data of a file durable."""
        self._io.fdatasync(self._fds[name])

    def size(self, name: str) -> int:
        """Returns the size of a file."""
        return self._io.fstat(self._fds[name]).st_size

    def allocate(self, name: str, offset: int, length: int) -> None:
        """Allocates disk space for a part of a file."""
        self._io.allocate(self._fds[name], offset, length)

    def truncate(self, name: str, length: int) -> None:
        """Truncates a file."""
        self._io.truncate(self._fds[name], length)

    def free_bytes(self) -> int:
        """Returns the bytes that are free on the file system."""
        return self._io.free_bytes(self._fds["values"])

    def replace(self, name: str, content: memoryview) -> None:
        """Replaces a file by a new one, atomically. It is durable once `sync_names` returns."""
        folder, new = self._fds["folder"], name + ".new"
        with suppress(FileNotFoundError):
            self._io.unlink(new, folder)
        fd = self._io.open(new, _OPEN | os.O_EXCL, folder)
        try:
            self._write(fd, [content], 0)
            self._io.fsync(fd)
            self._io.rename(new, name, folder)
        except BaseException:
            self._close(fd)
            raise
        self._changed = True
        old, self._fds[name] = self._fds[name], fd
        self._close(old)

    def sync_names(self) -> None:
        """Makes the names in the folder durable, if one changed."""
        if self._changed:
            self._io.fsync(self._fds["folder"])
            self._changed = False

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        rest = _after(buffers, 0)
        while rest:
            done = self._io.pwritev(fd, rest[:_MAX_VECTOR], offset)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
            rest = _after(rest, done)
            offset += done

    def _check(self, name: str, kind: int, forbidden: int) -> None:
        """Rejects links, pipes, devices, files with a second name, and files that other users can access."""
        status = self._io.fstat(self._fds[name])
        path = self.root if name == "folder" else self.root / name
        if stat.S_IFMT(status.st_mode) != kind or (kind == stat.S_IFREG and status.st_nlink != 1):
            raise BackendUnavailable(f"file store: {path} is not a regular file with one name")
        if status.st_mode & forbidden or status.st_uid != os.geteuid():
            mode = stat.filemode(status.st_mode)
            raise BackendUnavailable(f"file store: {path} ({mode}, user {status.st_uid}) is not this user's alone")

    def _lock(self) -> None:
        try:
            self._io.lock(self._fds["lock"])
        except BlockingIOError as error:
            raise BackendUnavailable(f"file store: {self.root / 'lock'} is held: the store is open already") from error

    def _close(self, fd: int) -> None:
        with suppress(OSError):  # it is closed anyway, and no data is waiting to be written
            self._io.close(fd)


class Reserve:
    """The disk space that must stay free: how much a file may grow, and must shrink.

    Args:
        folder: has the file `values`.
        min_free_bytes: bytes to leave free; 0: the disk is not asked.
        clock: returns the time in seconds.
    """

    def __init__(self, folder: Folder, min_free_bytes: int, clock: Callable[[], float]) -> None:
        self._folder, self._min_free, self._clock = folder, min_free_bytes, clock
        self._spare = 0  # free bytes beyond min_free at the last query, less those allocated since
        self._ask_at = -math.inf  # time of the next query

    def lacking_bytes(self) -> int:
        """Returns by how much the file must shrink."""
        return int(max(0, -self._spare_bytes()))

    def extend(self, total: int, grown: int) -> bool:
        """Allocates [total, grown). Returns False if the disk does not have that to spare."""
        if grown - total > self._spare_bytes():
            return False
        try:
            self._folder.allocate("values", total, grown - total)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        self._spare -= grown - total
        return True

    def returned(self, size: int) -> None:
        """Reports bytes that were truncated."""
        self._spare += size

    def _spare_bytes(self) -> float:
        if not self._min_free:
            return math.inf
        if (now := self._clock()) >= self._ask_at:
            self._spare = self._folder.free_bytes() - self._min_free
            self._ask_at = now + ASK_EVERY_S
        return self._spare


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Returns the rest of buffers after the first `done` bytes."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *(rest for rest in buffers[at + 1 :] if len(rest))]
        done -= len(buffer)
    return []
