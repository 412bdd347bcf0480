"""Profiles "cache" and "hybrid": requests that use `PrefixCache`, `Lease` and `Tiers` directly, as an engine does.

Several processes share a store. Each has requests at different stages. A step advances a request, or does what may
happen at any time: aborts it, drops its lease, kills its process. "cache" has full attention; "hybrid" has windows,
chunks and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Full, Local
from mainstem.cache.namespaces import Namespace
from mainstem.cache.prefix_cache import Lease
from mainstem.errors import OutOfPages
from mainstem.tiers.host.load import Load
from mainstem.tiers.prefetch.prefetch import Prefetch
from simulator.events import Listener
from simulator.ghost import POISON, fingerprints
from simulator.process import IDENTITY, NAMESPACES, Process, Sizes, draw_empty, hybrid_sizes, other_identity
from simulator.storage import Disk
from simulator.world import World, require


class Prompts:
    """Sequences that share prefixes: each is a prefix of an earlier one with new tokens after it."""

    def __init__(self, world: World, longest: int, max_known: int | None = None) -> None:
        self._random, self._longest = world.random, longest
        self._max_known = max_known or world.random.choice((5, 15, 60))
        self._known: list[list[int]] = [[]]

    def draw(self) -> list[int]:
        """Draws a sequence of at least one token."""
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
        """Adds a sequence that others may continue."""
        self._known.append(sequence[: self._longest])
        if len(self._known) > self._max_known:
            self._known.pop(self._random.randrange(self._max_known))


class Request:
    """One request: it may wait for storage, then is leased, loaded, computed and published in parts.

    Args:
        process: the process that it runs in.
        tokens: the prompt, and the tokens to append.
        prompt: length of the prompt.
        namespace: namespace of the sequence.
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
        self.leads = False  # whether it computes while its prefetch goes on
        self.computed = 0
        self.spoilt = False  # whether a forward read pages that did not arrive
        self.counted = False  # whether its lease has reserved pages

    # ---------------------------------------------------------------- steps

    def begin(self) -> None:
        """Usually begins a prefetch."""
        if self._chance(0.9):
            prompt, bidirectional = self.tokens[: self.prompt], self._chance(0.5)
            self.prefetch = self.process.tiers.prefetch(prompt, self.namespace, bidirectional=bidirectional)
            self.process.world.did("prefetch", self.prefetch is not None, bidirectional)

    @property
    def waiting(self) -> bool:
        """Whether it should wait for storage."""
        return self.lease is None and self.prefetch is not None and self.prefetch.waiting

    def open(self) -> None:
        """Takes a lease and reads its hit."""
        world, cache = self.process.world, self.process.cache
        prompt = self.tokens[: self.prompt]
        promised = cache.peek(prompt, self.namespace)
        try:
            self.lease = lease = cache.lease(prompt, self.namespace, priority=self.random.randint(0, 2))
        except OutOfPages:
            require(self.process.has_states, "a lease without states runs out of pages")
            world.did("lease", self.prompt, "no slot")
            return
        world.did("lease", self.prompt, lease.hit, lease.loadable)
        require(lease.reach >= lease.published, "reach is less than the hit", lease.reach, lease.published)
        require(max(lease.hit, lease.published + lease.loadable) <= promised, "peek promised less", promised, lease.hit)
        require(lease.hit < self.prompt, "a hit must leave the last token to compute", lease.hit, self.prompt)
        self.computed = lease.hit
        self.read()
        if self.process.has_states and lease.hit and self._chance(0.1):
            self.checkpoint()
        if lease.loadable and self._chance(0.9):
            self.load = self.process.tiers.load(lease)
            world.did("load", self.load.pages if self.load else 0)
        if self.prefetch is not None and not self.leads:
            key = cache.tree.keys.encode(prompt)
            self.leads = self.prefetch.lead(key, lease.published)
            world.did("lead", self.leads)

    @property
    def met(self) -> bool:
        """Whether storage has brought what comes next."""
        usable = self.prefetch.usable if self.leads and self.prefetch is not None else 0
        return usable > self.computed and self.load is None and self._open().length == self.prompt

    def meet(self) -> None:
        """Ends the lease, to take another one after what storage has brought."""
        self._open().finish(self.computed)
        self.process.found += self.found
        self.lease, self.counted = None, False
        self.process.world.seen["met"] += 1
        self.process.world.did("meet", self.computed)

    @property
    def found(self) -> int:
        """The hit of its lease, if that counts."""
        return self._open().hit if self.counted else 0

    def read(self) -> None:
        """Reads what a forward after the computed positions reads."""
        lease = self._open()
        self.process.read("forward", self._tables(), lease.state, self.numbers[: self.computed])

    def _tables(self) -> tuple[NDArray[np.int32], ...]:
        return self._open().tables

    def reserve(self) -> None:
        """Reserves pages for all or part of the rest."""
        lease, world = self._open(), self.process.world
        missing = lease.length - lease.reserved
        if missing <= 0:
            return
        n = missing if self._chance(0.7) else self.random.randint(1, missing)
        before = lease.page_table
        try:
            lease.reserve(n)
            world.did("reserve", n, lease.page_table.tolist())
            self.process.asked += 0 if self.counted else lease.length
            self.counted = True
        except OutOfPages:
            world.did("reserve", n, "no pages")
            require(np.array_equal(before, lease.page_table), "a reserve that failed changed the table")
            if self._chance(0.3):  # preempted
                self.finish()

    def compute(self) -> None:
        """Runs a forward over part of what has pages; layer by layer if a load is under way."""
        lease, world = self._open(), self.process.world
        arriving = self.load if self.load is not None and self.load.arrived is None else None
        begin = max(self.computed, lease.hit)
        if arriving is not None:
            begin = max(begin, lease.published + arriving.pages * self.process.cache.page_size)
        end = min(lease.reserved, lease.length, begin + self.random.choice((1, 3, 100)))
        end = self._to_boundary(end) if end > begin else end
        ahead = self.prefetch.ahead(lease.published) if self.leads and self.prefetch is not None else None
        if ahead is not None:
            end = min(end, lease.published + ahead)
        if end <= begin or self.spoilt or not self._slide(begin, end):
            return
        numbers = self.numbers[:end]
        if arriving is None:
            self.read()
        elif not self._read_layers(arriving, begin):
            numbers = numbers ^ POISON  # a forward does not stop; what it writes is garbage
        self.process.write(self._tables(), lease.state, begin, numbers)
        self.spoilt = arriving is not None and arriving.ticket.error is not None
        self.computed = lease.hit if self.spoilt else end
        world.did("forward", begin, end, self.spoilt)

    def _to_boundary(self, end: int) -> int:
        """With states, sometimes rounds down to a page boundary, where a checkpoint is possible."""
        if self.process.has_states and self._chance(0.5):
            return end // self.process.cache.page_size * self.process.cache.page_size
        return end

    def _slide(self, begin: int, end: int) -> bool:
        """Reserves window pages for what is computed next."""
        lease, world = self._open(), self.process.world
        if not any(isinstance(row, Local) for row in self.process.components):
            return True
        try:
            lease.slide(begin, end)
        except OutOfPages:
            world.did("slide", begin, end, "no pages")
            return False
        return True

    def _read_layers(self, load: Load, end: int) -> bool:
        """Reads each layer once it has arrived; returns whether all arrived."""
        for layer in range(self.process.memory.layers):
            load.ticket.wait_layer(layer)
            if load.ticket.error is not None:
                return False
            only = slice(layer, layer + 1)
            self.process.read("layer", self._tables(), self._open().state, self.numbers[:end], only)
        return True

    @property
    def at_boundary(self) -> bool:
        """Whether the state can be checkpointed now."""
        computed, lease = self.computed, self._open()
        boundary = computed % self.process.cache.page_size == 0 and computed >= max(lease.published, 1)
        return self.process.has_states and self.load is None and boundary

    def checkpoint(self) -> None:
        """Checkpoints the state."""
        kept = self._open().checkpoint(self.computed, room=self._chance(0.7))
        self.process.world.did("checkpoint", self.computed, kept)

    def publish(self) -> None:
        """Publishes all or part of what is computed."""
        lease, world = self._open(), self.process.world
        self.settle()
        if self.load is not None:
            return  # the load must arrive first
        upto = self.computed if self._chance(0.7) else self.random.randint(0, self.computed)
        lease.publish(upto)
        world.did("publish", upto, lease.published)
        if self.leads and self.prefetch is not None:
            self.prefetch.reached(lease.published)

    def settle(self) -> None:
        """Takes the result of a load; after a failure all positions after the hit are computed again."""
        if self.load is not None and self.load.arrived is not None and self.lease is not None:
            if not self.load.arrived:
                self.computed = self.lease.hit
            self.computed = max(self.computed, self.lease.hit)
            self.load, self.spoilt = None, False
            self.process.world.did("loaded", self.computed)
            self.read()

    def wait(self) -> None:
        """Waits until the load has ended."""
        if self.load is not None and self.load.arrived is None:
            arrived = self.load.wait()
            self.process.world.did("wait", arrived)
        self.settle()

    def append(self) -> None:
        """Appends a sampled token once everything is computed."""
        lease = self._open()
        if self.computed == lease.length < len(self.tokens):
            lease.append(self.tokens[lease.length : lease.length + 1])
            self.process.world.did("append", lease.length)

    @property
    def complete(self) -> bool:
        """Whether all tokens are computed."""
        return self.computed == len(self.tokens)

    # ---------------------------------------------------------------- end

    def finish(self) -> None:
        """Finishes the lease."""
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
        """Aborts the lease."""
        self._open().abort()
        self.process.world.did("abort")
        self.leave()

    def drop(self) -> None:
        """Drops the lease without ending it: it is garbage-collected, once its load has ended."""
        if self.load is not None and self.counted:
            self.process.perhaps += self.load.pages * self.process.cache.page_size
        self.process.world.did("drop")
        self.leave()

    def leave(self) -> None:
        """Releases everything."""
        self.process.world.seen["left while loading"] += self.load is not None
        self.process.found += self.found if self.lease is not None else 0
        if self.prefetch is not None and self.leads:
            self.prefetch.stop_leading()
        if self.prefetch is not None and not self.prefetch.ended:
            self.prefetch.revoke()
        self.prefetch = self.lease = self.load = None
        self.leads = self.counted = False

    def check_tables(self) -> None:
        """Checks that published pages belong to the tree and all others in the tables to the lease."""
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

    stores: ClassVar = 0.85  # probability of storage
    max_processes: ClassVar = 3
    kill_rates: ClassVar[tuple[float, ...]] = (0.0, 0.02, 0.1, 0.2)

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        self.page_size = random.choice((1, 1, 2, 2, 3, 4))
        self.disk = Disk(world, random.choice((20, 200, 1000)))
        self.storage = random.random() < self.stores
        self.pages = self._sizes()
        self.empty = draw_empty(world, self.pages)
        self.max_requests = random.randint(1, 6)  # at once
        self.namespaces = NAMESPACES[: random.choice((1, 2, 6))]
        processes = random.randint(1, self.max_processes)
        self.identities = [replace(IDENTITY, page_size=self.page_size) for _ in range(processes)]
        if random.random() < 0.5:
            self.identities[-1] = other_identity(world, self.identities[-1])
        self.prompts = Prompts(world, min(40, self.page_size * next(iter(self.pages.values()))[0]))
        self.listeners = [Listener(world, at) for at in range(processes)]
        self.processes = [self._start(at) for at in range(len(self.identities))]
        self.requests: list[Request] = []
        self.flushes = random.choice((0.0, 0.002, 0.02, 0.06))
        self.kills = random.choice(self.kill_rates)

    def _sizes(self) -> Sizes:
        return {Full(): self.world.random.choice(((4, 8), (6, 6), (8, 24), (16, 12), (12, 48), (30, 30)))}

    def _start(self, at: int) -> Process:
        disk = self.disk if self.storage else None
        return Process(
            self.world, disk, self.identities[at], self.page_size, pages=self.pages, empty=self.empty,
            listener=self.listeners[at],
        )  # fmt: skip

    def step(self) -> None:
        """Does one operation."""
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
            self._forget(process)
        elif len(self.requests) < self.max_requests and random.random() < 0.3:
            self._arrive(process)
        elif self.requests:
            self._advance(random.choice(self.requests))
        process.count()

    def _forget(self, process: Process) -> None:
        """Flushes one tier or both, or removes a prefix and everything after it."""
        world, random = self.world, self.world.random
        if random.random() < 0.5:
            prefix = self.prompts.draw()
            prefix = prefix[: random.randint(0, len(prefix))]
            world.did("remove", process.cache.remove(prefix, random.choice(self.namespaces)))
        else:
            world.did("flush", process.cache.flush() if world.chance(0.5) else process.tiers.flush())

    def _check_counts(self, process: Process) -> None:
        """Checks that each lease that reserved pages counts once, with its whole hit."""
        counts = process.cache.stats().leases
        running = [each for each in self.requests if each.process is process and each.lease is not None]
        found = process.found + sum(request.found for request in running)
        require(counts.queried == process.asked, "leases ask for something else", counts, process.asked)
        require(found <= counts.hit <= found + process.perhaps, "leases find something else", counts, found)

    def _check_waiting(self, process: Process) -> None:
        """Checks that no request waits for storage longer than its policy allows."""
        for request in self.requests:
            if request.process is process and request.waiting:
                waited_s, limit_s = process.polled_s - request.began_s, process.longest_wait_s()
                require(waited_s <= limit_s, "a request waits too long for storage", waited_s, limit_s)

    def _seldom(self, process: Process) -> None:
        world, random = self.world, self.world.random
        kind = random.randrange(10)
        if kind < 5:
            process.poison()
        elif kind < 7:
            process.audit()
            self._check_counts(process)
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
        if request.met:
            return request.meet
        if request.at_boundary and random.random() < 0.4:
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
        if world.chance(0.1):  # for example other weights or another layout
            self.identities[at] = other_identity(world, self.identities[at])
        self.processes[at] = self._start(at)
        world.did("kill", at)
        if world.chance(0.5):
            self.processes[at].tiers.warm()

    def end(self) -> None:
        """Stops faults and checks that everything ends."""
        self.world.calm, self.disk.outage = True, None
        for request in self._last_requests():
            if request.lease is not None:
                request.finish()
            else:
                request.leave()
        for process in self.processes:
            self._check_counts(process)
            process.drain()

    def close(self) -> None:
        """Does nothing."""

    def _last_requests(self) -> Iterator[Request]:
        while self.requests:
            yield self.requests.pop()


class Hybrids(Leases):
    """A run of the profile "hybrid"."""

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
