"""The values of an owner: what is read, written later, overtaken, refused, and what a back end that fails changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from machine import eventually
from rigs.hand_driven import Clock
from rigs.stores import Values, cause_of

from mainstem.errors import StorageError
from mainstem.owner import held as held_module
from mainstem.owner.arena import Value
from mainstem.owner.held import HeldValues
from mainstem.storage.base import ABSENT, BackendStats, Listed
from mainstem.storage.memory import MemoryBackend

GRAIN = 4096
VALUES = Values(GRAIN)
KEYS = VALUES.keys


class Gated(MemoryBackend):
    """A store that counts its calls, waits in those that are named in `gates`, and fails while it has an `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.error: Exception | None = None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._call("exists", lambda: super(Gated, self).exists(keys))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return self._call("get", lambda: super(Gated, self).get(keys, buffers))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._call("put", lambda: super(Gated, self).put(keys, buffers))

    def delete(self, keys: Sequence[bytes]) -> None:
        self._call("delete", lambda: super(Gated, self).delete(keys))

    def stats(self) -> BackendStats:
        if isinstance(self.error, ValueError):
            raise self.error
        return super().stats()

    def clear(self) -> None:
        self._call("clear", super().clear)

    def _call(self, name: str, call: Callable[[], object]) -> object:  # type: ignore[misc]
        if self.error is not None:
            self.calls.append(f"{name} fails")
            raise self.error
        answer = call() if name == "get" else None
        self.calls.append(name)
        if name in self.gates:
            assert self.gates[name].wait(60)
        return answer if name == "get" else call()


class Rig:
    """Held values above a `Gated` store. `write` runs only where a test says so."""

    def __init__(self, pages: int = 16, room_s: float = 0.0) -> None:
        self.backend = Gated()
        self.clock = Clock()
        self.memory = memoryview(bytearray(pages * GRAIN))
        self.held = HeldValues(self.backend, self.memory, clock=self.clock, room_s=room_s)

    def put(self, *numbers: int, version: int = 0, size: int = GRAIN) -> list[bool]:
        rooms = self.held.reserve([KEYS[at] for at in numbers], [size] * len(numbers))
        pairs = [(at, room) for at, room in zip(numbers, rooms, strict=False) if isinstance(room, Value)]
        for at, room in pairs:
            self.memory[room.offset : room.offset + room.length] = VALUES.value(at, size, version)
        self.held.commit([(KEYS[at], room) for at, room in pairs])
        self.held.check()
        return [room is not False for room in rooms]

    def get(self, *numbers: int, version: int = 0, size: int = GRAIN) -> list[int]:
        """Reads values, compares those that are there, and releases them."""
        found = self.held.get([KEYS[at] for at in numbers], [size] * len(numbers))
        for at, (length, value) in zip(numbers, found, strict=False):
            assert (value is not None) == (length == size)
            if value is not None:
                got = self.memory[value.offset : value.offset + value.length]
                assert got == VALUES.value(at, size, version), f"value {at} is another one"
        self.held.check()
        self.held.release([value for _, value in found if value is not None])
        return [length for length, _ in found]

    def write_all(self) -> None:
        while self.held.status()["queued"]:
            self.held.write()

    def count(self, name: str) -> object:
        return self.held.status()[name]


def aside(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# ---------------------------------------------------------------- reading and writing


def test_what_is_put_is_found_before_it_is_written_and_after_it_left_the_host() -> None:
    rig = Rig(8)
    assert rig.put(0, 1, 2) == [True] * 3
    assert rig.held.exists(KEYS[:4]) == [True] * 3 + [False]
    assert rig.get(0, 1, 2) == [GRAIN] * 3
    assert rig.backend.calls == ["exists"], "only the absent key was asked for"
    assert rig.count("queued") == 3 and rig.count("queued_bytes") == 3 * GRAIN
    assert (rig.held.stats().entries, rig.held.stats().used_bytes) == (3, 3 * GRAIN)
    rig.write_all()
    assert rig.backend.calls == ["exists", "put"]
    assert (rig.held.stats().entries, rig.held.stats().used_bytes) == (3, 3 * GRAIN)
    for at in range(3, 11):
        rig.put(at)
        rig.write_all()
    assert rig.count("evicted") == 3
    assert rig.held.exists(KEYS[:11]) == [True] * 11
    assert rig.get(0, 1, 2) == [GRAIN] * 3
    assert (rig.count("host_hits"), rig.count("store_hits"), rig.count("misses")) == (3, 3, 0)
    assert rig.get(0, 20) == [GRAIN, ABSENT]
    assert (rig.count("host_hits"), rig.count("store_hits"), rig.count("misses")) == (4, 3, 1)
    rig.held.check()


@pytest.mark.parametrize("sizes", [(1,), (GRAIN - 1,), (GRAIN + 1,), (3 * GRAIN, 1, GRAIN, 2 * GRAIN - 1)])
def test_values_of_any_length_take_whole_grains_until_they_are_written(sizes: tuple[int, ...]) -> None:
    """As many fit the tenth time as the first time: what is counted when they come is what is counted when they go."""
    rig = Rig(17)
    room, lengths = [], [sizes[at % len(sizes)] for at in range(10)]
    for turn in range(10):
        taken = [rig.put(at, version=turn, size=length)[0] for at, length in enumerate(lengths)]
        rig.held.check()
        room.append(taken.count(True))
        grains = [-(-length // GRAIN) for length, good in zip(lengths, taken, strict=True) if good]
        assert rig.count("queued_bytes") == sum(grains) * GRAIN <= 8 * GRAIN, (
            "half of the memory is for those unwritten"
        )
        rig.write_all()
        rig.held.check()
        assert rig.count("queued_bytes") == 0
        read = [rig.get(at, version=turn, size=length) for at, length in enumerate(lengths) if taken[at]]
        assert read == [[length] for length, good in zip(lengths, taken, strict=True) if good]
    assert room == room[:1] * 10 and room[0] > 2


def test_a_key_that_occurs_twice_is_read_once_and_leased_twice() -> None:
    rig = Rig(8)
    rig.backend.put(KEYS[:2], [VALUES.value(at) for at in range(2)])
    found = rig.held.get([KEYS[0], KEYS[1], KEYS[0]], [GRAIN] * 3)
    values = [value for _, value in found if value is not None]
    assert len(values) == 3 and values[0] is values[2]
    assert (rig.count("leases"), rig.count("pinned")) == (3, 2)
    rig.held.release(values[:1])
    assert rig.put(*range(10, 14)) == [True] * 4
    assert rig.memory[values[2].offset : values[2].offset + GRAIN] == VALUES.value(0), "it was evicted while in use"
    rig.held.release(values[1:])
    assert rig.held.get([KEYS[2], KEYS[2]], [GRAIN] * 2) == [(ABSENT, None)] * 2
    rig.write_all()
    assert (rig.count("leases"), rig.count("pinned")) == (0, 0)
    rig.held.check()


def test_a_store_that_keeps_its_first_values_keeps_them_below_a_host_too() -> None:
    rig = Rig(8)
    rig.backend.capabilities = replace(rig.backend.capabilities, overwrites=False)  # type: ignore[misc]
    rig.backend.put(KEYS[:1], [VALUES.value(0)])
    assert rig.put(0, 1, version=1) == [True, True]
    assert rig.put(1, version=2) == [True]
    assert rig.get(0) == [GRAIN]
    assert rig.get(1, version=1) == [GRAIN]
    assert rig.count("queued") == 1
    both = [rig.held.reserve(KEYS[2:3], [GRAIN])[0] for _ in range(2)]
    for version, room in enumerate(both):
        assert isinstance(room, Value)
        rig.memory[room.offset : room.offset + GRAIN] = VALUES.value(2, version=version)
        rig.held.commit([(KEYS[2], room)])
    assert rig.get(2) == [GRAIN], "of two writers at once the first one's stays"
    rig.held.check()


def test_a_value_of_another_length_is_neither_read_nor_evicts_for_long() -> None:
    rig = Rig(8)
    rig.backend.put([KEYS[0]], [VALUES.value(0, 100)])
    assert rig.get(0, size=5000) == [100]
    assert rig.held.get(KEYS[:1], [0]) == [(100, None)]
    assert rig.count("used_bytes") == 0
    rig.put(1)
    assert rig.get(1, size=64) == [GRAIN]
    assert rig.count("pinned") == 1, "it is not written yet"


def test_a_batch_that_does_not_fit_is_answered_in_parts() -> None:
    rig = Rig(4)
    rig.backend.put(KEYS[:10], [VALUES.value(at) for at in range(10)])
    read: list[int] = []
    while len(read) < 10:
        part = rig.get(*range(len(read), 10))
        assert 0 < len(part) <= 4
        read += part
    assert read == [GRAIN] * 10
    put = rig.put(*range(10, 20))
    assert put == [True] * 2, "half of the arena may wait to be written"


def test_a_value_larger_than_the_host_is_absent_and_refused() -> None:
    rig = Rig(4)
    rig.backend.put(KEYS[:1], [VALUES.value(0, 5 * GRAIN)])
    assert rig.get(0, size=5 * GRAIN) == [ABSENT]
    assert rig.put(1, size=5 * GRAIN) == [False]
    assert rig.count("no_room") == 2


def test_leases_keep_room_until_they_end_and_a_call_waits_for_it() -> None:
    rig = Rig(4, room_s=60)
    rig.backend.put(KEYS[:5], [VALUES.value(at) for at in range(5)])
    found = rig.held.get(KEYS[:4], [GRAIN] * 4)
    results: list[list[int]] = []
    waits = aside(lambda: results.append(rig.get(4)))
    rig.held.check()
    assert waits.is_alive() and not results
    rig.held.release([value for _, value in found if value is not None])
    waits.join()
    assert results == [[GRAIN]]


def test_without_room_in_time_a_value_is_absent_and_a_put_is_refused() -> None:
    rig = Rig(4)
    rig.backend.put(KEYS[:5], [VALUES.value(at) for at in range(5)])
    found = rig.held.get(KEYS[:4], [GRAIN] * 4)
    assert rig.get(4) == [ABSENT]
    assert rig.put(5) == [False]
    rig.held.release([value for _, value in found if value is not None])
    assert rig.get(4) == [GRAIN]


def test_memory_that_was_reserved_is_not_visible_and_an_abort_frees_it() -> None:
    rig = Rig(8)
    rooms = rig.held.reserve(KEYS[:2], [GRAIN, GRAIN])
    assert rig.held.exists(KEYS[:2]) == [False, False]
    assert rig.held.stats().entries == 0
    rig.held.abort([room for room in rooms if isinstance(room, Value)])
    assert rig.count("used_bytes") == 0 and rig.count("queued_bytes") == 0


def test_clients_that_miss_the_same_values_at_once_read_them_once() -> None:
    rig = Rig(room_s=60)
    rig.backend.put(KEYS[:4], [VALUES.value(at) for at in range(4)])
    rig.backend.calls.clear()
    rig.backend.gates["get"] = threading.Event()
    lengths: list[list[int]] = []
    first = aside(lambda: lengths.append(rig.get(0, 1, 2)))
    eventually(lambda: rig.backend.calls == ["get"])
    second = aside(lambda: lengths.append(rig.get(1, 2)))
    rig.backend.gates["get"].set()
    assert rig.get(3) == [GRAIN]
    first.join()
    second.join()
    assert sorted(lengths) == [[GRAIN] * 2, [GRAIN] * 3]
    assert rig.backend.calls.count("get") == 2, "one for the first three, one for the last"
    rig.held.check()


# ---------------------------------------------------------------- listing


def listed(rig: Rig) -> list[int]:
    """Returns which values a listing has, in its order."""
    found = [value for batch in rig.held.scan() for value in batch]
    assert {value.length for value in found} <= {GRAIN}
    return [KEYS.index(value.key) for value in found]


def test_a_listing_has_each_value_once_wherever_it_is() -> None:
    rig = Rig()
    rig.backend.put(KEYS[:4], [VALUES.value(at) for at in range(4)])
    rig.get(2, 3)
    rig.put(4, 5)
    rig.write_all()
    rig.put(6)  # not written yet
    rig.held.delete(KEYS[5:6])
    rig.backend.calls.clear()
    assert sorted(listed(rig)) == [0, 1, 2, 3, 4, 6]
    assert rig.backend.calls == [] and rig.held.status()["host_hits"] == 0, "a listing is no use"


def test_what_moves_between_the_store_and_the_host_while_it_is_listed_is_listed() -> None:
    rig = Rig()
    rig.backend.put(KEYS[:3], [VALUES.value(at) for at in range(3)])
    rig.put(9)
    listing = rig.held.scan()
    seen = [value.key for value in next(listing)]
    assert seen == [KEYS[9]]
    rig.get(0)  # now the host has it, too
    rig.backend.delete(KEYS[:1])  # and soon alone, as if the store had made room
    rig.put(5)
    seen += [value.key for batch in listing for value in batch]
    assert {*seen} == {KEYS[at] for at in (0, 1, 2, 5, 9)}


def test_a_store_that_cannot_list_says_so_before_anything_is_listed() -> None:
    rig = Rig()
    rig.put(0)

    def refuse() -> Iterator[Sequence[Listed]]:
        raise StorageError("refused", "it cannot list its values")
        yield []

    rig.backend.scan = refuse  # type: ignore[method-assign]
    listing = rig.held.scan()
    assert cause_of(lambda: next(listing)) == "refused"
    rig.backend.scan = lambda: {}[0]  # type: ignore[method-assign]
    assert cause_of(lambda: next(rig.held.scan())) == "protocol"


# ---------------------------------------------------------------- calls that overtake each other


@pytest.mark.parametrize("change", ["put", "delete", "clear"])
def test_a_read_that_was_overtaken_fills_nothing(change: str) -> None:
    rig = Rig()
    rig.backend.put(KEYS[:1], [VALUES.value(0)])
    rig.backend.calls.clear()
    rig.backend.gates["get"] = threading.Event()
    reading = aside(lambda: rig.get(0))
    eventually(lambda: rig.backend.calls == ["get"])
    if change == "put":
        rig.put(0, version=1)
    elif change == "delete":
        rig.held.delete(KEYS[:1])
    else:
        rig.held.clear()
    rig.backend.gates["get"].set()
    reading.join()
    if change == "put":
        assert rig.get(0, version=1) == [GRAIN]
    else:
        assert rig.held.exists(KEYS[:1]) == [False]
        assert rig.get(0) == [ABSENT]
    rig.held.check()


def test_a_read_that_was_overtaken_fills_nothing_though_what_overtook_it_has_left_the_host() -> None:
    """The store has the new value by then, and the read the one before: nothing else says which is newer."""
    rig = Rig(8)
    rig.backend.put(KEYS[:1], [VALUES.value(0)])
    rig.backend.calls.clear()
    rig.backend.gates["get"] = threading.Event()
    reading = aside(lambda: rig.get(0))
    eventually(lambda: rig.backend.calls == ["get"])
    rig.put(0, version=1)
    rig.write_all()
    for others in ((1, 2, 3), (4, 5, 6), (7, 8, 9)):
        rig.put(*others)
        rig.write_all()
    assert rig.held._arena.find(KEYS[0]) is None
    rig.backend.gates["get"].set()
    reading.join()
    assert rig.get(0, version=1) == [GRAIN]


@pytest.mark.parametrize("change", ["delete", "clear"])
def test_a_read_that_begins_before_a_delete_reaches_the_store_fills_nothing(change: str) -> None:
    rig = Rig()
    rig.backend.put(KEYS[:1], [VALUES.value(0)])
    rig.backend.gates[change] = threading.Event()
    removing = aside(lambda: rig.held.delete(KEYS[:1]) if change == "delete" else rig.held.clear())
    eventually(lambda: change in rig.backend.calls)
    assert rig.get(0) == [GRAIN], "it is still there"
    rig.backend.gates[change].set()
    removing.join()
    assert rig.held.exists(KEYS[:1]) == [False]


def test_a_delete_waits_for_a_write_under_way_so_that_no_value_comes_back() -> None:
    rig = Rig()
    rig.put(0)
    rig.backend.gates["put"] = threading.Event()
    writing = aside(rig.held.write)
    eventually(lambda: rig.backend.calls == ["put"])
    deleting = aside(lambda: rig.held.delete(KEYS[:1]))
    rig.backend.gates["put"].set()
    writing.join()
    deleting.join()
    assert rig.backend.calls == ["put", "delete"]
    assert rig.held.exists(KEYS[:1]) == [False]
    assert rig.held.stats().entries == 0


def test_a_queued_value_that_is_deleted_or_replaced_is_not_written() -> None:
    rig = Rig()
    rig.put(0, 1, 2)
    rig.put(1, version=1)
    rig.held.delete(KEYS[:1])
    rig.write_all()
    assert rig.backend.stats().entries == 2
    buffer = memoryview(bytearray(GRAIN))
    rig.backend.get(KEYS[1:2], [buffer])
    assert buffer == VALUES.value(1, version=1)


def test_a_value_replaced_while_it_is_written_ends_as_the_new_one() -> None:
    rig = Rig()
    rig.put(0)
    rig.backend.gates["put"] = threading.Event()
    writing = aside(rig.held.write)
    eventually(lambda: rig.backend.calls == ["put"])
    rig.put(0, version=1)
    rig.backend.gates["put"].set()
    writing.join()
    rig.write_all()
    assert rig.get(0, version=1) == [GRAIN]
    buffer = memoryview(bytearray(GRAIN))
    rig.backend.get(KEYS[:1], [buffer])
    assert buffer == VALUES.value(0, version=1)
    rig.held.check()


# ---------------------------------------------------------------- a back end that fails


@pytest.mark.parametrize("error", [StorageError("timeout", "too slow"), ValueError("a mistake of its own")])
def test_above_a_store_that_fails_the_host_goes_on(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(8)
    rig.put(0, 1)
    rig.backend.error = error
    with caplog.at_level(logging.WARNING):
        assert rig.held.exists(KEYS[:3]) == [True, True, False]
        assert rig.get(0, 2) == [GRAIN, ABSENT]
        rig.write_all()
    cause = "timeout" if isinstance(error, StorageError) else "protocol"
    assert rig.count("faults") == {cause: 3}
    assert len(caplog.records) == 1 and "the host tier goes on alone" in caplog.text
    assert rig.count("unwritten") == 2
    assert rig.get(0, 1) == [GRAIN] * 2, "what could not be written stays on the host"
    for call in (lambda: rig.held.delete(KEYS[:1]), rig.held.clear):
        assert cause_of(call) == cause
    if isinstance(error, ValueError):
        assert cause_of(rig.held.stats) == cause
    rig.backend.error = None
    assert rig.held.exists(KEYS[:2]) == [False, False]
    assert rig.held.stats().entries == 0


def test_a_breaker_spares_a_store_that_fails_and_tries_it_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(8)
    rig.backend.error = StorageError("unreachable", "nobody there")
    for _ in range(10):
        rig.held.exists(KEYS[:1])
    assert rig.backend.calls == ["exists fails"] * 3
    assert rig.count("faults") == {"unreachable": 3, "breaker": 7}
    rig.put(0)
    rig.write_all()
    assert rig.count("unwritten") == 1 and rig.count("queued") == 0, "a dead store does not fill the host with writes"
    rig.clock.now_s += 4.9
    rig.held.exists(KEYS[:1])
    assert rig.backend.calls == ["exists fails"] * 3
    rig.clock.now_s += 0.1
    rig.backend.error = None
    rig.held.exists(KEYS[1:2])
    assert rig.backend.calls[3:] == ["exists"]
    rig.put(1)
    rig.write_all()
    assert rig.backend.stats().entries == 1
    rig.backend.error = StorageError("unreachable", "gone again")
    rig.held.exists(KEYS[5:6])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "each failure is logged once"


def test_a_store_that_answers_for_fewer_keys_is_not_believed() -> None:
    rig = Rig(8)
    rig.backend.exists = lambda keys: [True]  # type: ignore[method-assign]
    assert rig.held.exists(KEYS[:3]) == [False] * 3
    assert rig.count("faults") == {"protocol": 1}


def test_a_full_store_keeps_what_it_refuses_on_the_host() -> None:
    rig = Rig(8)
    rig.backend.put = lambda keys, buffers: [False] * len(keys)  # type: ignore[method-assign]
    assert rig.put(0, 1) == [True, True]
    rig.write_all()
    assert rig.count("unwritten") == 2
    assert rig.get(0, 1) == [GRAIN] * 2


def test_each_value_that_a_store_refuses_is_counted() -> None:
    rig, taken = Rig(16), [[True, False], [False, False], [True, True]]
    rig.backend.put = lambda keys, buffers: taken.pop(0)  # type: ignore[method-assign]
    for at, unwritten in ((0, 1), (2, 3), (4, 3)):
        assert rig.put(at, at + 1) == [True, True]
        rig.write_all()
        assert rig.count("unwritten") == unwritten


@pytest.mark.parametrize(("most", "batches"), [(1, [1] * 6), (3, [3, 3]), (4, [4, 2]), (5, [5, 1]), (6, [6])])
@pytest.mark.parametrize("by", ["bytes", "values"])
def test_a_batch_of_writes_has_no_more_than_its_bound(
    by: str, most: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, seen = Rig(16), list[int]()
    monkeypatch.setattr(held_module, *(("_BATCH_BYTES", most * GRAIN) if by == "bytes" else ("_BATCH_VALUES", most)))
    rig.backend.put = lambda keys, buffers: seen.append(len(keys)) or [True] * len(keys)  # type: ignore[func-returns-value,method-assign]
    rig.put(*range(6))
    rig.write_all()
    assert seen == batches


# ---------------------------------------------------------------- the end


def test_closing_lets_the_writer_finish_the_queue() -> None:
    rig = Rig()
    rig.put(*range(8))
    rig.held.close()
    assert rig.held.write()
    assert not rig.held.write()
    assert rig.backend.stats().entries == 8
    rig.held.finish()
    assert cause_of(lambda: rig.backend.exists(KEYS[:1])) == "closed"
