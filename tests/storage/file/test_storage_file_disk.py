"""The file store and its folder: foreign files, the lock, and the space of the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import patience
from rigs.file_store import KEYS, MIN_FREE, Fails, read, small, value_of
from rigs.simulated_disk import Disk, Faulty

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.storage import open_backend
from mainstem.storage.file import FileBackend, FileSystem
from mainstem.storage.file.index import RECORD
from mainstem.storage.file.space import GRAIN_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileBackend]:
    backend = FileBackend(tmp_path / "store", 1 << 20)
    yield backend
    backend.close()


# ---------------------------------------------------------------- foreign files


def put_foreign(kind: str, root: Path, name: str, outside: Path) -> None:
    path = root / name
    path.unlink(missing_ok=True)
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "dangling":
        path.symlink_to(outside.parent / "new")
    elif kind == "hardlink":
        os.link(outside, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        path.chmod(0o666)


@pytest.mark.parametrize("name", ["lock", "values", "index"])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "hardlink", "pipe", "folder", "open to all"])
def test_a_foreign_file_in_its_folder_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine" * 5000)
    outside.chmod(0o600)
    root = tmp_path / "store"
    store = FileBackend(root, 1 << 20)
    store.put(KEYS[:1], [value_of(0, 5000)])
    store.close()
    put_foreign(kind, root, name, outside)
    with pytest.raises(BackendUnavailable, match=str(root)):
        FileBackend(root, 1 << 20)
    assert outside.read_bytes() == b"mine" * 5000
    assert sorted(os.listdir(tmp_path)) == ["outside", "store"]


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hardlink", "pipe", "open to all"])
def test_a_foreign_file_for_the_new_index_is_not_written_to(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine" * 5000)
    root = tmp_path / "store"
    store = FileBackend(root, 1 << 20)
    store.put(KEYS[:4], [value_of(at, 5000) for at in range(4)])
    put_foreign(kind, root, "index.new", outside)
    store.clear()
    assert store.put(KEYS[:1], [value_of(0, 5000)]) == [True]
    store.close()
    assert outside.read_bytes() == b"mine" * 5000
    assert sorted(os.listdir(tmp_path)) == ["outside", "store"] and sorted(os.listdir(root)) == [
        "index",
        "lock",
        "values",
    ]


def test_a_foreign_file_at_the_last_moment_is_not_written_to(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine" * 5000)
    root = tmp_path / "store"

    def fault(number: int, name: str) -> None:
        if name == "open" and number > 10:
            os.link(outside, root / "index.new")

    store = FileBackend(root, 1 << 20, io=Faulty(FileSystem(), fault))
    for at in range(4):
        store.put(KEYS[at : at + 1], [value_of(at, 5000)])
    with pytest.raises(StorageError, match="io"):
        store.clear()
    store.close()
    assert outside.read_bytes() == b"mine" * 5000


def test_a_folder_that_others_may_write_to_is_refused_and_foreign_files_in_it_stay(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    (root / "..name").write_text("foreign")
    (root / "sub").mkdir()
    store = FileBackend(root, 1 << 20)
    store.put([b"/../../../../tmp/x".ljust(32, b"\0"), b".." * 16], [value_of(0, 10), value_of(1, 10)])
    store.clear()
    store.close()
    assert sorted(os.listdir(root)) == ["..name", "index", "lock", "sub", "values"]
    root.chmod(0o777)
    with pytest.raises(BackendUnavailable, match="not this user's alone"):
        FileBackend(root, 1 << 20)
    with pytest.raises(BackendUnavailable):
        FileBackend(root / "..name", 1 << 20)


# ---------------------------------------------------------------- processes


def test_a_second_open_is_refused_and_the_error_names_the_lock(tmp_path: Path, store: FileBackend) -> None:
    root = tmp_path / "store"
    with pytest.raises(BackendUnavailable, match=str(root / "lock")):
        FileBackend(root, 1 << 20)
    script = (
        "import sys\nfrom mainstem.errors import BackendUnavailable\nfrom mainstem.storage import open_backend\n"
        f"try: open_backend('file:{root}')\nexcept BackendUnavailable as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(60), check=True
    )
    assert f"{root / 'lock'} is held" in result.stdout
    store.put(KEYS[:1], [value_of(0, 10)])
    store.close()
    again = FileBackend(root, 1 << 20)
    assert again.exists(KEYS[:1]) == [True]
    again.close()


def test_failed_opens_leave_no_descriptor(tmp_path: Path, store: FileBackend) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(BackendUnavailable):
            FileBackend(tmp_path / "store", 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- space


@pytest.mark.parametrize("grains", [8, 6])
def test_a_full_disk_limits_the_store(grains: int, tiny_steps: None) -> None:
    """The store uses the room there is, even less than a step, evicts within it, and grows later."""
    limit = grains * GRAIN_BYTES

    class Small(Disk):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            if offset + length > limit:
                raise OSError(errno.ENOSPC, "full")
            super().allocate(fd, offset, length)

    store = small(Small(), 64)
    for at in range(20):
        assert store.put([KEYS[at]], [value_of(at, 4096)]) == [True]
    assert store.stats().entries == grains
    limit = 32 * GRAIN_BYTES
    for at in range(20):
        assert store.put([KEYS[at]], [value_of(at, 4096)]) == [True]
    assert all(store.exists(KEYS[:20]))


ROOM_OF_INDEX = 20 * RECORD.size


def leave(disk: Disk, free: int) -> None:
    """Sets the free bytes of the disk, as if others wrote or deleted files."""
    disk.size_bytes += free - disk.free_bytes(0)


def test_it_does_not_grow_into_the_room_that_must_stay_free(tiny_steps: None) -> None:
    disk = Disk()
    store = small(disk, 64, min_free=MIN_FREE)
    leave(disk, MIN_FREE + 8 * GRAIN_BYTES + ROOM_OF_INDEX)
    for at in range(20):
        assert store.put([KEYS[at]], [value_of(at, 4096)]) == [True]
    assert len(disk.files["values"].live) == 8 * GRAIN_BYTES
    assert store.exists(KEYS[:20]) == [at >= 12 for at in range(20)] and store.stats().entries == 8, (
        "it evicts within its file"
    )
    leave(disk, MIN_FREE + 64 * GRAIN_BYTES)
    for at in range(20):
        assert store.put([KEYS[at]], [value_of(at, 4096)]) == [True]
    assert all(store.exists(KEYS[:20]))


def test_it_returns_space_that_others_need_and_refuses_values_without_room(tiny_steps: None) -> None:
    disk = Disk()
    store = small(disk, 16, min_free=MIN_FREE)
    assert all(store.put(KEYS[:16], [value_of(at, 4096) for at in range(16)]))
    leave(disk, MIN_FREE - 3 * GRAIN_BYTES)
    assert store.put(KEYS[:1], [value_of(0, 4096)]) == [True], "it exists already"
    assert len(disk.files["values"].live) == 13 * GRAIN_BYTES and store.stats().entries == 13
    assert (store.exists(KEYS[:16]), store.stats().evicted) == ([at < 13 for at in range(16)], 3)
    assert store.put(KEYS[20:21], [value_of(20, 4096)]) == [True], "it replaces the least recently used"
    store.check()
    leave(disk, 0)
    assert store.put(KEYS[20:22], [value_of(at, 4096) for at in (20, 21)]) == [False, False], "there is no more room"
    assert len(disk.files["values"].live) == store.stats().entries == 0
    leave(disk, MIN_FREE + 2 * GRAIN_BYTES + ROOM_OF_INDEX)
    assert store.put(KEYS[20:22], [value_of(at, 4096) for at in (20, 21)]) == [True, True]
    assert [read(store, key) for key in KEYS[20:22]] == [bytes(value_of(at, 4096)) for at in (20, 21)]


@pytest.mark.parametrize("odd", [1, GRAIN_BYTES - 1, GRAIN_BYTES, GRAIN_BYTES + 1])
def test_whatever_others_need_whole_grains_are_returned(odd: int, tiny_steps: None) -> None:
    disk = Disk()
    store = small(disk, 16, min_free=MIN_FREE)
    assert all(store.put(KEYS[:16], [value_of(at, 4096) for at in range(16)]))
    leave(disk, MIN_FREE - odd)
    store.put(KEYS[:1], [value_of(0, 4096)])
    left = 16 - -(-odd // GRAIN_BYTES)
    assert len(disk.files["values"].live) == left * GRAIN_BYTES and store.stats().entries == left
    for at in range(16, 40):
        assert store.put([KEYS[at]], [value_of(at, 1 + at)]) == [True]
        assert read(store, KEYS[at]) == bytes(value_of(at, 1 + at))
    store.check()


@pytest.mark.parametrize("size", [1, GRAIN_BYTES - 1, GRAIN_BYTES, GRAIN_BYTES + 1])
def test_more_values_at_once_than_there_is_room_for_replace_one_another(size: int) -> None:
    """However much of its grains each value fills."""
    store = small(Disk(), 16)
    room = 16 // -(-size // GRAIN_BYTES)
    assert store.put(KEYS[:20], [value_of(at, size) for at in range(20)]) == [True] * 20
    there = [at for at, found in enumerate(store.exists(KEYS[:20])) if found]
    assert len(there) == room
    assert all(read(store, KEYS[at]) == bytes(value_of(at, size)) for at in there)
    store.check()


def test_the_free_space_is_queried_at_most_once_a_second(tiny_steps: None) -> None:
    asked: list[float] = []
    now = [100.0]
    io = Faulty(Disk(), lambda number, name: asked.append(now[0]) if name == "free_bytes" else None)
    store = small(io, 64, min_free=MIN_FREE, clock=lambda: now[0])
    for at in range(40):
        now[0] += 0.25
        store.put([KEYS[at]], [value_of(at, 4096)])
    assert asked == [100.25 + second for second in range(10)]
    store.close()
    assert small(io, 64, min_free=0).put(KEYS[:1], [value_of(0, 4096)]) == [True]
    assert len(asked) == 10, "no query without min_free"


def test_space_allocated_since_the_query_counts(tiny_steps: None) -> None:
    disk = Disk()
    store = small(disk, 64, min_free=MIN_FREE, clock=lambda: 0.0)
    leave(disk, MIN_FREE + 8 * GRAIN_BYTES + ROOM_OF_INDEX)
    for at in range(20):
        assert store.put([KEYS[at]], [value_of(at, 4096)]) == [True]
    assert len(disk.files["values"].live) == 8 * GRAIN_BYTES


def test_space_returned_since_the_query_is_not_returned_again(tiny_steps: None) -> None:
    disk, now = Disk(), [0.0]
    store = small(disk, 16, min_free=MIN_FREE, clock=lambda: now[0])
    store.put(KEYS[:16], [value_of(at, 4096) for at in range(16)])
    leave(disk, MIN_FREE - 3 * GRAIN_BYTES)
    now[0] += 60  # the next put queries the disk, those after it do not
    for _ in range(3):
        store.put(KEYS[:1], [value_of(0, 4096)])
        assert len(disk.files["values"].live) == 13 * GRAIN_BYTES


def test_a_failed_query_of_the_free_space_fails_only_the_put() -> None:
    fails = Fails("free_bytes")
    store = small(Faulty(Disk(), fails), min_free=MIN_FREE)
    store.put(KEYS[:1], [value_of(0, 4096)])
    fails.on = True
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[1:2], [value_of(1, 4096)])
    assert read(store, KEYS[0]) == bytes(value_of(0, 4096))
    fails.on = False
    assert store.put(KEYS[1:2], [value_of(1, 4096)]) == [True]


def test_a_file_that_cannot_grow_for_another_reason_is_an_error_and_drops_nothing(tiny_steps: None) -> None:
    fails = Fails("allocate")
    store = small(Faulty(Disk(), fails))
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    fails.on = True
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[4:5], [value_of(4, 4096)])
    assert all(store.exists(KEYS[:4]))


def test_the_file_system_reports_its_free_space(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    with contextlib.closing(
        open_backend(f"file:{tmp_path}/kv?min_free={2 * found.f_blocks * found.f_frsize}")
    ) as store:
        assert store.put(KEYS[:1], [value_of(0, 4096)]) == [False]
    with contextlib.closing(open_backend(f"file:{tmp_path}/kv?min_free=4KiB")) as store:
        assert store.put(KEYS[:1], [value_of(0, 4096)]) == [True]
