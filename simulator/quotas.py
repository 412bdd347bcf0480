"""Profile "quotas": the profile "advice" with tenants that have guarantees and maxima.

The profile counts each owner's ids from the nodes of the tree. After every operation, on device and host: an owner
beyond its maximum has nothing that could be evicted, and no owner has fallen below its guarantee for another's sake.
"""

from __future__ import annotations

from collections import Counter

from mainstem.cache.namespaces import Namespace, encode_namespace, owner_of
from mainstem.cache.quotas import Quota, Quotas, Share
from mainstem.cache.tree import NodeView
from simulator.advice import Advice
from simulator.leases import Request
from simulator.process import Process
from simulator.world import World, require

Holding = Counter[tuple[bytes, str, int]]
"""Ids by owner, component and tier."""

_DEVICE, _HOST = 0, 1


class Tenants(Advice):
    """A run of the profile "quotas"."""

    def __init__(self, world: World) -> None:
        self.askers: set[bytes] = set()  # owners that make room for themselves in this step
        self.forgets = False
        self.polled: Process | None = None
        self.dropped: set[Process] = set()
        super().__init__(world)

    def _start(self, at: int) -> Process:
        process = super()._start(at)
        process.cache.tenants.set_quotas(self._draw())
        return process

    def _draw(self) -> Quotas:
        """Draws quotas, whose guarantees leave half of the device, as the cache demands."""
        random, named = self.world.random, {}
        owners = {owner_of(encode_namespace(space)): space for space in self.namespaces}
        for space in owners.values():
            shares = []
            for tier in (_DEVICE, _HOST):
                guaranteed = random.choice((0, 0, 0.1, 0.5)) / len(owners) * (1 + tier)
                shares.append(Share(guaranteed, max(guaranteed, random.choice((0.05, 0.3, 0.6, 1)))))
            if random.random() < 0.8:
                named[space] = Quota(*shares, retained=random.choice((None, 0.5, 1)))
        return Quotas(named, Quota(Share(maximum=random.choice((0.2, 1)))))

    def step(self) -> None:
        """Does one operation, and sometimes gives other quotas; checks what it did to others."""
        before = [self._held(process) for process in self.processes]
        former = list(self.processes)
        self.askers, self.forgets, self.polled = set(), False, None
        if self.world.random.random() < 0.002:
            self.promised = [{} for _ in self.processes]
            for process in self.processes:
                process.cache.tenants.set_quotas(self._draw())
            self.world.did("quotas")
        else:
            super().step()
        for process, held in zip(self.processes, before, strict=True):
            self._check(process, held if process in former and not self.forgets else Counter())

    def _check_waiting(self, process: Process) -> None:
        self.dropped.discard(process)
        self.polled = process  # a poll lets the host evict ids beyond a maximum
        super()._check_waiting(process)

    def _advance(self, request: Request) -> None:
        self.askers.add(owner_of(encode_namespace(request.namespace)))
        lease = request.lease
        super()._advance(request)
        if lease is not None and request.lease is None and not lease.closed:
            self.dropped.add(request.process)  # a later call gives back the lease's pages

    def _ask_for_much(self, process: Process, tokens: list[int], space: Namespace | str | None) -> None:
        self.askers.add(owner_of(encode_namespace(space)))
        super()._ask_for_much(process, tokens, space)

    def _forget(self, process: Process) -> None:
        self.forgets = True
        super()._forget(process)

    def _seldom(self, process: Process) -> None:
        if self.world.chance(0.3):
            self.askers.add(b"")  # the owner of what has no tenant, salt or name
            process.evict()
            process.tiers.settle()  # what was removed may have been in the way of what exceeds a maximum
        else:
            super()._seldom(process)

    # ---------------------------------------------------------------- what the tenants have

    def _held(self, process: Process) -> Holding:
        held: Holding = Counter()
        for view in process.cache.tree.nodes():
            for (component, tier), cell in view.cells.items():
                if cell.present and not view.removed:
                    held[owner_of(view.namespace), component, tier] += len(cell.ids)
        return held

    def _check(self, process: Process, before: Holding) -> None:
        cache, quotas = process.cache, process.cache.tenants.quotas
        nodes = list(cache.tree.nodes())
        held = self._held(process)
        usage = cache.tenants.usage()
        for (owner, component, tier), n in held.items():
            require(usage[owner][tier][component] == n, "what an owner has is counted", owner, component, tier, n)
            total = (cache.pools[component] if tier == _DEVICE else self._host_pool(process, component)).total
            most = quotas.of(owner).tiers[tier].of(total)[1]
            settled = process not in self.dropped if tier == _DEVICE else self.polled is process
            if n > most and settled:
                idle = [view for view in nodes if self._idle(view, nodes, owner, component, tier)]
                require(not idle, "an owner keeps more than its maximum", owner, component, tier, n, most)
                self.world.seen["over a maximum, all in use"] += 1
        first = cache.tree.names[0]
        for (owner, component, tier), n in before.items():
            # What lies after evicted pages of the first component goes with them. On the host each owner makes room
            # for its own copies, in any step.
            if component != first or owner in self.askers or tier == _HOST:
                continue
            guaranteed = quotas.of(owner).tiers[tier].of(cache.pools[component].total)[0]
            now = held[owner, component, tier]
            require(now >= min(n, guaranteed), "an owner lost what it was guaranteed", owner, n, now, guaranteed)
            self.world.seen["kept by a guarantee"] += bool(0 < now <= guaranteed and sum(before.values()))

    @staticmethod
    def _host_pool(process: Process, component: str) -> object:
        return process.pools(_HOST)[process.cache.tree.names.index(component)]

    @staticmethod
    def _idle(view: NodeView, nodes: list[NodeView], owner: bytes, component: str, tier: int) -> bool:
        """Whether a node has a cell that could be evicted."""
        cell = view.cells[component, tier]
        if not cell.present or cell.locks or view.removed or owner_of(view.namespace) != owner:
            return False
        below = (other.cells[component, tier] for other in nodes if other.parent == view.node)
        return not any(other.present or other.in_flight for other in below) or component != "full"
