"""The hottest prefixes: remembered, and prefetched after a restart."""

from __future__ import annotations

from typing import Any

import pytest
from rigs.hand_driven import A, B, C, FaultyBackend, Rig, prompt, stored_keys

from mainstem.errors import StorageError
from mainstem.storage.memory import MemoryBackend


def restarted(backend: MemoryBackend, **options: Any) -> Rig:
    rig = Rig(backend=backend, **options)
    rig.tiers.warm()
    assert rig.tiers.busy
    rig.settle()
    return rig


def test_the_hottest_prefixes_are_warmed_after_a_restart() -> None:
    backend = FaultyBackend()
    before = Rig(device=32, backend=backend)
    for tokens in (A, B, B, C, C, C):
        before.serve(tokens)
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, host=9, prefetch_host_share=1.0, max_prefetches=2)
    assert rig.on(1, C) + rig.on(1, B) + rig.on(1, A) > 4
    rig = restarted(backend, max_prefetches=4)
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 4, 4]
    assert [rig.serve(tokens, load=True) for tokens in (A, B, C)] == [8, 8, 8]


@pytest.mark.parametrize("limit", [1, 2, 3, 16])
def test_every_listed_prefix_is_warmed_whatever_the_limit(limit: int) -> None:
    backend = FaultyBackend()
    before = Rig(device=64, host=64, backend=backend)
    prompts = [prompt(2, mark) for mark in range(10)]
    for tokens in prompts:
        before.serve(tokens)
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, max_prefetches=limit)
    assert [rig.on(1, tokens) for tokens in prompts] == [2] * 10


def test_a_prefix_of_any_length_is_warmed() -> None:
    backend, size = FaultyBackend(), 5000
    document = prompt(20, *range(20), size=size)  # 100,000 tokens
    before = Rig(21, 20, backend=backend, size=size)
    before.serve(document)
    before.settle()
    before.tiers.remember()
    before.settle()
    assert restarted(backend, host=20, size=size).on(1, document) == 20


@pytest.mark.parametrize("room", [1, 7, 20])
def test_as_many_prefixes_are_warmed_as_the_host_has_room_for_hottest_first(room: int) -> None:
    backend, size = FaultyBackend(), 5000
    prompts = [prompt(1, mark, size=size) for mark in range(20)]  # 100,000 tokens in all
    before = Rig(21, 20, backend=backend, size=size)
    for times, tokens in enumerate(prompts):
        before.serve(tokens)
        for _ in prompts[times:]:
            before.cache.tree.match(tokens)
    before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, host=room, size=size, prefetch_host_share=1.0)
    assert [rig.on(1, tokens) for tokens in prompts] == [1] * room + [0] * (20 - room)


def test_a_conversation_is_warmed_whole_though_each_turn_adds_little() -> None:
    backend = FaultyBackend()
    before = Rig(device=32, backend=backend)
    whole = prompt(10, *range(10))
    for turns in range(1, 11):
        before.serve(prompt(turns, *range(turns)))
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, prefetch_min_tokens=8, max_prefetches=8)
    assert rig.on(1, whole) == 10


def test_no_list_is_written_while_the_last_one_is_being_written() -> None:
    rig = Rig(backend=FaultyBackend())
    rig.serve(A)
    rig.settle()
    rig.tiers.remember()
    rig.tiers.remember()
    assert len(rig.writers.waiting) == 1
    rig.settle()
    rig.tiers.remember()
    assert len(rig.writers.waiting) == 1


def test_pages_of_requests_are_not_evicted_to_warm_others() -> None:
    backend = FaultyBackend()
    before = Rig(device=32, backend=backend)
    for tokens in (A, B):
        before.serve(tokens)
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = Rig(host=4, backend=backend)
    rig.tiers.warm()
    rig.serve(C)
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [0, 0, 4]


def test_an_empty_host_does_not_replace_the_list_of_another() -> None:
    backend = FaultyBackend()
    before = Rig(backend=backend)
    before.serve(A)
    before.settle()
    before.tiers.remember()
    before.settle()
    empty = Rig(backend=backend)
    empty.tiers.remember()
    empty.settle()
    assert restarted(backend).on(1, A) == 4


def test_warmed_prefixes_keep_their_namespaces() -> None:
    backend = FaultyBackend()
    before = Rig(backend=backend)
    before.serve(A, "a")
    before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend)
    assert (rig.on(1, A, "a"), rig.on(1, A)) == (4, 0)


@pytest.mark.parametrize("how", ["none", "damaged", "of another model", "failing"])
def test_a_damaged_or_missing_list_warms_nothing(how: str) -> None:
    backend = FaultyBackend()
    before = Rig(backend=backend)
    before.serve(A)
    before.settle()
    if how != "none":
        before.tiers.remember()
        before.settle()
    if how == "damaged":
        (note,) = set(backend.stored_keys()) - set(stored_keys(A))
        backend.set_value(note, bytes(len(backend.value(note))))
    if how == "failing":
        backend.instead["get"] = StorageError("io", "on purpose")
    rig = restarted(backend, identity={"weights": "others"} if how == "of another model" else None)
    assert rig.on(1, A) == 0 and not rig.tiers.busy


def test_without_a_store_nothing_is_remembered() -> None:
    rig = Rig()
    rig.tiers.remember()
    rig.tiers.warm()
    assert not rig.tiers.busy
    rig.tiers.close()
