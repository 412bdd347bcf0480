"""`Chooser`: what chooses the replica of a request, and what a process that has one shares. See `routing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mainstem.events.source import PUBLIC_SECRET
from mainstem.fleet.front.asking import Prompt

ROUTERS: dict[str, Any] = {}
"""The routers of this process, the newest of each deployment: Serve makes one for each handle, and does not show it. It
copies the module of a router's class, and what is named in it; so that one names this module."""

SECRET: list[bytes] = [PUBLIC_SECRET]
"""The secret of the fleet's events, the newest last. Serve makes routers without arguments of ours that are secret."""


class Chooser(Protocol):
    """Chooses the replica of a request. One thread calls it."""

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the replicas there are now, and what each of them says: where it publishes its events, its costs."""

    def order(self, prompt: Prompt | None, replicas: Sequence[str]) -> list[str]:
        """Returns the replicas, the best first."""

    def sent(self, prompt: Prompt | None, replica: str) -> None:
        """Takes into account that a request went to a replica."""

    def ended(self, replica: str) -> None:
        """Takes into account that a request has ended."""
