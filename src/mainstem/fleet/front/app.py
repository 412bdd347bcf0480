"""The front of a fleet: one address with all routes of a server, answered by its replicas.

    body -> prompt -> replica -> head and body as they come
                         '-- lost before its first token: the request goes to another one
                             lost later: another one resumes the stream after the last token that was sent

A request that generates goes to one replica, by its prompt. A request that concerns every replica's cache goes to all,
and `merging` makes one answer of theirs. A request for a kept response goes to the replica that keeps it. Any replica
answers all other requests.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from mainstem.fleet.front.asking import ELSEWHERE, REPLICA, Ask, Head, Part, Piece, Prompt, ReplicaLost, Replicas
from mainstem.fleet.merging import ROUTES, Merge, Whole, best
from mainstem.server.apis.table import APIS, broken, error_body
from mainstem.server.errors import ApiError, draining, internal_error, unavailable
from mainstem.server.kept.continuing import StreamProgress
from mainstem.server.management import Health
from mainstem.server.transport import cancel_when_gone, read_body

log = logging.getLogger(__name__)

_FULL = 429
_MOST_DEATHS = 3  # a request may be what kills them
_RETRY_S = 0.25
_HELD = {path: api.held for path, api in APIS.items() if api.held}
_ID = re.compile(rb'"id": ?"((?:%s)[^"]+)"' % "|".join(APIS[path].id_prefix for path in _HELD).encode())
_KEPT = re.compile(r"(?:/v1/responses|/v1/chat/completions)/([^/]+)")
_COUNTING = {api.count.path for api in APIS.values() if api.count is not None}
_HEALTH = {"/health": ("GET", "HEAD"), "/ping": ("GET", "HEAD", "POST")}  # a replica refuses other methods
_ID_BYTES = 4096  # of an answer, in which its id is
_HOMES = 1 << 16
_NO_TOKENS = np.empty(0, np.int32)

Read = Callable[[str, Headers, bytes], Prompt | None]


class Homes:
    """The replica that keeps each of the latest responses, by the id of the response."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()

    def put(self, id: str, replica: str) -> None:
        self._homes[id] = replica
        while len(self._homes) > _HOMES:
            self._homes.popitem(last=False)

    def get(self, id: str) -> str | None:
        """Returns the replica that keeps a response; None: it is not known."""
        return self._homes.get(id)


@dataclass
class Counts:
    """Counts of the front.

    Args:
        served: answers by replica, without refusals; one that was lost and given by another counts for both.
        again: how often a request was sent to another replica before its first token.
        continued: how often a replica resumed a stream of another one.
        broken: streams that ended with an error because their replica had ended.
    """

    served: Counter[str]
    again: int = 0
    continued: int = 0
    broken: int = 0


class Front:
    """The ASGI application.

    Args:
        replicas: answer.
        read: returns what the router needs to know of a request; it may be slow.
        homes: where responses are kept.
        max_body_bytes: of a request.
        wait_s: how long a request waits for a replica that takes it.
        clock: returns seconds, monotonic.
        sleep: waits for a number of seconds.
        thread: calls a function with arguments on another thread.

    Attributes:
        draining: whether new generations are refused.
        running: generations under way.
        counts: since the start.
    """

    def __init__(
        self,
        replicas: Replicas,
        read: Read,
        homes: Homes,
        *,
        max_body_bytes: int,
        wait_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        thread: Callable[..., Awaitable[Any]] = anyio.to_thread.run_sync,
    ) -> None:
        self._replicas, self._read, self._homes = replicas, read, homes
        self._max_body_bytes, self._wait_s = max_body_bytes, wait_s
        self._clock, self._sleep, self._thread = clock, sleep, thread
        self.draining, self.running = False, 0
        self.counts = Counts(Counter())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            sender = _Sender(send, scope, self._homes)
            try:
                ask = await self._received(scope, receive)
            except ApiError as error:
                await sender.refuse(error)
                return
            except ClientDisconnect:
                return
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_when_gone, receive, group.cancel_scope)
                try:
                    await self._answer(ask, sender)
                except Exception:
                    log.exception("%s %s failed", ask.method, ask.path)
                    await sender.give_up()
                group.cancel_scope.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new generations, and waits for those under way. Returns whether all have ended."""
        self.draining, end_s = True, self._clock() + timeout_s
        while self.running and self._clock() < end_s:
            await self._sleep(_RETRY_S)
        return not self.running

    async def _received(self, scope: Scope, receive: Receive) -> Ask:
        """Reads a request; see `read_body`."""
        body = await read_body(scope, receive, self._max_body_bytes)
        headers = tuple((bytes(key).lower(), bytes(value)) for key, value in scope["headers"])
        return Ask(scope["method"], scope["path"], scope.get("query_string", b""), headers, body)

    async def _answer(self, ask: Ask, sender: _Sender) -> None:
        merge = ROUTES.get((ask.method, ask.path))
        if ask.method in _HEALTH.get(ask.path, ()):
            await sender.whole(self._health())
        elif ask.method == "POST" and ask.path in APIS:
            await self._generate(ask, sender)
        elif merge is not None:
            await self._gather(ask, merge, sender)
        elif ask.path not in _COUNTING and (kept := _KEPT.match(ask.path)):
            await self._kept(ask, kept[1], sender)
        else:
            await self._one(ask, sender)

    def _health(self) -> Whole:
        word = "draining" if self.draining else "ok" if self._replicas.names() else "failed"
        return _json(200 if word == "ok" else 503, msgspec.json.encode(Health(word)))

    async def _generate(self, ask: Ask, sender: _Sender) -> None:
        if self.draining:
            await sender.refuse(draining())
            return
        self.running += 1
        try:
            headers = Headers(raw=list(ask.headers))
            prompt = await self._thread(self._read, ask.path, headers, ask.body)
            await self._one(replace(ask, prompt=prompt, tracked=True), sender)
        finally:
            self.running -= 1

    async def _one(self, ask: Ask, sender: _Sender) -> None:
        """Relays the answer of one replica. If that is lost, another one answers, or resumes the stream."""
        end_s, deaths = self._clock() + self._wait_s, 0
        while True:
            try:
                await self._relay(ask, sender, end_s)
                return
            except ReplicaLost as lost:
                if sender.complete:  # it ended after its answer
                    await sender.end()
                    return
                deaths += not lost.refused
                if not lost.refused and sender.started:
                    end_s = self._clock() + self._wait_s  # a stream may have run for long
                if not sender.can_resume or deaths >= _MOST_DEATHS or self._clock() >= end_s:
                    await self._give_up(sender)
                    return
                self.counts.again += not sender.started
                ask = replace(ask, avoid=ask.avoid | {lost.replica or ""}, progress=sender.progress)
                if not self._others(ask):
                    ask = replace(ask, avoid=frozenset())
                    await self._sleep(_RETRY_S)

    async def _give_up(self, sender: _Sender) -> None:
        if sender.started:
            self.counts.broken += 1
            await sender.fail(unavailable("The engine that answered has ended.", "replica_lost"))
        else:
            await sender.refuse(unavailable("No engine can answer at the moment.", "no_replica"))

    async def _relay(self, ask: Ask, sender: _Sender, end_s: float) -> None:
        sender.reset()
        async with aclosing(self._asked(ask)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    self._check(piece, ask, sender, end_s)
                    if piece.status not in (_FULL, *ELSEWHERE):  # a refusal that goes to the client serves nobody
                        self.counts.served[piece.replica] += 1
                    self.counts.continued += sender.started
                await sender.take(piece)
        await sender.end()

    def _check(self, head: Head, ask: Ask, sender: _Sender, end_s: float) -> None:
        """Checks that a replica answers.

        Raises:
            ReplicaLost: another one should, or none can.
        """
        again = self._clock() < end_s and head.status in ELSEWHERE
        others = self._others(replace(ask, avoid=ask.avoid | {head.replica}))
        if again or (head.status == _FULL and (others or sender.started)):
            raise ReplicaLost(head.replica, refused=True)
        if sender.started and head.status != 200:
            sender.progress = None  # e.g. it goes on from a response that only the lost one knew
            raise ReplicaLost(head.replica, refused=True)

    async def _asked(self, ask: Ask) -> AsyncGenerator[Part, None]:
        """Asks a replica; a `ReplicaLost` names the replica if that is known."""
        replica = ask.to
        try:
            async with aclosing(self._replicas.ask(ask)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Head):
                        replica = piece.replica
                    elif isinstance(piece, Piece) and piece.lost:
                        raise ReplicaLost(replica)
                    yield piece
        except ReplicaLost as lost:
            raise ReplicaLost(lost.replica or replica) from lost

    def _others(self, ask: Ask) -> bool:
        return any(name not in ask.avoid for name in self._replicas.names())

    async def _kept(self, ask: Ask, id: str, sender: _Sender) -> None:
        """Asks the replica that keeps an answer, or all if it is not known."""
        home = self._homes.get(id)
        if home in self._replicas.names():
            await self._one(replace(ask, prompt=Prompt(_NO_TOKENS, replica=home)), sender)
        else:
            await self._gather(ask, best, sender)

    async def _gather(self, ask: Ask, merge: Merge, sender: _Sender) -> None:
        """Merges the answers of all replicas; one that ends meanwhile has no cache left, and is left out."""
        answers = []
        for name in self._replicas.everyone():  # one by one: Serve confuses the calls of one request
            with suppress(ReplicaLost):
                answer = await self._whole(replace(ask, to=name))
                if answer.head.status not in ELSEWHERE:
                    answers.append(answer)
        if answers:
            await sender.whole(merge(answers))
        else:
            await sender.refuse(unavailable("No engine can answer at the moment.", "no_replica"))

    async def _whole(self, ask: Ask) -> Whole:
        head, body = None, []
        async with aclosing(self._asked(ask)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                else:
                    body.append(_bytes(piece))
        if head is None:
            raise ReplicaLost(ask.to)
        return Whole(head, b"".join(body))


class _Sender:
    """Sends one answer to the client, and holds it back while another replica could still give it.

    Attributes:
        started: whether the client has some of it.
        progress: what the client has of a stream that another replica can resume; None: none can.
        complete: whether the replica has sent all of its answer.
    """

    def __init__(self, send: Send, scope: Scope, homes: Homes) -> None:
        self._send, self._path, self._homes = send, scope["path"], homes
        self._headers = Headers(scope=scope)
        self._head: Head | None = None
        self._held: list[Piece | bytes] = []
        self.started = self.complete = False
        self.progress: StreamProgress | None = None

    @property
    def can_resume(self) -> bool:
        """Whether another replica can give the rest of the answer."""
        return self.progress is not None or not self.started

    def reset(self) -> None:
        """Forgets what was held back."""
        if not self.started:
            self._head, self._held, self.progress = None, [], None

    async def take(self, piece: Part) -> None:
        """Takes the next part of an answer."""
        self.complete = isinstance(piece, Piece) and piece.last
        if isinstance(piece, Head):
            if not self.started:
                self._head, self.progress = piece, deepcopy(piece.progress)
            elif self.progress is not None and self._path in _HELD:
                self._homes.put(self.progress.id, piece.replica)
        elif self.started:
            await self._pass_on(piece)
        else:
            self._held.append(piece)
            if len(self._held) > _HELD.get(self._path, 0):
                await self._begin()

    async def end(self) -> None:
        """Ends the answer."""
        if not self.started:
            await self._begin()
        await self._body(b"", more=False)

    async def whole(self, answer: Whole) -> None:
        """Sends a complete answer."""
        kept = tuple(each for each in answer.head.headers if each[0].lower() != b"content-length")
        await self.take(replace(answer.head, headers=kept))
        self._held.append(answer.body)
        await self.end()

    async def refuse(self, error: ApiError) -> None:
        """Sends an error in place of an answer."""
        self.reset()
        await self.whole(_json(error.status, error_body(error, self._path, self._headers), error.headers))

    async def fail(self, error: ApiError) -> None:
        """Ends a stream with an error event of its API."""
        await self._body(broken(error, self._path), more=False)

    async def give_up(self) -> None:
        """Reports an internal error: as the answer, or as the last event of a stream that has begun."""
        if self.started:
            await self.fail(internal_error())
        else:
            await self.refuse(internal_error())

    async def _begin(self) -> None:
        assert self._head is not None
        self.started = True
        if self.progress is not None:
            self.progress.opened = True
        if self._path in _HELD and (found := _ID.search(b"".join(map(_bytes, self._held)), 0, _ID_BYTES)):
            self._homes.put(found[1].decode(), self._head.replica)
        named = [(REPLICA, self._head.replica.encode())] if self._head.replica else []
        headers = [*self._head.headers, *named]
        await self._send({"type": "http.response.start", "status": self._head.status, "headers": headers})
        for piece in self._held:
            await self._pass_on(piece)

    async def _pass_on(self, piece: Piece | bytes) -> None:
        if isinstance(piece, Piece) and piece.sent is not None and self.progress is not None:
            self.progress.add(piece.sent)
        await self._body(_bytes(piece), more=True)

    async def _body(self, piece: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})


def _bytes(piece: Piece | bytes) -> bytes:
    return piece.body if isinstance(piece, Piece) else piece


def _json(status: int, body: bytes, headers: Any = None) -> Whole:
    own = [(name.lower().encode(), value.encode()) for name, value in dict(headers or {}).items()]
    return Whole(Head(status, ((b"content-type", b"application/json"), *own), ""), body)
