"""Profile "fleet": replicas with real caches, schedulers and events, the real front and router, a store and peers.

    client -> Router (fronts) -> Engine (machines) -> Process (process), its store, its peers
                  ^------ events, lists of replicas ------'

Every message goes over a network that fails. Machines have clocks of their own; engines freeze, drain, die and start
anew, fronts die and begin in the middle. Every request ends with the answer that it gets without a cache, or as the
rules allow. Once faults have stopped, each router knows exactly what each replica holds, tier by tier.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from mainstem.cache.components import Full
from mainstem.fleet.front.routing import CostRouter
from mainstem.settings.engine import Limits
from mainstem.tiers.host.shelf import Shelf
from simulator.fronts import Call, Router
from simulator.ghost import salt
from simulator.leases import Prompts
from simulator.loop import Loop
from simulator.machines import Engine, Machine, request_of
from simulator.network import Network
from simulator.peers import Giver, peers
from simulator.process import IDENTITY, NAMESPACES, Process
from simulator.requests import answer_of
from simulator.storage import Disk
from simulator.world import World, require

_STORE, _CONTROLLER = "store", "controller"
_PORT = 7100
_MOST_DEATHS = 3
_QUIET_S = 4.0  # until everything has arrived, once faults have stopped: two heartbeats and an answer
_BOUND_S = 120.0


def cost_router(world: World, page_size: int) -> CostRouter:
    """Makes the router of the real front, with a key that follows from nothing but the seed."""
    return CostRouter(world.clock, page_size=page_size, expect_s=1.0, key=bytes(16))


class Fleet:
    """A run of the profile "fleet"."""

    sizes: ClassVar = (2, 2, 3, 3, 4, 5, 8, 16)
    choosers: ClassVar[tuple[Callable[[World, int], CostRouter], ...]] = (cost_router,)

    def __init__(self, world: World) -> None:
        random = world.random
        self.world, self.network, self.loop = world, Network(world), Loop(world)  # type: ignore[abstract]  # what is left out is never called
        self.page_size = random.choice((1, 2, 3, 4))
        self.disk = Disk(world, random.choice((20, 200, 1000)))
        self.shared = random.random() < 0.5  # else each machine has a store of its own, and peers are all there is
        self.disks: dict[str, Disk] = {}
        self.storage = random.random() < 0.9
        self.pages = random.choice(((6, 6), (8, 24), (16, 12), (12, 48)))
        self.prompts = Prompts(world, max(1, min(40, self.page_size * self.pages[0] - 6)))
        self.limits = Limits(
            token_budget=random.choice((8, 100)),
            max_running=random.randint(1, 6),
            age_limit_s=random.choice((0.1, 1.0, 30.0)),
            draft_tokens=random.choice((0, 3)),
        )
        self.namespaces = NAMESPACES[: random.choice((1, 2, 6))]
        self.identity = replace(IDENTITY, page_size=self.page_size)
        self.in_place = random.random() < 0.5  # whether a new life has the name of the former one
        self.listed: dict[str, Engine] = {}
        self._version = 0
        self.calls: dict[int, Call] = {}
        self.fronts: dict[int, Router] = {}
        self._numbered = 0
        self.restarts: list[Machine] = []
        self.ended: list[int] = []
        self.machines: list[Machine] = []
        self.chooser, self.wait_s = random.choice(self.choosers), random.choice((2.0, 10.0))
        self.routers = [self._route(f"f{at}") for at in range(random.choice((1, 1, 2)))]
        for at in range(random.choice(self.sizes)):
            self.machines.append(Machine(world, self.network, f"m{at}", self._start))
        self.most_calls = random.randint(2, 4 + 2 * len(self.machines))
        self.faults = random.choice((0.0, 0.002, 0.006, 0.02))
        self.flushes = random.choice((0.0, 0.005))

    # ---------------------------------------------------------------- engines and routers begin and end

    def _start(self, machine: Machine) -> Engine:
        random, shelf = self.world.random, Shelf()
        others = [f"m{at}:{_PORT}" for at in range(len(self.machines)) if f"m{at}" != machine.name]
        known = random.sample(others, min(len(others), 3))
        process = Process(
            self.world,
            self._disk_of(machine.name) if self.storage else None,
            self.identity,
            self.page_size,
            pages={Full(): self.pages},
            reaches=lambda: not self.shared or self.network.reaches(machine.name, _STORE),
            peers=peers(self.network, machine.name, known, self._giver) if self.storage else None,
            shelf=shelf,
        )
        name = machine.name if self.in_place else f"{machine.name}.{machine.lives}"
        engine = Engine(machine, name, process, self.limits, shelf)
        if random.random() < 0.5:
            process.tiers.warm()
        self.world.at(self.network.delay_s(), lambda: self._list(engine))
        return engine

    def _disk_of(self, machine: str) -> Disk:
        if self.shared:
            return self.disk
        return self.disks.setdefault(machine, Disk(self.world, self.disk.capacity))

    def _giver(self, address: str) -> tuple[str, Giver] | None:
        machine = self.machines[int(address.partition(":")[0][1:])]
        if machine.frozen:
            raise TimeoutError
        return None if machine.engine is None else (machine.name, machine.engine.giver)

    def _route(self, name: str) -> Router:
        chooser = self.chooser(self.world, self.page_size)
        router = Router(self.world, self.network, name, self.loop, chooser, self._engine_of, self.calls, self.wait_s)
        self._tell(router)
        return router

    def _engine_of(self, name: str) -> Engine | None:
        machine = self.machines[int(name.partition(".")[0][1:])]
        return machine.engine if machine.engine is not None and machine.engine.name == name else None

    def _list(self, engine: Engine) -> None:
        """The controller has seen that an engine is there, drains, or has gone."""
        if engine.alive:
            self.listed[engine.name] = engine
        elif self.listed.get(engine.name) is engine:
            del self.listed[engine.name]
        self._version += 1
        for router in self.routers:
            self._tell(router)

    def _tell(self, router: Router) -> None:
        """Lets a router know the replicas there are, as soon as it can be reached."""
        version = self._version
        replicas = {name: self._said_by(engine) for name, engine in self.listed.items()}

        def arrive() -> None:
            if self.network.reaches(_CONTROLLER, router.name):
                router.update(version, replicas)
            else:
                self.world.at(0.1, arrive)

        self.world.at(self.network.delay_s(), arrive)

    def _said_by(self, engine: Engine) -> dict[str, Any]:
        """Returns what a replica says of itself; what it has queued may be long ago when a router hears of it."""
        queued = engine.scheduler.queued()
        where = {"events": engine.name, "replay": engine.name, "page_size": self.page_size}
        return {**where, "draining": engine.draining, "queued": queued, "peers": self.storage}

    def _kill(self, machine: Machine) -> None:
        engine = machine.engine
        assert engine is not None
        self.world.faults["kill"] += 1
        self.world.did("kill", engine.name)
        engine.process.kill()
        self._gone(machine)

    def _gone(self, machine: Machine) -> None:
        """Its engine has ended; the controller notices, and starts another one."""
        engine, random = machine.engine, self.world.random
        assert engine is not None
        machine.end()
        self.world.at(random.choice((0.01, 0.3, 2.0)), lambda: self._list(engine))
        self.world.at(random.uniform(0.01, 2.0), lambda: self._again(machine))

    def _again(self, machine: Machine) -> None:
        self.restarts.append(machine)

    def _end_router(self, at: int) -> None:
        """A front ends, with all that is under way in it, and another one begins in its place."""
        router = self.routers[at]
        self.world.faults["router: killed"] += 1
        self.world.did("router ends", router.name)
        router.end()
        for number, call in self.calls.items():
            if self.fronts[number] is router and call.task is not None:
                call.task.cancel()
        self.loop.run()
        self._collect()
        self.routers[at] = self._route(router.name)

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """Does one operation."""
        random = self.world.random
        self._pass(random.expovariate(400))
        kind = random.random()
        if kind < 0.03:
            self._seldom()
        elif kind < 0.03 + self.faults:
            self._disturb()
        elif kind < 0.2:
            if len(self.calls) < self.most_calls:
                self._arrive()
        elif kind < 0.3:
            random.choice(self.routers).read(random.randint(1, 4))
        elif kind < 0.303 and self.calls:
            random.choice(list(self.calls.values())).leave()
        else:
            self._work()
        self._run()

    def _pass(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        while self.restarts:
            self.restarts.pop().start()
        self._run()

    def _run(self) -> None:
        self.loop.run()
        self._collect()

    def _work(self) -> None:
        """Lets an engine run a step, most often one that has something to do."""
        random = self.world.random
        awake = [machine.engine for machine in self.machines if machine.engine is not None and not machine.frozen]
        busy = [engine for engine in awake if not engine.idle]
        if busy and random.random() < 0.9:
            awake = busy
        if not awake:
            return
        engine = random.choice(awake)
        for sequence in engine.step():
            self.prompts.know(sequence)
        if random.random() < 0.5:
            self._publish(engine)
        if engine.draining and engine.idle and not engine.scheduler.busy:
            self._gone(engine.machine)

    def _publish(self, engine: Engine) -> None:
        sent = engine.publish()
        if sent is not None:
            for router in self.routers:
                self.network.cast(engine.machine.name, router.name, partial(router.arrive, sent))

    def _arrive(self) -> None:
        random = self.world.random
        tokens = self.prompts.draw()
        tokens = tokens[: random.randint(max(1, len(tokens) - 3), len(tokens))]
        room = self.page_size * self.pages[0] - len(tokens)
        body: dict[str, Any] = {
            "prompt": tokens,
            "max_tokens": random.randint(1, max(1, min(6, room))),
            "ignore_eos": random.random() < 0.5,
            "namespace": random.randrange(len(self.namespaces)) if random.random() < 0.5 else 0,
            "session": random.choice((None, None, "a", "b")),
            "stream": random.random() < 0.7,
            "early": random.random() < 0.5,
        }
        request = request_of(body)
        origin = self.origin(body["namespace"])
        call = Call(self._numbered, body, answer_of(origin, tokens, request.params), self.loop, self.world.now_s)
        self._numbered += 1
        self.calls[call.number] = call
        router = self.fronts[call.number] = random.choice(self.routers)
        self.world.did("request", call.number, router.name, len(tokens))
        task = router.open(call)
        task.add_done_callback(lambda _: self.ended.append(call.number))

    def origin(self, namespace: int) -> Any:
        """Returns the salt of a namespace by its number; see `Process.origin_of`."""
        return salt(repr(self.identity).encode(), repr(NAMESPACES[namespace]).encode())

    # ---------------------------------------------------------------- what happens at any time

    def _seldom(self) -> None:
        world, random = self.world, self.world.random
        machine = random.choice(self.machines)
        if machine.engine is None:
            return
        process, kind = machine.engine.process, random.randrange(10)
        if kind < 4:
            process.poison()
        elif kind == 4:
            process.audit()
            machine.engine.check()
            random.choice(self.routers).check()
        elif kind == 5:
            self._disk_of(machine.name).decay()
        elif kind == 6:
            disk = self._disk_of(machine.name)
            disk.outage = random.choice((*[None] * 9, "dead", "full", "hangs")) if world.rate else None
        elif kind == 7:
            process.tiers.remember()
        elif kind == 8:
            self._catch_up(random.choice(self.routers), machine.engine)
        elif world.chance(self.flushes * 10):
            cache = process.cache
            world.did("flush", cache.flush() if world.chance(0.5) else process.tiers.flush())

    def _disturb(self) -> None:
        world, random = self.world, self.world.random
        machine, kind = random.choice(self.machines), random.randrange(12)
        if kind < 5:
            names = [each.name for each in self.machines] + [each.name for each in self.routers]
            places = [*names, _STORE, _CONTROLLER]
            self.network.cut(random.choice(places), random.choice(places), random.choice((0.05, 1.0, 5.0)))
        elif kind < 7:
            machine.freeze(random.choice((0.05, 0.5, 3.0)))
        elif kind < 8:
            self._end_router(random.randrange(len(self.routers)))
        elif machine.engine is None:
            return
        elif kind < 9:
            machine.engine.draining = True
            world.faults["machine: drains"] += 1
            world.at(self.network.delay_s(), lambda engine=machine.engine: self._list(engine))  # type: ignore[misc]
        else:
            self._kill(machine)

    def _catch_up(self, router: Router, engine: Engine) -> None:
        """Lets a router follow an engine to its last event, and compares what it knows then."""
        if engine.name in router.followers:
            self._publish(engine)
            while engine.unpublished:
                self._publish(engine)
            router.catch_up(engine)
            router.compare(engine, self.namespaces)

    # ---------------------------------------------------------------- answers

    def _collect(self) -> None:
        """Takes the requests that have ended, and checks how."""
        while self.ended:
            call = self.calls.pop(self.ended.pop(0))
            router = self.fronts.pop(call.number)
            if router.alive:
                error = None if call.task is None or call.task.cancelled() else call.task.exception()
                if error is not None:
                    raise error
                outcome = "left" if call.left else check(call, self.world.now_s - self.wait_s)
            else:
                outcome = "front ended"
            self.world.did("answer", call.number, call.status, len(call.received), outcome)
            self.world.seen[f"answers: {outcome}"] += 1
            self.world.seen["sent again"] += max(0, call.sent - 1)
            self.world.seen["gone on with elsewhere"] += call.continued

    # ---------------------------------------------------------------- the end

    def end(self) -> None:
        """Stops faults; checks that every request ends, and that all know of each other what is so."""
        world = self.world
        world.calm = True
        for disk in (self.disk, *self.disks.values()):
            disk.outage = None
        self.network.heal()
        for _ in range(3000):
            if not self.calls:
                break
            self._round(0.05)
        require(not self.calls, "requests that never end", list(self.calls))
        begin_s = settled_s = world.now_s
        while world.now_s < max(self._quiet_s(begin_s), settled_s + _QUIET_S):
            self._round(0.25)
            require(world.now_s < begin_s + _BOUND_S, "a fleet never comes to rest")
            if any(machine.engine is None or machine.engine.draining for machine in self.machines):
                settled_s = world.now_s
        engines = [machine.engine for machine in self.machines if machine.engine is not None]
        for router in self.routers:
            self._check_router(router, engines)
        for engine in engines:
            require(not engine.requests, "a replica has requests that nobody waits for", list(engine.requests))
            engine.process.drain()
        until_s = world.now_s + _QUIET_S
        while world.now_s < until_s:
            self._pass(0.25)
            self._exchange()
        for router in self.routers:
            for engine in engines:
                require(not router.pages(engine.name), "a router knows pages of a cache that has none", engine.name)

    def _quiet_s(self, begin_s: float) -> float:
        """Returns when everything that was published will have arrived."""
        changes = (machine.engine.changed_s for machine in self.machines if machine.engine is not None)
        return max([begin_s, *changes]) + _QUIET_S

    def _round(self, seconds: float) -> None:
        """Lets every machine do what it has to do."""
        self._pass(seconds)
        for machine in self.machines:
            engine = machine.engine
            if engine is None:
                continue
            if not engine.idle or engine.scheduler.busy or engine.process.tiers.busy:
                engine.step()
            elif engine.draining:
                self._gone(machine)
        self._exchange()

    def _exchange(self) -> None:
        for machine in self.machines:
            if machine.engine is not None:
                self._publish(machine.engine)
        for router in self.routers:
            router.read(sys.maxsize)
        self._run()

    def _check_router(self, router: Router, engines: list[Engine]) -> None:
        """Checks that a router knows all replicas, and nothing but what they hold."""
        names = {engine.name for engine in engines}
        require(set(router.names()) == names, "a router knows other replicas", router.names(), names)
        router.check_choices()
        for engine in engines:
            router.compare(engine, self.namespaces)
        router.compare_index(self.namespaces)

    def close(self) -> None:
        """Does nothing."""


def check(call: Call, late_s: float) -> str:
    """Checks an answer; returns what has come of it.

    Args:
        call: the request.
        late_s: requests that began before have waited as long as they may.
    """
    require(call.whole, "an answer has no end", call.number)
    if call.status == 200:
        return _check_answer(call, waited=call.began_s <= late_s)
    if call.status == 429:
        require(call.awake <= call.met, "refused, though not all are full", call.number, call.awake, call.met)
        return "refused"
    if call.status == 500:
        require(call.failed, "an error that no engine has made", call.number, call.received)
        return "failed"
    require(call.status == 503, "another status", call.number, call.status, call.received)
    waited = call.began_s <= late_s
    require(waited or call.lost >= _MOST_DEATHS, "given up too early", call.number, call.lost, call.received)
    return "given up"


def _check_answer(call: Call, *, waited: bool) -> str:
    events = call.received.split(b"\n\n")
    if not call.body["stream"] and len(events) == 1:
        require(json.loads(call.received) == call.wanted, "WRONG ANSWER", call.number, call.received, call.wanted)
        return "whole"
    first = [json.loads(part) for part in [events[0].partition(b"data: ")[0]] if part]  # all of it, if it is no stream
    said = [event.removeprefix(b"data: ") for event in [events[0][events[0].find(b"data: ") :], *events[1:]]]
    require(said[-2:] == [b"[DONE]", b""] and said.count(b"[DONE]") == 1, "a stream has another end", call.received)
    values = first + [json.loads(each) for each in said[:-2]]
    errors = [value for value in values if isinstance(value, dict)]
    tokens = [token for value in values if isinstance(value, list) for token in value]
    if not errors:
        require(tokens == call.wanted, "WRONG ANSWER", call.number, tokens, call.wanted)
        return "whole"
    require(errors == values[-1:], "an error is not the end", call.number, call.received)
    require(tokens == call.wanted[: len(tokens)], "WRONG ANSWER", call.number, tokens, call.wanted)
    broken = bool(tokens) and (call.lost >= _MOST_DEATHS or waited or (call.lost > 0 and not call.body["stream"]))
    require(broken or call.failed, "a stream breaks for no reason", call.number, call.received)
    return "broken"
