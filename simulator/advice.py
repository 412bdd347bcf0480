"""Profile "advice": the profiles "cache" and "hybrid" with prefixes that clients advise on: retained, pinned, demoted.

The profile writes every promise down and looks for it again and again: a retained prefix must be found until its time,
whatever is evicted, copied, loaded, fails or is removed beside it. The cache's own check verifies bounds and counts.
Announced next uses are random here; they must change nothing before their owner can stake a page.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from math import inf

from mainstem.cache.components import Full
from mainstem.cache.namespaces import Namespace
from mainstem.errors import OutOfPages
from simulator.leases import Leases
from simulator.process import Process, Sizes, hybrid_sizes
from simulator.world import World, require

_ASKED_FOR_A_STAKE = 667
"""Pages that an owner asks for before it may lose one: 0.15 % of them."""

Prefix = tuple[Namespace | str | None, tuple[int, ...]]


@dataclass
class Promise:
    """Until when a prefix is retained, and whether it is pinned besides."""

    until: float = -inf
    pinned: bool = False

    def join(self, other: Promise) -> Promise:
        """Returns what holds if both do."""
        return Promise(max(self.until, other.until), self.pinned or other.pinned)


class Advice(Leases):
    """A run of the profile "advice"."""

    def __init__(self, world: World) -> None:
        self.promised: list[dict[Prefix, Promise]] = []
        super().__init__(world)
        self.advised = world.random.choice((0.05, 0.2))
        self.trusted = world.random.random() < 0.5

    def _sizes(self) -> Sizes:
        if self.world.random.random() < 0.5:
            return hybrid_sizes(self.world)
        return {Full(): self.world.random.choice(((8, 24), (16, 12), (12, 48), (30, 30)))}

    def _start(self, at: int) -> Process:
        self.promised[at : at + 1] = [{}]
        return super()._start(at)

    def step(self) -> None:
        """Does one operation, and sometimes gives advice or looks for what was promised."""
        random = self.world.random
        at = random.randrange(len(self.processes))
        if random.random() < self.advised:
            self._advise(self.processes[at], self.promised[at])
        if random.random() < 0.05:
            self._look(self.processes[at], self.promised[at])
        super().step()

    def _advise(self, process: Process, promised: dict[Prefix, Promise]) -> None:
        world, random, retention = self.world, self.world.random, process.cache.retention
        tokens, space = self.prompts.draw(), random.choice(self.namespaces)
        kind = random.random()
        if kind < 0.35:
            promise = (
                Promise(pinned=True) if random.random() < 0.3 else Promise(world.now_s + random.expovariate(2) + 0.01)
            )
            renew_s = 0.5 * (len(tokens) % 2)  # hits may keep it for longer than was promised
            kept = (
                retention.pin(tokens, space)
                if promise.pinned
                else retention.retain(tokens, promise.until, space, renew_s=renew_s)
            )
            require(kept.positions <= kept.cached, "more is retained than cached", kept)
            world.did("retain", kept.positions, kept.cached, promise.pinned)
            world.seen["retained"] += kept.positions > 0
            if kept.positions:
                self._promise(promised, (space, tuple(tokens[: kept.positions])), promise)
        elif kind < 0.5:
            length = retention.unpin(tokens, space)
            world.did("unpin", length)
            if found := promised.get((space, tuple(tokens[:length]))):
                found.pinned = False
        elif kind < 0.7:
            process.poll()
            self._expire(promised)
            world.did("expire", retention.stats().prefixes)
        elif kind < 0.85:
            self._expect(process, tokens, space)
        else:
            over = random.random() < 0.5
            world.did("demote", process.cache.demote(tokens, space, over=over), over)
            if over:
                self._withdraw(promised, space, tokens)

    def _expect(self, process: Process, tokens: list[int], space: Namespace | str | None) -> None:
        """Says when a prefix is used next: soon, late, or in the past."""
        world, cache = self.world, process.cache
        found = cache.peek([*tokens, 2**30], space) // self.page_size * self.page_size
        length = cache.expected.expect(tokens, world.now_s + world.random.choice((-1, 0, 0.05, 0.5, 5, 500)), space)
        require(found <= length <= len(tokens), "less is expected than is found, or more than was named", length, found)
        world.did("expect", length)
        world.seen["expected"] += length > 0
        self._weigh(process)
        if self.trusted and world.random.random() < 0.2:
            self._ask_for_much(process, tokens, space)

    def _ask_for_much(self, process: Process, tokens: list[int], space: Namespace | str | None) -> None:
        """Asks for so many pages that their owner may stake some."""
        with contextlib.suppress(OutOfPages):
            process.cache.lease([*tokens, *[3] * (5000 * self.page_size)], space).abort()

    def _weigh(self, process: Process) -> None:
        """Checks that nobody bets without a stake."""
        tree = process.cache.stats().tree
        bets, asked = tree.advice_won + tree.advice_lost, tree.queried_symbols // self.page_size
        self.world.seen["weighed with bets"] += bets > 0
        require(bets == 0 or asked >= _ASKED_FOR_A_STAKE, "a bet without a stake", bets, asked)

    def _forget(self, process: Process) -> None:
        """Flushes one tier or both, or removes a prefix and everything after it."""
        world, random = self.world, self.world.random
        promised = self.promised[self.processes.index(process)]
        if random.random() < 0.5:
            prefix, space = self.prompts.draw(), random.choice(self.namespaces)
            prefix = prefix[: random.randint(0, len(prefix))]
            world.did("remove", process.cache.remove(prefix, space))
            self._cut(process, promised, space, prefix)
        elif random.random() < 0.3:
            world.did("flush", process.cache.flush())
            promised.clear()
        else:
            world.did("flush", process.tiers.flush())  # of the host: what is retained stays

    def end(self) -> None:
        """Stops faults, checks that all promises hold and end, and that everything ends."""
        for process, promised in zip(self.processes, self.promised, strict=True):
            self._look(process, promised)
            self._weigh(process)
            self.world.seen["moved down"] += sum(process.cache.retention.stats().host.values())
            process.cache.retention.poll(self.world.now_s + 1e6)
            stats = process.cache.retention.stats()
            require(stats.prefixes == stats.pinned, "a time has not ended", stats)
            process.cache.retention.clear()
            require(not any(process.cache.retention.stats().device.values()), "something stays retained")
        super().end()

    # ---------------------------------------------------------------- what was promised

    def _promise(self, promised: dict[Prefix, Promise], prefix: Prefix, promise: Promise) -> None:
        promised[prefix] = promise.join(promised.get(prefix, Promise()))

    def _expire(self, promised: dict[Prefix, Promise]) -> None:
        for prefix in [prefix for prefix, it in promised.items() if not it.pinned and it.until <= self.world.now_s]:
            del promised[prefix]

    def _withdraw(self, promised: dict[Prefix, Promise], space: Namespace | str | None, tokens: list[int]) -> None:
        """Forgets what begins with a prefix, or is a beginning of it."""
        for prefix in [prefix for prefix in promised if prefix[0] == space]:
            n = min(len(prefix[1]), len(tokens))
            if prefix[1][:n] == tuple(tokens[:n]):
                del promised[prefix]

    def _cut(
        self, process: Process, promised: dict[Prefix, Promise], space: Namespace | str | None, removed: list[int]
    ) -> None:
        """Cuts off promises what was removed; with other components than full attention, nothing of them is left."""
        kept = max(len(removed) - 1, 0) // self.page_size * self.page_size
        for prefix in [prefix for prefix in promised if prefix[0] == space]:
            if prefix[1][: len(removed)] != tuple(removed):
                continue
            promise = promised.pop(prefix)
            if kept and process.components == (Full(),):
                self._promise(promised, (space, prefix[1][:kept]), promise)

    def _look(self, process: Process, promised: dict[Prefix, Promise]) -> None:
        """Looks for everything that was promised."""
        self._expire(promised)
        for (space, tokens), promise in promised.items():
            found = process.cache.peek([*tokens, 2**30], space)
            require(found >= len(tokens), "what is retained is not found", len(tokens), found, promise)
