"""The file store: its interface, order and size, its threads, and random calls against a dict."""

from __future__ import annotations

import os
import random
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from mmap import mmap
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machine import patience
from rigs.file_store import KEYS, read, small, value_of
from rigs.simulated_disk import Disk, Faulty

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage import open_backend
from mainstem.storage.base import BackendStats
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.file import FileBackend, FileSystem, backend, index
from mainstem.storage.file.index import RECORD
from mainstem.storage.file.space import GRAIN_BYTES
from mainstem.units import show_bytes

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


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    store = small(Disk())
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
    assert store.exists([KEYS[3]]) == [False] and read(store, KEYS[3]) is None
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


def test_the_least_recently_used_is_evicted_first_and_the_last_of_a_batch() -> None:
    store = small(Disk(), 8)
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    store.put(KEYS[4:8], [value_of(at, 4096) for at in range(4, 8)])
    read(store, KEYS[3])
    store.put(KEYS[8:10], [value_of(at, 4096) for at in (8, 9)])
    assert store.exists(KEYS[:10]) == [1, 0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_the_last_of_values_put_again_unchanged_is_evicted_first() -> None:
    store = small(Disk(), 4)
    for at in (3, 2, 1, 0):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    for at in (4, 5):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    assert store.exists(KEYS[:6]) == [1, 1, 0, 0, 1, 1]


def test_a_large_value_takes_the_place_of_the_oldest_and_of_those_after_it_in_the_file() -> None:
    store = small(Disk(), 8)
    for at in range(8):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    for at in (0, 2, 5, 7, 1, 3, 4, 6):  # the order of last use
        read(store, KEYS[at])
    assert store.put(KEYS[8:9], [value_of(8, 2 * 4096)]) == [True]
    # 0 and 2 leave enough room, but not in one place; 5 is next, and 6 lies after it
    assert store.exists(KEYS[:9]) == [0, 1, 0, 1, 1, 0, 0, 1, 1]


def test_the_last_of_values_read_together_is_evicted_first() -> None:
    store = small(Disk(), 4)
    for at in (3, 2, 1, 0):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    store.get(KEYS[:4], [memoryview(bytearray(4096)) for _ in range(4)])
    store.put(KEYS[4:5], [value_of(4, 4096)])
    store.put(KEYS[5:6], [value_of(5, 4096)])
    assert store.exists(KEYS[:6]) == [1, 1, 0, 0, 1, 1]


def test_recency_survives_reopening() -> None:
    disk = Disk()
    store = small(disk, 8)
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    store.close()
    store = small(disk, 8)
    store.put(KEYS[4:7], [value_of(at, 4096) for at in range(4, 7)])
    store.put(KEYS[7:9], [value_of(at, 4096) for at in (7, 8)])
    assert store.exists(KEYS[:9]) == [1, 1, 1, 0, 1, 1, 1, 1, 1]


def test_room_is_counted_in_bytes_whatever_the_lengths_of_values() -> None:
    """One page of full attention, one of a window, a state and a header: none counts as another."""
    store, rng = small(Disk(), 64), random.Random(5)
    lengths: dict[bytes, int] = {}
    for _ in range(150):
        batch = {key: rng.choice((128, 25_000, 75_000, 4097, 200_000)) for key in rng.sample(KEYS[:20], 3)}
        assert all(store.put(list(batch), [value_of(at, size) for at, size in enumerate(batch.values())]))
        lengths |= batch
        held = [lengths[key] for key, found in zip(KEYS[:20], store.exists(KEYS[:20]), strict=True) if found]
        grains = sum(-(-length // GRAIN_BYTES) for length in held)
        stats = store.stats()
        assert (stats.entries, stats.used_bytes) == (len(held), grains * GRAIN_BYTES) and grains <= 64
        store.check()
    assert stats.evicted > 100


def test_a_batch_larger_than_the_store_keeps_its_end_and_a_larger_value_is_refused() -> None:
    store = small(Disk(), 8)
    assert store.put(KEYS[:20], [value_of(at, 4096) for at in range(20)]) == [True] * 20
    store.check()
    assert all(store.exists(KEYS[16:20]))
    assert store.put(KEYS[20:22], [value_of(20, 9 * GRAIN_BYTES), value_of(21, 10)]) == [False, True]
    assert store.stats().entries == 8
    assert store.put(KEYS[:1], [value_of(0, 8 * GRAIN_BYTES)]) == [True]
    assert store.stats().entries == 1


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


@pytest.mark.parametrize("grains", [5, 15])
def test_a_smaller_capacity_drops_values_beyond_it(grains: int, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    store = small(disk, 16)
    store.put(KEYS[:16], [value_of(at, 4096) for at in range(16)])
    store.close()
    store = small(disk, grains)
    assert [
        f"cut from 65.5 KB to its capacity of {show_bytes(grains * GRAIN_BYTES)}: {16 - grains} values gone" in line
        for line in caplog.messages
    ] == [True]
    assert len(disk.files["values"].live) == grains * GRAIN_BYTES
    assert store.stats().entries == grains


def test_the_same_bytes_are_not_written_again() -> None:
    io = Faulty(Disk())
    store = small(io)
    store.put(KEYS[:2], [value_of(0, 4096), value_of(1, 4096)])
    calls = io.calls
    assert store.put(KEYS[:2], [value_of(0, 4096), value_of(1, 4096)]) == [True, True]
    assert io.calls == calls


def test_one_batch_is_one_write_and_one_sync_of_values() -> None:
    names: list[str] = []
    io = Faulty(Disk(), lambda number, name: names.append(name))
    store = small(io, 128)
    names.clear()
    store.put(KEYS[:32], [value_of(at, 5000) for at in range(32)])
    assert names == ["allocate", "pwritev", "fdatasync", "pwritev", "fdatasync"]


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


def test_its_capacity_is_in_whole_grains_though_the_file_is_smaller(tiny_steps: None) -> None:
    store = FileBackend("simulated", 9 * GRAIN_BYTES + 100, io=Disk(), threads=1)
    store.put(KEYS[:1], [value_of(0, 100)])
    assert store.stats() == BackendStats(1, GRAIN_BYTES, 9 * GRAIN_BYTES, 0)
    store.close()


def test_what_is_only_looked_at_is_not_cut(tmp_path: Path) -> None:
    with closing(open_backend(f"file:{tmp_path}/store")) as store:
        assert all(store.put(KEYS[:9], [value_of(at, 4096) for at in range(9)]))
    size = (tmp_path / "store" / "values").stat().st_size
    with closing(open_backend(f"file:{tmp_path}/store?capacity=4KiB", existing=True)) as store:
        assert (store.stats().entries, store.stats().capacity_bytes) == (9, size)
    with closing(open_backend(f"file:{tmp_path}/store?capacity=16GiB", existing=True)) as store:
        assert store.stats().capacity_bytes == 16 << 30
    with pytest.raises(BackendUnavailable, match="there is no store"):
        open_backend(f"file:{tmp_path}/none", existing=True)
    assert not (tmp_path / "none").exists()


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
    assert all(store.exists(keys)) and names.count("preadv") <= 2 + 20_000 * RECORD.size // (RECORD.size << 14)
    assert read(store, keys[12_345]) == keys[12_345][-4:]


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
    with suppress(StorageError):  # raised as soon as it is closed to further calls
        while True:
            store.exists(KEYS[:1])
    released.set()
    reader.join()
    closer[0].join()
    assert lengths == [4096] and buffer == value_of(0, 4096)
    assert names == ["preadv", *["close"] * 4], "no file is closed during the read"


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
        sizes=st.lists(st.sampled_from([16, 700, 4096, 4097, 30_000]), min_size=5, max_size=5),
        same=st.booleans(),
    )
    def put(self, keys: list[bytes], sizes: list[int], same: bool) -> None:
        self.turn += not same
        # No value begins with another, and none is so short that what destroys it may equal it: see Values.write.
        seeds = [(self.turn * 8 + at << 16) + size for at, size in enumerate(sizes)]
        values = [bytes(value_of(seed, size)) for seed, size in zip(seeds, sizes[: len(keys)], strict=False)]
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
        assert not any(self.store.exists(keys))

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
