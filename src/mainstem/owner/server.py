"""The owner of a store on this machine: it serves `HeldValues` to processes of its user, over a Unix socket.

One thread accepts, one serves each connection, one writes to the back end. What a connection holds ends with it, so a
client that dies leaves nothing. An owner with a time to linger leaves when that time has passed since its last client.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from mainstem.errors import StorageError, redacted
from mainstem.owner import memory
from mainstem.owner.arena import Value
from mainstem.owner.held import HeldValues
from mainstem.owner.protocol import (
    KEPT,
    MAX_KEYS,
    NO_PLACE,
    VERSION,
    Channel,
    Hello,
    Kind,
    Malformed,
    Message,
    PeerUid,
    Welcome,
    new_socket,
    pack_failure,
    pack_listed,
    pack_places,
    peer_uid,
    unpack_keys,
    unpack_sizes,
)
from mainstem.storage.base import ABSENT, Backend, Listed

log = logging.getLogger(__name__)

MAX_CLIENTS = 512
"""Connections at once: fewer than the 1024 files that a process may open by default."""

_FIRST_S = 10.0
_HELLO_S = 5.0
_END_S = 10.0
_PAUSE_S = 0.1


class Owner:
    """Serves one store until `stop`, or until it has lingered.

    Args:
        spec: the store, as clients name it.
        backend: that store; `run` closes it.
        path: of the socket, in a folder that belongs to this user alone. What is there is replaced.
        host_bytes: the size of the host tier.
        linger_s: how long it stays after its last client; None: for ever. For its first it stays 10 s at least.
        uid_of: returns the user of a connection.

    Raises:
        OSError: the socket or the memory cannot be made.
    """

    def __init__(
        self,
        spec: str,
        backend: Backend,
        path: Path,
        host_bytes: int,
        *,
        linger_s: float | None,
        clock: Callable[[], float],
        uid_of: PeerUid = peer_uid,
    ) -> None:
        self._spec, self._path, self._host_bytes = spec, path, host_bytes
        self._linger_s, self._clock, self._uid_of = linger_s, clock, uid_of
        self._grace_s = None if linger_s is None else max(linger_s, _FIRST_S)
        self._lock = threading.Lock()
        self._connections: dict[_Connection, bool] = {}  # and whether it is a client of the store
        self._left_s = clock()  # when the last client left
        self._stopping = False
        self._descriptor = memory.create(host_bytes)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        view = memory.attach(self._descriptor, host_bytes)
        backend.register([view])
        self.held = HeldValues(backend, view, clock=clock)
        self._welcome = Welcome(os.getpid(), os.urandom(16), host_bytes, backend.capabilities, backend.longest)
        self._listener = new_socket()
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(MAX_CLIENTS)

    def run(self) -> None:
        """Serves, then writes what is queued and closes the store."""
        writer = threading.Thread(target=self._write, name="owner-writer", daemon=True)
        writer.start()
        selector = selectors.DefaultSelector()
        selector.register(self._wake, selectors.EVENT_READ, self._drain_wake)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        try:
            while not self._stopping and not self.lingered():
                for key, _ in selector.select(self._wait_s()):
                    key.data()
        finally:
            self._path.unlink(missing_ok=True)
            selector.close()
            self._listener.close()
            self._end_connections()
            self.held.close()
            writer.join()
            self.held.finish()
            os.close(self._descriptor)
            self._wake.close()
            self._waker.close()

    def stop(self) -> None:
        """Lets `run` end; from any thread, or a handler of signals."""
        self._stopping = True
        self._wake_up()

    def lingered(self) -> bool:
        """Returns whether it has had no client for long enough to leave."""
        return self._wait_s() == 0

    @property
    def clients(self) -> int:
        with self._lock:
            return sum(self._connections.values())

    def status(self) -> dict[str, object]:
        """Returns what it serves, and what that holds."""
        return {"spec": redacted(self._spec), "pid": os.getpid(), "clients": self.clients, **self.held.status()}

    def _wait_s(self) -> float | None:
        with self._lock:
            if self._grace_s is None or any(self._connections.values()):
                return None
            return max(0.0, self._left_s + self._grace_s - self._clock())

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake.recv(4096)

    def _wake_up(self) -> None:
        with suppress(OSError):  # it has ended, or is awake for many reasons
            self._waker.send(b"!")

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or the client is gone already
            log.warning("owner: a connection was not accepted: %s", error)
            time.sleep(_PAUSE_S)  # it would fail again at once
            return
        connection = _Connection(self, Channel(accepted), self._uid_of(accepted))
        with self._lock:
            if len(self._connections) >= MAX_CLIENTS:
                log.warning("owner: a connection was closed, there are %s", MAX_CLIENTS)
                accepted.close()
                return
            self._connections[connection] = False
        threading.Thread(target=connection.serve, name="owner-client", daemon=True).start()

    def greet(self, connection: _Connection, hello: Hello) -> str:
        """Takes a client in. Returns why it is refused; empty: it is not."""
        if connection.uid != os.getuid():
            return f"it serves user {os.getuid()}, not user {connection.uid}"
        if hello.version != VERSION:
            return f"it speaks version {VERSION} of the protocol, the client version {hello.version}"
        if hello.spec not in ("", self._spec):
            return f"it serves {redacted(self._spec)}, not {redacted(hello.spec)}"
        if hello.host_bytes not in (0, self._host_bytes):
            return f"its host tier has {self._host_bytes} bytes, not {hello.host_bytes}"
        with self._lock:
            if hello.spec:
                self._connections[connection], self._grace_s = True, self._linger_s
        connection.channel.send(Kind.WELCOME, self._welcome.pack(), self._descriptor)
        return ""

    def left(self, connection: _Connection) -> None:
        with self._lock:
            if self._connections.pop(connection, False):
                self._left_s = self._clock()
        self._wake_up()

    def _end_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.channel.cut()
        end_s = self._clock() + _END_S
        for connection in connections:
            connection.ended.wait(max(0.0, end_s - self._clock()))

    def _write(self) -> None:
        while self.held.write():
            pass


class _Connection:
    """One client's connection, and what it holds: pinned values of a get, or reserved ones of a put."""

    def __init__(self, owner: Owner, channel: Channel, uid: int) -> None:
        self._owner, self.channel, self.uid = owner, channel, uid
        self._held = owner.held
        self._leased: list[Value] = []
        self._reserved: list[tuple[bytes, Value]] = []
        self._listing: Iterator[Sequence[Listed]] | None = None
        self.ended = threading.Event()

    def serve(self) -> None:
        """Answers requests until the client is gone or makes a mistake."""
        try:
            if self._greeted():
                while True:
                    self._answer(self.channel.receive())
        except ConnectionError:
            pass
        except (Malformed, OSError) as error:
            log.warning("owner: a client was cut off: %s", error)
        finally:
            self._release()
            self.channel.close()
            self._owner.left(self)
            self.ended.set()

    def _greeted(self) -> bool:
        self.channel.limit(_HELLO_S)
        kind, body = self.channel.receive()
        if kind != Kind.HELLO:
            raise Malformed("the first message is not HELLO")
        refused = self._owner.greet(self, Hello.unpack(body))
        if refused:
            log.warning("owner: a client was refused: %s", refused)
            self.channel.send(Kind.REFUSED, refused.encode("utf-8", "surrogateescape"))
        self.channel.limit(None)
        return not refused

    def _answer(self, message: Message) -> None:
        if message.kind != Kind.COMMIT:
            self._release()
        if message.kind != Kind.SCAN:
            self._listing = None
        try:
            answer = self._act(message)
        except StorageError as error:
            answer = Kind.FAILED, pack_failure(error)
        if answer is not None:
            self.channel.send(*answer)

    def _act(self, message: Message) -> tuple[Kind, bytes] | None:
        kind, body = message
        match kind:
            case Kind.EXISTS:
                return Kind.BOOLS, bytes(self._held.exists(unpack_keys(body)))
            case Kind.GET:
                return self._get(*unpack_sizes(body))
            case Kind.PUT:
                return self._put(*unpack_sizes(body))
            case Kind.COMMIT:
                self._held.commit(self._reserved)
                self._reserved = []
            case Kind.RELEASE:
                return None
            case Kind.SCAN:
                return self._scan()
            case Kind.DELETE:
                self._held.delete(unpack_keys(body))
            case Kind.CLEAR:
                self._held.clear()
            case Kind.STATS:
                return Kind.JSON, json.dumps(asdict(self._held.stats())).encode()
            case Kind.STATUS:
                return Kind.JSON, json.dumps(self._owner.status()).encode()
            case _:
                raise Malformed(f"{kind.name} is not for an owner")
        return Kind.OK, b""

    def _get(self, keys: list[bytes], lengths: list[int]) -> tuple[Kind, bytes]:
        answers = self._held.get(keys, lengths)
        self._leased = [value for _, value in answers if value is not None]
        return Kind.PLACES, pack_places(
            [(NO_PLACE if value is None else value.offset, length) for length, value in answers]
        )

    def _put(self, keys: list[bytes], lengths: list[int]) -> tuple[Kind, bytes]:
        if 0 in lengths:
            raise Malformed("a value is empty")
        rooms = self._held.reserve(keys, lengths)
        pairs = list(zip(keys, rooms))  # as many as there was room for  # noqa: B905
        self._reserved = [(key, room) for key, room in pairs if isinstance(room, Value)]
        places = [(room.offset, room.length) if isinstance(room, Value) else _no_room(room) for _, room in pairs]
        return Kind.PLACES, pack_places(places)

    def _scan(self) -> tuple[Kind, bytes]:
        if self._listing is None:
            self._listing = _pages(self._held.scan())
        page = next(self._listing, None)
        if page is None:
            self._listing = None
            return Kind.OK, b""
        return Kind.LISTED, pack_listed(page)

    def _release(self) -> None:
        if self._leased:
            self._held.release(self._leased)
            self._leased = []
        if self._reserved:
            self._held.abort([value for _, value in self._reserved])
            self._reserved = []


def _pages(listing: Iterator[Sequence[Listed]]) -> Iterator[Sequence[Listed]]:
    """Divides batches, which may be empty, so that each fits a message."""
    for batch in listing:
        for at in range(0, len(batch) or 1, MAX_KEYS):
            yield batch[at : at + MAX_KEYS]


def _no_room(kept: bool) -> tuple[int, int]:
    return (KEPT if kept else NO_PLACE), ABSENT
