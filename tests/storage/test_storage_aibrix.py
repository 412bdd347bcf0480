"""The AIBrix connectors that need no server, on a real disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from machine import patience
from rigs.stores import cause_of

from mainstem.errors import BackendUnavailable
from mainstem.storage.base import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, Pool, make_value, run
from mainstem.storage.vendors.aibrix import AIBrixBackend

pytestmark = pytest.mark.deadline
TIMEOUT_S = patience(20)
"""The timeout of calls that must succeed."""
KEYS = [bytes([number]) * 32 for number in range(8)]
needs_package = pytest.mark.skipif(
    not (find_spec("aibrix_kvcache") and find_spec("rocksdict")),
    reason="AIBrix is not installed: pip install 'mainstem[aibrix]'",
)
both = pytest.mark.parametrize("connector", ["shfs", "rocksdb"])


def values(size: int, version: int = 0) -> list[memoryview]:
    return [make_value(key, size, version) for key in KEYS]


def file_of(folder: Path, key: bytes) -> Path:
    return folder / "mainstem" / key.hex()[:2] / key.hex()[2:4] / key.hex()


@contextlib.contextmanager
def write_blocked(folder: Path, key: bytes) -> Iterator[Callable[[], bytes]]:
    """Blocks each writer of this key in the file system, until the yielded function has read what it writes."""
    path = file_of(folder, key).with_name(key.hex() + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    freed = False

    def free() -> bytes:
        nonlocal freed
        freed = True
        return path.read_bytes()

    yield free
    if not freed:
        with contextlib.suppress(FileNotFoundError):  # a writer that ended before it began has removed it
            free()


@needs_package
@both
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, connector: str, tmp_path: Path) -> None:
    result = run(case, lambda: AIBrixBackend(connector, tmp_path, timeout_s=TIMEOUT_S))
    assert result.passed, result.reason


@needs_package
@both
def test_a_look_makes_no_folder(connector: str, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="there is no store"):
        open_backend(f"aibrix:{connector}?path={tmp_path}/none", existing=True)
    assert not list(tmp_path.iterdir())


@needs_package
def test_processes_share_a_folder_and_not_a_database_and_keep_their_event_loops(tmp_path: Path) -> None:
    code = (
        "from mainstem.errors import BackendUnavailable; from mainstem.storage import open_backend\n"
        "import asyncio, sys; before = type(asyncio.new_event_loop())\n"
        "try: print(open_backend(sys.argv[1]).exists([bytes([0]) * 32]))\n"
        "except BackendUnavailable: print('unavailable')\n"
        "print(before is type(asyncio.new_event_loop()))"
    )
    for connector, seen in (("shfs", "[True]"), ("rocksdb", "unavailable")):
        backend = AIBrixBackend(connector, tmp_path / connector, timeout_s=TIMEOUT_S)
        assert backend.capabilities.shared == (connector == "shfs")
        backend.put(KEYS[:1], values(1000)[:1])
        spec = f"aibrix:{connector}?path={tmp_path / connector}&timeout={TIMEOUT_S}"
        command = [sys.executable, "-c", code, spec]
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(60))
        assert found.stdout.split("\n") == [seen, "True", ""], found.stderr
        backend.close()


@needs_package
@both
def test_a_writer_that_is_killed_leaves_whole_values(connector: str, tmp_path: Path) -> None:
    code = (
        "from mainstem.storage.vendors.aibrix import AIBrixBackend\n"
        "from mainstem.storage.conformance import make_value\n"
        "import itertools, sys; store = AIBrixBackend(*sys.argv[1:]); keys = [bytes([n]) * 32 for n in range(8)]\n"
        "for version in itertools.count():\n"
        "    store.put(keys, [make_value(key, 100_000, version) for key in keys]); print(version, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, connector, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer, writer.stdout:
        for _ in range(5):
            assert writer.stdout.readline()
        writer.kill()
    backend = AIBrixBackend(connector, tmp_path, timeout_s=TIMEOUT_S)
    pool = Pool([100_000] * 8)
    assert backend.get(KEYS, pool.buffers) == [100_000] * 8
    for key, buffer in zip(KEYS, pool.buffers, strict=True):
        assert buffer == make_value(key, 100_000, int.from_bytes(buffer[-4:], "big"))
    assert backend.put(KEYS, values(1000)) == [True] * 8
    backend.close()


@needs_package
def test_a_frozen_file_system_costs_the_timeout_and_no_more(tmp_path: Path) -> None:
    backend = AIBrixBackend("shfs", tmp_path, timeout_s=patience(0.3))
    value = values(1000)[0]
    with write_blocked(tmp_path, KEYS[0]) as free:
        assert cause_of(lambda: backend.put(KEYS[:1], [value])) == "timeout"
        value[:] = bytes(1000)  # the buffer belongs to the caller again
        assert backend.put(KEYS[1:], values(1000)[1:]) == [True] * 7
        assert free() == values(1000)[0]
    backend.close()


@needs_package
def test_a_key_has_one_writer_at_a_time(tmp_path: Path) -> None:
    backend = AIBrixBackend("shfs", tmp_path, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(2) as threads, write_blocked(tmp_path, KEYS[0]) as free:
        puts = [threads.submit(backend.put, KEYS[:1], values(1000, version)[:1]) for version in (1, 2)]
        while len(asyncio.all_tasks(backend._thread._loop)) < 4:  # both calls, and a task for the key of each
            time.sleep(0.01)
        written = free()
    assert written in [values(1000, version)[0] for version in (1, 2)]  # not both into one file
    assert [bool(put.exception()) for put in puts].count(False) == 1  # the put whose file was a pipe failed
    assert backend.get(KEYS[:1], [written_buffer := memoryview(bytearray(1000))]) == [1000]
    assert written_buffer in [values(1000, version)[0] for version in (1, 2)]
    backend.close()


@needs_package
def test_close_ends_calls_that_wait(tmp_path: Path) -> None:
    backend = AIBrixBackend("shfs", tmp_path, timeout_s=TIMEOUT_S)
    ended = threading.Event()

    def put() -> None:
        assert cause_of(lambda: backend.put(KEYS[:1], values(1000)[:1])) == "closed"
        ended.set()

    with write_blocked(tmp_path, KEYS[0]):
        caller = threading.Thread(target=put)
        caller.start()
        while backend._workers._work_queue.qsize() or not backend._workers._threads:
            time.sleep(0.01)
        backend.close()
        assert ended.wait(patience(10))
        caller.join()


@needs_package
def test_a_value_that_cannot_be_read_does_not_affect_others(tmp_path: Path) -> None:
    backend = AIBrixBackend("shfs", tmp_path, timeout_s=TIMEOUT_S)
    backend.put(KEYS, values(1000))
    file_of(tmp_path, KEYS[2]).write_bytes(bytes(5))
    broken = file_of(tmp_path, KEYS[5])
    broken.unlink()
    broken.mkdir()
    pool = Pool([1000] * 5 + [broken.stat().st_size] + [1000] * 2)
    assert backend.get(KEYS, pool.buffers) == [5 if at == 2 else ABSENT if at == 5 else 1000 for at in range(8)]
    assert pool.buffers[7] == values(1000)[7]
    assert cause_of(lambda: backend.get(KEYS[5:6], pool.buffers[5:6])) == "io"
    backend.close()


@needs_package
def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    backend = AIBrixBackend("shfs", tmp_path / "store", timeout_s=TIMEOUT_S)
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store" / "mainstem").write_text("a file in the way")
    assert cause_of(lambda: backend.put(KEYS, values(10))) == "io"
    backend.close()
    with pytest.raises(BackendUnavailable, match="could not open"):
        AIBrixBackend("rocksdb", tmp_path / "store" / "mainstem")


@needs_package
@both
def test_a_full_disk(connector: str, tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no small disk here: {mount.stderr.strip()}")
    try:
        backend = AIBrixBackend(connector, tmp_path, timeout_s=TIMEOUT_S)
        first = backend.put(KEYS[:4], values(1 << 20)[:4])
        stored = first + [backend.put([key], [make_value(key, 3 << 20)])[0] for key in KEYS[4:]]
        assert stored[:4] == [True] * 4 and not all(stored)
        pool = Pool([1 << 20] * 4)
        assert backend.get(KEYS[:4], pool.buffers) == [1 << 20] * 4
        assert pool.buffers == values(1 << 20)[:4]
        if connector == "shfs":
            backend.clear()
            assert backend.put(KEYS[:4], values(1 << 20)[:4]) == [True] * 4
        backend.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@needs_package
def test_clear_leaves_foreign_files(tmp_path: Path) -> None:
    ours, other = (AIBrixBackend("shfs", tmp_path, namespace=name, timeout_s=TIMEOUT_S) for name in ("ours", "other"))
    ours.put(KEYS, values(100))
    other.put(KEYS, values(100))
    (tmp_path / "ours" / "note").write_text("of somebody else")
    ours.clear()
    assert (ours.exists(KEYS), other.exists(KEYS)) == ([False] * 8, [True] * 8)
    assert (tmp_path / "ours" / "note").exists()
    ours.close()
    other.close()
