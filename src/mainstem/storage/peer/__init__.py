"""Peers: what another engine has in its memory is fetched from it. `server` gives, `client` fetches; `wire` and
`lines` are between.

Pages come and go as they are stored, sealed, and the reader verifies them: a peer can lose a page, never forge one.
"""

from mainstem.storage.peer.beside import Beside
from mainstem.storage.peer.client import NO_SECRET, PeerBackend, Peering
from mainstem.storage.peer.lines import Line, Lines
from mainstem.storage.peer.server import Giving, PeerServer, Share, Source

BACKEND = PeerBackend

__all__ = [
    "BACKEND", "NO_SECRET", "Beside", "Giving", "Line", "Lines", "PeerBackend", "PeerServer", "Peering", "Share",
    "Source",
]  # fmt: skip
