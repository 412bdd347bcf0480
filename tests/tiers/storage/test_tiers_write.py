"""Writes to storage, with completions and failures driven by hand, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rigs.hand_driven import A, B, C, FaultyBackend, Rig, prompt, stored_keys

from mainstem.errors import StorageError
from mainstem.events.replica import Replica
from mainstem.events.source import Source
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.store import Part, Written


def test_pages_on_the_host_are_written_to_storage() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.poll()
    assert rig.tiers.stats().queued == 0
    rig.end_copy()
    rig.poll()
    assert rig.tiers.stats().queued == 4 and len(rig.writers.waiting) == 1
    rig.writers.run()
    rig.poll()
    assert (rig.tiers.stats().stored, rig.tiers.stats().queued) == (4, 0)
    assert backend.stored_keys() == stored_keys(A)


@pytest.mark.parametrize("refused", [(), (0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_what_a_full_store_refuses_is_not_announced_as_stored(refused: tuple[int, ...]) -> None:
    """One that refuses any of the pages, the first, the last, or all; later it has room for what comes."""
    backend, replica = FaultyBackend(), Replica()
    rig = Rig(backend=backend)
    source = Source(rig.cache.tree, [64, 64], b"a secret of sixteen")
    numbers = iter(range(100))

    def put(keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        taken = [next(numbers) not in refused for _ in keys]
        for key, buffer, good in zip(keys, buffers, taken, strict=True):
            if good:
                MemoryBackend.put(backend, [key], [buffer])
        return taken

    def announced(tokens: Sequence[int]) -> list[bool]:
        replica.apply(source.take())
        hashes = {replica.path(hash_): block.media for hash_, block in replica.blocks.items()}
        return ["STORAGE" in hashes[tuple(tokens[: 2 * at + 2])] for at in range(len(tokens) // 2)]

    backend.instead["put"] = put
    rig.serve(A)
    rig.settle()
    there = [key in backend.stored_keys() for key in stored_keys(A)]
    assert there == [at not in refused for at in range(4)]
    assert announced(A) == [not refused] * 4, "less than is there, but never more"
    assert rig.tiers.stats().faults == ({"full": 1} if refused else {})
    rig.serve(C)
    rig.settle()
    assert announced(C) == [True] * (len(C) // 2)


def test_only_new_pages_are_written() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.poll()
    rig.end_copy()
    rig.poll()
    assert rig.tiers.stats().queued == 2
    rig.settle()
    assert rig.tiers.stats().stored == 6 and len(backend.stored_keys()) == 6
    assert backend.calls.count("put") == 2


def test_pages_are_written_with_their_numbers_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, numbers = Rig(backend=FaultyBackend()), []
    assert rig.store is not None
    write = rig.store.write

    def noting(parts: Sequence[Part], *args: Any, **kwargs: Any) -> StoreCall[Written]:
        numbers.extend(list(part.numbers) for part in parts)
        return write(parts, *args, **kwargs)

    monkeypatch.setattr(rig.store, "write", noting)
    rig.serve(A)
    rig.settle()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.settle()
    assert numbers == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("queue_pages", [8, 11])
def test_a_full_queue_drops_the_newest_and_counts_it(queue_pages: int) -> None:
    rig = Rig(device=32, backend=FaultyBackend(), queue_pages=queue_pages, writes=1)
    for tokens in (A, B, C):
        rig.serve(tokens)
        rig.poll()
        rig.end_copy()
        rig.poll()
    assert (rig.tiers.stats().queued, rig.tiers.stats().write_dropped) == (8, 4)
    assert len(rig.writers.waiting) == 1, "one at a time"
    rig.settle()
    assert (rig.tiers.stats().queued, rig.tiers.stats().stored) == (0, 8)
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 4, 4]


def test_a_write_longer_than_the_queue_is_accepted_when_the_queue_is_empty() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend, queue_pages=3)
    rig.serve(A)
    rig.settle()
    assert len(backend.stored_keys()) == 4
    backend.clear()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.settle()
    assert len(backend.stored_keys()) == 6, "the gap heals"
    assert rig.tiers.stats().write_dropped == 0


def test_a_stuck_store_never_blocks_and_holds_no_more_than_its_queue() -> None:
    rig = Rig(device=64, host=64, backend=FaultyBackend(), queue_pages=8, writes=2, breaker_cooldown_s=1.0)
    for mark in range(10):
        rig.serve(prompt(4, mark))
        rig.poll()
        rig.end_copy()
        rig.poll()
        rig.clock.now_s += 10
    stats = rig.tiers.stats()
    assert stats.queued == 8 and stats.write_dropped == 32
    assert stats.faults["timeout"] == 2
    assert rig.tiers.flush() == 32, "all but the stuck writes"
    rig.settle()


@pytest.mark.parametrize("cause", StorageError.CAUSES)
def test_a_failing_store_loses_the_write_and_nothing_else(cause: str) -> None:
    backend = FaultyBackend()
    backend.always = StorageError(cause, "on purpose")
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    assert rig.tiers.stats().faults == {cause: 1} and rig.tiers.stats().stored == 0
    backend.always = None
    rig.serve(prompt(5, 1, 1, 1, 1, 2))
    rig.settle()
    assert len(backend.stored_keys()) == 5, "the gap heals"


def test_a_prefix_removed_while_its_write_waits_is_not_written() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend, writes=1)
    rig.serve(B)
    rig.serve(A)
    for _ in range(4):
        rig.poll()
        while rig.copies and not rig.copies[0].done():
            rig.end_copy()
    assert rig.tiers.stats().queued == 8
    rig.cache.remove(A[:2])
    rig.settle()
    assert rig.tiers.stats().queued == 0
    assert len(backend.stored_keys()) == 4
    rig.verify()


def test_what_is_removed_is_announced_as_gone_from_storage() -> None:
    """Else a router would send prompts to where storage was said to have them."""
    backend, replica = FaultyBackend(), Replica()
    rig = Rig(backend=backend)
    source = Source(rig.cache.tree, [64, 64], b"a secret of sixteen")
    for tokens in (A, C):
        rig.serve(tokens)
        rig.settle()

    def announced(tokens: Sequence[int]) -> list[bool]:
        replica.apply(source.take())
        hashes = {replica.path(hash_): block.media for hash_, block in replica.blocks.items()}
        return ["STORAGE" in hashes.get(tuple(tokens[: 2 * at + 2]), ()) for at in range(len(tokens) // 2)]

    assert announced(A) == [True] * (len(A) // 2) and announced(C) == [True] * (len(C) // 2)
    rig.cache.remove(C[:2])
    rig.settle()
    gone = [key not in backend.stored_keys() for key in stored_keys(C)]
    assert all(gone) and not any(announced(C))
    assert announced(A) == [key in backend.stored_keys() for key in stored_keys(A)]
