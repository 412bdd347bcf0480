"""What the front asks of a replica, and what comes back: plain values that go from process to process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.namespaces import Namespace
from mainstem.errors import MainstemError
from mainstem.server.kept.continuing import Begun, Said

REPLICA = b"x-mainstem-replica"
"""The header of a response that names the replica which made it."""

ELSEWHERE = (421, 503)
"""What a replica answers that has ended, drains or failed: another one should answer, and nothing was computed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request is routed by.

    Args:
        tokens: int32 [length]; the bytes of the body, where these could not be read as a prompt.
        namespace: within which its KV is shared.
        session: requests of one session go to one replica while nothing else is known; None: it has none.
        replica: the one that has what the request continues, such as a response; None: any.
    """

    tokens: NDArray[np.int32]
    namespace: Namespace | None = None
    session: str | None = None
    replica: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request for a replica.

    Args:
        method, path, query: of the request.
        headers: names in lower case, and values.
        body: all of it.
        prompt: what it is routed by; None: any replica will do.
        to: the replica that must answer; None: the router chooses.
        avoid: replicas that could not answer it.
        follows: whether the pieces of a stream say what is in them, so that another replica can go on with it.
        begun: what another replica has sent of the stream; None: nothing.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prompt: Prompt | None = None
    to: str | None = None
    avoid: frozenset[str] = frozenset()
    follows: bool = False
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The begin of an answer. Its body follows as bytes.

    Args:
        status: of HTTP.
        headers: names in lower case, and values.
        replica: who answers.
        begun: of a stream that another replica can go on with; no client sees it.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a body, of which more is known than its bytes.

    Args:
        body: the bytes.
        said: what they say, of a stream that another replica can go on with; no client sees it.
        lost: the replica cannot end the stream.
        last: nothing follows it.
    """

    body: bytes
    said: Said | None = None
    lost: bool = False
    last: bool = False


Part: TypeAlias = Head | Piece | bytes
"""Of an answer."""


class ReplicaLost(MainstemError):
    """A replica ended, or cannot be reached, before it answered in full.

    Args:
        replica: its name, if it is known.
        refused: it answered that another one should.
    """

    def __init__(self, replica: str | None = None, *, refused: bool = False) -> None:
        super().__init__(f"the replica {replica or '(unknown)'} was lost")
        self.replica, self.refused = replica, refused


class Replicas(Protocol):
    """The replicas of a fleet, as the front sees them."""

    def names(self) -> Sequence[str]:
        """Returns the replicas that take requests."""

    def everyone(self) -> Sequence[str]:
        """Returns all replicas that answer what concerns the cache: those that compute prompts alone, too."""

    def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """Sends a request to a replica, and yields its answer: a head, then the body in pieces.

        Raises:
            ReplicaLost: it ended before its answer did, or nobody can be reached.
        """
