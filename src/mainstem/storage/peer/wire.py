"""The messages between peers: parts of ZMQ messages, little-endian.

    request   head | keys, 32 bytes each, then the lengths of the buffers, 8 bytes each (`GET` only) | tag 32
    answer    head | lengths, 8 bytes each, -1 for what is absent | each value that fits its buffer, a part each

    head      magic 4 | version 1 | operation, or status 1 | 0 2 | number of the request 8

The tag is a keyed BLAKE2b over head and body: a sender without the secret gets nothing but `REFUSED`. The secret does
not travel. Pages are not encrypted: whoever can read the network can read them, as with most stores.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mainstem.storage.base import KEY_BYTES

EXISTS, GET = 1, 2
"""Operations."""

OK, BUSY, REFUSED, MALFORMED = 0, 1, 2, 3
"""Statuses. BUSY: the peer has spent its share of the time. REFUSED: the sender has another secret."""

MOST_KEYS = 4096
"""The most keys of a request."""

MOST_REQUEST_BYTES = MOST_KEYS * (KEY_BYTES + 8)
"""The longest part of a request."""

_MAGIC, _VERSION = b"MSPR", 1
_HEAD = struct.Struct("<4sBBHQ")


class Request(NamedTuple):
    """A question to a peer.

    Args:
        operation: `EXISTS` or `GET`.
        number: of the request; the answer has the same.
        keys: of values.
        lengths: of the buffers, for `GET`.
    """

    operation: int
    number: int
    keys: Sequence[bytes]
    lengths: Sequence[int] = ()


def key_of(secret: bytes) -> bytes:
    """Returns the key of the tags of those who share a secret."""
    return hashlib.blake2b(secret, digest_size=32, person=b"mainstem.peer").digest()


def write_request(request: Request, key: bytes) -> list[bytes]:
    """Returns the parts of a request."""
    head = _HEAD.pack(_MAGIC, _VERSION, request.operation, 0, request.number)
    body = b"".join(request.keys) + np.asarray(request.lengths, "<i8").tobytes()
    return [head, body, _tag(key, head, body)]


def read_request(parts: Sequence[bytes], key: bytes) -> Request | int:
    """Returns a request, or the status to answer if it is none."""
    if len(parts) != 3:
        return MALFORMED
    head, body, tag = parts
    if not hmac.compare_digest(tag, _tag(key, head, body)):
        return REFUSED
    if len(head) != _HEAD.size:
        return MALFORMED
    magic, version, operation, _, number = _HEAD.unpack(head)
    each = KEY_BYTES + (8 if operation == GET else 0)
    count = len(body) // each
    if (magic, version) != (_MAGIC, _VERSION) or operation not in (EXISTS, GET):
        return MALFORMED
    if len(body) != count * each or count > MOST_KEYS:
        return MALFORMED
    keys = [body[at : at + KEY_BYTES] for at in range(0, count * KEY_BYTES, KEY_BYTES)]
    return Request(operation, number, keys, np.frombuffer(body, "<i8", offset=count * KEY_BYTES).tolist())


def write_answer(status: int, number: int, lengths: Sequence[int] = ()) -> list[bytes]:
    """Returns the parts of an answer that are before its values."""
    return [_HEAD.pack(_MAGIC, _VERSION, status, 0, number), np.asarray(lengths, "<i8").tobytes()]


def read_answer(parts: Sequence[memoryview], number: int, count: int) -> tuple[int, list[int]] | None:
    """Returns status and lengths of an answer; None: it is no answer to this request for `count` values."""
    if len(parts) < 2 or len(parts[0]) != _HEAD.size:
        return None
    magic, version, status, _, answered = _HEAD.unpack(parts[0])
    if (magic, version) != (_MAGIC, _VERSION) or (status in (OK, BUSY) and answered != number):
        return None
    if len(parts[1]) != (count * 8 if status == OK else 0):
        return None
    return status, np.frombuffer(parts[1], "<i8").tolist()


def _tag(key: bytes, head: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(head + body, digest_size=32, key=key).digest()
