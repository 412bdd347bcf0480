"""Follows the KV events of a cache over ZeroMQ, as a router does: pip install 'mainstem[events]'.

With two addresses it follows a server: `mainstem serve --kv-events ADDRESS --kv-events-replay ADDRESS`. Without, it
makes a cache of its own and follows that.
"""

import sys
import time
from contextlib import ExitStack

import zmq

from mainstem import PrefixCache
from mainstem.events.feed import Follower
from mainstem.events.publisher import Publisher

END = b"\xff" * 8


class Router:
    """A connection to one server, and what it holds."""

    def __init__(self, stack: ExitStack, events: str, replays: str) -> None:
        context = stack.enter_context(zmq.Context())
        self.live = stack.enter_context(context.socket(zmq.SUB))
        self.live.subscribe(b"")
        self.live.connect(events)
        self.replays = stack.enter_context(context.socket(zmq.DEALER))
        self.replays.connect(replays)
        self.follower = Follower()

    def catch_up(self, first: int = 0) -> None:
        """Asks for what was missed."""
        self.replays.send_multipart((b"", first.to_bytes(8, "big")))
        while (answer := self.replays.recv_multipart())[1] != END:
            self.follower.follow(int.from_bytes(answer[1], "big"), answer[2])

    def receive(self) -> None:
        """Waits for the next batch and follows it."""
        _, number, payload = self.live.recv_multipart()
        first = self.follower.missing(int.from_bytes(number, "big"))
        if first is not None:
            self.catch_up(first)
        self.follower.follow(int.from_bytes(number, "big"), payload)

    def show(self) -> None:
        """Prints how many pages are where."""
        blocks = self.follower.replica.blocks.values()
        media = ("GPU", "CPU", "STORAGE")
        print(", ".join(f"{medium}: {sum(medium in block.media for block in blocks)} pages" for medium in media))


def follow_own_cache() -> None:
    """Publishes what a small cache does, and follows it."""
    with ExitStack() as stack:
        publisher = Publisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        stack.callback(publisher.close)
        cache = PrefixCache(pages=64, page_size=4, on_event=publisher.put)
        assert cache.events is not None
        publisher.state = cache.events.state  # for those that join late
        router = Router(stack, publisher.endpoint, publisher.replay or "")
        for prompt in (range(20), [*range(8), *range(50, 62)]):
            with cache.lease(list(prompt)) as lease:
                lease.reserve(lease.length - lease.hit)
                lease.finish(lease.length)
        cache.poll(time.monotonic())
        while len(router.follower.replica.blocks) < 8:
            router.receive()
        router.show()
        cache.flush()
        cache.poll(time.monotonic())
        while router.follower.replica.blocks:
            router.receive()
        router.show()


def follow_server(events: str, replays: str) -> None:
    """Follows a server until it is interrupted."""
    with ExitStack() as stack:
        router = Router(stack, events, replays)
        router.catch_up()
        while True:
            router.show()
            router.receive()


if __name__ == "__main__":
    follow_server(*sys.argv[1:3]) if len(sys.argv) > 2 else follow_own_cache()
