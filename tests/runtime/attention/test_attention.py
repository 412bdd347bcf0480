"""Paged attention against a slow one that loops over queries, for packed batches over scattered pages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Gemma3Config, LlamaConfig

from mainstem.cache.components import Attended, Chunked, Window
from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.paged import (
    FULL,
    PAGED,
    BatchPlan,
    Extent,
    Paging,
    SdpaAttention,
    exchange_attention,
    install,
    plan_batch,
    text_attention,
)
from mainstem.runtime.memory.kv import KVPool, KVShape

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
LAYER = 1
SCALE = 0.3


def make_pool(pages: int, page_size: int) -> KVPool:
    pool = KVPool(KVShape(2, KV_HEADS, HEAD_DIM, HEAD_DIM), pages, page_size, torch.float32)
    torch.manual_seed(0)
    pool.k.normal_()
    pool.v.normal_()
    return pool


def make_batch(pool: KVPool, spans: list[tuple[int, int]], scattered: bool) -> list[Extent]:
    """Extents of (tokens, start), each with pages of its own."""
    ids = np.random.default_rng(3).permutation(pool.pages) if scattered else np.arange(pool.pages)
    extents, taken = [], 0
    for tokens, start in spans:
        needed = -(-(start + tokens) // pool.page_size)
        extents.append(Extent(tokens, start, ids[taken : taken + needed].astype(np.int32)))
        taken += needed
    return extents


def packed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    new = [torch.randn(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return new[0], new[1], new[2]


def sees(extent: Extent, component: Attended, query: int, key: int) -> bool:
    """Whether a query sees a key, by the rule itself."""
    together = any(low <= query < high and low <= key < high for low, high in extent.regions)
    if isinstance(component, Window) and key <= query - component.tokens:
        return False
    if isinstance(component, Chunked) and key < query // component.tokens * component.tokens:
        return False
    return (key <= query or together) and key < extent.end


def slow_attention(
    pool: KVPool,
    query: torch.Tensor,
    extents: list[Extent],
    component: Attended = FULL,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes one query and head at a time, from the pool alone, after the new keys were written."""
    out, row = torch.empty_like(query), 0
    for extent in extents:
        for position in range(extent.start, extent.end):
            seen = [p for p in range(extent.end) if sees(extent, component, position, p)]
            slots = [(extent.page_table[p // pool.page_size], p % pool.page_size) for p in seen]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = torch.stack([pool.k[LAYER, page, offset, kv_head] for page, offset in slots])
                values = torch.stack([pool.v[LAYER, page, offset, kv_head] for page, offset in slots])
                scores = keys @ query[row, head] * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                more = scores.new_empty(0) if sinks is None else sinks[head : head + 1]
                out[row, head] = torch.cat([scores, more]).softmax(0)[: len(scores)] @ values
            row += 1
    return out


def without_unread_pages(extents: list[Extent], pool: KVPool, component: Attended) -> list[Extent]:
    """Tables whose pages before what is read were freed, and overwritten by their next owner."""
    cut = []
    for extent in extents:
        first = next(key for key in range(extent.end) if sees(extent, component, extent.start, key))
        gone = first // pool.page_size
        pool.k[:, extent.page_table[:gone]], pool.v[:, extent.page_table[:gone]] = math.nan, math.nan
        table = extent.page_table.copy()
        table[:gone] = -1
        cut.append(extent._replace(page_table=table))
    return cut


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    "spans",
    [
        [(7, 0)],
        [(5, 9)],
        [(1, 20)],
        [(1, 0), (4, 0), (6, 13), (1, 7), (1, 30)],
        [(3, 2), (3, 17), (2, 5)],
    ],
    ids=["prompt", "append", "decode", "mixed", "masks shared"],
)
def test_every_query_sees_the_keys_up_to_its_own(spans: list[tuple[int, int]], page_size: int, scattered: bool) -> None:
    pool = make_pool(130 // page_size + 10, page_size)
    extents = make_batch(pool, spans, scattered)
    query, key, value = packed(sum(tokens for tokens, _ in spans))
    out = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool))
    torch.testing.assert_close(out, slow_attention(pool, query, extents), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("scattered", [False, True])
def test_new_keys_go_to_their_slots_and_nowhere_else(scattered: bool) -> None:
    pool, before = make_pool(30, 4), make_pool(30, 4)
    extents = make_batch(pool, [(3, 0), (5, 6), (1, 11)], scattered)
    query, key, value = packed(9)
    SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool))
    row = 0
    for extent in extents:
        for position in range(extent.start, extent.start + extent.tokens):
            page, offset = int(extent.page_table[position // 4]), position % 4
            for cache, old, new in ((pool.k, before.k, key), (pool.v, before.v, value)):
                assert torch.equal(cache[LAYER, page, offset], new[row])
                old[LAYER, page, offset] = new[row]
            row += 1
    assert torch.equal(pool.k, before.k)
    assert torch.equal(pool.v, before.v)


SPANS = [(1, 0), (14, 0), (6, 13), (1, 7), (1, 30), (9, 29), (3, 2)]


SINKS = torch.tensor([3.0, -2.0, 0.0, 1.0, 5.0, -1.0])


@pytest.mark.parametrize(
    ("sinks", "softcap"), [(None, None), (SINKS, None), (None, 0.5), (SINKS, 0.5)], ids=["", "sinks", "cap", "both"]
)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("component", [*map(Window, (1, 5, 8, 100)), *map(Chunked, (1, 4, 6, 16, 100))], ids=str)
def test_nothing_before_a_window_or_a_chunk_is_read(
    component: Attended, page_size: int, sinks: torch.Tensor | None, softcap: float | None
) -> None:
    pool = make_pool(180 // page_size + 10, page_size)
    extents = make_batch(pool, SPANS, scattered=True)
    query, key, value = packed(sum(tokens for tokens, _ in SPANS))
    plan = plan_batch(without_unread_pages(extents, pool, component), pool, component)
    out = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan, sinks, softcap)
    slow = slow_attention(pool, query, extents, component, sinks, softcap)
    torch.testing.assert_close(out, slow, atol=2e-6, rtol=1e-5)


def random_regions(rng: np.random.Generator, end: int) -> tuple[tuple[int, int], ...]:
    """Up to four disjoint regions in [0, end), some of them adjacent."""
    bounds = np.sort(rng.choice(end + 1, size=min(8, end // 2 * 2), replace=False))
    if rng.random() < 0.3:
        bounds[1::2][:-1] = bounds[2::2]
    return tuple((int(low), int(high)) for low, high in bounds.reshape(-1, 2))


@pytest.mark.parametrize("seed", range(30))
def test_regions_are_attended_both_ways(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random regions, windows, chunks and tiles, against the rule key by key."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("mainstem.runtime.attention.paged.TILE_ROWS", int(rng.choice([3, 8, 128])))
    components: list[Attended] = [FULL, Window(3), Window(7), Window(19), Chunked(5), Chunked(16)]
    component = components[int(rng.integers(len(components)))]
    sinks = torch.tensor(rng.normal(size=HEADS), dtype=torch.float32) if rng.random() < 0.3 else None
    softcap = float(rng.uniform(0.2, 2)) if rng.random() < 0.3 else None
    spans = [(int(rng.integers(1, 24)), int(rng.choice([0, 0, 5, 16]))) for _ in range(3)]
    pool = make_pool(60, int(rng.choice([3, 4])))
    extents = make_batch(pool, spans, scattered=True)
    extents = [extent._replace(regions=random_regions(rng, extent.end)) for extent in extents]
    extents = without_unread_pages(extents, pool, component)
    query, key, value = packed(sum(tokens for tokens, _ in spans))
    out = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool, component), sinks, softcap)
    slow = slow_attention(pool, query, extents, component, sinks, softcap)
    torch.testing.assert_close(out, slow, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("component", [Window(8), Chunked(8)], ids=str)
def test_a_prompt_as_long_as_the_window_takes_the_fast_path_and_a_longer_one_not(component: Attended) -> None:
    pool, table = make_pool(10, 4), np.arange(10, dtype=np.int32)
    for tokens, causal in ((7, True), (8, True), (9, False)):
        (span,) = plan_batch([Extent(tokens, 0, table)], pool, component).spans
        assert span.causal is causal


def test_a_region_that_continues_after_a_chunk_is_seen_up_to_the_end_of_the_chunk() -> None:
    (span,) = plan_batch([Extent(5, 0, np.arange(10, dtype=np.int32), ((2, 12),))], make_pool(10, 4)).spans
    (tile,) = span.tiles
    assert tile.keys == slice(0, 5)
    assert tile.runs is not None and tile.runs.tolist() == [[0, 1], [0, 2], [0, 5], [0, 5], [0, 5]]


def test_regions_elsewhere_leave_the_fast_path() -> None:
    """Only queries inside a region take another path, and a mask is only made where it hides a key."""
    pool = make_pool(40, 4)
    extents = make_batch(pool, [(10, 0), (6, 10)], scattered=True)
    far = [extent._replace(regions=((20, 30),)) for extent in extents]
    assert plan_batch(far, pool).spans[0].causal
    assert not plan_batch([extents[0]._replace(regions=((4, 7),))], pool).spans[0].causal
    plan = plan_batch([extents[1]._replace(regions=((10, 16),))], pool)
    assert plan.spans[0].tiles[0].mask(3, pool.device) is None


def test_keys_after_the_last_position_are_never_read() -> None:
    pool = make_pool(8, 4)
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    table = np.array([6, 1, 3], dtype=np.int32)
    query, key, value = packed(10)
    whole = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch([Extent(10, 0, table)], pool))
    plan = plan_batch([Extent(3, 7, table)], pool)
    tail = SdpaAttention().attend(LAYER, query[7:], key[7:], value[7:], SCALE, plan)
    torch.testing.assert_close(tail, whole[7:], atol=2e-6, rtol=1e-5)


class _Layer(torch.nn.Module):
    def __init__(self, layer_idx: int | None = 7) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def call_paged(
    module: torch.nn.Module, *, mask: torch.Tensor | None = None, component: Attended = FULL, **others: object
) -> torch.Tensor:
    """Calls the registered function as a transformers layer does; layer 7 of the model is `LAYER` of its pool."""
    from transformers import LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=7)
    install(LlamaForCausalLM(config))
    pool = make_pool(4, 4)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in packed(5))
    plan = plan_batch([Extent(5, 0, np.arange(2, dtype=np.int32))], pool, component)
    others = {"paging": paging(plan), "scaling": SCALE, **others}
    out: torch.Tensor = ALL_ATTENTION_FUNCTIONS[PAGED](module, query, key, value, mask, **others)[0]
    return out


def paging(plan: BatchPlan) -> Paging:
    return Paging(SdpaAttention(), {"window": plan}, {7: ("window", LAYER)}, max_context=64)


def test_the_registered_function_takes_and_gives_what_layers_expect() -> None:
    harmless = {"dropout": 0.0, "position_ids": torch.arange(5), "use_cache": False, "sliding_window": 64}
    assert call_paged(_Layer(), **harmless).shape == (1, 5, HEADS, HEAD_DIM)


def test_the_registered_function_passes_a_soft_cap_on() -> None:
    assert not torch.allclose(call_paged(_Layer(), softcap=0.5), call_paged(_Layer()))
    torch.testing.assert_close(call_paged(_Layer(), softcap=1e6), call_paged(_Layer()))


def test_rows_of_a_batch_follow_each_other() -> None:
    """[3, heads, 1, dim], as of recurrent models, gives the same as [1, heads, 3, dim]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    call_paged(_Layer())
    pool = make_pool(30, 4)
    extents = make_batch(pool, [(1, 7), (1, 20), (1, 3)], scattered=True)
    query, key, value = packed(3)
    expected = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool))
    stacked = [x.unsqueeze(2) for x in (query, key, value)]
    given = paging(plan_batch(extents, pool))
    out = ALL_ATTENTION_FUNCTIONS[PAGED](_Layer(), *stacked, None, paging=given, scaling=SCALE)[0]
    assert torch.equal(out, expected.unsqueeze(1))


def test_a_window_of_its_own_must_be_the_plan_s() -> None:
    assert call_paged(_Layer(), component=Window(3), sliding_window=3).isfinite().all()
    with pytest.raises(UnsupportedModel, match="sliding window of 4 positions, not 3"):
        call_paged(_Layer(), component=Window(3), sliding_window=4)


def test_encoders_next_to_the_text_model_attend_as_before() -> None:
    from transformers import Gemma3ForConditionalGeneration

    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config={**text, "vocab_size": 300}, vision_config={**vision, "image_size": 28})
    model = Gemma3ForConditionalGeneration(config)
    before = model.config.vision_config._attn_implementation
    install(model)
    assert text_attention(model) == PAGED
    assert model.config.vision_config._attn_implementation == before != PAGED
    exchange_attention(model, "eager")
    assert text_attention(model) == "eager"


def test_no_mask_function_is_registered_for_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    call_paged(_Layer())
    assert PAGED not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"sliding_window": 63}, "sliding window of 63 positions, not all"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "mask of its own"),
        ({"paging": None}, "no page tables"),
    ],
)
def test_what_would_change_the_scores_is_refused(others: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        call_paged(_Layer(), **others)  # type: ignore[arg-type]


def test_a_layer_that_has_no_place_in_a_pool_is_refused() -> None:
    for module in (torch.nn.Module(), _Layer(None), _Layer(3)):
        with pytest.raises(UnsupportedModel, match="has no keys"):
            call_paged(module)
