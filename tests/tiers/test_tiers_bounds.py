"""What the tiers keep at most beside pages, and how long they wait. What they work on is the tests' own."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.hand_driven import Clock

from mainstem.errors import StorageError
from mainstem.storage.framed import Remembered
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.shelf import HostOnly
from mainstem.tiers.keyed import KeyedPages
from mainstem.tiers.storage.names import PageNames
from mainstem.tiers.storage.store import Store
from mainstem.tiers.storage.write import Writes


def test_the_names_of_65536_nodes_are_cached_and_the_one_used_longest_ago_goes() -> None:
    names = PageNames(None, None, 1)  # type: ignore[arg-type]
    for node in range(1 << 16):
        names.keep(node, b"%d" % node)
    assert names._get(0) == b"0"  # a use
    for new in (-1, -2):
        names.keep(new, b"new")
        names.keep(new, b"anew")  # which takes no more room
    assert [node in names._last for node in (0, 1, 2, 3, -1, -2)] == [True, False, False, True, True, True]
    assert len(names._last) == 1 << 16


def test_65536_states_that_were_lost_are_known_and_those_that_were_written() -> None:
    made: Any = object.__new__(Writes)
    made._written, made._lost = dict[int, None](), OrderedDict[int, bytes]()
    for node in range((1 << 16) + 3):
        made._written[node] = None
        made._lose(SimpleNamespace(node=node, names=[b"%d" % node]))
    assert [node in made._lost for node in (2, 3, (1 << 16) + 2)] == [False, True, True]
    assert len(made._lost) == 1 << 16 and not made._written


def test_a_host_without_a_store_keeps_64_mebibytes_of_notes() -> None:
    host = HostOnly({})  # type: ignore[arg-type]
    note = memoryview(bytes(16 << 20))
    for number in range(4):
        assert host.put([b"%d" % number], [note]) == [True]
    assert host.exists([b"0", b"3"]) == [True, True]
    assert host.put([b"small"], [note[:1]]) == [True]
    assert host.exists([b"0", b"1", b"3", b"small"]) == [False, True, True, True]


@pytest.mark.parametrize("limit", [1, 2, 30])
def test_the_keys_put_last_are_remembered_for_a_store_that_cannot_list_them(limit: int) -> None:
    assert Remembered()._limit == 1 << 20
    remembered, deleted = Remembered(limit), list[bytes]()
    keys = [b"%d" % number for number in range(limit + 2)]
    for _ in range(2):
        remembered.add(keys[:limit])
    remembered.clear(deleted.extend)
    assert deleted == keys[:limit] and not remembered._keys
    remembered.add(keys)
    with pytest.raises(StorageError, match=f"more than {limit} keys"):
        remembered.clear(deleted.extend)
    assert deleted[limit:] == keys[2:] and not remembered._keys


# ---------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("timeout_s", "ends_after", "ended", "slept"),
    [(1.0, 0, True, 0), (1.0, 199, True, 199), (1.0, 200, False, 200), (0.0, 5, False, 1)],
)
def test_a_drain_looks_every_five_milliseconds(timeout_s: float, ends_after: int, ended: bool, slept: int) -> None:
    naps: list[float] = []
    tiers: Any = SimpleNamespace(busy=True, _sleep=naps.append)
    polls = iter(range(10**6))
    tiers.poll = lambda: setattr(tiers, "busy", next(polls) < ends_after)
    assert Tiers.drain(tiers, timeout_s) == ended
    assert naps == [0.005] * slept


@pytest.mark.parametrize(("took_s", "left_s"), [(0.0, 5.0), (3.0, 2.0), (4.95, 0.1), (5000.0, 0.1)])
def test_workers_have_what_is_left_of_five_seconds_to_end_and_a_tenth_at_least(took_s: float, left_s: float) -> None:
    clock, given = Clock(), list[float]()

    def ends(timeout_s: float) -> bool:
        given.append(timeout_s)
        clock.now_s += took_s
        return True

    workers, closed = SimpleNamespace(close=ends), SimpleNamespace(close=lambda: given.append(-1.0))
    store: Any = SimpleNamespace(
        calls=SimpleNamespace(clock=clock, closed=False),
        _writers=workers,
        _readers=workers,
        shelf=None,
        _reads=closed,
        _backend=closed,
        close=lambda timeout_s: Store.close(store, timeout_s),
    )
    Tiers.close(SimpleNamespace(_storage=store))  # type: ignore[arg-type]
    assert given[:2] == pytest.approx([5.0, left_s]) and store.calls.closed


def test_keyed_pages_give_their_store_five_seconds_to_end() -> None:
    given: list[float] = []
    KeyedPages.close(SimpleNamespace(_store=SimpleNamespace(close=given.append)))  # type: ignore[arg-type]
    assert given == [5.0]


def test_a_call_that_nobody_ends_is_looked_at_again_after_50_ms() -> None:
    looks, waited = iter([False, False, True]), list[float]()

    class Turn:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def wait(self, timeout_s: float) -> None:
            waited.append(timeout_s)

    pages: Any = SimpleNamespace(_turn=Turn())
    assert KeyedPages._wait(pages, SimpleNamespace(over=lambda: next(looks), value=7)) == 7  # type: ignore[arg-type]
    assert waited == [0.05, 0.05]
