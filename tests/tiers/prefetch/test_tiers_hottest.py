"""The list of the hottest prefixes: it decodes to what was encoded, and arbitrary bytes do no harm."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rigs.hand_driven import Clock, FaultyBackend, HandWorkers, make_store

from mainstem.cache.tree import Tree
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.prefetch.hottest import PIECE_BYTES, ListRead, ListWrite, PathSpan, Prefixes, decode, encode

PAGE = 4
MANY = 1 << 20

Prefix = tuple[bytes, bytes]
KEYS = st.binary(min_size=1, max_size=5).map(lambda drawn: b"".join(bytes([p % 3]) * PAGE for p in drawn))
PREFIXES = st.lists(st.tuples(st.sampled_from([b"", b"a", b"space"]), KEYS, st.integers(0, 3)), max_size=12)


def spans_of(prefixes: Sequence[tuple[bytes, bytes, int]]) -> list[PathSpan]:
    """Returns the hot spans of a tree of these prefixes, each with its hits."""
    tree = Tree(1)
    for namespace, key, hits in prefixes:
        ids = np.arange(len(key) // PAGE, dtype=np.int32)
        tree.core.insert(namespace, key, 0, [ids], 0, 0, 0, True)
        for _ in range(hits):
            tree.core.match(namespace, key, 0, False)
    return tree.core.hot_spans(0)


def left(prefixes: Prefixes) -> list[Prefix]:
    found = []
    while prefixes:
        found.append(prefixes.first)
        prefixes.drop()
    return found


def pages_of(prefixes: Sequence[Prefix]) -> set[Prefix]:
    return {(space, key[:end]) for space, key in prefixes for end in range(PAGE, len(key) + 1, PAGE)}


def test_a_shared_prefix_is_listed_once() -> None:
    shared, one, two = b"s" * 100 * PAGE, b"1" * PAGE, b"2" * PAGE
    spans = spans_of([(b"n", shared, 5), (b"n", shared + one, 1), (b"n", shared + two, 0), (b"", one, 0)])
    content = encode(spans, PAGE, MANY)
    assert len(content) < len(shared) + 4 * 20
    assert left(decode(content, PAGE, MANY)) == [(b"n", shared), (b"n", shared + one), (b"", one), (b"n", shared + two)]


def test_a_prefix_as_hot_as_its_continuation_is_listed_with_it() -> None:
    key = b"".join(bytes([at]) * PAGE for at in range(9))
    tree = Tree(1)
    for end in (3, 6, 9):  # three nodes
        ids = np.arange(end, dtype=np.int32)
        tree.core.insert(b"", key[: end * PAGE], 0, [ids], 0, 0, 0, True)
        tree.lock(tree.core.locate(b"", key[: end * PAGE], end))
    tree.core.match(b"", key, 0, False)
    assert [symbols for _, _, _, symbols in tree.core.hot_spans(0)] == [key]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PREFIXES)
def test_every_page_is_listed_once_and_decoded_again(prefixes: list[tuple[bytes, bytes, int]]) -> None:
    spans = spans_of(prefixes)
    pages = pages_of([(space, key) for space, key, _ in prefixes])
    assert sum(len(symbols) for *_, symbols in spans) == len(pages) * PAGE
    found = left(decode(encode(spans, PAGE, MANY), PAGE, MANY))
    assert pages_of(found) == pages
    assert len(set(found)) == len(found) == len(spans)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(PREFIXES, st.integers(0, 12))
def test_a_smaller_host_takes_the_hottest_pages(prefixes: list[tuple[bytes, bytes, int]], room: int) -> None:
    content = encode(spans_of(prefixes), PAGE, MANY)
    every, some = left(decode(content, PAGE, MANY)), left(decode(content, PAGE, room))
    assert len(pages_of(some)) == min(room, len(pages_of(every)))
    assert some[:-1] == every[: len(some[:-1])] and (not some or every[len(some) - 1][1].startswith(some[-1][1]))


def test_the_list_of_a_small_host_is_short() -> None:
    spans = [(-1, 0, b"n" * 100, b"x" * PAGE)] * 30_000
    content = encode(spans, PAGE, 10)
    assert len(content) < PIECE_BYTES + 10 * 100
    assert 0 < len(decode(content, PAGE, MANY)) < 30_000


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=64), st.integers(1, 9), st.integers(0, 9))
@example(b"", 1, 1)
@example(b"\xff" * 64, 4, 9)
@example(b"\0" * 64, 4, 9)
@example(struct.pack("<IIIIIIII", 0, 0, 1, 0, 7, 2, 0, 1), 4, 9)
def test_any_bytes_give_whole_keys_or_none(content: bytes, page_bytes: int, pages: int) -> None:
    check_keys(content, page_bytes, pages)


def check_keys(content: bytes, page_bytes: int, pages: int) -> None:
    prefixes = decode(content, page_bytes, pages)
    assert len(prefixes) <= pages
    for space, key in left(prefixes):
        assert key and len(key) % page_bytes == 0
        assert len(key) <= pages * page_bytes
        assert len(space) + len(key) <= len(content)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PREFIXES.filter(len), st.data())
def test_a_damaged_list_gives_whole_keys_or_none(prefixes: list[tuple[bytes, bytes, int]], data: st.DataObject) -> None:
    content = bytearray(encode(spans_of(prefixes), PAGE, MANY))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(content)))
    check_keys(bytes(content[:cut]), PAGE, 40)
    check_keys(bytes(content), PAGE, 40)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(PREFIXES.filter(len), st.data())
def test_a_leading_part_of_a_list_is_a_list(prefixes: list[tuple[bytes, bytes, int]], data: st.DataObject) -> None:
    content = encode(spans_of(prefixes), PAGE, MANY)
    cut = data.draw(st.integers(0, len(content)))
    every, some = left(decode(content, PAGE, MANY)), left(decode(content[:cut], PAGE, MANY))
    assert pages_of(some) <= pages_of(every)
    assert some[:-1] == every[: len(some[:-1])]


# ---------------------------------------------------------------- in the store


CONTENT = random.Random(0).randbytes(3 * PIECE_BYTES)  # four pieces


def keep(backend: MemoryBackend, content: bytes, **options: object) -> None:
    assert ListWrite(make_store(backend, **options), content).done()  # type: ignore[arg-type]


def find(backend: MemoryBackend, pages: int = MANY) -> bytes:
    finding = ListRead(make_store(backend), PAGE, pages)
    assert finding.done() and finding.done()
    return finding.value


def pieces(backend: FaultyBackend, content: bytes) -> list[bytes]:
    """Keeps a list and returns the keys of its pieces in order."""
    seen: list[bytes] = []

    def put(keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        seen.extend(keys)
        return MemoryBackend.put(backend, keys, buffers)

    backend.instead["put"] = put
    keep(backend, content)
    del backend.instead["put"]
    return seen


@pytest.mark.parametrize("size", [1, PIECE_BYTES - 20, PIECE_BYTES - 19, len(CONTENT)])
def test_a_list_is_found_as_it_was_kept(size: int) -> None:
    backend = FaultyBackend()
    names = pieces(backend, CONTENT[:size])
    assert len(names) == -(-size // (PIECE_BYTES - 20))
    found = find(backend)
    assert (found[:size], found[size:].strip(b"\0")) == (CONTENT[:size], b"")
    assert {len(backend.value(name)) for name in names} == {128 + 32 + PIECE_BYTES}, "all values have one length"


@pytest.mark.parametrize("how", ["lost", "damaged", "of an older list", "of another place"])
@pytest.mark.parametrize("at", range(4))
def test_a_list_ends_before_a_damaged_or_missing_piece(at: int, how: str) -> None:
    backend = FaultyBackend()
    names = pieces(backend, CONTENT[::-1])
    old = backend.value(names[at])
    keep(backend, CONTENT)
    if how == "lost":
        backend.delete([names[at]])
    elif how == "damaged":
        backend.set_value(names[at], backend.value(names[at])[:-1] + b"?")
    else:
        backend.set_value(names[at], old if how == "of an older list" else backend.value(names[at - 1]))
    found = find(backend)
    if (at, how) == (0, "of an older list"):
        assert found == CONTENT[::-1][: len(found)] and len(found) == PIECE_BYTES - 20
    else:
        assert found == CONTENT[: at * (PIECE_BYTES - 20)]


def test_pieces_that_a_small_host_has_no_room_for_are_not_read() -> None:
    backend = FaultyBackend()
    keep(backend, CONTENT)
    backend.calls.clear()
    assert len(find(backend, pages=10)) == 2 * (PIECE_BYTES - 20)
    assert backend.calls == ["get", "get"]


def test_pieces_are_stored_in_turn_and_stop_at_one_that_is_rejected() -> None:
    workers = HandWorkers()
    keeping = ListWrite(make_store(FaultyBackend(), workers), CONTENT)
    for _ in range(4):
        assert not keeping.done() and len(workers.waiting) == 1
        workers.run()
    assert keeping.done() and not workers.waiting
    full = FaultyBackend(capacity_bytes=2 * PIECE_BYTES + 1000)
    full.instead["put"] = lambda keys, buffers: [False]
    keeping = ListWrite(make_store(full, clock=Clock()), CONTENT)
    assert keeping.done() and full.calls == ["put"]


def test_without_a_stored_list_nothing_is_found() -> None:
    finding = ListRead(make_store(FaultyBackend()), PAGE, 10)
    assert finding.done() and finding.value == b""
    assert not decode(finding.value, PAGE, 10)
