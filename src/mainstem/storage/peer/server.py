"""The server for an engine's peers: values out of its memory, on a thread of its own, within a share of its time.

Two bounds protect the engine's own requests: a share of the time (`Share`), and a limit on the bytes in flight. A
request beyond either of them is answered BUSY, which its sender takes for a miss.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

from mainstem.errors import BadArgument
from mainstem.imports import needs
from mainstem.share import Share
from mainstem.storage.base import ABSENT
from mainstem.storage.peer import wire
from mainstem.storage.peer.lines import HINT
from mainstem.storage.peer.wire import Request

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_STATUS = {wire.OK: "answered", wire.BUSY: "busy", wire.REFUSED: "refused", wire.MALFORMED: "malformed"}
_ALIVE_MS, _DEAD_MS = 1000, 5000  # how often a connection is tried, and when it is given up
_TICK_MS = 1000
_WAITING = 64  # requests of one connection that wait to be read


class Source(Protocol):
    """The source of a server's values. Called on the server's thread."""

    def lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the length of each value, or `ABSENT`."""

    def copy(self, key: bytes, length: int) -> bytearray | None:
        """Returns a copy of a value of this length that is whole, or None."""


class Responder:
    """Answers peers, without sockets or threads.

    Args:
        source: has the values.
        secret: of the peers that may ask.
        share: of the time.
        clock: monotonic time in seconds.

    Attributes:
        counts: requests by what was answered (answered, busy, refused, malformed), and the values and bytes given.
    """

    def __init__(self, source: Source, secret: bytes, share: Share, clock: Callable[[], float]) -> None:
        self._source, self._key, self._share, self._clock = source, wire.key_of(secret), share, clock
        self.counts: Counter[str] = Counter()

    def answer(self, parts: Sequence[bytes], room: Callable[[], int]) -> tuple[list[bytes], list[bytearray]]:
        """Returns the answer to a message: what is before its values, and the values.

        Args:
            parts: of the message.
            room: returns how many bytes of values may be sent now.
        """
        request = wire.read_request(parts, self._key)
        if isinstance(request, int):
            self._count(request)
            return wire.write_answer(request, 0), []
        if not self._share.allows():
            return self._busy(request)
        begin_s = self._clock()
        try:
            return self._answer(request, room)
        finally:
            self._share.spend(self._clock() - begin_s)

    def _count(self, status: int) -> None:
        name = _STATUS[status]
        if status == wire.REFUSED and not self.counts[name]:
            log.warning("peers: one asked with another secret; further ones are only counted")
        self.counts[name] += 1

    def _busy(self, request: Request) -> tuple[list[bytes], list[bytearray]]:
        self._count(wire.BUSY)
        return wire.write_answer(wire.BUSY, request.number), []

    def _answer(self, request: Request, room_of: Callable[[], int]) -> tuple[list[bytes], list[bytearray]]:
        lengths = list(self._source.lengths(request.keys))
        values: list[bytearray] = []
        if request.operation == wire.GET:
            room = room_of()
            fit = [length for length, wanted in zip(lengths, request.lengths, strict=True) if length == wanted]
            if fit and room < min(fit):
                return self._busy(request)
            for at, (key, wanted) in enumerate(zip(request.keys, request.lengths, strict=True)):
                if lengths[at] != wanted:
                    continue
                value = self._source.copy(key, wanted) if wanted <= room else None
                if value is None or len(value) != wanted:
                    lengths[at] = ABSENT
                else:
                    values.append(value)
                    room -= wanted
        self._count(wire.OK)
        self.counts["values"] += len(values)
        self.counts["bytes"] += sum(map(len, values))
        return wire.write_answer(wire.OK, request.number, lengths), values


class PeerServer:
    """Answers peers until it is closed.

    Args:
        source: has the values.
        address: HOST:PORT to listen on; port 0 takes a free one.
        secret: of the peers that may ask.
        share: of the time.
        in_flight_bytes: of values that are sent at once.
        clock: monotonic time in seconds.

    Attributes:
        address: with the port taken.

    Raises:
        BackendUnavailable: pyzmq is not installed.
        BadArgument: the address cannot be bound.
    """

    def __init__(
        self,
        source: Source,
        address: str,
        secret: bytes,
        *,
        share: Share | None = None,
        in_flight_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        with needs("zmq", HINT):
            import zmq
        self._responder = Responder(source, secret, share or Share(0.1, clock=clock), clock)
        self._in_flight_bytes = in_flight_bytes
        self._flying: list[tuple[zmq.MessageTracker, int]] = []
        self._closing = False
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            self._router: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.ROUTER))
            self._bind(address)
            self._reader, self._writer = socket.socketpair()
            stack.callback(self._reader.close)
            stack.callback(self._writer.close)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._run, name="mainstem-peer", daemon=True)
        self._thread.start()

    def _bind(self, address: str) -> None:
        import zmq

        router = self._router
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, "[" in address)
        router.setsockopt(zmq.MAXMSGSIZE, wire.MOST_REQUEST_BYTES)
        router.setsockopt(zmq.RCVHWM, _WAITING)
        router.setsockopt(zmq.HEARTBEAT_IVL, _ALIVE_MS)  # so that one that has stopped does not hold bytes in flight
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
        router.copy_threshold = 0  # the tracker of a part that was copied says nothing about the copy
        try:
            router.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            raise BadArgument("peer_listen", address, f"HOST:PORT that can be bound: {error}") from None
        self.address = router.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    @property
    def counts(self) -> dict[str, int]:
        """Requests by what was answered, and the values and bytes given."""
        return dict(self._responder.counts)

    def close(self) -> None:
        """Ends; a second call does nothing. A peer that waits for an answer gets none."""
        self._closing = True
        with suppress(BlockingIOError, OSError):  # it is closed
            self._writer.send(b"\0")
        self._thread.join()
        self._stack.close()

    # ---------------------------------------------------------------- its thread

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._reader, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing:
                if self._router in dict(poller.poll(_TICK_MS)):
                    self._receive()
        except Exception:
            log.critical("peers are answered no more", exc_info=True)

    def _receive(self) -> None:
        client, *parts = self._router.recv_multipart()
        self._send(client, *self._responder.answer(parts, self._room))

    def _room(self) -> int:
        """Returns how many more bytes may be sent now."""
        self._flying = [flight for flight in self._flying if not flight[0].done]
        return self._in_flight_bytes - sum(size for _, size in self._flying)

    def _send(self, client: bytes, head: list[bytes], values: list[bytearray]) -> None:
        import zmq

        tracker = self._router.send_multipart([client, *head, *values], copy=False, track=bool(values))
        if isinstance(tracker, zmq.MessageTracker):
            self._flying.append((tracker, sum(map(len, values))))
