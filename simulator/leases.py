"""Profiles "cache" and "hybrid": requests over `PrefixCache`, `Lease` and `Tiers` themselves, as any engine uses them.

Several processes share a store. Each has requests at different stages; a step takes one further, or does to it what may
be done at any moment: it is given up, dropped, its process killed. "cache" has full attention and storage; "hybrid" has
windows and states, and no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mainstem.cache import Lease
from mainstem.components import Full, Window
from mainstem.errors import OutOfPages
from mainstem.namespaces import Namespace
from mainstem.tiers.controller import Load, Prefetch
from simulator.ghost import POISON, fingerprints
from simulator.process import IDENTITY, NAMESPACES, Process, Sizes, hybrid_sizes, other_identity
from simulator.storage import Disk
from simulator.world import World, require


class Prompts:
    """Sequences that share beginnings: each is a part of a former one with something new behind."""

    def __init__(self, world: World, longest: int, most: int | None = None) -> None:
        self._random, self._longest = world.random, longest
        self._most = most or world.random.choice((5, 15, 60))
        self._known: list[list[int]] = [[]]

    def draw(self) -> list[int]:
        """At least one token."""
        random = self._random
        base = random.choice(self._known)
        if random.random() < 0.8 and base:
            return list(base)
        base = base[: random.randint(0, len(base))]
        room = self._longest - len(base)
        sequence = base + [random.randrange(3) for _ in range(random.randint(1, max(1, min(room, 16))))]
        self.know(sequence)
        return sequence[: self._longest] or [0]

    def know(self, sequence: list[int]) -> None:
        """Something that others may continue."""
        self._known.append(sequence[: self._longest])
        if len(self._known) > self._most:
            self._known.pop(self._random.randrange(self._most))


class Request:
    """One sequence on its way: first perhaps waited for, then leased, loaded, computed and published in parts.

    Args:
        process: that it runs in.
        tokens: the prompt, and what will be appended.
        prompt: length of the prompt.
        namespace: of the sequence.
    """

    def __init__(self, process: Process, tokens: list[int], prompt: int, namespace: Namespace | str | None) -> None:
        self.process, self.namespace = process, namespace
        self.random = process.world.random
        self.began_s = process.world.now_s
        self.tokens, self.prompt = np.array(tokens, np.int32), prompt
        self.numbers = fingerprints(process.origin_of(namespace), self.tokens)
        self.prefetch: Prefetch | None = None
        self.lease: Lease | None = None
        self.load: Load | None = None
        self.computed = 0
        self.spoilt = False  # a forward read what did not arrive

    # ---------------------------------------------------------------- a step further

    def begin(self) -> None:
        """Looks in storage first, sometimes."""
        if self._chance(0.9):
            self.prefetch = self.process.tiers.prefetch(self.tokens[: self.prompt], self.namespace)
            self.process.world.did("prefetch", self.prefetch is not None)

    @property
    def waiting(self) -> bool:
        """Whether it does better to wait for storage."""
        return self.lease is None and self.prefetch is not None and self.prefetch.waiting

    def open(self) -> None:
        """Takes a lease, and reads what it found."""
        world, cache = self.process.world, self.process.cache
        prompt = self.tokens[: self.prompt]
        promised = cache.peek(prompt, self.namespace)
        try:
            self.lease = lease = cache.lease(prompt, self.namespace, priority=self.random.randint(0, 2))
        except OutOfPages:
            require(self.process.has_states, "a lease takes pages")
            world.did("lease", self.prompt, "no slot")
            return
        world.did("lease", self.prompt, lease.hit, lease.loadable)
        require(lease.reach >= lease.published, "it reaches less far than it hits", lease.reach, lease.published)
        require(max(lease.hit, lease.published + lease.loadable) <= promised, "peek promised less", promised, lease.hit)
        require(lease.hit < self.prompt, "the last token is computed", lease.hit, self.prompt)
        self.computed = lease.hit
        self.read()
        if self.process.has_states and lease.hit and self._chance(0.1):
            self.checkpoint()
        if lease.loadable and self._chance(0.9):
            self.load = self.process.tiers.load(lease)
            world.did("load", self.load.pages if self.load else 0)

    def read(self) -> None:
        """What a forward behind all that is computed reads."""
        lease = self._open()
        self.process.read("forward", self._tables(), lease.state, self.numbers[: self.computed])

    def _tables(self) -> tuple[NDArray[np.int32] | None, ...]:
        lease = self._open()
        return lease.page_table, lease.window_table

    def reserve(self) -> None:
        """Pages for a part of what is to come."""
        lease, world = self._open(), self.process.world
        missing = lease.length - lease.reserved
        if missing <= 0:
            return
        n = missing if self._chance(0.7) else self.random.randint(1, missing)
        before = lease.page_table
        try:
            lease.reserve(n)
            world.did("reserve", n, lease.page_table.tolist())
        except OutOfPages:
            world.did("reserve", n, "no pages")
            require(np.array_equal(before, lease.page_table), "a reserve that failed changed the table")
            if self._chance(0.3):  # set back
                self.finish()

    def compute(self) -> None:
        """One forward over a part of what has pages; layer by layer, if its beginning is still on the way."""
        lease, world = self._open(), self.process.world
        arriving = self.load if self.load is not None and self.load.arrived is None else None
        begin = max(self.computed, lease.hit)
        if arriving is not None:
            begin = max(begin, lease.published + arriving.pages * self.process.cache.page_size)
        end = min(lease.reserved, lease.length, begin + self.random.choice((1, 3, 100)))
        end = self._to_a_border(end) if end > begin else end
        if end <= begin or self.spoilt or not self._slide(begin, end):
            return
        numbers = self.numbers[:end]
        if arriving is None:
            self.read()
        elif not self._read_layers(arriving, begin):
            numbers = numbers ^ POISON  # a forward does not stop for it: what it leaves is worthless
        self.process.write(self._tables(), lease.state, begin, numbers)
        self.spoilt = arriving is not None and arriving.ticket.error is not None
        self.computed = lease.hit if self.spoilt else end
        world.did("forward", begin, end, self.spoilt)

    def _to_a_border(self, end: int) -> int:
        """Where there are states, sometimes the end of a page, where the state can be kept."""
        if self.process.has_states and self._chance(0.5):
            return end // self.process.cache.page_size * self.process.cache.page_size
        return end

    def _slide(self, begin: int, end: int) -> bool:
        """Window pages for what is computed next."""
        lease, world = self._open(), self.process.world
        if not any(isinstance(row, Window) for row in self.process.components):
            return True
        try:
            lease.slide(begin, end)
        except OutOfPages:
            world.did("slide", begin, end, "no pages")
            return False
        return True

    def _read_layers(self, load: Load, end: int) -> bool:
        """Reads each layer as soon as it has arrived; whether all did."""
        for layer in range(self.process.memory.layers):
            load.ticket.wait_layer(layer)
            if load.ticket.error is not None:
                return False
            only = slice(layer, layer + 1)
            self.process.read("layer", self._tables(), self._open().state, self.numbers[:end], only)
        return True

    @property
    def at_a_border(self) -> bool:
        """Whether the state can be kept as it stands."""
        computed, lease = self.computed, self._open()
        border = computed % self.process.cache.page_size == 0 and computed >= max(lease.published, 1)
        return self.process.has_states and self.load is None and border

    def checkpoint(self) -> None:
        """Keeps the state as it stands."""
        kept = self._open().checkpoint(self.computed, room=self._chance(0.7))
        self.process.world.did("checkpoint", self.computed, kept)

    def publish(self) -> None:
        """What is computed, or a part of it."""
        lease, world = self._open(), self.process.world
        self.settle()
        if self.load is not None:
            return  # not before it has arrived
        upto = self.computed if self._chance(0.7) else self.random.randint(0, self.computed)
        lease.publish(upto)
        world.did("publish", upto, lease.published)

    def settle(self) -> None:
        """Whether a load arrived: if not, all behind the hit is computed again."""
        if self.load is not None and self.load.arrived is not None and self.lease is not None:
            if not self.load.arrived:
                self.computed = self.lease.hit
            self.computed = max(self.computed, self.lease.hit)
            self.load, self.spoilt = None, False
            self.process.world.did("loaded", self.computed)
            self.read()

    def wait(self) -> None:
        """Blocks until the load has ended."""
        if self.load is not None and self.load.arrived is None:
            arrived = self.load.wait()
            self.process.world.did("wait", arrived)
        self.settle()

    def append(self) -> None:
        """A sampled token, once all is computed."""
        lease = self._open()
        if self.computed == lease.length < len(self.tokens):
            lease.append(self.tokens[lease.length : lease.length + 1])
            self.process.world.did("append", lease.length)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.computed == len(self.tokens)

    # ---------------------------------------------------------------- its end

    def finish(self) -> None:
        """The common end."""
        lease, world = self._open(), self.process.world
        self.settle()
        upto = None if self.complete and lease.reserved == self.computed else self.computed
        if self.load is not None:
            upto = min(self.computed, lease.published)
        if upto is None and lease.length > self.prompt:
            upto = self.computed
        lease.finish(upto)
        world.did("finish", upto)
        self.leave()

    def abort(self) -> None:
        """Given up."""
        self._open().abort()
        self.process.world.did("abort")
        self.leave()

    def drop(self) -> None:
        """Nobody says anything: the lease is collected."""
        self.process.world.did("drop")
        self.leave()

    def leave(self) -> None:
        """Lets go of everything."""
        self.process.world.seen["left while loading"] += self.load is not None
        if self.prefetch is not None and not self.prefetch.ended:
            self.prefetch.revoke()
        self.prefetch = self.lease = self.load = None

    def check_tables(self) -> None:
        """What is published is the tree's, the rest is its own, and nothing else is named."""
        lease, process = self._open(), self.process
        own, pools = lease.published // process.cache.page_size, list(process.pools(0))
        for pool, table in zip(pools, self._tables(), strict=False):
            for at, page in enumerate([] if table is None else table.tolist()):
                owner = pool.owner(page) if page >= 0 else "nobody"
                allowed = ("cached" if at < own else "private", "nobody")
                require(owner in allowed, "a page of a table", at, page, owner, lease.published)
        if process.has_states:
            require(pools[-1].owner(lease.state) == "private", "the state of a lease", lease.state)

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _open(self) -> Lease:
        assert self.lease is not None
        return self.lease


class Leases:
    """A run of the profile "cache"."""

    stores: ClassVar = 0.85  # how often there is storage
    most_processes: ClassVar = 3
    kill_rates: ClassVar[tuple[float, ...]] = (0.0, 0.02, 0.1, 0.2)

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        self.page_size = random.choice((1, 1, 2, 2, 3, 4))
        self.disk = Disk(world, random.choice((20, 200, 1000)))
        self.storage = random.random() < self.stores
        self.pages = self._sizes()
        self.most = random.randint(1, 6)  # requests at once
        self.namespaces = NAMESPACES[: random.choice((1, 2, 6))]
        processes = random.randint(1, self.most_processes)
        self.identities = [replace(IDENTITY, page_size=self.page_size) for _ in range(processes)]
        if random.random() < 0.5:
            self.identities[-1] = other_identity(world, self.identities[-1])
        self.prompts = Prompts(world, min(40, self.page_size * next(iter(self.pages.values()))[0]))
        self.processes = [self._start(at) for at in range(len(self.identities))]
        self.requests: list[Request] = []
        self.flushes = random.choice((0.0, 0.002, 0.02, 0.06))
        self.kills = random.choice(self.kill_rates)

    def _sizes(self) -> Sizes:
        return {Full(): self.world.random.choice(((4, 8), (6, 6), (8, 24), (16, 12), (12, 48), (30, 30)))}

    def _start(self, at: int) -> Process:
        disk = self.disk if self.storage else None
        return Process(self.world, disk, self.identities[at], self.page_size, pages=self.pages)

    def step(self) -> None:
        """One thing more."""
        world, random = self.world, self.world.random
        world.pass_time(random.expovariate(200))
        process = random.choice(self.processes)
        kind = random.random()
        if kind < 0.17:
            process.poll()
            self._check_waiting(process)
        elif kind < 0.24:
            self._seldom(process)
        elif kind < 0.24 + self.flushes:
            world.did("flush", process.cache.flush() if world.chance(0.5) else process.tiers.flush())
        elif len(self.requests) < self.most and random.random() < 0.3:
            self._arrive(process)
        elif self.requests:
            self._advance(random.choice(self.requests))
        process.count()

    def _check_waiting(self, process: Process) -> None:
        """Nobody waits for storage longer than its policy says, whatever storage does."""
        for request in self.requests:
            if request.process is process and request.waiting:
                waited_s, limit_s = self.world.now_s - request.began_s, process.longest_wait_s()
                require(waited_s <= limit_s, "a request waits too long for storage", waited_s, limit_s)

    def _seldom(self, process: Process) -> None:
        world, random = self.world, self.world.random
        kind = random.randrange(10)
        if kind < 5:
            process.poison()
        elif kind < 7:
            process.audit()
        elif kind == 7:
            self.disk.decay()
        elif kind == 8:
            self.disk.outage = random.choice((*[None] * 9, "dead", "full", "hangs")) if world.rate else None
        elif kind == 9:
            world.did("remember" if world.chance(0.7) else "warm")
            (process.tiers.remember if world.chance(0.7) else process.tiers.warm)()
        if world.chance(self.kills):
            self._kill(self.processes.index(process))

    def _arrive(self, process: Process) -> None:
        random = self.world.random
        tokens = self.prompts.draw()
        prompt = random.randint(max(1, len(tokens) - 6), len(tokens))
        namespace = self.namespaces[0] if random.random() < 0.5 else random.choice(self.namespaces)
        request = Request(process, tokens, prompt, namespace)
        request.begin()
        self.requests.append(request)

    def _advance(self, request: Request) -> None:
        world = self.world
        if request.lease is None:
            if request.waiting and world.chance(0.97):
                return
            request.open()
        elif world.chance(0.03):
            world.random.choice((request.finish, request.abort, request.drop))()
        else:
            self._further(request)()
        if (request.lease is None and request.prefetch is None) or request.complete:
            if request.lease is not None:
                request.finish()
            self.requests.remove(request)

    def _further(self, request: Request) -> Callable[[], None]:
        random, lease = self.world.random, request.lease
        assert lease is not None
        request.settle()
        if request.load is not None and random.random() < 0.2:
            return request.wait
        if request.at_a_border and random.random() < 0.4:
            return request.checkpoint
        fresh = request.computed // self.page_size * self.page_size > lease.published
        steps = [request.publish, request.compute] if fresh else [request.compute]
        if lease.reserved < lease.length:
            steps = [request.reserve, request.reserve, request.compute]
        elif request.computed == lease.length:
            steps = [request.append, *([request.publish] if fresh else [])]
        return random.choice(steps)

    def _kill(self, at: int) -> None:
        world, process = self.world, self.processes[at]
        world.faults["kill"] += 1
        process.kill()
        self.requests = [request for request in self.requests if request.process is not process]
        if world.chance(0.1):  # other weights, another layout
            self.identities[at] = other_identity(world, self.identities[at])
        self.processes[at] = self._start(at)
        world.did("kill", at)
        if world.chance(0.5):
            self.processes[at].tiers.warm()

    def end(self) -> None:
        """Faults stop: everything must end."""
        self.world.calm, self.disk.outage = True, None
        for request in self._last_requests():
            if request.lease is not None:
                request.finish()
            else:
                request.leave()
        for process in self.processes:
            process.drain()

    def close(self) -> None:
        """Nothing is held."""

    def _last_requests(self) -> Iterator[Request]:
        while self.requests:
            yield self.requests.pop()


class Hybrids(Leases):
    """A run of the profile "hybrid"."""

    stores: ClassVar = 0.0
    most_processes: ClassVar = 1
    kill_rates: ClassVar[tuple[float, ...]] = (0.0, 0.02)  # all is lost with it

    def _sizes(self) -> Sizes:
        return hybrid_sizes(self.world)

    def _seldom(self, process: Process) -> None:
        if self.world.chance(0.5):
            process.evict()
        else:
            super()._seldom(process)

    def _advance(self, request: Request) -> None:
        super()._advance(request)
        if request.lease is not None:
            request.check_tables()
