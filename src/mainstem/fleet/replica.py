"""One engine of a fleet: the application of `mainstem serve`, called in its process, without a port.

    engine -> application -> `ask`: an HTTP request as a value -> head and body, piece by piece

A new replica reads the hottest prefixes of the store before it takes requests. Before it ends, it writes to the store
the pages that the store lacks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import anyio

from mainstem.errors import EngineClosed
from mainstem.fleet.front.asking import ELSEWHERE, Ask, Head, Part, Piece, ReplicaLost, Replicas
from mainstem.fleet.scaling import Seen, Window
from mainstem.server.kept.continuing import LOST, PROGRESS, RESUME, SENT
from mainstem.settings.fleet import Autoscaling

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope

    from mainstem.runtime.engine import Engine
    from mainstem.server.prefill import Prefiller
    from mainstem.settings.engine import Role
    from mainstem.settings.fleet import FleetConfig, PrefillSize

_QUEUED = 64  # pieces of an answer that its reader has not taken
_POLL_S = 0.05
_QUIET = 3  # polls in a row with nothing under way
_MISDIRECTED = 421

DRAIN = "DRAIN"
"""The method of an `Ask` that lets a replica finish its requests and end; another one takes its place."""

PROMPT = "mainstem.prompt"
"""The key of a request's `Prompt` in the state of its scope."""

PEERS = "PEERS"
"""The method of an `Ask` with the addresses of a replica's peers: a JSON list of HOST:PORT."""


class Replica:
    """An engine and its application.

    Args:
        config: of the fleet.
        name: of this replica.
        threads: number of threads that compute.
        host: of this machine, where its peers reach it.
        role: prompts, answers or both.
        prefiller: computes prompts elsewhere; None: the replica computes its own.

    Attributes:
        name: as given.
    """

    def __init__(
        self,
        config: FleetConfig,
        name: str,
        threads: int,
        host: str = "127.0.0.1",
        role: Role = "both",
        prefiller: Prefiller | None = None,
    ) -> None:
        from mainstem.runtime.parallel.launch import open_engine
        from mainstem.server.app import create_app

        self.name, self._timeout_s = name, config.server.drain_timeout_s
        load = config.load if config.load.threads is not None else replace(config.load, threads=threads)
        self._window = Window((config.autoscaling or Autoscaling()).window_s)
        self._stack = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            engine = open_engine(config.model, load, config.engine_at(host, role))
            self._engine: Engine = self._stack.enter_context(engine)
            for adapter, path in config.adapters:
                self._engine.load_adapter(adapter, path)
            wait_until_warm(self._engine, config.warm_timeout_s)
            self._app = create_app(self._engine, config.server, prefiller=prefiller)
            undo.pop_all()

    async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """Answers a request; see `Replicas.ask`."""
        if ask.to is not None and ask.to != self.name:
            yield Head(_MISDIRECTED, (), self.name)  # the replica that was meant has ended
        elif ask.method == DRAIN:
            self._app.state.draining = True
            yield Head(200, (), self.name)
        elif ask.method == PEERS:
            peering = self._engine.peering
            if peering is not None and peering.follow is not None:
                await asyncio.to_thread(peering.follow, json.loads(ask.body))
            yield Head(200, (), self.name)
        else:
            async for piece in answered(self._app, ask, self.name):
                yield piece

    @property
    def draining(self) -> bool:
        """Whether it takes no more requests."""
        return bool(self._app.state.draining)

    def check_health(self) -> None:
        """Checks that the replica need not be replaced.

        Raises:
            EngineClosed: the engine has failed, or it drains.
        """
        if self._engine.failure is not None:
            raise EngineClosed(f"the engine failed: {self._engine.failure}")
        if self.draining:
            raise EngineClosed("the replica drains")

    def where(self) -> dict[str, Any]:
        """Returns the statistics for routers."""
        live, replay = self._engine.event_endpoints or (None, None)
        config, peering = self._engine.config, self._engine.peering
        shared = None if config.tiers.storage is None else "of the fleet"
        peer = {} if peering is None else {"peer": peering.address, "identity": peering.identity}
        return {
            "events": live, "replay": replay, "page_size": config.page_size, "draining": self.draining,
            "costs": self._engine.costs, "queued": self._engine.queued, "store": shared,
            "peers": self._engine.reads_peers, "role": config.role, **peer,
        }  # fmt: skip

    def seen(self) -> dict[str, float]:
        """Returns the latest counts, for `scaling.wanted`."""
        stats = self._engine.stats()
        total = Seen(stats.totals.prompt_tokens, stats.totals.cached_tokens, stats.cache.tree.evicted_pages)
        return asdict(self._window.add(time.monotonic(), total))

    def close(self) -> None:
        """Lets requests end, and writes to the store the pages that it lacks."""
        self._app.state.draining = True
        self._app.state.generating.give_way()
        self._engine.drain(self._timeout_s)
        self._stack.close()


class PrefillReplicas:
    """Replicas that compute prompts for this one: a `server.prefill.Prefiller`.

    Args:
        replicas: those with the role prefill.
        size: when, and how long.

    Attributes:
        name, min_bytes: see `server.prefill.Prefiller`.
    """

    def __init__(self, replicas: Replicas, size: PrefillSize) -> None:
        self.name, self.min_bytes = "the replicas that compute prompts", size.min_bytes
        self._replicas, self._timeout_s = replicas, size.timeout_s

    async def prefill(self, scope: Scope, body: bytes) -> int:
        if not self._replicas.names():
            raise OSError("none of them runs")
        headers = tuple(each for each in scope["headers"] if each[0] != b"content-length")
        ask = Ask("POST", scope["path"], headers=headers, body=body, prompt=scope["state"].get(PROMPT))
        head = None
        with anyio.fail_after(self._timeout_s):
            async with anyio.create_task_group() as group:
                group.start_soon(self._cancel_without_any, group.cancel_scope)
                head = await self._head(ask)
                if head is not None and head.status in ELSEWHERE:
                    head = await self._head(replace(ask, avoid=frozenset([head.replica]))) or head
                group.cancel_scope.cancel()
        if head is None:
            raise OSError("none of them answered")
        return head.status

    async def _head(self, ask: Ask) -> Head | None:
        """Reads one replica's answer to its end. Returns its head; None: the replica was lost."""
        head = None
        with suppress(ReplicaLost):
            async with aclosing(self._replicas.ask(ask)) as pieces:
                async for piece in pieces:
                    head = piece if isinstance(piece, Head) else head
            return head
        return None

    async def _cancel_without_any(self, asking: anyio.CancelScope) -> None:
        while self._replicas.names():
            await anyio.sleep(_POLL_S)
        asking.cancel()


def wait_until_warm(
    engine: Engine,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until an engine has read the hottest prefixes of its store. Returns whether it did in time.

    Args:
        engine: has just started; it reads prefixes only if its settings say so.
        timeout_s: how long to wait.
        clock: returns seconds, monotonic.
        sleep: waits for a number of seconds.
    """
    end_s, quiet = clock() + timeout_s, 0
    while engine.config.tiers.warm and quiet < _QUIET:
        if clock() >= end_s:
            return False
        tiers = engine.stats().tiers
        quiet = 0 if tiers is not None and tiers.under_way else quiet + 1
        sleep(_POLL_S)
    return True


async def answered(app: ASGIApp, ask: Ask, name: str) -> AsyncGenerator[Part, None]:
    """Runs an application for one request, and yields its answer. Closing the iterator disconnects the client.

    Args:
        app: the application.
        ask: the request.
        name: of the replica.
    """
    pieces: asyncio.Queue[Part | None] = asyncio.Queue(_QUEUED)
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": ask.body, "more_body": False}
        await asyncio.Event().wait()  # until the task is cancelled
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = tuple((bytes(key), bytes(value)) for key, value in message["headers"])
            await pieces.put(Head(message["status"], headers, name, message.get(PROGRESS)))
        elif message["type"] == "http.response.body" and message.get("body"):
            sent, lost, last = message.get(SENT), message.get(LOST, False), not message.get("more_body", False)
            plain = sent is None and not lost and not last
            body = bytes(message["body"])
            await pieces.put(body if plain else Piece(body, sent, lost, last and not lost))

    async def run() -> None:
        try:
            await app(_scope(ask), receive, send)
        finally:
            await pieces.put(None)

    task = asyncio.create_task(run())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await task
    finally:
        while not pieces.empty():  # else its end would wait for room
            pieces.get_nowait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _scope(ask: Ask) -> dict[str, Any]:
    state = {PROMPT: ask.prompt, **({RESUME: ask.progress} if ask.tracked else {})}
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "scheme": "http",
        "method": ask.method, "path": ask.path, "raw_path": ask.path.encode(), "root_path": "",
        "query_string": ask.query, "headers": list(ask.headers), "client": None, "server": None, "state": state,
    }  # fmt: skip
