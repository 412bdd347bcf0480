"""A disk in memory, for the file store. It can lose power with any part of the unsynced data, and fail any call.

`Disk` keeps for each file the durable content and every write since. `after_power_loss` returns a possible disk after
a power loss: it has any subset of the 512-byte sectors of the unsynced writes, in any order, and the first few of the
unsynced name changes. `Faulty` wraps a file system and makes chosen calls fail or transfer less.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mainstem.storage.file import FileSystem

SECTOR_BYTES = 512
FOLDER = 3
CALLS = tuple(name for name in vars(FileSystem) if not name.startswith("_"))


@dataclass
class Inode:
    """A file: its content, the durable content, and the writes since then (an int is a new size)."""

    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    unsynced: list[tuple[int, bytes] | int] = field(default_factory=list)
    locked_by: int | None = None

    def write(self, offset: int, data: bytes) -> None:
        _apply(self.live, offset, data)
        self.unsynced.append((offset, data))

    def resize(self, size: int) -> None:
        _resize(self.live, size)
        self.unsynced.append(size)

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.unsynced.clear()

    def survivor(self, rng: random.Random) -> Inode:
        content = bytearray(self.durable)
        kept = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        for change in self.unsynced:
            if isinstance(change, int):
                if rng.random() < kept:
                    _resize(content, change)
                continue
            offset, data = change
            at = 0
            while at < len(data):
                sector = SECTOR_BYTES - (offset + at) % SECTOR_BYTES
                if rng.random() < kept:
                    _apply(content, offset + at, data[at : at + sector])
                at += sector
        return Inode(content, bytes(content))


class Disk(FileSystem):
    """One folder of files in memory. All given files are durable."""

    def __init__(self, files: dict[str, Inode] | None = None) -> None:
        self.files = dict(files or {})
        self.size_bytes = 1 << 40
        """The size of the disk. Tests change it as if others used the disk."""
        self._histories = [dict(self.files)]  # of names, since the last sync of the folder
        self._open: dict[int, Inode] = {}
        self._next = FOLDER + 1

    def after_power_loss(self, rng: random.Random) -> Disk:
        """Returns a possible disk after a power loss."""
        return Disk({name: inode.survivor(rng) for name, inode in rng.choice(self._histories).items()})

    def copy(self) -> Disk:
        """Returns a disk with the same content."""
        return Disk({name: Inode(bytearray(inode.live), bytes(inode.live)) for name, inode in self.files.items()})

    def make_folder(self, path: Path) -> None:
        del path

    def open(self, path: str | Path, flags: int, folder: int | None = None) -> int:
        if folder is None:
            return FOLDER
        name = str(path)
        if name in self.files and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "it exists", name)
        if name not in self.files:
            self.files[name] = Inode()
            self._histories.append(dict(self.files))
        self._next += 1
        self._open[self._next] = self.files[name]
        return self._next

    def close(self, fd: int) -> None:
        inode = self._open.pop(fd, None)
        if inode is not None and inode.locked_by == fd:
            inode.locked_by = None

    def fstat(self, fd: int) -> os.stat_result:
        kind, size = (stat.S_IFDIR, 0) if fd == FOLDER else (stat.S_IFREG, len(self._open[fd].live))
        return os.stat_result((kind | 0o600, 1, 1, 1, os.geteuid(), 0, size, 0, 0, 0))

    def lock(self, fd: int) -> None:
        if self._open[fd].locked_by is not None:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        self._open[fd].locked_by = fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        live, done = self._open[fd].live, 0
        for buffer in buffers:
            part = live[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)
        self._open[fd].write(offset, data)
        return len(data)

    def fdatasync(self, fd: int) -> None:
        self._open[fd].sync()

    def fsync(self, fd: int) -> None:
        if fd == FOLDER:
            self._histories = [dict(self.files)]
        else:
            self._open[fd].sync()

    def allocate(self, fd: int, offset: int, length: int) -> None:
        if offset + length > len(self._open[fd].live):
            self._open[fd].resize(offset + length)

    def free_bytes(self, fd: int) -> int:
        return self.size_bytes - sum(len(inode.live) for inode in self.files.values())

    def truncate(self, fd: int, length: int) -> None:
        self._open[fd].resize(length)

    def rename(self, old: str, new: str, folder: int) -> None:
        self.files[new] = self.files.pop(old)
        self._histories.append(dict(self.files))

    def unlink(self, name: str, folder: int) -> None:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "it does not exist", name)
        del self.files[name]
        self._histories.append(dict(self.files))


class Faulty(FileSystem):
    """Another file system, less reliable.

    Args:
        inner: the file system that makes the calls.
        fault: called with the number and the name of each call before it is made. It may raise, or return the limit
            in bytes for a read or write.
    """

    def __init__(self, inner: FileSystem, fault: Callable[[int, str], int | None] = lambda number, name: None) -> None:
        self.inner = inner
        self.fault = fault
        self.calls = 0


def _through(name: str) -> Callable[..., Any]:
    def call(self: Faulty, *arguments: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        try:
            limit = self.fault(number, name)
        except OSError:
            if name == "close":  # Linux closes it anyway
                self.inner.close(*arguments)
            raise
        if limit is not None and name in ("preadv", "pwritev"):
            arguments = (arguments[0], _first(arguments[1], limit), *arguments[2:])
        return getattr(self.inner, name)(*arguments)

    return call


for _name in CALLS:
    setattr(Faulty, _name, _through(_name))


def _first(buffers: Sequence[memoryview], limit: int) -> list[memoryview]:
    kept = []
    for buffer in buffers:
        kept.append(buffer[:limit])
        limit -= len(kept[-1])
    return kept


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _apply(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset + len(data):
        _resize(content, offset + len(data))
    content[offset : offset + len(data)] = data
