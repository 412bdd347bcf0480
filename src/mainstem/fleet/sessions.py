"""Which replica saw the longest prefix of a prompt: what is known without events.

A prefix of every few tokens is named by a hash over all before it. The replica that was sent it last is remembered. A
replica with much more under way than another one is passed over, since waiting costs more than computing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from mainstem.fleet.asking import Prompt
from mainstem.namespaces import encode_namespace

ROUTERS: list[Any] = []
"""The routers of this process, the newest last: Serve makes one for each handle, and does not show it. It copies the
module of a router's class, and what is named in it; so that one names this module."""

_BLOCK = 32  # tokens
_BLOCKS = 512  # of a prompt; what follows is the same replica's
_REMEMBERED = 1 << 17
_LEAD = 8  # requests under way more than elsewhere, at which a prefix counts no more


class Chooser(Protocol):
    """Chooses the replica of a request. One thread calls it."""

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the replicas there are now, and where each of them publishes its events."""

    def order(self, prompt: Prompt | None, replicas: Sequence[str]) -> list[str]:
        """Returns the replicas, the best first."""

    def sent(self, prompt: Prompt | None, replica: str) -> None:
        """Takes into account that a request went to a replica."""

    def ended(self, replica: str) -> None:
        """Takes into account that a request has ended."""


class SessionRouter:
    """A `Chooser` by what each replica was sent."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: Counter[str] = Counter()

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Chooser`."""
        for gone in set(self._under_way) - set(replicas):
            del self._under_way[gone]

    def order(self, prompt: Prompt | None, replicas: Sequence[str]) -> list[str]:
        """See `Chooser`."""
        ranked = sorted(replicas, key=lambda name: (self._under_way[name], name))
        known = None if prompt is None else prompt.replica or self._known(prompt, ranked)
        if known not in ranked or self._under_way[known] >= self._under_way[ranked[0]] + _LEAD:
            return ranked
        return [known, *(name for name in ranked if name != known)]

    def sent(self, prompt: Prompt | None, replica: str) -> None:
        """See `Chooser`."""
        self._under_way[replica] += 1
        for name in () if prompt is None else _names(prompt):
            self._last[name] = replica
            self._last.move_to_end(name)
        while len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

    def ended(self, replica: str) -> None:
        """See `Chooser`."""
        self._under_way[replica] = max(0, self._under_way[replica] - 1)

    def _known(self, prompt: Prompt, replicas: Sequence[str]) -> str | None:
        names = reversed(_names(prompt))
        return next((self._last[name] for name in names if self._last.get(name) in replicas), None)


def _names(prompt: Prompt) -> list[bytes]:
    """Returns the names of a prompt's session and prefixes, the shortest first."""
    root = blake2b(encode_namespace(prompt.namespace), digest_size=16)
    names = []
    if prompt.session is not None:
        session = root.copy()
        session.update(b"session" + prompt.session.encode("utf-8", "surrogatepass"))
        names.append(session.digest())
    for start in range(0, min(len(prompt.tokens), _BLOCK * _BLOCKS) - _BLOCK + 1, _BLOCK):
        root.update(prompt.tokens[start : start + _BLOCK].astype("<i4").tobytes())
        names.append(root.digest())
    return names
