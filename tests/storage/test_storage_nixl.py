"""NIXL with its real agent: the interface with files and S3 objects, and failures that an agent does not notice."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import patience
from rigs.servers import RCLONE_CASES, free_port, rclone_s3
from rigs.slow import slow_but
from rigs.stores import read_elsewhere

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.storage import ABSENT, Backend, open_backend
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.vendors.nixl import APIS, PACKAGES, Files, NixlBackend

if not any(importlib.util.find_spec(name) for name in PACKAGES):
    pytest.skip("no NIXL here: pip install nixl-cu12", allow_module_level=True)

pytestmark = pytest.mark.deadline
TIMEOUT_S = patience(20)
"""The timeout of calls that must succeed."""
KEYS = [bytes([number]) * 32 for number in range(100)]


def page(number: int, size: int = 65_536) -> memoryview:
    return memoryview(bytearray([number]) * size)


def blank(count: int, size: int = 65_536) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def path_of(folder: Path, key: bytes) -> Path:
    return folder / key.hex()[:2] / key.hex()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[NixlBackend]:
    backend = NixlBackend(Files(tmp_path))
    yield backend
    backend.close()


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("api", slow_but(APIS, "aio"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance_of_files(case: Case, api: str, tmp_path: Path) -> None:
    result = run(case, lambda: open_backend(f"nixl:posix?path={tmp_path}&api={api}&staging=4MiB"))
    assert result.passed, result.reason
    assert not list(tmp_path.rglob("*.*"))


def test_registered_memory_is_read_and_written_in_place(files: NixlBackend) -> None:
    pool = memoryview(bytearray(8 * 65_536))
    views = [pool[at : at + 65_536] for at in range(0, len(pool), 65_536)]
    files.register([pool])
    assert files.put(KEYS[:8], views) == [True] * 8
    assert files.get(KEYS[:8], views) == [65_536] * 8
    assert files.staged == 0
    files.get(KEYS[:2], [views[0], *blank(1)])
    assert files.staged == 1


def test_another_process_reads_what_was_written(files: NixlBackend, tmp_path: Path) -> None:
    files.put(KEYS[:3], [page(number) for number in range(3)])
    assert read_elsewhere(f"nixl:posix?path={tmp_path}", KEYS[:3], 65_536) == [page(number) for number in range(3)]


def test_a_truncated_or_deleted_file_is_reported_and_affects_no_other(files: NixlBackend, tmp_path: Path) -> None:
    files.put(KEYS[:4], [page(number) for number in range(4)])
    os.truncate(path_of(tmp_path, KEYS[1]), 1000)
    path_of(tmp_path, KEYS[2]).unlink()
    buffers = blank(4)
    assert files.get(KEYS[:4], buffers) == [65_536, 1000, ABSENT, 65_536]
    assert buffers[0] == page(0)
    assert buffers[3] == page(3)


class CutsShort(Files):
    """Files that lose their end after their length was read."""

    @contextmanager
    def readable(self, keys: list[bytes]) -> Iterator[list]:
        with super().readable(keys) as spots:
            for key in keys[: self.cut]:
                os.truncate(self._path(key), 10)
            yield spots


@pytest.mark.parametrize("cut", [1, 3])
def test_a_file_that_cannot_be_read_to_its_end(tmp_path: Path, cut: int) -> None:
    place = CutsShort(tmp_path)
    place.cut = cut
    backend = NixlBackend(place)
    backend.put(KEYS[:3], [page(number) for number in range(3)])
    if cut == 3:
        with pytest.raises(StorageError, match="none of 3"):
            backend.get(KEYS[:3], blank(3))
    else:
        assert backend.get(KEYS[:3], blank(3)) == [ABSENT, 65_536, 65_536]
    backend.close()


def test_a_folder_that_is_gone(files: NixlBackend, tmp_path: Path) -> None:
    for shard in tmp_path.iterdir():
        shard.rmdir()
    assert not any(files.exists(KEYS))
    with pytest.raises(StorageError) as raised:
        files.put(KEYS[:1], [page(1)])
    assert raised.value.cause == "io"


def test_clear_leaves_foreign_files_and_deletes_temporary_ones(files: NixlBackend, tmp_path: Path) -> None:
    notes = tmp_path / "ab" / "notes.txt"
    notes.write_text("mine")
    half = path_of(tmp_path, KEYS[5]).with_suffix("." + "0" * 32)
    half.write_bytes(b"half")
    files.put(KEYS[:2], [page(1), page(2)])
    files.clear()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [notes]


def test_a_full_disk_refuses_and_keeps_what_fits(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        backend = NixlBackend(Files(tmp_path))
        stored = backend.put(KEYS[:8], [page(number, 1 << 20) for number in range(8)])
        assert 0 < sum(stored) < 8
        buffers = blank(8, 1 << 20)
        assert backend.get(KEYS[:8], buffers) == [1 << 20 if one else ABSENT for one in stored]
        backend.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# ---------------------------------------------------------------- specs


def test_a_look_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="there is no store"):
        open_backend(f"nixl:posix?path={tmp_path}/none", existing=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable, match="no folder"):
        open_backend(f"nixl:posix?path={tmp_path}/file")


# ---------------------------------------------------------------- objects


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory, s3_credentials: None) -> Path:
    if not importlib.util.find_spec("obstore"):
        pytest.skip("the package obstore is not installed")
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    return folder


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    try:
        with rclone_s3(port, folder) as process:
            yield process
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def s3(buckets: Path) -> Iterator[int]:
    port = free_port()
    with server(buckets, port):
        yield port


def objects(port: int, timeout_s: float = TIMEOUT_S) -> Backend:
    place = f"bucket=bucket&endpoint=http://127.0.0.1:{port}&region=us-east-1"
    return open_backend(f"nixl:obj?{place}&timeout={timeout_s}&staging=4MiB")


MOST_CALLS = {"empty", "round_trip", "mixed_sizes", "get_with_gaps", "wrong_length", "delete", "clear", "scan", "close"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in MOST_CALLS else pytest.mark.slow, id=case.name)
        for case in RCLONE_CASES
    ],
)
def test_conformance_of_objects(case: Case, s3: int) -> None:
    result = run(case, lambda: objects(s3))
    assert result.passed, result.reason


def test_objects_are_those_of_the_s3_back_end(s3: int) -> None:
    spec = f"s3://bucket?endpoint=http://127.0.0.1:{s3}&region=us-east-1&timeout={TIMEOUT_S}"
    writer, reader = objects(s3), open_backend(spec)
    assert writer.put(KEYS[:2], [page(1), page(2)]) == [True] * 2
    buffers = blank(2)
    assert reader.get(KEYS[:2], buffers) == [65_536] * 2
    assert buffers == [page(1), page(2)]
    writer.close()
    reader.close()


def test_no_bucket_and_no_server(s3: int) -> None:
    with pytest.raises(BackendUnavailable):
        open_backend(f"nixl:obj?bucket=missing&endpoint=http://127.0.0.1:{s3}&region=us-east-1")
    with pytest.raises(BackendUnavailable):
        objects(free_port(), timeout_s=1)


def test_an_s3_server_that_freezes_dies_and_comes_back(buckets: Path) -> None:
    port = free_port()
    with server(buckets, port) as process:
        backend = objects(port, timeout_s=patience(1))
        backend.put(KEYS[:2], [page(1), page(2)])
        process.send_signal(signal.SIGSTOP)
        calls = (lambda: backend.get(KEYS[:2], blank(2)), lambda: backend.put(KEYS[:1], [page(3)]))
        for call in calls:
            with pytest.raises(StorageError) as frozen:
                call()
            assert frozen.value.cause == "timeout"
        process.kill()
        process.wait()
        for call in calls:
            with pytest.raises(StorageError) as dead:
                call()
            assert dead.value.cause == "unreachable"
    with server(buckets, port):
        buffers = blank(2)
        assert backend.get(KEYS[:2], buffers) == [65_536] * 2
        assert buffers == [page(1), page(2)]
    backend.close()
