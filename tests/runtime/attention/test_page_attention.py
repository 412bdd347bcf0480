"""The core's attention over pages, against attention request by request, which `test_attention.py` tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem import _core
from mainstem.errors import BadArgument
from mainstem.runtime.attention import few_rows as page_attention
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.paged import Extent, SdpaAttention, plan_batch
from mainstem.runtime.attention.tree import TreeAttention
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.memory.kv import KVPool, KVShape
from tests.rigs.batches import Batch, batches
from tests.runtime.attention.test_tree_attention import EXACT, GROUP, KV_HEADS, SINKS, attend, new_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not kernels.instructions(), reason="the machine has neither AVX2 nor AVX-512"),
]

SHAPE = KVShape(2, KV_HEADS, 32, 32)
OTHER_VALUES = SHAPE._replace(head_dim=64, value_dim=96)  # more than one block of columns, and a rest
LATENT = KVShape(2, 1, 64, 32, latent=True)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.one_of(batches(SHAPE), batches(OTHER_VALUES)),
    st.sampled_from([None, SINKS]),
    st.sampled_from([None, None, 0.5, 20.0]),
)
def test_results_are_those_request_by_request(batch: Batch, sinks: torch.Tensor | None, softcap: float | None) -> None:
    new = new_rows(batch.tokens, batch.pool.shape)
    expected = attend(SdpaAttention(), batch, new, sinks=sinks, softcap=softcap)
    found = attend(PageAttention(), batch, new, sinks=sinks, softcap=softcap)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, **EXACT)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(batches(SHAPE), st.sampled_from([None, SINKS * 100]))
def test_large_scores_do_not_overflow(batch: Batch, sinks: torch.Tensor | None) -> None:
    """Scores of some hundreds, whose exponentials float32 does not hold."""
    new = new_rows(batch.tokens, batch.pool.shape)
    expected = attend(SdpaAttention(), batch, new, scale=60.0, sinks=sinks)
    found = attend(PageAttention(), batch, new, scale=60.0, sinks=sinks)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(batches(SHAPE, torch.bfloat16), st.sampled_from([None, SINKS]))
def test_results_in_bfloat16_are_rounded_once(batch: Batch, sinks: torch.Tensor | None) -> None:
    """Values are of the size of 1; a result of 4 is rounded by at most 2 ** -7."""
    new = new_rows(batch.tokens, batch.pool.shape, torch.bfloat16)
    found = attend(PageAttention(), batch, new, sinks=sinks)
    exact = KVPool(SHAPE, batch.pool.pages, batch.pool.page_size, torch.float32)
    for plane, given_plane in zip(exact.planes, batch.pool.planes, strict=True):
        plane.copy_(given_plane)
    few = replace(batch, pool=exact)
    truth = attend(SdpaAttention(), few, [x.float() for x in new], sinks=None if sinks is None else sinks)
    bound = 2e-2 if any(extent.tokens > page_attention._FEW for extent in batch.extents) else 1e-2
    assert (found.float() - truth).abs().max() < bound


def pool_and_tables(shared: int, requests: int, shape: KVShape = SHAPE) -> tuple[KVPool, list[Any]]:
    """Returns a pool of pages of 4, and tables of `requests` that share `shared` pages and have one of their own."""
    pool = KVPool(shape, shared + requests, 4, torch.float32)
    for plane in pool.planes:
        plane.normal_(generator=torch.Generator().manual_seed(1))
    return pool, [np.array([*range(shared), shared + i], dtype=np.int32) for i in range(requests)]


def test_pages_that_requests_share_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_attention, "SHARE_BYTES", 0)
    pool, tables = pool_and_tables(shared=10, requests=3)
    plan = plan_batch([Extent(1, 42, table) for table in tables], pool)
    made = []
    monkeypatch.setattr(_core, "AttentionPlan", lambda parts, rows: made.append((parts, rows)))
    page_attention.page_plan(plan, range(3))
    parts, rows = made[0]
    assert rows == 3
    assert [(slots.tolist(), seers.tolist()) for slots, seers, _, _ in parts] == [
        ([*range(40)], [0, 1, 2]),
        ([40, 41, 42], [0]),
        ([44, 45, 46], [1]),
        ([48, 49, 50], [2]),
    ]


def test_long_parts_are_computed_in_several_units() -> None:
    """Of at most 256 keys, which need merging; threads take them in any order."""
    pool, tables = pool_and_tables(shared=300, requests=5)
    extents = [Extent(1, 1201 + i % 3, table) for i, table in enumerate(tables)]
    query, key, value = new_rows(5, SHAPE)
    own, plain = (
        kernel.attend(1, query, key, value, 0.3, plan_batch(extents, pool))
        for kernel in (PageAttention(), SdpaAttention())
    )
    torch.testing.assert_close(own, plain, **EXACT)


def test_a_prefill_in_the_batch_leaves_the_others_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, tables = pool_and_tables(shared=10, requests=2)
    extents = [Extent(20, 22, tables[0]), Extent(2, 40, tables[1])]
    query, key, value = new_rows(22, SHAPE)
    plain = SdpaAttention().attend(1, query, key, value, 0.3, plan_batch(extents, pool))
    others = []
    rest = TreeAttention._attend

    def noting(*given: Any) -> None:
        others.append(list(given[2]))
        rest(*given)

    monkeypatch.setattr(TreeAttention, "_attend", noting)
    found = PageAttention().attend(1, query, key, value, 0.3, plan_batch(extents, pool))
    assert others == [[0]]
    torch.testing.assert_close(found, plain, **EXACT)


@pytest.mark.parametrize(
    "shape", [SHAPE._replace(head_dim=48), SHAPE._replace(value_dim=8)], ids=["keys of 48", "values of 8"]
)
def test_heads_that_the_kernel_cannot_read_are_left_to_the_other(shape: KVShape) -> None:
    pool, tables = pool_and_tables(shared=10, requests=2, shape=shape)
    extents = [Extent(1, 42, table) for table in tables]
    query, key, value = new_rows(2, shape)
    own, plain = (
        kernel.attend(1, query, key, value, 0.3, plan_batch(extents, pool))
        for kernel in (PageAttention(), SdpaAttention())
    )
    torch.testing.assert_close(own, plain, **EXACT)


@pytest.mark.parametrize("row", [float("nan"), float("inf")])
def test_a_key_that_is_no_number_shows_in_what_sees_it_alone(row: float) -> None:
    pool, tables = pool_and_tables(shared=10, requests=2)
    pool.k[1, 10, 1, 0] = row
    extents = [Extent(1, 42, table) for table in tables]
    query, key, value = new_rows(2, SHAPE)
    found = PageAttention().attend(1, query.abs(), key, value, 0.3, plan_batch(extents, pool))
    assert found[0, :GROUP].isnan().all()
    assert found[0, GROUP:].isfinite().all()
    assert found[1].isfinite().all()


def part(slots: list[int], rows: list[int], begins: list[int], ends: list[int]) -> tuple[Any, ...]:
    return (np.array(slots, np.int64), *(np.array(given, np.int32) for given in (rows, begins, ends)))


@pytest.mark.parametrize(
    ("given_part", "wrong"),
    [
        (part([-1, 0], [0], [0], [2]), "slots"),
        (part([0, 1], [1], [0], [2]), "rows"),
        (part([0, 1], [0], [0], [3]), "ends"),
        (part([0, 1], [0], [2], [1]), "ends"),
        (part([0, 1], [], [], []), "rows"),
        (part([0, 1], [0], [1], [1]), "parts"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(given_part: tuple[Any, ...], wrong: str) -> None:
    with pytest.raises(BadArgument, match=wrong):
        _core.AttentionPlan([given_part], 1)


def test_slots_beyond_the_pool_are_refused() -> None:
    plan = _core.AttentionPlan([part([0, 9], [0], [0], [2])], 1)
    room = torch.zeros(9 * 32)
    with pytest.raises(BadArgument, match="slots"):
        plan.attend(*[room.data_ptr()] * 4, (1, 1, 32, 32), (32, 32), 9, 1.0, 0.0, 0, False, 1)
