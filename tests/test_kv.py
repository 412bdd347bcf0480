"""The KV pool: its size, its layout, and copying the head of a page."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MambaConfig

from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.kv import KVPool, KVShape

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=8)


def filled() -> KVPool:
    pool = KVPool(SHAPE, pages=5, page_size=4, dtype=torch.float32)
    pool.k.copy_(torch.arange(pool.k.numel()).view(pool.k.shape))
    pool.v.copy_(-pool.k)
    return pool


def test_shape_comes_from_the_configuration() -> None:
    config = LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    assert KVShape.of(config) == SHAPE
    config.head_dim = 16
    assert KVShape.of(config).head_dim == 16


def test_a_configuration_without_heads_has_no_shape() -> None:
    with pytest.raises(UnsupportedModel, match="mamba"):
        KVShape.of(MambaConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [0, 3])
def test_bytes_per_page_is_what_the_tensors_take(layers: int, dtype: torch.dtype) -> None:
    shape = SHAPE._replace(layers=layers)
    pool = KVPool(shape, pages=5, page_size=4, dtype=dtype)
    assert pool.k.nbytes + pool.v.nbytes == 5 * shape.bytes_per_page(4, dtype)


def test_pages_without_layers_can_be_copied_all_the_same() -> None:
    pool = KVPool(SHAPE._replace(layers=0), pages=5, page_size=4, dtype=torch.float32)
    pool.copy_page(1, 3, 2)
    with pytest.raises(BadArgument):
        pool.copy_page(1, 5, 2)


def test_consecutive_pages_are_consecutive_memory() -> None:
    keys, values = filled().layer(1)
    assert keys.shape == values.shape == (5, 4, 2, 8)
    run = keys[1:4].flatten(0, 1)
    assert run.data_ptr() == keys[1].data_ptr()
    assert run.shape == (12, 2, 8)


@pytest.mark.parametrize("positions", [0, 1, 3, 4])
def test_copy_page_copies_the_first_positions_in_every_layer(positions: int) -> None:
    pool, before = filled(), filled()
    pool.copy_page(1, 3, positions)
    for cache, old in ((pool.k, before.k), (pool.v, before.v)):
        assert torch.equal(cache[:, 3, :positions], old[:, 1, :positions])
        assert torch.equal(cache[:, 3, positions:], old[:, 3, positions:])
        assert torch.equal(cache[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]])


@pytest.mark.parametrize(
    ("call", "name"),
    [((-1, 0, 1), "source"), ((0, 5, 1), "target"), ((0, 1, 5), "positions"), ((0, 1, -1), "positions")],
)
def test_copy_page_refuses_what_does_not_exist(call: tuple[int, int, int], name: str) -> None:
    pool = filled()
    with pytest.raises(BadArgument) as caught:
        pool.copy_page(*call)
    assert caught.value.name == name
    assert torch.equal(pool.k, filled().k)


@pytest.mark.parametrize(("pages", "page_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, page_size: int) -> None:
    with pytest.raises(BadArgument):
        KVPool(SHAPE, pages, page_size, torch.float32)


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(BadArgument, match="kv_bytes"):
        KVPool(SHAPE, 2**31 - 1, 2**20, torch.float32)
