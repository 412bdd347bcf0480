"""Requests of the front to replicas and their answers, as plain values that go from process to process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.namespaces import Namespace
from mainstem.errors import MainstemError
from mainstem.server.kept.continuing import SentTokens, StreamProgress

REPLICA = b"x-mainstem-replica"
"""The header of a response that names the replica which made it."""

ELSEWHERE = (421, 503)
"""Statuses of a replica that has ended, drains or failed: it computed nothing, and another one should answer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The parts of a request that a router uses.

    Args:
        tokens: int32 [length]; the bytes of the body if the front cannot read it as a prompt.
        namespace: within which its KV is shared.
        session: requests of one session go to one replica while nothing else is known; None: it has none.
        replica: the one that keeps what the request continues, such as a response; None: any.
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
        prompt: for the router; None: any replica will do.
        to: the replica that must answer; None: the router chooses.
        avoid: replicas that could not answer it.
        tracked: whether the pieces of a stream say which tokens they show, so that another replica can resume it.
        progress: what another replica has sent of the stream; None: nothing.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prompt: Prompt | None = None
    to: str | None = None
    avoid: frozenset[str] = frozenset()
    tracked: bool = False
    progress: StreamProgress | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The status and headers of an answer. Its body follows as bytes.

    Args:
        status: of HTTP.
        headers: names in lower case, and values.
        replica: the one that answers.
        progress: of a stream that another replica can resume; no client sees it.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str
    progress: StreamProgress | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a body, with what the front has to know of it.

    Args:
        body: the bytes.
        sent: the tokens in them, of a stream that another replica can resume; no client sees it.
        lost: the replica cannot end the stream.
        last: the answer ends with it.
    """

    body: bytes
    sent: SentTokens | None = None
    lost: bool = False
    last: bool = False


Part: TypeAlias = Head | Piece | bytes
"""Of an answer."""


class ReplicaLost(MainstemError):
    """A replica ended, or cannot be reached, before it answered in full.

    Args:
        replica: its name, if it is known.
        refused: it answered, with a status that sends the request elsewhere.
    """

    def __init__(self, replica: str | None = None, *, refused: bool = False) -> None:
        super().__init__(f"the replica {replica or '(unknown)'} was lost")
        self.replica, self.refused = replica, refused


class Replicas(Protocol):
    """The replicas of a fleet, as the front sees them."""

    def names(self) -> Sequence[str]:
        """Returns the replicas that take requests."""

    def everyone(self) -> Sequence[str]:
        """Returns all replicas with a cache: also those that only compute prompts."""

    def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """Sends a request to a replica, and yields its answer: a head, then the body in pieces.

        Raises:
            ReplicaLost: it ended before its answer did, or no replica can be reached.
        """
