"""Shared by the tests of the file store: keys, values, small stores, and calls of the disk that fail."""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path

from mainstem.storage.base import ABSENT
from mainstem.storage.file import FileBackend, FileSystem
from mainstem.storage.file.space import GRAIN_BYTES

KEYS = [bytes([at]) * 32 for at in range(64)]
MIN_FREE = 1 << 20
MADE: deque[FileBackend] = deque(maxlen=4)
"""The last stores that `small` has made."""


class Fails:
    """Makes calls of a disk fail, those with these names, while it is `on`; for `Faulty`."""

    def __init__(self, *names: str, code: int = errno.EIO) -> None:
        self.names, self.code, self.on = names, code, False

    def __call__(self, number: int, name: str) -> None:
        if self.on and name in self.names:
            raise OSError(self.code, os.strerror(self.code))


def value_of(at: int, size: int) -> memoryview:
    return memoryview(random.Random(at).randbytes(size))


def small(
    io: FileSystem,
    grains: int = 16,
    root: Path | str = "simulated",
    min_free: int = 0,
    clock: Callable[[], float] | None = None,
) -> FileBackend:
    """Makes a store of `grains` grains, which is checked and closed when its test ends.

    With `min_free` it queries the free space on every put.
    """
    store = FileBackend(
        root,
        grains * GRAIN_BYTES,
        io=io,
        threads=1,
        min_free_bytes=min_free,
        clock=clock or count().__next__,
        random=random.Random("junk").randbytes,
    )
    MADE.append(store)
    return store


def read(store: FileBackend, key: bytes) -> bytes | None:
    (length,) = store.get([key], [memoryview(bytearray())])
    if length == ABSENT:
        return None
    buffer = memoryview(bytearray(length))
    return bytes(buffer) if store.get([key], [buffer]) == [length] else None
