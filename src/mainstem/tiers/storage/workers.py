"""Workers that run blocking calls: threads in a server, virtual time in the simulator.

The caller submits a call and polls it. Workers know nothing of what the call does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

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


class _ThreadCall(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._ended = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  # raised again on the thread that asks for the result
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
    """A fixed number of threads. A call that never returns occupies its thread until the process ends.

    Args:
        threads: how many calls run at once.
        name: prefix of the threads' names.
        on_end: is called on the worker after each call that has ended.
    """

    def __init__(self, threads: int, name: str, on_end: Callable[[], object] = lambda: None) -> None:
        self._on_end = on_end
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
        """Ends the threads once the queued calls have run; abandons calls that do not return in time."""
        for _ in self._threads:
            self._calls.put(None)
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            self._on_end()
