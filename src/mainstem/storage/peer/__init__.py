"""Peers: an engine reads pages out of another engine's memory. `client` asks and `server` answers; `wire` has the
messages, `lines` the connections.

Pages travel as they are stored, sealed, and the reader verifies them: a peer can lose a page, never forge one.
"""

from mainstem.storage.peer.beside import Beside
from mainstem.storage.peer.client import NO_SECRET, PeerBackend, Peering
from mainstem.storage.peer.lines import Line, Lines
from mainstem.storage.peer.server import PeerServer, Responder, Source

BACKEND = PeerBackend

__all__ = [
    "BACKEND", "NO_SECRET", "Beside", "Line", "Lines", "PeerBackend", "PeerServer", "Peering", "Responder", "Source",
]  # fmt: skip
