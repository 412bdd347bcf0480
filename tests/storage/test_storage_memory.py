"""The memory store, beyond `test_storage_conformance.py`: capacity, order of eviction, spec."""

from __future__ import annotations

import pytest

from mainstem.errors import BadArgument
from mainstem.storage.base import BackendStats, open_backend
from mainstem.storage.memory import MemoryBackend

KEYS = [bytes([number]) * 32 for number in range(6)]


def value(fill: int, size: int = 100) -> memoryview:
    return memoryview(bytearray([fill]) * size)


def test_the_least_recently_used_goes_first_and_a_read_is_a_use() -> None:
    store = MemoryBackend(capacity_bytes=300)
    store.put(KEYS[:3], [value(0), value(1), value(2)])
    store.get(KEYS[:1], [value(9)])
    assert store.put([KEYS[3]], [value(3)]) == [True]
    assert store.exists(KEYS) == [True, False, True, True, False, False]
    assert store.stats() == BackendStats(entries=3, used_bytes=300, capacity_bytes=300, evicted=1)


def test_exists_does_not_count_as_a_use() -> None:
    store = MemoryBackend(capacity_bytes=200)
    store.put(KEYS[:2], [value(0), value(1)])
    store.exists(KEYS[:1])
    store.put([KEYS[2]], [value(2)])
    assert store.exists(KEYS[:1]) == [False]


def test_a_value_larger_than_the_store_is_refused_and_drops_nothing() -> None:
    store = MemoryBackend(capacity_bytes=250)
    store.put(KEYS[:2], [value(0), value(1)])
    assert store.put(KEYS[1:4], [value(1, 251), value(2, 251), value(3, 50)]) == [False, False, True]
    assert store.exists(KEYS[:2]) == [True, True]
    assert store.stats() == BackendStats(entries=3, used_bytes=250, capacity_bytes=250, evicted=0)


def test_replacing_counts_the_new_length_alone() -> None:
    store = MemoryBackend(capacity_bytes=250)
    for size in (200, 250, 10):
        assert store.put(KEYS[:1], [value(1, size)]) == [True]
        assert store.stats().used_bytes == size
    store.delete(KEYS)
    assert store.stats() == BackendStats(entries=0, used_bytes=0, capacity_bytes=250, evicted=0)


def test_after_a_clear_all_room_is_there_again() -> None:
    store = MemoryBackend(capacity_bytes=10)
    store.put([b"a" * 32], [memoryview(bytearray(10))])
    store.clear()
    assert store.stats() == BackendStats(0, 0, 10, 0)
    store.put([b"b" * 32], [memoryview(bytearray(10))])
    assert store.stats() == BackendStats(1, 10, 10, 0)


@pytest.mark.parametrize(("spec", "capacity"), [("memory:", None), ("memory:?capacity=2KiB", 2048)])
def test_spec(spec: str, capacity: int | None) -> None:
    store = open_backend(spec)
    assert isinstance(store, MemoryBackend)
    assert store.stats().capacity_bytes == capacity


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_is_checked(capacity: int) -> None:
    with pytest.raises(BadArgument, match="capacity_bytes"):
        MemoryBackend(capacity)
