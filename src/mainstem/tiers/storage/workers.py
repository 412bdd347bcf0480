"""Workers that run blocking calls: threads in a server, virtual time in the simulator.

The caller submits a call and polls it. Workers know nothing of what the call does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Call(Protocol[T]):  # type: ignore[misc]  # `T` is only returned, but a call is not a container to convert
    """A submitted call."""

    def done(self) -> bool:
        """Whether it has returned or raised. Stays true once true; does not block."""

    def result(self) -> T:
        """Returns what the call returned, or raises what it raised. Allowed only once it is done."""


class Workers(Protocol):
    """Runs calls in any order, several at once."""

    def submit(self, function: Callable[[], T]) -> Call[T]:
        """Starts a call, or queues it."""

    def close(self, timeout_s: float) -> bool:
        """Accepts no more calls; whether all have ended within the time."""


class ThreadWorkers:
    """A fixed number of threads. A call that never returns occupies its thread until the process ends.

    Args:
        threads: how many calls run at once.
        name: prefix of the threads' names.
        on_end: is called on the worker after each call that has ended.
    """

    def __init__(self, threads: int, name: str, on_end: Callable[[], object] = lambda: None) -> None:
        self._on_end = on_end
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], T]) -> Call[T]:
        """Queues a call."""
        call: Future[T] = Future()
        self._calls.put((call, function))
        return call

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once the queued calls have run; abandons calls that do not return in time."""
        for _ in self._threads:
            self._calls.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            call, function = job
            try:
                call.set_result(function())
            except BaseException as error:  # noqa: BLE001  # raised again on the thread that asks for the result
                call.set_exception(error)
            self._on_end()
