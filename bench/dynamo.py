"""`Dynamo`: Dynamo's own service as a router of the replay of `fleet`.

It is `SelectionService` of `ai-dynamo-runtime`, in a process of its own, with its defaults. Each replica publishes its
events in vLLM's format over ZeroMQ. A request is reserved when it is chosen, and freed when it has ended, so that the
service counts what is under way; nothing is decoded. A block of the trace is a block of one token to it, too.

The service runs in real time beside the virtual clock. So that it knows at each choice what the virtual time says that
it knows, each batch of events ends with a mark: the event of a block that no prompt has. Before a choice, `Dynamo`
asks for the mark of every batch that was sent. A replica's batches are applied in order, so all before a mark are, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import distributions
from itertools import count
from typing import TYPE_CHECKING

from rigs.dynamo_router import Service, ServiceFailed, interpreter

from mainstem.events.source import BlockRemoved, BlockStored, Event
from mainstem.events.wire import Batch, encode

if TYPE_CHECKING:
    from bench.routers import Blocks

MODEL = "trace"
MISSING = "dynamo was left out, because its environment is missing: `make .venv-routers/ready` installs it"
MARKS = 1 << 30
"""Tokens from here on are marks; a trace has fewer blocks."""
PATIENCE_S = 60.0
"""For a mark. It takes about a millisecond."""
PAUSE_S = 0.0002
JOIN_PAUSE_S = 0.02


def version() -> str | None:
    """Returns the version of Dynamo; None: it is not installed, see `MISSING`."""
    folders = [str(path) for path in interpreter().parents[1].glob("lib/python*/site-packages")]
    return next((found.version for found in distributions(name="ai-dynamo-runtime", path=folders)), None)


class Replica:
    """A replica as the service sees it: a publisher of events, and requests under way."""

    def __init__(self, number: int) -> None:
        import zmq

        self.number, self.under_way = number, deque[str]()
        self.mark = self.applied = -1
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no event is ever dropped
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._numbers = count()

    def send(self, events: Sequence[Event], mark: int) -> None:
        """Publishes a batch which ends with a mark in place of the last one."""
        last = [BlockRemoved((self.mark,), "GPU")] if self.mark >= 0 else []
        batch = [*events, *last, BlockStored((mark,), None, (mark,), 1, "GPU")]
        payload = encode(Batch(time.time(), batch, None))
        self._socket.send_multipart((b"", next(self._numbers).to_bytes(8, "big"), payload))
        self.mark = mark

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


class Dynamo:
    """See the module.

    Raises:
        ServiceFailed: the service refused a call, or has ended, or did not follow events within `PATIENCE_S`.
    """

    def __init__(self, replicas: int) -> None:
        self._service, self._requests, self._marks = Service(), count(), count(MARKS)
        self._replicas = [Replica(number) for number in range(replicas)]
        try:
            for replica in self._replicas:
                worker = {"worker_id": replica.number, "model_name": MODEL, "block_size": 1, "data_parallel_size": 1}
                ends = {"endpoint": f"http://replica-{replica.number}", "kv_events_endpoint": replica.endpoint}
                self._service.call("upsert_worker", worker | ends)
            for replica in self._replicas:
                self._join(replica)
        except BaseException:
            self.close()
            raise

    def choose(self, blocks: Blocks) -> int:
        """See `Router`."""
        for replica in self._replicas:
            until_s = time.monotonic() + PATIENCE_S
            while not self._follows(replica, until_s):
                time.sleep(PAUSE_S)
        name = str(next(self._requests))
        asked = {"model_name": MODEL, "token_ids": blocks.tolist(), "selection_id": name}
        chosen = int(self._service.call("select_and_reserve", asked)["worker_id"])
        self._replicas[chosen].under_way.append(name)
        return chosen

    def ended(self, replica: int) -> None:
        """See `Router`. A replica's requests end in the order in which they were sent."""
        self._service.call("free_reservation", self._replicas[replica].under_way.popleft())

    def apply(self, replica: int, events: Sequence[Event]) -> None:
        """See `Router`."""
        if events:
            self._replicas[replica].send(events, next(self._marks))

    def close(self) -> None:
        """See `Router`."""
        self._service.close()
        for replica in self._replicas:
            replica.close()

    def _join(self, replica: Replica) -> None:
        """Publishes marks until the service is there to see one: before, what is published is lost."""
        until_s = time.monotonic() + PATIENCE_S
        replica.send([], next(self._marks))
        while not self._follows(replica, until_s):
            time.sleep(JOIN_PAUSE_S)
            replica.send([], replica.mark)

    def _follows(self, replica: Replica, until_s: float) -> bool:
        """Returns whether the service has applied all that a replica published."""
        if replica.applied != replica.mark:
            found = self._service.call("overlap_scores", {"model_name": MODEL, "token_ids": [replica.mark]})
            blocks = {each["worker_id"]: each["device_blocks"] for each in found["workers"]}
            if blocks.get(replica.number) == 1:
                replica.applied = replica.mark
            elif time.monotonic() > until_s:
                raise ServiceFailed(f"events of replica {replica.number} were not followed in {PATIENCE_S:g} s")
        return replica.applied == replica.mark
