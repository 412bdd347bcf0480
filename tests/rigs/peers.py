"""Peers for tests: what a server gives, a store that is read through one, and a peer that answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from mainstem.errors import StorageError
from mainstem.share import Share
from mainstem.storage.base import ABSENT
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.peer.client import PeerBackend
from mainstem.storage.peer.server import PeerServer

SECRET = b"a secret of the tests"


class Shelf:
    """What a server gives: the values of a memory store."""

    def __init__(self, store: MemoryBackend) -> None:
        self.store = store

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        try:
            return self.store.get(keys, [memoryview(bytearray(1)) for _ in keys])
        except StorageError:  # it is closed
            return [ABSENT] * len(keys)

    def copy(self, key: bytes, length: int) -> bytearray | None:
        value = bytearray(length)
        return value if self.store.get([key], [memoryview(value)]) == [length] else None


def serving(store: MemoryBackend, address: str = "127.0.0.1:0", **options: Any) -> PeerServer:
    """Serves a memory store, without a bound on the time."""
    return PeerServer(Shelf(store), address, SECRET, **{"share": Share(1.0, burst_s=1e9), **options})


class Pulled(MemoryBackend):
    """A store that is written to directly, and read through a server and a client."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = MemoryBackend()
        self._server = serving(self._kept)
        self._client = PeerBackend([self._server.address], SECRET, timeout_s=60)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        super().put([], [])  # raises if it is closed
        return self._kept.put(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        super().delete([])
        self._kept.delete(keys)

    def clear(self) -> None:
        super().clear()
        self._kept.clear()

    def scan(self) -> Any:
        super().scan()
        return self._kept.scan() if not self._closed else super().scan()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._client.exists(keys)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return self._client.get(keys, buffers)

    def stats(self) -> Any:
        super().stats()
        return self._kept.stats() if not self._closed else None

    def close(self) -> None:
        super().close()
        self._client.close()
        self._server.close()


class FakePeer:
    """Answers requests as a function says: with the parts of an answer, or not at all (None)."""

    def __init__(self, answer: Callable[[list[bytes]], list[bytes] | None]) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.address = f"127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._answer, self._closing = answer, False
        self.asked = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            if self._router.poll(10):
                client, *parts = self._router.recv_multipart()
                self.asked += 1
                answer = self._answer(parts)
                if answer is not None:
                    self._router.send_multipart([client, *answer])
        self._router.close()
        self._context.term()

    def close(self) -> None:
        """Ends it, and breaks its connections."""
        self._closing = True
        self._thread.join()
