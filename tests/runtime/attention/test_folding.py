"""Calls of a batch: each query sees each of its keys in one call, and no other keys."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mainstem.runtime.attention.folding import CUT_BYTES, FOLD_BYTES, Call, Fold, fold
from mainstem.runtime.attention.paged import Extent, plan_batch
from mainstem.runtime.memory.kv import KVPool, KVShape
from tests.rigs.batches import Batch, batches

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = 3
SHAPE = KVShape(1, 2, 4, 4)


def ids_of(index: slice | torch.Tensor) -> list[int]:
    return list(range(index.start, index.stop)) if isinstance(index, slice) else [int(i) for i in index]


def expected_slots(batch: Batch) -> list[Counter[int]]:
    """The slots of the keys that each row sees, by the rule itself."""
    rows = []
    for extent in batch.extents:
        for position in range(extent.start, extent.end):
            end = position + 1
            for low, high in extent.regions:
                if low <= position < high:
                    end = min(high, extent.end)
            begin = batch.component.seen_from(position)
            rows.append(Counter(batch.pool.slots(extent.page_table, begin, end).tolist()))
    return rows


def seen_slots(batch: Batch, folded: Fold) -> tuple[list[Counter[int]], list[set[int]]]:
    """The slots that each row sees in the calls, and where its results go: -1 if they are whole."""
    seen: list[Counter[int]] = [Counter() for _ in range(batch.tokens)]
    places: list[set[int]] = [set() for _ in range(batch.tokens)]
    new = np.concatenate([batch.pool.slots(e.page_table, e.start, e.end) for e in batch.extents])
    for call in folded.calls:
        rows = ids_of(call.rows)
        into = [-1] * len(rows) if call.places is None else ids_of(call.places)
        by_group = np.array(rows).reshape(call.groups, -1)
        for at, (row, place) in enumerate(zip(rows, into, strict=True)):
            if place in places[row]:
                continue  # it is there again, to fill its group
            places[row].add(place)
            seen[row] += Counter(_slots_of(call, by_group, new, *divmod(at, by_group.shape[1])))
    return seen, places


def _slots_of(call: Call, rows: NDArray[np.int64], new: NDArray[np.int64], group: int, at: int) -> list[int]:
    if call.slots is None:
        return [int(new[row]) for row in rows[group, : at + 1]]
    slots = np.array(ids_of(call.slots)).reshape(call.groups, -1)[group]
    if call.mask is None:
        return [int(slot) for slot in slots]
    mask = call.mask.expand(call.groups, 1, rows.shape[1] * GROUP, len(slots))[group, 0]
    of_heads = mask[at * GROUP : (at + 1) * GROUP]
    assert torch.equal(of_heads, of_heads[:1].expand_as(of_heads)), "all heads of a group see the same"
    return [int(slot) for slot in slots[(of_heads[0] == 0).numpy()]]


def folds(batch: Batch, partial: bool = False, causal: bool = True) -> Fold:
    plan = plan_batch([batch.written(extent) for extent in batch.extents], batch.pool, batch.component)
    with batch.settings():
        return fold(plan, range(len(batch.extents)), GROUP, partial, causal)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batches(SHAPE), st.booleans(), st.booleans())
def test_each_query_sees_each_of_its_keys_once(batch: Batch, partial: bool, causal: bool) -> None:
    folded = folds(batch, partial, causal)
    seen, places = seen_slots(batch, folded)
    assert seen == expected_slots(batch)
    for call in folded.calls:
        assert call.slots is not None or (causal and call.places is None)
    merged = ids_of(folded.merged)
    for row, into in enumerate(places):
        if into == {-1}:
            assert row not in merged and not partial
        else:
            levels, index = np.divmod(sorted(into), folded.rows)
            assert set(index) == {merged.index(row)}
            assert levels.tolist() == list(range(len(into))) and len(into) <= folded.levels


@settings(max_examples=200, deadline=None, derandomize=True)
@given(batches(SHAPE))
def test_no_call_hides_all_of_its_keys_from_a_query(batch: Batch) -> None:
    """The log-sum-exp of nothing is -inf, but PyTorch's kernel returns 0."""
    for call in folds(batch).calls:
        if call.mask is not None:
            assert (call.mask == 0).any(-1).all()


# ---------------------------------------------------------------- what is worth a call


BF16 = KVShape(1, 3, 64, 64)  # 768 bytes a position
SHARED, LONG = FOLD_BYTES // 768, CUT_BYTES // 768


def calls_of(tables: list[list[int]], starts: list[int], tokens: int = 1, size: int = 16) -> tuple[Call, ...]:
    pool = KVPool(BF16, 2000, size, torch.bfloat16)
    extents = [Extent(tokens, at, np.array(ids, dtype=np.int32)) for ids, at in zip(tables, starts, strict=True)]
    return fold(plan_batch(extents, pool), range(len(extents)), GROUP, False, True).calls


def test_requests_behind_one_prefix_are_two_calls() -> None:
    """The queries of all with the prefix, in place, and all tails in one, gathered."""
    tables = [[*range(50), 100 + i, 200 + i] for i in range(8)]
    shared, own = calls_of(tables, [800 + 2 * i for i in range(8)])
    assert (shared.rows, shared.groups, shared.slots, shared.mask) == (slice(0, 8), 1, slice(0, 800), None)
    assert (own.rows, own.groups) == (slice(0, 8), 8)
    assert own.mask is not None and own.mask.shape == (8, 1, 1, 15)


def test_a_request_whose_pages_are_consecutive_is_one_view() -> None:
    (call,) = calls_of([[*range(3, 60)]], [900])
    assert (call.slots, call.mask, call.places) == (slice(48, 949), None, None)
    (call,) = calls_of([[*range(3, 60)]], [890], tokens=20)
    assert call.slots == slice(48, 958) and call.mask is not None and call.places is None


def test_what_is_not_worth_a_call_is_gathered() -> None:
    few = [[*range(SHARED // 16 - 1), 100 + i] for i in range(2)]
    assert [call.places for call in calls_of(few, [SHARED - 16] * 2)] == [None, None]
    more = [[*range(SHARED // 16), 100 + i] for i in range(2)]
    assert calls_of(more, [SHARED] * 2)[0].rows == slice(0, 2)


def test_long_runs_of_a_request_are_read_in_place() -> None:
    pages = LONG // 16 + 1
    table = [*range(pages), *range(500, 500 + pages), 1900, 1700, 1800]
    first, second, rest = calls_of([table], [pages * 32 + 40])
    assert (first.slots, second.slots) == (slice(0, pages * 16), slice(8000, 8000 + pages * 16))
    assert isinstance(rest.slots, torch.Tensor) and len(rest.slots) == 41


def test_requests_of_very_different_sizes_do_not_fill_one_call() -> None:
    tables = [[*range(100 * i, 100 * i + 20, 2)] for i in range(4)]
    calls = calls_of(tables, [159, 159, 3, 5])
    assert [call.groups for call in calls] == [2, 2]


def test_no_call_gathers_more_than_fits_a_cache() -> None:
    """A request whose own keys are more is alone."""
    tables = [[*range(100 * i, 100 * i + 80, 2)] for i in range(3)]
    assert [call.groups for call in calls_of(tables, [600] * 3)] == [2, 1]
    assert [call.groups for call in calls_of([[*range(0, 200, 2)], [*range(200, 400, 2)]], [1500] * 2)] == [1, 1]


def test_new_tokens_of_a_long_prompt_are_one_causal_call() -> None:
    (whole,) = calls_of([[*range(100)]], [0], tokens=300)
    assert whole.slots is None and whole.places is None


@pytest.mark.parametrize("members", [[0], [2, 0]])
def test_only_members_are_folded(members: list[int]) -> None:
    pool = KVPool(BF16, 2000, 16, torch.bfloat16)
    tables = [[*range(50), 100 + i] for i in range(3)]
    plan = plan_batch([Extent(1, 800, np.array(ids, dtype=np.int32)) for ids in tables], pool)
    folded = fold(plan, members, GROUP, False, True)
    assert {row for call in folded.calls for row in ids_of(call.rows)} == set(members)
