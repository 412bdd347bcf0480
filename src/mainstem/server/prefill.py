"""Prefill handoff: an engine with the role prefill computes the prompt of a request before this server answers it.

    client --> this server --the same body, max_tokens 0--> --role prefill
                    ^-------------- pages ------------------------'  --peers

A `Prefiller` computes them: a server at an address (`PrefillServer`), or replicas of a fleet
(`fleet.replica.PrefillReplicas`).

The other engine publishes pages chunk by chunk, and this server reads them while the next ones are computed. When the
other engine has answered, only the last pages are left to read, and the request goes on here as any other. A failure
there costs no more than the wait, since this server computes the pages that it lacks. Repeated failures open a breaker,
so that no request waits for a server that is gone.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import anyio
import anyio.to_thread
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mainstem.errors import MainstemError
from mainstem.metric import Metric
from mainstem.server.apis.table import APIS
from mainstem.server.errors import ApiError
from mainstem.server.transport import BATCH
from mainstem.settings.server import PrefillConfig
from mainstem.storage.breaker import Breaker

log = logging.getLogger(__name__)

Post = Callable[[str, bytes, Mapping[str, str], float], int]
"""Posts a body to a URL with headers and a timeout in seconds; returns the status.

Raises:
    OSError: there was no answer.
"""

Ahead = Callable[[str, Headers, bytes], Callable[[], object]]
"""Takes path, headers and body of a request; returns a function that begins to read those pages that are there now.

Raises:
    ApiError, MainstemError: the request cannot be answered.
"""

_FAILURES, _COOLDOWN_S = 3, 5.0
_SLOW_S = 5.0  # a client that waited for longer may have left because of it
_LOOK_S = 0.05  # between two looks for pages that have been computed
_AT_ONCE = 64
_SENT = (b"authorization", b"x-api-key", b"anthropic-version", b"content-type")  # of the headers
_LEFT_OUT = frozenset(
    ["stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "echo", "min_tokens", "prompt_logprobs"]
)


class Prefiller(Protocol):
    """Computes prompts for this server."""

    @property
    def name(self) -> str:
        """The name in log lines."""

    @property
    def min_bytes(self) -> int:
        """Requests with shorter bodies are not sent there."""

    async def prefill(self, scope: Scope, body: bytes) -> int:
        """Sends a request that computes only a prompt, in the scope of the client's request; returns the status.

        Raises:
            OSError, http.client.HTTPException: there was no answer in time. Other errors count as the same.
        """


class PrefillServer:
    """A server with `--role prefill`.

    Args:
        config: its address.
        post: sends requests.

    Attributes:
        name: its address.
        min_bytes: see `Prefiller`.
    """

    def __init__(self, config: PrefillConfig, post: Post | None = None) -> None:
        self.name, self.min_bytes = str(config.prefill_url).rstrip("/"), config.prefill_min_bytes
        self._timeout_s, self._post = config.prefill_timeout_s, post or _post
        self._limit = anyio.CapacityLimiter(_AT_ONCE)

    async def prefill(self, scope: Scope, body: bytes) -> int:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _SENT}
        url = self.name + scope["path"]
        return await anyio.to_thread.run_sync(
            self._post, url, body, headers, self._timeout_s, limiter=self._limit, abandon_on_cancel=True
        )


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """Counts of `Prefills`, by outcome."""

    outcomes: Mapping[str, int]

    METRICS: ClassVar = (
        Metric("mainstem_prefills", "Requests whose prompts were to be computed elsewhere, by outcome",
            {("*",): "outcomes.*"}, ("outcome",)),
    )  # fmt: skip


class Prefills(Counter[str]):
    """Counts of requests whose prompts were to be computed elsewhere, by outcome.

    They are `prefilled`, `refused` there, `failed`, `skipped` after repeated failures, or `gone`: the client left
    meanwhile, which only the front of a fleet tells the server.
    """

    def stats(self) -> PrefillStats:
        """Returns the counts as they are."""
        return PrefillStats(dict(self))


class PrefillFirst:
    """Middleware that has prompts computed elsewhere before the application answers.

    Args:
        app: the application.
        prefiller: computes the prompts.
        most_bytes: the longest body that the application takes.
        clock: monotonic time in seconds.
        ahead: reads pages before the request is answered; None: no pages are read.
        draining: whether the application refuses generations.
        counts: of requests.

    Attributes:
        counts: of requests.
        looks: how often more of their pages were looked for meanwhile: `done`, `failed`.
    """

    def __init__(
        self,
        app: ASGIApp,
        prefiller: Prefiller,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        ahead: Ahead | None = None,
        draining: Callable[[], bool] = lambda: False,
        counts: Prefills | None = None,
    ) -> None:
        self._ahead, self._draining = ahead, draining
        self._app, self._prefiller, self._most_bytes = app, prefiller, most_bytes
        self._clock, self._breaker = clock, Breaker(_FAILURES, _COOLDOWN_S, clock)
        self._lock = threading.Lock()
        self.counts = Prefills() if counts is None else counts
        self.looks: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        api = APIS.get(scope.get("path", ""))
        alone = self._draining() or BATCH in scope.get("state", {})
        if scope["type"] != "http" or scope["method"] != "POST" or api is None or alone:
            await self._app(scope, receive, send)
            return
        read, body = await _read(receive, self._most_bytes)
        if body is not None and len(body) >= self._prefiller.min_bytes:
            await self._prefill(scope, body, api.alone)

        async def again() -> Message:
            return read.pop(0) if read else await receive()

        await self._app(scope, again, send)

    async def _prefill(self, scope: Scope, body: bytes, changes: Mapping[str, Any]) -> None:
        alone = _alone(body, changes)
        if alone is None:
            return  # the application says what is wrong with it
        with self._lock:
            allowed = self._breaker.allow()
        if not allowed:
            self.counts["skipped"] += 1
            return
        outcome, why, began_s = "gone", "the client has gone", self._clock()
        try:
            async with anyio.create_task_group() as group:
                if self._ahead is not None:
                    group.start_soon(self._read_ahead, self._ahead, scope, body)
                outcome, why = await self._ask(scope, alone)
                group.cancel_scope.cancel()
        finally:
            self._note(outcome, why, self._clock() - began_s)

    async def _ask(self, scope: Scope, body: bytes) -> tuple[str, str]:
        """Returns the outcome and its reason."""
        try:
            status = await self._prefiller.prefill(scope, body)
        except (OSError, http.client.HTTPException) as error:
            return "failed", f"{type(error).__name__}: {error}"
        except Exception as error:  # the prompt can be computed here all the same
            if not self.counts["failed"]:
                log.exception("%s: an error that is not expected", self._prefiller.name)
            return "failed", type(error).__name__
        return "prefilled" if status == 200 else "refused" if 400 <= status < 500 else "failed", f"status {status}"

    async def _read_ahead(self, ahead: Ahead, scope: Scope, body: bytes) -> None:
        """Reads pages as they are computed, until it is cancelled."""
        try:
            look = await anyio.to_thread.run_sync(ahead, scope["path"], Headers(scope=scope), body)
            while True:
                await anyio.sleep(_LOOK_S)
                await anyio.to_thread.run_sync(look)
                self.looks["done"] += 1
        except (ApiError, MainstemError) as error:
            log.debug("%s: nothing is read ahead: %s", scope["path"], error)  # the answer will have the error
        except Exception:
            if not self.looks["failed"]:
                log.exception("%s: nothing is read ahead; further failures are only counted", scope["path"])
            self.looks["failed"] += 1

    def _note(self, outcome: str, why: str, took_s: float) -> None:
        with self._lock:
            if outcome == "failed" or (outcome == "gone" and took_s > _SLOW_S):
                self._breaker.fail()
            elif outcome == "gone":
                self._breaker.release()
            else:
                self._breaker.succeed()
        if outcome in ("failed", "refused") and not self.counts[outcome]:
            log.warning(
                "%s: %s; such prompts are computed here; further ones are only counted", self._prefiller.name, why
            )
        self.counts[outcome] += 1


async def _read(receive: Receive, most_bytes: int) -> tuple[list[Message], bytes | None]:
    """Reads the messages of a body, and returns them with it; None: it is too long, or the client is gone."""
    read: list[Message] = []
    size = 0
    while True:
        message = await receive()
        read.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or size > most_bytes:
            return read, None
        if not message.get("more_body", False):
            return read, b"".join(each.get("body", b"") for each in read)


def _alone(body: bytes, changes: Mapping[str, Any]) -> bytes | None:
    """Returns the request for the prompt alone; None: it is none."""
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    left = {name: value for name, value in fields.items() if name not in _LEFT_OUT} | dict(changes)
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(fields.get(name), Mapping):
            left[name] = {**fields[name], **value}
    return json.dumps({name: value for name, value in left.items() if value is not None}).encode()


def _post(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})  # http(s)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
