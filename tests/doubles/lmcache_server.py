"""A double of `lmcache_server HOST PORT cpu` (LMCache 0.5.6) in a thread, with faults that the real one never has.

It copies the server's behaviour with its bugs: a PUT that ends early leaves a value that cannot be read.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Self

REQUEST = struct.Struct("<9i150s")
REPLY = struct.Struct("<9i")
PUT, GET, EXIST, HEALTH = 1, 2, 3, 5


class LMCacheServer:
    """Answers on a free port of this machine until the `with` block ends.

    Args:
        piece_bytes: the limit for bytes sent at once, which causes short reads in the client.
        pause_s: pause before each piece, in seconds.
        port: the port; 0: a free one.

    Attributes:
        values: name -> (header fields, value, or None if its writer did not finish).
        answering: if cleared, the server accepts connections but sends no replies.
        last_words: bytes to send instead of the next reply, after which the connection ends.
        cut_value_after: the number of bytes of the next value after which its connection ends.
    """

    def __init__(self, piece_bytes: int = 1 << 30, pause_s: float = 0.0, port: int = 0) -> None:
        self.values: dict[str, tuple[tuple[int, ...], bytes | None]] = {}
        self.answering = threading.Event()
        self.answering.set()
        self.last_words: bytes | None = None
        self.cut_value_after: int | None = None
        self.connections = 0
        self._piece_bytes = piece_bytes
        self._pause_s = pause_s
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.answering.set()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.add(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        held: list[bytes] = []
        with connection, contextlib.suppress(OSError):
            while header := receive(connection, REQUEST.size):
                self.answering.wait()
                goes_on = self._answer(connection, header, held)
                if select.select([connection], [], [], 0)[0]:
                    if goes_on:
                        continue
                    break  # closing a socket with unread requests discards unsent data
                self._send(connection, b"".join(held))
                held.clear()
                if not goes_on:
                    break
        self._open.discard(connection)

    def _answer(self, connection: socket.socket, header: bytes, held: list[bytes]) -> bool:
        """Appends the reply to `held`. Returns whether the connection continues."""
        command, length, *fields, raw_name = REQUEST.unpack(header)
        name = raw_name.decode().strip()
        if command == PUT:
            self.values[name] = (length, *fields), receive(connection, length)
            return True
        words, self.last_words = self.last_words, None
        if words is not None:
            self._send(connection, words)
            return False
        found = self.values.get(name)
        if command == GET and found is not None:
            (length, kind, dtype, location, *shape), value = found
            held.append(REPLY.pack(200, length, kind, dtype, *shape, location))
            if not value or self.cut_value_after is None:
                held.append(value or b"")
                return value is not None
            held.append(value[: self.cut_value_after])
            self.cut_value_after = None
            return False
        held.append(REPLY.pack(200 if found or command == HEALTH else 400, 0, 1, 2, 0, 0, 0, 0, 0))
        return True

    def _send(self, connection: socket.socket, data: bytes) -> None:
        for at in range(0, len(data), self._piece_bytes):
            time.sleep(self._pause_s)
            connection.sendall(data[at : at + self._piece_bytes])


def receive(connection: socket.socket, size: int) -> bytes | None:
    """Receives `size` bytes. Returns None if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
