"""The list of identities that wrote to a store: what it says, how it is kept, and that no damage does harm."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.hand_driven import IDENTITY, SECRET, FaultyBackend, Rig
from rigs.stores import WriteOnce

from mainstem.cache.identity import Identity
from mainstem.errors import StorageError
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.wrappers import ReadOnly
from mainstem.tiers.storage.identities import ROOM_BYTES, Summary, describe, enter, explain, find, summarize
from mainstem.tiers.storage.sealed import keep_note, note_bytes
from mainstem.tiers.storage.sealer import PUBLIC_SECRET, Sealer

LISTED = 32  # identities, at most


def named(**changes: Any) -> Identity:
    return replace(IDENTITY, **changes)


def entered(backend: MemoryBackend, identity: Identity = IDENTITY, secret: bytes = SECRET) -> list[Summary]:
    return enter(backend, Sealer(identity, secret), Counter())


def listed(backend: MemoryBackend, secret: bytes = SECRET) -> list[Summary]:
    return find(backend, Sealer(None, secret), Counter())


# ---------------------------------------------------------------- what a summary says


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_every_field_that_separates_pages_is_in_the_summary_except_the_rank(field: str) -> None:
    value = getattr(named(tp_size=4, extra=("codec none",)), field)
    other = value + 1 if isinstance(value, int) else ("codec int8",) if field == "extra" else value + "!"
    one, two = named(tp_size=4, extra=("codec none",)), named(**{"tp_size": 4, "extra": ("codec none",), field: other})
    assert (summarize(one) == summarize(two)) == (field == "tp_rank")


def test_ranks_that_hold_the_same_are_not_told_apart() -> None:
    assert summarize(named(attention="mla", tp_size=2)) == summarize(named(attention="mla", tp_size=4))
    assert "ranks" not in summarize(named(attention="mla"))


def test_long_values_are_cut_but_stay_different() -> None:
    one, two = (summarize(named(rope="x" * 5000 + end)) for end in "ab")
    assert one != two and max(map(len, one.values())) <= 200
    assert len(describe(one)) < 600 and "x..." in describe(one)


# ---------------------------------------------------------------- the list


def test_identities_are_listed_once_and_the_newest_first() -> None:
    for kind in (MemoryBackend, WriteOnce):
        store = kind()
        assert listed(store) == []
        assert entered(store) == []
        assert entered(store, named(tp_size=2, tp_rank=1)) == [summarize(IDENTITY)]
        assert entered(store, named(tp_size=2, tp_rank=0)) == listed(store)
        assert listed(store) == [summarize(named(tp_size=2)), summarize(IDENTITY)]
        assert store.stats().entries == 1


def test_a_listed_identity_writes_nothing() -> None:
    backend = FaultyBackend()
    entered(backend)
    backend.calls.clear()
    entered(backend)
    assert backend.calls == ["get"]


def test_the_oldest_are_dropped() -> None:
    store = MemoryBackend()
    for size in range(1, LISTED + 9):
        entered(store, named(page_size=size))
    assert [entry["page size"] for entry in listed(store)] == [str(size) for size in range(LISTED + 8, 8, -1)]


def test_identities_with_long_values_are_listed_as_far_as_there_is_room() -> None:
    store = MemoryBackend()
    words = [field.name for field in fields(Identity) if field.name not in ("page_size", "tp_rank", "tp_size", "extra")]
    for number in range(LISTED):
        entered(store, named(**dict.fromkeys(words, f"{number} " + "\ud800" * 300)))
    found = listed(store)
    assert 2 <= len(found) < LISTED and found[0]["model"].startswith(f"{LISTED - 1} ")
    assert store.stats().used_bytes == note_bytes(ROOM_BYTES) == 1 << 15


def test_another_secret_has_a_list_of_its_own() -> None:
    store = MemoryBackend()
    entered(store)
    entered(store, named(model="other"), PUBLIC_SECRET)
    assert [entry["model"] for entry in listed(store)] == ["ghost"]
    assert [entry["model"] for entry in listed(store, PUBLIC_SECRET)] == ["other"]


def test_nothing_in_the_store_shows_what_is_listed() -> None:
    store = MemoryBackend()
    entered(store, named(model="a secret model"))
    assert b"secret model" not in b"".join(store._values.values())


def test_one_of_two_that_enter_at_the_same_moment_may_be_lost_and_none_from_before() -> None:
    class Interrupted(MemoryBackend):
        """Another process enters between the read and the write of the first."""

        others: ClassVar[list[Identity]] = []

        def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
            if self.others:
                entered(self, self.others.pop())
            return super().put(keys, buffers)

    store = Interrupted()
    entered(store)
    store.others = [named(tp_size=2)]
    entered(store, named(tp_size=3))
    assert [entry["ranks"] for entry in listed(store)] == ["3", "1"]
    entered(store, named(tp_size=2))
    assert [entry["ranks"] for entry in listed(store)] == ["2", "3", "1"]


# ---------------------------------------------------------------- damage


def rewrite(store: MemoryBackend, content: bytes) -> None:
    """Stores a note with this content, sealed as it should be."""
    sealer = Sealer(None, SECRET)
    (key,) = store._values
    keep_note(store, sealer, key, content, ROOM_BYTES)


@pytest.mark.parametrize("kind", [MemoryBackend, WriteOnce])
@pytest.mark.parametrize(
    ("how", "cause"), [("altered", "altered"), ("cut", "length"), ("longer", "length"), ("empty", "length")]
)
def test_a_damaged_note_is_counted_and_written_anew(how: str, cause: str, kind: type[MemoryBackend]) -> None:
    store, causes = kind(), Counter[str]()
    entered(store, named(model="before"))
    (key,) = store._values
    value = store._values[key]
    changed = {"altered": b"x" + value[1:], "cut": value[:-1], "longer": value + b"x", "empty": b""}[how]
    store._values[key] = changed
    assert enter(store, Sealer(IDENTITY, SECRET), causes) == []
    assert causes == {cause: 1}
    assert listed(store) == [summarize(IDENTITY)]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", 0),
        (b"not json", 0),
        (b"{}", 0),
        (b"[" * 30_000, 0),
        (b"\xff\xfe", 0),
        (b'[1, null, "x", {"model": 3}, {"model": "m"}, {}]', 2),
        (json.dumps([{"model": str(number)} for number in range(100)]).encode(), LISTED),
    ],
)
def test_of_another_format_only_what_is_an_entry_is_taken(content: bytes, found: int) -> None:
    store = MemoryBackend()
    entered(store)
    rewrite(store, content)
    assert len(listed(store)) == found
    assert len(entered(store)) == found and listed(store)[0] == summarize(IDENTITY)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_arbitrary_content_does_no_harm(content: bytes) -> None:
    store = MemoryBackend()
    entered(store)
    rewrite(store, content)
    for entry in listed(store):
        assert describe(entry) is not None and explain(summarize(IDENTITY), [entry]) is None


def test_a_store_that_takes_no_writes_still_says_what_it_lists() -> None:
    for kind in (MemoryBackend, WriteOnce):
        store, causes = kind(), Counter[str]()
        entered(store)
        before = enter(ReadOnly(store), Sealer(named(tp_size=2), SECRET), causes)
        assert before == listed(store) == [summarize(IDENTITY)]
        assert causes == ({} if kind is MemoryBackend else {"refused": 1})


# ---------------------------------------------------------------- why nothing is found


def test_the_nearest_of_the_same_model_explains() -> None:
    own = summarize(named(tp_size=3))
    far = summarize(named(tp_size=2, weights="f" * 64, page_size=32))
    near = summarize(named(tp_size=3, quantization="int8", layout="layer, number + window"))
    why = explain(own, [summarize(named(model="other")), far, near])
    assert why == (
        "pages of ghost that others stored are not found, because they differ: "
        "quantization int8, here none; layout layer, number + window, here layer, number"
    )
    assert f"weights {'f' * 40}..., here 0123" in (explain(own, [far]) or "")
    long = [summarize(named(layout=f"{'layers and heads ' * 8}[{size}, 2] and more {'x ' * 40}")) for size in (8, 16)]
    assert f"layout ...[8, 2] and more {'x ' * 12}..., here ...[16, 2] and" in (explain(long[1], long[:1]) or "")
    assert explain(summarize(named(extra=("codec none",))), [summarize(IDENTITY)]) == (
        "pages of ghost that others stored are not found, because they differ: codec unknown, here none"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"page_size": 8}, "page size 8, here 2"),
        ({"tp_size": 2}, "ranks 2, here 1"),
        ({"dtype": "f2"}, "dtype f2, here uint64"),
    ],
)
def test_a_layout_is_left_out_where_what_it_follows_from_differs(changes: dict[str, Any], why: str) -> None:
    other = summarize(named(layout="layer, number of another shape", **changes))
    assert (explain(summarize(IDENTITY), [other]) or "").endswith(f"differ: {why}")


LAYOUTS = "page_first/v1 float32[2, 8, 2, 16] float32[2, 8, 2, 16]", "page_first/v1 float32[4, 8, 2, 16]"
STATE = "page_first/v1 float32[6, 128, 4] float32[6, 16, 4, 4]"


def test_a_description_shows_every_component() -> None:
    hybrid = named(layout=" + ".join([*LAYOUTS, STATE]))
    assert "layout 2 float32[2,8,2,16] + float32[4,8,2,16] + float32[6,128,4] float32[6,16,4,4]," in describe(
        summarize(hybrid)
    )
    several = [named(layout=" + ".join([*LAYOUTS * count, STATE])) for count in (1, 2, 3)]
    assert len({describe(summarize(one)) for one in several}) == 3


def test_nothing_is_explained_where_its_own_pages_may_be_or_none_of_its_model() -> None:
    own, other = summarize(IDENTITY), summarize(named(tp_size=2))
    assert explain(own, [other, own]) is None
    assert explain(own, [summarize(named(model="other"))]) is None
    assert explain(own, []) is None


# ---------------------------------------------------------------- in the tiers


def rig_on(backend: MemoryBackend, **identity: Any) -> Rig:
    rig = Rig(backend=backend)
    assert rig.store is not None
    rig.store.sealer = Sealer(named(**identity), SECRET)
    rig.tiers.enter_identity()
    return rig


def test_a_server_logs_one_line_if_the_store_has_pages_of_its_model_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FaultyBackend()
    for ranks in (2, 3, 3):
        rig_on(backend, tp_size=ranks).close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "storage: pages of ghost that others stored are not found, because they differ: ranks 2, here 3"
    ]
    assert [entry["ranks"] for entry in listed(backend)] == ["3", "2"]


def test_a_list_that_the_store_has_evicted_is_written_again_and_nothing_is_logged_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FaultyBackend()
    entered(backend, named(tp_size=2))
    rig = rig_on(backend)
    rig.settle()
    for lost in (True, False):
        if lost:
            backend.clear()
        else:
            rewrite(backend, json.dumps([summarize(named(tp_size=2))]).encode())  # as a race may do
        rig.tiers.enter_identity()
        rig.settle()
        assert listed(backend)[0] == summarize(IDENTITY)
    assert len(caplog.messages) == 1


def test_entering_blocks_nobody_and_its_failure_is_a_counted_fault() -> None:
    backend = FaultyBackend()
    backend.instead["get"] = StorageError("unreachable", "on purpose")
    rig = rig_on(backend)
    assert backend.calls == [] and rig.tiers.busy
    rig.settle()
    assert rig.tiers.stats().faults == {"unreachable": 1} and not rig.tiers.busy
    backend.instead.clear()
    damaged = rig_on(backend)
    damaged.settle()
    (key,) = backend.stored_keys()
    backend.set_value(key, b"damaged")
    again = rig_on(backend)
    again.settle()
    assert again.tiers.stats().faults == {"length": 1} and listed(backend) == [summarize(IDENTITY)]


def test_without_a_store_nothing_is_entered() -> None:
    rig = Rig()
    rig.tiers.enter_identity()
    assert not rig.tiers.busy
