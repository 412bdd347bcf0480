"""Owners of stores for tests: in a thread of this process, or in one of their own."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import eventually, patience

from mainstem.owner.client import SharedBackend, status
from mainstem.owner.protocol import PeerUid, peer_uid
from mainstem.owner.server import Owner
from mainstem.owner.start import Place
from mainstem.storage.base import Backend

MIB = 1 << 20


@contextmanager
def folder() -> Iterator[Path]:
    """Makes a folder for sockets, whose path is short enough, and ends the owners that are left there."""
    made = Path(tempfile.mkdtemp(prefix="own", dir="/tmp"))
    try:
        yield made
    finally:
        for path in made.rglob("*.sock"):
            if (found := status(path)) is not None and found["pid"] != os.getpid():
                end(found["pid"])
        shutil.rmtree(made)


@contextmanager
def served(
    backend: Backend,
    host_bytes: int = 64 * MIB,
    *,
    linger_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    uid_of: PeerUid = peer_uid,
) -> Iterator[Served]:
    """Serves a store in a thread of this process."""
    with folder() as made:
        path = made / "store.sock"
        lock = Place("memory:", path).lock()
        assert lock is not None
        owner = Owner("memory:", backend, path, host_bytes, linger_s=linger_s, clock=clock, uid_of=uid_of)
        thread = threading.Thread(target=owner.run)
        thread.start()
        try:
            yield Served(owner, backend, path, thread)
        finally:
            owner.stop()
            thread.join(patience(20))
            os.close(lock)
            assert not thread.is_alive(), "the owner did not stop"


class Served:
    """An owner in a thread."""

    def __init__(self, owner: Owner, backend: Backend, path: Path, thread: threading.Thread) -> None:
        self.owner, self.backend, self.path, self.thread = owner, backend, path, thread

    def client(self, **options: Any) -> SharedBackend:
        return SharedBackend("memory:", socket=str(self.path), **options)

    def written(self) -> None:
        """Waits until the store has everything."""
        eventually(lambda: not self.owner.status()["queued"])


def is_alive(pid: int) -> bool:
    """Returns whether any of its threads is left: its sockets close with the last one."""
    try:
        return _state(pid) not in ("", "Z") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except FileNotFoundError:
        return False


def freeze(pid: int) -> None:
    """Stops a process for a while, and waits until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: _state(pid) == "T")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def end(pid: int, number: int = signal.SIGTERM) -> None:
    """Ends a process that is no child of this one."""
    os.kill(pid, number)
    eventually(lambda: not is_alive(pid), 60)
