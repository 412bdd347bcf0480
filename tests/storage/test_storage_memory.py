"""The memory store, beyond `test_storage_conformance.py`: capacity, order of eviction, spec."""

from __future__ import annotations

import random

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


@pytest.mark.parametrize("seed", range(3))
def test_it_holds_what_was_used_last_and_counts_its_bytes(seed: int) -> None:
    draw, store = random.Random(seed), MemoryBackend(capacity_bytes=300)
    model: dict[bytes, bytes] = {}  # the value used longest ago first
    evicted = 0
    for _ in range(300):
        key, size = draw.choice(KEYS), draw.choice((0, 1, 99, 150, 299, 300, 301))
        match draw.randrange(8):
            case 0:
                store.delete([key])
                model.pop(key, None)
            case 1 if draw.random() < 0.1:
                store.clear()
                model.clear()
            case 2 | 3:
                wanted = model.get(key, b"")
                buffer = memoryview(bytearray(len(wanted)))
                assert store.get([key], [buffer]) == [len(wanted) if key in model else -1]
                if key in model:
                    assert buffer == wanted
                    model[key] = model.pop(key)
            case _:
                given = value(draw.randrange(256), size)
                assert store.put([key], [given]) == [size <= 300]
                if size <= 300:
                    model.pop(key, None)
                    model[key] = bytes(given)
                while sum(map(len, model.values())) > 300:
                    del model[next(iter(model))]
                    evicted += 1
        store.check()
        assert store.exists(KEYS) == [each in model for each in KEYS]
        assert store.stats() == BackendStats(len(model), sum(map(len, model.values())), 300, evicted)
