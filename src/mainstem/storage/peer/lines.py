"""Lines: connections to peers, over ZeroMQ. A simulator, which replaces the server of a peer, brings others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mainstem.imports import needs

if TYPE_CHECKING:
    import zmq

HINT = "peers need pyzmq: pip install 'mainstem[events]'"


class Line(Protocol):
    """A connection, which one call at a time uses."""

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends a request."""

    def read(self) -> list[memoryview] | None:
        """Returns the parts of the answer that has come; None: there is none, and the connection is lost."""

    def alive(self) -> bool:
        """Whether nothing has been heard of its end."""

    def close(self) -> None:
        """Closes it; what is under way is lost."""


class Lines(Protocol):
    """Opens connections, and waits for answers. Any number of threads."""

    def open(self, address: str) -> Line:
        """Opens a connection to HOST:PORT, without waiting for it."""

    def wait(self, lines: Sequence[Line], timeout_s: float) -> Sequence[Line]:
        """Waits until answers have come, or connections are lost. Returns these; none: the time is over."""

    def close(self) -> None:
        """Ends. All connections are closed."""


class _ZmqLine:
    """A socket, and one that says when its connection is lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        import zmq

        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, "[" in address)
        self.lost: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
        )
        self.socket.connect(f"tcp://{address}")

    def send(self, parts: Sequence[bytes]) -> None:
        self.socket.send_multipart(parts)

    def read(self) -> list[memoryview] | None:
        if not self.socket.poll(0):
            return None
        return [frame.buffer for frame in self.socket.recv_multipart(copy=False)]

    def alive(self) -> bool:
        return not self.lost.poll(0)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.lost.close(linger=0)
        self.socket.close(linger=0)


class ZmqLines:
    """Connections of ZeroMQ.

    Raises:
        BackendUnavailable: pyzmq is not installed.
    """

    def __init__(self) -> None:
        with needs("zmq", HINT):
            import zmq
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def open(self, address: str) -> Line:
        return _ZmqLine(self._context, address)

    def wait(self, lines: Sequence[Line], timeout_s: float) -> Sequence[Line]:
        import zmq

        poller, waiting = zmq.Poller(), dict[object, Line]()
        for line in lines:
            assert isinstance(line, _ZmqLine)
            for each in (line.socket, line.lost):
                poller.register(each, zmq.POLLIN)
                waiting[each] = line
        return [*dict.fromkeys(waiting[ready] for ready, _ in poller.poll(int(timeout_s * 1000) + 1))]

    def close(self) -> None:
        self._context.term()
