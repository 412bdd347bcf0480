"""Profile "ranks": the ranks of one model, each with its own store and latencies. Their trees must stay equal.

All ranks do the same operations in the same order, on threads of which only one has the turn. A rank runs until it ends
or calls `agree`; once all have called it, each gets the lowest votes. After every step all trees must be equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from random import Random
from typing import TypeVar

from mainstem.cache.components import Full
from simulator.leases import Prompts, Request
from simulator.process import IDENTITY, NAMESPACES, Process, Sizes, hybrid_sizes
from simulator.storage import Disk
from simulator.world import World, require

T = TypeVar("T")


class _Abandoned(BaseException):
    """The run has ended; a waiting thread stops."""


class Turn:
    """A thread that runs only while it has the turn."""

    def __init__(self) -> None:
        self.votes: Sequence[int] | None = None  # not None: it waits in `agree`
        self.ended = True
        self.value: object = None
        self.error: BaseException | None = None
        self._agreed: Sequence[int] | None = None
        self._job: Callable[[], object] | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._work, daemon=True).start()

    def begin(self, job: Callable[[], object] | None) -> None:
        """Runs a job until it ends or calls `agree`; None ends the thread."""
        self._job, self.ended, self.error = job, False, None
        self._switch()

    def resume(self, agreed: Sequence[int] | None) -> None:
        """Continues with the agreed votes; None abandons the job."""
        self.votes, self._agreed = None, agreed
        self._switch()

    def agree(self, votes: Sequence[int]) -> Sequence[int]:
        """Votes; called by the job."""
        self.votes = list(votes)
        self._back.release()
        self._go.acquire()
        if self._agreed is None:
            raise _Abandoned
        return self._agreed

    def _switch(self) -> None:
        self._go.release()
        self._back.acquire()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._job is None:
                self._back.release()
                return
            try:
                self.value = self._job()
            except BaseException as error:  # noqa: BLE001  # raised again on the thread of the simulator
                self.error = error
            self.ended = True
            self._back.release()


class Ranks:
    """A run of the profile."""

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        world.rate /= 3  # every rank has its own faults, and the worst counts
        self.size = random.randint(2, 8) if random.random() < 0.3 else random.randint(2, 4)
        self.page_size = random.choice((1, 2, 4))
        self.pages: Sizes = {Full(): random.choice(((6, 6), (8, 24), (12, 48), (30, 30)))}
        if random.random() < 0.4:
            self.pages = hybrid_sizes(world)
        disk = Disk(world, random.choice((30, 1000)))
        self.disks = [disk if random.random() < 0.3 else Disk(world, disk.capacity) for _ in range(self.size)]
        self.attention = random.choice(("gqa", "mla"))
        self.prompts = Prompts(world, min(40, self.page_size * next(iter(self.pages.values()))[0]), max_known=5)
        self.flushes = random.choice((0.01, 0.05, 0.1))
        self.turns = [Turn() for _ in range(self.size)]
        self._seed = random.getrandbits(32)
        self.processes = self._start()
        self.requests: list[list[Request]] = []  # each with one entry per rank

    def _start(self) -> list[Process]:
        self._seed += 1
        return [self._process(rank) for rank in range(self.size)]

    def _process(self, rank: int) -> Process:
        identity = replace(
            IDENTITY, page_size=self.page_size, attention=self.attention, tp_rank=rank, tp_size=self.size
        )
        agree, chance = self.turns[rank].agree, World(self._seed, "configuration")
        disk = self.disks[rank]
        return Process(self.world, disk, identity, self.page_size, pages=self.pages, agree=agree, chance=chance)

    # ---------------------------------------------------------------- all ranks at once

    def all(self, what: str, job: Callable[[int], T]) -> list[T]:
        """Runs a job on every rank; the results must be equal.

        Raises:
            WrongError: a rank waits forever for another one, or they differ.
        """
        for rank, turn in enumerate(self.turns):
            turn.begin(partial(job, rank))
            self.world.did(what)
        while not all(turn.ended for turn in self.turns):
            self._raise_error()
            require(all(turn.votes is not None for turn in self.turns), f"{what}: a rank waits for one that has ended")
            votes = [turn.votes or () for turn in self.turns]
            require(len({len(each) for each in votes}) == 1, f"{what}: ranks vote on different things", votes)
            agreed = [min(each) for each in zip(*votes, strict=True)]
            for turn in self.turns:
                turn.resume(agreed)
        self._raise_error()
        values = [turn.value for turn in self.turns]
        require(all(value == values[0] for value in values), f"{what}: ranks differ", values)
        trees = {self._tree(process) for process in self.processes}
        require(len(trees) == 1, f"{what}: the trees of ranks differ")
        return values  # type: ignore[return-value]

    def _raise_error(self) -> None:
        for turn in self.turns:
            if turn.error is not None:
                raise turn.error

    def _tree(self, process: Process) -> bytes:
        digest = blake2b()
        for name in process.cache.tree.core.namespaces():
            for stats, parent, _, removed, key, cells in process.cache.tree.core.nodes(name):
                shown = [(state, locks, ids.tolist()) for state, locks, ids in cells]
                digest.update(f"{stats} {parent} {removed} {shown}".encode() + name + key)
        return digest.digest()

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """Does one operation on every rank."""
        world, random = self.world, self.world.random
        world.pass_time(random.expovariate(100))
        kind = random.random()
        if kind < 0.3:
            self.poll()
        elif kind < 0.35:
            self._seldom()
        elif kind < 0.35 + self.flushes:
            self.all("flush", lambda rank: self.processes[rank].cache.flush())
        elif len(self.requests) < 3 and random.random() < 0.4:
            self._arrive()
        elif self.requests:
            self._advance(random.choice(self.requests))

    def poll(self) -> None:
        """Settles what has ended on all ranks."""
        self.all("poll", lambda rank: self.processes[rank].cache.poll(self.world.now_s))

    def _arrive(self) -> None:
        random = self.world.random
        tokens = self.prompts.draw()
        prompt, namespace = random.randint(max(1, len(tokens) - 6), len(tokens)), random.choice(NAMESPACES[:2])
        requests = [Request(process, tokens, prompt, namespace) for process in self.processes]
        self._do("prefetch", requests, lambda request: request.begin())
        self.requests.append(requests)

    def _do(self, what: str, requests: list[Request], job: Callable[[Request], object]) -> None:
        """Runs a job on every rank with the same random choices."""
        seed = self.world.random.getrandbits(32)

        def one(rank: int) -> tuple[object, ...]:
            request = requests[rank]
            request.random = Random(seed)
            job(request)
            lease = request.lease
            state = (lease.hit, lease.reserved, lease.published, lease.loadable) if lease is not None else ()
            return request.prefetch is None, request.load is None, request.computed, request.waiting, *state

        self.all(what, one)

    def _advance(self, requests: list[Request]) -> None:
        world, first = self.world, requests[0]
        if first.lease is None:
            if first.waiting and world.chance(0.95):
                return
            self._do("lease", requests, lambda request: request.open())
        elif world.chance(0.03):
            end = world.random.choice((Request.finish, Request.abort, Request.drop))
            self._do("end", requests, end)
        else:
            self._do("further", requests, self._further(first))
        if first.lease is not None and first.complete:
            self._do("finish", requests, lambda request: request.finish())
        if first.lease is None and first.prefetch is None:
            self.requests.remove(requests)

    def _further(self, first: Request) -> Callable[[Request], None]:
        random, lease = self.world.random, first.lease
        assert lease is not None
        if first.load is None and first.at_boundary and random.random() < 0.4:
            return Request.checkpoint
        if first.load is not None:
            return Request.wait if random.random() < 0.3 else Request.settle
        if first.met:
            return Request.meet
        if lease.reserved < lease.length:
            return random.choice((Request.reserve, Request.reserve, Request.compute))
        if first.computed == lease.length:
            return random.choice((Request.append, Request.publish))
        return random.choice((Request.publish, Request.compute))

    def _seldom(self) -> None:
        world, random = self.world, self.world.random
        kind = random.randrange(8)
        process = random.choice(self.processes)
        disk = random.choice(self.disks)
        if kind < 2:
            process.poison()
        elif kind < 4:
            self.all("audit", lambda rank: self.processes[rank].audit())  # frees dropped leases
        elif kind == 4:
            disk.decay()
        elif kind == 5:
            disk.outage = random.choice((*[None] * 6, "dead", "full", "hangs")) if world.rate else None
        elif kind == 6:
            self.all("remember", lambda rank: self.processes[rank].tiers.remember())
        elif world.chance(0.3):
            self._kill()

    def _kill(self) -> None:
        self.world.faults["kill"] += 1
        for process in self.processes:
            process.kill()
        self.requests = []
        self.processes = self._start()
        if self.world.chance(0.7):
            self.all("warm", lambda rank: self.processes[rank].tiers.warm())

    def end(self) -> None:
        """Stops faults and checks that everything ends."""
        self.world.calm = True
        for disk in self.disks:
            disk.outage = None
        while self.requests:
            requests = self.requests.pop()
            held = requests[0].lease is not None
            self._do("finish", requests, Request.finish if held else Request.leave)
        for _ in range(2000):
            self.poll()
            if not any(process.tiers.busy for process in self.processes):
                break
            self.world.pass_time(0.05)
        self.all("drain", lambda rank: self.processes[rank].drain())

    def close(self) -> None:
        """Ends the threads."""
        for turn in self.turns:
            while not turn.ended:
                turn.resume(None)
            turn.begin(None)
