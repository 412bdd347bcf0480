"""How often a publisher says that it is there, and gives way while it answers."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from mainstem.events import AllBlocksCleared
from mainstem.events import publisher as module
from mainstem.events.publisher import Publisher

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
ANY = "tcp://127.0.0.1:0"


class Poller:
    """Notes for how long it would wait, and what was sent until then; it never has anything."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self.publisher: Any = None

    def register(self, *_: Any) -> None:
        pass

    def poll(self, wait_ms: int) -> list[Any]:
        self.waits.append((wait_ms, len(self.publisher.sent)))
        self.publisher._closing = len(self.waits) == 4
        return []


class Sends(Publisher):
    """Notes batches in place of sending them, and has no thread."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        super().__init__(ANY)

    def _send(self, events: list[Any]) -> None:
        self.sent.append(len(events))


def test_a_publisher_without_events_sends_an_empty_batch_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    poller = Poller()
    with monkeypatch.context() as patched:
        patched.setattr(Sends, "_run", lambda self: None)
        poller.publisher = made = Sends()
    with closing(made):
        monkeypatch.setattr(zmq, "Poller", lambda: poller)
        made._run()
    assert poller.waits == [(1000, 1), (1000, 2), (1000, 3), (1000, 4)]
    assert made.sent == [0] * 5


def test_it_gives_way_for_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append))
    module._give_way()
    assert slept == [0.001]


def test_the_first_event_that_is_queued_wakes_the_thread_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an event would be sent with the next heartbeat, up to a second later."""
    with monkeypatch.context() as patched:
        patched.setattr(Sends, "_run", lambda self: None)
        made = Sends()
    with closing(made):
        made._reader.setblocking(False)
        for _ in range(2):
            made.put(AllBlocksCleared())
            made.put(AllBlocksCleared())
            assert made._reader.recv(10) == b"\0"
            made._queue.clear()
