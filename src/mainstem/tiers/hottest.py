"""The list of the hottest prefixes, as bytes: what a restart brings back first.

    count 4 | { namespace length 4 | namespace | key length 4 | key } ...        little-endian

It is hidden, since namespaces may carry salts, and sealed like a page; even so only lengths that fit are believed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

NAME = "hottest prefixes"

MOST = 256
"""Prefixes that are looked at."""

CONTENT_BYTES = 1 << 18
"""That the list may take; what does not fit is left out."""

_LENGTH = struct.Struct("<I")


def encode(prefixes: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Pairs of a namespace and the symbols of a prefix, the hottest first; what another one begins with is left out."""
    parts: list[bytes] = []
    kept: list[tuple[bytes, bytes]] = []
    room = CONTENT_BYTES - _LENGTH.size
    for namespace, key in prefixes:
        entry = _LENGTH.pack(len(namespace)) + namespace + _LENGTH.pack(len(key)) + key
        known = any(namespace == other and longer.startswith(key) for other, longer in kept)
        if not known and len(entry) <= room:
            room -= len(entry)
            parts.append(entry)
            kept.append((namespace, key))
    return _LENGTH.pack(len(parts)) + b"".join(parts)


def decode(content: bytes, page_bytes: int) -> list[tuple[bytes, bytes]]:
    """What `encode` was given; ends where something does not fit."""
    prefixes: list[tuple[bytes, bytes]] = []
    fields: list[bytes] = []
    if len(content) < _LENGTH.size:
        return []
    (count,) = _LENGTH.unpack_from(content)
    at = _LENGTH.size
    while len(prefixes) < min(count, MOST) and at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if at + length > len(content):
            break
        fields.append(content[at : at + length])
        at += length
        if len(fields) == 2:
            if not fields[1] or len(fields[1]) % page_bytes:
                break
            prefixes.append((fields[0], fields[1]))
            fields = []
    return prefixes
