"""A router's connection to a server: its events over ZeroMQ, and a replica made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import zmq
from machine import eventually, patience

from mainstem.events.feed import Follower

_END = b"\xff" * 8


class Listener:
    """Follows one server.

    Attributes:
        follower: what it knows.
        batches: how many it has received live.
    """

    def __init__(self, live: zmq.Socket[bytes], router: zmq.Socket[bytes]) -> None:
        self._live, self._router = live, router
        self.follower = Follower()
        self.batches = 0

    def replay(self, first: int = 0) -> None:
        """Asks for what it missed."""
        self._router.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            _, number, payload = self._router.recv_multipart()
            if number == _END:
                return
            self.follower.follow(int.from_bytes(number, "big"), payload)

    def receive(self) -> None:
        """Follows what has arrived."""
        while self._live.poll(0):
            _, frame, payload = self._live.recv_multipart()
            self.batches += 1
            number = int.from_bytes(frame, "big")
            first = self.follower.missing(number)
            if first is not None:
                self.replay(first)
            self.follower.follow(number, payload)

    def until(self, holds: Callable[[], bool]) -> None:
        """Follows until something holds of what it knows."""

        def received() -> bool:
            self.receive()
            return holds()

        eventually(received, 30.0)

    def on(self, medium: str) -> set[tuple[int, ...]]:
        """Returns the paths of the pages on a medium."""
        replica = self.follower.replica
        return {replica.path(hash_) for hash_, block in replica.blocks.items() if medium in block.media}


@contextmanager
def listening(endpoint: str, replay: str) -> Iterator[Listener]:
    """Connects to a server, also to one that does not listen yet."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        live, router = (stack.enter_context(context.socket(kind)) for kind in (zmq.SUB, zmq.DEALER))
        for each in (live, router):
            each.linger, each.rcvtimeo = 0, int(1000 * patience(30))
        live.subscribe(b"")
        live.connect(endpoint)
        router.connect(replay)
        yield Listener(live, router)
