"""The fronts of a fleet: the real front over a network, what its router knows of replicas, and clients' requests."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.datastructures import Headers

from mainstem.cache.namespaces import Namespace
from mainstem.events.feed import Follower
from mainstem.events.source import salt_id
from mainstem.events.wire import decode
from mainstem.fleet.front.app import Front, Homes
from mainstem.fleet.front.asking import Ask, Head, Piece, Prompt, ReplicaLost
from mainstem.fleet.front.routing import CostRouter
from simulator.events import Page, adapter_of, compare, followed, pages_of, reaches
from simulator.loop import Loop
from simulator.machines import Engine, Part, Sent
from simulator.network import Link, Network
from simulator.process import NAMESPACES
from simulator.world import World, require

_MAX_BODY_BYTES = 1 << 20
_WAIT_S = 0.1
_FAILED = 500
PATH = "/v1/completions"


class Call:
    """A client's request, and what has come of its answer.

    Args:
        number: names it.
        body: of the request.
        wanted: the answer that it gets without a cache.
        loop: in which it waits.
        now_s: when it begins.

    Attributes:
        met: replicas that refused it, or were lost.
        awake: the replicas there were when one last answered.
        lost: how often a replica was lost.
    """

    def __init__(self, number: int, body: dict[str, Any], wanted: Sequence[int], loop: Loop, now_s: float) -> None:
        self.number, self.body, self.wanted, self.began_s = number, body, list(wanted), now_s
        self.sent = self.continued = 0
        self.met: set[str] = set()
        self.awake: set[str] = set()
        self.lost = 0
        self.failed = self.left = False
        self.status: int | None = None
        self.received = b""
        self.whole = False
        self._asked = False
        self._gone: asyncio.Future[None] = loop.create_future()
        self.task: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """The client goes."""
        self.left = True
        if not self._gone.done():
            self._gone.set_result(None)

    def check_sent(self, ask: Ask) -> None:
        """Checks that it is sent again only as it goes on from what the client has."""
        require(self.body["stream"] or not self.received, "a request is sent again after its answer", self.number)
        events = [event.removeprefix(b"data: ") for event in self.received.split(b"\n\n")[:-1]]
        known = [token for event in events if event != b"[DONE]" for token in json.loads(event)]
        said = [] if ask.progress is None else ask.progress.choices[0].tokens
        require(known == said, "a request is sent again from elsewhere than the client's last token", known, said)
        self.sent += 1
        self.continued += bool(said)

    def note(self, piece: Head | Piece | bytes) -> None:
        """Takes into account what a replica has sent."""
        if isinstance(piece, Piece):
            self.failed |= b"the engine failed" in piece.body
        elif isinstance(piece, Head) and piece.status != 200:
            self.met.add(piece.replica)
            self.failed |= piece.status == _FAILED

    async def receive(self) -> dict[str, Any]:
        """See ASGI."""
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self._gone
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """See ASGI."""
        require(not self.whole, "an answer goes on after its end", self.number)
        if message["type"] == "http.response.start":
            require(self.status is None, "an answer begins twice", self.number)
            self.status = message["status"]
        else:
            require(self.status is not None, "an answer has no head", self.number)
            self.received += message["body"]
            self.whole = not message["more_body"]

    @property
    def scope(self) -> dict[str, Any]:
        """See ASGI."""
        headers = [(b"x-request-id", str(self.number).encode())]
        return {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}


def read(path: str, headers: Headers, body: bytes) -> Prompt:
    """Returns what a request is routed by."""
    fields = json.loads(body)
    return Prompt(np.array(fields["prompt"], np.int32), NAMESPACES[fields["namespace"]], fields["session"])


async def _here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class Router:
    """A front and its router: one process, which may end, and begin anew in the middle.

    Args:
        world: the clock.
        network: that connects it.
        name: of its machine.
        loop: that runs it.
        chooser: chooses replicas.
        engine_of: returns the engine that has a name now.
        calls: requests by number.
        wait_s: see `Front`.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        loop: Loop,
        chooser: CostRouter,
        engine_of: Callable[[str], Engine | None],
        calls: Mapping[int, Call],
        wait_s: float,
    ) -> None:
        self.world, self.network, self.name = world, network, name
        self._loop, self.chooser, self._engine_of, self._calls = loop, chooser, engine_of, calls
        self.alive = True
        self.followers: dict[str, Follower] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._awake: list[str] = []
        self._version = -1
        self._sends = 0
        self.front = Front(
            self, read, Homes(), max_body_bytes=_MAX_BODY_BYTES, wait_s=wait_s, clock=world.clock, thread=_here
        )

    # ---------------------------------------------------------------- what it knows

    def update(self, version: int, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the replicas there are, unless something newer is known."""
        if version <= self._version:
            return
        self._version = version
        self._awake = [name for name, stats in replicas.items() if not stats["draining"]]
        self.chooser.follow(replicas)
        for gone in set(self.followers) - set(replicas):
            del self.followers[gone]
        for name in replicas:
            self.followers.setdefault(name, Follower())
        self.world.did("replicas", self.name, version, self._awake)

    def arrive(self, sent: Sent) -> None:
        """Takes a batch that was published."""
        self._inbox.append(lambda: self._follow(*sent))

    def read(self, most: int) -> None:
        """Follows what has arrived."""
        for _ in range(min(most, len(self._inbox))):
            self._inbox.popleft()()

    def _follow(self, name: str, number: int, payload: bytes, has_events: bool) -> None:
        follower = self.followers.get(name)
        if follower is None:
            return
        first = follower.missing(number)
        if first is not None:
            self._ask_again(name, follower, first)
            return
        self._apply(name, follower, number, payload)
        if has_events:
            self.world.did("follow", self.name, name, number)

    def _take_up(self, name: str, follower: Follower, batches: list[tuple[int, bytes]]) -> None:
        """Follows what was missing, unless who asked for it has gone."""
        if self.followers.get(name) is follower:
            for number, payload in batches:
                self._apply(name, follower, number, payload)
            self.world.did("take up", self.name, name, len(batches))

    def _apply(self, name: str, follower: Follower, number: int, payload: bytes) -> None:
        """Applies a batch, unless it was applied before."""
        before = follower.missing(sys.maxsize)
        follower.follow(number, payload)
        if follower.missing(sys.maxsize) != before:
            self.chooser.apply(name, decode(payload).events)

    def _ask_again(self, name: str, follower: Follower, first: int) -> None:
        """Asks for batches that are missing."""
        self.world.seen["gaps in events"] += 1
        engine = self._engine_of(name)
        if engine is None:
            return
        here, there = self.name, engine.machine.name

        def answer() -> None:
            asked = self._engine_of(name)
            if asked is not None and not asked.machine.frozen:
                missed = asked.replay(first)
                take = lambda: self._take_up(name, follower, missed)  # noqa: E731
                self.network.cast(there, here, lambda: self._inbox.append(take))

        self.network.cast(here, there, answer)

    def catch_up(self, engine: Engine) -> None:
        """Follows an engine to its last event, at once."""
        follower = self.followers[engine.name]
        for number, payload in engine.replay(follower.missing(sys.maxsize) or 0):
            self._apply(engine.name, follower, number, payload)

    def compare(self, engine: Engine, namespaces: Sequence[Namespace | str | None]) -> None:
        """Checks that it knows exactly what an engine holds, once everything has arrived."""
        known = self.followers[engine.name].replica
        self.world.seen["followed pages"] += compare(known, engine.sent, engine.process.cache.tree, namespaces).total()

    def pages(self, name: str) -> Counter[Page]:
        """Returns what it knows of a replica's device and host."""
        return followed(self.followers[name].replica)

    def compare_index(self, namespaces: Sequence[Namespace | str | None]) -> None:
        """Checks that its chooser finds of every prefix what each replica has, tier by tier, and nothing else."""
        held = {name: pages_of(follower.replica) for name, follower in self.followers.items()}
        asked = dict.fromkeys((*page[:2], page[3]) for pages in held.values() for page in pages)
        names = {(adapter_of(each), salt_id(each)): each for each in namespaces}
        for adapter, salt, path in asked:
            space = names[adapter, salt]
            known = self.chooser.match(Prompt(np.array(path, np.int32), space))
            wanted = {name: reaches(pages, adapter, salt, path) for name, pages in held.items()}
            require(known == wanted, "the index knows something else than replicas have", space, path, known, wanted)
        self.world.seen["prefixes found by the index"] += len(asked)
        self.check()

    def check(self) -> None:
        """Checks what it knows of replicas, and that it asks nobody who is not there."""
        self.chooser.check()
        for follower in self.followers.values():
            follower.replica.check()
        require(self.chooser.stats()["workers"] >= len(self.followers), "a replica has no number")

    def check_choices(self) -> None:
        """Checks, once nothing is under way, that no replica counts as busy."""
        names = sorted(self._awake)
        order = self.chooser.order(None, names[::-1])
        estimates = self.chooser.estimates(None, names)  # which have an order of their own among equals
        order = names if len({each.seconds for each in estimates}) <= 1 else order[::-1]
        require(order == names, "requests count as under way that have ended", order)

    # ---------------------------------------------------------------- requests

    def open(self, call: Call) -> asyncio.Task[None]:
        """Begins a request."""
        call.task = self._loop.create_task(self.front(call.scope, call.receive, call.send))
        return call.task

    def names(self) -> Sequence[str]:
        """See `Replicas`."""
        return list(self._awake)

    def everyone(self) -> Sequence[str]:
        """See `Replicas`."""
        return self.names()

    async def ask(self, ask: Ask) -> AsyncGenerator[Head | Piece | bytes, None]:
        """See `Replicas`."""
        call = self._calls[int(dict(ask.headers)[b"x-request-id"])]
        call.check_sent(ask)
        while not (awake := self.names()):
            await asyncio.sleep(_WAIT_S)  # as Serve does
        fresh = [name for name in awake if name not in ask.avoid] or awake
        name = self.chooser.order(ask.prompt, fresh)[0]
        require(name in fresh, "a replica is chosen that is none", name, fresh)
        self.chooser.sent(ask.prompt, name)
        self._sends += 1
        sent = f"{call.number}/{self.name}/{self._sends}"
        self.world.did("route", sent, name)
        pieces: asyncio.Queue[Part | ReplicaLost] = asyncio.Queue()
        links = self._connect(sent, ask, name, pieces)
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, ReplicaLost):
                    call.lost += 1
                    call.met.add(name)
                    raise piece
                if isinstance(piece, Head):
                    call.awake = set(self.names())
                call.note(piece)
                yield piece
        finally:
            self.chooser.ended(name)
            for link in links:
                link.close()
            engine = self._engine_of(name)
            if engine is not None:
                self.world.at(self.network.delay_s(), lambda: engine.leave(sent))

    def _connect(self, sent: str, ask: Ask, name: str, pieces: asyncio.Queue[Part | ReplicaLost]) -> list[Link[Any]]:
        """Sends a request to a replica, whose answer will arrive in a queue."""
        engine = self._engine_of(name)
        machine = engine.machine.name if engine is not None else name
        known = self.world.random.random() < 0.5  # a connection that is refused does not say by whom

        def lost() -> None:
            pieces.put_nowait(ReplicaLost(name if known else None))

        back: Link[Part] = Link(self.network, machine, self.name, pieces.put_nowait, lost)

        def arrive(item: Ask) -> None:
            there = self._engine_of(name)
            if there is None:
                lost()
            else:
                there.ask(sent, item, back)

        forth: Link[Ask] = Link(self.network, self.name, machine, arrive, lost)
        forth.send(ask)
        return [forth, back]

    def end(self) -> None:
        """Its process is gone."""
        self.alive = False
