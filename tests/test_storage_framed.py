"""Framed back ends over doubles of their clients, EIC and InfiniStore: conformance, frames, a stuck or dead service."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from doubles import eic, infinistore
from machine import patience
from rigs.stores import Values

from mainstem.errors import StorageError
from mainstem.storage.base import ABSENT
from mainstem.storage.conformance import CASES, Case, make_value, run
from mainstem.storage.framed import ClientThread, FramedBackend, Frames, Remembered
from mainstem.storage.vendors.eic import EICBackend
from mainstem.storage.vendors.infinistore import InfiniStoreBackend

pytestmark = pytest.mark.deadline
VALUES = Values(10_000)
KEYS, SIZE = VALUES.keys, VALUES.size
name, put, read = VALUES.name, VALUES.put, VALUES.read
ROOM = 200_000


@dataclass
class Service:
    """A double of a service and its client.

    Args:
        open: opens a back end, with the size of its memory and the timeout.
        double: has the faults `down` and `frozen`.
        values: what it holds, by name.
        under: makes of a name what `values` has it under.
        read: the class and the method that reads.
        reads: what that method returns if it has read two values.
    """

    open: Callable[[int, float], FramedBackend]
    double: Any
    values: dict[Any, bytes]
    under: Callable[[str], Any]
    read: tuple[type, str]
    reads: Callable[..., Any]


async def _infinistore_reads(*_: object) -> int:
    return 200


def _eic_reads(*_: object) -> tuple[Any, None, eic.Outcome]:
    return eic.StatusCode.SUCCESS, None, eic.Outcome([eic.StatusCode.SUCCESS] * 2)


@pytest.fixture(params=["eic", "infinistore"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    if request.param == "eic":
        monkeypatch.setitem(sys.modules, "eic", eic)
        eic.reset()
        made = Service(
            lambda room, timeout_s: EICBackend("10.0.0.1:7000", "kv-1", staging_bytes=room, timeout_s=timeout_s),
            eic.instance,
            eic.instance.values,
            lambda name: ("mainstem", name),
            (eic.Client, "mget"),
            _eic_reads,
        )
    else:
        monkeypatch.setitem(sys.modules, "infinistore", infinistore)
        infinistore.reset()
        made = Service(
            lambda room, timeout_s: InfiniStoreBackend("10.0.0.1", 12345, staging_bytes=room, timeout_s=timeout_s),
            infinistore.server,
            infinistore.server.values,
            lambda name: name,
            (infinistore.InfinityConnection, "rdma_read_cache_async"),
            _infinistore_reads,
        )
    yield made
    made.double.down, made.double.frozen = False, None


@pytest.fixture
def store(service: Service) -> Iterator[FramedBackend]:
    opened = service.open(ROOM, patience(0.2))
    yield opened
    service.double.down, service.double.frozen = False, None
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, service: Service) -> None:
    result = run(case, lambda: service.open(8 << 20, 5.0))
    assert result.passed, result.reason


def test_a_miss_in_the_middle_shifts_nothing(store: FramedBackend) -> None:
    put(store, 0, 1, 3, 4, 6)
    assert read(store, *range(7)) == [SIZE, SIZE, ABSENT, SIZE, SIZE, ABSENT, SIZE]
    assert store.exists(KEYS[:7]) == [at in (0, 1, 3, 4, 6) for at in range(7)]


def test_a_value_of_another_length_says_its_own_and_brings_no_bytes_after_it(store: FramedBackend) -> None:
    store.put(KEYS[:2], [make_value(KEYS[0], 100), make_value(KEYS[1], SIZE + 100)])
    put(store, 2)
    assert read(store, 0, 1, 2, 3) == [100, SIZE + 100, SIZE, ABSENT]
    assert read(store, 1, 0) == [SIZE + 100, 100]
    assert store.get(KEYS[:4], [memoryview(bytearray(1))] * 4) == [100, SIZE + 100, SIZE, ABSENT]


def test_old_content_of_the_memory_is_no_value(
    store: FramedBackend, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 0, 1)
    monkeypatch.setattr(*service.read, service.reads)
    assert read(store, 0, 1) == [ABSENT, ABSENT]


def test_a_value_longer_than_the_memory_is_refused(store: FramedBackend) -> None:
    long = memoryview(bytearray(ROOM))
    assert store.put(KEYS[:2], [long, make_value(KEYS[1], SIZE)]) == [False, True]
    buffer = memoryview(bytearray(SIZE))
    assert store.get(KEYS[:2], [long, buffer]) == [ABSENT, SIZE] and buffer == make_value(KEYS[1], SIZE)


def test_a_batch_longer_than_the_memory_takes_several_rounds(store: FramedBackend) -> None:
    assert 40 * SIZE > ROOM
    assert put(store, *range(40)) == [True] * 40 and read(store, *range(40)) == [SIZE] * 40


def test_a_stuck_service_is_a_timeout_and_a_late_end_does_not_touch_the_caller(
    store: FramedBackend, service: Service
) -> None:
    put(store, 0)
    service.double.frozen = release = threading.Event()
    buffer = memoryview(bytearray(SIZE))
    for call in (lambda: store.get([KEYS[0]], [buffer]), lambda: put(store, 1), lambda: store.exists(KEYS)):
        with pytest.raises(StorageError, match=r"timeout: .*: no answer in"):
            call()
    service.double.frozen = None
    release.set()
    assert read(store, 0) == [SIZE]
    assert buffer == bytes(SIZE)


def test_a_service_that_died_is_found_again_when_it_is_back(store: FramedBackend, service: Service) -> None:
    put(store, 0)
    service.double.down = True
    calls = (lambda: store.exists(KEYS), lambda: read(store, 0), lambda: put(store, 1), lambda: store.delete(KEYS))
    for call in (*calls, store.clear):
        with pytest.raises(StorageError):
            call()
    service.double.down = False
    assert read(store, 0) == [SIZE]


def test_clear_leaves_what_others_put(store: FramedBackend, service: Service) -> None:
    service.values[service.under(name(9))] = b"x"
    put(store, 0, 1)
    store.clear()
    assert list(service.values) == [service.under(name(9))]


# ---------------------------------------------------------------- parts


def test_a_client_thread_passes_answers_and_errors_on() -> None:
    thread = ClientThread("a client")

    async def answer() -> int:
        return 3

    async def fail(error: Exception) -> int:
        raise error

    assert thread.run(answer(), 5) == 3
    with pytest.raises(StorageError, match="full: no room"):
        thread.run(fail(StorageError("full", "no room")), 5)
    with pytest.raises(StorageError, match="unreachable: a client: KeyError: 'x'"):
        thread.run(fail(KeyError("x")), 5)
    thread.end()


def test_frames_of_a_round_do_not_touch() -> None:
    frames = Frames(1 << 16)
    buffers = [make_value(key, 1 + 997 * number) for number, key in enumerate(KEYS[:12])]
    rounds = list(frames.rounds(KEYS[:12], buffers))
    assert sum(map(len, rounds)) == 12 and len(rounds) > 1
    for round_ in rounds:
        frames.fill(round_)
        empty = [frame._replace(buffer=memoryview(bytearray(len(frame.buffer)))) for frame in round_]
        assert [frames.take(frame) for frame in empty] == [len(frame.buffer) for frame in round_]
        assert [frame.buffer for frame in empty] == [frame.buffer for frame in round_]
        frames.blank(round_)
        assert [frames.take(frame) for frame in empty] == [ABSENT] * len(round_)


def test_clear_deletes_what_was_put_once_and_says_when_it_forgot_some() -> None:
    deleted: list[list[bytes]] = []
    put_keys = Remembered(limit=3)
    put_keys.add(KEYS[:2])
    put_keys.discard(KEYS[:1])  # makes room
    put_keys.add(KEYS[2:4])
    put_keys.clear(deleted.append)
    put_keys.clear(deleted.append)
    put_keys.add(KEYS[:5])
    with pytest.raises(StorageError, match="refused: more than 3 keys"):
        put_keys.clear(deleted.append)
    assert deleted == [KEYS[1:4], [], KEYS[2:5]]
