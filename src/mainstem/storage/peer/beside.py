"""A store with peers beside it: reads ask the peers for what the store lacks; all else concerns the store alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, Backend
from mainstem.storage.wrappers import Wrapper

T = TypeVar("T")


class Beside(Wrapper):
    """Reads from a store, and from peers what it lacks. A store that fails does not keep peers from answering.

    Args:
        inner: the store.
        peers: the peers, which belong to this object, too.
    """

    def __init__(self, inner: Backend, peers: Backend) -> None:
        super().__init__(inner)
        self._peers = peers

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the store, then the peers."""
        there, error = _tried(lambda: self._inner.exists(keys), [False] * len(keys))
        lacking = [at for at, found in enumerate(there) if not found]
        found, _ = _tried(lambda: self._peers.exists([keys[at] for at in lacking]), [False] * len(lacking))
        if error is not None and not any(found):
            raise error
        for at, one in zip(lacking, found, strict=True):
            there[at] = one
        return there

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads from the store, then from the peers."""
        lengths, error = _tried(lambda: self._inner.get(keys, buffers), [ABSENT] * len(keys))
        lacking = [at for at, length in enumerate(lengths) if length == ABSENT]
        if lacking:
            asked, room = [keys[at] for at in lacking], [buffers[at] for at in lacking]
            found, _ = _tried(lambda: self._peers.get(asked, room), [ABSENT] * len(lacking))
            for at, length in zip(lacking, found, strict=True):
                lengths[at] = length
        if error is not None and all(length == ABSENT for length in lengths):
            raise error
        return lengths

    def close(self) -> None:
        """Closes both."""
        try:
            self._peers.close()
        finally:
            super().close()


def _tried(call: Callable[[], list[T]], otherwise: list[T]) -> tuple[list[T], StorageError | None]:
    try:
        return list(call()), None
    except StorageError as error:
        return otherwise, error
