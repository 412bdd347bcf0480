"""`Publisher`: sends events to routers from a thread of its own, as vLLM's publisher does.

    PUB       topic (empty), number of the batch (8 bytes, big-endian), batch
    ROUTER    the request is the number of the first batch that is wanted; each answer is a number and a batch, and the
              last one has the number -1 and no batch

An empty batch is sent once a second if there is no other, so that a router soon notices that it missed the last one.

The scheduler never waits: it adds an event to a queue, and adds none while the queue is full. Moves then stay in the
core, which counts those that it must drop. Events hold prompts, so the sockets are reachable from this machine only,
or they use CURVE: a folder has the server's key pair and the public keys of those who may connect.
"""

from __future__ import annotations

import logging
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.events.feed import KEPT_BYTES, Feed
from mainstem.events.source import BlockStored, Event
from mainstem.imports import needs
from mainstem.metric import Metric, gauge

if TYPE_CHECKING:
    import zmq

log = logging.getLogger(__name__)

_QUEUED = 1 << 16  # events
_SENT_AT_ONCE = 1024  # events
_UNREAD = 4096  # batches that wait for a router that does not read; it loses what follows, and finds a gap
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_LINGER_MS = 1000
_HEARTBEAT_MS = 1000
_PAUSE_S = 0.001
_HINT = "KV events need pyzmq: pip install 'mainstem[events]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStats:
    """Counts of a publisher.

    Args:
        published: events sent. queued: events that wait to be sent. replays: requests for what was missed.
        dropped: pages that moved without an event, because nobody took them in time; everything was sent anew.
    """

    published: int
    queued: int
    replays: int
    dropped: int

    METRICS: ClassVar = (
        Metric("mainstem_kv_events", "KV events published", "published"),
        gauge("mainstem_kv_events_queued", "KV events that wait to be sent", "queued"),
        Metric("mainstem_kv_event_replays", "Requests of routers for KV events that they missed", "replays"),
        Metric("mainstem_kv_events_dropped_pages", "Pages that moved without a KV event: everything was published anew",
            "dropped"),
    )  # fmt: skip


class Publisher:
    """Publishes events until it is closed.

    Args:
        endpoint: `tcp://HOST:PORT` to publish on; port 0 takes a free one.
        replay: the same for replays; None: there are none.
        keys: folder with `server.key_secret`, and the public keys of routers, as `zmq.auth` writes them.
        clock: seconds since 1970.
        adapter_name: the name that clients use for the adapter of a namespace.

    Attributes:
        endpoint, replay: the addresses, with the ports taken.
        state: returns events that store everything: `PrefixCache.events.state`. While it is None, a router that comes
            too late for a replay learns only of later events.

    Raises:
        BackendUnavailable: pyzmq is not installed.
        BadArgument: an address is in use, or a key is missing or readable by others.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None = None,
        keys: Path | None = None,
        *,
        clock: Callable[[], float] = time.time,
        adapter_name: Callable[[str], str] = str,
    ) -> None:
        self._clock, self._adapter_name = clock, adapter_name
        self._queue: deque[Event] = deque()
        self._closing = self._failed = False
        self._published = self._replays = 0
        self.state: Callable[[], Iterable[Event]] | None = None
        self._feed = Feed(clock(), KEPT_BYTES if replay else 0)
        with ExitStack() as stack:
            self._open(stack, endpoint, replay, keys)
            self._reader, self._writer = socket.socketpair()
            stack.callback(self._reader.close)
            stack.callback(self._writer.close)
            self._writer.setblocking(False)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._run, name="mainstem-events", daemon=True)
        self._thread.start()

    def _open(self, stack: ExitStack, endpoint: str, replay: str | None, keys: Path | None) -> None:
        with needs("zmq", _HINT):
            import zmq
        context = stack.enter_context(zmq.Context())
        pair = None if keys is None else _read_keys(context, stack, keys)

        def bound(name: str, kind: int, address: str) -> zmq.Socket[bytes]:
            made: zmq.Socket[bytes] = stack.enter_context(context.socket(kind))
            made.setsockopt(zmq.LINGER, _LINGER_MS)
            made.setsockopt(zmq.SNDHWM, 0 if kind == zmq.ROUTER else _UNREAD)  # a replay is never cut
            made.setsockopt(zmq.IPV6, "[" in address)
            if pair is not None:
                made.curve_publickey, made.curve_secretkey = pair
                made.curve_server = True
            try:
                made.bind(address)
            except zmq.ZMQError as error:
                raise BadArgument(name, address, f"an address that can be bound: {error}") from None
            return made

        self._pub = bound("kv_events", zmq.PUB, endpoint)
        self.endpoint = _address(self._pub)
        self._router = None if replay is None else bound("kv_events_replay", zmq.ROUTER, replay)
        self.replay = None if self._router is None else _address(self._router)

    # ---------------------------------------------------------------- any one thread

    @property
    def has_room(self) -> bool:
        """Whether events may be added now."""
        return len(self._queue) < _QUEUED and not self._failed

    @property
    def lags(self) -> bool:
        """Whether there is no room now, but will be once more is sent."""
        return len(self._queue) >= _QUEUED and not self._failed

    def put(self, event: Event) -> None:
        """Adds an event. Does not block."""
        self._queue.append(event)
        if len(self._queue) == 1:
            self._wake()

    def stats(self, dropped: int) -> EventStats:
        """Returns the counts, with those of the pages that were dropped before they came here."""
        return EventStats(published=self._published, queued=len(self._queue), replays=self._replays, dropped=dropped)

    def close(self) -> None:
        """Sends what is queued, and ends; a second call does nothing."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._stack.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake, or closed
            self._writer.send(b"\0")

    # ---------------------------------------------------------------- its thread

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._reader, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            self._send([])  # voids the contents of a server before this one
            while not (self._closing and not self._queue):
                ready = dict(poller.poll(0 if self._queue else _HEARTBEAT_MS))
                if self._reader.fileno() in ready:
                    self._reader.recv(4096)
                if self._router is not None and self._router in ready:
                    self._answer(self._router)
                if self._queue or not ready:
                    self._send([self._queue.popleft() for _ in range(min(len(self._queue), _SENT_AT_ONCE))])
        except Exception:
            self._failed = True
            log.critical("the publisher of KV events failed; no more are sent", exc_info=True)

    def _send(self, events: list[Event]) -> None:
        number, batch = self._feed.publish([self._named(event) for event in events], self._clock())
        self._published += len(events)
        self._pub.send_multipart((b"", number.to_bytes(_NUMBER_BYTES, "big"), batch))

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        client, *_, number_from = router.recv_multipart()
        self._replays += 1
        first = int.from_bytes(number_from[:_NUMBER_BYTES], "big")
        state = None if self.state is None else map(self._named, self.state())
        for number, batch in self._feed.replay(first, self._clock(), state, _give_way):
            router.send_multipart((client, b"", number.to_bytes(_NUMBER_BYTES, "big"), batch))
        router.send_multipart((client, b"", _END, b""))

    def _named(self, event: Event) -> Event:
        if isinstance(event, BlockStored) and event.lora_name is not None:
            return replace(event, lora_name=self._adapter_name(event.lora_name))
        return event


def _give_way() -> None:
    """Lets the scheduler run, which this thread would keep from the interpreter's lock while it computes."""
    time.sleep(_PAUSE_S)


def _address(bound: zmq.Socket[bytes]) -> str:
    import zmq

    return bound.get_string(zmq.LAST_ENDPOINT)


def _read_keys(context: zmq.Context[zmq.Socket[bytes]], stack: ExitStack, folder: Path) -> tuple[bytes, bytes]:
    """Returns the server's public and secret key, and admits only clients whose public keys are in the folder."""
    import zmq
    import zmq.auth
    from zmq.auth.thread import ThreadAuthenticator

    if not zmq.has("curve"):
        raise BackendUnavailable("this build of libzmq has no CURVE")
    own = folder / "server.key_secret"
    if not own.is_file() or own.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadArgument("kv_events_keys", folder, "a folder with server.key_secret, which only its owner can read")
    public, secret = zmq.auth.load_certificate(own)
    if secret is None:
        raise BadArgument("kv_events_keys", own, "a certificate with a secret key")
    guard = ThreadAuthenticator(context)
    guard.start()
    stack.callback(guard.stop)
    guard.configure_curve(domain="*", location=folder)
    return public, secret
