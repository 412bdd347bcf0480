"""A client of LMCache's stand-alone server (`lmcache_server HOST PORT cpu`), which keeps values in its memory.

It speaks the protocol of the server and needs no package of LMCache. It supports no tensors and no other LMCache mode.

    request   command  length  format  dtype  location  shape[4]  key[150]     9 int32 and a key padded with blanks
    reply     code     length  format  dtype  shape[4]  location               9 int32

The value follows a PUT request, which has no reply, or a GET reply. The server answers each connection in order, so
requests are pipelined, and a HEALTH request after some PUTs reports when they are done. It cannot delete or list, so:

    <prefix>@1@0@0@uint8              epoch: no bytes; its shape is the name of the current epoch
    <prefix>.<epoch>@1@1@<hex>@uint8  mark: no bytes; its shape is the length of the value, 0 after a delete
    <prefix>.<epoch>@1@0@<hex>@uint8  the value; no bytes after a delete

`exists` reads marks, since EXIST is also true of deleted values. `clear` starts a new epoch. The values of earlier
epochs stay in the memory of the server until it ends, because it never evicts.

Source of the protocol and its constants: LMCache 0.5.6, modules lmcache.v1.protocol and lmcache.v1.server.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, Backend, BackendStats, Capabilities
from mainstem.storage.options import Readers, parse_host, parse_text, read_options
from mainstem.units import parse_timeout

_PUT, _GET, _EXIST, _HEALTH = 1, 2, 3, 5
_FOUND, _MISSING = 200, 400
_BINARY, _UINT8 = 4, 6
_REQUEST = struct.Struct("<9i150s")
_REPLY = struct.Struct("<9i")
_LONGEST = (1 << 31) - 1
_AHEAD = 64
"""Pipelined requests. They must fit the receive buffer of the server, or both sides block in a write."""


class LMCacheBackend(Backend):
    """Values in the memory of an LMCache server, which never evicts and is limited by its machine only.

    An empty value looks like a deleted one, so `put` refuses it.

    Args:
        host: host of the server.
        port: port of the server.
        timeout_s: above 0; a call that takes longer raises, so choose it for the largest batch.
        prefix: prefix of all names: 1 to 40 letters, digits, `.`, `_` or `-`.

    Raises:
        BadArgument: invalid prefix.
        BackendUnavailable: the server does not answer.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=True, evicts=False, overwrites=True
    )

    def __init__(self, host: str, port: int, *, timeout_s: float = 5.0, prefix: str = "mainstem") -> None:
        if not re.fullmatch(r"[\w.-]{1,40}", prefix, re.ASCII):
            raise BadArgument("prefix", prefix, "1 to 40 letters, digits, dots, underscores or hyphens")
        self._address = (host, port)
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._epoch_name = f"{prefix}@1@0@0@uint8"
        self._idle: list[_Connection] = []
        self._closed = False
        self._lock = threading.Lock()
        try:
            with self._session() as connection:
                connection.wait_for_puts(self._epoch_name)
        except StorageError as error:
            raise BackendUnavailable(f"no LMCache server at {host}:{port}: {error}") from error

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`lmcache://127.0.0.1:65432?timeout=5&prefix=mainstem`."""
        host, port = parse_host(address, "//host:port")
        readers: Readers = {"timeout": ("timeout_s", parse_timeout), "prefix": ("prefix", parse_text)}
        return cls(host, port, **read_options(options, readers))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Reads marks, pipelined."""
        with self._session() as connection:
            epoch = self._epoch(connection)
            replies = connection.ask([_request(_GET, _mark_name(epoch, key)) for key in keys])
            return [reply.shape > 0 for reply in replies]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Pipelines the requests and receives into the buffers.

        If a writer ended in the middle of a value, the server closes the connection of each reader of that value, and
        outstanding replies are lost. Then the rest is read one by one; such a value counts as absent and is deleted.
        """
        wanted = list(zip(keys, buffers, strict=True))
        deadline = time.monotonic() + self._timeout_s
        lengths: list[int] = []
        unfinished: list[bytes] = []
        ahead = _AHEAD
        while True:
            try:
                with self._session(deadline) as connection:
                    self._receive(connection, wanted[len(lengths) :], lengths, ahead)
                break
            except StorageError as error:
                if not isinstance(error.__cause__, ConnectionError if ahead > 1 else _EndedInValue):
                    raise
                if ahead == 1:
                    unfinished.append(keys[len(lengths)])
                    lengths.append(ABSENT)
                ahead = 1
        if unfinished:
            self.delete(unfinished)
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Sends all values, then their marks. Returns once the server has received the last one."""
        wanted = list(zip(keys, buffers, strict=True))
        if any(len(buffer) > _LONGEST for buffer in buffers):
            raise StorageError("refused", f"LMCache takes values of up to {_LONGEST} bytes")
        with self._session() as connection:
            epoch = self._epoch(connection)
            marks = []
            for key, buffer in wanted:
                if len(buffer):
                    connection.send(_request(_PUT, _value_name(epoch, key), len(buffer)))
                    connection.send(buffer)
                    marks.append(_request(_PUT, _mark_name(epoch, key), shape=(len(buffer), 0)))
            connection.send(b"".join(marks))
            connection.wait_for_puts(self._epoch_name)
        return [len(buffer) > 0 for buffer in buffers]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Overwrites existing values by empty ones. The server keeps two names for each."""
        with self._session() as connection:
            epoch = self._epoch(connection)
            replies = connection.ask([_request(_EXIST, _value_name(epoch, key)) for key in keys])
            there = [key for key, reply in zip(keys, replies, strict=True) if reply.found]
            connection.send(b"".join(_request(_PUT, _mark_name(epoch, key)) for key in there))
            connection.send(b"".join(_request(_PUT, _value_name(epoch, key)) for key in there))
            connection.wait_for_puts(self._epoch_name)

    def clear(self) -> None:
        """Starts a new epoch for every client with this prefix. This frees no memory of the server."""
        name = (1 + secrets.randbelow(_LONGEST), secrets.randbelow(_LONGEST))
        with self._session() as connection:
            connection.send(_request(_PUT, self._epoch_name, shape=name))
            connection.wait_for_puts(self._epoch_name)

    def stats(self) -> BackendStats:
        """Returns no counts: the server does not report them."""
        if self._closed:
            raise StorageError("closed", "the LMCache store is closed")
        return BackendStats()

    def close(self) -> None:
        """Closes idle connections. Those in use are closed at the end of their calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _epoch(self, connection: _Connection) -> str:
        """Returns the current prefix of value names."""
        (reply,) = connection.ask([_request(_GET, self._epoch_name)])
        return f"{self._prefix}.{reply.shape:x}.{reply.shape_1:x}"

    def _receive(
        self, connection: _Connection, wanted: Sequence[tuple[bytes, memoryview]], lengths: list[int], ahead: int
    ) -> None:
        """Appends the length of each value to `lengths`, which shows the progress if this raises."""
        epoch = self._epoch(connection)
        replies = connection.ask([_request(_GET, _value_name(epoch, key)) for key, _ in wanted], ahead)
        for (_, buffer), reply in zip(wanted, replies, strict=True):
            if reply.length:
                connection.receive_value(reply.length, buffer)
            lengths.append(reply.length or ABSENT)

    @contextmanager
    def _session(self, deadline: float | None = None) -> Iterator[_Connection]:
        """Provides a connection for one call. Closes it if the call raises, since replies may still be outstanding."""
        where = "LMCache server at {}:{}".format(*self._address)
        try:
            connection = self._take(deadline or time.monotonic() + self._timeout_s)
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
        except TimeoutError as error:
            raise StorageError("timeout", f"{where}: no answer in {self._timeout_s:g} s") from error
        except OSError as error:
            raise StorageError("unreachable", f"{where}: {error}") from error
        self._release(connection)

    def _take(self, deadline: float) -> _Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise StorageError("closed", "the LMCache store is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return _Connection(self._address, deadline)
            if connection.is_quiet():
                connection.deadline = deadline
                return connection
            connection.close()

    def _release(self, connection: _Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class _EndedInValue(ConnectionError):
    """The server announced a value and closed the connection before the last byte."""


class _Reply(NamedTuple):
    """A parsed reply. `shape` and `shape_1` are its first two dimensions, 0 if nothing was found."""

    found: bool
    length: int
    shape: int
    shape_1: int


class _Connection:
    """One connection, used by one call at a time.

    Args:
        address: host and port.
        deadline: deadline of the call that opens it, on the monotonic clock; later calls set their own.

    Raises:
        OSError: no server listens there.
    """

    def __init__(self, address: tuple[str, int], deadline: float) -> None:
        self.deadline = deadline
        self._socket = socket.create_connection(address, self._left_s())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._header = memoryview(bytearray(_REPLY.size))

    def is_quiet(self) -> bool:
        """Returns whether it is open and has received no unexpected data."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, data: bytes | memoryview) -> None:
        """Sends all data."""
        self._socket.settimeout(self._left_s())
        self._socket.sendall(data)

    def ask(self, requests: Sequence[bytes], ahead: int = _AHEAD) -> Iterator[_Reply]:
        """Pipelines requests and yields their replies. The caller reads the value of a reply before the next one."""
        for at in range(0, len(requests), ahead):
            some = requests[at : at + ahead]
            self.send(b"".join(some))
            for _ in some:
                yield self._reply()

    def wait_for_puts(self, name: str) -> None:
        """Waits until the server has received all requests. HEALTH needs some name that the server can parse."""
        for reply in self.ask([_request(_HEALTH, name)]):
            if not reply.found:
                raise StorageError("refused", "the LMCache server reports that it is not healthy")

    def receive_value(self, length: int, buffer: memoryview) -> None:
        """Receives a value into the buffer if the lengths agree; otherwise discards it."""
        got = self._receive(buffer) if length == len(buffer) else self._discard(length)
        if got < length:
            raise _EndedInValue("it closed the connection within a value")

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _reply(self) -> _Reply:
        if self._receive(self._header) < _REPLY.size:
            raise ConnectionError("it closed the connection")
        code, length, _, _, shape, shape_1, _, _, _ = _REPLY.unpack(self._header)
        if code not in (_FOUND, _MISSING) or min(length, shape, shape_1) < 0:
            raise StorageError("protocol", f"not a reply of LMCache: {bytes(self._header).hex()}")
        return _Reply(code == _FOUND, length, shape, shape_1)

    def _receive(self, view: memoryview) -> int:
        """Fills the view. Returns its length, or the bytes received before the end of the connection."""
        got = 0
        while got < len(view):
            self._acknowledge_at_once()
            self._socket.settimeout(self._left_s())
            try:
                size = self._socket.recv_into(view[got:])
            except ConnectionResetError:
                size = 0
            if size == 0:
                break
            got += size
        return got

    def _discard(self, length: int) -> int:
        scratch = memoryview(bytearray(min(length, 1 << 16)))
        discarded = 0
        while discarded < length:
            piece = scratch[: length - discarded]
            got = self._receive(piece)
            discarded += got
            if got < len(piece):
                break
        return discarded

    def _acknowledge_at_once(self) -> None:
        """Disables delayed acknowledgements: the server uses Nagle's algorithm, so each small reply would wait 40 ms.

        The kernel resets the option, so it is set before each read. Systems without it are slower but correct.
        """
        if hasattr(socket, "TCP_QUICKACK"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _left_s(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _request(command: int, name: str, length: int = 0, shape: tuple[int, int] = (0, 0)) -> bytes:
    return _REQUEST.pack(command, length, _BINARY, _UINT8, 0, *shape, 0, 0, name.encode().ljust(150))


def _value_name(epoch: str, key: bytes) -> str:
    return f"{epoch}@1@0@{key.hex()}@uint8"


def _mark_name(epoch: str, key: bytes) -> str:
    return f"{epoch}@1@1@{key.hex()}@uint8"


BACKEND = LMCacheBackend
