"""Redis and Valkey: each value is a string of the server, which may hold other data too.

The package `redis` connects, authenticates and pools the connections. The protocol is implemented here, for three
reasons: values move directly from and to the caller's memory, one deadline covers a whole call, and the length of a
value is checked before it is read, so that a huge value under one of the keys takes no memory.

    SET <prefix>:<64 hex digits> <value> [PX <milliseconds>]        also GET, EXISTS, UNLINK, SCAN, STRLEN, INFO

Clusters are not supported: one server holds all keys. The `maxmemory-policy` of the server decides what happens when it
is full: with `noeviction` it refuses and `put` returns False; with the other policies it evicts keys of its choice.

Protocol: RESP2, https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from mainstem.errors import BackendUnavailable, BadArgument, StorageError, check_integer
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, SCANNED, Backend, BackendStats, Capabilities, Listed
from mainstem.storage.options import Readers, parse_number, parse_text, read_options
from mainstem.units import parse_timeout

if TYPE_CHECKING:
    import socket
    from types import ModuleType

    from redis import ConnectionPool

_WINDOW = 32
"""Pipelined values: enough to hide the round trip, few enough for the output buffers of the server."""

_BATCH = 1024
"""Pipelined requests without values."""

_JOINED_BYTES = 4096
"""Shorter words are joined and sent together; longer ones are sent in place."""

_LINE_BYTES = 4096
_TEXT_BYTES = 1 << 20
_SCAN_KEYS = 1 << 20

_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

T = TypeVar("T")
Word: TypeAlias = bytes | memoryview
Reply: TypeAlias = "int | bytes | str | list[Reply] | None"
"""A reply of the server. A `str` is an error: its code, then a message."""


class RedisBackend(Backend):
    """Values in a Redis or Valkey server.

    Args:
        host: host of the server.
        port: port of the server.
        socket_path: path of its unix socket, instead of host and port.
        database: number of the database.
        username: user name; None: the default user of the server.
        password: password; None: the server requires none.
        tls: whether to encrypt, and verify the certificate of the server.
        ca_file: the authority that signed the certificate; None: those of the system.
        prefix: prefix of the keys, `<prefix>:<hex>`: letters, digits, and `_ . : / -`.
        ttl_s: the server expires a value after this many seconds; None: never.
        timeout_s: the limit for a call, above 0; connecting may take as long again.

    Raises:
        BadArgument: an argument is out of its range.
        BackendUnavailable: the package `redis` is missing, or the server does not answer or denies access.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=True, evicts=False, overwrites=True
    )

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 6379,
        *,
        socket_path: str | None = None,
        database: int = 0,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        ca_file: str | None = None,
        prefix: str = "mainstem",
        ttl_s: float | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise BadArgument("prefix", prefix, "1 to 128 letters, digits, or characters of _.:/-")
        if ttl_s is not None and not ttl_s >= 0.001:
            raise BadArgument("ttl_s", ttl_s, "at least 0.001, or None")
        self._name = socket_path or f"{host}:{check_integer('port', port, 1, 65535)}"
        self._prefix = prefix.encode() + b":"
        self._expiry = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        self._timeout_s = timeout_s
        self._closed = False
        with needs("redis", "the package redis is missing: pip install 'mainstem[redis]'"):
            import redis
        self._errors = redis.exceptions
        place: dict[str, Any] = {"path": socket_path} if socket_path else {"host": host, "port": port}
        if tls and not socket_path:
            place |= {"ssl_ca_certs": ca_file, "ssl_check_hostname": True}
        self._pool: ConnectionPool = redis.ConnectionPool(
            connection_class=_connection_class(redis, socket_path, tls),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            db=check_integer("database", database, 0, 1 << 20),
            username=username,
            password=password,
            **place,
        )
        self._evicted_before = 0
        try:
            self._evicted_before = self.stats().evicted
        except StorageError as error:
            self.close()
            raise BackendUnavailable(str(error)) from error

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`redis://127.0.0.1:6379/0?prefix=mainstem&timeout=2`, or `redis:/run/valkey.sock`.

        Options: db, prefix, ttl and timeout (seconds), user, password_env (the environment variable that holds the
        password, because specs appear in logs and process lists), tls (yes or no), ca_file.
        """
        host, port, socket_path, database = _parse_address(address)
        arguments = {"database": parse_number("db", database), **read_options(options, _OPTIONS)}
        return cls(host, port, socket_path=socket_path, **arguments)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Sends one EXISTS for each key, pipelined."""
        return [reply == 1 for reply in self._ask([(b"EXISTS", self._key(key)) for key in keys])]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Sends one GET for each key. A key of another type counts as absent."""
        lengths: list[int] = []
        with self._session() as session:
            for window in _windows(list(zip(keys, buffers, strict=True)), _WINDOW):
                session.send((b"GET", self._key(key)) for key, _ in window)
                replies = [session.value(buffer) for _, buffer in window]
                lengths += [ABSENT if self._refused(reply, "WRONGTYPE") else int(reply) for reply in replies]
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Sends one SET for each key."""
        stored: list[bool] = []
        with self._session() as session:
            for window in _windows(list(zip(keys, buffers, strict=True)), _WINDOW):
                session.send((b"SET", self._key(key), buffer, *self._expiry) for key, buffer in window)
                replies = [session.reply() for _ in window]
                stored += [not self._refused(reply, "OOM") for reply in replies]
        return stored

    def delete(self, keys: Sequence[bytes]) -> None:
        """Sends one UNLINK for each key: the server frees the memory in the background."""
        self._ask([(b"UNLINK", self._key(key)) for key in keys])

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Scans the whole database with SCAN. Ages are of the last use, unless the server evicts by frequency (LFU)."""
        for names in self._names():
            yield self._listed(names)

    def clear(self) -> None:
        """Scans the whole database with SCAN. Each step has its own deadline."""
        for names in self._names():
            self._ask([(b"UNLINK", name) for name in names])

    def stats(self) -> BackendStats:
        """Returns memory and evictions of the whole server. Entries are unknown: the server may hold other keys."""
        memory, counts = (_fields(reply) for reply in self._ask([(b"INFO", b"memory"), (b"INFO", b"stats")]))
        evicted = counts.get("evicted_keys", 0) - self._evicted_before
        return BackendStats(None, memory.get("used_memory"), memory.get("maxmemory") or None, max(evicted, 0))

    def close(self) -> None:
        """Closes all connections, also those in use."""
        self._closed = True
        self._pool.disconnect()

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _names(self) -> Iterator[list[bytes]]:
        """Yields the names of all values, in batches. SCAN may name one twice."""
        pattern, cursor = self._prefix + b"[0-9a-f]" * 64, b""
        while cursor != b"0":
            (reply,) = self._ask([(b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", b"%d" % SCANNED)])
            cursor, names = _scanned(reply)
            yield names

    def _listed(self, names: Sequence[bytes]) -> list[Listed]:
        """Asks for age and length. The length would count as a use (servers before 7.2 know no NO-TOUCH)."""
        pairs = [request for name in names for request in ((b"OBJECT", b"IDLETIME", name), (b"STRLEN", name))]
        replies = self._replies([(b"CLIENT", b"NO-TOUCH", b"ON"), *pairs, (b"CLIENT", b"NO-TOUCH", b"OFF")])[1:-1]
        return [
            Listed(bytes.fromhex(name[len(self._prefix) :].decode()), length, age if isinstance(age, int) else None)
            for name, age, length in zip(names, replies[::2], replies[1::2], strict=True)
            if isinstance(length, int) and length > 0  # otherwise it has gone, or is of another type
        ]

    def _ask(self, requests: Sequence[Sequence[Word]]) -> list[Reply]:
        replies = self._replies(requests)
        for reply in replies:
            self._refused(reply)
        return replies

    def _replies(self, requests: Sequence[Sequence[Word]]) -> list[Reply]:
        replies: list[Reply] = []
        with self._session() as session:
            for window in _windows(requests, _BATCH):
                session.send(window)
                replies += [session.reply() for _ in window]
        return replies

    def _refused(self, reply: Reply, expected: str = "none") -> bool:
        """Returns whether the server refused with the expected code. Raises for any other code."""
        if not isinstance(reply, str):
            return False
        if reply.partition(" ")[0] == expected:
            return True
        raise StorageError("refused", f"redis at {self._name}: {reply}")

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        """Provides a connection for one call. An error closes it, since replies may still be outstanding."""
        if self._closed:
            raise StorageError("closed", f"the connections to redis at {self._name} are closed")
        deadline_s = time.monotonic() + self._timeout_s
        try:
            connection: Any = self._pool.get_connection()
            try:
                yield _Session(connection._sock, deadline_s)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)
        except (self._errors.RedisError, _BadReply, OSError) as error:
            raise StorageError(self._cause(error), f"redis at {self._name}: {error}") from error

    def _cause(self, error: Exception) -> str:
        if self._closed:
            return "closed"
        if isinstance(error, _BadReply):
            return "protocol"
        if isinstance(error, (TimeoutError, self._errors.TimeoutError)):
            return "timeout"
        if isinstance(error, (self._errors.AuthenticationError, self._errors.BusyLoadingError)):
            return "refused"
        return "unreachable" if isinstance(error, (OSError, self._errors.ConnectionError)) else "refused"


# ---------------------------------------------------------------- specs


def _parse_address(address: str) -> tuple[str, int, str | None, str]:
    """Parses `//host:port/0` or `/path` into host, port, socket and database."""
    allowed = "//host:port/database, or the path of a socket; user and password_env are options"
    if not address.startswith("//"):
        if not address.startswith("/"):
            raise BadArgument("storage address", address, allowed)
        return "", 6379, address, "0"
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or "@" in parts.netloc:
        raise BadArgument("storage address", address, allowed)
    return host, 6379 if port is None else port, None, parts.path.strip("/") or "0"


def _parse_yes(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise BadArgument(name, text, "yes or no")
    return text == "yes"


def _read_environment(name: str, variable: str) -> str:
    if variable not in os.environ:
        raise BadArgument(name, variable, "the name of an environment variable that is set")
    return os.environ[variable]


_OPTIONS: Readers = {
    "db": ("database", parse_number),
    "prefix": ("prefix", parse_text),
    "ttl": ("ttl_s", parse_timeout),
    "timeout": ("timeout_s", parse_timeout),
    "user": ("username", parse_text),
    "password_env": ("password", _read_environment),
    "tls": ("tls", _parse_yes),
    "ca_file": ("ca_file", parse_text),
}


def _connection_class(redis: ModuleType, socket_path: str | None, tls: bool) -> Any:
    if socket_path:
        return redis.UnixDomainSocketConnection
    return redis.SSLConnection if tls else redis.Connection


# ---------------------------------------------------------------- the protocol


class _BadReply(Exception):
    """The server sent something that RESP does not allow here."""


class _TimedReader(io.RawIOBase):
    """Reads from a socket until a deadline."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket = connection
        self._deadline_s = deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader passes nothing else
        _limit(self._socket, self._deadline_s)
        return self._socket.recv_into(buffer)


class _Session:
    """Sends requests and reads their replies, in order, over a connection that only it uses."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._socket = connection
        self._deadline_s = deadline_s
        # Its `readinto` passes the caller's memory to the socket, except for the last piece of a value.
        self._reader = io.BufferedReader(_TimedReader(connection, deadline_s), _LINE_BYTES)

    def send(self, requests: Iterable[Sequence[Word]]) -> None:
        for piece in _packed(requests):
            _limit(self._socket, self._deadline_s)
            self._socket.sendall(piece)

    def value(self, buffer: memoryview) -> int | str:
        """Reads the reply to a GET. Fills the buffer if it has the same length. Returns the length or `ABSENT`."""
        kind, rest = self._header()
        if kind == b"-":
            return rest.decode(errors="replace")
        if kind != b"$":
            raise _BadReply(f"{kind!r} instead of a value")
        length = _number(rest)
        if length < 0:
            return ABSENT
        if length == len(buffer):
            self._fill(buffer)
        else:
            self._skip(length)
        self._end()
        return length

    def reply(self, depth: int = 2) -> Reply:
        """Reads any reply; arrays may nest to a depth."""
        kind, rest = self._header()
        if kind == b"+":
            return rest
        if kind == b"-":
            return rest.decode(errors="replace")
        number = _number(rest)
        if kind == b":":
            return number
        if kind == b"$" and number <= _TEXT_BYTES:
            return self._text(number)
        if kind == b"*" and depth and number <= _SCAN_KEYS:
            return [self.reply(depth - 1) for _ in range(number)]
        raise _BadReply(f"unexpected {kind!r} with {number}")

    def _header(self) -> tuple[bytes, bytes]:
        line = self._reader.readline(_LINE_BYTES)
        if not line:
            raise ConnectionResetError("the server closed the connection")
        if not line.endswith(b"\r\n"):
            raise _BadReply("a line without an end")
        return line[:1], line[1:-2]

    def _text(self, length: int) -> bytes | None:
        if length < 0:
            return None
        text = bytearray(length)
        self._fill(memoryview(text))
        self._end()
        return bytes(text)

    def _fill(self, buffer: memoryview) -> None:
        if self._reader.readinto(buffer) != len(buffer):
            raise ConnectionResetError("the server closed the connection within a value")

    def _skip(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, 1 << 16)))
        while length:
            part = scratch[:length]
            self._fill(part)
            length -= len(part)

    def _end(self) -> None:
        if self._reader.read(2) != b"\r\n":
            raise _BadReply("a value without an end")


def _packed(requests: Iterable[Sequence[Word]]) -> Iterator[Word]:
    """Encodes requests as arrays of strings: joins short words, and yields long ones in place."""
    joined = bytearray()
    for request in requests:
        joined += b"*%d\r\n" % len(request)
        for word in request:
            joined += b"$%d\r\n" % len(word)
            if len(word) > _JOINED_BYTES:
                yield bytes(joined)
                yield word
                joined.clear()
            else:
                joined += word
            joined += b"\r\n"
    yield bytes(joined)


def _limit(connection: socket.socket, deadline_s: float) -> None:
    """Limits the next call on the socket to the time until the deadline."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the reply took too long")
    connection.settimeout(left_s)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise _BadReply(f"{text[:40]!r} instead of a number") from None


def _scanned(reply: Reply) -> tuple[bytes, list[bytes]]:
    match reply:
        case [bytes(cursor), [*names]]:
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise _bad_reply("SCAN")


def _fields(reply: Reply) -> dict[str, int]:
    """Parses the lines `name:number` of an INFO."""
    if not isinstance(reply, bytes):
        raise _bad_reply("INFO")
    return {name: int(number) for name, number in re.findall(r"^(\w+):(\d{1,20})\r?$", reply.decode("latin1"), re.M)}


def _bad_reply(command: str) -> StorageError:
    return StorageError("protocol", f"not a reply to {command}")


def _windows(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    return (items[at : at + length] for at in range(0, len(items), length))


BACKEND = RedisBackend
