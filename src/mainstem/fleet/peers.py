"""Tells replicas where their peers serve pages, whenever that changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any

from mainstem.fleet.front.asking import Ask, Head, ReplicaLost, Replicas
from mainstem.fleet.replica import PEERS

log = logging.getLogger(__name__)


class PeerLists:
    """The list of peers that each replica has.

    Args:
        replicas: asked one by one.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._known: dict[str, list[str]] = {}
        self._differ = False  # whether there are replicas whose pages differ

    async def update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Sends each replica its list if that has changed; one that cannot be reached gets it the next time.

        Args:
            stats: statistics of each replica, by its name. `peer`: where it serves its pages; `identity`: what the
                contents of these depend on. Replicas with different identities are no peers.
        """
        known = {name: each["peer"] for name, each in stats.items() if each.get("peer")}
        kinds = {name: stats[name].get("identity") for name in known}
        differ = len(set(kinds.values())) > 1
        if differ and not self._differ:
            log.warning("replicas have different models or layouts, and share no pages: %s", kinds)
        self._differ = differ
        self._known = {name: those for name, those in self._known.items() if name in known}
        for name in known:
            others = sorted(
                address for other, address in known.items() if other != name and kinds[other] == kinds[name]
            )
            if self._known.get(name, []) != others and await self._send(name, others):
                self._known[name] = others

    async def _send(self, name: str, addresses: list[str]) -> bool:
        ask = Ask(PEERS, "/", body=json.dumps(addresses).encode(), to=name)
        with suppress(ReplicaLost):
            async with aclosing(self._replicas.ask(ask)) as pieces:
                async for piece in pieces:
                    return isinstance(piece, Head) and piece.status == 200
        return False
