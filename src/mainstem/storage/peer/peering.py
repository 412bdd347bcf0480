"""An engine among its peers: where they read its pages, and whose it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peering:
    """An engine among its peers.

    Args:
        address: HOST:PORT at which they read its pages; None: they do not.
        follow: takes the addresses of all whose pages it reads; see `PeerBackend.follow`. None: it reads none.
        identity: names all that its pages depend on; engines with another one have nothing for it.
    """

    address: str | None
    follow: Callable[[Sequence[str]], None] | None
    identity: str = ""
