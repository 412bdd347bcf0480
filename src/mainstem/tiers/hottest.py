"""The list of the hottest prefixes: what a restart brings back first.

It names all that the host holds, each page once, what is hottest first. A span of pages says behind which page of
which earlier span it comes, so what prefixes share is there once, and any beginning of the list is a list:

    span   from 4 | at 4 | pages 4 | { length 4 | namespace } if from is 0 | symbols             little-endian

It comes behind page `at` of the path that span `from` ends, counted from 1; 0: it is the first of its namespace.

The store keeps the list in pieces of one size, each a note of its own: hidden, since namespaces may carry salts, and
sealed like a page:

    piece     mark 16 | pieces 4 | content, and zeros behind the last

The mark is of the whole list, so two lists are never mixed: what is read ends in front of a piece that is missing,
damaged or of another list. Even so only lengths that fit are believed, and no more than the host has room for.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from hashlib import sha256

from mainstem.tiers.store import Store, StoreCall

PIECE_BYTES = 1 << 18
"""Of each value that the list is kept in."""

_NAME = "hottest prefixes"
_STRETCH = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_PIECE = struct.Struct("<16sI")
_CONTENT_BYTES = PIECE_BYTES - _PIECE.size
_SPARE_BYTES = 64  # a page, for what stands in front of its symbols

PathSpan = tuple[int, int, bytes, bytes]
"""Of `_core.Tree.hot_spans`: the number of the span before it (-1: none), at which page, namespace, symbols."""


def encode(spans: Sequence[PathSpan], page_bytes: int, pages: int) -> bytes:
    """The hottest spans, up to what a host of so many pages takes back."""
    parts: list[bytes] = []
    room = _room(pages, page_bytes)
    for before, at, namespace, symbols in spans:
        named = b"" if before >= 0 else _LENGTH.pack(len(namespace)) + namespace
        entry = _STRETCH.pack(before + 1, at, len(symbols) // page_bytes) + named + symbols
        room -= len(entry)
        if room < 0:
            break
        parts.append(entry)
    return b"".join(parts)


def decode(content: bytes, page_bytes: int, pages: int) -> Prefixes:
    """What `encode` was given, as far as it is whole and a host of so many pages has room for it."""
    spans: list[PathSpan] = []
    ends: list[int] = []  # of each span, in pages from the root
    read = 0
    while pages > 0 and read + _STRETCH.size <= len(content):
        number, at, size = _STRETCH.unpack_from(content, read)
        read += _STRETCH.size
        namespace = b""
        if number == 0:
            if read + _LENGTH.size > len(content):
                break
            (length,) = _LENGTH.unpack_from(content, read)
            read += _LENGTH.size + length
            namespace = content[read - length : read]
        if number > len(spans) or at > (ends[number - 1] if number else 0) or read > len(content):
            break
        size = min(size, pages, (len(content) - read) // page_bytes)
        if size == 0:
            break
        spans.append((number - 1, at, namespace, content[read : read + size * page_bytes]))
        ends.append(at + size)
        read += size * page_bytes
        pages -= size
    return Prefixes(spans, page_bytes)


class Prefixes:
    """Prefixes that are left to bring back, the hottest first. Their symbols are put together one at a time."""

    def __init__(self, spans: Sequence[PathSpan] = (), page_bytes: int = 1) -> None:
        self._spans, self._page_bytes = spans, page_bytes
        self._at = 0
        self._first: tuple[bytes, bytes] | None = None

    def __len__(self) -> int:
        return len(self._spans) - self._at

    @property
    def first(self) -> tuple[bytes, bytes]:
        """The namespace and the symbols of the next."""
        self._first = self._first or self._path(self._at)
        return self._first

    def drop(self) -> None:
        """Goes on to the one behind it."""
        self._at, self._first = self._at + 1, None

    def _path(self, number: int) -> tuple[bytes, bytes]:
        number, end, namespace, symbols = self._spans[number]
        parts = [symbols]
        while number >= 0:
            number, at, namespace, symbols = self._spans[number]
            if at < end:
                parts.append(symbols[: (end - at) * self._page_bytes])
                end = at
        return namespace, b"".join(reversed(parts))


class Keeping:
    """The pieces of a list on their way to the store, one after the other. They end with one that is not stored."""

    def __init__(self, store: Store, content: bytes) -> None:
        self._store = store
        parts = [content[at : at + _CONTENT_BYTES] for at in range(0, len(content), _CONTENT_BYTES)]
        head = _PIECE.pack(sha256(content).digest()[:16], len(parts))
        self._left = deque((_name(number), head + part) for number, part in enumerate(parts))
        self._call = self._keep()

    def done(self) -> bool:
        """Whether nothing is under way any more."""
        while self._call.done():
            if not self._call.value or not self._left:
                return True
            self._call = self._keep()
        return False

    def _keep(self) -> StoreCall[bool]:
        return self._store.keep_note(*self._left.popleft(), PIECE_BYTES)


class Finding:
    """A list on its way from the store, for a host of so many pages.

    Attributes:
        value: what there is of it, when it is done.
        mark: the value as a number from 1 to 2**56, for ranks to compare.
    """

    def __init__(self, store: Store, page_bytes: int, pages: int) -> None:
        self._store = store
        self._most = -(-_room(pages, page_bytes) // _CONTENT_BYTES)
        self._parts: list[bytes] = []
        self._head = b""
        self._call = self._find()
        self._ended = False
        self.value = b""
        self.mark = 1

    def done(self) -> bool:
        """Whether nothing is under way any more."""
        while not self._ended and self._call.done():
            if self._take(self._call.value):
                self._call = self._find()
                continue
            self.value, self._ended = b"".join(self._parts), True
            self.mark += int.from_bytes(sha256(self.value).digest()[:7], "little")
        return self._ended

    def _find(self) -> StoreCall[bytes]:
        return self._store.find_note(_name(len(self._parts)), PIECE_BYTES)

    def _take(self, piece: bytes) -> bool:
        """Whether there is another piece behind this one."""
        head = piece[: _PIECE.size]
        if not head or head != (self._head or head):
            return False
        self._head = head
        self._parts.append(piece[_PIECE.size :])
        count: int = _PIECE.unpack(head)[1]
        return len(self._parts) < min(self._most, count)


def _room(pages: int, page_bytes: int) -> int:
    return pages * (page_bytes + _SPARE_BYTES) + _CONTENT_BYTES


def _name(number: int) -> str:
    return f"{_NAME} {number}"
