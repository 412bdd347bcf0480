"""A store whose faults a test in another process controls, through a file: `rigs.vllm_store:Moody?folder=...`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from mainstem.errors import StorageError
from mainstem.storage.base import Capabilities
from mainstem.storage.file import FileBackend
from mainstem.storage.wrappers import Wrapper

MOODS = ("ok", "lies", "hangs", "stalls", "dead")


def set_mood(folder: Path, mood: str) -> None:
    """Sets what the store does from now on."""
    assert mood in MOODS
    (folder / "mood.new").write_text(mood)
    (folder / "mood.new").rename(folder / "mood")


class Moody(Wrapper):
    """A file store that is `ok`, `lies` (pages are altered), `hangs`, `stalls` (only reads hang) or is `dead`."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self._inner.capabilities

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        folder = Path(options["folder"])
        folder.mkdir(exist_ok=True)
        store = cls(FileBackend(folder / "store", 1 << 30))
        store._folder = folder
        return store

    _folder: Path

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._turn(lambda: self._inner.exists(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        while self._mood() == "stalls":
            time.sleep(0.01)
        lengths = self._turn(lambda: self._inner.get(keys, buffers))
        if self._mood() == "lies":
            for buffer in buffers:
                buffer[len(buffer) // 2] ^= 1
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._turn(lambda: self._inner.put(keys, buffers))

    def _mood(self) -> str:
        path = self._folder / "mood"
        return path.read_text() if path.exists() else "ok"

    def _turn(self, call: Callable[[], list[int]]) -> list[int]:
        while self._mood() == "hangs":
            time.sleep(0.01)
        if self._mood() == "dead":
            raise StorageError("unreachable", "the test says so")
        return call()
