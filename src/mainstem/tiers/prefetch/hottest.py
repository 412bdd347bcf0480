"""The list of the hottest prefixes, which a restarted server loads from storage first.

It names every page that the host holds once, hottest first. A span of pages names the page of an earlier span that it
follows. So a shared prefix is listed once, and any leading part of the list is a list:

    span   from 4 | at 4 | pages 4 | { length 4 | namespace } if from is 0 | symbols             little-endian

It follows page `at` of the path that ends with span `from`, counted from 1. With 0 it is the first of its namespace.

The store keeps the list in pieces of equal size, one note each. A piece is sealed like a page, and hidden because
namespaces may carry salts:

    piece     mark 16 | pieces 4 | content, padded with zeros after the last

The mark identifies the whole list, so two lists never mix: reading stops before a piece that is missing, damaged or of
another list. The decoder still checks every length, and takes no more pages than the host has room for.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from hashlib import sha256

from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.store import Store

PIECE_BYTES = 1 << 18
"""Bytes of a piece, its mark and count included."""

_NAME = "hottest prefixes"
_SPAN = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_PIECE = struct.Struct("<16sI")
_CONTENT_BYTES = PIECE_BYTES - _PIECE.size
_SPARE_BYTES = 64  # per page, for the header before its symbols

PathSpan = tuple[int, int, bytes, bytes]
"""From `_core.Tree.hot_spans`: number of the span that it follows (-1: none), page there, namespace, symbols."""


def encode(spans: Sequence[PathSpan], page_bytes: int, pages: int) -> bytes:
    """Encodes the hottest spans, as many as a host with this many pages can load."""
    parts: list[bytes] = []
    room = _room(pages, page_bytes)
    for before, at, namespace, symbols in spans:
        named = b"" if before >= 0 else _LENGTH.pack(len(namespace)) + namespace
        entry = _SPAN.pack(before + 1, at, len(symbols) // page_bytes) + named + symbols
        room -= len(entry)
        if room < 0:
            break
        parts.append(entry)
    return b"".join(parts)


def decode(content: bytes, page_bytes: int, pages: int) -> Prefixes:
    """Decodes a list, as far as it is intact and a host with this many pages has room for it."""
    spans: list[PathSpan] = []
    ends: list[int] = []  # the end of each span, in pages from the root
    read = 0
    while pages > 0 and read + _SPAN.size <= len(content):
        number, at, size = _SPAN.unpack_from(content, read)
        read += _SPAN.size
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
    """The prefixes left to load, hottest first. Symbols are assembled for one prefix at a time."""

    def __init__(self, spans: Sequence[PathSpan] = (), page_bytes: int = 1) -> None:
        self._spans, self._page_bytes = spans, page_bytes
        self._at = 0
        self._first: tuple[bytes, bytes] | None = None

    def __len__(self) -> int:
        return len(self._spans) - self._at

    @property
    def first(self) -> tuple[bytes, bytes]:
        """The namespace and the symbols of the next prefix."""
        self._first = self._first or self._path(self._at)
        return self._first

    def drop(self) -> None:
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


class ListWrite:
    """A list on its way to the store, one piece after the other. Stops at the first piece that is not stored."""

    def __init__(self, store: Store, content: bytes) -> None:
        self._store = store
        parts = [content[at : at + _CONTENT_BYTES] for at in range(0, len(content), _CONTENT_BYTES)]
        head = _PIECE.pack(sha256(content).digest()[:16], len(parts))
        self._left = deque((_name(number), head + part) for number, part in enumerate(parts))
        self._call = self._keep()

    def done(self) -> bool:
        """Whether no call is under way."""
        while self._call.done():
            if not self._call.value or not self._left:
                return True
            self._call = self._keep()
        return False

    def _keep(self) -> StoreCall[bool]:
        return self._store.keep_note(*self._left.popleft(), PIECE_BYTES)


class ListRead:
    """A list on its way from the store, for a host with this many pages.

    Attributes:
        value: the list as far as it was found, once `done`.
        mark: a digest of the value, from 1 to 2**56, for ranks to compare.
    """

    def __init__(self, store: Store, page_bytes: int, pages: int) -> None:
        self._store = store
        self._max_pieces = -(-_room(pages, page_bytes) // _CONTENT_BYTES)
        self._parts: list[bytes] = []
        self._head = b""
        self._call = self._find()
        self._ended = False
        self.value = b""
        self.mark = 1

    def done(self) -> bool:
        """Whether no call is under way."""
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
        """Takes a piece; whether another one follows it."""
        head = piece[: _PIECE.size]
        if not head or head != (self._head or head):
            return False
        self._head = head
        self._parts.append(piece[_PIECE.size :])
        count: int = _PIECE.unpack(head)[1]
        return len(self._parts) < min(self._max_pieces, count)


def _room(pages: int, page_bytes: int) -> int:
    return pages * (page_bytes + _SPARE_BYTES) + _CONTENT_BYTES


def _name(number: int) -> str:
    return f"{_NAME} {number}"
