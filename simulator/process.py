"""One process: a cache with its host tier and its way to the store. It may be killed at any step and started again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mainstem.cache import PrefixCache
from mainstem.components import Component, Full, State, Window
from mainstem.identity import Identity
from mainstem.namespaces import Namespace, encode_namespace
from mainstem.policies import BUILT_IN, NodeStats, Policy, Rank
from mainstem.pool import Pool
from mainstem.tiers.controller import Agree, HostTier, Tiers, WritePolicy
from mainstem.tiers.pages import Sealer
from mainstem.tiers.store import PrefetchPolicy, StorageConfig, Store, StoreCall
from mainstem.tree import Tree
from simulator.ghost import Numbers, SimMemory, fingerprints, salt, state_of
from simulator.storage import Disk, SimBackend, SimWorkers
from simulator.world import World, require

IDENTITY = Identity("m", "w", "f32", "none", "l", "s", "gqa", "r", "t", "TokenKeys/4", 1)
NAMESPACES: tuple[Namespace | str | None, ...] = (
    None, "a", Namespace(adapter="a"), Namespace(salt="a"), Namespace(adapter="a", salt="b"), Namespace(extra=("a",)),
)  # fmt: skip
_FIELDS = (
    "model", "weights", "dtype", "quantization", "layout", "shape", "rope", "tokenizer", "symbols", "rank", "extra",
)  # fmt: skip
SECRET, OTHER_SECRET = b"the secret of those who share", b"what somebody else thinks it is"


Ids = NDArray[np.int32]
Sizes = Mapping[Component, tuple[int, int]]
_DEVICE, _HOST = 0, 1


class OwnPolicy:
    """A rule in Python, which the core knows nothing of."""

    name = "own"

    def rank(self, node: NodeStats) -> Rank:
        return node.hits % 3, -node.depth_pages


def other_identity(world: World, identity: Identity) -> Identity:
    """The same but for one field."""
    field = world.random.choice(_FIELDS)
    if field == "rank":
        return replace(identity, tp_size=2, tp_rank=1 - identity.tp_rank)
    if field == "extra":
        return replace(identity, extra=(*identity.extra, "more"))
    return replace(identity, **{field: getattr(identity, field) + "'"})


class Process:
    """A cache with its tiers, as one seed configures it.

    Args:
        world: whose time and chance.
        disk: what is below the host; None: no storage.
        identity: of its pages.
        page_size: positions a page.
        agree: see `HostTier`.
        pages: of the device and of the host; or of each component.
        chance: for its configuration, where several must have the same.
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
    ) -> None:
        self.world, self.disk, self.identity = world, disk, identity
        alike = replace(identity, tp_rank=0, tp_size=1) if identity.attention == "mla" else identity
        self.origin = repr(alike).encode()
        self._origins = {encode_namespace(each): self.origin_of(each) for each in NAMESPACES}
        sizes = pages if isinstance(pages, Mapping) else {Full(): pages}
        device = {row: here for row, (here, _) in sizes.items()}
        below = tuple(there for _, there in sizes.values())
        self.components = tuple(sizes)
        self.memory = SimMemory(world, [*device.values()], below, page_size, layers=2)
        random = (chance or world).random
        policies: list[str | Policy] = [*BUILT_IN, OwnPolicy()]
        host = HostTier(
            self.memory,
            write=random.choice(get_args(WritePolicy)),
            hits=random.randint(1, 2),
            load_min_tokens=random.choice((1, 1, 4)),
            pages=below,
            agree=agree,
        )
        config = _storage_config(chance or world)
        self.partial = random.random() < 0.5
        self.store: Store | None = None
        if disk is not None:
            self.backend = SimBackend(disk, Sealer(identity, OTHER_SECRET))
            self.workers = [SimWorkers(world, disk, random.randint(1, 4)) for _ in range(2)]
            sealer = Sealer(identity, SECRET)
            readers, writers = self.workers
            self.store = Store(self.backend, sealer, config, readers=readers, writers=writers, clock=world.clock)
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
        if random.random() < 0.5:  # somebody has computed before, on a fast machine or a slow one
            forward_s = random.choice((0.0001, 0.01, 1.0))
            for _ in range(4):
                self.tiers.prefill.observe([(64, 0)], forward_s)

    def _rows(self, *kinds: type[Full | Window | State]) -> list[tuple[int, Component]]:
        return [(row, each) for row, each in enumerate(self.components) if isinstance(each, kinds)]

    @property
    def has_states(self) -> bool:
        """Whether a sequence has a state."""
        return bool(self._rows(State))

    def pools(self, tier: int) -> Sequence[Pool]:
        """By component."""
        return self.tiers.host_pools if tier == _HOST else tuple(self.cache.pools.values())

    def origin_of(self, namespace: Namespace | str | None) -> np.uint64:
        """What numbers of a namespace begin with; not by the bytes that name it in the tree: they are to be checked."""
        return salt(self.origin, repr(namespace).encode())

    def longest_wait_s(self) -> float:
        """That a request may have waited for storage when it was just polled."""
        assert self.store is not None
        config, pages = self.store.config, self.cache.pool.total
        if config.prefetch == "wait_complete":
            return config.call_timeout_s * (1 + pages)
        cost_s = self.tiers.prefill.seconds(2 * pages * self.cache.page_size, 0)  # of the question, and of the pages
        return config.timeout_s + config.timeout_per_page_s * pages if cost_s is None else cost_s

    def poll(self) -> None:
        """Settles what has ended."""
        self.tiers.poll()
        self.world.did("poll", self.tiers.counts.total())

    # ---------------------------------------------------------------- what a forward does

    def read(
        self, what: str, tables: Sequence[Ids | None], state: int, numbers: Numbers, layers: slice = slice(None)
    ) -> None:
        """All that is read to compute what comes behind these numbers: pages by the tables, the state in its slot."""
        end, size = len(numbers), self.cache.page_size
        for (row, component), table in zip(self._rows(Full, Window), tables, strict=False):
            first = max(0, end - component.tokens) // size if isinstance(component, Window) else 0
            assert table is not None
            pages = table[first : -(-end // size)]
            require(bool((pages >= 0).all()), "a page that is read lies behind the window", what, component, pages)
            self.memory.expect(what, pages, numbers[first * size :], component=row, layers=layers)
        for row, _ in self._rows(State) if end else ():
            slot = np.array([state], np.int32)
            self.memory.expect(f"{what}: state", slot, state_of(numbers, size), component=row, layers=layers)

    def write(self, tables: Sequence[Ids | None], state: int, begin: int, numbers: Numbers) -> None:
        """What was computed for positions [begin, len(numbers)), and the state behind them, to where they belong."""
        size, pools = self.cache.page_size, self.pools(_DEVICE)
        for (row, _), table in zip(self._rows(Full, Window), tables, strict=False):
            assert table is not None
            for page in table[begin // size : -(-len(numbers) // size)].tolist():
                owner = pools[row].owner(page)
                require(owner == "private", "a page that is not private is written", page, owner)
            self.memory.write(table, begin, numbers[begin:], row)
        for row, _ in self._rows(State):
            owner = pools[row].owner(state)
            require(owner == "private", "a state that is not private is written", state, owner)
            self.memory.write(np.array([state], np.int32), 0, state_of(numbers, size), row)

    # ---------------------------------------------------------------- what may be done to it

    def evict(self) -> None:
        """Takes some pages of one component from one tier."""
        random = self.world.random
        tier, row, n = random.randrange(2), random.randrange(len(self.components)), random.choice((1, 2, 4, 99))
        if tier == _DEVICE and self.tiers.host.write == "write_back":
            self.tiers.make_room(row, n)
        else:
            freed = self.cache.tree.evict(n, self.components[row].name, tier)
            for pool, ids in zip(self.pools(tier), freed, strict=True):
                pool.reclaim(ids)
        self.world.did("evict", tier, row, n)

    def poison(self) -> None:
        """Free pages hold nothing: who still reads one reads that."""
        for tier in (_DEVICE, _HOST):
            for row, pool in enumerate(self.pools(tier)):
                self.memory.poison(tier, row, [page for page in range(pool.total) if pool.owner(page) == "free"])

    # ---------------------------------------------------------------- checks

    def count(self) -> None:
        """Every page of every component has one owner."""
        for tier in (_DEVICE, _HOST):
            for pool in self.pools(tier):
                counted = pool.free + pool.cached + pool.private
                require(counted == pool.total, "pages do not add up", tier, counted, pool.total)

    def audit(self) -> None:
        """Checks every structure and limit, and every page that the tree has on either tier."""
        self.cache.check()
        if self.store is not None:
            queued, limit = self.tiers.stats().queued, self.store.config.queue_pages
            alone = len(self.tiers._writes) + self.tiers._writing <= 1
            require(queued <= limit or alone, "more pages wait to be written than may", queued, limit)
        read_tree(self.cache.tree, self.memory, lambda name, tokens: fingerprints(self._origins[name], tokens))

    def tell(self) -> None:
        """Adds its counts to what was seen."""
        seen, stats = self.world.seen, self.cache.stats()
        seen.update(self.tiers.counts)
        seen.update({"hit": stats.hit, "host_hit": stats.host_hit, "partial_hit": stats.partial_hit})
        seen.update({"checkpoints": stats.checkpoints, "checkpoints_missed": stats.checkpoints_missed})
        if self.store is not None:
            seen.update({f"counted: {cause}": n for cause, n in self.store.faults.items()})
            seen["breaker openings"] += self.store.breaker.openings

    def kill(self) -> None:
        """Everything in memory is gone; writes in the middle are torn."""
        self.tell()
        if self.disk is None:
            return
        self.backend.dying = True
        for workers in self.workers:
            for call in workers.kill():
                if self.world.chance(0.3):
                    call.run()

    def drain(self) -> None:
        """Once faults have stopped, everything ends; then nothing is left that anybody holds.

        Raises:
            WrongError: something hangs, or a page is lost.
        """
        for _ in range(2000):
            self.poll()
            if not self.tiers.busy:
                break
            self.world.pass_time(0.05)
        require(not self.tiers.busy, "something is under way for ever", [type(p).__name__ for p in self.tiers._pending])
        self.audit()
        if self.store is not None and self.tiers.host.agree is None and self.world.chance(0.3):
            self._fail_and_recover()
        stats = self.cache.stats()
        private = sum(pool.private for pool in stats.pools.values())
        require(stats.leases == 0 and private == 0, "something is held by nobody", stats)
        require(not any(pool.locked for pool in stats.pools.values()), "something is locked by nobody", stats)
        self.cache.flush()
        for pool in (*self.pools(_DEVICE), *self.pools(_HOST)):
            require(pool.free == pool.total, "a page is lost", pool.free, pool.cached, pool.private, pool.total)
        require(self.cache.tree.stats().nodes == 0, "a node is left")
        self.tell()

    def _fail_and_recover(self) -> None:
        """A store that is dead is left alone, one that hangs is not waited for, and one that is back is used again."""
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
        require(call.done() or call.overdue(), "a call that hangs is never overdue")
        world.calm, self.disk.outage = True, None
        self.world.wait_for(call.done)
        self._require_recovery()

    def _require_recovery(self) -> None:
        assert self.store is not None
        calls: list[StoreCall[list[bytes]]] = []
        for _ in range(400):
            if not self.store.breaker.open and not self.store.slow:
                return
            self.world.pass_time(0.1)
            calls.append(self._lookup(until_s=0.2))
            calls = [call for call in calls if not call.done()]  # whoever calls asks until it has ended
        require(False, "a store that is back is not used again", self.store.breaker.open, self.store.slow)

    def _lookup(self, until_s: float) -> StoreCall[list[bytes]]:
        """A call, when it has ended or its time is over."""
        assert self.store is not None
        symbols = bytes(4 * self.cache.page_size)
        call = self.store.look_up(self.store.sealer.root(b""), symbols, len(symbols))
        end_s = self.world.now_s + until_s
        while not call.done() and self.world.now_s <= end_s:
            self.world.pass_time(0.01)
        return call


def hybrid_sizes(world: World) -> Sizes:
    """Windows and states, with or without full attention."""
    random = world.random
    window = Window(random.choice((1, 2, 3, 5, 9)))
    state = State(random.choice((None, None, 1, 2)), random.random() < 0.5)
    kinds: tuple[tuple[Component, ...], ...] = (
        (Full(), window), (Full(), state), (Full(), window, state), (window,), (window, state),
    )  # fmt: skip
    return {row: (random.choice((6, 8, 12, 20)), random.choice((8, 16, 40, 80))) for row in random.choice(kinds)}


def read_tree(tree: Tree, memory: SimMemory, numbers_of: Callable[[bytes, Ids], Numbers]) -> Counter[tuple[str, int]]:
    """Compares all that a tree has on either tier with the numbers of namespace and tokens; how many pages it has."""
    paths: dict[int, bytes] = {0: b""}
    held: Counter[tuple[str, int]] = Counter()
    for view in tree.nodes():
        key = paths[view.node] = paths[view.parent] + view.key
        numbers = numbers_of(view.namespace, np.frombuffer(key, np.int32))
        for row, component in enumerate(tree.components):
            wanted = state_of(numbers, tree.page_size) if isinstance(component, State) else numbers[view.start :]
            for tier in (_DEVICE, _HOST):
                cell = view.cells[component.name, tier]
                if cell.present:
                    memory.expect(f"audit of {component.name}", cell.ids, wanted, side=tier, component=row)
                    held[component.name, tier] += len(cell.ids)
    return held


def _storage_config(world: World) -> StorageConfig:
    random = world.random
    return StorageConfig(
        prefetch=random.choice(get_args(PrefetchPolicy)),
        prefetch_min_tokens=random.choice((0, 1, 4)),
        timeout_s=random.choice((0.02, 0.1)),
        timeout_per_page_s=random.choice((0.0, 0.01)),
        max_prefetches=random.choice((1, 2, 8)),
        batch_pages=random.randint(1, 4),
        batches=random.randint(1, 3),
        host_fraction=random.choice((0.3, 0.6, 1.0)),
        call_timeout_s=random.choice((0.1, 0.5)),
        queue_pages=random.choice((4, 40, 1000)),
        writes=random.randint(1, 2),
        breaker_failures=random.choice((1, 3, 8)),
        breaker_cooldown_s=random.choice((0.1, 1.0)),
    )
