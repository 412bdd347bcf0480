"""One generation: the choices of a request from the engine's events to its end, and their stream to the client.

Knows streams, events and disconnected clients. It does not know keys, limits, prompts, or what is recorded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mainstem.errors import EngineClosed
from mainstem.prompt_rules.rules import Rewrite
from mainstem.runtime.request import Delta, Usage
from mainstem.server.apis.replies import Reply, UsageBody, usage_body
from mainstem.server.errors import ApiError, api_error, draining, internal_error
from mainstem.server.transport import cancel_when_gone
from mainstem.server.watch.explained import rewrites_body

if TYPE_CHECKING:
    from mainstem.runtime.stream import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pings:
    """Keeps streams alive, so that no client or proxy gives up while a long prompt is computed.

    Args:
        interval_s: from the last event until a ping; 0: there are none.
        clock: returns seconds, monotonic.
        sleep: waits for a number of seconds.
    """

    interval_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = anyio.sleep


_LAST_EVENT_S = 10.0
"""The time to wait for the last event of a choice whose client has left: about the longest step."""


class Watcher:
    """Sees the events of one generation, and reports when it has ended.

    Args:
        ended: called once, with the reason, the usage and all events. A generation without a last event was cut off:
            its reason is "cancelled", and it has no usage.
    """

    def __init__(self, ended: Callable[[str, Usage | None, Sequence[Delta]], object]) -> None:
        self._ended, self._deltas, self._open = ended, list[Delta](), True

    def see(self, delta: Delta) -> None:
        """Takes one event into account."""
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._end(delta.finish_reason, delta.usage)

    def close(self) -> None:
        """Ends the watch: no more events come. The last event may be missing."""
        self._end("cancelled", None)

    def _end(self, finish: str, usage: Usage | None) -> None:
        if self._open:
            self._open = False
            self._ended(finish, usage, self._deltas)


class Run:
    """The choices of one HTTP request, from submit to their last events. Its exit cancels unfinished ones.

    Args:
        streams: the engine's streams, one per choice.
        choices: number of choices per prompt.
        watchers: the watchers of each stream.
        prompt_tokens: of all prompts.
        rewrites: what rules changed in them.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        choices: int,
        watchers: Sequence[Sequence[Watcher]],
        prompt_tokens: int,
        rewrites: Sequence[Rewrite] = (),
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self._rewrites = rewrites
        self._streams = streams
        self._choices = choices
        self._watchers = watchers
        self.answers: list[list[Delta]] = [[] for _ in streams]
        self.failure: ApiError | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self._streams:
            stream.cancel()

    @property
    def usage(self) -> UsageBody:
        """The usage of all choices, after the last event."""
        usages = [answer[-1].usage for answer in self.answers]
        body = usage_body([usage for usage in usages if usage is not None], self._choices)
        body.prompt_rewrites = rewrites_body(self._rewrites)
        return body

    async def finish(self, receive: Receive) -> None:
        """Waits for the end of all choices.

        Raises:
            ApiError: one of them failed.
            ClientDisconnect: the client has gone.
        """

        async def nothing(index: int, delta: Delta) -> None:
            """Sends nothing: the response is sent as a whole."""

        if not await self.follow(receive, nothing):
            raise self.failure or ClientDisconnect()

    async def follow(self, receive: Receive, handle: Callable[[int, Delta], Awaitable[None]]) -> bool:
        """Passes every event to `handle`, the choices in parallel.

        Returns:
            Whether all choices ended. If not, the client has gone, or `failure` has the error.
        """
        complete = False
        async with anyio.create_task_group() as watched:
            watched.start_soon(cancel_when_gone, receive, watched.cancel_scope)
            async with anyio.create_task_group() as group:
                for index in range(len(self._streams)):
                    group.start_soon(self._follow_one, index, handle, watched.cancel_scope)
            complete = not watched.cancel_scope.cancel_called
            watched.cancel_scope.cancel()
        return complete

    async def _follow_one(
        self, index: int, handle: Callable[[int, Delta], Awaitable[None]], scope: anyio.CancelScope
    ) -> None:
        watchers = self._watchers[index]
        try:
            async for delta in self._streams[index]:
                for watcher in watchers:
                    watcher.see(delta)
                self.answers[index].append(delta)
                if delta.finish_reason in ("error", "cancelled"):
                    self.failure = _failure(delta)
                    scope.cancel()
                    return
                await handle(index, delta)
        except EngineClosed as error:
            self.failure = api_error(error)
            scope.cancel()
        except OSError:  # how ASGI 2.4 servers report a disconnected client
            scope.cancel()
        finally:
            await self._see_the_end(index)
            for watcher in watchers:
                watcher.close()

    async def _see_the_end(self, index: int) -> None:
        """Shows watchers the last event of a choice whose client has left: its hits and misses count, too."""
        stream, answer = self._streams[index], self.answers[index]
        if answer and answer[-1].finish_reason is not None:
            return
        stream.cancel()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_LAST_EVENT_S), contextlib.suppress(EngineClosed):
            async for delta in stream:
                if delta.finish_reason is not None:
                    for watcher in self._watchers[index]:
                        watcher.see(delta)


def scored(answers: Sequence[Sequence[Delta]], of: int) -> list[Sequence[Delta]]:
    """Returns the answers to each prompt with its log-probabilities, which were computed for the first one alone.

    Args:
        answers: the events of each; those to a prompt are adjacent.
        of: number of answers to each prompt.
    """
    shown: list[Sequence[Delta]] = []
    for i in range(0, len(answers), of):
        first, *others = answers[i : i + of]
        scores = [Delta("", prompt_logprobs=delta.prompt_logprobs) for delta in first if delta.prompt_logprobs]
        shown += [first, *([*scores, *other] for other in others)]
    return shown


def best(answers: Sequence[Sequence[Delta]], of: int, kept: int) -> list[Sequence[Delta]]:
    """Returns the answers to each prompt with the highest log-probability per token, the best first.

    Args:
        answers: the events of each; those to a prompt are adjacent, and log-probabilities are in them.
        of: number of answers to each prompt.
        kept: number of them that are returned.
    """
    groups = [answers[i : i + of] for i in range(0, len(answers), of)]
    return [answer for group in groups for answer in sorted(group, key=_mean_logprob, reverse=True)[:kept]]


def _mean_logprob(answer: Sequence[Delta]) -> float:
    values = [entry.logprob for delta in answer for entry in delta.logprobs]
    return sum(values) / len(values) if values else 0.0


def _failure(delta: Delta) -> ApiError:
    if delta.finish_reason == "cancelled":
        return draining()
    log.error("a generation failed: %s", delta.error)
    return internal_error()


NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream of events, for proxies."""


class EventStream(Response):
    """A run as server-sent events.

    Args:
        run: the choices.
        reply: writes them.
        pings: are sent while there are no events.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run, reply: Reply, pings: Pings) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(NO_BUFFER)
        self._run = run
        self._reply = reply
        self._pings = pings
        self._sent_s = pings.clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._run:
            await send(self.start())
            await self._send_events(receive, send)

    def start(self) -> dict[str, Any]:
        """Returns the first ASGI message."""
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}

    def opening(self) -> bytes:
        """Returns the events before the first token."""
        return self._reply.opening()

    def message(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Returns the ASGI message of an event of the engine; None: there is nothing to send."""
        events = self._reply.events(index, delta)
        return _body(events) if events else None

    def failing(self, error: ApiError) -> dict[str, Any]:
        """Returns the last ASGI message of a stream that failed."""
        return _body(self._reply.failing(error), more_body=False)

    async def _send_events(self, receive: Receive, send: Send) -> None:
        async def handle(index: int, delta: Delta) -> None:
            message = self.message(index, delta)
            if message is not None:
                self._sent_s = self._pings.clock()
                await send(message)

        opening = self.opening()
        if opening:
            await send(_body(opening))
        async with anyio.create_task_group() as group:
            if self._pings.interval_s:
                group.start_soon(self._ping, send)
            complete = await self._run.follow(receive, handle)
            group.cancel_scope.cancel()
        if complete:
            await send(_body(self._reply.closing(self._run.usage), more_body=False))
        elif self._run.failure is not None:
            await send(self.failing(self._run.failure))

    async def _ping(self, send: Send) -> None:
        """Sends a ping, which clients skip, whenever nothing was sent for an interval; until it is cancelled."""
        with contextlib.suppress(OSError):  # the client has gone, which others notice
            while True:
                left_s = self._sent_s + self._pings.interval_s - self._pings.clock()
                if left_s > 0:
                    await self._pings.sleep(left_s)
                else:
                    self._sent_s = self._pings.clock()
                    await send(_body(self._reply.ping()))


def _body(chunk: bytes, *, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more_body}
