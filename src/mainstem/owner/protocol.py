"""The protocol between an owner and its clients: messages over a Unix socket that keeps their boundaries.

    client    owner
    HELLO     WELCOME, with the shared memory; or REFUSED
    EXISTS    BOOLS        which keys have a value
    GET       PLACES       where values are; they stay there until RELEASE, or the next request
    PUT       PLACES       where to write values       COMMIT  OK    they are written
    RELEASE   -            ends what the last GET or PUT holds
    SCAN      LISTED       the next values of a listing, which any other request ends; or OK: there are no more
    DELETE    OK           CLEAR  OK           STATS  JSON         STATUS  JSON

Any request may be answered by FAILED: a cause and a text. One request at a time on a connection. The first bytes of
HELLO and of REFUSED are the same in all versions. A message has at most `MAX_BYTES`; a longer one ends its
connection.
"""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, fields
from enum import IntEnum
from typing import Any, NamedTuple, Self

from mainstem.errors import StorageError
from mainstem.storage.base import KEY_BYTES, Capabilities, Limit, Listed

VERSION = 2

MAX_KEYS = 2048
"""Keys of one message; a longer batch takes several."""
MAX_BYTES = 1 << 17

NO_PLACE = -1
"""The offset of a value that has no place: it has another length, is absent, or did not fit."""
KEPT = -2
"""The offset of a value that the store keeps as it is."""

_MAGIC = b"mainstem"
_HELLO = struct.Struct("<8sIQ")
_WELCOME = struct.Struct("<I16sQBQ")
_PLACE = struct.Struct("<qq")
_LISTED = struct.Struct(f"<{KEY_BYTES}sQd")
_PEER = struct.Struct("3i")


class Kind(IntEnum):
    """The first byte of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    EXISTS = 4
    BOOLS = 5
    GET = 6
    PUT = 7
    PLACES = 8
    COMMIT = 9
    RELEASE = 10
    DELETE = 11
    CLEAR = 12
    STATS = 13
    STATUS = 14
    JSON = 15
    OK = 16
    FAILED = 17
    SCAN = 18
    LISTED = 19


class Malformed(Exception):
    """A message is not one of this protocol."""


class Message(NamedTuple):
    """A message; the body of each kind has a pair of functions below."""

    kind: Kind
    body: memoryview


class Hello(NamedTuple):
    """The greeting of a client.

    Args:
        version: of its protocol.
        host_bytes: the size of the host tier; 0: any.
        spec: the store; empty: any, to ask for its status.
    """

    version: int
    host_bytes: int
    spec: str

    def pack(self) -> bytes:
        """Returns the body of HELLO."""
        return _HELLO.pack(_MAGIC, self.version, self.host_bytes) + self.spec.encode("utf-8", "surrogateescape")

    @classmethod
    def unpack(cls, body: memoryview) -> Self:
        """Reads the body of HELLO."""
        magic, version, host_bytes = _unpack(_HELLO, body[: _HELLO.size])
        if magic != _MAGIC:
            raise Malformed("not a client of Mainstem")
        return cls(version, host_bytes, bytes(body[_HELLO.size :]).decode("utf-8", "surrogateescape"))


class Welcome(NamedTuple):
    """The answer of the owner.

    Args:
        pid: its process.
        name: 16 random bytes, of this owner alone: connections with equal names share memory.
        memory_bytes: the size of the shared memory.
        capabilities: those of its back end.
        longest: the longest value that it takes.
    """

    pid: int
    name: bytes
    memory_bytes: int
    capabilities: Capabilities
    longest: Limit | None = None

    def pack(self) -> bytes:
        """Returns the body of WELCOME."""
        bits = sum(flag << at for at, flag in enumerate(astuple(self.capabilities)))
        size, remedy = (0, "") if self.longest is None else (self.longest.size, self.longest.remedy)
        return _WELCOME.pack(self.pid, self.name, self.memory_bytes, bits, size) + remedy.encode()

    @classmethod
    def unpack(cls, body: memoryview) -> Self:
        """Reads the body of WELCOME."""
        pid, name, memory_bytes, bits, size = _unpack(_WELCOME, body[: _WELCOME.size])
        capabilities = Capabilities(*(bool(bits >> at & 1) for at in range(len(fields(Capabilities)))))
        limit = Limit(size, bytes(body[_WELCOME.size :]).decode("utf-8", "replace")) if size else None
        return cls(pid, name, memory_bytes, capabilities, limit)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Returns the body of EXISTS and DELETE."""
    return b"".join(keys)


def unpack_keys(body: memoryview) -> list[bytes]:
    """Reads the body of EXISTS and DELETE."""
    if len(body) % KEY_BYTES or len(body) > MAX_KEYS * KEY_BYTES:
        raise Malformed(f"{len(body)} bytes are no keys")
    return [bytes(body[at : at + KEY_BYTES]) for at in range(0, len(body), KEY_BYTES)]


def pack_sizes(keys: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Returns the body of GET and PUT: all keys, then all lengths."""
    return b"".join(keys) + struct.pack(f"<{len(lengths)}Q", *lengths)


def unpack_sizes(body: memoryview) -> tuple[list[bytes], list[int]]:
    """Reads the body of GET and PUT."""
    count, rest = divmod(len(body), KEY_BYTES + 8)
    if rest:
        raise Malformed(f"{len(body)} bytes are no keys and lengths")
    lengths = list(struct.unpack(f"<{count}Q", body[count * KEY_BYTES :]))
    if any(length >> 62 for length in lengths):
        raise Malformed("a length is out of range")
    return unpack_keys(body[: count * KEY_BYTES]), lengths


def pack_places(places: Sequence[tuple[int, int]]) -> bytes:
    """Returns the body of PLACES: pairs of an offset and a length."""
    return b"".join(_PLACE.pack(*place) for place in places)


def unpack_places(body: memoryview) -> list[tuple[int, int]]:
    """Reads the body of PLACES."""
    if len(body) % _PLACE.size:
        raise Malformed(f"{len(body)} bytes are no places")
    return list(_PLACE.iter_unpack(body))


def pack_listed(values: Sequence[Listed]) -> bytes:
    """Returns the body of LISTED; an age that is not known is no number."""
    return b"".join(
        _LISTED.pack(value.key, value.length, math.nan if value.age_s is None else value.age_s) for value in values
    )


def unpack_listed(body: memoryview) -> list[Listed]:
    """Reads the body of LISTED."""
    if len(body) % _LISTED.size:
        raise Malformed(f"{len(body)} bytes are no listing")
    return [Listed(key, length, None if math.isnan(age) else age) for key, length, age in _LISTED.iter_unpack(body)]


def pack_failure(error: StorageError) -> bytes:
    """Returns the body of FAILED."""
    text = str(error).removeprefix(f"{error.cause}: ")
    return bytes([StorageError.CAUSES.index(error.cause)]) + text.encode("utf-8", "replace")[: MAX_BYTES // 2]


def unpack_failure(body: memoryview) -> StorageError:
    """Reads the body of FAILED."""
    if not body or body[0] >= len(StorageError.CAUSES):
        raise Malformed("a failure has no cause")
    return StorageError(StorageError.CAUSES[body[0]], bytes(body[1:]).decode("utf-8", "replace"))


def _unpack(form: struct.Struct, body: memoryview) -> tuple[Any, ...]:
    try:
        return form.unpack(body)
    except struct.error as error:
        raise Malformed(str(error)) from error


# ---------------------------------------------------------------- sockets


def new_socket() -> socket.socket:
    """Makes a socket that keeps the boundaries of messages."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def peer_uid(connected: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(packed)[1])


class Channel:
    """One end of a connection. One thread at a time; `cut` may be called by any.

    Args:
        connected: its socket, which the channel owns.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = memoryview(bytearray(MAX_BYTES + 1))

    def limit(self, seconds: float | None) -> None:
        """Sets the longest time that each of the next calls may take; None: any."""
        self._socket.settimeout(seconds)

    def send(self, kind: Kind, body: bytes = b"", descriptor: int | None = None) -> None:
        """Sends a message, with a file descriptor if there is one.

        Raises:
            OSError: the other end is gone; or, as TimeoutError, does not read.
        """
        message = bytes([kind]) + body
        assert len(message) <= MAX_BYTES
        if descriptor is None:
            self._socket.send(message)
        else:
            socket.send_fds(self._socket, [message], [descriptor])

    def receive(self) -> Message:
        """Receives a message, which is valid until the next one.

        Raises:
            Malformed: it is longer than allowed, or of no known kind.
            OSError: the other end is gone; or, as TimeoutError, sends nothing.
        """
        return self._message(self._socket.recv_into(self._buffer))

    def receive_descriptor(self) -> tuple[Message, int | None]:
        """Receives a message that may come with a file descriptor, which the caller owns."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, len(self._buffer), 1, socket.MSG_CMSG_CLOEXEC)
        self._buffer[: len(data)] = data
        try:
            return self._message(len(data)), descriptors[0] if descriptors else None
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def is_quiet(self) -> bool:
        """Returns whether it is open and has received nothing unexpected."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """Ends the connection, also for a thread that waits for a message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _message(self, size: int) -> Message:
        if size == 0:
            raise ConnectionError("the other end closed the connection")
        if size > MAX_BYTES:
            raise Malformed(f"a message of more than {MAX_BYTES} bytes")
        try:
            return Message(Kind(self._buffer[0]), self._buffer[1:size])
        except ValueError:
            raise Malformed(f"no message begins with {self._buffer[0]}") from None


PeerUid = Callable[[socket.socket], int]
