"""The identities that wrote to a store, listed in it, so that a server can say why it finds nothing there.

The keys of pages depend on the whole identity, so pages of another layout, page size or number of ranks are never
found, and nothing shows that they are there. So each store has one note that lists the identities that opened it for
writing, newest first, as texts for people. Its key depends on the secret only. It is sealed and hidden as other notes.

    [{"model": "SmolLM2-135M", "dtype": "bfloat16", "page size": "16", "ranks": "2", ...}, ...]       JSON, then zeros

The list informs people and decides nothing. A note that is damaged, of another format or not there is an empty list. A
full store may evict it like any value, so servers enter themselves again from time to time. Of two that enter at the
same moment, one may not see the other's entry and replace the list without it, until that server enters again. Entries
that both saw are never lost so, except in a store whose first value of a key stays: there the note is deleted before it
is written, and a kill between the two loses the list.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from itertools import groupby

from mainstem.cache.identity import Identity
from mainstem.errors import StorageError
from mainstem.storage.base import Backend
from mainstem.tiers.storage import sealed
from mainstem.tiers.storage.sealer import Sealer

LISTED = 32
"""The most identities that are listed; the oldest are dropped."""

ROOM_BYTES = (1 << 15) - sealed.note_bytes(0)
"""Bytes of the list. The oldest entries are dropped if there is no room for them."""

Summary = dict[str, str]
"""An identity for people: the names of what distinguishes it, and their values as texts."""

_NAME = "identities"
_PREFIX = "page_first/v1"  # of the layout of each component
_TEXT_CHARACTERS = 200  # of one value; the digest of a longer one takes the place of its end
_SHOWN_CHARACTERS = 40
_RANKS = {"tp_size": "ranks"}
_SHAPING = {"dtype", "page size", "ranks"}
"""The fields that determine the layout: where one of them differs, the layout does, too."""


def summarize(identity: Identity) -> Summary:
    """Describes an identity. All ranks of one server have the same summary."""
    summary = {}
    for field in fields(identity):
        value = getattr(identity, field.name)
        if field.name == "extra":
            for item in value:  # such as "codec int8"
                name, _, text = item.partition(" ")
                summary[name] = text
        elif field.name not in (("tp_rank", "tp_size") if identity.replicated else ("tp_rank",)):
            summary[_RANKS.get(field.name, field.name.replace("_", " "))] = str(value)
    summary["layout"] = _shortened(summary["layout"])
    return {name: _fitted(text) for name, text in summary.items()}


def id_of(summary: Summary, sealer: Sealer) -> bytes:
    """Returns the id of an identity in the labels of its values, of its summary as `find` returns it."""
    return sealer.id_of(json.dumps(summary, sort_keys=True).encode())


def find(backend: Backend, sealer: Sealer, causes: Counter[str]) -> list[Summary]:
    """Reads the list of a store, newest first; empty if there is none. Counts why a note was not taken.

    Raises:
        StorageError: the back end cannot be read.
    """
    content, cause = sealed.find_note(backend, sealer, sealer.common_record(_NAME), ROOM_BYTES)
    if cause not in (None, "absent"):
        causes[cause] += 1
    return _decode(content)


def enter(backend: Backend, sealer: Sealer, causes: Counter[str]) -> list[Summary]:
    """Adds the identity of a sealer to the list of a store, unless it is there. Returns the list as it was before.

    Counts why the list was not taken, or not written.

    Raises:
        StorageError: the back end cannot be read.
    """
    assert sealer.identity is not None
    own, listed = summarize(sealer.identity), find(backend, sealer, causes)
    if own not in listed:
        try:
            sealed.keep_note(backend, sealer, sealer.common_record(_NAME), _encode([own, *listed]), ROOM_BYTES)
        except StorageError as error:
            causes[error.cause] += 1
    return listed


def explain(own: Summary, listed: Sequence[Summary]) -> str | None:
    """Says in a line why a store with pages of the same model has none for this identity.

    Args:
        own: the identity that looks for its pages.
        listed: what `enter` returned.

    Returns:
        How the listed identity that differs least differs. None: the own identity is listed, or none of its model is.
    """
    others = [other for other in listed if other.get("model") == own["model"]]
    if own in listed or not others:
        return None
    nearest = min(others, key=lambda other: len(_differing(own, other)))
    names = _differing(own, nearest)
    if not _SHAPING.isdisjoint(names):
        names = [name for name in names if name != "layout"]
    differences = "; ".join(_difference(name, nearest, own) for name in names)
    return f"pages of {own['model']} that others stored are not found, because they differ: {differences}"


def describe(summary: Summary) -> str:
    """Returns a summary as a line, long values cut, but not the layout: it shows the components."""
    return ", ".join(f"{name} {text if name == 'layout' else _cut(text)}" for name, text in summary.items())


def _differing(own: Summary, other: Summary) -> list[str]:
    return [name for name in {**own, **other} if own.get(name) != other.get(name)]


def _difference(name: str, other: Summary, own: Summary) -> str:
    """Names a field with both values, long ones from the word on in which they differ."""
    there, here = other.get(name, "unknown"), own.get(name, "unknown")
    start = 0
    if max(len(there), len(here)) > _SHOWN_CHARACTERS:
        same = next((at for at, pair in enumerate(zip(there, here, strict=False)) if len({*pair}) == 2), 0)
        start = here.rfind(" ", 0, same) + 1
    return f"{name} {_cut(there, start)}, here {_cut(here, start)}"


def _cut(text: str, start: int = 0) -> str:
    end = start + _SHOWN_CHARACTERS
    return ("..." if start else "") + text[start:end] + ("..." if len(text) > end else "")


def _shortened(layout: str) -> str:
    """Leaves out of the components' formats what all share, and writes equal tensors once, with their number."""
    return " + ".join(map(_shortened_component, layout.split(" + ")))


def _shortened_component(layout: str) -> str:
    prefix, _, tensors = layout.partition(" ")
    if prefix != _PREFIX:
        return layout
    runs = [(tensor, len([*run])) for tensor, run in groupby(tensors.replace(", ", ",").split())]
    return " ".join(f"{count} {tensor}" if count > 1 else tensor for tensor, count in runs)


def _fitted(text: str) -> str:
    if len(text) <= _TEXT_CHARACTERS:
        return text
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[: _TEXT_CHARACTERS - len(digest) - 1]} {digest}"


def _encode(listed: Sequence[Summary]) -> bytes:
    for count in range(min(len(listed), LISTED), 0, -1):
        content = json.dumps(listed[:count]).encode()
        if len(content) <= ROOM_BYTES:
            return content
    return b""


def _decode(content: bytes) -> list[Summary]:
    try:
        listed = json.loads(content.rstrip(b"\0") or b"[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(listed, list):
        return []
    return [
        entry
        for entry in listed[:LISTED]
        if isinstance(entry, dict) and all(isinstance(text, str) for text in entry.values())
    ]
