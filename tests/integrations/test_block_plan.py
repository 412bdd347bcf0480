"""`Planner`: which blocks of a request are loaded and saved, for groups of every kind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from rigs.hand_driven import Clock, FaultyBackend, HandWorkers, make_store

from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.errors import BadArgument
from mainstem.integrations.block_plan import GroupBlocks, Job, LayerGroup, Planner, StepPlan
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import HEADER_BYTES
from mainstem.tiers.storage.store import Part, Store

BLOCK = 4
FULL = Row(0, "full 0", exact=False)


def group(component: Component, number: int = 0, block_tokens: int = BLOCK, offered: bool = False) -> LayerGroup:
    return LayerGroup(Row(number, f"{component.name} {number}", exact=False), component, block_tokens, offered)


def hashes(tokens: int, seed: str = "a", size: int = BLOCK) -> list[bytes]:
    """Returns chained hashes of the whole blocks of a prompt, as an engine has them."""
    found = [hashlib.sha256(seed.encode()).digest()]
    for _ in range(tokens // size):
        found.append(hashlib.sha256(found[-1]).digest())
    return found[1:]


def planner(*groups: LayerGroup, store: Store | None = None, hash_tokens: int = BLOCK) -> Planner:
    return Planner([store or make_store(MemoryBackend())], groups or [group(Full())], hash_tokens)


def tables(blocks: int, groups: int = 1, first: int = 1) -> list[list[int]]:
    """Returns block tables with ids of their own."""
    return [list(range(first + 100 * at, first + 100 * at + blocks)) for at in range(groups)]


def blocks_of(jobs: Sequence[Job]) -> list[tuple[str, list[tuple[int, list[int]]]]]:
    return [(job.request, [(part.row.number, part.blocks) for part in job.parts]) for job in jobs]


def carry_out(store: Store, plan: StepPlan) -> None:
    """Writes what a plan saves."""
    for job in plan.saves:
        parts = [
            Part(part.row, part.names, [memoryview(bytearray(HEADER_BYTES + 8)) for _ in part.names])
            for part in job.parts
        ]
        call = store.write(parts)
        assert call.done() and call.value.whole


def compute(
    plans: Planner, store: Store, request: str, tokens: int, groups: int = 1, namespace: bytes = b""
) -> tuple[GroupBlocks, ...]:
    """Begins a request, computes its prompt in one step and saves it; returns what of each group."""
    plans.begin(request, hashes(tokens), namespace)
    plans.scheduled(request, 0, tokens, tables(-(-tokens // BLOCK), groups))
    plan = plans.take()
    carry_out(store, plan)
    return plan.saves[0].parts


def first_saved(tokens: int, *groups: LayerGroup) -> tuple[Planner, Store, FaultyBackend, tuple[GroupBlocks, ...]]:
    """Returns a planner, with what it saved of a first request, and where."""
    backend = FaultyBackend()
    store = make_store(backend)
    plans = planner(*groups, store=store)
    return plans, store, backend, compute(plans, store, "first", tokens, max(len(groups), 1))


def test_what_was_saved_is_a_hit_but_for_the_last_token() -> None:
    plans, _, _, (saved,) = first_saved(12)
    assert saved.blocks == [1, 2, 3]
    plans.begin("second", hashes(12))
    assert plans.hit("second", 0, 12) == 8, "the last token is computed"
    plans.begin("third", hashes(13))
    assert plans.hit("third", 0, 13) == 12
    assert plans.hit("third", 4, 13) == 8, "what the engine has itself is not counted"
    plans.allocated("third", 8, tables(4))
    assert blocks_of(plans.take().loads) == [("third", [(0, [2, 3])])]


def test_a_hit_ends_where_a_block_is_missing() -> None:
    plans, store, backend, (saved,) = first_saved(20)
    backend.delete(store.sealer.keys([saved.names[2]], saved.row.name))
    plans.begin("second", hashes(20))
    assert plans.hit("second", 0, 20) == 8


def test_other_prefixes_namespaces_and_epochs_share_nothing() -> None:
    store = make_store(MemoryBackend())
    plans = planner(store=store)
    compute(plans, store, "first", 12, namespace=b"adapter")
    for name, prompt, namespace in [("prefix", "b", b"adapter"), ("namespace", "a", b""), ("other", "a", b"adapters")]:
        plans.begin(name, hashes(12, prompt), namespace)
        assert plans.hit(name, 0, 13) == 0, name
    plans.begin("same", hashes(12), b"adapter")
    assert plans.hit("same", 0, 13) == 12
    plans.forget(b"sixteen random b")
    plans.begin("later", hashes(12), b"adapter")
    assert plans.hit("later", 0, 13) == 0


def test_an_epoch_and_a_namespace_are_told_apart() -> None:
    store = make_store(MemoryBackend())
    plans = planner(store=store)
    plans.forget(b"ab")
    compute(plans, store, "first", 8, namespace=b"c")
    plans.forget(b"a")
    plans.begin("second", hashes(8), b"bc")
    assert plans.hit("second", 0, 9) == 0


def test_a_store_that_has_not_answered_is_asked_again_and_never_blocks() -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, call_timeout_s=5.0, breaker_failures=10)
    plans = planner(store=store)
    plans.begin("a", hashes(8))
    assert plans.hit("a", 0, 9) is None
    assert plans.hit("a", 0, 9) is None and workers.submitted == 1, "one question"
    clock.now_s += 5.0
    assert plans.hit("a", 0, 9) == 0, "its time is over"
    plans.begin("b", hashes(8))
    assert plans.hit("b", 0, 9) == 0 and workers.submitted == 2, "nobody waits for a slow store, but it is asked"


@pytest.mark.parametrize("why", ["it is slow", "the request has ended"])
def test_a_store_is_used_again_after_a_question_whose_answer_nobody_waited_for(why: str) -> None:
    workers, clock = HandWorkers(), Clock()
    store = make_store(MemoryBackend(), workers, clock, call_timeout_s=5.0, breaker_failures=1, breaker_cooldown_s=10.0)
    plans = planner(store=store)
    plans.begin("a", hashes(8))
    assert plans.hit("a", 0, 9) is None
    clock.now_s += 5.0
    assert plans.hit("a", 0, 9) == 0 and store.breaker.open and store.slow
    workers.run_all()
    clock.now_s += 10.0
    assert not store.slow, "the late call has returned"
    if why == "it is slow":
        store.calls.gave_up(5.0)
    plans.begin("b", hashes(8))
    assert plans.hit("b", 0, 9) == (0 if why == "it is slow" else None)
    plans.end("b")
    workers.run_all()
    assert not store.breaker.open and not store.slow, "the call that was tried has succeeded"
    plans.begin("c", hashes(8))
    assert plans.hit("c", 0, 9) is None and workers.waiting


def test_an_answer_is_used_once_in_a_life() -> None:
    plans = first_saved(12)[0]
    plans.begin("second", hashes(12))
    assert plans.hit("second", 0, 13) == 12
    assert plans.hit("second", 0, 13) == 12, "no room yet: nothing was allocated"
    plans.allocated("second", 12, tables(4))
    plans.allocated("second", 0, tables(4))
    assert len(plans.take().loads) == 1
    assert plans.hit("second", 0, 13) == 0, "the load failed: it is not tried again"
    assert plans.hit("second", 0, 13, life=1) == 12, "preempted: a new life"


def test_it_asks_again_when_the_engine_has_lost_what_it_had() -> None:
    plans = first_saved(12)[0]
    plans.begin("second", hashes(12))
    assert plans.hit("second", 8, 13) == 4
    assert plans.hit("second", 0, 13) == 12


def test_blocks_are_saved_once_as_they_become_whole() -> None:
    plans = planner()
    live = hashes(8)
    plans.begin("a", live)
    saved = []
    for computed, end in [(0, 6), (6, 8), (8, 9), (9, 12), (12, 13)]:
        if end == 12:
            live += hashes(12)[2:]
        plans.scheduled("a", computed, end, tables(4))
        saved += [part.blocks for job in plans.take().saves for part in job.parts]
    assert saved == [[1], [2], [3]]


def test_a_block_whose_tokens_are_not_all_known_is_not_saved() -> None:
    plans = planner()
    plans.begin("a", hashes(4))
    plans.scheduled("a", 0, 12, tables(3))
    assert blocks_of(plans.take().saves) == [("a", [(0, [1])])], "two blocks have no hash: drafts, or tokens in flight"


def test_what_a_hit_has_brought_is_not_saved_but_what_is_computed_again_is() -> None:
    plans = first_saved(16)[0]
    plans.begin("second", hashes(16))
    assert plans.hit("second", 0, 17) == 16
    plans.allocated("second", 16, tables(5))
    plans.scheduled("second", 16, 17, tables(5))
    assert not plans.take().saves
    plans.scheduled("second", 8, 17, tables(5))
    assert blocks_of(plans.take().saves) == [("second", [(0, [3, 4])])]


def test_a_window_needs_its_last_positions_only() -> None:
    plans, store, backend, (_, window) = first_saved(20, group(Full()), group(Window(6), 1))
    assert window.blocks == [101, 102, 103, 104, 105]
    backend.delete(store.sealer.keys(window.names[:3], window.row.name))
    plans.begin("second", hashes(20))
    assert plans.hit("second", 0, 21) == 20, "positions 14 to 19 are in blocks 3 and 4"
    backend.delete(store.sealer.keys(window.names[3:4], window.row.name))
    plans.begin("third", hashes(20))
    assert plans.hit("third", 0, 21) == 0
    plans.begin("fourth", hashes(20))
    assert plans.hit("fourth", 16, 21) == 4, "the engine has what the window needs before"
    plans.allocated("fourth", 4, [[1, 2, 3, 4, 5], [0, 0, 0, 104, 105]])
    assert blocks_of(plans.take().loads) == [("fourth", [(0, [5]), (1, [105])])]


def test_blocks_that_the_engine_does_not_keep_are_neither_loaded_nor_saved() -> None:
    plans = first_saved(16, group(Full()), group(Window(4), 1))[0]
    plans.begin("second", hashes(16))
    assert plans.hit("second", 0, 17) == 16
    plans.allocated("second", 16, [[1, 2, 3, 4, 5], [0, 0, 0, 104, 105]])
    assert blocks_of(plans.take().loads) == [("second", [(0, [1, 2, 3, 4]), (1, [104])])]
    plans.begin("third", hashes(16))
    plans.scheduled("third", 8, 16, [[1, 2, 3, 4], [0, 0, 0, 104]])
    assert blocks_of(plans.take().saves) == [("third", [(0, [3, 4]), (1, [104])])]


def test_a_chunk_needs_nothing_at_its_boundary() -> None:
    plans, store, backend, (_, chunked) = first_saved(16, group(Full()), group(Chunked(8), 1))
    backend.delete(store.sealer.keys(chunked.names, chunked.row.name))
    plans.begin("second", hashes(16))
    assert plans.hit("second", 0, 17) == 16
    plans.begin("third", hashes(16))
    assert plans.hit("third", 0, 15) == 8, "12 would need the block from 8 on"


def test_a_state_is_that_of_the_last_position_and_is_handed_over() -> None:
    store = make_store(MemoryBackend())
    plans = planner(group(Full()), group(State(), 1, offered=True), store=store)
    plans.begin("first", hashes(16))
    plans.scheduled("first", 0, 16, tables(4, 2))
    plans.state("first", 1, 107, 8)
    plans.state("first", 1, 0, 12)
    plans.state("first", 1, 108, 10)
    plans.state("first", 0, 109, 4)
    plans.state("unknown", 1, 110, 4)
    plan = plans.take()
    assert blocks_of(plan.saves) == [("first", [(0, [1, 2, 3, 4]), (1, [107])])]
    carry_out(store, plan)
    plans.begin("second", hashes(16))
    assert plans.hit("second", 0, 17) == 8
    plans.allocated("second", 8, [[1, 2, 3], [0, 120, 121]])
    assert blocks_of(plans.take().loads) == [("second", [(0, [1, 2]), (1, [120])])]


def test_groups_with_longer_blocks_end_hits_at_their_boundaries() -> None:
    store = make_store(MemoryBackend())
    plans = planner(group(Full()), group(Full(), 1, block_tokens=8), store=store)
    plans.begin("first", hashes(20))
    plans.scheduled("first", 0, 20, [[1, 2, 3, 4, 5], [101, 102, 103]])
    plan = plans.take()
    assert blocks_of(plan.saves) == [("first", [(0, [1, 2, 3, 4, 5]), (1, [101, 102])])]
    carry_out(store, plan)
    plans.begin("second", hashes(20))
    assert plans.hit("second", 0, 21) == 16
    plans.allocated("second", 16, [[1, 2, 3, 4, 5], [101, 102, 103]])
    assert blocks_of(plans.take().loads) == [("second", [(0, [1, 2, 3, 4]), (1, [101, 102])])]


@pytest.mark.parametrize("lacking", range(3))
def test_a_hit_needs_the_blocks_of_all_ranks(lacking: int) -> None:
    """Each of three ranks has lost another block; then one of them, whichever it is, never had any."""
    backend = FaultyBackend()
    ranks = [make_store(backend, identity={"tp_rank": rank, "tp_size": 3}) for rank in range(3)]
    plans = Planner(ranks, [group(Full())], BLOCK)
    plans.begin("first", hashes(20))
    plans.scheduled("first", 0, 20, tables(5))
    plan = plans.take()
    for at, store in enumerate(ranks):
        if at != lacking:
            carry_out(store, plan)
    plans.begin("second", hashes(20))
    assert plans.hit("second", 0, 21) == 0
    carry_out(ranks[lacking], plan)
    plans.begin("third", hashes(20))
    assert plans.hit("third", 0, 21) == 20
    (part,) = plan.saves[0].parts
    for at, store in enumerate(ranks):
        backend.delete(store.sealer.keys([part.names[1 + (at + lacking) % 3]], part.row.name))
    plans.begin("fourth", hashes(20))
    assert plans.hit("fourth", 0, 21) == 4


def test_a_save_has_a_number_and_says_where_its_blocks_end() -> None:
    plans = planner(group(Full()), group(State(), 1, offered=True), group(Window(4), 2, block_tokens=8))
    plans.begin("a", hashes(16))
    plans.scheduled("a", 0, 16, [[1, 2, 3, 4], [0, 0, 0, 104], [0, 202]])
    plans.state("a", 1, 104, 16)
    (first,) = plans.take().saves
    assert [(part.row.number, part.ends) for part in first.parts] == [(0, [4, 8, 12, 16]), (2, [16]), (1, [16])]
    plans.begin("b", hashes(8, "b"))
    plans.scheduled("b", 0, 8, [[1, 2], [0, 0], [0]])
    assert plans.take().saves[0].number > first.number


def test_a_request_that_ends_leaves_what_it_has_planned() -> None:
    plans = planner()
    plans.begin("a", hashes(8))
    plans.scheduled("a", 0, 8, tables(2))
    plans.end("a")
    plans.end("a")
    assert blocks_of(plans.take().saves) == [("a", [(0, [1, 2])])]
    assert plans.take() == StepPlan()


def test_a_block_that_is_no_multiple_of_the_hash_is_refused() -> None:
    with pytest.raises(BadArgument, match="multiple of 3"):
        planner(hash_tokens=3)
    with pytest.raises(BadArgument, match="at least one group"):
        Planner([make_store(MemoryBackend())], [], BLOCK)
