"""Mooncake Store with a real master: the interface, values in another process, and restarts."""

from __future__ import annotations

import importlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from machine import eventually, patience
from rigs.servers import free_port, freeze, mooncake_master, stop

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.storage import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, make_keys, make_value, run
from mainstem.storage.vendors.mooncake import MooncakeBackend

try:
    importlib.import_module("mooncake.store")
except ImportError as error:
    pytest.skip(f"no Mooncake client here: {error}", allow_module_level=True)

pytestmark = pytest.mark.deadline
MIB = 1 << 20


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a master, for tests that lend memory themselves."""
    port = free_port()
    with mooncake_master(port):
        yield port


def client(port: int, **options: Any) -> MooncakeBackend:
    return MooncakeBackend(f"127.0.0.1:{port}", **{"timeout_s": patience(1), "segment_bytes": 0, **options})


NODE = """
import sys
from mainstem.storage import open_backend
backend = open_backend(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    key, size = line.split()
    buffer = memoryview(bytearray(int(size)))
    length, = backend.get([bytes.fromhex(key)], [buffer])
    print(length, buffer.hex(), flush=True)
backend.close()
"""


@contextmanager
def store_node(port: int, segment: str = "32MiB") -> Iterator[subprocess.Popen[bytes]]:
    """Runs another process that lends its memory, and reads keys on request."""
    spec = f"mooncake://127.0.0.1:{port}?segment={segment}&timeout={patience(1)}"
    pipe = subprocess.PIPE
    node = subprocess.Popen([sys.executable, "-c", NODE, spec], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    assert node.stdout
    assert node.stdout.readline() == b"ready\n"
    try:
        yield node
    finally:
        stop(node, 2.0)


# ---------------------------------------------------------------- the interface


class Open(MooncakeBackend):
    """A client that stays open: closing one takes a second, and the cases would close it every time."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def shared(port: int) -> Iterator[Open]:
    backend = Open(
        f"127.0.0.1:{port}", segment_bytes=64 * MIB, staging_bytes=4 * MIB, timeout_s=patience(1), prefix="cases"
    )
    yield backend
    MooncakeBackend.close(backend)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, port: int, shared: Open) -> None:
    result = run(case, lambda: client(port, segment_bytes=16 * MIB) if case.name == "close" else shared)
    assert result.passed, result.reason


def test_clear_leaves_other_prefixes_alone(port: int) -> None:
    mine, other = client(port, segment_bytes=16 * MIB, prefix="a.b"), client(port, prefix="axb")
    keys = make_keys_of(1)
    assert mine.put(keys, values_of(keys)) == other.put(keys, values_of(keys)) == [True]
    mine.clear()
    assert mine.exists(keys) == [False] and other.exists(keys) == [True]
    mine.close()
    other.close()


def test_registered_memory_is_read_and_written_in_place(port: int) -> None:
    backend = client(port, segment_bytes=16 * MIB, staging_bytes=100_000)
    keys = make_keys_of(6)
    pool = memoryview(bytearray(6 * 65_536))
    views = [pool[at : at + 65_536] for at in range(0, len(pool), 65_536)]
    backend.register([pool])
    backend.register([pool])
    assert backend.put(keys, views) == [True] * 6
    assert backend.get(keys, views) == [65_536] * 6
    assert backend.staged == 0
    others = [memoryview(bytearray(65_536)) for _ in keys]
    assert backend.get(keys, others) == [65_536] * 6
    assert backend.staged == 6
    with pytest.raises(StorageError, match="staging"):
        backend.get(keys[:1], [memoryview(bytearray(200_000))])
    backend.close()


def make_keys_of(count: int) -> list[bytes]:
    return make_keys(random.Random(time.monotonic_ns()), count)


def values_of(keys: list[bytes], size: int = 65_536) -> list[memoryview]:
    return [make_value(key, size) for key in keys]


def blank(keys: list[bytes], size: int = 65_536) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in keys]


# ---------------------------------------------------------------- specs


def test_no_master() -> None:
    with pytest.raises(BackendUnavailable, match="no master at 127"):
        open_backend(f"mooncake://127.0.0.1:{free_port()}")


def test_no_rdma_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mainstem.storage.vendors.mooncake.RDMA_DEVICES", tmp_path)
    with pytest.raises(BackendUnavailable, match="no RDMA device"):
        open_backend("mooncake://127.0.0.1:1?protocol=rdma")


def test_close_waits_for_calls_that_run(port: int) -> None:
    backend = client(port, segment_bytes=16 * MIB)
    keys = make_keys_of(32)
    assert all(backend.put(keys, values_of(keys)))
    errors: list[StorageError] = []

    def read() -> None:
        try:
            while True:
                backend.get(keys, blank(keys))
        except StorageError as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    backend.close()
    for reader in readers:
        reader.join()
    assert [error.cause for error in errors] == ["closed"] * 3


# ---------------------------------------------------------------- failures


@pytest.fixture
def bare_port() -> Iterator[int]:
    """The port of a master without a segment."""
    port = free_port()
    with mooncake_master(port):
        yield port


@pytest.mark.slow
def test_another_process_reads_and_holds_the_values_until_it_dies(bare_port: int) -> None:
    backend = client(bare_port)
    keys = make_keys_of(3)
    assert backend.put(keys, values_of(keys)) == [False] * 3  # no process lends memory
    with store_node(bare_port) as node:
        assert backend.put(keys, values_of(keys)) == [True] * 3
        assert node.stdin
        assert node.stdout
        node.stdin.write(f"{keys[1].hex()} 65536\n".encode())
        node.stdin.flush()
        assert node.stdout.readline().decode().split() == ["65536", make_value(keys[1], 65_536).hex()]
        freeze(node)
        with pytest.raises(StorageError) as frozen:
            backend.get(keys, blank(keys))
        assert frozen.value.cause == "unreachable"
        node.kill()
        node.wait()
        with pytest.raises(StorageError) as dead:  # the master still considers the node alive
            backend.put(make_keys_of(1), values_of(keys[:1]))
        assert dead.value.cause == "unreachable"
        eventually(lambda: not any(backend.exists(keys)))
        assert backend.get(keys, blank(keys)) == [ABSENT] * 3
        assert backend.put(keys, values_of(keys)) == [False] * 3
    with store_node(bare_port):
        assert backend.put(keys, values_of(keys)) == [True] * 3
        assert backend.get(keys, blank(keys)) == [65_536] * 3
    backend.close()


def test_a_full_store_refuses_until_it_has_evicted(bare_port: int) -> None:
    backend = client(bare_port, segment_bytes=16 * MIB)
    keys = make_keys_of(48)
    stored = backend.put(keys, values_of(keys, 512 << 10))
    assert set(stored) == {True, False}
    there = [key for key, one in zip(keys, stored, strict=True) if one]
    # The master may have evicted some by now: nothing leases them yet.
    read = backend.get(there, blank(there, 512 << 10))
    assert set(read) <= {512 << 10, ABSENT}
    assert 512 << 10 in read
    eventually(lambda: backend.put(make_keys_of(1), values_of(keys[:1], 512 << 10)) == [True])
    backend.close()


@pytest.mark.slow
def test_master_frozen_killed_and_restarted() -> None:
    port = free_port()
    keys = make_keys_of(2)
    with mooncake_master(port) as master:
        backend = client(port, segment_bytes=16 * MIB)
        assert all(backend.put(keys, values_of(keys)))
        freeze(master)
        eventually(lambda: Path(f"/proc/{master.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        with pytest.raises(StorageError) as frozen:
            backend.exists(keys)
        assert frozen.value.cause == "timeout"
        with suppress(StorageError):  # the client may still know the location of the values, in its own memory
            assert all(length in (ABSENT, 65_536) for length in backend.get(keys, blank(keys)))
        master.send_signal(signal.SIGCONT)
        eventually(lambda: works(backend, keys))  # the master may have dropped this client by then
        master.kill()
        master.wait()
        with pytest.raises(StorageError) as dead:
            backend.exists(keys)
        assert dead.value.cause == "unreachable"
    with mooncake_master(port):
        eventually(lambda: works(backend, keys))
        assert backend.get(keys, blank(keys)) == [65_536] * 2
        backend.close()  # without a master this takes 6 s


def works(backend: MooncakeBackend, keys: list[bytes]) -> bool:
    try:
        return all(backend.put(keys, values_of(keys)))
    except StorageError:
        return False
