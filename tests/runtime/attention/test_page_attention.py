"""Attention over pages by kernels, against attention request by request, which `test_attention.py` tests.

Every shape is drawn for both kernels: Triton's interpreter computes the one for GPUs, and `make test-gpu` compiles it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mainstem import _core
from mainstem.cache.components import Attended, Chunked, Window
from mainstem.errors import BadArgument
from mainstem.runtime.attention import few_rows as page_attention
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.folding import seen_keys
from mainstem.runtime.attention.paged import FULL, Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.memory.kv import KVPool, KVShape
from tests.rigs.attending import EXACT, GROUP, KV_HEADS, SINKS, attend, attend_latent, new_rows
from tests.rigs.batches import Batch, batches
from tests.rigs.interpreted import triton_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = KVShape(2, KV_HEADS, 32, 32)
OTHER_VALUES = SHAPE._replace(head_dim=64, value_dim=96)  # more than one block of columns, and a rest
LATENT = KVShape(2, 1, 40, 32, latent=True)


@pytest.fixture(scope="module", params=["core", pytest.param("triton", marks=pytest.mark.slow)])
def kernel(request: pytest.FixtureRequest) -> Attention:
    return PageAttention() if request.param == "core" else triton_attention()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.one_of(batches(SHAPE), batches(OTHER_VALUES)),
    st.sampled_from([None, SINKS]),
    st.sampled_from([None, None, 0.5, 20.0]),
)
def test_results_are_those_request_by_request(
    kernel: Attention, batch: Batch, sinks: torch.Tensor | None, softcap: float | None
) -> None:
    new = new_rows(batch.tokens, batch.pool.shape)
    expected = attend(SdpaAttention(), batch, new, sinks=sinks, softcap=softcap)
    found = attend(kernel, batch, new, sinks=sinks, softcap=softcap)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, **EXACT)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(SHAPE), st.sampled_from([None, SINKS * 100]))
def test_large_scores_do_not_overflow(kernel: Attention, batch: Batch, sinks: torch.Tensor | None) -> None:
    """Scores of some hundreds, whose exponentials float32 does not hold."""
    new = new_rows(batch.tokens, batch.pool.shape)
    expected = attend(SdpaAttention(), batch, new, scale=60.0, sinks=sinks)
    found = attend(kernel, batch, new, scale=60.0, sinks=sinks)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)], ids=str)
def test_half_precision_is_as_exact_as_request_by_request(kernel: Attention, dtype: torch.dtype, bound: float) -> None:
    """Both are within one bound of float32 with the same inputs; values are of the size of 1."""

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(batches(SHAPE, dtype), st.sampled_from([None, SINKS]))
    def check(batch: Batch, sinks: torch.Tensor | None) -> None:
        new = new_rows(batch.tokens, batch.pool.shape, dtype)
        found = [attend(each, batch, new, sinks=sinks) for each in (SdpaAttention(), kernel)]
        exact = batch.on("cpu", torch.float32)
        truth = attend(SdpaAttention(), exact, [x.float() for x in new], sinks=sinks)
        for result in found:
            assert (result.float() - truth).abs().max() < bound

    check()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(batches(LATENT, regions=False))
def test_latents_are_absorbed_to_the_results_of_expanded_ones(kernel: Attention, batch: Batch) -> None:
    expected, found = (attend_latent(each, batch) for each in (SdpaAttention(), kernel))
    torch.testing.assert_close(found, expected, **EXACT)


def pool_and_tables(shared: int, requests: int, shape: KVShape = SHAPE) -> tuple[KVPool, list[Any]]:
    """Returns a pool of pages of 4, and tables of `requests` that share `shared` pages and have one of their own."""
    pool = KVPool(shape, shared + requests, 4, torch.float32)
    for plane in pool.planes:
        plane.normal_(generator=torch.Generator().manual_seed(1))
    return pool, [np.array([*range(shared), shared + i], dtype=np.int32) for i in range(requests)]


def test_pages_that_requests_share_are_read_once_by_whole_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are of 256 positions. A prompt of many tokens reads its own keys."""
    pool, tables = pool_and_tables(shared=130, requests=4)
    plan = plan_batch([*(Extent(1, 522, table) for table in tables[:3]), Extent(20, 500, tables[3])], pool)
    made = []
    monkeypatch.setattr(_core, "AttentionPlan", lambda parts, rows: made.append((parts, rows)))
    page_attention.page_plan(plan, range(4))
    parts, rows = made[0]
    assert rows == 23
    assert [(first, len(slots), seers.tolist()) for first, slots, seers, _, _ in parts] == [
        (0, 520, [*range(3, 23)]),
        (0, 512, [0, 1, 2]),
        (512, 11, [0]),
        (512, 11, [1]),
        (512, 11, [2]),
    ]
    assert parts[3].slots.tolist() == [*range(512, 520), 524, 525, 526]


def test_no_span_is_in_two_parts_where_requests_part_within_it() -> None:
    """Three share 320 positions, two of them 680 more: a result is the same bits as that of a request alone."""
    pool, _ = pool_and_tables(shared=500, requests=0)
    trunk, branch, other = [*range(80)], [*range(100, 270)], [*range(270, 440)]
    paths = [[*trunk, *branch, 450], [*trunk, *branch, 451], [*trunk, *other, 452]]
    extents = [Extent(1, 1003, np.array(path, dtype=np.int32)) for path in paths]
    plan = plan_batch(extents, pool)
    parts = [(part.first, len(part.slots), part.rows.tolist()) for part in seen_keys(plan, range(3), 16, 1)]
    assert parts[:2] == [(0, 256, [0, 1, 2]), (256, 512, [0, 1])]
    query, key, value = new_rows(3, SHAPE)
    together = PageAttention().attend(1, query, key, value, 0.3, plan)
    for i, extent in enumerate(extents):
        row = slice(i, i + 1)
        alone = PageAttention().attend(1, query[row], key[row], value[row], 0.3, plan_batch([extent], pool))
        assert torch.equal(alone[0], together[i])


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


@pytest.mark.parametrize(
    "shape",
    [SHAPE._replace(head_dim=48), SHAPE._replace(value_dim=8), SHAPE._replace(head_dim=5, value_dim=71)],
    ids=str,
)
def test_heads_may_have_any_numbers(shape: KVShape) -> None:
    pool, tables = pool_and_tables(shared=80, requests=2, shape=shape)
    extents = [Extent(1, 322, table) for table in tables]
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


def part(slots: list[int], rows: list[int], begins: list[int], ends: list[int], first: int = 0) -> tuple[Any, ...]:
    return (first, np.array(slots, np.int64), *(np.array(given, np.int32) for given in (rows, begins, ends)))


@pytest.mark.parametrize(
    ("given_part", "wrong"),
    [
        (part([-1, 0], [0], [0], [2]), "slots"),
        (part([0, 1], [1], [0], [2]), "rows"),
        (part([0, 1], [0], [0], [3]), "ends"),
        (part([0, 1], [0], [2], [1]), "ends"),
        (part([0, 1], [], [], []), "rows"),
        (part([0, 1], [0], [1], [1]), "parts"),
        (part([0, 1], [0], [6], [8], first=7), "ends"),
        (part([0, 1], [0], [2**31 - 1], [2**31 - 1], first=2**31 - 1), "first"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(given_part: tuple[Any, ...], wrong: str) -> None:
    with pytest.raises(BadArgument, match=wrong):
        _core.AttentionPlan([given_part], 1)


def test_slots_beyond_the_pool_are_refused() -> None:
    plan = _core.AttentionPlan([part([0, 9], [0], [0], [2])], 1)
    room = torch.zeros(9 * 32)
    with pytest.raises(BadArgument, match="slots"):
        plan.attend(*[room.data_ptr()] * 4, (1, 1, 32, 32), (32, 32), (0, 0), "auto", 9, 1.0, 0.0, 0, False, 1)


# ---- the same bits


HEADS = [SHAPE._replace(layers=1, head_dim=keys, value_dim=values) for keys, values in [(32, 32), (8, 8), (24, 71)]]


@dataclass(frozen=True)
class Prompts:
    """Requests whose keys are in pages, and a query for each of their positions."""

    pool: KVPool
    tables: list[NDArray[np.int32]] = field(repr=False)
    lengths: list[int]
    component: Attended
    regions: list[tuple[tuple[int, int], ...]]
    sinks: torch.Tensor | None
    softcap: float | None
    queries: list[torch.Tensor] = field(repr=False)

    def attend(self, chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Returns the results of a batch of chunks (request, first position, tokens)."""
        extents = [Extent(n, start, self.tables[i], self.regions[i]) for i, start, n in chunks]
        query = torch.cat([self.queries[i][start : start + n] for i, start, n in chunks])
        plan = plan_batch(extents, self.pool, self.component)
        key, value = (plane.read(slice(0, self.pool.pages), self.pool.dtype) for plane in self.pool.layer(0))
        new = [plane[torch.from_numpy(plan.slot_ids)] for plane in (key, value)]  # which the pages hold already
        found = PageAttention().attend(0, query, *new, 0.3, plan, self.sinks, self.softcap)
        return list(found.split([n for _, _, n in chunks]))


@st.composite
def prompts(draw: st.DrawFn) -> Prompts:
    size = draw(st.sampled_from([1, 4, 16]))
    shape, dtype = draw(st.sampled_from(HEADS)), draw(st.sampled_from([torch.float32, torch.bfloat16]))
    eight_bits = draw(st.sampled_from([None, None, torch.int8, torch.float8_e4m3fn]))
    lengths = draw(st.lists(st.integers(1, 800), min_size=1, max_size=4))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    pages = sum(-(-length // size) for length in lengths)
    ids = torch.randperm(pages, generator=chance).numpy().astype(np.int32)
    tables, taken = [], 0
    for length in lengths:
        shared = draw(st.integers(0, min(length, lengths[0]) // size)) if tables else 0
        own = -(-length // size) - shared
        tables.append(np.concatenate([tables[0][:shared], ids[taken : taken + own]]) if tables else ids[:own])
        taken += own
    pool = KVPool(shape, pages, size, dtype, eight_bits=eight_bits)
    given_rows = [torch.randn(pages * size, KV_HEADS, count, generator=chance).to(dtype) for count in shape.planes]
    pool.write(np.arange(pages, dtype=np.int32), 0, [given_rows])
    regions = [tuple((at, min(at + 9, length)) for at in range(7, length - 1, 300)) for length in lengths]
    queries = [torch.randn(length, KV_HEADS * GROUP, shape.head_dim, generator=chance).to(dtype) for length in lengths]
    component = draw(st.sampled_from([FULL, FULL, Window(19), Window(300), Chunked(100)]))
    sinks, softcap = draw(st.sampled_from([None, SINKS])), draw(st.sampled_from([None, None, 5.0]))
    both_ways = regions if draw(st.booleans()) else [()] * len(lengths)
    return Prompts(pool, tables, lengths, component, both_ways, sinks, softcap, queries)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(prompts(), st.data())
def test_a_row_is_the_same_bits_whatever_is_computed_beside_it(given_prompts: Prompts, data: st.DataObject) -> None:
    """Alone in one go, or in chunks behind hits, in batches that share prefixes, with one thread or two."""
    ours = given_prompts
    whole = [ours.attend([(i, 0, length)])[0] for i, length in enumerate(ours.lengths)]
    for _ in range(4):
        chunks = []
        for i, length in enumerate(ours.lengths):
            inside = {p for low, high in ours.regions[i] for p in range(low + 1, high)}
            cuts = [p for p in range(length + 1) if p not in inside]
            end = data.draw(st.sampled_from([*cuts[1:], *cuts[1:][-20:]]))
            first = max(0, end - data.draw(st.sampled_from([1, 1, 2, 16, 17, 60, 800])))
            start = max(p for p in cuts if p <= first)
            chunks.append((i, start, end - start))
        torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
        for (i, start, tokens), found in zip(chunks, ours.attend(chunks), strict=True):
            assert found.isfinite().all()
            assert torch.equal(found, whole[i][start : start + tokens])
