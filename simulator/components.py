"""Profile "components": full attention, a window, a chunk and a state through `Tree` and `Tiers`, without leases.

The engine has an allocator of its own. It locks what it reads and backs up what it likes. To reload from the host it
copies pages to the device and inserts them into the tree. Most runs have storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Chunked, Component, Full, Local, State, Window
from mainstem.cache.namespaces import encode_namespace
from mainstem.cache.policies import BUILT_IN
from mainstem.cache.pool import Pool
from mainstem.cache.tree import Match, Tree
from mainstem.settings.engine import HostPolicy, WritePolicy
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.host.transfer import Move
from mainstem.tiers.storage.sealer import Sealer
from mainstem.tiers.storage.store import Store
from simulator.ghost import Numbers, SimMemory, SimTicket, fingerprints, salt, state_of
from simulator.leases import Prompts
from simulator.process import IDENTITY, NAMESPACES, OTHER_SECRET, SECRET, kept_from, read_tree, storage_config
from simulator.storage import Disk, SimBackend, SimWorkers
from simulator.world import World, require

Ids = NDArray[np.int32]
_DEVICE, _HOST = 0, 1
_RELOADED = -2


@dataclass(slots=True)
class Reload:
    """A copy of host pages to private pages of the engine.

    Args:
        tokens: the prefix up to the end of the reload.
        after: the node that it follows, locked on the device.
        node: its node on the host, locked there.
        columns: the page ids to insert, by component; -1: none.
        own: the private page ids among these.
    """

    ticket: SimTicket
    tokens: Ids
    namespace: bytes
    after: int
    node: int
    columns: list[Ids]
    own: list[set[int]]


class Components:
    """A run of the profile."""

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        self.page_size = random.choice((1, 2, 3))
        windows, chunks = (random.sample(range(1, 10), 2) for _ in range(2))
        others: list[Component] = [*map(Window, windows), *map(Chunked, chunks), State()]
        self.components = (Full(), *random.sample(others, random.randint(1, 3)))
        device = [random.choice((8, 16, 30)) for _ in self.components]
        host = [random.choice((6, 16, 40)) for _ in self.components]
        self.memory = SimMemory(world, device, host, self.page_size, layers=2)
        self.tree = Tree(self.page_size, components=self.components, tiers=2, policy=random.choice(list(BUILT_IN)))
        self.pools = [Pool(pages) for pages in device]
        write = random.choice(get_args(WritePolicy))
        self.disk = Disk(world, random.choice((20, 200, 1000)))
        store = self._store() if random.random() < 0.85 else None
        self.tiers = Tiers(self.tree, self.pools, HostTier(self.memory, HostPolicy(write), pages=tuple(host)), store)
        self.prompts = Prompts(world, min(40, self.page_size * device[0]))
        self.reloads: list[Reload] = []
        self.locks: list[tuple[int, Ids, bytes, int]] = []  # node, tokens, namespace and length of matches

    def _store(self) -> Store:
        world, identity = self.world, replace(IDENTITY, page_size=self.page_size)
        backend = SimBackend(self.disk, Sealer(identity, OTHER_SECRET))
        readers, writers = (SimWorkers(world, self.disk, world.random.randint(1, 4)) for _ in range(2))
        sealer, config = Sealer(identity, SECRET), storage_config(world)
        return Store(
            backend, sealer, config, readers=readers, writers=writers, clock=world.clock, wall_clock=world.clock
        )

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """Does one operation."""
        world, random = self.world, self.world.random
        world.pass_time(random.expovariate(200))
        kind = random.random()
        if kind < 0.25:
            self.tiers.poll()
            world.did("poll")
        elif kind < 0.3:
            self._seldom()
        elif self.reloads and kind < 0.4:
            self._end_reload()
        elif self.locks and (kind < 0.5 or len(self.locks) > 3):
            self._unlock()
        else:
            tokens = np.array(self.prompts.draw(), np.int32)
            self._use(tokens[: len(tokens) // self.page_size * self.page_size], random.choice(NAMESPACES[:2]))

    def _use(self, tokens: Ids, namespace: object) -> None:
        """Matches a prompt and reads the hit; then locks it, reloads, backs up or computes the rest."""
        world, name = self.world, encode_namespace(namespace)  # type: ignore[arg-type]
        if not len(tokens):
            return
        if world.chance(0.3):
            prefetch = self.tiers.prefetch([*tokens.tolist(), 0], namespace)  # type: ignore[arg-type]
            world.did("prefetch", prefetch is not None)
        match = self.tree.match(tokens, namespace)  # type: ignore[arg-type]
        world.did("match", len(tokens), match.length, match.host_length)
        self._read(match.node, tokens, name, match.length)
        kind = world.random.random()
        if kind < 0.25:
            self.tree.lock(match.node)
            self.locks.append((match.node, tokens, name, match.length))
        elif kind < 0.5 and match.host_length:
            self._begin_reload(match, tokens, name)
        elif kind < 0.7 and match.node:
            world.did("back up", self.tiers.back_up(match.node, world.random.choice((0, 0, 1))))
        else:
            self._compute(match, tokens, name)

    def _compute(self, match: Match, tokens: Ids, namespace: bytes) -> None:
        """Computes everything after a match and inserts it."""
        begin, end = match.length // self.page_size, len(tokens) // self.page_size
        if begin == end:
            return
        self.tree.lock(match.node)
        columns = [self._wanted(component, begin, end) for component in self.components]
        own = self._allocate([int((column >= 0).sum()) for column in columns])
        if own is not None:
            for row, (column, page_ids) in enumerate(zip(columns, own, strict=True)):
                column[column >= 0] = page_ids
                self._fill(row, column, tokens, namespace, end)
            self._insert(tokens, namespace, match.node, columns, [set(page_ids.tolist()) for page_ids in own])
        self.tree.unlock(match.node)

    def _wanted(self, component: Component, begin: int, end: int) -> Ids:
        """Returns where a component needs pages: 0 where it does, else -1."""
        random = self.world.random
        if isinstance(component, State):
            return np.zeros(1, np.int32) if random.random() < 0.8 else np.empty(0, np.int32)
        column = np.zeros(end, np.int32)
        column[:begin] = -1
        if isinstance(component, Local) and random.random() < 0.5:
            column[: random.randint(begin, end - 1)] = -1
        return column

    def _fill(self, row: int, column: Ids, tokens: Ids, namespace: bytes, end: int) -> None:
        numbers = self._numbers(tokens, namespace)
        if isinstance(self.components[row], State):
            for page in column.tolist():
                self.memory.write(np.array([page], np.int32), 0, state_of(numbers, self.page_size), row)
            return
        for at in np.flatnonzero(column >= 0).tolist():
            part = numbers[at * self.page_size : (at + 1) * self.page_size]
            self.memory.write(column[at : at + 1], 0, part, row)

    def _insert(self, tokens: Ids, namespace: bytes, after: int, columns: list[Ids], own: list[set[int]]) -> None:
        """Inserts pages into the tree; frees duplicates."""
        ids = [column.copy() for column in columns]
        ids[0][ids[0] < 0] = 0  # before `after`
        key = tokens.tobytes()
        node, _, _, _ = self.tree.core.insert(namespace, key, 0, ids, after, 0, _DEVICE, True)
        for row, pool in enumerate(self.pools):
            held = set(self.tree.page_ids(node, self.tree.names[row]).tolist()) if node else set()
            pool.publish(np.array(sorted(own[row] & held), np.int32))
            pool.release(np.array(sorted(own[row] - held), np.int32))
        self.world.did("insert", node, [len(each) for each in own])

    # ---------------------------------------------------------------- from the host

    def _begin_reload(self, match: Match, tokens: Ids, namespace: bytes) -> None:
        """Copies what the host has after a match, and what the device lacks of the match, into private pages."""
        length = match.length + match.host_length
        for node, tier in _holds(match.node, match.host_node):
            self.tree.lock(node, tier)
        columns, sources = [], []
        for name, component in zip(self.tree.names, self.components, strict=True):
            here, below = (self.tree.page_ids(match.host_node, name, tier) for tier in (_DEVICE, _HOST))
            if isinstance(component, State):
                here, below = here[-1:], below[-1:]
            gaps = np.flatnonzero((here < 0) & (below < 0))
            first = int(gaps[-1]) + 1 if len(gaps) else 0
            first = max(first, kept_from(component, length) // self.page_size)  # only what the lock keeps on the device
            column = np.where(here < 0, _RELOADED, here).astype(np.int32)
            column[:first] = -1
            columns.append(column)
            sources.append(below[column == _RELOADED])
        own = self._allocate([len(source) for source in sources])
        if own is None:
            self._unlock_both(match.node, match.host_node)
            return
        moves = [Move(row, source, target) for row, (source, target) in enumerate(zip(sources, own, strict=True))]
        for column, page_ids in zip(columns, own, strict=True):
            column[column == _RELOADED] = page_ids
        ticket = self.memory.up([move for move in moves if len(move.source)])
        mine = [set(page_ids.tolist()) for page_ids in own]
        reload = Reload(ticket, tokens[:length], namespace, match.node, match.host_node, columns, mine)
        self.reloads.append(reload)
        self.world.did("reload", match.length, length)

    def _end_reload(self) -> None:
        random = self.world.random
        reload = random.choice(self.reloads)
        if random.random() < 0.3:
            reload.ticket.wait()
        if not reload.ticket.done():
            return
        self.reloads.remove(reload)
        if reload.ticket.error is None:
            columns = [
                column[column >= 0] if isinstance(component, State) else column
                for component, column in zip(self.components, reload.columns, strict=True)
            ]
            self._insert(reload.tokens, reload.namespace, reload.after, columns, reload.own)
        else:
            for pool, own in zip(self.pools, reload.own, strict=True):
                pool.release(np.array(sorted(own), np.int32))
        self._unlock_both(reload.after, reload.node)

    def _unlock_both(self, device: int, host: int) -> None:
        for node, tier in _holds(device, host):
            self.tree.unlock(node, tier)

    # ---------------------------------------------------------------- pages

    def _allocate(self, needed: list[int]) -> list[Ids] | None:
        """Allocates pages of each component, evicting as needed; None without room."""
        for row, n in enumerate(needed):
            missing = n - self.pools[row].free
            if missing > 0:
                self._evict(missing, row)
        if any(pool.free < n for pool, n in zip(self.pools, needed, strict=True)):
            self.world.did("allocate", needed, "no pages")
            return None
        return [pool.allocate(n) for pool, n in zip(self.pools, needed, strict=True)]

    def _evict(self, pages: int, row: int) -> None:
        """Frees device pages; with "write_back" after a copy of them to the host."""
        if row == 0 and self.tiers.host.policy.write_policy == "write_back":
            self.tiers.make_room(0, pages)
            self.world.did("make room", pages)
            return
        for pool, ids in zip(self.pools, self.tree.evict(pages, self.tree.names[row]), strict=True):
            pool.reclaim(ids)
        self.world.did("evict", pages, row)

    def _numbers(self, tokens: Ids, namespace: bytes) -> Numbers:
        return fingerprints(salt(b"components", namespace), tokens)

    # ---------------------------------------------------------------- checks

    def _read(self, node: int, tokens: Ids, namespace: bytes, length: int) -> None:
        """Reads what each component reads at the end of a match."""
        if not node:
            return
        numbers = self._numbers(tokens, namespace)[:length]
        for row, component in enumerate(self.components):
            page_ids = self.tree.page_ids(node, self.tree.names[row])
            first = kept_from(component, length) // self.page_size
            first = len(page_ids) - 1 if isinstance(component, State) else first
            require(bool((page_ids[first:] >= 0).all()), "a match ends where a component does not", component, page_ids)
            wanted = numbers[first * self.page_size :]
            wanted = state_of(numbers, self.page_size) if isinstance(component, State) else wanted
            self.memory.expect(self.tree.names[row], page_ids[first:], wanted, component=row)

    def audit(self) -> None:
        """Checks every structure and every page on either tier."""
        self.tree.check()
        self.tiers.check()
        held = read_tree(self.tree, self.memory, lambda namespace, tokens: self._numbers(tokens, namespace))
        for pool, component in zip(self.pools, self.tree.names, strict=True):
            pool.check()
            n = held[component, _DEVICE]
            require(pool.cached == n, "pages of the tree and of the pool", pool.cached, n)

    def _poison(self) -> None:
        for tier, pools in enumerate((self.pools, self.tiers.host_pools)):
            for row, pool in enumerate(pools):
                self.memory.poison(tier, row, [page for page in range(pool.total) if pool.owner(page) == "free"])

    def _seldom(self) -> None:
        random = self.world.random
        kind = random.randrange(8)
        if kind == 6:
            self.disk.decay()
        elif kind == 7:
            self.disk.outage = random.choice((*[None] * 9, "dead", "full", "hangs")) if self.world.rate else None
        elif kind < 2:
            self._poison()
        elif kind < 4:
            self.audit()
        elif kind == 4:
            self.world.did("flush", self.tiers.flush())
        else:
            self._evict(random.randint(1, 4), random.randrange(len(self.components)))

    def _unlock(self) -> None:
        node, tokens, namespace, length = self.locks.pop(self.world.random.randrange(len(self.locks)))
        self._read(node, tokens, namespace, length)
        self.tree.unlock(node)
        self.world.did("unlock", length)

    def _poll_later(self) -> None:
        self.world.pass_time(0.05)
        self.tiers.poll()

    def end(self) -> None:
        """Stops faults; checks that everything ends and every page is free."""
        self.world.calm, self.disk.outage = True, None
        while self.locks:
            self._unlock()
        _until(lambda: not self.reloads, self._end_reload)
        _until(lambda: not self.tiers.busy, self._poll_later)
        self.audit()
        for tier, pools in enumerate((self.pools, self.tiers.host_pools)):
            for pool, ids in zip(pools, self.tree.flush(tier), strict=True):
                pool.reclaim(ids)
        for pool in (*self.pools, *self.tiers.host_pools):
            require(pool.free == pool.total, "a page is lost", pool.free, pool.cached, pool.private, pool.total)
        require(self.tree.stats().nodes == 0, "a node is left")
        self.world.seen.update(self.tiers.counts)

    def close(self) -> None:
        """Does nothing."""


def _holds(device: int, host: int) -> tuple[tuple[int, int], ...]:
    """Returns the locks of a reload. Pages of it that are on the device already stay there."""
    return (device, _DEVICE), (host, _DEVICE), (host, _HOST)


def _until(done: Callable[[], bool], job: Callable[[], object]) -> None:
    for _ in range(2000):
        if done():
            return
        job()
    require(False, "something under way never ends")
