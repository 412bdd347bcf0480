"""Sends the requests of a batch, some at a time, and keeps an answer to each.

A request whose server does not answer is sent again, later and later, until nothing was answered for a while: then the
batch stops, and goes on another time. Any other answer is kept, whatever it says.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from mainstem.batch.answers import Failure, Response
from mainstem.batch.lines import Requests
from mainstem.errors import MainstemError

_AGAIN = {408, 425, 429, 502, 503, 504}  # the server cannot answer now
_KEYS = {401, 403}  # no request would be answered
_FIRST_S, _LONGEST_S = 0.25, 15.0  # between two attempts
_REPLY_S = 3600.0  # until a server has answered one request
_NO_ANSWER = b'{"error": {"message": "The server had an error.", "type": "server_error"}}'

log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """What a server answers."""

    status: int
    request_id: str
    body: bytes


Send = Callable[[str, bytes], Awaitable[Reply]]
"""Posts a body to a path; raises OSError if there is no answer."""

Add = Callable[[int, Response | None, Failure | None], None]
"""Keeps an answer; see `Answers.add`."""


class ServerGone(MainstemError):
    """Nothing was answered for a while."""


class _Details(Struct):
    cached_tokens: int = 0


class _Usage(Struct):
    """The usage of all APIs: OpenAI's prompt includes what is cached, Anthropic's input does not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Used(Struct):
    usage: _Usage | None = None


@dataclass(slots=True)
class Totals:
    """What was answered.

    Args:
        answers: in number.
        failed: those that are no success.
        prompt, cached, output: tokens of prompts, those of them that were found in a cache, and tokens of answers.
    """

    answers: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0

    @property
    def computed(self) -> int:
        """Tokens that were computed."""
        return self.prompt - self.cached + self.output

    def count(self, status: int, body: bytes) -> None:
        """Counts an answer."""
        self.answers += 1
        self.failed += status != 200
        try:
            usage = msgspec.json.decode(body, type=_Used).usage or _Usage()
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
        read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        self.prompt += usage.prompt_tokens + usage.input_tokens + (read or 0) + (written or 0)
        self.cached += details.cached_tokens if read is None else read
        self.output += usage.completion_tokens + usage.output_tokens


class Runner:
    """Runs a batch.

    Args:
        requests: of the batch.
        send: sends one.
        add: keeps an answer.
        may_send: waits until another request may be sent, and returns whether it may; False: the batch is to stop.
        retry_s: seconds without any answer after which it gives up.
        clock: seconds, monotonic.
        sleep: waits for seconds.
        answered: is called after each answer.

    Attributes:
        totals: what was answered.
    """

    def __init__(
        self,
        requests: Requests,
        send: Send,
        add: Add,
        may_send: Callable[[], Awaitable[bool]],
        *,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        answered: Callable[[Totals], object] = lambda totals: None,
    ) -> None:
        self._requests, self._send, self._add, self._may_send = requests, send, add, may_send
        self._retry_s, self._clock, self._sleep, self._answered = retry_s, clock, sleep, answered
        self._last_s = 0.0  # when something was answered
        self._failure: Exception | None = None
        self.totals = Totals()

    async def run(self, order: Iterable[int], at_once: int) -> None:
        """Answers requests, until none is left or `may_send` says so.

        Args:
            order: in which they are sent.
            at_once: how many at the same time.

        Raises:
            ServerGone: nothing was answered for `retry_s`, or the server refuses the key.
            MainstemError, OSError: an answer cannot be kept.
        """
        rest, self._failure = iter(order), None

        async def work() -> None:
            try:
                await self._work(rest)
            except (MainstemError, OSError) as error:
                self._failure = self._failure or error
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for _ in range(at_once):
                group.start_soon(work)
        if self._failure is not None:
            raise self._failure

    async def _work(self, rest: Iterator[int]) -> None:
        """Answers one request after the other."""
        while await self._may_send():
            index = next(rest, None)
            if index is None:
                return
            line = self._requests[index]
            reply = await self._reply(line.url, bytes(line.body))
            if reply is None:
                return
            kept, failure = _kept(reply)
            await anyio.to_thread.run_sync(self._add, index, kept, failure)
            self._last_s = self._clock()
            self.totals.count(reply.status, reply.body)
            self._answered(self.totals)

    async def _reply(self, path: str, body: bytes) -> Reply | None:
        """Returns the answer to a request; None: the batch is to stop before there is one."""
        wait_s, began_s = _FIRST_S, self._clock()
        while True:
            try:
                reply = await self._send(path, body)
                if reply.status in _KEYS:
                    raise ServerGone(f"the server refuses the key: {_said(reply)}")
                if reply.status not in _AGAIN:
                    return reply
                why = _said(reply)
            except OSError as error:
                why = str(error) or type(error).__name__
            if self._clock() - max(self._last_s, began_s) >= self._retry_s:
                raise ServerGone(f"the server has not answered for {self._retry_s:g} s: {why}")
            await self._sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_S)
            if not await self._may_send():
                return None


def _kept(reply: Reply) -> tuple[Response | None, Failure | None]:
    """Returns what is kept of an answer; on one line."""
    try:
        body = msgspec.json.format(reply.body, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = reply.body[:200].decode(errors="replace")
        return None, Failure("invalid_response", f"status {reply.status}, and no JSON: {shown}")
    return Response(reply.status, reply.request_id, msgspec.Raw(body)), None


def _said(reply: Reply) -> str:
    try:
        return f"status {reply.status}: {msgspec.json.decode(reply.body)['error']['message']}"
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return f"status {reply.status}"


# ---- a server, and an application in this process


def to_server(url: str, headers: Mapping[str, str]) -> Send:
    """Returns what sends requests to a server, each on a thread of its own, which ends with the process.

    Args:
        url: of the server; http or https.
        headers: of each request, besides its type.
    """

    def post(path: str, body: bytes) -> Reply:
        request = urllib.request.Request(url + path, body, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=_REPLY_S) as reply:
                return Reply(reply.status, reply.headers.get("X-Request-Id", ""), reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers.get("X-Request-Id", ""), error.read())
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def send(path: str, body: bytes) -> Reply:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply] = loop.create_future()

        def done(take: Callable[[Any], None], what: object) -> None:
            if not reply.done():  # else nobody waits any more
                take(what)

        def work() -> None:
            answer: tuple[Callable[[Any], None], object]
            try:
                answer = reply.set_result, post(path, body)
            except Exception as error:  # noqa: BLE001  # the caller gets it
                answer = reply.set_exception, error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done, *answer)

        threading.Thread(target=work, daemon=True).start()
        return await reply

    return send


App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
"""An ASGI application."""


def to_app(app: App, headers: Mapping[str, str], state: Mapping[str, Any]) -> Send:
    """Returns what sends requests to an application in this process, without a socket.

    Args:
        app: the application.
        headers: of each request, besides those that every one has.
        state: of each request's scope.
    """

    async def send(path: str, body: bytes) -> Reply:
        given = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": None, "server": ("localhost", 80), "state": dict(state),
        }  # fmt: skip
        unread, status, id, pieces = [body], 500, "", list[bytes]()

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await anyio.sleep_forever()
            raise AssertionError

        async def take(message: Any) -> None:
            nonlocal status, id
            if message["type"] == "http.response.start":
                status = message["status"]
                id = next((value.decode() for name, value in message["headers"] if name == b"x-request-id"), "")
            else:
                pieces.append(message.get("body", b""))

        try:
            await app(scope, receive, take)
        except Exception:  # as a server's client sees it: an answer with status 500
            log.exception("a request of a batch failed")
        return Reply(status, id, b"".join(pieces) or _NO_ANSWER)

    return send
