"""3FS, over a double of its client: conformance, restarts, results in any order, errors, timeouts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from doubles import hf3fs_fuse_io
from machine import patience
from rigs.stores import Values

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.vendors.hf3fs import HF3FSBackend

pytestmark = pytest.mark.deadline
VALUES = Values(5000)
KEYS, SIZE = VALUES.keys, VALUES.size
value, put = VALUES.value, VALUES.put


@pytest.fixture(autouse=True)
def mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hf3fs_fuse_io.Mount]:
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", hf3fs_fuse_io)
    return hf3fs_fuse_io.reset(str(tmp_path))


@pytest.fixture
def open_one(tmp_path: Path) -> Iterator[Callable[..., HF3FSBackend]]:
    opened: list[HF3FSBackend] = []

    def open_it(slots: int = 16, entries: int = 4) -> HF3FSBackend:
        opened.append(HF3FSBackend(tmp_path / "rank0", slots * SIZE, SIZE, entries, timeout_s=patience(0.1)))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def read(store: HF3FSBackend, *numbers: int) -> list[bool]:
    """Returns whether each value is present. Fails on a wrong value."""
    buffers = [memoryview(bytearray(SIZE)) for _ in numbers]
    lengths = store.get([KEYS[number] for number in numbers], buffers)
    for number, length, buffer in zip(numbers, lengths, buffers, strict=True):
        assert length == ABSENT or buffer == value(number), f"value {number} is another one's"
    return [length == SIZE for length in lengths]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    result = run(case, lambda: HF3FSBackend(tmp_path / "rank0", 1 << 31, entries=8))
    assert result.passed, result.reason


def test_a_ring_never_gets_more_than_its_entries(
    open_one: Callable[..., HF3FSBackend], mount: hf3fs_fuse_io.Mount
) -> None:
    store = open_one(slots=16, entries=4)
    put(store, *range(10))
    read(store, *range(10))
    assert mount.batches == [4, 4, 2, 4, 4, 2] and mount.rings == 2


def test_a_miss_in_the_middle_shifts_nothing(open_one: Callable[..., HF3FSBackend]) -> None:
    store = open_one()
    put(store, 0, 1, 3, 4, 6)
    assert read(store, 0, 1, 2, 3, 4, 5, 6) == [True, True, False, True, True, False, True]


def test_a_failed_piece_is_a_miss_and_its_neighbours_are_not(
    open_one: Callable[..., HF3FSBackend], mount: hf3fs_fuse_io.Mount
) -> None:
    store = open_one()
    put(store, *range(8))
    mount.fail = {mount.pieces + 1: -errno.EIO, mount.pieces + 3: 100, mount.pieces + 4: 0}
    assert read(store, *range(8)) == [True, False, True, False, False, True, True, True]
    assert all(read(store, *range(8)))


def test_a_value_that_was_not_written_whole_is_not_in_the_index(
    open_one: Callable[..., HF3FSBackend], mount: hf3fs_fuse_io.Mount
) -> None:
    store = open_one(slots=4)
    put(store, 0)
    mount.fail = {mount.pieces: -errno.ENOSPC, mount.pieces + 2: 10}
    assert put(store, 1, 2, 3) == [False, True, False]
    assert read(store, 0, 1, 2, 3) == [True, False, True, False]
    assert put(store, 1, 3) == [True, True], "their slots were freed"
    assert all(read(store, 0, 1, 2, 3))


@pytest.mark.parametrize(
    ("code", "cause"),
    [(errno.EIO, "io"), (errno.ENOTCONN, "unreachable"), (errno.ENOSPC, "full"), (errno.EDQUOT, "full")],
)
def test_when_all_pieces_fail_the_call_fails_with_their_cause(
    open_one: Callable[..., HF3FSBackend], mount: hf3fs_fuse_io.Mount, code: int, cause: str
) -> None:
    store = open_one()
    put(store, 0, 1)
    mount.fail = dict.fromkeys(range(mount.pieces, mount.pieces + 2), -code)
    with pytest.raises(StorageError) as caught:
        read(store, 0, 1)
    assert caught.value.cause == cause
    assert all(read(store, 0, 1))


def test_a_stuck_ring_is_abandoned_with_its_memory_and_its_slots(
    open_one: Callable[..., HF3FSBackend], mount: hf3fs_fuse_io.Mount
) -> None:
    store = open_one(slots=8)
    put(store, 0, 1)
    mount.frozen = True
    for call in (lambda: put(store, 2, 3), lambda: read(store, 0, 1)):
        with pytest.raises(StorageError, match="timeout: 3FS"):
            call()
    mount.frozen = False
    rings = mount.rings
    late = [offset for _, file, offset, _ in mount.late[:2]]
    assert all(put(store, *range(4, 10)))
    for offset in late:  # the stuck writes end now and overwrite the slots
        os.pwrite(next(iter(mount.registered)), b"\xee" * SIZE, offset)
    assert mount.rings == rings + 1, "the old ring is not reused"
    assert sum(read(store, *range(10))) == 6, "eight slots, two of them lost until the file is reopened"
    store.close()
    again = open_one(slots=8)
    assert sum(read(again, *range(10))) == 6
    assert put(again, 20, 21) == [True, True] and again.stats().entries == 8


def test_what_was_stored_is_there_after_a_restart(open_one: Callable[..., HF3FSBackend]) -> None:
    store = open_one()
    put(store, 0, 1, 2)
    store.put([KEYS[1]], [value(1, 100, version=5)])
    store.delete([KEYS[2]])
    store.close()
    again = open_one()
    assert again.exists(KEYS[:3]) == [True, True, False]
    small = memoryview(bytearray(100))
    assert again.get([KEYS[1]], [small]) == [100] and small == value(1, 100, version=5)
    again.clear()
    again.close()
    assert open_one().stats().entries == 0


def test_a_killed_process_leaves_whole_values(tmp_path: Path, open_one: Callable[..., HF3FSBackend]) -> None:
    code = f"""
import os, sys
from types import ModuleType
sys.path.insert(0, {str(Path(__file__).parent)!r})
from doubles import hf3fs_fuse_io
sys.modules["hf3fs_fuse"], sys.modules["hf3fs_fuse.io"] = ModuleType("hf3fs_fuse"), hf3fs_fuse_io
hf3fs_fuse_io.reset({str(tmp_path)!r})
import test_storage_hf3fs as test
store = test.HF3FSBackend({str(tmp_path / "rank0")!r}, 16 * test.SIZE, test.SIZE, 4)
test.put(store, *range(12))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=patience(60))
    assert all(read(open_one(), *range(12)))


@pytest.mark.parametrize("cut", [0, 5, 16, 17, 60, 59])
def test_a_truncated_index_keeps_its_whole_records(
    open_one: Callable[..., HF3FSBackend], tmp_path: Path, cut: int
) -> None:
    store = open_one()
    for number in range(6):
        put(store, number)
    store.close()
    index = tmp_path / "rank0.index"
    index.write_bytes(index.read_bytes()[:cut])
    again = open_one()
    assert read(again, *range(6)) == [number < (cut - 16) // 44 for number in range(6)]
    assert all(put(again, *range(6))) and all(read(again, *range(6)))


def test_a_damaged_record_ends_the_index(open_one: Callable[..., HF3FSBackend], tmp_path: Path) -> None:
    store = open_one()
    for number in range(6):
        put(store, number)
    store.close()
    index = tmp_path / "rank0.index"
    data = bytearray(index.read_bytes())
    data[16 + 3 * 44 + 7] ^= 1
    index.write_bytes(data)
    assert read(open_one(), *range(6)) == [True] * 3 + [False] * 3


def test_the_index_stays_small(open_one: Callable[..., HF3FSBackend], tmp_path: Path) -> None:
    store = open_one(slots=4)
    for round_number in range(500):
        put(store, *[(round_number + at) % 9 for at in range(3)])
    assert (tmp_path / "rank0.index").stat().st_size <= 16 + 44 * (4 * 4 + 1024)
    before = read(store, *range(9))
    store.close()
    assert read(open_one(slots=4), *range(9)) == before and sum(before) >= 3


def test_the_least_recently_used_goes_first(open_one: Callable[..., HF3FSBackend]) -> None:
    store = open_one(slots=4)
    put(store, 0, 1, 2, 3)
    read(store, 0)
    put(store, 4, 5)
    assert read(store, 0, 1, 2, 3, 4, 5) == [True, False, False, True, True, True]
    assert store.stats().evicted == 2


def test_a_value_longer_than_a_slot_or_a_batch_longer_than_the_file_is_refused_in_part(
    open_one: Callable[..., HF3FSBackend],
) -> None:
    store = open_one(slots=2)
    stored = store.put(KEYS[:3], [value(0), value(1, SIZE + 1), value(2)])
    assert stored == [True, False, True] and read(store, 0, 2) == [True, True]
    put(store, *range(10))
    assert store.stats().entries == 2


def test_a_smaller_file_keeps_the_values_inside(open_one: Callable[..., HF3FSBackend]) -> None:
    store = open_one(slots=16)
    put(store, *range(10))
    store.close()
    assert sum(read(open_one(slots=4), *range(10))) == 4


def test_a_look_does_not_make_the_file_smaller_and_makes_none(
    open_one: Callable[..., HF3FSBackend], tmp_path: Path
) -> None:
    store = open_one(slots=16)
    put(store, *range(16))
    store.close()
    with closing(open_backend(f"hf3fs:{tmp_path}/rank0?slot={SIZE}&capacity={2 * SIZE}", existing=True)) as looked:
        assert looked.stats().entries == 16
    with pytest.raises(BackendUnavailable, match="there is no store"):
        open_backend(f"hf3fs:{tmp_path}/rank1", existing=True)
    assert not list(tmp_path.glob("rank1*"))


def test_it_says_what_the_longest_value_is_and_takes_no_longer_one(open_one: Callable[..., HF3FSBackend]) -> None:
    store = open_one()
    assert store.longest is not None and (store.longest.size, "option slot" in store.longest.remedy) == (SIZE, True)
    assert store.put(KEYS[:2], [memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE + 1))]) == [True, False]


def test_one_process_has_the_file(open_one: Callable[..., HF3FSBackend]) -> None:
    open_one()
    with pytest.raises(BackendUnavailable, match="in use"):
        open_one()


def test_other_slots_than_the_file_was_made_with_are_refused(
    open_one: Callable[..., HF3FSBackend], tmp_path: Path
) -> None:
    open_one().close()
    with pytest.raises(BadArgument, match=f"{SIZE}, as"):
        HF3FSBackend(tmp_path / "rank0", 16 * SIZE, 2 * SIZE)
    open_one()


def test_a_file_that_cannot_be_registered_is_closed(
    open_one: Callable[..., HF3FSBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EHOSTUNREACH, "no agent")

    with monkeypatch.context() as patch:
        patch.setattr(hf3fs_fuse_io, "register_fd", refuse)
        with pytest.raises(StorageError, match="unreachable: 3FS: opening"):
            open_one()
    assert put(open_one(), 0) == [True]


def test_the_file_is_deregistered_before_it_is_closed(
    open_one: Callable[..., HF3FSBackend], mount: hf3fs_fuse_io.Mount
) -> None:
    store = open_one()
    assert len(mount.registered) == 1
    store.close()
    assert not mount.registered


def test_spec(tmp_path: Path) -> None:
    store = open_backend(f"hf3fs:{tmp_path}/rank3?capacity=64KiB&slot=4KiB&entries=2&timeout=1")
    assert store.stats().capacity_bytes == 65536
    store.close()
    for bad in (
        "hf3fs:",
        f"hf3fs:{tmp_path}/a?slots=3",
        f"hf3fs:{tmp_path}/a?entries=x",
        f"hf3fs:{tmp_path}/a?entries=0",
    ):
        with pytest.raises(BadArgument):
            open_backend(bad)
    with pytest.raises(BadArgument, match="slot_bytes"):
        open_backend(f"hf3fs:{tmp_path}/a?capacity=1KiB&slot=2KiB")


def test_a_path_on_no_mount_and_a_missing_client_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="on no 3FS mount"):
        open_backend("hf3fs:/elsewhere/rank0")
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", None)
    with pytest.raises(BackendUnavailable, match="hf3fs_fuse"):
        open_backend("hf3fs:/elsewhere/rank0")
