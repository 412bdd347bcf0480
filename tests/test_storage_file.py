"""The file store: conformance, damage of any bit, faults of any call, and foreign files in its folder."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machine import patience
from simulated_disk import Disk, Faulty

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage import open_backend
from mainstem.storage.base import ABSENT, BackendStats
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.file import FileBackend, FileSystem, backend, index
from mainstem.storage.file.hashes import HELD_BYTES
from mainstem.storage.file.index import RECORD
from mainstem.storage.file.space import GRAIN_BYTES
from mainstem.storage.file.values import READ_BYTES

KEYS = [bytes([at]) * 32 for at in range(64)]


def value_of(at: int, size: int) -> memoryview:
    return memoryview(random.Random(at).randbytes(size))


def small(
    io: FileSystem,
    grains: int = 16,
    root: Path | str = "simulated",
    min_free: int = 0,
    clock: Callable[[], float] | None = None,
) -> FileBackend:
    """Makes a store of `grains` grains. With `min_free` it queries the free space on every put."""
    return FileBackend(
        root,
        grains * GRAIN_BYTES,
        io=io,
        threads=1,
        min_free_bytes=min_free,
        clock=clock or count().__next__,
        random=random.Random("junk").randbytes,
    )


def read(store: FileBackend, key: bytes) -> bytes | None:
    (length,) = store.get([key], [memoryview(bytearray())])
    if length == ABSENT:
        return None
    buffer = memoryview(bytearray(length))
    return bytes(buffer) if store.get([key], [buffer]) == [length] else None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileBackend]:
    backend = FileBackend(tmp_path / "store", 1 << 20)
    yield backend
    backend.close()


@pytest.fixture
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is rewritten and the file grows every few calls."""
    monkeypatch.setattr(index, "SLACK_RECORDS", 6)
    monkeypatch.setattr(backend, "STEP_BYTES", 4 * GRAIN_BYTES)


# ---------------------------------------------------------------- interface


@pytest.mark.parametrize("options", ["", "?sync=none&capacity=64MiB&threads=1"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, options: str, tmp_path: Path) -> None:
    result = run(case, lambda: open_backend(f"file:{tmp_path}/store{options}"))
    assert result.passed, result.reason


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("capacity=9", "capacity"),
        ("capacity=x", "capacity"),
        ("sync=some", "sync"),
        ("threads=x", "threads"),
        ("threads=0", "threads"),
        ("min_free=x", "min_free"),
        ("timeout=3", "timeout"),
    ],
)
def test_a_bad_option_is_named(tmp_path: Path, spec: str, word: str) -> None:
    with pytest.raises(BadArgument, match=word):
        open_backend(f"file:{tmp_path}/store?{spec}")


def test_bad_arguments_are_named(tmp_path: Path, store: FileBackend) -> None:
    for call, word in (
        (lambda: open_backend("file:"), "root"),
        (lambda: FileBackend("a\0b", 1 << 20), "root"),
        (lambda: FileBackend(tmp_path / "other", 1 << 20, threads=0), "threads"),
        (lambda: FileBackend(tmp_path / "other", 1 << 20, min_free_bytes=-1), "min_free_bytes"),
        (lambda: store.put([b"short"], [memoryview(b"x")]), "key"),
        (lambda: store.put(KEYS[:1], [memoryview(b"")]), "at least one byte"),
    ):
        with pytest.raises(BadArgument, match=word):
            call()


def test_without_xxhash_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(BackendUnavailable, match=r"mainstem\[file\]"):
        FileBackend(tmp_path / "store", 1 << 20)


# ---------------------------------------------------------------- size, order, time


def test_what_was_stored_is_there_after_reopening(tmp_path: Path) -> None:
    for _ in range(3):
        store = FileBackend(tmp_path / "a" / "store", 1 << 20)
        for at in range(10):
            assert read(store, KEYS[at]) in (None, bytes(value_of(at, 500 * at + 1)))
        store.put(KEYS[:10], [value_of(at, 500 * at + 1) for at in range(10)])
        store.delete(KEYS[3:4])
        store.close()
    store = FileBackend(tmp_path / "a" / "store", 1 << 20)
    assert [key in (KEYS[3],) or read(store, key) is not None for key in KEYS[:10]] == [True] * 10
    assert store.exists([KEYS[3]]) == 0 and read(store, KEYS[3]) is None
    store.check()
    store.close()


def test_files_are_for_the_owner_alone_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SLACK_RECORDS", 8)
    root = tmp_path / "store"
    store = small(FileSystem(), 8, root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for at in range(200):
        assert store.put([random.Random(at).randbytes(32)], [value_of(at, 5000)]) == [True]
        store.check()
    assert sorted(os.listdir(root)) == ["index", "lock", "values"]
    assert {stat.S_IMODE((root / name).stat().st_mode) for name in os.listdir(root)} == {0o600}
    assert (root / "values").stat().st_size <= 8 * GRAIN_BYTES
    assert (root / "index").stat().st_size <= RECORD.size * (2 * 4 + 8)
    assert store.stats() == BackendStats(4, 8 * GRAIN_BYTES, 8 * GRAIN_BYTES, 196)
    store.close()


def test_the_least_recently_used_is_evicted_first_and_the_last_of_a_batch() -> None:
    store = small(Disk(), 8)
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    store.put(KEYS[4:8], [value_of(at, 4096) for at in range(4, 8)])
    read(store, KEYS[3])
    store.put(KEYS[8:10], [value_of(at, 4096) for at in (8, 9)])
    assert [store.exists([key]) for key in KEYS[:10]] == [1, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    store.close()


def test_the_last_of_values_read_together_is_evicted_first() -> None:
    store = small(Disk(), 4)
    for at in (3, 2, 1, 0):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    store.get(KEYS[:4], [memoryview(bytearray(4096)) for _ in range(4)])
    store.put(KEYS[4:5], [value_of(4, 4096)])
    store.put(KEYS[5:6], [value_of(5, 4096)])
    assert [store.exists([key]) for key in KEYS[:6]] == [1, 1, 0, 0, 1, 1]
    store.close()


def test_recency_survives_reopening() -> None:
    disk = Disk()
    store = small(disk, 8)
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    store.close()
    store = small(disk, 8)
    store.put(KEYS[4:7], [value_of(at, 4096) for at in range(4, 7)])
    store.put(KEYS[7:9], [value_of(at, 4096) for at in (7, 8)])
    assert [store.exists([key]) for key in KEYS[:9]] == [1, 1, 1, 0, 1, 1, 1, 1, 1]
    store.close()


def test_a_batch_larger_than_the_store_keeps_its_end_and_a_larger_value_is_refused() -> None:
    store = small(Disk(), 8)
    assert store.put(KEYS[:20], [value_of(at, 4096) for at in range(20)]) == [True] * 20
    store.check()
    assert store.exists(KEYS[16:20]) == 4
    assert store.put(KEYS[20:22], [value_of(20, 9 * GRAIN_BYTES), value_of(21, 10)]) == [False, True]
    assert store.stats().entries == 8
    assert store.put(KEYS[:1], [value_of(0, 8 * GRAIN_BYTES)]) == [True]
    assert store.stats().entries == 1
    store.check()
    store.close()


def test_values_of_several_sizes_share_the_room(tiny_steps: None) -> None:
    store = small(Disk(), 64)
    rng = random.Random(5)
    for at in range(600):
        some = rng.sample(range(64), 4)
        values = [value_of(64 * at + key, rng.choice((100, 5000, 9000, 20_000, 30_000))) for key in some]
        assert all(store.put([KEYS[key] for key in some], values))
        store.check()
        kept = [read(store, KEYS[key]) for key in some]
        assert kept == [bytes(value) for value in values]
    assert store.stats().used_bytes > 40 * GRAIN_BYTES
    store.close()


@pytest.mark.parametrize("grains", [5, 15])
def test_a_smaller_capacity_drops_values_beyond_it(grains: int) -> None:
    disk = Disk()
    store = small(disk, 16)
    store.put(KEYS[:16], [value_of(at, 4096) for at in range(16)])
    store.close()
    store = small(disk, grains)
    assert len(disk.files["values"].live) == grains * GRAIN_BYTES
    assert store.stats().entries == grains
    store.check()
    store.close()


def test_the_same_bytes_are_not_written_again() -> None:
    io = Faulty(Disk())
    store = small(io)
    store.put(KEYS[:2], [value_of(0, 4096), value_of(1, 4096)])
    calls = io.calls
    assert store.put(KEYS[:2], [value_of(0, 4096), value_of(1, 4096)]) == [True, True]
    assert io.calls == calls
    store.close()


def test_one_batch_is_one_write_and_one_sync_of_values() -> None:
    names: list[str] = []
    io = Faulty(Disk(), lambda number, name: names.append(name))
    store = small(io, 128)
    names.clear()
    store.put(KEYS[:32], [value_of(at, 5000) for at in range(32)])
    assert names == ["allocate", "pwritev", "fdatasync", "pwritev", "fdatasync"]
    store.close()


def test_offsets_beyond_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of 4.5 GiB, whose bytes are skipped everywhere, and small values after it."""
    digest, checksum = backend.hashes()
    skipping = lambda value: bytes(16) if len(value) > 1 << 31 else digest(value)  # noqa: E731
    monkeypatch.setattr(backend, "hashes", lambda: (skipping, checksum))

    class Sparse(FileSystem):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            os.ftruncate(fd, offset + length)

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if len(buffers[0]) > 1 << 31:
                return len(buffers[0])
            offsets.append(offset)
            return super().pwritev(fd, buffers, offset)

    offsets: list[int] = []
    store = FileBackend(tmp_path / "store", 6 << 30, io=Sparse())
    huge = mmap(-1, 9 << 29)
    assert store.put(KEYS[:1], [memoryview(huge)]) == [True]
    assert store.put(KEYS[1:3], [value_of(1, 70_000), value_of(2, 70_000)]) == [True, True]
    store.close()
    assert max(offsets) >= 9 << 29
    store = FileBackend(tmp_path / "store", 6 << 30, io=Sparse())
    assert [read(store, KEYS[at]) for at in (1, 2)] == [bytes(value_of(at, 70_000)) for at in (1, 2)]
    assert store.get(KEYS[:1], [memoryview(bytearray())]) == [9 << 29]
    store.check()
    store.close()


def test_a_deletion_is_durable_in_the_values_before_its_record_is_written() -> None:
    names: list[str] = []
    store = small(Faulty(Disk(), lambda number, name: names.append(name)))
    store.put(KEYS[:1], [value_of(0, 5000)])
    names.clear()
    store.delete(KEYS[:1])
    assert names == ["pwritev", "fdatasync", "pwritev", "fdatasync"]
    store.close()


def test_its_capacity_is_in_whole_grains_though_the_file_is_smaller(tiny_steps: None) -> None:
    store = FileBackend("simulated", 9 * GRAIN_BYTES + 100, io=Disk(), threads=1)
    store.put(KEYS[:1], [value_of(0, 100)])
    assert store.stats() == BackendStats(1, GRAIN_BYTES, 9 * GRAIN_BYTES, 0)
    store.close()


def test_without_a_capacity_it_keeps_all_existing_values(tmp_path: Path) -> None:
    store = open_backend(f"file:{tmp_path}/store")
    assert store.stats().capacity_bytes == 8 << 30
    store.close()
    os.truncate(tmp_path / "store" / "values", 9 << 30)
    store = open_backend(f"file:{tmp_path}/store")
    assert store.stats().capacity_bytes == 9 << 30
    store.close()


def test_many_entries_are_found_again(tmp_path: Path) -> None:
    """Opening reads the index once, and no values."""
    io = Faulty(Disk(), lambda number, name: names.append(name))
    names: list[str] = []
    store = small(io, 30_000)
    keys = [at.to_bytes(32, "big") for at in range(20_000)]
    store.put(keys, [memoryview(key[-4:]) for key in keys])
    store.close()
    names.clear()
    store = small(io, 30_000)
    assert store.exists(keys) == 20_000 and names.count("preadv") <= 2 + 20_000 * RECORD.size // (RECORD.size << 14)
    assert read(store, keys[12_345]) == keys[12_345][-4:]
    store.close()


def test_threads_read_large_batches_together(tmp_path: Path) -> None:
    with_threads = FileBackend(tmp_path / "store", 32 << 20, threads=3)
    values = [value_of(at, 1 << 20) for at in range(7)]
    with_threads.put(KEYS[:7], values)
    buffers = [memoryview(bytearray(1 << 20)) for _ in values]
    assert with_threads.get(KEYS[:7], buffers) == [1 << 20] * 7 and buffers == values
    with_threads.close()


def test_readers_among_evictions_see_whole_values_of_their_keys() -> None:
    store = small(Disk(), 8)
    stop = threading.Event()
    wrong: list[int] = []

    def reader() -> None:
        while not stop.is_set():
            for at in range(24):
                found = read(store, KEYS[at])
                if found is not None and found != bytes(value_of(at, 6000)):
                    wrong.append(at)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(150):
        at = turn % 24
        store.put([KEYS[at]], [value_of(at, 6000)])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.corrupt == 0, "an extent that changed its owner during a read is not damage"
    store.check()
    store.close()


def test_close_waits_for_a_reader_and_the_reader_gets_its_value() -> None:
    arrived, released = threading.Event(), threading.Event()
    names: list[str] = []

    def fault(number: int, name: str) -> None:
        if name == "preadv" and closer:
            arrived.set()
            assert released.wait(patience(60))
        names.append(name)

    closer: list[threading.Thread] = []
    store = small(Faulty(Disk(), fault))
    store.put(KEYS[:1], [value_of(0, 4096)])
    buffer = memoryview(bytearray(4096))
    lengths: list[int] = []
    reader = threading.Thread(target=lambda: lengths.extend(store.get(KEYS[:1], [buffer])))
    closer.append(threading.Thread(target=store.close))
    names.clear()
    reader.start()
    assert arrived.wait(patience(60))
    closer[0].start()
    with pytest.raises(StorageError, match="closed"):
        while True:
            store.exists(KEYS[:1])
    released.set()
    reader.join()
    closer[0].join()
    assert lengths == [4096] and buffer == value_of(0, 4096)
    assert names == ["preadv", *["close"] * 4], "no file is closed during the read"


# ---------------------------------------------------------------- damage


def test_every_flipped_bit_of_a_value_is_a_miss() -> None:
    disk = Disk()
    store = small(disk, 1)
    value = value_of(1, GRAIN_BYTES)
    buffer = memoryview(bytearray(GRAIN_BYTES))
    for bit in range(8 * GRAIN_BYTES):
        store.put(KEYS[:1], [value])
        disk.files["values"].live[bit >> 3] ^= 1 << (bit & 7)
        assert store.get(KEYS[:1], [buffer]) == [ABSENT], bit
    assert store.corrupt == 8 * GRAIN_BYTES
    assert store.put(KEYS[:1], [value]) == [True] and store.get(KEYS[:1], [buffer]) == [GRAIN_BYTES]
    store.check()
    store.close()


@pytest.mark.parametrize("size", [HELD_BYTES, HELD_BYTES + 1, 3 * HELD_BYTES + 5])
def test_damage_anywhere_in_a_large_value_is_a_miss(size: int) -> None:
    """Its digest is computed in parts. It includes the first and the last byte of every part."""
    disk = Disk()
    store = small(disk, -(-size // GRAIN_BYTES))
    edges = range(0, size, HELD_BYTES)
    for at in sorted({*edges, *(edge - 1 for edge in edges if edge), size - 1}):
        store.put(KEYS[:1], [value_of(1, size)])
        assert read(store, KEYS[0]) == bytes(value_of(1, size))
        disk.files["values"].live[at] ^= 1
        assert read(store, KEYS[0]) is None, at
    store.close()


@pytest.mark.parametrize("how", ["replaced", "replaced at the second try", "evicted", "corrupt"])
def test_an_old_value_is_destroyed_before_its_record_is_replaced(how: str) -> None:
    """The last record is damaged later. The record before it counts again, but its value is gone."""
    disk = Disk()
    misread = SimpleNamespace(at=-1)
    failing: list[str] = []  # calls that fail once

    def fault(number: int, name: str) -> None:
        if name == "preadv" and misread.at >= 0:
            disk.files["values"].live[misread.at] ^= 1
        if name in failing:
            failing.remove(name)
            raise OSError(errno.EIO, "once")

    store = small(Faulty(disk, fault), 4)
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    gone = KEYS[3]
    if how.startswith("replaced"):
        store.delete(KEYS[:2])
        if how == "replaced at the second try":
            failing.append("pwritev")
            with pytest.raises(StorageError, match="io"):
                store.put([gone], [value_of(8, 8192)])
        store.put([gone], [value_of(9, 8192)])
    elif how == "evicted":
        for at in (1, 0, 2):
            read(store, KEYS[at])  # so it has the last grain, and is evicted before the first two
        store.put(KEYS[5:6], [value_of(5, 8192)])
    else:
        store.delete(KEYS[:2])
        misread.at = 3 * GRAIN_BYTES
        assert store.get([gone], [memoryview(bytearray(4096))]) == [ABSENT]
        misread.at = -1
        disk.files["values"].live[3 * GRAIN_BYTES] ^= 1  # the value is intact: only the read was wrong
        store.put([gone], [value_of(9, 8192)])
    store.close()
    index = disk.files["index"].live
    assert index[-RECORD.size :][:32] == (KEYS[5] if how == "evicted" else gone)
    index[-RECORD.size] ^= 1
    store = small(disk, 4)
    assert read(store, gone) is None
    assert read(store, KEYS[2]) == bytes(value_of(2, 4096))
    store.check()
    store.close()


def test_a_value_that_was_misread_can_still_be_deleted() -> None:
    """It is a miss and no longer in memory, but its record and its bytes are intact on the disk."""
    disk = Disk()
    misread = SimpleNamespace(armed=False)

    def fault(number: int, name: str) -> None:
        if name == "preadv" and misread.armed:
            disk.files["values"].live[0] ^= 1

    store = small(Faulty(disk, fault), 4)
    store.put(KEYS[:1], [value_of(0, 4096)])
    misread.armed = True
    assert store.get(KEYS[:1], [memoryview(bytearray(4096))]) == [ABSENT]
    misread.armed = False
    disk.files["values"].live[0] ^= 1
    store.delete(KEYS[:1])
    store.close()
    store = small(disk, 4)
    assert read(store, KEYS[0]) is None
    store.close()


def aged() -> tuple[Disk, dict[bytes, bytes | None]]:
    """Makes a disk by puts, replacements, a deletion, and evictions with later puts, and what each key holds."""
    disk = Disk()
    store = small(disk, 6)
    held: dict[bytes, bytes | None] = {}

    def put(at: int, seed: int, size: int = 4096) -> None:
        store.put([KEYS[at]], [value_of(seed, size)])
        held[KEYS[at]] = bytes(value_of(seed, size))

    for at in range(6):
        put(at, at, 3000)
    put(0, 10)
    put(1, 11)
    put(6, 6, 8192)
    put(2, 12)
    store.delete([KEYS[3]])
    held[KEYS[3]] = None
    put(4, 13)
    store.close()
    return disk, held


def expect_held(disk: Disk, held: dict[bytes, bytes | None]) -> int:
    """Opens a copy and counts its values. Fails if one is not the last value of its key."""
    store = small(disk.copy(), 6)
    found = 0
    for key, last in held.items():
        value = read(store, key)
        assert value is None or value == last, "an old value, or another key's"
        found += value is not None
    store.check()
    store.close()
    return found


def test_every_flipped_bit_of_the_index_costs_at_most_its_value() -> None:
    disk, held = aged()
    whole = expect_held(disk, held)
    assert whole >= 4
    index = disk.files["index"].live
    for bit in range(8 * len(index)):
        index[bit >> 3] ^= 1 << (bit & 7)
        assert expect_held(disk, held) >= whole - 1
        index[bit >> 3] ^= 1 << (bit & 7)


@pytest.mark.parametrize(("name", "step"), [("index", 1), ("values", 7)])
def test_files_truncated_at_every_byte_show_no_wrong_value(name: str, step: int) -> None:
    disk, held = aged()
    content = disk.files[name].live
    for length in range(len(content), -1, -step):
        del content[length:]
        expect_held(disk, held)
    del content[:]
    assert expect_held(disk, held) == 0


def test_values_at_other_offsets_and_junk_in_the_index_are_misses() -> None:
    disk, held = aged()
    values, index = disk.files["values"].live, disk.files["index"].live
    values[:] = values[GRAIN_BYTES:] + values[:GRAIN_BYTES]
    assert expect_held(disk, held) == 0
    disk, held = aged()
    disk.files["index"].live += random.Random(2).randbytes(1000)
    assert expect_held(disk, held) > 0
    index[:] = random.Random(3).randbytes(5000)
    disk.files["index"].live[:] = index
    assert expect_held(disk, held) == 0


def test_a_truncated_value_is_dropped_and_can_be_put_again() -> None:
    disk = Disk()
    store = small(disk)
    store.put(KEYS[:3], [value_of(at, 4096) for at in range(3)])
    del disk.files["values"].live[5000:]
    assert [read(store, key) is not None for key in KEYS[:3]] == [True, False, False]
    assert store.stats().entries == 1 and store.corrupt == 2
    assert store.put(KEYS[1:3], [value_of(at, 4096) for at in (1, 2)]) == [True, True]
    assert [read(store, key) is not None for key in KEYS[:3]] == [True, True, True]
    store.check()
    store.close()


# ---------------------------------------------------------------- faults of any call


MIN_FREE = 1 << 20


def scenario(io: Faulty, heal: Callable[[], None]) -> Counter[str]:
    """Runs all kinds of calls. Every value read is the last put, or one whose put or deletion failed."""
    rng = random.Random(4)
    may: dict[bytes, set[bytes | None]] = {key: {None} for key in KEYS[:8]}
    seen = Counter[str]()
    store = None
    disk = io.inner
    assert isinstance(disk, Disk)
    for turn in range(14):
        if turn == 11:
            heal()
        if turn in (4, 10):  # others use the reserved free space until the next turn
            disk.size_bytes = disk.size_bytes - disk.free_bytes(0) + MIN_FREE - 3 * GRAIN_BYTES
        else:
            disk.size_bytes = 1 << 40
        if store is None or turn in (6, 12):
            if store:
                store.close()
                store = None
            try:
                store = small(io, 10, min_free=MIN_FREE)
            except BackendUnavailable:
                seen["unavailable"] += 1
                continue
        some = rng.sample(KEYS[:8], 3)
        values: list[bytes | None] = [rng.randbytes(rng.choice((10, 4096, 4100, 9000))) for _ in some]
        if turn % 4 == 3:
            values = [None] * 3
        try:
            if turn == 9:
                values = [None] * 8
                some = KEYS[:8]
                store.clear()
            elif values[0] is None:
                store.delete(some)
            else:
                stored = store.put(some, [memoryview(value or b"") for value in values])
                values = [value if kept else None for value, kept in zip(values, stored, strict=True)]
            for key, value in zip(some, values, strict=True):
                may[key] = {value}
        except StorageError as error:
            seen[error.cause] += 1
            for key, value in zip(some, values, strict=True):
                may[key].add(value)
        store.check()
        seen["hits"] += count_hits(store, may)
        if turn >= 12:
            assert values[0] is None or any(read(store, key) for key in some), "it did not recover"
    assert store is not None
    store.close()
    return seen


def count_hits(store: FileBackend, may: dict[bytes, set[bytes | None]]) -> int:
    hits = 0
    for key, values in may.items():
        try:
            found = read(store, key)
        except StorageError:
            continue
        assert found is None or found in values, "neither the value last put nor a miss"
        hits += found is not None
    return hits


def test_the_scenario_makes_every_call_of_the_file_system(tiny_steps: None) -> None:
    names: set[str] = set()
    io = Faulty(Disk(), lambda number, name: names.add(name))
    seen = scenario(io, lambda: None)
    assert set(seen) == {"hits"} and seen["hits"] > 30
    assert names == {name for name in vars(FileSystem) if not name.startswith("_")}


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize(
    "code",
    [
        errno.ENOSPC,
        errno.EIO,
        *(pytest.param(code, marks=pytest.mark.slow) for code in (errno.EMFILE, errno.EROFS, errno.EDQUOT)),
    ],
    ids=errno.errorcode.get,
)
def test_an_error_of_any_call_costs_values_at_most(code: int, persistent: bool, tiny_steps: None) -> None:
    counted = Faulty(Disk())
    scenario(counted, lambda: None)
    assert counted.calls > 100
    seen = Counter[str]()
    for at in range(counted.calls):
        seen += scenario(*broken(at, code, persistent))
    errors = seen["full"] + seen["io"] + seen["unavailable"]
    assert errors > counted.calls // 3 and set(seen) <= {"full", "io", "unavailable", "hits"}


def broken(at: int, code: int, persistent: bool) -> tuple[Faulty, Callable[[], None]]:
    state = SimpleNamespace(healed=False)

    def fault(number: int, name: str) -> None:
        if not state.healed and (number == at or (persistent and number > at)):
            raise OSError(code, os.strerror(code))

    return Faulty(Disk(), fault), lambda: setattr(state, "healed", True)


@pytest.mark.parametrize("limit", [1, 100, 5000])
def test_short_reads_and_writes_of_any_call_change_nothing(limit: int, tiny_steps: None) -> None:
    counted = Faulty(Disk())
    whole = scenario(counted, lambda: None)
    for at in range(counted.calls):
        io = Faulty(Disk(), lambda number, name, at=at: limit if number == at else None)  # type: ignore[misc]
        assert scenario(io, lambda: None) == whole
    if limit > 1:
        assert scenario(Faulty(Disk(), lambda number, name: limit), lambda: None) == whole


def test_writes_of_no_bytes_are_an_error_and_not_a_loop() -> None:
    store = small(Faulty(Disk(), lambda number, name: 0 if name == "pwritev" else None))
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[:1], [value_of(0, 100)])
    store.check()
    store.close()


def test_records_of_a_failed_batch_do_not_hide_later_ones() -> None:
    """The disk fails after three of four records. One of their keys is then put alone."""
    state = SimpleNamespace(writes=-1)

    def fault(number: int, name: str) -> int | None:
        if name == "pwritev" and state.writes >= 0:
            state.writes += 1
            if state.writes == 3:
                raise OSError(errno.EIO, "torn")
            return 3 * RECORD.size if state.writes == 2 else None
        return None

    disk = Disk()
    store = small(Faulty(disk, fault))
    state.writes = 0
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    assert bytes(KEYS[1]) in disk.files["index"].live and KEYS[0] not in disk.files["index"].live
    state.writes = -1
    store.put(KEYS[1:2], [value_of(5, 4096)])
    store.close()
    store = small(disk)
    assert read(store, KEYS[1]) == bytes(value_of(5, 4096))
    store.close()


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
    assert store.exists(KEYS[:20]) == 20
    store.check()
    store.close()


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
    assert store.exists(KEYS[12:20]) == 8 and store.stats().entries == 8, "it evicts within its file"
    leave(disk, MIN_FREE + 64 * GRAIN_BYTES)
    for at in range(20):
        assert store.put([KEYS[at]], [value_of(at, 4096)]) == [True]
    assert store.exists(KEYS[:20]) == 20
    store.check()
    store.close()


def test_it_returns_space_that_others_need_and_refuses_values_without_room(tiny_steps: None) -> None:
    disk = Disk()
    store = small(disk, 16, min_free=MIN_FREE)
    assert all(store.put(KEYS[:16], [value_of(at, 4096) for at in range(16)]))
    leave(disk, MIN_FREE - 3 * GRAIN_BYTES)
    assert store.put(KEYS[:1], [value_of(0, 4096)]) == [True], "it exists already"
    assert len(disk.files["values"].live) == 13 * GRAIN_BYTES and store.stats().entries == 13
    assert (store.exists(KEYS[:16]), store.stats().evicted) == (13, 3)
    assert store.put(KEYS[20:21], [value_of(20, 4096)]) == [True], "it replaces the least recently used"
    store.check()
    leave(disk, 0)
    assert store.put(KEYS[20:22], [value_of(at, 4096) for at in (20, 21)]) == [False, False], "there is no more room"
    assert len(disk.files["values"].live) == store.stats().entries == 0
    leave(disk, MIN_FREE + 2 * GRAIN_BYTES + ROOM_OF_INDEX)
    assert store.put(KEYS[20:22], [value_of(at, 4096) for at in (20, 21)]) == [True, True]
    assert [read(store, key) for key in KEYS[20:22]] == [bytes(value_of(at, 4096)) for at in (20, 21)]
    store.check()
    store.close()


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
    store.close()


def test_a_failed_query_of_the_free_space_fails_only_the_put() -> None:
    state = SimpleNamespace(broken=False)

    def fault(number: int, name: str) -> None:
        if state.broken and name == "free_bytes":
            raise OSError(errno.EIO, "no answer")

    store = small(Faulty(Disk(), fault), min_free=MIN_FREE)
    store.put(KEYS[:1], [value_of(0, 4096)])
    state.broken = True
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[1:2], [value_of(1, 4096)])
    assert read(store, KEYS[0]) == bytes(value_of(0, 4096))
    state.broken = False
    assert store.put(KEYS[1:2], [value_of(1, 4096)]) == [True]
    store.check()
    store.close()


@pytest.mark.parametrize(
    ("code", "cause"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EFBIG, "full"), (errno.EIO, "io"), (errno.EROFS, "io")],
)
def test_an_error_has_its_cause(code: int, cause: str) -> None:
    def fault(number: int, name: str) -> None:
        if name == "pwritev":
            raise OSError(code, os.strerror(code))

    store = small(Faulty(Disk(), fault))
    with pytest.raises(StorageError) as caught:
        store.put(KEYS[:1], [value_of(0, 4096)])
    assert caught.value.cause == cause
    store.close()


def test_a_file_that_cannot_grow_for_another_reason_is_an_error_and_drops_nothing(tiny_steps: None) -> None:
    state = SimpleNamespace(broken=False)

    def fault(number: int, name: str) -> None:
        if name == "allocate" and state.broken:
            raise OSError(errno.EIO, "no")

    store = small(Faulty(Disk(), fault))
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    state.broken = True
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[4:5], [value_of(4, 4096)])
    assert store.exists(KEYS[:4]) == 4
    store.check()
    store.close()


def test_the_file_system_reports_its_free_space(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    with contextlib.closing(
        open_backend(f"file:{tmp_path}/kv?min_free={2 * found.f_blocks * found.f_frsize}")
    ) as store:
        assert store.put(KEYS[:1], [value_of(0, 4096)]) == [False]
    with contextlib.closing(open_backend(f"file:{tmp_path}/kv?min_free=4KiB")) as store:
        assert store.put(KEYS[:1], [value_of(0, 4096)]) == [True]


def test_when_writes_fail_it_still_reads_and_loses_no_more_values() -> None:
    state = SimpleNamespace(broken=False)

    def fault(number: int, name: str) -> None:
        if state.broken and name in ("pwritev", "fdatasync"):
            raise OSError(errno.EROFS, "read-only")

    store = small(Faulty(Disk(), fault), 16)
    for at in reversed(range(16)):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    state.broken = True
    for turn in range(7):
        with pytest.raises(StorageError, match="io"):
            store.put(KEYS[20 : 22 + turn], [value_of(at, 4096) for at in range(20, 22 + turn)])
        assert store.stats().entries == 14, turn
        assert store.exists(KEYS[:14]) == 14 and read(store, KEYS[13]) == bytes(value_of(13, 4096))
    state.broken = False
    assert store.put(KEYS[20:22], [value_of(at, 4096) for at in (20, 21)]) == [True, True]
    assert store.stats().entries == 16
    store.check()
    store.close()


def test_a_failed_clear_is_completed_before_any_write() -> None:
    disk = Disk()
    state = SimpleNamespace(broken=False)

    def fault(number: int, name: str) -> None:
        if state.broken and name == "truncate":
            raise OSError(errno.EIO, "no")

    store = small(Faulty(disk, fault))
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    state.broken = True
    with pytest.raises(StorageError, match="io"):
        store.clear()
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[4:5], [value_of(4, 4096)])
    assert store.stats().entries == 0
    state.broken = False
    store.put(KEYS[4:5], [value_of(4, 4096)])
    store.close()
    store = small(disk)
    assert [store.exists([key]) for key in KEYS[:5]] == [0, 0, 0, 0, 1]
    store.close()


@pytest.mark.parametrize("rewritten", ["at once", "later"])
def test_opening_drops_a_value_that_an_interrupted_put_replaced(rewritten: str) -> None:
    """The index names a new value that was lost. The old one is still whole, and must not reappear later."""
    disk = Disk()
    store = small(disk)
    store.put(KEYS[:2], [value_of(0, 4096), value_of(9, 4096)])
    before = bytes(disk.files["values"].live)
    store.put(KEYS[:1], [value_of(1, 9000)])
    store.close()
    disk.files["values"].live[: len(before)] = before
    state = SimpleNamespace(broken=rewritten == "later")

    def fault(number: int, name: str) -> None:
        if state.broken and name == "rename":
            raise OSError(errno.EIO, "no")

    store = small(Faulty(disk, fault))
    assert read(store, KEYS[0]) is None
    state.broken = False
    store.put(KEYS[:1], [value_of(2, 20_000)])  # too large for the extent of the old value
    store.close()
    index = disk.files["index"].live
    assert len(index) == RECORD.size * 3, "the live values, and the new one"
    for length in range(len(index), -1, -RECORD.size):
        del index[length:]
        store = small(disk.copy())
        assert read(store, KEYS[0]) in (None, bytes(value_of(2, 20_000)))
        store.close()


def test_an_index_that_could_not_be_rewritten_at_first_is_rewritten_once() -> None:
    disk = Disk()
    store = small(disk)
    for at in range(4):
        store.put(KEYS[:1], [value_of(at, 4096)])
    store.close()
    names: list[str] = []
    broken = SimpleNamespace(on=True)

    def fault(number: int, name: str) -> None:
        names.append(name)
        if name == "rename" and broken.on:
            raise OSError(errno.EIO, "no")

    store = small(Faulty(disk, fault))
    broken.on = False
    names.clear()
    for at in range(4):
        store.put(KEYS[1:2], [value_of(at, 4096)])
    assert names.count("rename") == 1
    names.clear()
    store.put(KEYS[2:3], [value_of(5, 4096)])
    assert names == ["pwritev", "fdatasync", "pwritev", "fdatasync"], "no trace of the failure"
    store.close()


def test_a_value_replaced_while_it_is_read_is_a_miss_and_the_new_one_stays() -> None:
    state = SimpleNamespace(armed=False)

    def replace(number: int, name: str) -> None:
        if state.armed and name == "preadv":
            state.armed = False
            store.put(KEYS[:1], [value_of(1, 4096)])

    store = small(Faulty(Disk(), replace))
    store.put(KEYS[:1], [value_of(0, 4096)])
    state.armed = True
    buffer = memoryview(bytearray(4096))
    lengths = store.get(KEYS[:1], [buffer])
    assert lengths == [ABSENT] or buffer in (value_of(0, 4096), value_of(1, 4096))
    assert read(store, KEYS[0]) == bytes(value_of(1, 4096)) and store.corrupt == 0
    store.close()


def test_an_unreadable_value_is_a_miss_but_stays() -> None:
    state = SimpleNamespace(broken=0)

    def fault(number: int, name: str) -> None:
        if name == "preadv" and state.broken:
            state.broken -= 1
            raise OSError(errno.EIO, "bad sector")

    store = small(Faulty(Disk(), fault), 3 * READ_BYTES // GRAIN_BYTES)
    size = READ_BYTES
    store.put(KEYS[:2], [value_of(at, size) for at in range(2)])
    buffers = [memoryview(bytearray(size)) for _ in range(2)]
    state.broken = 1
    assert sorted(store.get(KEYS[:2], buffers)) == [ABSENT, size]
    state.broken = 2
    with pytest.raises(StorageError, match="io: reading"):
        store.get(KEYS[:2], buffers)
    assert store.get(KEYS[:2], buffers) == [size, size]
    store.close()


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
    assert again.exists(KEYS[:1]) == 1
    again.close()


def test_failed_opens_leave_no_descriptor(tmp_path: Path, store: FileBackend) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(BackendUnavailable):
            FileBackend(tmp_path / "store", 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- against a dict


class AgainstADict(RuleBasedStateMachine):
    """Random calls, reopening and damage of the files. Each key holds the value last put, or is a miss."""

    some = st.lists(st.sampled_from(KEYS[:10]), min_size=1, max_size=5)

    @initialize(grains=st.integers(1, 20))
    def start(self, grains: int) -> None:
        self.grains, self.disk, self.turn = grains, Disk(), 0
        self.last: dict[bytes, bytes] = {}
        self.store = small(self.disk, grains)

    @rule(
        keys=some,
        sizes=st.lists(st.sampled_from([1, 700, 4096, 4097, 30_000]), min_size=5, max_size=5),
        same=st.booleans(),
    )
    def put(self, keys: list[bytes], sizes: list[int], same: bool) -> None:
        self.turn += not same
        values = [bytes(value_of(self.turn * 8 + at, size)) for at, size in enumerate(sizes[: len(keys)])]
        stored = self.store.put(keys, [memoryview(value) for value in values])
        for key, value, kept in zip(keys, values, stored, strict=True):
            if kept:
                self.last[key] = value
            else:
                self.last.pop(key, None)

    @rule(keys=some)
    def delete(self, keys: list[bytes]) -> None:
        self.store.delete(keys)
        for key in keys:
            self.last.pop(key, None)
        assert not any(self.store.exists([key]) for key in keys)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.last.clear()

    @rule(grains=st.integers(1, 20), keep=st.booleans())
    def reopen(self, grains: int, keep: bool) -> None:
        self.store.close()
        self.grains = self.grains if keep else grains
        self.store = small(self.disk, self.grains)

    @rule(bit=st.integers(0), name=st.sampled_from(["index", "values"]))
    def damage(self, bit: int, name: str) -> None:
        content = self.disk.files[name].live
        if content:
            self.store.close()
            content[(bit >> 3) % len(content)] ^= 1 << (bit & 7)
            self.store = small(self.disk, self.grains)

    @rule(length=st.integers(0))
    def cut(self, length: int) -> None:
        index = self.disk.files["index"].live
        self.store.close()
        del index[length % (len(index) + 1) :]
        self.store = small(self.disk, self.grains)

    @invariant()
    def each_key_has_its_last_value_or_none(self) -> None:
        for key in KEYS[:10]:
            found = read(self.store, key)
            assert found is None or found == self.last.get(key)
        self.store.check()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
