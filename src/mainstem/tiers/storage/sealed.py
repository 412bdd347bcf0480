"""Sealed values in a back end: why one that was read must not be used, and notes, which are hidden besides.

A note is a value that the tiers keep for themselves: a piece of the list of the hottest prefixes, the list of those who
wrote to a store. It is padded with zeros, so that all notes of one kind have one length.

These calls block and raise what the back end raises: `Store` makes them on its workers.
"""

from __future__ import annotations

from mainstem.storage.base import Backend, read_fault
from mainstem.tiers.storage.sealer import HEADER_BYTES, Label, Sealer

_MARK_BYTES = 32  # that hiding adds


def fault(sealer: Sealer, key: bytes, slot: memoryview, length: int) -> str | None:
    """Returns None if a slot holds the value with a key, else why not: "absent", "length", "altered", "misdirected".

    Args:
        length: what the back end returned for this slot.
    """
    return read_fault(len(slot), length) or sealer.verify(slot, key)


def keep_note(backend: Backend, sealer: Sealer, key: bytes, content: bytes, room_bytes: int) -> bool:
    """Stores a note, replacing the one with the same key. Returns whether the back end did."""
    slot = _slot(room_bytes)
    slot[HEADER_BYTES:] = sealer.hide(content.ljust(room_bytes, b"\0"))
    sealer.seal(slot, key, Label())  # without a time: a note that has not changed is the same bytes
    if not backend.capabilities.overwrites:
        backend.delete([key])
    return backend.put([key], [slot])[0]


def find_note(backend: Backend, sealer: Sealer, key: bytes, room_bytes: int) -> tuple[bytes, str | None]:
    """Reads a note. Returns its content, padded with zeros, and None; or nothing, and why."""
    slot = _slot(room_bytes)
    cause = fault(sealer, key, slot, backend.get([key], [slot])[0])
    return (sealer.reveal(bytes(slot[HEADER_BYTES:])), None) if cause is None else (b"", cause)


def note_bytes(room_bytes: int) -> int:
    """Returns the length of a note as a value."""
    return HEADER_BYTES + _MARK_BYTES + room_bytes


def _slot(room_bytes: int) -> memoryview:
    return memoryview(bytearray(note_bytes(room_bytes)))
