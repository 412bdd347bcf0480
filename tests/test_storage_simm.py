"""SiMM, over a double of its client: conformance, codes, values that are too long, and its limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from doubles import simm_kv
from rigs.stores import Values

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, BackendStats, open_backend
from mainstem.storage.conformance import CASES, Case, make_value, run
from mainstem.storage.vendors.simm import LONGEST, SiMMBackend

pytest.importorskip("torch", reason="SiMM's client works on tensors")

VALUES = Values(100_000)
KEYS, SIZE = VALUES.keys, VALUES.size
name, put, read = VALUES.name, VALUES.put, VALUES.read


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> simm_kv.Cluster:
    monkeypatch.setitem(sys.modules, "simm", ModuleType("simm"))
    monkeypatch.setitem(sys.modules, "simm.kv", simm_kv)
    return simm_kv.reset()


@pytest.fixture
def store(cluster: simm_kv.Cluster) -> Iterator[SiMMBackend]:
    opened = SiMMBackend("10.0.0.1", 30001, staging_bytes=2 * LONGEST)
    yield opened
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case) -> None:
    result = run(case, lambda: SiMMBackend("10.0.0.1", 30001, staging_bytes=3 * LONGEST))
    assert result.passed, result.reason


def test_names_are_hex_after_the_namespace(store: SiMMBackend, cluster: simm_kv.Cluster) -> None:
    put(store, 0)
    assert list(cluster.values) == [name(0)]
    other = SiMMBackend("10.0.0.1", 30001, namespace="other", staging_bytes=2 * LONGEST)
    assert not any(other.exists(KEYS))


def test_a_miss_in_the_middle_shifts_nothing(store: SiMMBackend) -> None:
    put(store, 0, 1, 3, 4, 6)
    assert read(store, *range(7)) == [SIZE, SIZE, ABSENT, SIZE, SIZE, ABSENT, SIZE]


def test_batches_fit_the_staging_memory_with_room_after_them(store: SiMMBackend, cluster: simm_kv.Cluster) -> None:
    numbers = list(range(40)) * 3
    assert all(put(store, *numbers))
    assert read(store, *numbers) == [SIZE] * len(numbers)
    assert max(cluster.batches) * SIZE <= LONGEST


def test_a_value_that_is_too_long_touches_no_other_and_no_memory_of_the_caller(store: SiMMBackend) -> None:
    long = make_value(KEYS[1], LONGEST)
    assert put(store, 0) == [True] and store.put([KEYS[1]], [long]) == [True] and put(store, 2, 3) == [True, True]
    assert read(store, 0, 1, 2, 3) == [SIZE, LONGEST, SIZE, SIZE]
    whole = memoryview(bytearray(LONGEST))
    assert store.get([KEYS[1]], [whole]) == [LONGEST] and whole == long


def test_one_code_is_a_miss_or_no_room_and_the_others_count(store: SiMMBackend, cluster: simm_kv.Cluster) -> None:
    put(store, 0, 1, 2)
    cluster.codes = {name(1): -1002, name(4): -2100}
    assert read(store, 0, 1, 2) == [SIZE, ABSENT, SIZE]
    assert put(store, 3, 4, 5) == [True, False, True]
    assert store.exists(KEYS[:3]) == [True, False, True]


@pytest.mark.parametrize(
    ("code", "cause"), [(-1002, "timeout"), (-2300, "unreachable"), (-2301, "unreachable"), (-2002, "unreachable")]
)
def test_when_no_value_has_a_known_result_the_call_fails(
    store: SiMMBackend, cluster: simm_kv.Cluster, code: int, cause: str
) -> None:
    put(store, 0, 1)
    cluster.down = code
    for call in (lambda: read(store, 0, 1), lambda: put(store, 2)):
        with pytest.raises(StorageError, match=f"code {code}") as caught:
            call()
        assert caught.value.cause == cause
    assert not any(store.exists(KEYS)), "the client does not report a dead cluster"
    cluster.down = 0
    assert read(store, 0, 1) == [SIZE, SIZE] and store.exists(KEYS[:3]) == [True, True, False]


def test_delete_says_when_a_value_is_still_there(store: SiMMBackend, cluster: simm_kv.Cluster, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    put(store, 0, 1)
    monkeypatch.setattr(simm_kv.Store, "delete", lambda self, key: -2102)
    store.delete([KEYS[5]])
    with pytest.raises(StorageError, match="still has 2 of 2"):
        store.delete(KEYS[:2])
    with pytest.raises(StorageError, match="still has 2"):
        store.clear()


def test_clear_leaves_what_others_put(store: SiMMBackend, cluster: simm_kv.Cluster) -> None:
    other = SiMMBackend("10.0.0.1", 30001, staging_bytes=2 * LONGEST)
    put(other, 9)
    put(store, 0, 1)
    store.clear()
    assert list(cluster.values) == [name(9)]


def test_a_full_cluster_drops_the_oldest_and_refuses_what_never_fits(
    store: SiMMBackend, cluster: simm_kv.Cluster
) -> None:
    cluster.capacity = 3 * SIZE
    assert put(store, 0, 1, 2, 3) == [True] * 4
    assert store.exists(KEYS[:4]) == [False, True, True, True]
    sizes = [LONGEST + 1, 3 * SIZE + 1, 100]
    assert store.put(KEYS[5:8], [memoryview(bytearray(size)) for size in sizes]) == [False, False, True]


def test_flags_and_memory(store: SiMMBackend, cluster: simm_kv.Cluster) -> None:
    assert cluster.flags == {
        "cm_primary_node_ip": "10.0.0.1",
        "cm_primary_node_port": "30001",
        "clnt_thread_pool_size": "10",
        "clnt_sync_req_timeout_ms": "5000",
    }
    assert store.stats() == BackendStats()
    store.close()
    assert not cluster.regions[0].registered


def test_spec(cluster: simm_kv.Cluster) -> None:
    opened = open_backend("simm://10.0.0.9:77?namespace=n&staging=8MiB&threads=3&timeout=0.25")
    assert cluster.flags["cm_primary_node_ip"] == "10.0.0.9" and cluster.flags["clnt_sync_req_timeout_ms"] == "250"
    opened.close()
    for bad in ("simm:", "simm://host", "simm://h:1?thread=1", "simm://h:1?threads=0", "simm://h:1?staging=1MiB"):
        with pytest.raises(BadArgument):
            open_backend(bad)


def test_what_the_client_cannot_do_is_named(cluster: simm_kv.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.lock_limit = 1 << 20
    with pytest.raises(BackendUnavailable, match="cannot register"):
        open_backend("simm://h:1")
    cluster.known_flags = ()
    with pytest.raises(BackendUnavailable, match="no flag cm_primary_node_ip"):
        open_backend("simm://h:1")
    monkeypatch.setitem(sys.modules, "simm.kv", None)
    with pytest.raises(BackendUnavailable, match="scitix/SiMM"):
        open_backend("simm://h:1")
