"""The calibrated codec: its length, the loss that it states, its file, and the input that it rejects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem._core import EntropyCoder
from mainstem.cache.identity import Identity
from mainstem.errors import BadArgument
from mainstem.tiers.storage.calibrated import CLASSES, KEPT, Basis, Calibrated, open_codec, save, turn
from mainstem.tiers.storage.codecs import ITEM_BYTES, Page, load_numbers, store_numbers

DTYPES = sorted(ITEM_BYTES)
LAYERS, HEADS, KEY, VALUE, POSITIONS = 3, 2, 8, 4, 16
WIDTH = HEADS * (KEY + VALUE)
COMPONENTS = LAYERS * WIDTH
NUMBERS = COMPONENTS * POSITIONS
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}


def tables() -> np.ndarray[Any, Any]:
    """Returns tables in which a token comes half as often as the one before, from a class's size on."""
    shares = np.exp2(-np.arange(EntropyCoder.TOKENS) / np.maximum(np.arange(CLASSES)[:, None] / 8, 0.1))
    found = 1 + np.floor(shares / shares.sum(1, keepdims=True) * (4096 - EntropyCoder.TOKENS)).astype(np.uint16)
    found[:, 0] += 4096 - found.sum(1, dtype=np.uint16)
    return found.astype(np.uint16)


def basis(seed: int = 0, rotary: float = 0.3) -> Basis:
    """Returns a basis of two groups: of two layers, and of the last."""
    random = np.random.default_rng(seed)
    means, first = random.standard_normal((2, LAYERS, WIDTH)).astype(np.float32)
    groups = (2 * WIDTH, WIDTH)
    decode = [(random.standard_normal((n, n)) + 4 * np.eye(n)).astype(np.float32) / 256 for n in groups]
    sizes = np.full(COMPONENTS, 48, np.int16)
    angles = rotary ** np.arange(KEY // 2)
    return Basis(((HEADS, KEY), (HEADS, VALUE)), means, first + 100, tuple(decode), sizes, angles, level=40)


def codec(ratio: float = 4, **changes: Any) -> Calibrated:
    return Calibrated(ratio, {"full": basis(**changes)}, tables(), "the weights")


def payload(seed: int, dtype: str, page: int, of: Basis, scale: float = 64) -> memoryview:
    """Returns a page whose components have a standard deviation of `scale`."""
    y = np.random.default_rng(seed).standard_normal((COMPONENTS, POSITIONS)).astype(np.float32) * scale
    written = memoryview(bytearray(NUMBERS * ITEM_BYTES[dtype]))
    store_numbers(of.join(y, page), written, dtype)
    return written


def encoded(of: Calibrated, page: memoryview, dtype: str, number: int) -> memoryview:
    out = memoryview(bytearray(of.encoded_bytes(len(page), dtype)))
    of.encode(page, out, dtype, Page("full", number))
    return out


def decoded(of: Calibrated, data: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    out = memoryview(bytearray(NUMBERS * ITEM_BYTES[dtype]))
    of.decode(data, out, dtype)
    return load_numbers(out, dtype)


# ---------------------------------------------------------------- the entropy coder


@st.composite
def codes(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    numbers = st.integers(-40, 40) | st.integers(-32767, 32767) | st.just(0)
    drawn = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    classes = draw(st.lists(st.integers(0, CLASSES - 1), min_size=rows, max_size=rows))
    return np.array(drawn, np.int16).reshape(rows, columns), np.array(classes, np.uint8), draw(st.integers(0, 50))


@settings(deadline=None, max_examples=300)
@given(drawn=codes())
def test_what_is_coded_is_decoded(drawn: tuple[Any, Any, int]) -> None:
    numbers, classes, after = drawn
    coder, out = EntropyCoder(tables()), np.full(16 + 4 * numbers.size, 0xA5, np.uint8)
    length = coder.encode(numbers, classes, out)
    assert 16 <= length <= len(out)
    back = np.empty_like(numbers)
    coder.decode(out[: min(length + after, len(out))], classes, back)
    assert np.array_equal(numbers, back)
    room = np.zeros(length - 1, np.uint8)
    assert coder.encode(numbers, classes, room) == 0, "it has no room for its last byte"
    if length > 16:
        with pytest.raises(BadArgument, match="the code of as many numbers"):
            coder.decode(out[: length - 2], classes, back)


def test_a_likely_number_takes_few_bits() -> None:
    frequencies = np.ones((1, EntropyCoder.TOKENS), np.uint16)
    frequencies[0, 0] = 4096 - EntropyCoder.TOKENS + 1
    coder, zeros = EntropyCoder(frequencies), np.zeros((100, 16), np.int16)
    out, classes = np.empty(5000, np.uint8), np.zeros(100, np.uint8)
    assert coder.encode(zeros, classes, out) < 16 + 1600 * -np.log2(frequencies[0, 0] / 4096) / 8 + 8
    assert coder.encode(zeros + 1, classes, out) > 1600 * 12 / 8, "each is one of 4096, and has a sign"


@pytest.mark.parametrize("shape", [(1, EntropyCoder.TOKENS), (1, 5), (0, EntropyCoder.TOKENS)])
def test_frequencies_that_are_no_tables_are_rejected(shape: tuple[int, int]) -> None:
    with pytest.raises(BadArgument, match="4096"):
        EntropyCoder(np.ones(shape, np.uint16))


def test_classes_that_do_not_fit_are_rejected() -> None:
    coder, numbers, out = EntropyCoder(tables()), np.zeros((2, 3), np.int16), np.zeros(99, np.uint8)
    with pytest.raises(BadArgument, match="one a row: 2"):
        coder.encode(numbers, np.zeros(3, np.uint8), out)
    with pytest.raises(BadArgument, match=f"below {CLASSES}"):
        coder.decode(out, np.array([0, CLASSES], np.uint8), numbers)


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), page=st.sampled_from([0, 1, 77, 8000]), ratio=st.floats(1, 12))
def test_no_component_loses_more_than_is_stated(dtype: str, seed: int, page: int, ratio: float) -> None:
    own = codec(ratio)
    of = own.bases["full"]
    whole = payload(seed, dtype, page, of)
    data = encoded(own, whole, dtype, page)
    assert len(data) == max(int(len(whole) / ratio), 24)
    after, before = decoded(own, data, dtype), load_numbers(whole, dtype)
    components = [of.split(x, page) for x in (before, after)]
    step = 2 ** (data[0] / 8)
    greatest = max(np.abs(before).max(), np.abs(after).max())
    rounding = greatest * ROUNDING[dtype] * max(np.abs(each).sum(1).max() for each in of.encode)
    assert np.abs(components[1] - components[0]).max() <= (1 - KEPT) * step + rounding


def test_a_shorter_page_has_longer_steps() -> None:
    levels = []
    for ratio in (2, 4, 8):
        own = codec(ratio)
        levels.append(encoded(own, payload(1, "bfloat16", 3, own.bases["full"]), "bfloat16", 3)[0])
    assert levels == sorted(set(levels))


def test_a_page_that_knows_its_place_has_shorter_steps() -> None:
    own = codec(rotary=0.9)
    whole = payload(2, "bfloat16", 40, own.bases["full"])
    assert encoded(own, whole, "bfloat16", 40)[0] < encoded(own, whole, "bfloat16", 41)[0]


def test_the_first_position_of_a_prompt_has_a_mean_of_its_own() -> None:
    own = codec()
    whole = payload(3, "bfloat16", 0, own.bases["full"])
    assert encoded(own, whole, "bfloat16", 0)[0] < encoded(own, whole, "bfloat16", 1)[0] - 8


def test_keys_are_turned_back_by_the_angle_of_their_position() -> None:
    x = np.random.default_rng(5).standard_normal((4, LAYERS, WIDTH)).astype(np.float32)
    turned, angles = x.copy(), np.array([1.0, 0.5, 0.1, 0.01])
    turn(turned, (HEADS, KEY), angles, 7, 1)
    for position, layer, head in np.ndindex(4, LAYERS, HEADS):
        part = slice(head * KEY, head * KEY + KEY)
        pairs = x[position, layer, part].reshape(2, -1)
        complex_ = (pairs[0] + 1j * pairs[1]) * np.exp(1j * (7 + position) * angles)
        expected = [*complex_.real, *complex_.imag]
        np.testing.assert_allclose(turned[position, layer, part], expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(turned[..., HEADS * KEY :], x[..., HEADS * KEY :]), "values are not turned"
    turn(turned, (HEADS, KEY), angles, 7, -1)
    np.testing.assert_allclose(turned, x, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_rejected(bad: float) -> None:
    numbers = np.ones(NUMBERS, np.float32)
    numbers[5] = bad
    own, out = codec(), memoryview(bytearray(NUMBERS))
    with pytest.raises(BadArgument, match="finite"):
        own.encode(memoryview(numbers.tobytes()), out, "float32", Page("full", 0))


def test_numbers_far_from_the_calibrated_ones_are_rejected() -> None:
    own, out = codec(), memoryview(bytearray(NUMBERS))
    numbers = np.random.default_rng(6).standard_normal(NUMBERS).astype(np.float32) * np.float32(1e30)
    with pytest.raises(BadArgument, match="does not expect"):
        own.encode(memoryview(numbers.tobytes()), out, "float32", Page("full", 0))


def test_an_altered_value_raises_or_decodes_within_its_buffer() -> None:
    own = codec()
    data = encoded(own, payload(7, "bfloat16", 2, own.bases["full"]), "bfloat16", 2)
    raised = 0
    for at in range(0, len(data), 3):
        altered, pool = bytearray(data), bytearray(b"\xa5" * (NUMBERS * 2 + 16))
        altered[at] ^= 0x10
        try:
            own.decode(memoryview(altered), memoryview(pool)[8:-8], "bfloat16")
        except BadArgument:
            raised += 1
        assert pool[:8] == pool[-8:] == b"\xa5" * 8
    assert raised > len(data) // 3 * 0.8, "a code that was altered does not end as it must"


def test_wrong_lengths_and_components_are_rejected() -> None:
    own = codec()
    whole = payload(8, "bfloat16", 0, own.bases["full"])
    data = encoded(own, whole, "bfloat16", 0)
    with pytest.raises(BadArgument, match=f"{len(data)} bytes"):
        own.decode(data[:-1], whole, "bfloat16")
    with pytest.raises(BadArgument, match="one of full"):
        own.encode(whole, data, "bfloat16", Page("window", 0))
    with pytest.raises(BadArgument, match=f"a multiple of {COMPONENTS}"):
        own.encode(whole[:-2], memoryview(bytearray((len(whole) - 2) // 4)), "bfloat16", Page("full", 0))
    with pytest.raises(BadArgument, match="1 to 1000"):
        codec(0.5)


# ---------------------------------------------------------------- files and identities


def identity(**changes: Any) -> Identity:
    layout = f"page_first/v1 bfloat16[{LAYERS}, 16, {HEADS}, {KEY}] bfloat16[{LAYERS}, 16, {HEADS}, {VALUE}]"
    fields = {
        "model": "m", "weights": "the weights", "dtype": "bfloat16", "quantization": "none", "layout": layout,
        "shape": "", "attention": "mha", "rope": "", "tokenizer": "", "symbols": "", "page_size": 16,
    }  # fmt: skip
    return Identity(**(fields | changes))


def test_a_calibration_of_another_model_is_refused() -> None:
    codec().check(identity())
    codec().check(identity(layout=identity().layout + " + page_first/v1 float32[1, 7]"))
    with pytest.raises(BadArgument, match="storage_codec = 'a calibration of the weights the weights'"):
        codec().check(identity(weights="others"))
    for wrong in ({"dtype": "float16"}, {"page_size": 8}, {"layout": "page_first/v1 bfloat16[3, 16, 2, 8]"}):
        with pytest.raises(BadArgument, match=r"a calibration of page_first/v1"):
            codec().check(identity(**wrong))


def test_a_file_gives_the_same_codec_and_its_content_the_name(tmp_path: Path) -> None:
    own = codec()
    save(tmp_path / "a.npz", own)
    save(tmp_path / "b.npz", own)
    save(tmp_path / "c.npz", codec(seed=1))
    a, b, c = (open_codec(str(tmp_path / f"{name}.npz")) for name in "abc")
    assert a.name == b.name != c.name and a.name.startswith("calibrated ") and len(a.name) == 43
    whole = payload(9, "bfloat16", 4, own.bases["full"])
    assert isinstance(a, Calibrated) and encoded(a, whole, "bfloat16", 4) == encoded(own, whole, "bfloat16", 4)
    a.check(identity())


def test_a_file_that_holds_no_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, codec())
    whole = path.read_bytes()
    for data in (b"", b"text", whole[:-200], whole.replace(b"npy", b"npx")):
        path.write_bytes(data)
        with pytest.raises(BadArgument, match="mainstem calibrate"):
            open_codec(str(path))
    path.write_bytes(whole)
    with np.load(path) as arrays:
        changed = {**arrays, "about": np.array(str(arrays["about"]).replace("tion 1", "tion 2"))}
    np.savez(path, **changed)
    with pytest.raises(BadArgument, match="its format is mainstem calibration 2"):
        open_codec(str(path))
    own = basis()
    wrong = {
        "means": own.means[:1], "first": own.first[:, :1], "sizes": own.sizes[:-1], "rotary": np.ones(KEY),
        "decode": own.decode[:1],
    }  # fmt: skip
    for field, value in wrong.items():
        save(path, Calibrated(4, {"full": replace(own, **{field: value})}, tables(), "w"))
        with pytest.raises(BadArgument, match="mainstem calibrate"):
            open_codec(str(path))
    save(path, Calibrated(4, {"full": replace(own, decode=(own.decode[0][:, 1:], own.decode[1]))}, tables(), "w"))
    with pytest.raises(BadArgument, match=r"its decode 0 is float32\[48, 47\]"):
        open_codec(str(path))


def test_a_name_that_is_no_file_is_that_of_a_codec() -> None:
    assert open_codec("int8").name == "int8"
    with pytest.raises(BadArgument, match="one of none, int8, fp8"):
        open_codec("missing.npz")
