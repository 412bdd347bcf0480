"""The replicas of a fleet: machines with their own clocks, on which engines start, freeze, drain, die, start anew."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mainstem.events.feed import Feed
from mainstem.events.replica import Replica
from mainstem.events.source import BlockStored, Source
from mainstem.fleet.front.asking import Ask, Head, Piece
from mainstem.runtime.request import Delta, Request
from mainstem.server.kept.continuing import ChoiceProgress, SentTokens, StreamProgress
from mainstem.settings.engine import Limits, SamplingParams
from mainstem.tiers.host.shelf import Shelf
from simulator.network import Link, Network
from simulator.peers import Giver
from simulator.process import NAMESPACES, Process
from simulator.requests import Server
from simulator.world import World, require

_EPOCH_S = 1e6
_HEARTBEAT_S = 1.0
_MISDIRECTED, _FULL, _DRAINING, _FAILED = 421, 429, 503, 500

Part = Head | Piece | bytes | None
"""Of an answer; None: its end."""

Sent = tuple[str, int, bytes, bool]
"""A batch: of which replica, its number and content, and whether it has events."""


@dataclass(eq=False)
class Reply:
    """An answer on its way to a front.

    Args:
        link: to the front.
        stream: whether each token is sent at once.
        head: its begin.
        repeated: tokens of it that another replica has sent.
        tokens: generated so far.
    """

    link: Link[Part]
    stream: bool
    head: Head
    repeated: int = 0
    begun: bool = False
    tokens: list[int] = field(default_factory=list)


def in_stream(value: object) -> bytes:
    """Returns an event of a stream."""
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


class Engine(Server):
    """One life of a replica.

    Args:
        machine: where it runs.
        name: that others know it by.
        process: its cache with tiers.
        limits: of the scheduler.
        shelf: what it gives to peers.

    Attributes:
        alive: whether its process is there.
        draining: whether it refuses requests.
        changed_s: when it last published events.
    """

    def __init__(self, machine: Machine, name: str, process: Process, limits: Limits, shelf: Shelf) -> None:
        super().__init__(process, limits)
        self.machine, self.name = machine, name
        self.alive, self.draining = True, False
        self.giver = Giver(process.world, shelf)
        self.sent = Replica()  # what one who has lost nothing knows
        self._replies: dict[str, Reply] = {}
        self._inbox: deque[tuple[str, Ask, Link[Part]]] = deque()
        self._left: deque[str] = deque()
        self._ended: deque[Link[Part]] = deque(maxlen=8)  # on which something may still be on its way
        limit = process.world.random.choice((None, None, 20))
        places = [process.pools(0)[0].total, process.pools(1)[0].total]
        self._source = Source(process.cache.tree, places, limit=limit, step_pages=4)
        self._feed = Feed(machine.wall_s(), process.world.random.choice((0, 2000, 1 << 20)))
        self._published_s = -1.0
        self.changed_s = 0.0
        self._max_waiting = process.world.random.choice((2, 8, 8))

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done."""
        return not (self.requests or self._inbox or self._left)

    # ---------------------------------------------------------------- what fronts call, over the network

    def ask(self, name: str, ask: Ask, link: Link[Part]) -> None:
        """Takes a request; its answer goes through the link."""
        self._inbox.append((name, ask, link))

    def leave(self, name: str) -> None:
        """Notes that nobody waits for an answer any more."""
        self._left.append(name)

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Returns batches from a number on."""
        return self._feed.replay(first, self.machine.wall_s(), self._source.state())

    # ---------------------------------------------------------------- its steps

    def step(self) -> list[list[int]]:
        """Takes what has arrived and runs a step of the scheduler; returns the sequences that have ended."""
        while self._inbox:
            self._take(*self._inbox.popleft())
        while self._left:
            self.scheduler.cancel(self._left.popleft())
        return super().step()

    def heard(self, name: str, event: Delta) -> None:
        """Sends what was generated."""
        reply = self._replies[name]
        reply.tokens += event.tokens
        if event.finish_reason is not None:
            del self._replies[name]
            self._ended.append(reply.link)
        if event.finish_reason == "error":
            self._fail(reply)
        elif reply.stream:
            self._begin(reply)
            new = event.tokens[max(0, reply.repeated - len(reply.tokens) + len(event.tokens)) :]
            if new:
                sent = SentTokens(0, tuple(new), ended=event.finish_reason is not None)
                reply.link.send(Piece(in_stream(new), sent))
            if event.finish_reason is not None:
                reply.link.send(Piece(in_stream("[DONE]"), last=True))
                reply.link.send(None)
        elif event.finish_reason is not None:
            self._begin(reply)
            reply.link.send(Piece(json.dumps(reply.tokens).encode(), last=True))
            reply.link.send(None)

    def publish(self) -> Sent | None:
        """Returns what is published now; None: nothing."""
        now_s = self.process.world.now_s
        events = self._source.take()
        if not events and now_s - self._published_s < _HEARTBEAT_S:
            return None
        for event in events:
            parent = event.parent_block_hash if isinstance(event, BlockStored) else None
            require(parent is None or parent in self.sent.blocks, "a page comes before its parent", event)
            self.sent.apply([event])
        self._published_s = now_s
        self.changed_s = now_s if events else self.changed_s
        return (self.name, *self._feed.publish(events, self.machine.wall_s()), bool(events))

    def check(self) -> None:
        """Checks its requests, and what it publishes."""
        self.scheduler.check()
        self._source.check()
        self._feed.check()
        self.sent.check()

    @property
    def unpublished(self) -> bool:
        """Whether more is to be published, even if nothing happens."""
        return self._source.waiting

    def end(self) -> None:
        """Its process is gone: what was sent may arrive, and nothing more will."""
        self.alive = False
        links = [reply.link for reply in self._replies.values()] + [link for _, _, link in self._inbox]
        for link in [*links, *self._ended]:
            link.reset()
        self._replies.clear()
        self._inbox.clear()

    # ---------------------------------------------------------------- helpers

    def _take(self, name: str, ask: Ask, link: Link[Part]) -> None:
        refused = (
            _MISDIRECTED
            if ask.to not in (None, self.name)
            else _DRAINING
            if self.draining
            else _FULL
            if len(self.requests) >= self._max_waiting
            else None
        )
        self.process.world.did("taken", name, refused)
        if refused is not None:
            for part in (Head(refused, (), self.name), b"{}", None):
                link.send(part)
            return
        body = json.loads(ask.body)
        request, progress = request_of(body), None
        if body["stream"] and ask.tracked:
            first = ChoiceProgress(request.tokens, request.params.max_tokens)
            progress = ask.progress or StreamProgress(name, 0, [first])
            request = replace(request, said=np.array(progress.choices[0].tokens, np.int32))
        head = Head(200, (), self.name, progress)
        reply = self._replies[name] = Reply(link, body["stream"], head, len(request.said))
        if reply.stream and body["early"]:
            self._begin(reply)
        self.add(name, request)

    def _begin(self, reply: Reply) -> None:
        if not reply.begun:
            reply.begun = True
            reply.link.send(reply.head)

    def _fail(self, reply: Reply) -> None:
        if not reply.begun:
            reply.link.send(Head(_FAILED, (), self.name))
        rest = in_stream("[DONE]") if reply.begun else b""
        reply.link.send(Piece(in_stream({"error": "the engine failed"}) + rest, last=True))  # as the server does
        reply.link.send(None)


def request_of(body: dict[str, Any]) -> Request:
    """Returns the request in a body."""
    params = _params(body["max_tokens"], body["ignore_eos"])
    return Request(np.array(body["prompt"], np.int32), params, NAMESPACES[body["namespace"]], 0)


@lru_cache
def _params(max_tokens: int, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)


class Machine:
    """A machine, on which one engine at a time runs.

    Args:
        world: the clock and random choices.
        network: that connects it.
        name: of the machine.
        start: returns a new engine.
    """

    def __init__(self, world: World, network: Network, name: str, start: Callable[[Machine], Engine]) -> None:
        random = world.random
        self.world, self.network, self.name = world, network, name
        self._start = start
        self._offset_s, self._rate = random.uniform(-3600, 3600), random.choice((1.0, 0.99, 1.01))
        self._frozen_until_s = 0.0
        self.lives = 0
        self.engine: Engine | None = None
        self.start()

    def wall_s(self) -> float:
        """Returns the time by its own clock, which is wrong and too fast or slow."""
        return _EPOCH_S + self._offset_s + self.world.now_s * self._rate

    @property
    def frozen(self) -> bool:
        """Whether its processes do nothing."""
        return self.world.now_s < self._frozen_until_s and not self.world.calm

    def freeze(self, seconds: float) -> None:
        """Lets its processes do nothing for a while."""
        self.world.faults["machine: frozen"] += 1
        self._frozen_until_s = self.world.now_s + seconds

    def start(self) -> None:
        """Starts an engine."""
        self.lives += 1
        self.engine = self._start(self)

    def end(self) -> None:
        """Its engine ends, in whatever state it is."""
        assert self.engine is not None
        self.engine.end()
        self.engine = None
