"""InfiniStore, over a double of its client: conformance, frames, misses, a server that is stuck or dead."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from doubles import infinistore as double
from machine import patience
from rigs.stores import Values

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, BackendStats, open_backend
from mainstem.storage.conformance import make_value
from mainstem.storage.vendors.infinistore import InfiniStoreBackend

pytestmark = pytest.mark.deadline
VALUES = Values(10_000)
KEYS, SIZE = VALUES.keys, VALUES.size
name, put, read = VALUES.name, VALUES.put, VALUES.read
ROOM = 200_000


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> double.Server:
    monkeypatch.setitem(sys.modules, "infinistore", double)
    return double.reset()


@pytest.fixture
def store(server: double.Server) -> Iterator[InfiniStoreBackend]:
    opened = InfiniStoreBackend("10.0.0.1", 12345, staging_bytes=ROOM, timeout_s=patience(0.2))
    yield opened
    server.down, server.frozen = False, None
    opened.close()


def test_one_registered_region_and_names_in_hex(store: InfiniStoreBackend, server: double.Server) -> None:
    put(store, 0)
    assert len(server.registered) == 1 and server.registered[0][1] == ROOM
    assert list(server.values) == [name(0)] and len(server.values[name(0)]) == 8 + SIZE
    assert store.stats() == BackendStats()


def test_values_of_one_length_move_together(store: InfiniStoreBackend, server: double.Server) -> None:
    put(store, *range(10))
    read(store, *range(10))
    assert server.blocks == [10, 10]
    put(store, *range(40))
    assert max(server.blocks) * SIZE < ROOM


def test_a_miss_in_the_middle_shifts_nothing_and_costs_single_reads(
    store: InfiniStoreBackend, server: double.Server
) -> None:
    put(store, 0, 1, 3, 4, 6)
    server.blocks.clear()
    assert read(store, *range(7)) == [SIZE, SIZE, ABSENT, SIZE, SIZE, ABSENT, SIZE]
    assert server.blocks == [7] + [1] * 7


def test_exists_sees_a_gap_that_the_search_of_the_server_misses(
    store: InfiniStoreBackend, server: double.Server
) -> None:
    put(store, 0, 2, 3, 4, 5, 6)
    names = [name(number) for number in range(7)]
    connection = double.InfinityConnection(double.ClientConfig(connection_type="RDMA", host_addr="a", service_port=1))
    assert connection.get_match_last_index(names) == 6
    assert store.exists(KEYS[:7]) == [at != 1 for at in range(7)]


def test_a_foreign_value_under_a_name_is_no_value(store: InfiniStoreBackend, server: double.Server) -> None:
    server.values[name(0)] = bytes(8 + SIZE)
    server.values[name(1)] = b"\xff" * 20
    assert SIZE not in read(store, 0, 1)


def test_a_full_server_refuses_and_keeps_what_it_has(store: InfiniStoreBackend, server: double.Server) -> None:
    server.capacity = 3 * SIZE
    assert put(store, 0, 1) == [True, True]
    assert put(store, 2, 3) == [False, False]
    assert store.put([KEYS[4], KEYS[5]], [make_value(KEYS[4], 50), make_value(KEYS[5], SIZE)]) == [True, False]
    assert read(store, 0, 1) == [SIZE, SIZE]


def test_another_code_is_an_error(store: InfiniStoreBackend, server: double.Server) -> None:
    put(store, 0)
    server.code = 503
    with pytest.raises(StorageError, match="ret = 503"):
        read(store, 0)


def test_spec(server: double.Server) -> None:
    opened = open_backend("infinistore://10.0.0.9:77?device=mlx5_3&link=IB&namespace=n&staging=1MiB&timeout=1")
    assert server.registered[0][1] == 1 << 20
    opened.close()
    opened.close()
    for bad in ("", "//host", "//h:1?dev=1", "//h:1?link=USB", "//h:1?staging=1"):
        with pytest.raises(BadArgument):
            open_backend("infinistore:" + bad)


def test_nobody_there_and_a_missing_client_are_named(server: double.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.down = True
    with pytest.raises(BackendUnavailable, match=r"10\.0\.0\.9:77.*Failed to initialize"):
        open_backend("infinistore://10.0.0.9:77")
    monkeypatch.setitem(sys.modules, "infinistore", None)
    with pytest.raises(BackendUnavailable, match=r"mainstem\[infinistore\]"):
        open_backend("infinistore://10.0.0.9:77")
