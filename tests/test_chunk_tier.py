"""`ChunkTier`: chunks of host memory that an engine manages, stored and loaded in jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rigs.hand_driven import Clock, FaultyBackend, HandWorkers, make_store

from mainstem.errors import StorageError
from mainstem.integrations.chunk_tier import CHUNK, ChunkTier, Ended
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Store

SIZE = 64
KEYS = [bytes([number]) * 36 for number in range(8)]


def tier(store: Store, copiers: HandWorkers | None = None, buffer_bytes: int = 1 << 20, **options: Any) -> ChunkTier:
    memory = np.arange(16, dtype=np.uint8)[:, None].repeat(SIZE, axis=1)
    made = ChunkTier(store, memory, copiers or HandWorkers(instant=True), buffer_bytes, **options)
    made.memory = memory  # type: ignore[attr-defined]  # for the test
    return made


def content(of: ChunkTier) -> list[int]:
    memory = of.memory  # type: ignore[attr-defined]
    assert (memory == memory[:, :1]).all()
    return [int(number) for number in memory[:, 0]]


def test_what_was_stored_is_found_and_loaded_into_other_chunks() -> None:
    store = make_store(MemoryBackend())
    first = tier(store)
    assert first.look_up(KEYS[0]) is False
    first.store(1, KEYS[:3], [5, 6, 7])
    assert first.busy
    assert first.finished() == [Ended(1, 3, True, 0.0, 3 * SIZE)]
    assert not first.busy and first.counts == {"saved": 3}
    assert first.look_up(KEYS[0]) is True, "an answer is not kept"
    second = tier(store)
    assert [second.look_up(key) for key in KEYS[:4]] == [True, True, True, False]
    second.load(2, KEYS[:3], [1, 2, 3])
    assert second.finished() == [Ended(2, 3, True, 0.0, 3 * SIZE)]
    assert content(second)[:5] == [0, 5, 6, 7, 4]
    assert second.counts == {"loaded": 3}


def test_a_question_is_asked_once_and_never_waited_for() -> None:
    workers, clock = HandWorkers(), Clock()
    asked = tier(make_store(MemoryBackend(), workers, clock, call_timeout_s=5.0))
    assert asked.look_up(KEYS[0]) is None and asked.look_up(KEYS[0]) is None
    assert workers.submitted == 1
    clock.now_s += 5.0
    assert asked.look_up(KEYS[0]) is False
    assert asked.look_up(KEYS[1]) is False, "nobody waits for a slow store"


def test_a_store_is_used_again_after_a_question_whose_answer_nobody_waited_for() -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, call_timeout_s=5.0, breaker_failures=1, breaker_cooldown_s=10.0)
    asked = tier(store)
    assert asked.look_up(KEYS[0]) is None
    clock.now_s += 5.0
    assert asked.look_up(KEYS[0]) is False and store.breaker.open
    clock.now_s += 10.0
    assert asked.look_up(KEYS[1]) is False, "it is tried, but nobody waits for a slow store"
    workers.run_all()
    assert not store.breaker.open and not store.slow
    assert asked.look_up(KEYS[2]) is None


@pytest.mark.parametrize("fault", ["altered", "absent", "io"])
def test_a_chunk_that_cannot_be_read_ends_its_job_there(fault: str) -> None:
    backend = FaultyBackend()
    store = make_store(backend)
    first = tier(store)
    first.store(1, KEYS[:3], [5, 6, 7])
    first.finished()
    key = store.sealer.keys(store.sealer.names(store.sealer.root(b""), KEYS[1], len(KEYS[1])), CHUNK.name)[0]
    if fault == "altered":
        value = backend.value(key)
        backend.set_value(key, value[:-1] + bytes([value[-1] ^ 1]))
    elif fault == "absent":
        backend.delete([key])
    else:
        backend.instead["get"] = StorageError("io", "a test")
    second = tier(store)
    second.load(2, KEYS[:3], [1, 2, 3])
    (ended,) = second.finished()
    good = 0 if fault == "io" else 1
    assert (ended.good, ended.whole) == (good, False)
    assert content(second)[1:4] == [5 if good else 1, 2, 3]
    assert second.counts["not loaded"] == 3 - good and store.faults[fault] == 1


def test_chunks_are_copied_by_workers_and_not_after_the_end_of_their_job() -> None:
    clock, readers, copiers = Clock(), HandWorkers(), HandWorkers()
    backend = MemoryBackend()
    stored = tier(make_store(backend))
    stored.store(1, KEYS[:1], [5])
    stored.finished()
    store = make_store(backend, readers, clock, call_timeout_s=5.0)
    late = tier(store, copiers)
    late.load(1, KEYS[:1], [1])
    clock.now_s += 5.0
    assert [each.whole for each in late.finished()] == [False]
    readers.run_all()
    assert late.finished() == [] and copiers.submitted == 0
    assert content(late)[1] == 1
    store.breaker.succeed()
    late.load(2, KEYS[:1], [1])
    readers.run_all()
    assert late.finished() == [] and content(late)[1] == 1, "a worker copies"
    copiers.run_all()
    assert [each.job for each in late.finished()] == [2] and content(late)[1] == 5


def test_drain_leaves_no_job_and_their_ends_are_returned() -> None:
    copiers, clock, writers = HandWorkers(), Clock(), HandWorkers()

    def sleep(seconds: float) -> None:
        clock.now_s += 1.0
        copiers.run_all()

    store = make_store(MemoryBackend(), HandWorkers(instant=True), clock, writers=writers, call_timeout_s=5.0)
    drained = tier(store, copiers, sleep=sleep)
    drained.store(1, KEYS[:1], [5])
    drained.drain()
    assert [(each.job, each.whole) for each in drained.finished()] == [(1, False)], "the store never answered"


def test_more_than_the_host_has_room_for_ends_without_effect() -> None:
    full = tier(make_store(MemoryBackend(), HandWorkers()), buffer_bytes=2 * (HEADER_BYTES + SIZE))
    full.store(1, KEYS[:2], [1, 2])
    full.store(2, KEYS[2:3], [3])
    full.load(3, KEYS[3:4], [4])
    assert [(each.job, each.good) for each in full.finished()] == [(2, 0), (3, 0)]
    assert full.counts["no room"] == 2
