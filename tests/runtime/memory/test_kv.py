"""The KV pool: its size, its layout, and copying the head of a page."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.tiny_models import FAMILIES, HYBRIDS, LATENT, WINDOWED, tiny
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.memory.kv import KVPool, KVShape, kv_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=8, value_dim=8)
UNEQUAL = KVShape(layers=3, kv_heads=2, head_dim=8, value_dim=4)
LATENT_SHAPE = KVShape(layers=3, kv_heads=1, head_dim=40, value_dim=32, latent=True)
SHAPES = pytest.mark.parametrize("shape", [SHAPE, UNEQUAL, LATENT_SHAPE], ids=["alike", "unequal", "latent"])


def filled(shape: KVShape = SHAPE) -> KVPool:
    pool = KVPool(shape, pages=5, page_size=4, dtype=torch.float32)
    for number, plane in enumerate(pool.planes):
        plane.copy_(torch.arange(plane.numel()).view(plane.shape) + number * 10_000)
    return pool


@pytest.mark.parametrize(
    ("family", "changes", "shape"),
    [
        ("llama", {}, KVShape(3, 2, 16, 16)),
        ("llama", {"head_dim": 8}, KVShape(3, 2, 8, 8)),
        ("gpt_bigcode", FAMILIES["gpt_bigcode"], KVShape(3, 1, 16, 16)),
        ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}, KVShape(3, 4, 16, 16)),  # keeps repeated keys
        ("deepseek_v3", LATENT["deepseek_v3"], LATENT_SHAPE),
    ],
)
def test_the_shape_is_what_layers_give_to_their_cache(family: str, changes: dict[str, Any], shape: KVShape) -> None:
    assert kv_shapes(tiny(family, **changes), {"full": (0, 1, 2)}) == {"full": shape}


def test_each_pool_has_the_shape_of_its_layers() -> None:
    """MiMo's sliding layers have twice as many heads, which its configuration does not say."""
    shapes = kv_shapes(tiny("mimo_v2_flash", **WINDOWED["mimo_v2_flash"]), {"full": (1,), "window": (0, 2)})
    assert shapes == {"full": KVShape(1, 2, 24, 16), "window": KVShape(2, 4, 24, 16)}


def test_without_layers_a_model_is_not_run_and_pages_take_no_memory() -> None:
    model = tiny("llama")
    model.forward = None  # type: ignore[assignment]
    (shape,) = kv_shapes(model, {"full": ()}).values()
    assert shape.bytes_per_page(16, torch.float32) == 0


def test_heads_of_different_sizes_in_one_pool_are_refused() -> None:
    model = tiny("llama")
    attention = model.get_decoder().layers[1].self_attn
    attention.k_proj, attention.v_proj = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)  # 4 heads, not 2
    attention.num_key_value_groups = 1
    with pytest.raises(UnsupportedModel, match="its full attention layers have heads of different sizes"):
        kv_shapes(model, {"full": (0, 1, 2)})


def test_a_model_that_leaves_no_keys_in_the_cache_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="keep nothing in transformers' cache"):
        kv_shapes(tiny("mamba2", **HYBRIDS["mamba2"]), {"full": (0,)})


def test_a_model_that_does_not_run_with_a_cache_is_refused() -> None:
    model = tiny("llama")
    model.get_decoder().layers[0].self_attn.k_proj = None
    with pytest.raises(UnsupportedModel, match="llama does not run with transformers' cache"):
        kv_shapes(model, {"full": (0,)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [0, 3])
@SHAPES
def test_bytes_per_page_is_what_the_tensors_take(shape: KVShape, layers: int, dtype: torch.dtype) -> None:
    shape = shape._replace(layers=layers)
    pool = KVPool(shape, pages=5, page_size=4, dtype=dtype)
    assert sum(plane.nbytes for plane in pool.planes) == 5 * shape.bytes_per_page(4, dtype)


def test_a_latent_is_kept_once_and_its_values_are_a_part_of_its_keys() -> None:
    assert LATENT_SHAPE.bytes_per_page(4, torch.float32) == 3 * 40 * 4 * 4
    pool = filled(LATENT_SHAPE)
    keys, values = pool.k[1], pool.v[1]
    assert torch.equal(values, keys[..., :32])
    assert values.data_ptr() == keys.data_ptr()


def test_pages_without_layers_can_be_copied_all_the_same() -> None:
    pool = KVPool(SHAPE._replace(layers=0), pages=5, page_size=4, dtype=torch.float32)
    pool.copy_page(1, 3, 2)
    assert sum(plane.numel() for plane in pool.planes) == 0


def test_consecutive_pages_are_consecutive_memory() -> None:
    keys, values = (plane.numbers for plane in filled().layer(1))
    assert keys.shape == values.shape == (5, 4, 2, 8)
    run = keys[1:4].flatten(0, 1)
    assert run.data_ptr() == keys[1].data_ptr()
    assert run.shape == (12, 2, 8)


@pytest.mark.parametrize("positions", [0, 1, 3, 4])
@SHAPES
def test_copy_page_copies_the_first_positions_in_every_layer(shape: KVShape, positions: int) -> None:
    pool, before = filled(shape), filled(shape)
    pool.copy_page(1, 3, positions)
    for cache, old in zip(pool.planes, before.planes, strict=True):
        assert torch.equal(cache[:, 3, :positions], old[:, 1, :positions])
        assert torch.equal(cache[:, 3, positions:], old[:, 3, positions:])
        assert torch.equal(cache[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]])


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(BadArgument, match="kv_bytes"):
        KVPool(SHAPE, 2**31 - 1, 2**20, torch.float32)
