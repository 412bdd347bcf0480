"""The file store and damage of its files: flipped bits, truncations, junk."""

from __future__ import annotations

import errno
import random
from types import SimpleNamespace

import pytest
from rigs.file_store import KEYS, read, small, value_of
from rigs.simulated_disk import Disk, Faulty

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT
from mainstem.storage.file.hashes import HELD_BYTES
from mainstem.storage.file.index import RECORD
from mainstem.storage.file.space import GRAIN_BYTES


def test_every_flipped_bit_of_a_value_is_a_miss() -> None:
    disk, size = Disk(), 512
    store = small(disk, 1)
    value = value_of(1, size)
    buffer = memoryview(bytearray(size))
    for bit in range(8 * size):
        store.put(KEYS[:1], [value])
        disk.files["values"].live[bit >> 3] ^= 1 << (bit & 7)
        assert store.get(KEYS[:1], [buffer]) == [ABSENT], bit
    assert store.corrupt == 8 * size
    assert store.put(KEYS[:1], [value]) == [True] and store.get(KEYS[:1], [buffer]) == [size]


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
    record, bits = 8 * RECORD.size, range(8 * len(index))
    for bit in [*bits[:record], *bits[record:-record:9], *bits[-record:]]:  # of the records between, one of each byte
        index[bit >> 3] ^= 1 << (bit & 7)
        assert expect_held(disk, held) >= whole - 1
        index[bit >> 3] ^= 1 << (bit & 7)


@pytest.mark.parametrize(("name", "step"), [("index", 1), ("values", 61)])
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


def test_what_a_truncated_file_has_lost_is_said_when_it_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    store = small(disk)
    store.put(KEYS[:4], [value_of(at, 4096) for at in range(4)])
    store.delete(KEYS[3:4])
    store.close()
    del disk.files["values"].live[5000:]
    small(disk).close()
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "its file ends after 5 KB: 2 values beyond that are gone"
    ]
    caplog.clear()
    small(disk).close()
    assert not caplog.messages, "it is said once"


def test_a_truncated_value_is_dropped_and_can_be_put_again() -> None:
    disk = Disk()
    store = small(disk)
    store.put(KEYS[:3], [value_of(at, 4096) for at in range(3)])
    del disk.files["values"].live[5000:]
    assert [read(store, key) is not None for key in KEYS[:3]] == [True, False, False]
    assert store.stats().entries == 1 and store.corrupt == 2
    assert store.put(KEYS[1:3], [value_of(at, 4096) for at in (1, 2)]) == [True, True]
    assert [read(store, key) is not None for key in KEYS[:3]] == [True, True, True]
