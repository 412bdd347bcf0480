"""Paged attention against a slow one that loops over queries, for packed batches over scattered pages."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention import BLOCK_ROWS, PAGED, Extent, Paging, SdpaAttention, install, plan_batch
from mainstem.runtime.kv import KVPool

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
LAYER = 1
SCALE = 0.3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and threads that wait for a busy core cost minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_pool(pages: int, page_size: int) -> KVPool:
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS
    )
    pool = KVPool(config, pages, page_size, torch.float32)
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


def slow_attention(pool: KVPool, query: torch.Tensor, extents: list[Extent]) -> torch.Tensor:
    """One query and head at a time, from the pool alone, after the new keys were written."""
    out, row = torch.empty_like(query), 0
    for extent in extents:
        for position in range(extent.start, extent.start + extent.tokens):
            places = [(extent.page_table[p // pool.page_size], p % pool.page_size) for p in range(position + 1)]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = torch.stack([pool.k[LAYER, page, offset, kv_head] for page, offset in places])
                values = torch.stack([pool.v[LAYER, page, offset, kv_head] for page, offset in places])
                out[row, head] = (keys @ query[row, head] * SCALE).softmax(0) @ values
            row += 1
    return out


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
    out = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool, HEADS))
    torch.testing.assert_close(out, slow_attention(pool, query, extents), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("start", [0, 37])
def test_long_chunks_are_cut_into_blocks(start: int) -> None:
    tokens = 2 * BLOCK_ROWS + 5
    pool = make_pool(25, 16)
    extents = make_batch(pool, [(tokens, start)], scattered=True)
    query, key, value = packed(tokens)
    out = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool, HEADS))
    table = torch.from_numpy(extents[0].page_table.astype(np.int64))
    keys, values = (cache[LAYER, table].flatten(0, 1)[: start + tokens] for cache in (pool.k, pool.v))
    scores = torch.einsum("qgd,kd->gqk", query[:, :3], keys[:, 0]) * SCALE
    seen = torch.ones(tokens, start + tokens, dtype=torch.bool).tril(start)
    expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ values[:, 0]
    torch.testing.assert_close(out[:, :3], expected.transpose(0, 1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("scattered", [False, True])
def test_new_keys_go_to_their_slots_and_nowhere_else(scattered: bool) -> None:
    pool, before = make_pool(30, 4), make_pool(30, 4)
    extents = make_batch(pool, [(3, 0), (5, 6), (1, 11)], scattered)
    query, key, value = packed(9)
    SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch(extents, pool, HEADS))
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


def test_keys_behind_the_last_position_are_never_read() -> None:
    pool = make_pool(8, 4)
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    table = np.array([6, 1, 3], dtype=np.int32)
    query, key, value = packed(10)
    whole = SdpaAttention().attend(LAYER, query, key, value, SCALE, plan_batch([Extent(10, 0, table)], pool, HEADS))
    plan = plan_batch([Extent(3, 7, table)], pool, HEADS)
    tail = SdpaAttention().attend(LAYER, query[7:], key[7:], value[7:], SCALE, plan)
    torch.testing.assert_close(tail, whole[7:], atol=2e-6, rtol=1e-5)


class _Layer(torch.nn.Module):
    layer_idx = LAYER


def call_paged(module: torch.nn.Module, *, mask: torch.Tensor | None = None, **others: object) -> torch.Tensor:
    """Call the registered function as a transformers layer does."""
    from transformers import LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=7)
    install(LlamaForCausalLM(config))
    pool = make_pool(4, 4)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in packed(5))
    plan = plan_batch([Extent(5, 0, np.arange(2, dtype=np.int32))], pool, HEADS)
    others = {"paging": Paging(SdpaAttention(), plan, max_context=64), "scaling": SCALE, **others}
    out: torch.Tensor = ALL_ATTENTION_FUNCTIONS[PAGED](module, query, key, value, mask, **others)[0]
    return out


def test_the_registered_function_takes_and_gives_what_layers_expect() -> None:
    harmless = {"dropout": 0.0, "position_ids": torch.arange(5), "use_cache": False, "sliding_window": 64}
    assert call_paged(_Layer(), **harmless).shape == (1, 5, HEADS, HEAD_DIM)


def test_no_mask_function_is_registered_for_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    call_paged(_Layer())
    assert PAGED not in ALL_MASK_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"s_aux": torch.zeros(HEADS)}, "s_aux"),
        ({"softcap": 50.0}, "softcap"),
        ({"sliding_window": 63}, "sliding window of 63"),
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


def test_a_layer_without_an_index_in_the_pool_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layer index"):
        call_paged(torch.nn.Module())
