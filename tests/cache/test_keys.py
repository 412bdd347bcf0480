"""Keys: how token sequences become symbols of fixed width, and which inputs are refused."""

from __future__ import annotations

import array
import ctypes
import hashlib
import re
import struct
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem._core import encode_tokens
from mainstem.cache.keys import (
    MAX_TOKEN,
    BigramKeys,
    Coordinate,
    HashKeys,
    Image,
    Size,
    Spliced,
    Text,
    TokenKeys,
    TypedKeys,
    hash_blocks,
)
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument, BadTokens

CAT, DOG = Image(bytes(16), 8), Image(bytes(15) + b"\x01", 8)


# ---------------------------------------------------------------- token ids


class Ids(list[int]):
    """A list whose type is not `list`."""


def torch_ids(dtype: str) -> Any:
    """Returns a form of tensors without the buffer protocol, which are read by DLPack."""

    def form(ids: list[int]) -> Any:
        import torch

        return torch.tensor(ids, dtype=getattr(torch, dtype))

    return form


FORMS = [
    list,
    tuple,
    Ids,
    deque,
    *(lambda ids, kind=kind: np.array(ids, dtype=kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")),
    *(lambda ids, kind=kind: np.repeat(np.array(ids, dtype=kind), 2)[::2] for kind in ("u1", "i4", "i8")),
    *(lambda ids, kind=kind: np.array(ids[::-1], dtype=kind)[::-1] for kind in ("i2", "u4", "i8")),
    *(lambda ids, code=code: array.array(code, ids) for code in "bBhHiIlLqQ"),
    lambda ids: (ctypes.c_int32 * len(ids))(*ids),
    lambda ids: struct.pack(f"{len(ids)}I", *ids),
    lambda ids: bytearray(struct.pack(f"{len(ids)}I", *ids)),
    lambda ids: memoryview(struct.pack(f"{len(ids)}I", *ids)),
    lambda ids: memoryview(struct.pack(f"<b{len(ids)}I", 0, *ids))[1:],  # at an odd address
    lambda ids: np.array(ids, dtype=np.uint32).view(np.uint8).repeat(3).data[::3],
    lambda ids: memoryview(array.array("q", ids)),
    lambda ids: [np.int64(token) for token in ids],
    lambda ids: [token if token % 2 else np.uint8(token) for token in ids],
    *map(torch_ids, ("uint8", "int8", "int16", "int32", "int64")),
    lambda ids: torch_ids("int64")(ids).repeat_interleave(2)[::2],
    lambda ids: torch_ids("int32")(ids).repeat_interleave(2)[::2],
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_token_sequence_is_the_same_key(form: Any) -> None:
    for ids in ([0, 1, 2, 100, 127], [7], [], [token % 128 for token in range(301)]):
        assert TokenKeys().encode(form(ids)) == struct.pack(f"{len(ids)}I", *ids)
        assert encode_tokens(form(ids), 128) == struct.pack(f"{len(ids)}I", *ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("position", [0, 1, 31, 32, 63, 64, 69])
def test_one_id_over_the_vocabulary_is_found_at_any_position(form: Any, position: int) -> None:
    ids = [99] * 70
    ids[position] = 100
    with pytest.raises(BadTokens, match=f"^token .*100.* at position {position}: must be an integer from 0 to 99$"):
        encode_tokens(form(ids), 100)


def test_token_ids_may_be_any_31_bits() -> None:
    keys = TokenKeys()
    assert keys.symbol_bytes == 4
    assert keys.encode([2**31 - 1]) == struct.pack("I", 2**31 - 1)


@pytest.mark.parametrize(
    ("tokens", "position", "value"),
    [
        ([1, -1], 1, -1),
        ([1, 2, 2**31], 2, 2**31),
        ([2**70], 0, 2**70),
        ((3, -(2**40)), 1, -(2**40)),
        (np.array([1, -7], dtype=np.int8), 1, -7),
        (np.array([1, 2**31], dtype=np.uint32), 1, 2**31),
        (np.array([2**63], dtype=np.uint64), 0, 2**63),
        (np.array([5, -(2**62)], dtype=np.int64), 1, -(2**62)),
        (array.array("q", [0, 2**33]), 1, 2**33),
        (struct.pack("2I", 4, 2**32 - 1), 1, 2**32 - 1),
        (np.array([8, 9, -6], dtype=np.int32), 2, -6),
        (np.array([8, 9, -6, 2], dtype=np.int16)[::-1], 1, -6),
        (np.array([8, 2**40] * 40, dtype=np.int64), 1, 2**40),
        (np.array([8, 2**32 + 8] * 40, dtype=np.int64)[::-2], 0, 2**32 + 8),
        (np.array([8] * 50 + [2**63 + 8], dtype=np.uint64), 50, 2**63 + 8),
        ([4, 2**31, -1], 1, 2**31),
        ([4, -(2**29), 2**31], 1, -(2**29)),
        ([4, np.int64(-3), -1], 1, -3),
    ],
)
def test_ids_out_of_range_are_named(tokens: Any, position: int, value: int) -> None:
    with pytest.raises(BadTokens) as refused:
        TokenKeys().encode(tokens)
    assert re.match(rf"token \D*{value}\)? at position {position}: must be", str(refused.value))


def test_the_vocabulary_bounds_the_ids() -> None:
    keys = TokenKeys(vocab_size=100)
    assert len(keys.encode([0, 99])) == 8
    for tokens in ([5, 100], np.array([5, 100]), array.array("i", [5, 100]), struct.pack("2I", 5, 100)):
        with pytest.raises(BadTokens, match="100"):
            keys.encode(tokens)


@pytest.mark.parametrize("limit", [0, -1, 2**31 + 1])
def test_a_limit_that_no_id_can_have_is_refused(limit: int) -> None:
    with pytest.raises(BadArgument, match="limit"):
        encode_tokens([], limit)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2.0],
        [1.5],
        ["a"],
        "abc",
        [[1], [2]],
        [None],
        [1, True],
        [np.bool_(True)],
        np.array([1.0, 2.0]),
        np.array([[1, 2], [3, 4]]),
        np.array([True, False]),
        np.array(["1"]),
        np.array([1], dtype=">i4"),
        np.array(["2020"], dtype="M8[s]"),
        np.array([1], dtype=object),
        np.array(3),
        array.array("d", [1.0]),
        b"abcde",
        bytearray(3),
        memoryview(bytes(6)),
        np.zeros(2, dtype=[("token", "i4")]),
        5,
        None,
        {1: 2},
        {1, 2},
        iter([1, 2]),
        (token for token in [1, 2]),
    ],
)
def test_what_is_no_sequence_of_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(BadTokens):
        TokenKeys().encode(tokens)


def test_tensors_are_refused_by_what_is_wrong() -> None:
    int32 = torch_ids("int32")
    for tokens, reason in (
        (int32([0, 1, -9]), "token -9 at position 2: must be an integer from 0 to 99"),
        (torch_ids("int64")([0, 2**35]), f"token {2**35} at position 1: must be an integer from 0 to 99"),
        (torch_ids("float32")([1, 2]), "item type float32"),
        (torch_ids("bool")([True]), "item type bool8"),
        (int32([[1, 2], [3, 4]]), "2 dimensions"),
        (int32(3), "0 dimensions"),
        (int32([1, 2]).to("meta"), "Tensor cannot be read by DLPack"),
    ):
        with pytest.raises(BadTokens, match=reason):
            encode_tokens(tokens, 100)


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Exporter:
    """Exports the ids 1, 2, 3 and 4 by DLPack; overwrites them once the memory is released."""

    class Tensor(ctypes.Structure):
        """DLManagedTensor of https://dmlc.github.io/dlpack/latest/c_api.html"""

        _fields_ = (
            ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
            ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER),
        )  # fmt: skip

    def __init__(self, device_type: int, device_id: int = 0) -> None:
        self.ids = np.array([0, 1, 2, 3, 4], dtype=np.int32)
        self.shape = (ctypes.c_int64 * 1)(4)
        on_device = device_type not in (1, 3)
        self.tensor = self.Tensor(
            data=None if on_device else self.ids.ctypes.data, device_type=device_type, device_id=device_id, ndim=1,
            bits=32, lanes=1, shape=self.shape, byte_offset=4, deleter=DELETER(self.release),
        )  # fmt: skip

    def release(self, _tensor: object) -> None:
        self.ids[:] = -1

    def __dlpack__(self, **_options: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize("device", [1, 3])
def test_memory_of_others_is_held_as_long_as_it_is_read(device: int) -> None:
    exporter = Exporter(device)
    assert encode_tokens(exporter, 100) == struct.pack("4i", 1, 2, 3, 4)
    assert exporter.ids.tolist() == [-1] * 5


@pytest.mark.parametrize(("device", "name"), [((2, 1), "cuda:1"), ((10, 0), "rocm:0"), ((77, 0), "type 77:0")])
def test_tokens_on_a_device_are_refused_by_its_name(device: tuple[int, int], name: str) -> None:
    with pytest.raises(BadTokens, match=f"on device {name}: must be in CPU memory"):
        encode_tokens(Exporter(*device), 100)


def test_what_dlpack_refuses_is_refused() -> None:
    class Refuses:
        def __dlpack__(self, **_options: object) -> object:
            raise BufferError("not today")

    with pytest.raises(BadTokens, match="Refuses"):
        encode_tokens(Refuses(), 100)


def test_a_released_view_is_refused() -> None:
    view = memoryview(bytes(8))
    view.release()
    with pytest.raises(BadTokens, match="released"):
        encode_tokens(view, 100)


def test_no_buffer_stays_taken() -> None:
    grows = bytearray(8)
    encode_tokens(grows, 100)
    with pytest.raises(BadTokens):
        encode_tokens(grows + b"1", 100)
    with pytest.raises(BadTokens):
        encode_tokens(memoryview(grows)[:7], 100)
    grows += bytes(4)  # raises BufferError while the buffer is held
    assert len(encode_tokens(grows, 100)) == 12


@given(st.lists(st.integers(0, 2**31 - 1), max_size=100))
def test_token_keys_are_the_ids_in_four_bytes_each(ids: list[int]) -> None:
    expected = np.array(ids, dtype="<u4").tobytes()
    assert TokenKeys().encode(ids) == TokenKeys().encode(np.array(ids, dtype=np.int64)) == expected
    assert encode_tokens(np.array(ids, dtype=np.int32), 2**31) == encode_tokens(tuple(ids), 2**31) == expected


@given(st.lists(st.integers(-(2**33), 2**33), max_size=100), st.integers(1, 2**31))
def test_the_first_wrong_id_is_named_in_every_form(ids: list[int], limit: int) -> None:
    wrong = next((at for at, token in enumerate(ids) if not 0 <= token < limit), None)
    for tokens in (ids, tuple(ids), np.array(ids, dtype=np.int64), np.array(ids, dtype=np.int64).repeat(3)[::3]):
        if wrong is None:
            assert len(encode_tokens(tokens, limit)) == 4 * len(ids)
        else:
            with pytest.raises(BadTokens, match=f"token {ids[wrong]} at position {wrong}: .* 0 to {limit - 1}$"):
                encode_tokens(tokens, limit)


@pytest.mark.parametrize("size", [0, -1, 2**31 + 1])
def test_a_vocabulary_has_a_size(size: int) -> None:
    with pytest.raises(BadArgument, match=rf"^vocab_size = {size}: must be an integer from 1 to {2**31}$"):
        TokenKeys(vocab_size=size)


def test_a_sequence_grows() -> None:
    sequence = TokenKeys().sequence()
    symbols = sequence.append([1, 2, 3]) + sequence.append([4, 5])
    assert symbols == TokenKeys().encode([1, 2, 3, 4, 5])
    assert [sequence.floor(position) for position in range(6)] == list(range(6))
    assert sequence.tokens_at(4) == 4


def test_a_refused_append_changes_nothing() -> None:
    for keys in (TokenKeys(), BigramKeys(), TypedKeys()):
        sequence = keys.sequence()
        symbols = sequence.append([1, 2, 3])
        with pytest.raises(BadTokens):
            sequence.append([4, -5])
        assert symbols + sequence.append([6]) == keys.encode([1, 2, 3, 6])


# ---------------------------------------------------------------- bigrams


def test_n_tokens_are_n_less_one_bigrams() -> None:
    keys = BigramKeys()
    assert keys.symbol_bytes == 8
    assert keys.encode([1, 2, 3, 4]) == struct.pack("6I", 1, 2, 2, 3, 3, 4)
    assert keys.encode([1]) == keys.encode([]) == b""


def test_bigrams_refuse_what_tokens_refuse() -> None:
    with pytest.raises(BadTokens):
        BigramKeys().encode([1, -2])
    with pytest.raises(BadTokens):
        BigramKeys(vocab_size=3).encode([1, 3])


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_a_bigram_sequence_grows_as_if_it_had_come_at_once(first: list[int], second: list[int]) -> None:
    sequence = BigramKeys().sequence()
    symbols = sequence.append(first) + sequence.append(second)
    assert symbols == BigramKeys().encode(first + second)
    assert len(symbols) == 8 * max(0, len(first + second) - 1)


def test_a_tree_of_bigrams_shares_what_the_next_token_does_not_change() -> None:
    tree = Tree(page_size=1, keys=BigramKeys())
    tree.insert([1, 2, 3, 4], page_ids=[10, 11, 12])
    assert tree.match([1, 2, 3, 9]).page_ids.tolist() == [10, 11]  # a draft's KV of 3 depends on what comes next
    assert tree.match([1, 2, 3]).page_ids.tolist() == [10, 11]
    assert tree.match([1]).length == 0
    tree.check()


# ---------------------------------------------------------------- block hashes


@pytest.mark.parametrize("width", [8, 16])
def test_a_block_hash_is_one_symbol(width: int) -> None:
    keys = HashKeys(width)
    hashes = hash_blocks(list(range(40)), 16, width)
    assert keys.symbol_bytes == width
    assert len(hashes) == 2 * width
    assert keys.encode(hashes) == hashes
    assert keys.sequence().append(hashes) == hashes


def test_hash_keys_refuse_a_broken_symbol_and_other_widths() -> None:
    with pytest.raises(BadTokens):
        HashKeys(16).encode(bytes(17))
    for width in (0, 4, 9, 12, 32, 8.0, True, "8"):
        with pytest.raises(BadArgument, match=rf"^width = {width!r}: must be 8 or 16$"):
            HashKeys(width)  # type: ignore[arg-type]
    assert type(HashKeys(np.int64(8)).symbol_bytes) is int  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"^width = 4: must be 8 or 16$"):
        hash_blocks([1, 2], 1, width=4)
    with pytest.raises(BadArgument, match=rf"^block_size = 0: must be an integer from 1 to {2**31}$"):
        hash_blocks([1, 2], 0)


def test_a_block_hash_depends_on_every_token_before() -> None:
    def chain(tokens: list[int], **options: Any) -> list[bytes]:
        hashes = hash_blocks(tokens, 4, **options)
        return [hashes[at : at + 16] for at in range(0, len(hashes), 16)]

    base = chain([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(base) == 2
    assert chain([1, 2, 3, 4, 5, 6, 7, 8]) == base
    changed_late, changed_early = chain([1, 2, 3, 4, 5, 6, 7, 0]), chain([0, 2, 3, 4, 5, 6, 7, 8])
    assert changed_late[0] == base[0]
    assert changed_late[1] != base[1]
    assert not set(changed_early) & set(base)
    assert not set(chain([1, 2, 3, 4, 5, 6, 7, 8], seed=b"other")) & set(base)
    assert len(set(chain([1] * 40))) == 10


GOLDEN_16 = "1b0cd756b8a49da656091d1fcc62027923c42dc62d8010a50554cd07c5d1c92d"
GOLDEN_8 = "324210d932e9f7ec89af268edb214cbc"


def chain_of(tokens: list[int], block_size: int, width: int, seed: bytes) -> bytes:
    """Computes the same with the standard library."""
    hashes, parent = b"", b""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = np.array(tokens[start : start + block_size], "<u4").tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=width, key=seed).digest()
        hashes += parent
    return hashes


# Blocks of one token, of up to a whole block of BLAKE2b (128 bytes) with and without the parent, and of more.
@pytest.mark.parametrize("block_size", [1, 3, 16, 28, 30, 31, 32, 33, 64, 500])
@pytest.mark.parametrize("seed", [b"", b"k", bytes(range(63)), bytes(range(64))], ids=len)
@pytest.mark.parametrize("width", [8, 16])
def test_block_hashes_are_blake2b_of_the_standard_library(block_size: int, seed: bytes, width: int) -> None:
    tokens = [(7 * at * at) % MAX_TOKEN for at in range(2 * block_size + 3)]
    assert hash_blocks(tokens, block_size, width, seed) == chain_of(tokens, block_size, width, seed)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, MAX_TOKEN - 1), max_size=200),
    st.integers(1, 80),
    st.sampled_from([8, 16]),
    st.binary(max_size=64),
)
def test_block_hashes_of_anything_are_those_of_the_standard_library(
    tokens: list[int], block_size: int, width: int, seed: bytes
) -> None:
    assert hash_blocks(tokens, block_size, width, seed) == chain_of(tokens, block_size, width, seed)


def test_block_hashes_have_the_values_that_they_always_had() -> None:
    assert hash_blocks(range(40), 16).hex() == GOLDEN_16
    assert hash_blocks(range(40), 16, 8, b"seed").hex() == GOLDEN_8
    assert hash_blocks([], 16) == hash_blocks(range(15), 16) == b""


def test_block_hashes_of_long_prompts_are_the_same() -> None:
    tokens = list(range(20_000))
    assert hash_blocks(tokens, 16) == chain_of(tokens, 16, 16, b"")
    assert hash_blocks(np.array(tokens), 16) == hash_blocks(tokens, 16)


@pytest.mark.parametrize("tokens", [[1, -1], [2**31], "text", None, [1.5]])
def test_block_hashes_refuse_what_is_no_token(tokens: Any) -> None:
    with pytest.raises(BadTokens):
        hash_blocks(tokens, 1)


def test_a_seed_has_64_bytes_at_most() -> None:
    with pytest.raises(BadArgument, match=r"^seed = b.*: must be at most 64 bytes$"):
        hash_blocks([1], 1, seed=bytes(65))
    assert hash_blocks([1], 1, seed=bytes(64)) != hash_blocks([1], 1)


# ---------------------------------------------------------------- typed tokens


def test_an_image_takes_as_many_positions_as_it_says() -> None:
    symbols = TypedKeys().sequence().append([Text(1), CAT, Coordinate(5), Size(3, 4)])
    assert len(symbols) == 4 * (1 + 8 + 1 + 1)


def test_plain_integers_are_text() -> None:
    assert TypedKeys().encode([1, CAT, 2]) == TypedKeys().encode([Text(1), CAT, Text(2)])
    assert TypedKeys().encode([1, 2]) == TokenKeys().encode([1, 2])
    assert TypedKeys().encode(np.array([1, 2])) == TokenKeys().encode([1, 2])


def test_no_two_kinds_of_token_share_a_symbol() -> None:
    keys = TypedKeys()
    sizes = [Size(width, height) for width in range(0, 1024, 31) for height in range(1024)]
    tokens = [*range(1024), *map(Coordinate, range(1024)), *sizes]
    symbols = [keys.encode([token]) for token in tokens]
    assert len(set(symbols)) == len(symbols)
    images = {keys.encode([image])[at : at + 4] for image in (CAT, DOG) for at in range(0, 32, 4)}
    assert not images & set(symbols)


def test_two_images_part_at_their_first_symbol() -> None:
    keys = TypedKeys()
    cats = [keys.encode([Image(number.to_bytes(16, "big"), 8)]) for number in range(300)]
    assert len({cat[:4] for cat in cats}) >= 299
    assert len(set(cats)) == 300


@pytest.mark.parametrize("bit", range(0, 128, 9))
def test_the_whole_identity_of_an_image_is_in_its_symbols(bit: int) -> None:
    identity = (1 << bit).to_bytes(16, "little")
    assert TypedKeys().encode([Image(identity, 5)]) != TypedKeys().encode([Image(bytes(16), 5)])


def test_the_length_of_an_image_is_part_of_its_identity() -> None:
    short, long = (TypedKeys().encode([Image(bytes(16), length)]) for length in (8, 9))
    assert long[: len(short)] != short


@pytest.mark.parametrize(
    "make",
    [
        lambda: Image(bytes(15), 8),
        lambda: Image(bytes(16), 4),
        lambda: Image(bytes(16), 0),
        lambda: Coordinate(1024),
        lambda: Coordinate(-1),
        lambda: Size(0, 1024),
        lambda: Size(-1, 0),
        lambda: Text(-1),
        lambda: Text(2**31),
        lambda: "text",
        lambda: 1.0,
        lambda: True,
    ],
)
def test_a_token_out_of_range_is_refused(make: Any) -> None:
    with pytest.raises((BadTokens, BadArgument)):
        TypedKeys().encode([1, make()])


@pytest.mark.parametrize("tokens", [5, None, "text", np.array([1.5])])
def test_what_is_no_sequence_of_typed_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(BadTokens):
        TypedKeys().encode(tokens)


def test_typed_text_keeps_to_the_vocabulary() -> None:
    with pytest.raises(BadTokens):
        TypedKeys(vocab_size=10).encode([Text(10)])
    with pytest.raises(BadTokens):
        TypedKeys(vocab_size=10).encode([3, 10])


def test_no_position_inside_an_image_is_the_end_of_a_token() -> None:
    sequence = TypedKeys().sequence()
    sequence.append([1, CAT, 2, DOG])
    assert [sequence.floor(position) for position in range(19)] == [0, *[1] * 8, 9, *[10] * 8, 18]
    assert [sequence.tokens_at(position) for position in (0, 1, 8, 9, 10, 17, 18)] == [0, 1, 1, 2, 3, 3, 4]
    sequence.append([CAT, 3])
    assert (sequence.floor(25), sequence.tokens_at(26), sequence.tokens_at(27)) == (18, 5, 6)


def spliced(ids: list[int], *images: tuple[int, Image]) -> Spliced:
    return Spliced(np.array(ids, dtype=np.int32), images)


def test_spliced_tokens_are_the_same_symbols_as_a_list() -> None:
    ids = [1, *[999] * 8, 2, 3, *[7] * 8]
    assert TypedKeys(vocab_size=10).encode(spliced(ids, (1, CAT), (11, DOG))) == TypedKeys().encode([1, CAT, 2, 3, DOG])
    assert TypedKeys().encode(spliced([1, 2])) == TypedKeys().encode([1, 2])
    assert ids[1] == 999


@pytest.mark.parametrize("starts", [(-1,), (3,), (0, 7), (2, 0)])
def test_images_are_spliced_in_order_inside_the_ids(starts: tuple[int, ...]) -> None:
    with pytest.raises(BadTokens, match="must lie in"):
        TypedKeys().encode(spliced([0] * 10, *((start, CAT) for start in starts)))


def test_wrong_text_between_images_is_named_by_its_position() -> None:
    with pytest.raises(BadTokens, match="token 99 at position 9"):
        TypedKeys(vocab_size=10).encode(spliced([1, *[0] * 8, 99], (1, CAT)))
    with pytest.raises(BadTokens):
        TypedKeys().encode(Spliced(np.zeros(9), ((0, CAT),)))


def test_the_symbols_of_an_image_are_made_once() -> None:
    image = Image(bytes(16), 8)
    assert image.symbols() is image.symbols()
    assert image == CAT and hash(image) == hash(CAT)


@given(st.lists(st.lists(st.sampled_from([1, 2, CAT, DOG]), max_size=4), max_size=6))
def test_a_sequence_knows_its_images_however_they_come(parts: list[list[Any]]) -> None:
    """Alternates lists and spliced arrays, and compares with a list of the end of each token."""
    sequence, ends, symbols = TypedKeys().sequence(), [0], b""
    for turn, part in enumerate(parts):
        lengths = [8 if isinstance(token, Image) else 1 for token in part]
        starts = np.cumsum([0, *lengths])
        ends += [ends[-1] + int(length) for length in starts[1:]]
        images = [(int(start), token) for start, token in zip(starts, part, strict=False) if isinstance(token, Image)]
        ids = [token if isinstance(token, int) else 0 for token, n in zip(part, lengths, strict=True) for _ in range(n)]
        symbols += sequence.append(part if turn % 2 else spliced(ids, *images))
    assert symbols == TypedKeys().encode([token for part in parts for token in part])
    for position in range(ends[-1] + 1):
        whole = sum(end <= position for end in ends) - 1
        assert (sequence.tokens_at(position), sequence.floor(position)) == (whole, ends[whole])


def test_a_match_may_end_inside_an_image_that_splits_but_not_at_its_beginning() -> None:
    sequence = TypedKeys().sequence()
    sequence.append([1, Image(bytes(16), 8, splits=True), 2])
    assert [sequence.floor(position) for position in range(11)] == [0, 1, 1, 1, 1, 1, 6, 7, 8, 9, 10]
    assert [sequence.tokens_at(position) for position in (1, 6, 9, 10)] == [1, 1, 2, 3]


@pytest.mark.parametrize(("splits", "hit"), [(False, 0), (True, 16)])
def test_a_hit_ends_inside_an_image_only_if_it_splits(splits: bool, hit: int) -> None:
    """The first request publishes up to a page boundary inside its image, where a chunk may end."""
    cache = PrefixCache(64, 4, keys=TypedKeys())
    image = Image(bytes(16), 30, splits)
    prompt = spliced([1, 2, *[0] * 30, 3], (2, image))
    with cache.lease(prompt) as lease:
        lease.reserve(16)
        lease.publish(16)
        lease.abort()
    with cache.lease(prompt) as lease:
        assert lease.hit == hit  # without copy_page: the page of 1 and 2 holds a part of the image
    cache.check()


# ---------------------------------------------------------------- bins


def test_a_coordinate_is_the_nearest_of_bins_spread_evenly() -> None:
    assert [Coordinate.nearest(value).bin for value in (0, 1, 0.5, 0.2 / 1023, 0.5 / 1023)] == [0, 1023, 512, 0, 1]
    assert all(Coordinate.nearest(bin / 1023).bin == bin for bin in range(1024))


def test_a_size_is_the_nearest_of_bins_spread_over_the_logarithm() -> None:
    assert Size.nearest(1, 2**-10) == Size(1023, 0)
    assert Size.nearest(2**-5, 1e-9) == Size(512, 0)
    assert all(Size.nearest(2 ** (10 * bin / 1023 - 10), 1).width_bin == bin for bin in range(1024))


@pytest.mark.parametrize("value", [-0.001, 1.001, float("nan"), float("inf")])
def test_values_outside_of_the_whole_have_no_bin(value: float) -> None:
    with pytest.raises(BadArgument, match=rf"^position = {value}: must be from 0 to 1$"):
        Coordinate.nearest(value)
    with pytest.raises(BadArgument, match=rf"^width = {value}: must be above 0, and at most 1$"):
        Size.nearest(value, 1)
    with pytest.raises(BadArgument, match=rf"^height = {value}: must be above 0, and at most 1$"):
        Size.nearest(1, value)


def test_the_bin_decides_and_never_the_value() -> None:
    near, other = Coordinate.nearest(0.5), Coordinate.nearest(0.5004)
    assert TypedKeys().encode([near]) == TypedKeys().encode([other])
    assert TypedKeys().encode([Size.nearest(0.3, 0.3)]) != TypedKeys().encode([Size.nearest(0.3, 0.31)])


def test_a_list_that_changes_while_it_is_read_is_refused() -> None:
    class Clears:
        def __init__(self, owner: list[Any]) -> None:
            self.owner = owner

        def __index__(self) -> int:
            self.owner.clear()
            return -1

    tokens: list[Any] = []
    tokens.extend([Clears(tokens), 1, 2])
    with pytest.raises(BadTokens):
        TokenKeys().encode(tokens)


def test_a_list_may_grow_and_change_while_it_is_read() -> None:
    class Grows:
        def __index__(self) -> int:
            tokens.extend([5] * 1000)
            tokens[2] = 9
            return 4

    tokens: list[Any] = [1, Grows(), 2]
    assert TokenKeys().encode(tokens) == struct.pack("3I", 1, 4, 9)


def test_a_wrong_id_is_refused_before_what_follows_is_asked() -> None:
    class Asked:
        def __index__(self) -> int:
            raise AssertionError("asked")

    with pytest.raises(BadTokens, match="token 100 at position 1"):
        encode_tokens([1, 100, Asked()], 100)


def test_values_that_cannot_even_be_shown_are_refused() -> None:
    for tokens in ([10**5000], [np.array([1, 2])]):
        with pytest.raises(BadTokens, match="position 0"):
            TokenKeys().encode(tokens)


def test_bytes_in_any_form_are_whole_symbols() -> None:
    raw = np.array([1, 2, 3], np.uint32).tobytes()
    for form in (raw, bytearray(raw), memoryview(raw)):
        assert TokenKeys().encode(form) == raw
        assert len(HashKeys(8).encode(bytes(8))) == len(HashKeys(8).encode(memoryview(bytes(8)))) == 8
        with pytest.raises(BadTokens):
            TypedKeys().encode(form)
    assert TokenKeys().encode(memoryview(np.array([1, 2, 3]))) == raw


def test_lengths_may_be_numpy_integers() -> None:
    image = Image(bytes(16), np.int64(729))  # type: ignore[arg-type]
    assert len(TypedKeys().encode([image])) == 729 * 4


def test_nothing_appended_changes_nothing() -> None:
    sequence = BigramKeys().sequence()
    assert sequence.append([1, 2]) + sequence.append([]) + sequence.append([3]) == BigramKeys().encode([1, 2, 3])
