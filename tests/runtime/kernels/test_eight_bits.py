"""Keys and values in 8 bits: how far numbers move, that kernels read what is in the pages, and what pages cost."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tiny_models import HYBRIDS, LATENT, loaded, tiny
from mainstem.cache.components import Attended, Chunked, Full, Window
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.paged import Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.memory import kv
from mainstem.runtime.memory.eight_bits import eight_bits, quantize, rounded
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.runtime.memory.pools import pool_sizes
from mainstem.runtime.models.runner import ModelRunner, attention_for
from mainstem.settings.engine import EngineConfig, TierConfig

pytestmark = pytest.mark.usefixtures("one_thread")

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BITS = pytest.mark.parametrize("bits", [INT8, FP8], ids=["int8", "fp8"])
SMALLEST = torch.finfo(torch.float32).tiny

finite = st.floats(-(2.0**100), 2.0**100, width=32)


def e4m3(number: Fraction) -> Fraction:
    """The nearest number with a sign, 4 bits of exponent and 3 of mantissa, the even one of two."""
    if number == 0:
        return number
    exponent = max(math.floor(math.log2(abs(number))), -6)
    step = Fraction(2) ** (exponent - 3)
    return round(number / step) * step


@BITS
@given(row=st.lists(finite, min_size=1, max_size=40))
def test_a_number_becomes_the_nearest_that_its_row_has(bits: torch.dtype, row: list[float]) -> None:
    given_row = torch.tensor(row)
    numbers, scales = quantize(given_row, bits)
    scale = Fraction(float(scales))
    greatest = max(map(abs, map(Fraction, row)))
    assert abs(scale - max(greatest / (127 if bits is INT8 else 448), Fraction(SMALLEST))) <= scale * Fraction(1, 2**23)
    for number, kept in zip(map(Fraction, row), numbers.float().tolist(), strict=True):
        step = number / scale
        nearest = Fraction(round(step)) if bits is INT8 else e4m3(step)
        near = Fraction(1, 2**20) * (1 + abs(step))  # a quotient is rounded before it becomes a step
        assert abs(abs(step - Fraction(kept)) - abs(step - nearest)) <= near


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 2**31), spread=st.floats(-12, 12))
@settings(max_examples=20)
def test_numbers_move_no_further_than_documented(
    bits: torch.dtype, dtype: torch.dtype, seed: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = (torch.randn(5, 64, generator=generator) * 2.0**spread).to(dtype)
    exact, moved = row.double(), rounded(row, bits).double()
    greatest = exact.abs().amax(-1, keepdim=True)
    if bits is INT8:
        bound = greatest / 127 / 2
    else:
        bound = torch.maximum(exact.abs() * 2.0**-4, greatest / 448 * 2.0**-10)
    info = torch.finfo(dtype)
    bound = bound * (1 + 2.0**-20) + greatest * info.eps + info.smallest_normal * info.eps
    assert ((moved - exact).abs() <= bound).all()


@BITS
def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden(bits: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, math.inf], [1.0, math.nan], [-1.0, 0.5]])
    found = rounded(rows, bits)
    assert torch.equal(found[0], torch.zeros(2))
    assert found[1:3].isnan().all()
    assert found[3].tolist() == pytest.approx([-1, 0.5], abs=0.5 / 127)


@BITS
def test_a_row_does_not_depend_on_other_rows(bits: torch.dtype) -> None:
    rows = (
        torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 1e3, 1e6])[:, None, None]
    )
    together = rounded(rows, bits)
    for i in range(4):
        for head in range(3):
            assert torch.equal(together[i, head], rounded(rows[i, head], bits))


def test_names_are_those_of_the_setting() -> None:
    assert [eight_bits(name) for name in ("auto", "int8", "fp8")] == [None, INT8, FP8]
    with pytest.raises(BadArgument, match="kv_cache_dtype = 'int4': must be one of auto, int8, fp8"):
        eight_bits("int4")


# ---- pages


@BITS
@pytest.mark.parametrize("shape", [KVShape(3, 2, 8, 8), KVShape(2, 1, 16, 8)], ids=["alike", "unequal"])
def test_pages_are_read_as_they_were_written_rounded_and_are_copied_with_their_scales(
    bits: torch.dtype, shape: KVShape
) -> None:
    pool = KVPool(shape, 6, 4, torch.float32, eight_bits=bits)
    torch.manual_seed(0)
    given_rows = [[torch.randn(7, *size) * 3 for size in shape.given] for _ in range(shape.layers)]
    for table in (np.array([1, 2], np.int32), np.array([5, 0], np.int32)):
        pool.write(table, 1, given_rows)
        for layer, parts in zip(pool.read(table, 1, 8), given_rows, strict=True):
            for found, part in zip(layer, parts, strict=True):
                assert torch.equal(found, rounded(part, bits))
    pool.copy_page(1, 3, 4)
    for layer, parts in zip(pool.read(np.array([3], np.int32), 1, 4), given_rows, strict=True):
        for found, part in zip(layer, parts, strict=True):
            assert torch.equal(found, rounded(part[:3], bits))
    assert sum(plane.nbytes for plane in pool.planes) == 6 * shape.bytes_per_page(4, bits)


def test_latents_keep_the_dtype_of_the_model() -> None:
    pool = KVPool(KVShape(2, 1, 40, 32, latent=True), 3, 4, torch.bfloat16, eight_bits=INT8)
    assert pool.kept is pool.dtype is torch.bfloat16 and len(pool.planes) == 1


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_same_memory_holds_about_twice_as_many_pages(dtype: Any) -> None:
    made = replace(loaded(tiny("llama", head_dim=64).bfloat16()), dtype=torch.bfloat16)
    counts = [pool_sizes(made, EngineConfig(kv_bytes=1 << 22, kv_cache_dtype=kind))[Full()] for kind in ("auto", dtype)]
    assert counts[1] / counts[0] == pytest.approx(128 / (64 + 4), rel=0.01)


# ---- attention


KERNELS = [SdpaAttention, PageAttention]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, Attended, int]:
    """Requests (shared pages, pages of their own, new tokens), a page size, what a query sees, a seed."""
    size = draw(st.sampled_from([1, 3, 4]))
    requests = draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=4)
    )
    component = draw(st.sampled_from([Full(), Full(), Window(7), Chunked(8)]))
    return requests, size, component, draw(st.integers(0, 1000))


def _extents(requests: list[tuple[int, int, int]], size: int) -> tuple[list[Extent], int]:
    extents, taken = [], 12
    for shared, own, new in requests:
        start = (shared + own) * size
        more = -(-(start + new) // size) - shared
        table = np.concatenate([np.arange(shared), np.arange(taken, taken + more)]).astype(np.int32)
        extents.append(Extent(new, start, table))
        taken += more
    return extents, taken


@BITS
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("extra", ["", "sinks", "softcap"])
@given(batch=batches())
@settings(max_examples=25, deadline=None)
def test_attention_reads_what_the_pages_hold(
    bits: torch.dtype, kernel: type[Attention], extra: str, batch: tuple[list[tuple[int, int, int]], int, Attended, int]
) -> None:
    requests, size, component, seed = batch
    extents, pages = _extents(requests, size)
    shape = KVShape(1, 2, 32, 32)
    torch.manual_seed(seed)
    coded = KVPool(shape, pages, size, torch.float32, eight_bits=bits)
    plain = KVPool(shape, pages, size, torch.float32)
    everywhere = np.arange(pages, dtype=np.int32)
    coded.write(everywhere, 0, [[torch.randn(pages * size, 2, 32) for _ in range(2)]])
    plain.write(everywhere, 0, coded.read(everywhere, 0, pages * size))
    tokens = sum(extent.tokens for extent in extents)
    query = torch.randn(tokens, 4, 32)
    new = [torch.randn(tokens, 2, 32) for _ in range(2)]
    more = {"sinks": torch.randn(4) if extra == "sinks" else None, "softcap": 5.0 if extra == "softcap" else None}
    found = kernel().attend(0, query, *new, 0.2, plan_batch(extents, coded, component), **more)
    exact = [rounded(part, bits) for part in new]
    expected = SdpaAttention().attend(0, query, *exact, 0.2, plan_batch(extents, plain, component), **more)
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5)
    for layer, kept in zip(
        coded.read(everywhere, 0, pages * size), plain.read(everywhere, 0, pages * size), strict=True
    ):
        assert all(map(torch.equal, layer, kept))


@BITS
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_in_bfloat16_reads_what_the_pages_hold(bits: torch.dtype, kernel: type[Attention]) -> None:
    extents, pages = _extents([(12, 0, 1)] * 6 + [(12, 2, 40)], 16)
    coded = KVPool(KVShape(1, 2, 32, 32), pages, 16, torch.bfloat16, eight_bits=bits)
    plain = KVPool(KVShape(1, 2, 32, 32), pages, 16, torch.float32)
    everywhere = np.arange(pages, dtype=np.int32)
    torch.manual_seed(0)
    coded.write(everywhere, 0, [[torch.randn(pages * 16, 2, 32).bfloat16() for _ in range(2)]])
    plain.write(everywhere, 0, [[part.float() for part in coded.read(everywhere, 0, pages * 16)[0]]])
    tokens = sum(extent.tokens for extent in extents)
    query, *new = (torch.randn(tokens, heads, 32).bfloat16() for heads in (4, 2, 2))
    found = kernel().attend(0, query, *new, 0.2, plan_batch(extents, coded))
    exact = (rounded(part, bits).float() for part in new)
    expected = SdpaAttention().attend(0, query.float(), *exact, 0.2, plan_batch(extents, plain))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


# ---- runners


def test_the_self_test_finds_a_scale_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(given: torch.Tensor, to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = quantize(given, to)
        return numbers, scales * 1.2

    monkeypatch.setattr(kv, "quantize", larger)
    with pytest.raises(UnsupportedModel, match="the self-test failed"):
        ModelRunner(loaded(tiny("llama")), 8, 4, "int8")


@pytest.mark.parametrize(
    ("family", "changes"),
    [("deepseek_v3", LATENT["deepseek_v3"]), ("mamba2", HYBRIDS["mamba2"]), ("kimi_linear", HYBRIDS["kimi_linear"])],
)
def test_a_model_without_plain_keys_is_refused(family: str, changes: dict[str, Any]) -> None:
    config = EngineConfig(pages=8, state_slots=4, kv_cache_dtype="int8")
    made = loaded(tiny(family, **changes))
    counts = {component.name: count for component, count in pool_sizes(made, config).items()}
    with pytest.raises(BadArgument, match="kv_cache_dtype = 'int8': must be auto"):
        ModelRunner(made, counts, 4, "int8")


def test_a_codec_of_storage_beside_8_bits_is_refused() -> None:
    tiers = TierConfig(storage="file:./kv", storage_codec="int8")
    with pytest.raises(BadArgument, match="storage_codec = 'int8': must be none with kv_cache_dtype fp8"):
        EngineConfig(kv_cache_dtype="fp8", tiers=tiers)


@pytest.mark.parametrize(
    ("device", "kind", "name"), [("cpu", PageAttention, "the core"), ("cuda", SdpaAttention, "PyTorch")]
)
def test_the_log_says_what_computes_attention_over_8_bits(
    device: str, kind: type[Attention], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert type(attention_for(torch.device(device), "int8")) is kind
    (line,) = caplog.messages
    assert f"KV in int8: attention is computed by {name}" in line


def test_layers_of_a_decoder_are_not_one_call_over_8_bits() -> None:
    runner = ModelRunner(loaded(tiny("llama")), 8, 4, "int8")
    assert runner.exchanged.layers == runner.exchanged.refused == 0
