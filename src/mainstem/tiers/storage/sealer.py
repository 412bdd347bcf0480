"""Stored pages: their names and keys, and the header that identifies their content.

    header   magic 8 | payload bytes 8 | key 32 | sealed 8 | label 40 | tag 32        HEADER_BYTES = 128
    payload  the page's content

A page's name is a keyed BLAKE3 over the name of the page before it and its symbols; the first parent is one over the
identity and the namespace. Each component of a page is a value of its own: its key is a keyed BLAKE3 over the name, the
component and the shard. So two values share a key only if everything that shaped them is the same. The tag is a keyed
BLAKE3 over the rest of the slot: a page that was damaged, cut, moved, or made without the secret does not verify.

The label says for whom and of what a value is, so that people can see who fills a store. It is hidden from those
without the secret, under a mask for each key, so that they do not even see which values belong together. Nothing is
decided by it, nor by the time of sealing. Values of before 2026-11-23 have neither.

BLAKE3, its keyed mode and its key derivation: https://github.com/BLAKE3-team/BLAKE3-specs.

This module handles bytes. It knows nothing of trees, stores or tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mainstem.errors import BadArgument
from mainstem.imports import needs

if TYPE_CHECKING:
    from blake3 import blake3

    from mainstem.cache.identity import Identity

HEADER_BYTES = 128
"""The header before the content of every stored page."""

PUBLIC_SECRET = b"mainstem: without a secret, pages are safe from damage only"
"""The default when no secret is given: damage is still detected, forgery is not."""

_MAGIC = b"MAINSTM1"
_FRONT = struct.Struct("<8sQ32sQ40s")
_LABEL = struct.Struct("<12s12s16s")
_TAG = slice(HEADER_BYTES - 32, HEADER_BYTES)
_SECRET_BYTES = 16
_UNLABELLED = bytes(_LABEL.size)


class Label(NamedTuple):
    """For whom and of what a stored value is. Ids are of 12 bytes, made with the secret (`Sealer.id_of`).

    Args:
        identity: of the identity's description.
        namespace: of the encoded namespace.
        component: its name, such as "full"; "note" for a value that is no page. Cut to 16 bytes.
    """

    identity: bytes = bytes(12)
    namespace: bytes = bytes(12)
    component: str = "note"


class Header(NamedTuple):
    """The fields of a value's header, whether or not its seal is right.

    Args:
        key: of the value.
        sealed_s: when it was sealed, in seconds since the epoch; None: it does not say.
        label: None: it has none, or it was labelled under another secret.
    """

    key: bytes
    sealed_s: float | None
    label: Label | None


class Sealer:
    """Computes names and keys of pages, seals pages and verifies them.

    Args:
        identity: the identity of all pages that it handles; None: it handles notes for all identities only.
        secret: keys and tags depend on it; the same for all processes that share a store, at least 16 bytes.

    Raises:
        BadArgument: the secret is too short.
        BackendUnavailable: the package blake3 is not installed.
    """

    def __init__(self, identity: Identity | None, secret: bytes = PUBLIC_SECRET) -> None:
        if len(secret) < _SECRET_BYTES:
            raise BadArgument("secret", f"{len(secret)} bytes", f"at least {_SECRET_BYTES} bytes")
        with needs("blake3", "storage needs blake3: pip install 'mainstem[storage]'"):
            from blake3 import blake3
        self._blake3 = blake3
        self._name_key = blake3(secret, derive_key_context="mainstem 2026-11 names of stored pages").digest()
        self._tag_key = blake3(secret, derive_key_context="mainstem 2026-11 tags of stored pages").digest()
        self._mark_key = blake3(secret, derive_key_context="mainstem 2026-11 marks of hidden notes").digest()
        self._mask_key = blake3(secret, derive_key_context="mainstem 2026-11 masks of hidden notes").digest()
        self._label_key = blake3(secret, derive_key_context="mainstem 2026-11 masks of labels").digest()
        self._id_key = blake3(secret, derive_key_context="mainstem 2026-11 ids in labels").digest()
        self.identity = identity
        self._identity = b"" if identity is None else identity.encode()
        self._shard = b"" if identity is None else identity.shard.encode()

    def root(self, namespace: bytes) -> bytes:
        """Returns the name of the page before the first pages of a namespace."""
        data = len(self._identity).to_bytes(8, "little") + self._identity + namespace
        return self._named(b"root" + data)

    def names(self, parent: bytes, symbols: bytes | memoryview, page_bytes: int) -> list[bytes]:
        """Returns the names of the whole pages of `symbols`, which follow the page with name `parent`."""
        names = []
        for at in range(0, len(symbols) - page_bytes + 1, page_bytes):
            parent = self._named(b"page" + parent + symbols[at : at + page_bytes])
            names.append(parent)
        return names

    def keys(self, names: Sequence[bytes], component: str) -> list[bytes]:
        """Returns the keys of one component of the pages with these names, as this rank holds it."""
        row = component.encode()
        suffix = len(row).to_bytes(8, "little") + row + self._shard
        return [self._named(b"part" + name + suffix) for name in names]

    def record(self, name: str) -> bytes:
        """Returns the key of a note, such as a piece of the list of the hottest prefixes."""
        shard = len(self._shard).to_bytes(8, "little") + self._shard
        return self._named(b"note" + shard + self._identity + name.encode())

    def common_record(self, name: str) -> bytes:
        """Returns the key of a note for all identities, which depends on the secret only."""
        return self._named(b"common note" + name.encode())

    def hide(self, content: bytes) -> bytes:
        """Hides content from readers without the secret. Deterministic; the result is 32 bytes longer."""
        mark = self._blake3(content, key=self._mark_key).digest()
        return mark + self._masked(content, mark)

    def reveal(self, hidden: bytes) -> bytes:
        """Reverses `hide`; returns garbage if another secret was used."""
        return self._masked(hidden[32:], hidden[:32])

    def _masked(self, content: bytes, mark: bytes) -> bytes:
        stream = self._blake3(mark, key=self._mask_key).digest(length=len(content)) if content else b""
        return bytes(np.bitwise_xor(np.frombuffer(content, np.uint8), np.frombuffer(stream, np.uint8)))

    def id_of(self, text: bytes) -> bytes:
        """Returns the id of an identity's description or of an encoded namespace, for labels."""
        return self._blake3(text, key=self._id_key).digest(length=12)

    def seal(self, slot: memoryview, key: bytes, label: Label | None = None, sealed_s: float = 0.0) -> None:
        """Writes the header of a value; its payload is already in the slot.

        Args:
            slot: room for the header, and the payload.
            key: of the value.
            label: None: the header has none.
            sealed_s: the time in seconds since the epoch; 0: the header does not say it.
        """
        packed = _UNLABELLED
        if label is not None:
            packed = self._hidden(_LABEL.pack(*label[:2], label.component.encode()[:16]), key)
        _FRONT.pack_into(slot, 0, _MAGIC, len(slot) - HEADER_BYTES, key, int(sealed_s), packed)
        slot[_TAG] = self._tag(slot)

    def header(self, slot: memoryview) -> Header | None:
        """Reads a header without verifying its seal. None: these bytes are no value of this length."""
        if len(slot) < HEADER_BYTES:
            return None
        magic, length, key, sealed_s, packed = _FRONT.unpack_from(slot)
        if magic != _MAGIC or length != len(slot) - HEADER_BYTES:
            return None
        return Header(key, float(sealed_s) if sealed_s else None, self._label(packed, key))

    def _label(self, packed: bytes, key: bytes) -> Label | None:
        identity, namespace, text = _LABEL.unpack(self._hidden(packed, key))
        component = text.rstrip(b"\0").decode("ascii", "replace")
        if packed == _UNLABELLED or not (component.isascii() and component.isprintable() and component):
            return None
        return Label(identity, namespace, component)

    def _hidden(self, label: bytes, key: bytes) -> bytes:
        mask = self._blake3(key, key=self._label_key).digest(length=len(label))
        return (int.from_bytes(label, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(label), "little")

    def verify(self, slot: memoryview, key: bytes) -> str | None:
        """Returns None if a slot holds the page with this key, else the reason: "altered" or "misdirected"."""
        magic, length, stored, *_ = _FRONT.unpack_from(slot)
        if magic != _MAGIC or length != len(slot) - HEADER_BYTES or bytes(slot[_TAG]) != self._tag(slot):
            return "altered"
        return None if stored == key else "misdirected"

    def _tag(self, slot: memoryview) -> bytes:
        hasher: blake3 = self._blake3(slot[: _TAG.start], key=self._tag_key)
        hasher.update(slot[HEADER_BYTES:])
        return hasher.digest()

    def _named(self, data: bytes) -> bytes:
        return self._blake3(data, key=self._name_key).digest()
