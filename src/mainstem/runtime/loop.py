"""EngineLoop: the thread that steps an `EngineCore`, runs what other threads ask of it, and fills their streams.

```
   any thread                 the engine's thread                 any thread, any event loop
   submit, cancel, ask  -> commands -> run -> step -> deliver -> Stream -> for delta in stream
                                       ^______________|                   async for delta in stream
```
Only this thread changes the core; others read its counts, and let it check requests. It sleeps while there is nothing
to do. When it ends, by `close` or by a failure, every stream has ended and every call has returned or raised.

With several ranks, each has a loop. Rank 0 takes the requests and shares the commands of each step; the others run the
same commands and steps, and have no streams.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from mainstem.cache.keys import Encoded
from mainstem.errors import BadArgument, BadTokens, EngineClosed, EngineFull, RankFailed, UnsupportedModel
from mainstem.runtime.engine_core import EngineCore
from mainstem.runtime.request import Delta, Progress, Request
from mainstem.runtime.stream import Stream, closed_by

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Command:
    """A call of a function of `EngineCore`, which every rank makes before a step.

    Args:
        id: of the request that it adds, or of the answer that a caller waits for.
        function, args, kwargs: of the call, without the core. It is pickled by its name.
    """

    id: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EngineLoop:
    """The thread of one core. Its methods can be called from any other thread.

    Args:
        core: what it steps; from now on only the loop uses it.
        clock: monotonic, in seconds.
        max_waiting: requests that may wait.

    Attributes:
        failure: the error that ended the thread; None: there was none.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float], max_waiting: int) -> None:
        self._core, self._ranks, self._clock, self._max_waiting = core, core.ranks, clock, max_waiting
        self._ids, self._commands = itertools.count(), queue.SimpleQueue[_Command]()
        # Guards what follows; `drain` waits on it.
        self._changed = threading.Condition()
        self._closed: str | None = None  # why no more requests are accepted
        self.failure: BaseException | None = None
        self._over = False  # no more commands run
        self._undelivered: set[int] = set()  # requests on their way to the scheduler
        self._streams: dict[str, Stream] = {}
        self._on_progress: dict[str, OnProgress] = {}
        self._answers: dict[int, Future[Any]] = {}
        self._thread = threading.Thread(target=self._run, name="mainstem-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, prompt: Encoded, on_progress: OnProgress | None = None) -> Stream:
        """Queues a request that the scheduler has checked.

        Raises:
            EngineFull: as many requests wait as may.
            EngineClosed: the loop is draining or has ended.
        """
        arrived_s = self._clock()
        with self._changed:
            if self._closed is not None:
                raise self._refusal()
            if self._core.scheduler.waiting + len(self._undelivered) >= self._max_waiting:
                raise EngineFull(f"as many requests wait as max_waiting allows: {self._max_waiting}")
            number = next(self._ids)
            stream = Stream(f"request-{number}", lambda id: self._put(EngineCore.cancel, id))
            self._streams[stream.id] = stream
            self._undelivered.add(number)
            if on_progress is not None:
                self._on_progress[stream.id] = on_progress
            self._commands.put(_Command(number, EngineCore.add, (stream.id, request, prompt, arrived_s), {}))
        return stream

    def ask(self, function: Callable[Concatenate[EngineCore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function of `EngineCore` on the loop's thread, waits, and returns its result or raises its error.

        Raises:
            EngineClosed: the loop has ended.
        """
        answer: Future[T] = Future()
        with self._changed:
            if self._over:
                raise self._refusal()
            id = next(self._ids)
            self._answers[id] = answer
            self._commands.put(_Command(id, function, args, kwargs))
        try:
            return answer.result()
        finally:
            with self._changed:
                del self._answers[id]

    def wake(self) -> None:
        """Makes a step, even if there is nothing to do."""
        self._put(EngineCore.cancel)

    def drain(self, timeout_s: float) -> bool:
        """Stops accepting requests, and waits until those under way have ended; returns whether all have."""
        with self._changed:
            self._closed = self._closed or "the engine is draining"
            return self._changed.wait_for(lambda: not self._streams, timeout_s)

    def close(self) -> None:
        """Cancels all requests and ends the thread; a second call does nothing."""
        with self._changed:
            self._closed = "the engine is closed"
            self._put(EngineCore.stop, *self._streams)
        self._thread.join()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _put(self, function: Callable[Concatenate[EngineCore, P], T], *args: P.args, **kwargs: P.kwargs) -> None:
        self._commands.put(_Command(next(self._ids), function, args, kwargs))

    def _refusal(self) -> EngineClosed:
        return EngineClosed(self._closed or "closed") if self.failure is None else closed_by(self.failure)

    # ---------------------------------------------------------------- on the loop's thread

    def _run(self) -> None:
        core = self._core
        try:
            while not core.stopping or core.busy:
                core.now_s, commands = self._ranks.share(self._take_commands)
                for command in commands:
                    self._run_command(command)
                core.remember()
                for id, event in core.step():
                    self._deliver(id, event)
        except BaseException as error:
            cause = self._ranks.cause(error)
            if not isinstance(cause, RankFailed):  # that says all
                log.critical("the engine's loop failed; every request ends", exc_info=True)
            self._end(cause)
        else:
            self._end(None)
        finally:
            core.close(failed=self.failure is not None)

    def _take_commands(self) -> tuple[float, list[_Command]]:
        """Returns the time and all queued commands; if the core has nothing to do, waits for one. On rank 0."""
        idle_s = self._core.idle_s
        commands: list[_Command] = []
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get(block=idle_s != 0, timeout=idle_s))
                idle_s = 0.0
        return self._clock(), commands

    def _run_command(self, command: _Command) -> None:
        with self._changed:
            self._undelivered.discard(command.id)
            answer = self._answers.get(command.id, Future())  # only the rank that was asked waits for it
        try:
            answer.set_result(command.function(self._core, *command.args, **command.kwargs))
        except (BadArgument, BadTokens, UnsupportedModel) as error:
            answer.set_exception(error)
        except Exception as error:
            answer.set_exception(error)
            raise

    def _deliver(self, id: str, event: Delta | Progress) -> None:
        if isinstance(event, Progress):
            self._report(id, event)
            return
        if self._ranks.rank > 0:
            return
        self._streams[id].put(event)
        if event.finish_reason is not None:
            self._on_progress.pop(id, None)
            with self._changed:
                del self._streams[id]
                self._changed.notify_all()

    def _report(self, id: str, progress: Progress) -> None:
        report = self._on_progress.get(id)
        if report is None:
            return
        try:
            report(progress.done, progress.total)
        except Exception:  # the caller's code: it must not end other requests
            log.exception("on_progress of %s failed; it is not called again", id)
            del self._on_progress[id]

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._over, self.failure = True, failure
            self._closed = self._closed or "the engine is closed"
            for stream in self._streams.values():
                stream.fail(failure or EngineClosed(self._closed))
            self._streams.clear()
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._refusal())
            self._changed.notify_all()
