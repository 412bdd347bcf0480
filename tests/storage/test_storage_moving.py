"""Copying a store to another: whole, again after a fault, with what may not be copied, and in bounded memory."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT, Backend, Listed
from mainstem.storage.conformance import make_keys, make_value
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.moving import BATCH_BYTES, BATCH_VALUES, THREADS, WAITS_S, Migration, each_batch

KEYS = make_keys(random.Random(7), 3 * BATCH_VALUES)


class Store(MemoryBackend):
    """Counts its calls, and runs a script before each."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.calls: Counter[str] = Counter()
        self.script: Callable[[str], None] = lambda call: None

    def _note(self, call: str) -> None:
        self.calls[call] += 1
        self.script(call)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        self._note("get")
        return super().get(keys, buffers)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self._note("put")
        return super().put(keys, buffers)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._note("exists")
        return super().exists(keys)


def filled(count: int, size: int = 100) -> Store:
    store = Store()
    store.put(KEYS[:count], [make_value(key, size) for key in KEYS[:count]])
    store.calls.clear()
    return store


def held(store: Backend, count: int, size: int = 100) -> int:
    """Returns how many of the first values a store has; fails if one is not what was put."""
    buffers = [memoryview(bytearray(size)) for _ in KEYS[:count]]
    lengths = store.get(KEYS[:count], buffers)
    for key, length, buffer in zip(KEYS[:count], lengths, buffers, strict=True):
        assert length == ABSENT or buffer == make_value(key, size)
    return sum(length != ABSENT for length in lengths)


def never(_: float) -> None:
    raise AssertionError("nothing failed, and it waited")


def failing(store: Store, name: str, times: int, cause: str = "unreachable") -> None:
    """Makes the next calls of a store fail, from its second on."""
    left = [times]

    def script(call: str) -> None:
        if call == name and store.calls[call] > 1 and left[0]:
            left[0] -= 1
            raise StorageError(cause, "gone")

    store.script = script


def test_every_value_is_copied_and_those_that_are_there_are_not_even_read() -> None:
    source, target = filled(600), Store()
    target.put(KEYS[:150], [make_value(key, 100) for key in KEYS[:150]])
    moving = Migration(source, target)
    seen: list[tuple[int, int]] = []
    moving.run(progress=lambda values, size: seen.append((values, size)), sleep=never)
    assert (moving.copied, moving.copied_bytes, moving.there, moving.left) == (450, 45_000, 150, Counter())
    assert held(target, 600) == 600 and seen[-1] == (600, 60_000) and seen == sorted(seen)
    source.calls.clear()
    again = Migration(source, target)
    again.run(sleep=never)
    assert (again.copied, again.there, source.calls["get"]) == (0, 600, 0)


def test_what_the_target_has_stays_as_it_is() -> None:
    source, target = filled(3), Store()
    target.put(KEYS[:1], [make_value(KEYS[0], 100, 9)])
    Migration(source, target).run()
    buffer = memoryview(bytearray(100))
    assert target.get(KEYS[:1], [buffer]) == [100] and buffer == make_value(KEYS[0], 100, 9)


@pytest.mark.parametrize(("store", "call"), [("source", "get"), ("target", "put"), ("target", "exists")])
def test_a_store_that_fails_for_a_moment_is_tried_again_and_nothing_is_lost(store: str, call: str) -> None:
    source, target = filled(700), Store()
    failing({"source": source, "target": target}[store], call, times=2)
    waited: list[float] = []
    moving = Migration(source, target)
    moving.run(sleep=waited.append)
    assert held(target, 700) == 700 and (moving.copied, moving.left) == (700, Counter())
    assert waited in ([WAITS_S[0]] * 2, list(WAITS_S[:2]))


@pytest.mark.parametrize(("store", "call"), [("source", "get"), ("target", "put"), ("target", "exists")])
def test_a_store_that_dies_ends_the_copy_which_goes_on_where_it_ended(store: str, call: str) -> None:
    source, target = filled(700), Store()
    dead = {"source": source, "target": target}[store]
    failing(dead, call, times=10**9)
    moving = Migration(source, target)
    with pytest.raises(StorageError, match="gone"):
        moving.run(sleep=lambda seconds: None)
    dead.script = lambda call: None
    assert moving.copied == held(target, 700) < 700
    again = Migration(source, target)
    again.run(sleep=never)
    assert (again.there, again.copied) == (moving.copied, 700 - moving.copied) and held(target, 700) == 700


def test_what_a_store_refuses_is_not_tried_again() -> None:
    source, target = filled(300), Store()
    failing(target, "put", times=10**9, cause="refused")
    with pytest.raises(StorageError, match="refused"):
        Migration(source, target).run(sleep=never)


def test_ctrl_c_lets_the_running_batches_end_and_begins_no_other() -> None:
    source, target = filled(3 * BATCH_VALUES), Store()

    def interrupt(values: int, size: int) -> None:
        raise KeyboardInterrupt

    moving = Migration(source, target)
    with pytest.raises(KeyboardInterrupt):
        moving.run(progress=interrupt)
    assert moving.copied == held(target, 3 * BATCH_VALUES)
    assert target.calls["put"] <= THREADS
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mainstem-moving")]
    again = Migration(source, target)
    again.run()
    assert held(target, 3 * BATCH_VALUES) == 3 * BATCH_VALUES


def test_values_that_a_check_refuses_are_counted_by_cause_and_stay_behind() -> None:
    source, target = filled(10), Store()
    bad = {KEYS[3]: "altered", KEYS[4]: "altered", KEYS[8]: "header"}
    moving = Migration(source, target, lambda key, value: bad.get(key))
    moving.run()
    assert (moving.copied, moving.left) == (7, Counter(altered=2, header=1))
    assert target.exists(KEYS[:10]) == [key not in bad for key in KEYS[:10]]


def test_a_full_target_and_values_that_left_the_source_are_counted() -> None:
    source, target = filled(10), MemoryBackend(99)
    moving = Migration(source, target)
    moving.run()
    assert (moving.copied, moving.left) == (0, Counter(full=10))

    class Forgetful(Store):
        def scan(self) -> Iterator[Sequence[Listed]]:
            yield from super().scan()
            yield [Listed(KEYS[20], 100)]

    source = Forgetful()
    source.put(KEYS[:2], [make_value(key, 100) for key in KEYS[:2]])
    moving = Migration(source, Store())
    moving.run()
    assert (moving.copied, moving.left) == (2, Counter(absent=1))


def test_a_single_request_that_fails_is_made_again() -> None:
    class Flaky(Store):
        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            lengths = super().get(keys, buffers)
            return [ABSENT, *lengths[1:]] if self.calls["get"] == 1 else lengths

    class Refuses(Store):
        def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
            if self.calls["put"]:
                return super().put(keys, buffers)
            return [False, *super().put(keys[1:], buffers[1:])]

    source, target = Flaky(), Refuses()
    MemoryBackend.put(source, KEYS[:5], [make_value(key, 100) for key in KEYS[:5]])
    moving = Migration(source, target)
    moving.run(sleep=never)
    assert held(target, 5) == 5 and (moving.copied, moving.left) == (5, Counter())


def test_a_value_that_is_replaced_between_listing_and_reading_is_copied_as_it_is_now() -> None:
    source, target = filled(2), Store()

    def replace(call: str) -> None:
        if call == "get" and source.calls["get"] == 1:
            MemoryBackend.put(source, KEYS[:1], [make_value(KEYS[0], 333)])

    source.script = replace
    moving = Migration(source, target)
    moving.run(sleep=never)
    assert moving.left == Counter() and held(target, 1, 333) == 1


def test_a_target_that_evicts_to_make_room_says_how_much_it_has_not() -> None:
    source, target = filled(10), MemoryBackend(400)
    moving = Migration(source, target)
    moving.run()
    assert held(target, 10) == 4 and moving.left == Counter(evicted=6)


def test_a_source_that_cannot_list_is_refused_before_anything_is_copied() -> None:
    class Silent(Store):
        def scan(self) -> Iterator[Sequence[Listed]]:
            return Backend.scan(self)

    with pytest.raises(StorageError, match="Silent cannot list its values"):
        Migration(Silent(), Store()).run(sleep=never)


def test_memory_is_bounded_by_the_batches_that_run_at_once() -> None:
    size, done, overrun = BATCH_BYTES // 4, [0], threading.Event()
    ahead: list[int] = []

    class Lists(Store):
        def scan(self) -> Iterator[Sequence[Listed]]:
            for number, key in enumerate(KEYS[:60]):
                ahead.append(number - done[0])
                if ahead[-1] > (THREADS + 1) * 4:
                    overrun.set()
                yield [Listed(key, size)]

    def work(batch: Sequence[Listed]) -> None:
        assert sum(value.length for value in batch) <= BATCH_BYTES
        overrun.wait(0.02)  # long enough to list further, if it did
        with lock:
            done[0] += len(batch)

    lock = threading.Lock()
    each_batch(Lists(), work)
    assert done == [60] and not overrun.is_set(), f"it lists {max(ahead)} values further than it has threads for"


def test_a_value_larger_than_a_batch_is_a_batch() -> None:
    class Lists(Store):
        def scan(self) -> Iterator[Sequence[Listed]]:
            yield [Listed(KEYS[0], 1), Listed(KEYS[1], 2 * BATCH_BYTES), Listed(KEYS[2], 1)]

    batches: list[list[bytes]] = []
    lock = threading.Lock()

    def work(batch: Sequence[Listed]) -> None:
        with lock:
            batches.append([value.key for value in batch])

    each_batch(Lists(), work)
    assert sorted(batches) == sorted([[KEYS[0]], [KEYS[1]], [KEYS[2]]])
