"""EIC, over a double of its client: conformance, statuses of a batch and of values, a service that is stuck or dead."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from doubles import eic as double
from machine import patience
from rigs.stores import Values

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, BackendStats, open_backend
from mainstem.storage.conformance import make_value
from mainstem.storage.vendors.eic import EICBackend

pytestmark = pytest.mark.deadline
VALUES = Values(10_000)
KEYS, SIZE = VALUES.keys, VALUES.size
name, put, read = VALUES.name, VALUES.put, VALUES.read
ROOM = 200_000


@pytest.fixture(autouse=True)
def instance(monkeypatch: pytest.MonkeyPatch) -> double.Instance:
    monkeypatch.setitem(sys.modules, "eic", double)
    return double.reset()


@pytest.fixture
def store(instance: double.Instance) -> Iterator[EICBackend]:
    opened = EICBackend("10.0.0.1:7000", "kv-1", staging_bytes=ROOM, timeout_s=patience(0.2))
    yield opened
    opened.close()


def test_names_namespace_lifetime_and_memory(store: EICBackend, instance: double.Instance) -> None:
    put(store, 0)
    assert list(instance.values) == [("mainstem", name(0))]
    assert instance.ttl == {-1} and [size for _, size in instance.regions] == [ROOM]
    assert store.stats() == BackendStats()


def test_a_miss_in_the_middle_shifts_nothing(store: EICBackend, instance: double.Instance) -> None:
    put(store, 0, 1, 3, 4, 6)
    instance.codes = {name(3): double.StatusCode.RPC_ERROR}
    assert read(store, *range(7)) == [SIZE, SIZE, ABSENT, ABSENT, SIZE, ABSENT, SIZE]
    instance.codes = {}
    assert read(store, 5, 7) == [ABSENT, ABSENT] and read(store, 5) == [ABSENT]
    assert store.exists(KEYS) == [at in (0, 1, 3, 4, 6) for at in range(len(KEYS))]


def test_a_value_that_fails_is_read_again_alone_until_one_fails_again(
    store: EICBackend, instance: double.Instance
) -> None:
    """The code of a value that is longer than its buffer is not known, so any code may mean that."""
    put(store, *range(5))
    store.put(KEYS[5:7], [make_value(key, SIZE + 1) for key in KEYS[5:7]])
    instance.codes = {name(1): double.StatusCode.RPC_ERROR}
    instance.batches.clear()
    assert read(store, 5, 6, 0, 9) == [SIZE + 1, SIZE + 1, SIZE, ABSENT] and instance.batches == [4, 1, 1]
    assert read(store, 5, 0, 1, 6) == [SIZE + 1, SIZE, ABSENT, ABSENT] and instance.batches[3:] == [4, 1, 1]
    with pytest.raises(StorageError, match=r"mget of 1 values: StatusCode\.RPC_ERROR"):
        read(store, 1)


def test_a_call_without_statuses_of_values_counts_as_a_whole(store: EICBackend, instance: double.Instance) -> None:
    put(store, 0, 1)
    instance.terse = True
    assert put(store, 2) == [True] and read(store, 0, 1) == [SIZE, SIZE] and all(store.exists(KEYS[:3]))
    with pytest.raises(StorageError, match="PARTIAL_FAILED"):
        read(store, 0, 9)


def test_one_value_without_room_is_refused_and_the_others_are_stored(
    store: EICBackend, instance: double.Instance
) -> None:
    instance.codes = {name(1): double.StatusCode.NO_SPACE}
    assert put(store, 0, 1, 2) == [True, False, True]
    assert read(store, 0, 1, 2) == [SIZE, ABSENT, SIZE]


def test_a_service_that_died_is_found_again_when_it_is_back(store: EICBackend, instance: double.Instance) -> None:
    put(store, 0)
    instance.down = True
    with pytest.raises(StorageError, match=r"mget of 1 values: StatusCode\.RPC_ERROR"):
        read(store, 0)
    for call in (lambda: put(store, 1), lambda: store.exists(KEYS), lambda: store.delete(KEYS), store.clear):
        with pytest.raises(StorageError, match="unreachable: EIC: init of kv-1"):
            call()
    instance.down = False
    assert read(store, 0) == [SIZE]


def test_delete_says_when_a_value_is_still_there(store: EICBackend, instance: double.Instance) -> None:
    put(store, 0, 1)
    instance.deletes = False
    with pytest.raises(StorageError, match="still has 2 of 3"):
        store.delete([*KEYS[:2], KEYS[9]])
    instance.deletes = True
    store.clear()
    assert not instance.values


def test_clear_leaves_what_others_put(store: EICBackend, instance: double.Instance) -> None:
    instance.values["other", name(0)] = instance.values["mainstem", name(9)] = b"x"
    put(store, 0, 1)
    store.clear()
    assert set(instance.values) == {("other", name(0)), ("mainstem", name(9))}


def test_spec(instance: double.Instance) -> None:
    opened = open_backend(
        "eic://10.0.0.9:77?instance=i&namespace=n&transport=1&log_dir=/logs&flag_file=/f&ttl=60&staging=1MiB&timeout=1"
    )
    opened.put([KEYS[0]], [make_value(KEYS[0], 100)])
    opened_as, endpoint, option = instance.inits[0]
    assert (opened_as, endpoint, option.log_dir, option.flag_file) == ("i", "10.0.0.9:77", "/logs", "/f")
    assert option.transport_type is double.TransportType.TRANSPORT_TCP
    assert instance.ttl == {60} and next(iter(instance.values))[0] == "n"
    opened.close()
    opened.close()
    for bad in (
        "eic:?instance=i",
        "eic://h:1",
        "eic://h?instance=i&ttl=x",
        "eic://h?instance=i&staging=1",
        "eic://h?a=1",
    ):
        with pytest.raises(BadArgument):
            open_backend(bad)


def test_what_the_client_cannot_do_is_named(instance: double.Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    instance.registers = False
    with pytest.raises(BackendUnavailable, match="cannot register 67108864 bytes"):
        open_backend("eic://h:1?instance=i")
    instance.down = True
    with pytest.raises(BackendUnavailable, match="code -1"):
        open_backend("eic://h:1?instance=i")
    monkeypatch.setitem(sys.modules, "eic", None)
    with pytest.raises(BackendUnavailable, match="EIC's Python client"):
        open_backend("eic://h:1?instance=i")
