"""What tests of storage back ends put and read, and how their calls fail."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from machine import patience

from mainstem.errors import StorageError
from mainstem.storage.base import Backend
from mainstem.storage.conformance import make_keys, make_value
from mainstem.storage.memory import MemoryBackend


class WriteOnce(MemoryBackend):
    """Keeps the first value of a key."""

    capabilities = replace(MemoryBackend.capabilities, persistent=True, overwrites=False)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self._values:
                super().put([key], [buffer])
        return [True] * len(keys)


class Values:
    """Forty values of one size, by number, each with a key of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.keys = make_keys(random.Random(3), 40)

    def name(self, number: int) -> str:
        """Returns the name of a key in the namespace `mainstem`, as hex."""
        return f"mainstem/{self.keys[number].hex()}"

    def value(self, number: int, size: int | None = None, version: int = 0) -> memoryview:
        return make_value(self.keys[number], size or self.size, version)

    def put(self, store: Backend, *numbers: int) -> list[bool]:
        return store.put([self.keys[number] for number in numbers], [self.value(number) for number in numbers])

    def read(self, store: Backend, *numbers: int) -> list[int]:
        """Returns the lengths. Fails on a value of this size that is another one's."""
        buffers = [memoryview(bytearray(self.size)) for _ in numbers]
        lengths = store.get([self.keys[number] for number in numbers], buffers)
        for number, length, buffer in zip(numbers, lengths, buffers, strict=True):
            assert length != self.size or buffer == self.value(number), f"value {number} is another one's"
        return lengths


def cause_of(call: Callable[[], object]) -> str:
    """Returns the cause of the StorageError that a call must raise."""
    with pytest.raises(StorageError) as error:
        call()
    return error.value.cause


_READ = """
import sys
from mainstem.storage import open_backend
store, keys = open_backend(sys.argv[1]), [bytes.fromhex(key) for key in sys.argv[3:]]
buffers = [memoryview(bytearray(int(sys.argv[2]))) for _ in keys]
assert store.exists(keys) == [True] * len(keys) and store.get(keys, buffers) == [len(buffer) for buffer in buffers]
print(*(buffer.hex() for buffer in buffers))
store.close()
"""


def read_elsewhere(spec: str, keys: Sequence[bytes], size: int) -> list[bytes]:
    """Returns values as another process reads them, in whose store all must be."""
    command = [sys.executable, "-c", _READ, spec, str(size), *(key.hex() for key in keys)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    return [bytes.fromhex(value) for value in done.stdout.split()]
