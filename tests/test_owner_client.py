"""`shared+SPEC`: one owner serves a store to any number of clients, whatever becomes of either."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rigs.owners import MIB, Served, folder, served
from rigs.stores import Values

from mainstem.owner import client as client_module
from mainstem.owner.client import status
from mainstem.owner.protocol import Kind
from mainstem.owner.start import running
from mainstem.storage import open_backend
from mainstem.storage.base import Backend
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.memory import MemoryBackend

pytestmark = pytest.mark.deadline

VALUES = Values(100_000)
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this user's sockets, and of a store."""
    with folder() as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
        yield made


@pytest.fixture
def own() -> Iterator[Served]:
    with served(MemoryBackend()) as running_one:
        yield running_one


def shared(home: Path, options: str = "host_bytes=64MiB&linger=0") -> Backend:
    return open_backend(f"shared({options})+file:{home}/kv?capacity=256MiB")


def pid_of(home: Path) -> int:
    (path,) = running()
    found = status(path)
    assert found is not None
    return int(found["pid"])


# ---------------------------------------------------------------- the promises of a back end


class Once(MemoryBackend):
    """Keeps the first value of a key."""

    capabilities = MemoryBackend.capabilities.__class__(
        persistent=False, shared=False, zero_copy=False, evicts=True, overwrites=False
    )

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self._values:
                super().put([key], [buffer])
        return [True] * len(keys)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("backend", "host_bytes"),
    [(MemoryBackend, 64 * MIB), (MemoryBackend, 3 * MIB), (Once, 64 * MIB)],
    ids=["roomy", "tight", "first value stays"],
)
def test_a_client_keeps_every_promise(backend: type[MemoryBackend], host_bytes: int, case: Case) -> None:
    with served(backend(), host_bytes) as own:
        result = run(case, own.client)
        assert result.passed, result.reason
        own.owner.held.check()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_client_of_a_process_above_files_keeps_every_promise(case: Case, shared_files: str) -> None:
    result = run(case, lambda: open_backend(shared_files))
    assert result.passed, result.reason


@pytest.fixture(scope="module")
def shared_files() -> Iterator[str]:
    """The spec of an owner that stays for all cases."""
    with folder() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(made))
        spec = f"shared(host_bytes=64MiB&linger=60)+file:{made}/kv?capacity=256MiB"
        open_backend(spec).close()
        yield spec


def test_exists_and_get_of_a_batch_take_one_round_trip(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    store = own.client()
    VALUES.put(store, *range(30))
    asked: list[Kind] = []
    receive = client_module.Channel.receive
    monkeypatch.setattr(client_module.Channel, "receive", lambda self: asked.append(Kind.OK) or receive(self))
    threads = threading.active_count()
    store.exists(VALUES.keys)
    assert len(asked) == 2, "one message to the owner, one to the client"
    VALUES.read(store, *range(30))
    assert len(asked) == 2 + 3, "and one that ends the lease"
    assert threading.active_count() == threads
    store.close()
