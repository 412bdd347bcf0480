"""Codecs of numbers: lengths, the loss that each one states, and the input that it rejects."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.errors import BadArgument
from mainstem.tiers.storage.codecs import CODECS, GROUP, ITEM_BYTES, find_codec

DTYPES = sorted(ITEM_BYTES)
LOSSY = ["int8", "fp8"]
BITS = {"float16": 11, "bfloat16": 8, "float32": 24}
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}


def as_bytes(numbers: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(bytearray(numbers.tobytes()))


def as_float64(payload: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(payload, dtype).astype(np.float64)


def round_trip(name: str, payload: memoryview, dtype: str) -> memoryview:
    codec = find_codec(name)
    written = memoryview(bytearray(codec.encoded_bytes(len(payload), dtype)))
    read = memoryview(bytearray(b"\xee" * len(payload)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.encode(payload, written, dtype)
        codec.decode(written, read, dtype)
    return read


def bound(name: str, numbers: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Returns the bound of `Codec.loss` as a formula."""
    whole = np.concatenate([numbers, np.zeros(-len(numbers) % GROUP)]).reshape(-1, GROUP)
    greatest = np.repeat(np.abs(whole).max(axis=1), GROUP)[: len(numbers)]
    if name == "fp8":
        return np.maximum(np.abs(numbers) / 15, greatest * 2.0**-17) + (2.0**-25 if dtype == "float16" else 2.0**-133)
    rounding = np.maximum(greatest * 2.0 ** -BITS[dtype], TINY[dtype] / 2) * (1 + 1 / 100)
    return np.where(greatest < 2.0**-119, greatest, greatest / 253 + rounding)


def payloads(dtype: str) -> st.SearchStrategy[memoryview]:
    """Draws finite numbers of every magnitude, from bit patterns."""
    item = np.uint32 if dtype == "float32" else np.uint16
    exponent, one = {"float16": (0x7C00, 0x400), "bfloat16": (0x7F80, 0x80), "float32": (0x7F800000, 0x800000)}[dtype]

    def finite(drawn: bytes) -> memoryview:
        bits = np.frombuffer(drawn[: len(drawn) // 4 * 4], item).copy()
        bits[(bits & exponent) == exponent] ^= one
        return as_bytes(bits)

    return st.binary(max_size=600).map(finite)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_no_number_loses_more_than_is_stated(name: str, dtype: str, data: st.DataObject) -> None:
    payload = data.draw(payloads(dtype))
    before, after = as_float64(payload, dtype), as_float64(round_trip(name, payload, dtype), dtype)
    assert np.isfinite(after).all()
    lost = np.abs(after - before)
    assert (lost <= bound(name, before, dtype)).all(), np.max(lost - bound(name, before, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_the_error_on_numbers_like_those_of_kv(name: str, dtype: str, scale: float) -> None:
    numbers = np.random.default_rng(1).standard_normal(100_000).astype(np.float32) * np.float32(scale)
    payload = as_bytes(
        numbers.astype(dtype) if dtype != "bfloat16" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    )
    before, after = as_float64(payload, dtype), as_float64(round_trip(name, payload, dtype), dtype)
    assert (np.abs(after - before) <= bound(name, before, dtype)).all()
    error = np.sqrt(np.mean((after - before) ** 2)) / np.sqrt(np.mean(before**2))
    assert error < {"int8": 0.01, "fp8": 0.03}[name]
    assert abs(np.mean(after - before)) < 1e-3 * scale, "rounding is biased"


@given(payload=st.binary(max_size=300).map(bytearray).map(memoryview), dtype=st.text())
def test_plain_keeps_every_byte_of_every_dtype(payload: memoryview, dtype: str) -> None:
    assert find_codec("none").encoded_bytes(len(payload), dtype) == len(payload)
    assert round_trip("none", payload, dtype) == payload


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "head"), [("int8", 4), ("fp8", 1)])
@pytest.mark.parametrize("numbers", [0, 1, 63, 64, 65, 128, 1000])
def test_encoded_bytes_are_a_byte_a_number_and_a_head_a_group(name: str, head: int, numbers: int, dtype: str) -> None:
    payload_bytes = numbers * ITEM_BYTES[dtype]
    assert find_codec(name).encoded_bytes(payload_bytes, dtype) == numbers + head * -(-numbers // 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_zeros_stay_zeros_and_the_greatest_numbers_stay_finite(name: str, dtype: str) -> None:
    assert round_trip(name, memoryview(bytearray(600)), dtype) == bytes(600)
    greatest = {"float16": 0x7BFF, "bfloat16": 0x7F7F, "float32": 0x7F7FFFFF}[dtype]
    payload = as_bytes(np.full(100, greatest, np.uint32 if dtype == "float32" else np.uint16))
    after = as_float64(round_trip(name, payload, dtype), dtype)
    assert np.isfinite(after).all() and (after >= as_float64(payload, dtype) * 14 / 15).all()


@pytest.mark.parametrize("name", LOSSY)
def test_encoding_a_decoded_payload_again_loses_nothing(name: str) -> None:
    numbers = np.random.default_rng(2).standard_normal(6400).astype(np.float32)
    once = round_trip(name, as_bytes(numbers), "float32")
    twice = as_float64(round_trip(name, once, "float32"), "float32")
    assert np.allclose(twice, as_float64(once, "float32"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSY)
def test_an_outlier_affects_its_own_group_only(name: str) -> None:
    numbers = np.random.default_rng(3).standard_normal(GROUP * 3).astype(np.float32)
    altered = numbers.copy()
    altered[GROUP + 5] = 1e6
    plain, other = (as_float64(round_trip(name, as_bytes(of), "float32"), "float32") for of in (numbers, altered))
    assert (plain[:GROUP] == other[:GROUP]).all() and (plain[2 * GROUP :] == other[2 * GROUP :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_rejected_with_its_index(name: str, dtype: str, bad: float) -> None:
    numbers = np.ones(150, np.float32)
    numbers[70] = bad
    payload = as_bytes(
        numbers.astype(dtype) if dtype != "bfloat16" else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    )
    with pytest.raises(BadArgument, match="as number 70"):
        round_trip(name, payload, dtype)


@pytest.mark.parametrize("name", LOSSY)
def test_wrong_lengths_and_dtypes_are_rejected(name: str) -> None:
    codec = find_codec(name)
    with pytest.raises(BadArgument, match="one of float16, bfloat16, float32"):
        codec.encoded_bytes(100, "int8")
    with pytest.raises(BadArgument, match="a multiple of 2"):
        codec.encoded_bytes(101, "float16")
    payload, room = memoryview(bytearray(128)), memoryview(bytearray(codec.encoded_bytes(128, "float16")))
    with pytest.raises(BadArgument, match=f"{len(room)} bytes"):
        codec.encode(payload, room[:-1], "float16")
    with pytest.raises(BadArgument, match=f"{len(room)} bytes"):
        codec.decode(room[:-1], payload, "float16")
    with pytest.raises(BadArgument, match="8 bytes"):
        find_codec("none").encode(payload[:8], room[:9], "float16")


def test_any_bytes_decode_without_writing_outside_the_buffer() -> None:
    for name in LOSSY:
        codec = find_codec(name)
        data = memoryview(bytearray(np.random.default_rng(4).bytes(codec.encoded_bytes(1000, "float16"))))
        pool = bytearray(b"\xa5" * 1016)
        with np.errstate(all="ignore"):
            codec.decode(data, memoryview(pool)[8:1008], "float16")
        assert pool[:8] == pool[-8:] == b"\xa5" * 8


def test_e4m3_rounds_like_pytorch() -> None:
    torch = pytest.importorskip("torch")
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves) & (np.abs(halves) <= 448)]
    theirs = torch.from_numpy(halves.copy()).to(torch.float8_e4m3fn).float().numpy()
    for at in range(0, len(halves) - GROUP, GROUP - 1):
        group = np.append(halves[at : at + GROUP - 1], np.float16(448))  # so the exponent is 0
        ours = np.frombuffer(round_trip("fp8", as_bytes(group.astype(np.float32)), "float32"), np.float32)
        assert np.array_equal(ours[:-1], theirs[at : at + GROUP - 1])


@pytest.mark.parametrize(("scale", "rounded"), [(1 + 2**-8, 1.0), (1 + 2**-7 + 2**-8, 1 + 2**-6), (1 + 2**-9, 1.0)])
def test_bfloat16_rounds_halves_to_even(scale: float, rounded: float) -> None:
    codec = find_codec("int8")
    numbers = as_bytes(np.array([127 * scale, scale, -scale], np.float32))
    written = memoryview(bytearray(codec.encoded_bytes(len(numbers), "float32")))
    codec.encode(numbers, written, "float32")
    read = memoryview(bytearray(6))
    codec.decode(written, read, "bfloat16")
    assert as_float64(read, "bfloat16")[1:].tolist() == [rounded, -rounded]


def test_an_unknown_codec_is_rejected_with_the_list() -> None:
    with pytest.raises(BadArgument, match="one of none, int8, fp8"):
        find_codec("int4")
    assert all(codec.loss and codec.name == name for name, codec in CODECS.items())
