"""The list of the hottest prefixes: what goes in comes out, and bytes from anywhere do no harm."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mainstem.tiers.hottest import CONTENT_BYTES, MOST, decode, encode

PAGE = 4

Prefix = tuple[bytes, bytes]
PREFIXES = st.lists(
    st.tuples(
        st.binary(max_size=3),
        st.binary(min_size=1, max_size=4).map(lambda pages: b"".join(bytes([p]) * PAGE for p in pages)),
    ),
    max_size=8,
)


def covered(prefix: Prefix, by: list[Prefix]) -> bool:
    return any(prefix[0] == space and key.startswith(prefix[1]) for space, key in by)


def test_what_goes_in_comes_out_in_order() -> None:
    prefixes = [(b"", b"aaaa"), (b"space", b"bbbbcccc"), (b"", b"dddd" * 100)]
    assert decode(encode(prefixes), PAGE) == prefixes
    assert decode(encode(prefixes) + bytes(1000), PAGE) == prefixes
    assert decode(encode([]), PAGE) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PREFIXES)
def test_every_prefix_is_in_the_list_or_the_beginning_of_one_that_is(prefixes: list[Prefix]) -> None:
    found = decode(encode(prefixes), PAGE)
    assert all(prefix in prefixes for prefix in found)
    assert all(covered(prefix, found) for prefix in prefixes)
    assert found == [prefix for at, prefix in enumerate(prefixes) if not covered(prefix, prefixes[:at])]


def test_the_beginning_of_a_hotter_prefix_is_left_out() -> None:
    prefixes = [(b"", b"aaaabbbb"), (b"", b"aaaa"), (b"x", b"aaaa"), (b"", b"aaaabbbbcccc"), (b"", b"aaaabbbb")]
    assert decode(encode(prefixes), PAGE) == [prefixes[0], prefixes[2], prefixes[3]]


def test_what_has_no_room_is_left_out_and_what_is_shorter_still_goes_in() -> None:
    long, short = (b"", b"a" * (CONTENT_BYTES - 64)), (b"", b"b" * 16)
    prefixes = [long, (b"", b"c" * 64), short]
    content = encode(prefixes)
    assert len(content) <= CONTENT_BYTES
    assert decode(content, PAGE) == [long, short]
    assert encode([(b"", b"a" * CONTENT_BYTES)]) == encode([])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=64), st.integers(1, 9))
@example(b"", 1)
@example(b"\xff" * 64, 4)
@example(b"\x01\x00\x00\x00" + b"\xff\xff\xff\xff" * 3, 4)
def test_any_bytes_give_whole_keys_or_none(content: bytes, page_bytes: int) -> None:
    check_keys(content, page_bytes)


def check_keys(content: bytes, page_bytes: int) -> None:
    prefixes = decode(content, page_bytes)
    assert len(prefixes) <= MOST
    assert all(key and len(key) % page_bytes == 0 for _, key in prefixes)
    assert sum(8 + len(space) + len(key) for space, key in prefixes) <= len(content)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PREFIXES.filter(len), st.data())
def test_a_damaged_list_gives_whole_keys_or_none(prefixes: list[Prefix], data: st.DataObject) -> None:
    content = bytearray(encode(prefixes))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(content)))
    check_keys(bytes(content[:cut]), PAGE)
    check_keys(bytes(content), PAGE)


@pytest.mark.parametrize("count", [MOST + 1, 2**32 - 1])
def test_no_more_are_believed_than_were_looked_at(count: int) -> None:
    entry = struct.pack("<I", 0) + struct.pack("<I", PAGE) + b"aaaa"
    assert len(decode(struct.pack("<I", count) + entry * (2 * MOST), PAGE)) == MOST


def test_a_list_for_pages_of_another_size_is_left_alone() -> None:
    assert decode(encode([(b"", b"aaaa")]), 3) == []
    assert decode(encode([(b"", b"aaaaaa"), (b"", b"bbbb")]), 3) == [(b"", b"aaaaaa")]
