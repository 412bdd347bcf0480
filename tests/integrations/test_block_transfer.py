"""`Transfers`: blocks between an engine's memory and a store, whatever the store does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from rigs.hand_driven import Clock, FaultyBackend, HandWorkers, make_store

from mainstem.errors import BadArgument, StorageError
from mainstem.integrations.block_plan import GroupBlocks, Job
from mainstem.integrations.block_transfer import Results, Transfers
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Store

FULL, WINDOW = Row(0, "full 0", exact=False), Row(1, "window 1", exact=False)
LAYER_BYTES = 8
BLOCK_BYTES = {FULL: 2 * LAYER_BYTES, WINDOW: LAYER_BYTES}
ROOM = 100 * (HEADER_BYTES + 2 * LAYER_BYTES)


class Memory:
    """An engine's memory: 64 blocks of two layers, and 64 of one."""

    def __init__(self, byte: int = 0) -> None:
        self.content = {
            row: np.full((64, size), byte, dtype=np.uint8) + np.arange(64, dtype=np.uint8)[:, None]
            for row, size in BLOCK_BYTES.items()
        }
        self.gathered: list[str] = []

    def rows(self) -> Sequence[Row]:
        return list(BLOCK_BYTES)

    def layers(self, row: Row) -> Sequence[str]:
        return ["layer 0", "layer 1"] if row == FULL else ["layer 2"]

    def block_bytes(self, row: Row) -> int:
        return BLOCK_BYTES[row]

    def gather(self, row: Row, layer: str, blocks: Sequence[int], slots: NDArray[np.uint8]) -> None:
        self.gathered.append(layer)
        at = self.layers(row).index(layer) * LAYER_BYTES
        slots[:, at : at + LAYER_BYTES] = self.content[row][list(blocks), at : at + LAYER_BYTES]

    def scatter(self, row: Row, blocks: Sequence[int], slots: NDArray[np.uint8]) -> None:
        self.content[row][list(blocks)] = slots


def name(number: int) -> bytes:
    return bytes([number]) * 32


def part(row: Row, blocks: Sequence[int], first: int = 0) -> GroupBlocks:
    numbers = range(first, first + len(blocks))
    return GroupBlocks(row, [name(number) for number in numbers], list(blocks), [number + 1 for number in numbers])


def save(transfers: Transfers, *jobs: Job) -> None:
    transfers.begin(jobs)
    transfers.flush()


def saved(store: Store, count: int = 6) -> Transfers:
    """Saves `count` blocks of both rows from memory that begins with 100."""
    transfers = Transfers(store, Memory(100), ROOM)
    blocks = range(1, count + 1)
    save(transfers, Job("a", (part(FULL, blocks), part(WINDOW, blocks))))
    transfers.poll()
    assert transfers.counts == {"saved": 2 * count}
    return transfers


def test_what_was_saved_is_loaded_into_other_blocks() -> None:
    store = make_store(MemoryBackend())
    saved(store)
    memory = Memory()
    transfers = Transfers(store, memory, ROOM)
    transfers.load([Job("b", (part(FULL, [11, 12, 13, 14, 15, 16]), part(WINDOW, [20, 21], first=4)))])
    assert transfers.poll() == Results(loaded={"b"})
    assert memory.content[FULL][11:17].tolist() == [[100 + at] * 16 for at in range(1, 7)]
    assert memory.content[WINDOW][20:22].tolist() == [[105] * 8, [106] * 8]
    assert memory.content[FULL][17].tolist() == [17] * 16
    assert transfers.poll() == Results(), "it is reported once"


def test_a_save_copies_layers_as_they_are_computed_and_the_rest_at_the_end_of_the_step() -> None:
    store, memory = make_store(MemoryBackend()), Memory(100)
    transfers = Transfers(store, memory, ROOM)
    transfers.begin([Job("a", (part(FULL, [1]), part(WINDOW, [2], first=1)))])
    assert memory.gathered == []
    transfers.copy("layer 0")
    transfers.copy("layer 7")
    transfers.copy("layer 0")
    assert memory.gathered == ["layer 0"]
    transfers.flush()
    assert sorted(memory.gathered) == ["layer 0", "layer 1", "layer 2"]
    transfers.flush()
    assert len(memory.gathered) == 3


def test_an_engine_may_overwrite_its_blocks_after_the_step() -> None:
    workers = HandWorkers()
    store, memory = make_store(MemoryBackend(), HandWorkers(instant=True), writers=workers), Memory(100)
    transfers = Transfers(store, memory, ROOM)
    save(transfers, Job("a", (part(FULL, [1]),)))
    memory.content[FULL][1] = 0
    workers.run_all()
    transfers.load([Job("b", (part(FULL, [9]),))])
    transfers.poll()
    assert memory.content[FULL][9].tolist() == [101] * 16


@pytest.mark.parametrize("fault", ["altered", "misdirected", "length", "absent", "io", "crashed"])
def test_a_block_that_cannot_be_read_fails_it_and_those_after_it(fault: str) -> None:
    backend = FaultyBackend()
    store = make_store(backend)
    saved(store)
    keys = store.sealer.keys([name(2), name(3)], FULL.name)
    value = bytearray(backend.value(keys[0]))
    if fault == "altered":
        backend.set_value(keys[0], bytes([*value[:-1], value[-1] ^ 1]))
    elif fault == "misdirected":
        backend.set_value(keys[0], backend.value(keys[1]))
    elif fault == "length":
        backend.set_value(keys[0], bytes(value[:-1]))
    elif fault == "absent":
        backend.delete(keys[:1])
    else:
        backend.instead["get"] = StorageError("io", "a test") if fault == "io" else ValueError("a test")
    memory = Memory()
    transfers = Transfers(store, memory, ROOM)
    transfers.load([Job("b", (part(FULL, [11, 12, 13, 14]), part(WINDOW, [20])))])
    whole = fault in ("io", "crashed")
    lost = {11, 12, 13, 14, 20} if whole else {13, 14, 20}
    assert transfers.poll() == Results(loaded={"b"}, failed={"b"}, failed_blocks=lost)
    assert store.faults[fault] >= 1
    assert memory.content[FULL][13].tolist() == [13] * 16, "nothing that failed was copied"
    assert transfers.counts["not loaded"] == len(lost)


def test_a_read_that_hangs_fails_in_time_and_keeps_its_slots_until_it_returns() -> None:
    workers, clock, backend = HandWorkers(), Clock(), MemoryBackend()
    saved(make_store(backend))
    store = make_store(backend, workers, clock, call_timeout_s=5.0)
    memory = Memory()
    transfers = Transfers(store, memory, 4 * (HEADER_BYTES + 2 * LAYER_BYTES))
    transfers.load([Job("b", (part(FULL, [11, 12]),)), Job("c", (part(FULL, [13, 14]),))])
    assert transfers.poll() == Results()
    clock.now_s += 5.0
    assert transfers.poll() == Results({"b", "c"}, {"b", "c"}, {11, 12, 13, 14})
    transfers.load([Job("d", (part(FULL, [15, 16]),))])
    assert transfers.poll() == Results(), "no slot is free"
    clock.now_s += 5.0
    assert transfers.poll() == Results({"d"}, {"d"}, {15, 16}), "it does not wait for ever"
    assert store.faults["host_room"] == 1
    workers.run_all()
    assert transfers.poll() == Results()
    assert memory.content[FULL][11:17].tolist() == [[at] * 16 for at in range(11, 17)], "late pages are not copied"
    store.breaker.succeed()
    transfers.load([Job("e", (part(FULL, [15, 16]),))])
    workers.run_all()
    assert transfers.poll() == Results(loaded={"e"}), "the slots are free again"


@pytest.mark.parametrize("first", [0, 1])
def test_a_read_that_outlives_its_load_keeps_its_slots_until_it_returns(first: int) -> None:
    """Else it would write its blocks over those of the next load, whose blocks would be another prompt's."""
    workers, backend = HandWorkers(), FaultyBackend()
    store = make_store(backend)
    saved(store)
    backend.delete(store.sealer.keys([name(0)], FULL.name))
    store, memory = make_store(backend, workers, batch_pages=2, batches=2), Memory()
    transfers = Transfers(store, memory, 4 * (HEADER_BYTES + 2 * LAYER_BYTES))
    transfers.load([Job("b", (part(FULL, [11, 12, 13, 14]),))])
    workers.run()
    assert transfers.poll() == Results({"b"}, {"b"}, {11, 12, 13, 14})
    transfers.check()
    transfers.load([Job("c", (part(FULL, [15, 16], first=4),))])
    workers.run(1 - first)
    workers.run()
    assert transfers.poll() == Results(loaded={"c"})
    assert memory.content[FULL][11:17].tolist() == [[at] * 16 for at in range(11, 15)] + [[105] * 16, [106] * 16]
    transfers.check()


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_no_more_reads_run_at_once_than_the_store_is_given(batches: int) -> None:
    workers, backend = HandWorkers(), MemoryBackend()
    saved(make_store(backend))
    transfers = Transfers(make_store(backend, workers, batch_pages=1, batches=batches), Memory(), ROOM)
    transfers.load([Job(job, (part(FULL, [11, 12, 13]),)) for job in ("b", "c")])
    ended = set[str]()
    while workers.waiting:
        assert len(workers.waiting) == min(batches, 6 - workers.submitted + len(workers.waiting))
        workers.run()
        ended |= transfers.poll().loaded
        transfers.check()
    assert ended == {"b", "c"} and workers.submitted == 6


def test_a_load_of_more_blocks_than_slots_is_read_in_pieces() -> None:
    store = make_store(MemoryBackend())
    saved(store)
    memory = Memory()
    transfers = Transfers(store, memory, 4 * (HEADER_BYTES + 2 * LAYER_BYTES))
    transfers.load([Job("b", (part(FULL, [11, 12, 13, 14, 15, 16]),))])
    results = [transfers.poll() for _ in range(4)]
    assert [each.loaded for each in results if each.loaded] == [{"b"}]
    assert memory.content[FULL][11:17].tolist() == [[100 + at] * 16 for at in range(1, 7)]


def test_a_load_that_waited_for_room_and_got_it_goes_on() -> None:
    workers, clock, backend = HandWorkers(), Clock(), MemoryBackend()
    saved(make_store(backend))
    store = make_store(backend, workers, clock, call_timeout_s=5.0, batch_pages=1)
    transfers = Transfers(store, Memory(), 2 * (HEADER_BYTES + 2 * LAYER_BYTES))
    transfers.load([Job("a", (part(FULL, [11, 12]),)), Job("b", (part(FULL, [13, 14, 15, 16]),))])
    for _ in range(5):  # each wait is shorter than what a call may take, all together are longer
        clock.now_s += 4.0
        workers.run()
        assert not transfers.poll().failed
        transfers.check()
    workers.run_all()
    assert transfers.poll() == Results(loaded={"b"})


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_store_does_each_job_ends_once_and_each_block_is_accounted_for(seed: int) -> None:
    draw, clock, workers, writers = random.Random(seed), Clock(), HandWorkers(), HandWorkers()
    backend = FaultyBackend(draw.choice((None, 20 * (HEADER_BYTES + BLOCK_BYTES[FULL]))))
    size = draw.choice((2, 5, 16))
    store = make_store(
        backend, workers, clock, writers=writers, call_timeout_s=5.0, batch_pages=draw.choice((1, 3)),
        batches=draw.choice((1, 2, 4)), breaker_failures=1000,
    )  # fmt: skip
    memory = Memory(100)
    transfers = Transfers(store, memory, size * (HEADER_BYTES + 2 * LAYER_BYTES))
    loads: dict[str, int] = {}
    ended, reports = Counter[str](), Counter[int]()
    asked = kept = wanted = 0
    for turn in range(200):
        clock.now_s += draw.choice((0.0, 0.1, 2.0))
        backend.instead = {"get": StorageError("io", "a test")} if draw.random() < 0.1 else {}
        match draw.randrange(6):
            case 0:
                blocks = draw.sample(range(60), draw.randrange(1, 6))
                save(transfers, Job("a", (part(draw.choice((FULL, WINDOW)), blocks, draw.randrange(40)),), asked))
                asked, kept = asked + 1, kept + len(blocks)
            case 1:
                blocks = draw.sample(range(60), draw.randrange(1, 6))
                loads[f"r{turn}"] = len(blocks)
                wanted += len(blocks)
                transfers.load([Job(f"r{turn}", (part(draw.choice((FULL, WINDOW)), blocks, draw.randrange(40)),))])
            case 2 | 3:
                queue = draw.choice((workers, writers))
                if queue.waiting:
                    queue.run(draw.randrange(len(queue.waiting)))
            case _:
                results = transfers.poll()
                ended.update(results.loaded)
                reports.update(results.saved.keys())
                assert results.failed <= results.loaded
        transfers.check()
    for _ in range(100):
        clock.now_s += 1.0
        workers.run_all()
        writers.run_all()
        results = transfers.poll()
        ended.update(results.loaded)
        reports.update(results.saved.keys())
    transfers.check()
    assert ended == Counter(dict.fromkeys(loads, 1)) and reports == Counter(dict.fromkeys(range(asked), 1))
    counts = transfers.counts
    assert counts["loaded"] + counts["not loaded"] == wanted
    assert counts["saved"] <= kept - counts["no room"] <= kept
    assert transfers._slots.free == size


def test_saves_of_a_slow_store_are_dropped_and_leave_room_for_loads() -> None:
    backend, workers = MemoryBackend(), HandWorkers()
    saved(make_store(backend))
    store = make_store(backend, HandWorkers(instant=True), writers=workers)
    transfers = Transfers(store, Memory(), 8 * (HEADER_BYTES + 2 * LAYER_BYTES))
    save(transfers, Job("a", (part(FULL, [1, 2, 3, 4, 5, 6], first=40),)))
    save(transfers, Job("b", (part(FULL, [7], first=50),)))
    assert transfers.counts["no room"] == 3
    transfers.load([Job("c", (part(FULL, [11, 12, 13, 14]),))])
    assert transfers.poll() == Results(loaded={"c"}, saved={0: False})
    workers.run_all()
    transfers.poll()
    assert transfers.counts["saved"] == 4
    save(transfers, Job("b", (part(FULL, [7], first=50),)))
    assert transfers.counts["no room"] == 3


def test_a_write_that_waits_for_others_is_not_late() -> None:
    clock, workers = Clock(), HandWorkers()
    store = make_store(MemoryBackend(), HandWorkers(instant=True), clock, writers=workers, call_timeout_s=5.0)
    transfers = Transfers(store, Memory(), ROOM)
    save(transfers, Job("a", (part(FULL, [1]),)))
    clock.now_s += 60.0
    transfers.poll()
    workers.run_all()
    transfers.poll()
    assert transfers.counts["saved"] == 1 and not store.faults and not store.slow


def test_a_save_is_reported_once_storage_has_all_of_it() -> None:
    backend, workers = FaultyBackend(), HandWorkers()
    store = make_store(backend, HandWorkers(instant=True), writers=workers)
    transfers = Transfers(store, Memory(), 8 * (HEADER_BYTES + 2 * LAYER_BYTES))
    save(transfers, Job("a", (part(FULL, [1]), part(WINDOW, [1])), 7), Job("b", (part(FULL, [2, 3], first=2),), 8))
    assert transfers.poll().saved == {}, "nothing has been written"
    workers.run_all()
    assert transfers.poll().saved == {7: True, 8: True}
    assert transfers.poll().saved == {}, "it is reported once"
    save(transfers, Job("a", (part(FULL, [1]),), 9), Job("c", (part(FULL, [1, 2, 3, 4, 5], first=10),), 10))
    save(transfers, Job("d", (part(FULL, [6], first=20),), 11))
    workers.run_all()
    assert transfers.poll().saved == {11: False, 9: True, 10: False}, "there was no room for all of 10, for none of 11"
    backend.instead["put"] = StorageError("io", "a test")
    save(transfers, Job("a", (part(FULL, [1], first=30),), 12))
    workers.run_all()
    assert transfers.poll().saved == {12: False}


def test_closing_ends_the_writes_that_are_queued() -> None:
    backend, workers = FaultyBackend(), HandWorkers()
    transfers = Transfers(make_store(backend, writers=workers), Memory(), ROOM)
    save(transfers, Job("a", (part(FULL, [1, 2]),)))
    transfers.close(1.0)
    assert transfers.counts["saved"] == 2


def test_memory_for_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(BadArgument, match="two blocks"):
        Transfers(make_store(MemoryBackend()), Memory(), HEADER_BYTES + 20)
