"""`Following`: brings the KV events of all replicas to a router, from a thread of its own, over ZeroMQ.

    routing statistics --follow--> connections: one to each replica's events, one to its replays
    a batch -> the next in order?  -> router.apply
               after a gap, or none for a while: ask for what was missed, at most one question at a time

Of a replica without events, the router knows the requests that it was sent. Nothing here waits for a replica.
Messages that are no batches are counted, and asked for again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mainstem.events.feed import Follower
from mainstem.events.source import Event
from mainstem.imports import needs

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_END = b"\xff" * 8
_POLL_MS = 200
_ANSWER_S = 30.0  # after which a question is asked again
_AT_ONCE = 64  # batches of one replica before it is the next one's turn
_HINT = "routing by KV events needs pyzmq: pip install 'mainstem[events]'"


Apply = Callable[[str, Iterable[Event]], None]
"""Takes events of the replica of a name; see `CostRouter.apply`."""


class _Connection:
    """The sockets to one replica. Only the thread uses it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], where: tuple[str, str], follower: Follower, now_s: float
    ) -> None:
        import zmq

        self.where = where
        self._follower = follower
        self.live, self.replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for each in (self.live, self.replays):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.RCVHWM, 0)
        self.live.subscribe(b"")
        self.live.connect(where[0])
        self.replays.connect(where[1])
        self._asked_s: float | None = None
        self.ask(0, now_s)  # all that is there

    def ask(self, first: int, now_s: float) -> None:
        """Asks for the batches from one on, unless an answer is under way."""
        if self._asked_s is None or now_s >= self._asked_s + _ANSWER_S:
            self._asked_s = now_s
            self.replays.send_multipart((b"", first.to_bytes(8, "big")))

    def receive_live(self, now_s: float) -> None:
        """Follows batches as they come."""
        for frames in _some(self.live):
            number = int.from_bytes(frames[-2], "big")
            first = self._follower.missing(number)
            if first is None:
                self._follower.follow(number, frames[-1])
            else:
                self.ask(first, now_s)  # its answer has this one, too

    def receive_replayed(self) -> None:
        """Follows batches that were asked for."""
        for frames in _some(self.replays):
            if frames[-2] == _END:
                self._asked_s = None
            else:
                self._follower.follow(int.from_bytes(frames[-2], "big"), frames[-1])

    def close(self) -> None:
        """Closes the sockets."""
        self.live.close()
        self.replays.close()


class Following:
    """Follows replicas until it is closed.

    Args:
        apply: takes the events, on the thread.
        clock: returns seconds, monotonic.

    Raises:
        BackendUnavailable: pyzmq is not installed.
    """

    def __init__(self, apply: Apply, clock: Callable[[], float] = time.monotonic) -> None:
        with needs("zmq", _HINT):
            import zmq  # noqa: F401
        self._apply, self._clock = apply, clock
        self._wanted: Mapping[str, tuple[str, str]] = {}
        self._closing = False
        self.bad = 0
        self._thread = threading.Thread(target=self._run, name="mainstem-routing", daemon=True)
        self._thread.start()

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the replicas that there are; `events` and `replay`: where each publishes. Does not block."""
        self._wanted = {
            name: (stats["events"], stats["replay"])
            for name, stats in replicas.items()
            if isinstance(stats.get("events"), str) and isinstance(stats.get("replay"), str)
        }

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self._thread.join()

    # ---------------------------------------------------------------- its thread

    def _run(self) -> None:
        import zmq

        known: dict[str, _Connection] = {}
        with zmq.Context() as context:
            poller = zmq.Poller()
            while not self._closing:
                self._connect(context, poller, known)
                ready = dict(poller.poll(_POLL_MS))
                now_s = self._clock()
                for name, each in list(known.items()):
                    self._receive(name, each, ready, now_s)
            for each in known.values():
                each.close()

    def _connect(self, context: Any, poller: Any, known: dict[str, _Connection]) -> None:
        import zmq

        wanted = self._wanted
        for name in [name for name, each in known.items() if wanted.get(name) != each.where]:
            gone = known.pop(name)
            poller.unregister(gone.live)
            poller.unregister(gone.replays)
            gone.close()
        for name, where in wanted.items():
            if name in known:
                continue
            try:
                made = _Connection(context, where, Follower(partial(self._apply, name)), self._clock())
            except zmq.ZMQError as error:
                self._note(name, error)
                continue
            known[name] = made
            poller.register(made.live, zmq.POLLIN)
            poller.register(made.replays, zmq.POLLIN)

    def _receive(self, name: str, each: _Connection, ready: Mapping[Any, int], now_s: float) -> None:
        try:
            if each.replays in ready:
                each.receive_replayed()
            if each.live in ready:
                each.receive_live(now_s)
        except (ValueError, IndexError, OverflowError) as error:  # no batch of events
            self._note(name, error)

    def _note(self, name: str, error: Exception) -> None:
        self.bad += 1
        if self.bad == 1:
            log.warning("KV events of %s cannot be read: %s", name, error)


def _some(socket: Any) -> Iterable[list[bytes]]:
    """Yields messages that are there, not too many at once."""
    import zmq

    for _ in range(_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
