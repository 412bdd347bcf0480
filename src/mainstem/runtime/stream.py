"""The output of one request: written by the engine's thread, read by any thread or event loop.

It does not know the scheduler, nor what the request asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from mainstem.errors import EngineClosed
from mainstem.runtime.request import Completion, Delta


class Stream:
    """The output of one request, as it is generated. Made by `Engine.submit`.

    It keeps all events, so any thread can read it, more than once, and at any time.
    """

    def __init__(self, id: str, cancel: Callable[[str], None]) -> None:
        self.id = id
        self._cancel = cancel
        self._changed = threading.Condition()
        self._deltas: list[Delta] = []
        self._ended = False
        self._failure: BaseException | None = None
        self._wakers: list[Callable[[], object]] = []

    def __iter__(self) -> Iterator[Delta]:
        """Yields every event up to the one with a finish reason; blocks. Raises EngineClosed if the engine failed."""
        for at in itertools.count():
            self._wait(at)
            delta = self._get(at)
            if delta is None:
                return
            yield delta

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The same in an event loop. Leaving early does not cancel the request: call `cancel`."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(ready.set)

        with self._changed:
            self._wakers.append(wake)
        try:
            for at in itertools.count():
                while not self._ready(at):
                    ready.clear()
                    if not self._ready(at):  # checked again: an event may have arrived before the flag was cleared
                        await ready.wait()
                delta = self._get(at)
                if delta is None:
                    return
                yield delta
        finally:
            with self._changed:
                if wake in self._wakers:
                    self._wakers.remove(wake)

    def cancel(self) -> None:
        """Ends the request soon, with the finish reason "cancelled"; does nothing if it has ended."""
        self._cancel(self.id)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Waits for the end, and returns all of the output, including what was read before.

        Raises:
            TimeoutError: the request has not ended; it goes on.
            EngineClosed: the engine failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout_s):
                raise TimeoutError(f"request {self.id} has not ended after {timeout_s} s")
        self._get(len(self._deltas))
        last = self._deltas[-1]
        assert last.finish_reason is not None and last.usage is not None
        return Completion(
            text="".join(delta.text for delta in self._deltas),
            tokens=tuple(token for delta in self._deltas for token in delta.tokens),
            logprobs=tuple(logprob for delta in self._deltas for logprob in delta.logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage,
            prompt_logprobs=tuple(logprob for delta in self._deltas for logprob in delta.prompt_logprobs),
            embedding=next((delta.embedding for delta in self._deltas if delta.embedding is not None), None),
        )

    def put(self, delta: Delta) -> None:
        """Adds an event; for the engine."""
        with self._changed:
            self._deltas.append(delta)
            self._ended = delta.finish_reason is not None
            self._notify()

    def fail(self, cause: BaseException) -> None:
        """Ends the stream without a last event; for the engine."""
        with self._changed:
            self._failure, self._ended = cause, True
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in tuple(self._wakers):
            try:
                wake()
            except RuntimeError:  # the reader's event loop is closed, so it will not read on
                self._wakers.remove(wake)

    def _wait(self, at: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready(at))

    def _ready(self, at: int) -> bool:
        return self._ended or at < len(self._deltas)

    def _get(self, at: int) -> Delta | None:
        """Returns event `at`, which must be ready, or None after the last event."""
        if at < len(self._deltas):
            return self._deltas[at]
        if self._failure is not None:
            raise closed_by(self._failure)
        return None


def closed_by(failure: BaseException) -> EngineClosed:
    """Returns the error of calls after the engine failed."""
    closed = EngineClosed(f"the engine failed: {type(failure).__name__}: {failure}")
    closed.__cause__ = failure
    return closed
