"""A client of the owner of a store: a back end for any number of processes of this machine.

    shared+file:/var/cache/kv?capacity=64GiB            shared(host_bytes=4GiB)+redis://127.0.0.1:6379/0

It finds the owner of exactly this store, or starts it. Values are copied from and to the memory that it shares with the
owner; only keys and places go through the socket. An owner that dies is a failed call; the next one finds or starts
another.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mainstem.errors import BackendUnavailable, BadArgument, StorageError, redacted
from mainstem.owner import memory
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
    Welcome,
    new_socket,
    pack_keys,
    pack_sizes,
    peer_uid,
    unpack_failure,
    unpack_listed,
    unpack_places,
)
from mainstem.owner.start import Place, launch
from mainstem.settings.owner import OwnerConfig
from mainstem.storage.base import KEY_BYTES, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.options import check_options
from mainstem.units import parse_bytes, parse_seconds, parse_timeout

Bytes = NDArray[np.uint8]

TIMEOUT_S = 5.0
_START_S = 60.0
_PAUSE_S = 0.02
_LINGER_S = 60.0


class SharedBackend(Backend):
    """A store whose host tier and connections belong to an owner, another process of the same user.

    Args:
        spec: the store.
        host_bytes: the size of the owner's host tier, at least 1 MiB. None: whatever it has; 8 GiB if this starts it.
        linger_s: how long an owner that this starts stays after its last client.
        socket: where the owner listens; None: where the spec says.
        timeout_s: what a call may take, if it does not have to start an owner.
        start_s: what the start of an owner may take.
        sleep: waits while another client starts the owner, or while one ends.

    Raises:
        BadArgument: a path is too long, or its folder is not this user's alone.
        BackendUnavailable: the owner has another version or size, or cannot be started; the message says why.
    """

    def __init__(
        self,
        spec: str,
        *,
        host_bytes: int | None = None,
        linger_s: float = _LINGER_S,
        socket: str | None = None,
        timeout_s: float = TIMEOUT_S,
        start_s: float = _START_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._place = Place.of(spec, socket)
        size = OwnerConfig.host_bytes if host_bytes is None else host_bytes
        self._config = OwnerConfig(str(self._place.path), size, linger_s)
        self._hello = Hello(VERSION, host_bytes or 0, self._place.spec)
        self._timeout_s, self._clock, self._sleep = timeout_s, clock, sleep
        self._idle: list[_Connection] = []
        self._open_ones: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._memory: tuple[bytes, Bytes] = b"", np.empty(0, np.uint8)
        self._closed = False
        self._lock = threading.Lock()
        try:
            first = self._connect(start_s)
        except OSError as error:
            raise BackendUnavailable(f"{self._where}: {error}") from error
        self._capabilities, self.longest = first.welcome.capabilities, first.welcome.longest
        self._idle.append(first)
        _clients.add(self)

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`shared+SPEC`, `shared(host_bytes=8GiB&linger=60s&socket=/run/user/1000/kv.sock&timeout=5)+SPEC`.

        Args:
            address: the spec of the store.
            options: `host_bytes`, the size of the host tier; `linger`, how long an owner that this starts stays
                after its last client; `socket`, where it listens; `timeout` of a call.
        """
        check_options(options, ("host_bytes", "linger", "socket", "timeout"))
        host = options.get("host_bytes")
        return cls(
            address,
            host_bytes=None if host is None else parse_bytes("host_bytes", host),
            linger_s=parse_seconds("linger", options.get("linger", f"{_LINGER_S}")),
            socket=options.get("socket"),
            timeout_s=parse_timeout("timeout", options.get("timeout", f"{TIMEOUT_S}")),
        )

    @classmethod
    def open_existing(cls, address: str, options: Mapping[str, str]) -> Self:
        """Connects to the owner if there is one. It starts none, which would make a store or cut it."""
        if status(Place.of(address, options.get("socket")).path) is None:
            raise BackendUnavailable(f"{redacted(address)} has no owner: name the store without shared+")
        return cls.from_spec(address, options)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the store, but shared on this machine, with a copy, and evicting from the host tier."""
        return replace(self._capabilities, shared=True, zero_copy=False)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks the owner, in one round trip for each 2048 keys."""
        answers: list[bool] = []
        with self._session() as connection:
            for at in range(0, len(keys), MAX_KEYS):
                some = keys[at : at + MAX_KEYS]
                _check_keys(some)
                body = connection.ask(Kind.EXISTS, pack_keys(some), Kind.BOOLS)
                if len(body) != len(some):
                    raise Malformed(f"{len(body)} answers for {len(some)} keys")
                answers += map(bool, body)
        return answers

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Copies values from shared memory. One round trip, if the batch fits the host tier beside what is in use."""
        wanted = list(zip(keys, buffers, strict=True))
        _check_keys(keys)
        lengths: list[int] = []
        with self._session() as connection:
            while len(lengths) < len(wanted):
                some = wanted[len(lengths) : len(lengths) + MAX_KEYS]
                places = connection.places(Kind.GET, some)
                for (offset, length), (_, buffer) in zip(places, some):  # noqa: B905  # as many as had room
                    if offset != NO_PLACE:
                        _copy(_bytes(buffer), connection.memory[offset : offset + length])
                    lengths.append(length)
                connection.release()
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Copies values to shared memory, two round trips a batch. The owner writes them to the store later."""
        wanted = list(zip(keys, buffers, strict=True))
        _check_keys(keys)
        if not all(map(len, buffers)):
            raise BadArgument("value", b"", "at least one byte")
        stored: list[bool] = []
        with self._session() as connection:
            while len(stored) < len(wanted):
                some = wanted[len(stored) : len(stored) + MAX_KEYS]
                places = connection.places(Kind.PUT, some)
                for (offset, length), (_, buffer) in zip(places, some):  # noqa: B905  # as many as had room
                    if offset >= 0:
                        _copy(connection.memory[offset : offset + length], _bytes(buffer))
                    stored.append(offset >= 0 or offset == KEPT)
                connection.ask(Kind.COMMIT, b"", Kind.OK)
        return stored

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists the host tier, then what only the store has; one round trip for each batch."""
        with self._session() as connection:
            while (page := connection.next_page()) is not None:
                yield page

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes values in the host tier and in the store."""
        _check_keys(keys)
        with self._session() as connection:
            for at in range(0, len(keys), MAX_KEYS):
                connection.ask(Kind.DELETE, pack_keys(keys[at : at + MAX_KEYS]), Kind.OK)

    def clear(self) -> None:
        """Deletes every value in the host tier and in the store, for all clients."""
        with self._session() as connection:
            connection.ask(Kind.CLEAR, b"", Kind.OK)

    def stats(self) -> BackendStats:
        """Returns the counts of the store, with what waits to be written to it."""
        with self._session() as connection:
            return BackendStats(**connection.ask_json(Kind.STATS))

    def close(self) -> None:
        """Leaves the owner, which leaves a while after its last client."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._memory = b"", np.empty(0, np.uint8)
        for connection in idle:
            connection.close()

    def forked(self) -> None:
        """Abandons what this process shares with the one that it was forked from."""
        self._lock = threading.Lock()
        self._idle = []
        for connection in list(self._open_ones):
            connection.close()

    @property
    def _where(self) -> str:
        return f"the owner of {self._place.shown}"

    @contextmanager
    def _session(self) -> Iterator[_Connection]:
        """Provides a connection for one call. Closes it if the call raises, which ends what it holds."""
        connection = None
        try:
            connection = self._take()
            connection.channel.limit(self._timeout_s)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if (translated := self._translated(error)) is None:
                raise
            raise translated from error
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _translated(self, error: BaseException) -> StorageError | None:
        match error:
            case TimeoutError():
                return StorageError("timeout", f"{self._where}: no answer in {self._timeout_s:g} s")
            case OSError() | BackendUnavailable():
                return StorageError("unreachable", f"{self._where}: {error}")
            case Malformed():
                return StorageError("protocol", f"{self._where}: {error}")
        return None

    def _take(self) -> _Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise StorageError("closed", f"{self._where}: this client is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(self._timeout_s)
            if connection.channel.is_quiet():
                return connection
            connection.close()

    def _connect(self, within_s: float) -> _Connection:
        """Connects to the owner. Starts one if there is none; waits if another client does, or if one ends.

        Raises:
            BackendUnavailable: that is not possible; the message says why.
            OSError: the owner does not answer.
        """
        end_s = self._clock() + within_s
        while True:
            left_s = max(_PAUSE_S, end_s - self._clock())
            try:
                return self._open(left_s)
            except (FileNotFoundError, ConnectionError) as error:
                if self._clock() >= end_s:
                    raise BackendUnavailable(
                        f"{self._where} has been starting or ending for {within_s:g} s, see {self._place.log}"
                    ) from error
            lock = self._place.lock()
            if lock is None:
                self._sleep(_PAUSE_S)
                continue
            try:
                launch(self._place, self._config, lock, left_s)
            finally:
                os.close(lock)

    def _open(self, within_s: float) -> _Connection:
        """Opens a connection to an owner that is there, and maps its memory if it is a new one's."""
        connection = _Connection(self._place, self._hello, within_s)
        try:
            with self._lock:
                if self._memory[0] != connection.welcome.name:
                    self._memory = connection.welcome.name, connection.attach()
                connection.memory = self._memory[1]
        except BaseException:
            connection.close()
            raise
        finally:
            connection.forget_descriptor()
        self._open_ones.add(connection)
        return connection


class _Connection:
    """A connection to an owner, used by one call at a time.

    Raises:
        BackendUnavailable: the owner refuses this client, or is another user's.
        OSError: there is none, or it does not answer.
    """

    memory: Bytes

    def __init__(self, place: Place, hello: Hello, within_s: float) -> None:
        connected = new_socket()
        self.channel = Channel(connected)
        self._descriptor: int | None = None
        try:
            self.channel.limit(within_s)
            connected.connect(str(place.path))
            if (uid := peer_uid(connected)) != os.getuid():
                raise BackendUnavailable(f"{place.path} is served by user {uid}")
            self.channel.send(Kind.HELLO, hello.pack())
            message, self._descriptor = self.channel.receive_descriptor()
            if message.kind == Kind.REFUSED:
                raise BackendUnavailable(
                    f"the owner at {place.path} refuses: {bytes(message.body).decode(errors='replace')}"
                )
            self.welcome = Welcome.unpack(_expected(message, Kind.WELCOME))
        except Malformed as error:
            self.close()
            raise BackendUnavailable(f"{place.path} is no owner's of this version: {error}") from error
        except BaseException:
            self.close()
            raise

    def attach(self) -> Bytes:
        if self._descriptor is None:
            raise BackendUnavailable("the owner sent no memory")
        return np.frombuffer(memory.attach(self._descriptor, self.welcome.memory_bytes), np.uint8)

    def forget_descriptor(self) -> None:
        """Closes the file of the memory; mappings stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def ask(self, kind: Kind, body: bytes, expected: Kind) -> memoryview:
        """Sends a request. Returns the body of the answer, which is valid until the next one.

        Raises:
            StorageError: the owner reports that it failed.
            Malformed: the answer is another one.
            OSError: there is none.
        """
        self.channel.send(kind, body)
        return _expected(self.channel.receive(), expected)

    def places(self, kind: Kind, wanted: Sequence[tuple[bytes, memoryview]]) -> list[tuple[int, int]]:
        """Asks where values are, or may be written: for as many as there is room, from the first."""
        body = pack_sizes([key for key, _ in wanted], [len(buffer) for _, buffer in wanted])
        places = unpack_places(self.ask(kind, body, Kind.PLACES))
        if not 0 < len(places) <= len(wanted):
            raise Malformed(f"{len(places)} places for {len(wanted)} values")
        return places

    def next_page(self) -> list[Listed] | None:
        """Asks for the next values of a listing; None: there are no more."""
        self.channel.send(Kind.SCAN)
        answer = self.channel.receive()
        return None if answer.kind == Kind.OK else unpack_listed(_expected(answer, Kind.LISTED))

    def ask_json(self, kind: Kind) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(bytes(self.ask(kind, b"", Kind.JSON)))
        return answer

    def release(self) -> None:
        """Ends what the last request holds."""
        self.channel.send(Kind.RELEASE)

    def close(self) -> None:
        """Closes the connection, and ends what it holds."""
        self.forget_descriptor()
        self.channel.close()


def status(path: Path, within_s: float = TIMEOUT_S) -> dict[str, Any] | None:
    """Returns what the owner at a socket holds and has counted; None: there is none.

    Raises:
        BackendUnavailable: it refuses, is another user's, or does not answer.
    """
    try:
        with closing(_Connection(Place("", path), Hello(VERSION, 0, ""), within_s)) as connection:
            return connection.ask_json(Kind.STATUS)
    except (FileNotFoundError, ConnectionError):
        return None
    except (OSError, Malformed, StorageError) as error:
        raise BackendUnavailable(f"the owner at {path}: {error}") from error


def _expected(message: Message, kind: Kind) -> memoryview:
    if message.kind == Kind.FAILED:
        raise unpack_failure(message.body)
    if message.kind != kind:
        raise Malformed(f"{message.kind.name} in place of {kind.name}")
    return message.body


_copy = np.copyto  # without the lock of the interpreter, which slices of a memoryview keep


def _bytes(buffer: memoryview) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise BadArgument("key", key, f"{KEY_BYTES} bytes")


_clients: weakref.WeakSet[SharedBackend] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client.forked()


os.register_at_fork(after_in_child=_after_fork)
