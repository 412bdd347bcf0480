"""The file store on a disk that fails: errors and short transfers of any call."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rigs.file_store import KEYS, MIN_FREE, Fails, read, small, value_of
from rigs.simulated_disk import Disk, Faulty

from mainstem.errors import BackendUnavailable, StorageError
from mainstem.storage.base import ABSENT
from mainstem.storage.file import FileBackend, FileSystem
from mainstem.storage.file.index import RECORD
from mainstem.storage.file.space import GRAIN_BYTES
from mainstem.storage.file.values import READ_BYTES


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
        *(pytest.param(code, marks=pytest.mark.slow) for code in (errno.EIO, errno.EMFILE, errno.EROFS, errno.EDQUOT)),
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


@pytest.mark.parametrize("limit", [1, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (100, 5000))])
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


@pytest.mark.parametrize(
    ("code", "cause"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EFBIG, "full"), (errno.EIO, "io"), (errno.EROFS, "io")],
)
def test_an_error_has_its_cause(code: int, cause: str) -> None:
    fails = Fails("pwritev", code=code)
    store = small(Faulty(Disk(), fails))
    fails.on = True
    with pytest.raises(StorageError) as caught:
        store.put(KEYS[:1], [value_of(0, 4096)])
    assert caught.value.cause == cause


def test_when_writes_fail_it_still_reads_and_loses_no_more_values() -> None:
    fails = Fails("pwritev", "fdatasync", code=errno.EROFS)
    store = small(Faulty(Disk(), fails), 16)
    for at in reversed(range(16)):
        store.put(KEYS[at : at + 1], [value_of(at, 4096)])
    fails.on = True
    for turn in range(7):
        with pytest.raises(StorageError, match="io"):
            store.put(KEYS[20 : 22 + turn], [value_of(at, 4096) for at in range(20, 22 + turn)])
        assert store.stats().entries == 14, turn
        assert all(store.exists(KEYS[:14])) and read(store, KEYS[13]) == bytes(value_of(13, 4096))
    fails.on = False
    assert store.put(KEYS[20:22], [value_of(at, 4096) for at in (20, 21)]) == [True, True]
    assert store.stats().entries == 16


def test_a_failed_clear_is_completed_before_any_write() -> None:
    disk, fails = Disk(), Fails("truncate")
    store = small(Faulty(disk, fails))
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    fails.on = True
    with pytest.raises(StorageError, match="io"):
        store.clear()
    with pytest.raises(StorageError, match="io"):
        store.put(KEYS[4:5], [value_of(4, 4096)])
    assert store.stats().entries == 0
    fails.on = False
    store.put(KEYS[4:5], [value_of(4, 4096)])
    store.close()
    store = small(disk)
    assert store.exists(KEYS[:5]) == [False] * 4 + [True]


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
    fails = Fails("rename")
    fails.on = rewritten == "later"
    store = small(Faulty(disk, fails))
    assert read(store, KEYS[0]) is None
    fails.on = False
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
