"""Diagnoses: why a request cannot use the prefix of an earlier one, which its client names by the id of its answer.

The server keeps a fingerprint of each request: digests of its system message, its tools and its other messages, and of
the pages of its prompt. It compares two only for the client that sent both, and looks at nothing else. So a diagnosis
reveals nothing about other clients, and "unknown" is the cause that fingerprints do not show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from mainstem.cache.keys import hash_blocks
from mainstem.cache.namespaces import Namespace, encode_namespace, split_adapter
from mainstem.runtime.request import PreparedPrompt
from mainstem.server.kept.response_store import ENTRY_BYTES, Owner, ResponseStore

_DIGEST_BYTES = 16

Cause: TypeAlias = Literal["same", "model", "system", "tools", "messages", "unknown", "not_found"]
"""The place of the first difference of two requests. "same": the later prompt begins with the earlier one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a comparison.

    Args:
        cause: see `Cause`.
        reusable: tokens of the earlier prompt that this one could use if it began with it, in whole pages.
        missed: those of them after the first difference.
    """

    cause: Cause
    missed: int = 0
    reusable: int = 0


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of a request.

    Args:
        adapter: the name of its adapter.
        scope: the rest of its namespace, encoded.
        system, tools: digests.
        messages: digests of the other messages, in order.
        tokens: of the prompt.
        page_size: tokens of a page.
        digests: chained, of the whole pages of the prompt, one after the other.
    """

    adapter: str | None
    scope: bytes
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]
    tokens: int
    page_size: int
    digests: bytes

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return ENTRY_BYTES + len(self.digests) + 4 * _DIGEST_BYTES * len(self.messages)

    def compare(self, earlier: Fingerprint | None) -> Finding:
        """Returns why this prompt does not begin with an earlier one; None: it is not known any more."""
        if earlier is None:
            return Finding("not_found")
        if self.scope != earlier.scope:
            return Finding("unknown")
        whole = len(earlier.digests) // _DIGEST_BYTES
        reusable = min(whole, (self.tokens - 1) // self.page_size)  # one token is always computed
        same = 0 if self.adapter != earlier.adapter else _same(self.digests, earlier.digests)
        missed = max(reusable - same, 0)
        return Finding(self._cause(earlier, same == whole), missed * self.page_size, reusable * self.page_size)

    def _cause(self, earlier: Fingerprint, begins: bool) -> Cause:
        if self.adapter != earlier.adapter:
            return "model"
        if begins:
            return "same"
        if self.system != earlier.system:
            return "system"
        if self.tools != earlier.tools:
            return "tools"
        return "messages" if self.messages[: len(earlier.messages)] != earlier.messages else "unknown"


def _same(one: bytes, other: bytes) -> int:
    """Returns how many digests two sequences begin with in common."""
    n = min(len(one), len(other)) // _DIGEST_BYTES
    rows = [np.frombuffer(each, np.uint64, 2 * n).reshape(n, 2) for each in (one, other)]
    different = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    return int(different[0]) if different.size else n


@dataclass(frozen=True, slots=True)
class Shape:
    """Digests of a conversation and its tools, as in `Fingerprint`."""

    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Shape:
        """Makes one of a conversation and tools as templates take them, so that breakpoints do not count."""
        begin = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        digests = tuple(_digest(message) for message in messages[begin:])
        return cls(_digest(list(messages[:begin])), _digest(list(tools)), digests)

    def fingerprint(self, prompt: PreparedPrompt, namespace: Namespace | None, page_size: int) -> Fingerprint:
        """Returns the fingerprint of the request with this prompt."""
        adapter, scope = split_adapter(encode_namespace(namespace))
        tokens = np.array(prompt.tokens)
        for image in prompt.images:  # the ids at their positions mean nothing
            tokens[image.start : image.end] = int.from_bytes(image.identity[:4], "little") >> 1
        digests = hash_blocks(tokens, page_size, _DIGEST_BYTES)
        return Fingerprint(
            adapter, scope, self.system, self.tools, self.messages, len(prompt.tokens), page_size, digests
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A client's wish to compare a request.

    Args:
        shape: of the request.
        earlier: the id of the answer to the request with which it is compared; None: with none.
        keeps: whether a later request may be compared with it.
        otherwise: the finding where it is compared with none.
    """

    shape: Shape
    earlier: str | None
    keeps: bool = True
    otherwise: Finding | None = None

    def of(self, id: str, fingerprint: Fingerprint, store: ResponseStore[Fingerprint], owner: Owner) -> Finding | None:
        """Compares the request, and keeps what later ones may be compared with.

        Args:
            id: of the answer.
            fingerprint: of the request.
            store: keeps fingerprints.
            owner: the client.
        """
        finding = None if self.earlier is None else fingerprint.compare(store.get(owner, self.earlier))
        if self.keeps:
            store.put(owner, id, fingerprint)
        return finding or self.otherwise


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(_plain(value)), digest_size=_DIGEST_BYTES).digest()


def _plain(value: Any) -> Any:
    """Returns a value without the paths of images, which say where in a body they were."""
    if isinstance(value, Mapping):
        of_image = value.get("type") == "image"
        return {name: _plain(each) for name, each in value.items() if not (of_image and name == "at")}
    return [_plain(each) for each in value] if isinstance(value, list) else value
