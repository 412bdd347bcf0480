"""Wrappers: conformance of each one around the memory store, and what each one adds."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from rigs.stores import WriteOnce

from mainstem.errors import BadArgument, StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities, Listed, open_backend
from mainstem.storage.conformance import CASES, Case, make_keys, make_value, run
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.wrappers import ReadOnly, Tee

KEYS = [bytes([number]) * 32 for number in range(12)]


class Failing(MemoryBackend):
    """Raises while `fails` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.calls = 0

    def _open(self):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.fails:
            raise StorageError("unreachable", "gone")
        return super()._open()


class Shown(ReadOnly):
    """Reads through ReadOnly but writes past it, so that the cases have values to read."""

    def __init__(self) -> None:
        self.writable = MemoryBackend()
        super().__init__(self.writable)

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self.writable.put(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.writable.delete(keys)

    def clear(self) -> None:
        self.writable.clear()


def value(number: int, size: int = 1000) -> memoryview:
    return make_value(KEYS[number], size)


def read(store: Backend, number: int, size: int = 1000) -> bytes | None:
    buffer = memoryview(bytearray(size))
    (length,) = store.get([KEYS[number]], [buffer])
    return None if length != size else bytes(buffer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "open_one",
    [lambda: open_backend("tee+memory:,memory:"), Shown, lambda: Tee(WriteOnce(), MemoryBackend())],
    ids=["tee", "readonly", "tee-once"],
)
def test_conformance(open_one: type[Backend], case: Case) -> None:
    result = run(case, open_one)
    assert result.passed, result.reason


# ---------------------------------------------------------------- readonly


def test_readonly_reads_and_changes_nothing() -> None:
    inner = MemoryBackend()
    inner.put(KEYS[:2], [value(0), value(1)])
    store = ReadOnly(inner)
    assert store.put(KEYS[:3], [value(5), value(5), value(5)]) == [False] * 3
    store.delete([])
    for change in (lambda: store.delete(KEYS[:1]), store.clear):
        with pytest.raises(StorageError, match="refused: the store is read-only") as caught:
            change()
        assert caught.value.cause == "refused"
    assert store.exists(KEYS[:3]) == [True, True, False] and read(store, 0) == value(0) and store.stats().entries == 2
    assert store.capabilities == inner.capabilities


def test_a_closed_readonly_raises_closed() -> None:
    store = open_backend("readonly+memory:")
    store.close()
    store.close()
    calls = [lambda: store.put(KEYS[:1], [value(0)]), lambda: store.delete([]), store.clear, lambda: store.exists(KEYS)]
    for call in calls:
        with pytest.raises(StorageError, match="closed"):
            call()


# ---------------------------------------------------------------- tee


def filled(first: Sequence[int], second: Sequence[int]) -> tuple[Failing, Failing, Tee]:
    one, two = Failing(), Failing()
    for store, numbers in ((one, first), (two, second)):
        store.put([KEYS[number] for number in numbers], [value(number) for number in numbers])
    return one, two, Tee(one, two)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], []),
        ([0, 1, 2], []),
        ([], [0, 1, 2]),
        ([0, 2, 4], [1, 3]),
        ([1, 3], [0, 2, 4]),
        ([0, 1, 5], [2, 3]),
        ([0, 1], [0, 1]),
        ([0], [0, 1, 2, 3]),
        ([1, 2], [4, 11]),
        (range(12), []),
        ([], range(12)),
    ],
)
def test_tee_finds_keys_that_are_in_one_or_the_other(first: Sequence[int], second: Sequence[int]) -> None:
    assert filled(first, second)[2].exists(KEYS) == [at in first or at in second for at in range(12)]


def test_tee_makes_no_more_calls_than_necessary() -> None:
    one, two, tee = filled(range(12), [])
    one.calls = two.calls = 0
    assert all(tee.exists(KEYS))
    assert (one.calls, two.calls) == (1, 0)
    assert not any(tee.exists(make_keys(random.Random(1), 3)))
    assert (one.calls, two.calls) == (2, 1)


def test_tee_reads_from_the_second_what_the_first_lacks() -> None:
    one, _, tee = filled([0, 2, 5], [1, 2, 3])
    one.put([KEYS[3]], [value(3, 10)])
    buffers = [memoryview(bytearray(1000)) for _ in range(6)]
    assert tee.get(KEYS[:6], buffers) == [1000, 1000, 1000, 1000, ABSENT, 1000]
    assert [buffers[number] for number in (0, 1, 2, 3, 5)] == [value(number) for number in (0, 1, 2, 3, 5)]
    one.put([KEYS[6]], [value(6, 10)])
    assert tee.get([KEYS[6]], [memoryview(bytearray(1000))]) == [10]


def test_what_only_the_second_store_of_a_tee_has_moves_to_the_first_when_it_is_read() -> None:
    one, two, tee = filled([0], [0, 1, 2])
    one.put([KEYS[2]], [value(2, 10)])
    assert [read(tee, number) for number in (0, 1, 2, 3)] == [value(0), value(1), value(2), None]
    assert read(one, 1) == value(1) and tee.moved == 1
    assert one.exists(KEYS[:4]) == [True, True, True, False] and read(one, 2, 10) == value(2, 10)
    two.clear()
    assert read(tee, 1) == value(1)


def test_a_first_store_that_fails_or_is_full_takes_nothing_and_the_read_succeeds() -> None:
    for one in (Failing(), MemoryBackend(10), ReadOnly(MemoryBackend())):
        two = MemoryBackend()
        two.put(KEYS[:1], [value(0)])
        tee = Tee(one, two)
        if isinstance(one, Failing):
            one.fails = True
        assert read(tee, 0) == value(0) and tee.moved == 0


@pytest.mark.parametrize("change", ["put", "delete", "clear"])
def test_a_value_that_was_changed_while_it_was_read_does_not_come_back(change: str) -> None:
    class Interrupted(MemoryBackend):
        def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
            lengths = super().get(keys, buffers)
            {"put": lambda: tee.put(keys, [value(1)]), "delete": lambda: tee.delete(keys), "clear": tee.clear}[change]()
            return lengths

    one, two = MemoryBackend(), Interrupted()
    two.put(KEYS[:1], [value(0)])
    tee = Tee(one, two)
    assert read(tee, 0) == value(0)
    assert read(one, 0) == (value(1) if change == "put" else None)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("change", ["put", "delete", "clear"])
def test_values_move_again_after_a_change_whether_it_succeeds_or_not(change: str, fails: bool) -> None:
    one, two, tee = filled([], [])
    keys, two.fails = KEYS[:1], fails
    with suppress(StorageError):
        {"put": lambda: tee.put(keys, [value(1)]), "delete": lambda: tee.delete(keys), "clear": tee.clear}[change]()
    two.fails = False
    one.clear()
    two.put(KEYS[:1], [value(0)])
    assert read(tee, 0) == read(one, 0) == value(0)


def test_a_change_waits_for_a_value_that_is_being_moved() -> None:
    threads: list[threading.Thread] = []

    class Interrupted(MemoryBackend):
        def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
            if not threads:
                threads.append(threading.Thread(target=tee.put, args=(KEYS[:1], [value(1)])))
                threads[0].start()
                threads[0].join(0.2)  # long enough to overtake, if it could
            return super().put(keys, buffers)

    one, two = Interrupted(), MemoryBackend()
    two.put(KEYS[:1], [value(0)])
    tee = Tee(one, two)
    assert read(tee, 0) == value(0)
    threads[0].join()
    assert read(one, 0) == read(two, 0) == value(1)


def test_a_tee_lists_each_value_once() -> None:
    *_, tee = filled([0, 1, 2], [1, 2, 3, 4])
    assert sorted(found.key for batch in tee.scan() for found in batch) == sorted(KEYS[:5])


class OneByOne(MemoryBackend):
    """Lists a value in each batch."""

    def scan(self) -> Iterator[Sequence[Listed]]:
        for batch in list(super().scan()):
            yield from ([found] for found in batch)


def test_what_moves_while_a_tee_is_listed_is_listed() -> None:
    one, two = OneByOne(), OneByOne()
    one.put(KEYS[:2], [value(0), value(1)])
    two.put(KEYS[2:5], [value(2), value(3), value(4)])
    tee = Tee(one, two)
    found: set[bytes] = set()
    for number, batch in enumerate(tee.scan()):
        found |= {listed.key for listed in batch}
        if number == 1:
            assert all(read(Tee(one, two), at) for at in (2, 3, 4)), "by another process"
    assert found == {*KEYS[:5]}


@pytest.mark.parametrize("silent", [0, 1])
def test_a_tee_of_a_store_that_cannot_list_says_so_at_once(silent: int) -> None:
    class Silent(MemoryBackend):
        scan = Backend.scan

    stores: list[Backend] = [MemoryBackend(), MemoryBackend()]
    stores[silent] = Silent()
    for store in stores:
        store.put(KEYS[:1], [value(0)])
    with pytest.raises(StorageError, match="Silent cannot list"):
        next(Tee(*stores).scan())


def test_tee_writes_both_and_is_full_when_both_are() -> None:
    one, two = MemoryBackend(1000), MemoryBackend(500)
    tee = Tee(one, two)
    assert tee.put(KEYS[:3], [value(0, 400), value(1, 900), value(2, 2000)]) == [True, True, False]
    assert one.exists(KEYS[:3]) == [False, True, False] and two.exists(KEYS[:3]) == [True, False, False]
    assert tee.stats() == BackendStats(None, 1300, 1500, 1)


@pytest.mark.parametrize("broken", [0, 1])
def test_when_one_fails_the_other_goes_on(broken: int, caplog: pytest.LogCaptureFixture) -> None:
    stores = (Failing(), Failing())
    tee = Tee(*stores)
    tee.put(KEYS[:2], [value(0), value(1)])
    stores[broken].fails = True
    with caplog.at_level(logging.INFO, logger="mainstem.storage.wrappers"):
        assert tee.put([KEYS[2]], [value(2)]) == [True]
        assert tee.exists(KEYS) == [at < 3 for at in range(12)]
        assert [read(tee, number) for number in range(4)] == [value(0), value(1), value(2), None]
        assert tee.stats().used_bytes == 3000
        assert sum(tee.failures) == tee.failures[broken] >= 4
        stores[broken].fails = False
        assert tee.put([KEYS[3]], [value(3)]) == [True]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"store {broken + 1} of a tee fails, the other goes on: unreachable: gone",
        f"store {broken + 1} of a tee answers again",
    ]


@pytest.mark.parametrize("broken", [0, 1])
def test_delete_and_clear_raise_when_one_store_may_still_have_the_value(broken: int) -> None:
    stores = (Failing(), Failing())
    tee = Tee(*stores)
    tee.put(KEYS[:2], [value(0), value(1)])
    stores[broken].fails = True
    for change in (lambda: tee.delete(KEYS[:1]), tee.clear):
        with pytest.raises(StorageError, match="gone"):
            change()
    assert stores[1 - broken].stats().entries == 0


def test_when_both_fail_every_call_raises() -> None:
    one, two, tee = filled([0], [0])
    one.fails = two.fails = True
    calls = [
        lambda: tee.exists(KEYS),
        lambda: tee.get(KEYS[:1], [value(0)]),
        lambda: tee.put(KEYS[:1], [value(0)]),
        lambda: tee.delete(KEYS[:1]),
        tee.clear,
        tee.stats,
    ]
    for call in calls:
        with pytest.raises(StorageError, match="gone"):
            call()
    assert tee.failures == [6, 6]


def test_tee_combines_the_capabilities_of_its_parts() -> None:
    first = WriteOnce()
    first.capabilities = replace(first.capabilities, zero_copy=True, evicts=False)  # type: ignore[misc]
    assert Tee(first, MemoryBackend()).capabilities == Capabilities(
        persistent=True, shared=False, zero_copy=False, evicts=True, overwrites=False
    )


@pytest.mark.parametrize("spec", ["tee+memory:", "tee+memory:,memory:,memory:"])
def test_tee_takes_two(spec: str) -> None:
    with pytest.raises(BadArgument, match="two specs with a comma between"):
        open_backend(spec)


def test_closing_a_wrapper_closes_what_it_wraps_even_if_the_first_fails() -> None:
    class WontClose(MemoryBackend):
        def close(self) -> None:
            raise StorageError("io", "stuck")

    inner = MemoryBackend()
    with pytest.raises(StorageError, match="stuck"):
        Tee(WontClose(), inner).close()
    with pytest.raises(StorageError, match="closed"):
        inner.stats()


@pytest.mark.parametrize("wrapper", [ReadOnly, Tee])
def test_a_wrapper_has_no_spec_of_its_own(wrapper: type[Backend]) -> None:
    with pytest.raises(BadArgument, match=f"{wrapper.__name__} has no spec of its own"):
        wrapper.from_spec("x", {})
