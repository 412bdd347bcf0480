"""Who runs calls that block: threads in a server, virtual time in the simulator.

A call is submitted and polled. Nothing here knows what is called.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Call(Protocol[T]):  # type: ignore[misc]  # `T` only comes out, but a call is no container to convert
    """One submitted call."""

    def done(self) -> bool:
        """Whether it has returned or raised. Never goes back; does not block."""

    def result(self) -> T:
        """What it returned; raises what it raised. Only once it is done."""


class Workers(Protocol):
    """Runs calls, in any order, several at once."""

    def submit(self, function: Callable[[], T]) -> Call[T]:
        """Starts a call, or queues it."""

    def close(self, timeout_s: float) -> bool:
        """Takes no more calls; whether all have ended within the time."""


class _ThreadCall(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._ended = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  # it is raised again, on the thread that asks
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def result(self) -> T:
        assert self.done()
        if self._error is not None:
            raise self._error
        return self._value


class ThreadWorkers:
    """A fixed number of threads. A call that hangs holds its thread and ends with the process at the latest.

    Args:
        threads: calls that run at once.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[_ThreadCall[object] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], T]) -> Call[T]:
        """Queues a call."""
        call = _ThreadCall(function)
        self._calls.put(call)  # type: ignore[arg-type]
        return call

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after the calls that are queued; those that hang are left alone."""
        for _ in self._threads:
            self._calls.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
