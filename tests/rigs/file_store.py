"""What the tests of the file store share: keys, values, and small stores."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

from mainstem.storage.base import ABSENT
from mainstem.storage.file import FileBackend, FileSystem
from mainstem.storage.file.space import GRAIN_BYTES

KEYS = [bytes([at]) * 32 for at in range(64)]
MIN_FREE = 1 << 20


def value_of(at: int, size: int) -> memoryview:
    return memoryview(random.Random(at).randbytes(size))


def small(
    io: FileSystem,
    grains: int = 16,
    root: Path | str = "simulated",
    min_free: int = 0,
    clock: Callable[[], float] | None = None,
) -> FileBackend:
    """Makes a store of `grains` grains. With `min_free` it queries the free space on every put."""
    return FileBackend(
        root,
        grains * GRAIN_BYTES,
        io=io,
        threads=1,
        min_free_bytes=min_free,
        clock=clock or count().__next__,
        random=random.Random("junk").randbytes,
    )


def read(store: FileBackend, key: bytes) -> bytes | None:
    (length,) = store.get([key], [memoryview(bytearray())])
    if length == ABSENT:
        return None
    buffer = memoryview(bytearray(length))
    return bytes(buffer) if store.get([key], [buffer]) == [length] else None
