"""One process: a cache with its host tier and its store client. It may be killed and restarted at any step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Attended, Chunked, Component, Full, State, Window
from mainstem.cache.identity import Identity
from mainstem.cache.namespaces import Namespace, encode_namespace, of_weights
from mainstem.cache.policies import BUILT_IN, NodeStats, Policy, Rank
from mainstem.cache.pool import Pool
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.settings.engine import HostPolicy, PrefetchPolicy, StorageConfig, WritePolicy
from mainstem.storage.peer import PeerBackend
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.shelf import Shelf
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.pending import Agree
from mainstem.tiers.storage.calls import StoreCall
from mainstem.tiers.storage.rows import Row
from mainstem.tiers.storage.sealer import Sealer
from mainstem.tiers.storage.store import Found, Store
from simulator.events import Listener
from simulator.ghost import Numbers, SimMemory, fingerprints, salt, state_of
from simulator.storage import Disk, SimBackend, SimWorkers
from simulator.world import World, require

IDENTITY = Identity("m", "w", "f32", "none", "l", "s", "gqa", "r", "t", "TokenKeys/4", 1)
NAMESPACES: tuple[Namespace | str | None, ...] = (
    None, "a", Namespace(adapter="a"), Namespace(salt="a"), Namespace(adapter="a", salt="b"), Namespace(extra=("a",)),
)  # fmt: skip
WEIGHTS = ("w", "x", "y")
"""What the weights of a model are called after their first change."""
_FIELDS = (
    "model", "weights", "dtype", "quantization", "layout", "shape", "rope", "tokenizer", "symbols", "rank", "extra",
)  # fmt: skip
SECRET, OTHER_SECRET = b"the secret of those who share", b"what somebody else thinks it is"


Ids = NDArray[np.int32]
Sizes = Mapping[Component, tuple[int, int]]
_DEVICE, _HOST = 0, 1


class OwnPolicy:
    """A policy in Python, unknown to the core."""

    name = "own"

    def rank(self, node: NodeStats) -> Rank:
        return node.hits % 3, -node.depth_pages


def other_identity(world: World, identity: Identity) -> Identity:
    """Returns an identity that differs in one field."""
    field = world.random.choice(_FIELDS)
    if field == "rank":
        return replace(identity, tp_size=2, tp_rank=1 - identity.tp_rank)
    if field == "extra":
        return replace(identity, extra=(*identity.extra, "more"))
    return replace(identity, **{field: getattr(identity, field) + "'"})


class Process:
    """A cache with its tiers, configured by the seed.

    Args:
        world: the clock and random choices.
        disk: the shared disk; None: no storage.
        identity: identity of its pages.
        page_size: positions per page.
        agree: see `HostTier`.
        pages: number of pages on device and host; or both for each component.
        chance: random choices of the configuration, for processes that must have the same.
        empty: whether pages of the first component have no content, as in a model without attention.
        listener: follows its events.
        reaches: whether the store can be reached now.
        peers: read for what the store lacks.
        shelf: notes what it can give to peers.

    Attributes:
        asked, found: positions that its leases asked for, and their hits, as its user counts them.
        perhaps: positions that were to be loaded for leases that were dropped.
    """

    def __init__(
        self,
        world: World,
        disk: Disk | None,
        identity: Identity,
        page_size: int,
        *,
        agree: Agree | None = None,
        pages: tuple[int, int] | Sizes = (8, 16),
        chance: World | None = None,
        empty: bool = False,
        listener: Listener | None = None,
        reaches: Callable[[], bool] = lambda: True,
        peers: PeerBackend | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.world, self.disk, self.identity, self.peers = world, disk, identity, peers
        self.polled_s = world.now_s
        self.asked = self.found = self.perhaps = 0
        alike = replace(identity, tp_rank=0, tp_size=1) if identity.attention == "mla" else identity
        self.origin = repr(alike).encode()
        self._origins = {
            encode_namespace(of_weights(each, weights)): self.origin_of(each, weights)
            for each in NAMESPACES
            for weights in (*WEIGHTS, None)
        }
        sizes = pages if isinstance(pages, Mapping) else {Full(): pages}
        device = {row: here for row, (here, _) in sizes.items()}
        below = tuple(there for _, there in sizes.values())
        self.components = tuple(sizes)
        first = 0 if empty else None
        self.memory = SimMemory(world, [*device.values()], below, page_size, layers=2, empty=first)
        random = (chance or world).random
        policies: list[str | Policy] = [*BUILT_IN, OwnPolicy()]
        host = HostTier(
            self.memory,
            HostPolicy(random.choice(get_args(WritePolicy)), random.randint(1, 2), random.choice((1, 1, 4))),
            pages=below,
            agree=agree,
        )
        config = storage_config(chance or world)
        self.partial = random.random() < 0.5
        self.store: Store | None = None
        if disk is not None:
            self.backend = SimBackend(disk, Sealer(identity, OTHER_SECRET), reaches)
            self.workers = [SimWorkers(world, disk, random.randint(1, 4)) for _ in range(2)]
            sealer = Sealer(identity, SECRET)
            readers, writers = self.workers
            self.store = Store(
                self.backend,
                sealer,
                config,
                readers=readers,
                writers=writers,
                clock=world.clock,
                wall_clock=world.clock,
                peers=peers,
                shelf=shelf,
            )
        self.alone = peers is None
        copy_state = next((partial(self.memory.copy_state, row) for row, _ in self._rows(State)), None)
        self.cache = PrefixCache(
            device,
            page_size,
            policy=random.choice(policies),
            copy_page=self.memory.copy_page if self.partial else None,
            copy_state=copy_state,
            host=host,
            store=self.store,
        )
        assert self.cache.tiers is not None
        self.tiers: Tiers = self.cache.tiers
        self.listener = listener
        if listener is not None:
            listener.begin(self.cache, [self.cache.pool.total, below[0]])
        if random.random() < 0.5:  # there is an estimate already, of a fast machine or a slow one
            forward_s = random.choice((0.0001, 0.01, 1.0))
            for _ in range(4):
                self.tiers.prefill.observe([(64, 0)], forward_s)

    def _rows(self, *kinds: type[Component]) -> list[tuple[int, Component]]:
        return [(row, each) for row, each in enumerate(self.components) if isinstance(each, kinds)]

    @property
    def has_states(self) -> bool:
        """Whether sequences have a state."""
        return bool(self._rows(State))

    def pools(self, tier: int) -> Sequence[Pool]:
        """Returns the pools of a tier, by component."""
        return self.tiers.host_pools if tier == _HOST else tuple(self.cache.pools.values())

    def origin_of(self, namespace: Namespace | str | None, weights: str | None = None) -> np.uint64:
        """Returns the salt of a namespace; not derived from its encoding in the tree, which is under test."""
        return salt(self.origin, repr(namespace if weights is None else (namespace, weights)).encode())

    def longest_wait_s(self) -> float:
        """Returns how long a request that still waits may have waited for storage when the last poll began."""
        assert self.store is not None
        config, pages = self.store.config, self.cache.pool.total
        if config.prefetch == "wait_complete":
            return config.call_timeout_s * (1 + pages)
        cost_s = self.tiers.prefill.seconds(2 * pages * self.cache.page_size, 0)  # the lookup and the reads
        return config.prefetch_timeout_s + config.prefetch_timeout_per_page_s * pages if cost_s is None else cost_s

    def poll(self) -> None:
        """Settles what has ended. With "write_back" it may wait for copies, and so take long itself."""
        self.polled_s = self.world.now_s
        self.cache.poll(self.world.now_s)
        self.world.did("poll", self.tiers.counts.total())

    # ---------------------------------------------------------------- forwards

    def read(self, what: str, tables: Sequence[Ids], state: int, numbers: Numbers, layers: slice = slice(None)) -> None:
        """Reads what computing the position after these numbers needs: pages by the tables, the state in its slot."""
        end, size = len(numbers), self.cache.page_size
        for row, component in self._rows(*get_args(Attended)):
            first = kept_from(component, end) // size
            page_ids = tables[row][first : -(-end // size)]
            require(bool((page_ids >= 0).all()), "the table lacks a page that is read", what, component, page_ids)
            self.memory.expect(what, page_ids, numbers[first * size :], component=row, layers=layers)
        for row, _ in self._rows(State) if end else ():
            slot = np.array([state], np.int32)
            self.memory.expect(f"{what}: state", slot, state_of(numbers, size), component=row, layers=layers)

    def write(self, tables: Sequence[Ids], state: int, begin: int, numbers: Numbers) -> None:
        """Writes what was computed for positions [begin, len(numbers)), and the state after them."""
        size, pools = self.cache.page_size, self.pools(_DEVICE)
        for row, _ in self._rows(*get_args(Attended)):
            table = tables[row]
            for page in table[begin // size : -(-len(numbers) // size)].tolist():
                owner = pools[row].owner(page)
                require(owner == "private", "a page that is not private is written", page, owner)
            self.memory.write(table, begin, numbers[begin:], row)
        for row, _ in self._rows(State):
            owner = pools[row].owner(state)
            require(owner == "private", "a state that is not private is written", state, owner)
            self.memory.write(np.array([state], np.int32), 0, state_of(numbers, size), row)

    # ---------------------------------------------------------------- disturbances

    def evict(self) -> None:
        """Evicts some pages of one component from one tier."""
        random = self.world.random
        tier, row, n = random.randrange(2), random.randrange(len(self.components)), random.choice((1, 2, 4, 99))
        if tier == _DEVICE and self.tiers.host.policy.write_policy == "write_back":
            self.tiers.make_room(row, n)
        else:
            freed = self.cache.tree.evict(n, self.cache.tree.names[row], tier)
            for pool, ids in zip(self.pools(tier), freed, strict=True):
                pool.reclaim(ids)
        self.world.did("evict", tier, row, n)

    def poison(self) -> None:
        """Overwrites free pages, so that a read of one is detected."""
        for tier in (_DEVICE, _HOST):
            for row, pool in enumerate(self.pools(tier)):
                self.memory.poison(tier, row, [page for page in range(pool.total) if pool.owner(page) == "free"])

    # ---------------------------------------------------------------- checks

    def count(self) -> None:
        """Checks that every page of every component has one owner."""
        for tier in (_DEVICE, _HOST):
            for pool in self.pools(tier):
                counted = pool.free + pool.cached + pool.private
                require(counted == pool.total, "pages do not add up", tier, counted, pool.total)
        if self.listener is not None:
            self.listener.go_on()

    def audit(self) -> None:
        """Checks every structure and limit, and every page in the tree on either tier."""
        self.cache.check()
        if self.peers is not None:
            self.peers.check()
        if self.listener is not None:
            self.listener.check(self.cache, NAMESPACES)
        if self.store is not None and (writes := self.tiers.writes) is not None:
            pages, states, limit = writes.pages, writes.states, self.store.config.queue_pages
            one = len(writes) - states <= 1
            require(pages <= limit or one, "more pages wait to be written than allowed", pages, limit)
            limit += self.store.config.writes
            require(states <= limit, "more states wait to be written than allowed", states, limit)
        read_tree(self.cache.tree, self.memory, lambda name, tokens: fingerprints(self._origins[name], tokens))

    def add_counts(self) -> None:
        """Adds its counters to those of the world."""
        seen = self.world.seen
        seen.update(self.tiers.counts)
        seen.update(self.cache.stats().leases.as_dict())
        if self.store is not None:
            seen.update({f"counted: {cause}": n for cause, n in self.store.faults.items()})
            seen.update({f"short of {name}": n for name, n in self.tiers.stats().prefetch_short.items()})
            seen["computed meanwhile"] += self.tiers.stats().late["meanwhile"]
            seen["breaker openings"] += self.store.breaker.openings

    def kill(self) -> None:
        """Discards everything in memory; tears the writes that are running."""
        self.add_counts()
        if self.disk is None:
            return
        self.backend.dying = True
        for workers in self.workers:
            for call in workers.kill():
                if self.world.chance(0.3):
                    call.run()

    def _locked_and_absent(self, name: str) -> int:
        """Returns the pages of a component that are locked on the device, and counted as retained, but are not there.

        A prefix that ends where a chunk begins locks the chunk before it, needed or not.
        """
        nodes = [view for view in self.cache.tree.nodes() if view.cells[name, _DEVICE].locks]
        return sum(view.length // self.cache.page_size for view in nodes if not view.cells[name, _DEVICE].present)

    def drain(self) -> None:
        """Checks, after faults have stopped, that everything ends and that nothing stays held.

        Raises:
            WrongError: something does not end, or a page is lost.
        """
        for _ in range(2000):
            self.poll()
            if not self.tiers.busy:
                break
            self.world.pass_time(0.05)
        require(not self.tiers.busy, "something under way never ends", [type(p).__name__ for p in self.tiers.pending])
        self.audit()
        if self.store is not None and self.alone and self.tiers.host.agree is None and self.world.chance(0.3):
            self._fail_and_recover()
        stats = self.cache.stats()
        private = sum(pool.private for pool in stats.pools.values())
        require(stats.leases.open == 0 and private == 0, "a page or lease is held after the end", stats)
        locked = {
            name: pool.locked + (self._locked_and_absent(name) if isinstance(component, Chunked) else 0)
            for (name, pool), component in zip(stats.pools.items(), self.components, strict=True)
        }
        require(locked == stats.retention.device, "a page is locked after the end", stats)  # what anchors keep is
        self.cache.flush()
        for pool in (*self.pools(_DEVICE), *self.pools(_HOST)):
            require(pool.free == pool.total, "a page is lost", pool.free, pool.cached, pool.private, pool.total)
        require(self.cache.tree.stats().nodes == 0, "a node is left")
        self.add_counts()

    def _fail_and_recover(self) -> None:
        """Checks that calls to a dead store stop, stuck calls become overdue, and a recovered store is used."""
        assert self.store is not None and self.disk is not None
        world, config, breaker = self.world, self.store.config, self.store.breaker
        self._require_recovery()
        world.calm, world.rate, self.disk.outage = False, 0.0, "dead"
        for _ in range(config.breaker_failures):
            self._lookup(until_s=config.call_timeout_s)
        require(breaker.open, "the breaker does not open")
        self.disk.outage = None
        self._require_recovery()
        self.disk.outage = "hangs"
        call = self._lookup(until_s=config.call_timeout_s)
        require(call.done() or call.overdue(), "a stuck call is never overdue")
        world.calm, self.disk.outage = True, None
        self.world.wait_for(call.done)
        self._require_recovery()

    def _require_recovery(self) -> None:
        assert self.store is not None
        calls: list[StoreCall[Found]] = []
        for _ in range(400):
            if not self.store.breaker.open and not self.store.slow:
                return
            self.world.pass_time(0.1)
            calls.append(self._lookup(until_s=0.2))
            calls = [call for call in calls if not call.done()]  # callers poll until a call has ended
        require(False, "a recovered store is not used", self.store.breaker.open, self.store.slow)

    def _lookup(self, until_s: float) -> StoreCall[Found]:
        """Makes a lookup; returns it once it has ended or `until_s` has passed."""
        assert self.store is not None
        symbols = bytes(4 * self.cache.page_size)
        asked = [(Row(0, "full", exact=False), [0])]
        call = self.store.look_up(self.store.sealer.root(b""), symbols, len(symbols), asked)
        end_s = self.world.now_s + until_s
        while not call.done() and self.world.now_s <= end_s:
            self.world.pass_time(0.01)
        return call


def kept_from(component: Component, end: int) -> int:
    """Returns the first position whose page must still be there when position `end` is computed."""
    if isinstance(component, Window):
        return max(0, end - component.tokens)
    return end - end % component.tokens if isinstance(component, Chunked) else 0


def hybrid_sizes(world: World) -> Sizes:
    """Draws components with windows, chunks or states, with or without full attention, and their sizes."""
    random = world.random
    window, chunk = Window(random.choice((1, 2, 3, 5, 9))), Chunked(random.choice((1, 2, 3, 6, 10)))
    longer, other = Window(window.tokens + random.choice((1, 4))), Chunked(chunk.tokens + random.choice((1, 4)))
    state = State(random.choice((None, None, 1, 2)), random.random() < 0.5)
    kinds: tuple[tuple[Component, ...], ...] = (
        (Full(), window), (Full(), state), (Full(), window, state), (window,), (window, state),
        (Full(), chunk), (Full(), chunk, state), (Full(), window, chunk),
        (Full(), window, longer), (longer, window), (Full(), window, longer, state), (Full(), chunk, other),
    )  # fmt: skip
    return {row: (random.choice((6, 8, 12, 20)), random.choice((8, 16, 40, 80))) for row in random.choice(kinds)}


def draw_empty(world: World, sizes: Sizes) -> bool:
    """Draws whether full attention has no content; so in a third of the models with states only."""
    return [type(row) for row in sizes] == [Full, State] and world.chance(0.3)


def read_tree(tree: Tree, memory: SimMemory, numbers_of: Callable[[bytes, Ids], Numbers]) -> Counter[tuple[str, int]]:
    """Compares every page of a tree, on either tier, with the expected numbers; returns how many there are."""
    paths: dict[int, bytes] = {0: b""}
    held: Counter[tuple[str, int]] = Counter()
    for view in tree.nodes():
        key = paths[view.node] = paths[view.parent] + view.key
        numbers = numbers_of(view.namespace, np.frombuffer(key, np.int32))
        for row, name in enumerate(tree.names):
            of_state = isinstance(tree.components[row], State)
            wanted = state_of(numbers, tree.page_size) if of_state else numbers[view.start :]
            for tier in (_DEVICE, _HOST):
                cell = view.cells[name, tier]
                if cell.present:
                    memory.expect(f"audit of {name}", cell.ids, wanted, side=tier, component=row)
                    held[name, tier] += len(cell.ids)
    return held


def storage_config(world: World) -> StorageConfig:
    """Draws the limits of a store."""
    random = world.random
    return StorageConfig(
        prefetch=random.choice(get_args(PrefetchPolicy)),
        prefetch_min_tokens=random.choice((0, 1, 4)),
        prefetch_timeout_s=random.choice((0.02, 0.1)),
        prefetch_timeout_per_page_s=random.choice((0.0, 0.01)),
        max_prefetches=random.choice((1, 2, 8)),
        batch_pages=random.randint(1, 4),
        batches=random.randint(1, 3),
        prefetch_host_share=random.choice((0.3, 0.6, 1.0)),
        call_timeout_s=random.choice((0.1, 0.5)),
        queue_pages=random.choice((4, 40, 1000)),
        writes=random.randint(1, 2),
        breaker_failures=random.choice((1, 3, 8)),
        breaker_cooldown_s=random.choice((0.1, 1.0)),
    )
