"""One process: a cache with its host tier and its way to the store. It may be killed at any step and started again."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np

from mainstem.cache import PrefixCache
from mainstem.identity import Identity
from mainstem.namespaces import Namespace, encode_namespace
from mainstem.policies import BUILT_IN, NodeStats, Policy, Rank
from mainstem.tiers.controller import Agree, HostTier, Tiers, WritePolicy
from mainstem.tiers.pages import Sealer
from mainstem.tiers.store import PrefetchPolicy, StorageConfig, Store, StoreCall
from simulator.ghost import SimMemory, fingerprints, salt
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
        pages: of the device and of the host.
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
        pages: tuple[int, int] = (8, 16),
        chance: World | None = None,
    ) -> None:
        self.world, self.disk, self.identity = world, disk, identity
        alike = replace(identity, tp_rank=0, tp_size=1) if identity.attention == "mla" else identity
        self.origin = repr(alike).encode()
        self._origins = {encode_namespace(each): self.origin_of(each) for each in NAMESPACES}
        self.memory = SimMemory(world, [pages[0]], [pages[1]], page_size, layers=2)
        random = (chance or world).random
        policies: list[str | Policy] = [*BUILT_IN, OwnPolicy()]
        host = HostTier(
            self.memory,
            write=random.choice(get_args(WritePolicy)),
            hits=random.randint(1, 2),
            load_min_tokens=random.choice((1, 1, 4)),
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
        copy_page = self.memory.copy_page if self.partial else None
        self.cache = PrefixCache(
            pages[0], page_size, policy=random.choice(policies), copy_page=copy_page, host=host, store=self.store
        )
        assert self.cache.tiers is not None
        self.tiers: Tiers = self.cache.tiers

    def origin_of(self, namespace: Namespace | str | None) -> np.uint64:
        """What numbers of a namespace begin with; not by the bytes that name it in the tree: they are to be checked."""
        return salt(self.origin, repr(namespace).encode())

    def longest_wait_s(self) -> float:
        """That a request may have waited for storage when it was just polled."""
        assert self.store is not None
        config, pages = self.store.config, self.cache.pool.total
        if config.prefetch == "wait_complete":
            return config.call_timeout_s * (1 + pages)
        return config.timeout_s + config.timeout_per_page_s * pages

    def poll(self) -> None:
        """Settles what has ended."""
        self.tiers.poll()
        self.world.did("poll", self.tiers.counts.total())

    def poison(self) -> None:
        """Free pages hold nothing: who still reads one reads that."""
        for side, pool in enumerate((self.cache.pool, self.tiers.host_pools[0])):
            free = [page for page in range(pool.total) if pool.owner(page) == "free"]
            self.memory.poison(side, 0, free)

    def audit(self) -> None:
        """Checks every structure and limit, and every page that the tree has on either tier."""
        self.cache.check()
        if self.store is not None:
            queued, limit = self.tiers.stats().queued, self.store.config.queue_pages
            alone = len(self.tiers._writes) + self.tiers._writing <= 1
            require(queued <= limit or alone, "more pages wait to be written than may", queued, limit)
        paths: dict[int, bytes] = {0: b""}
        size = self.cache.page_size
        for view in self.cache.tree.nodes():
            key = paths[view.node] = paths[view.parent] + view.key
            numbers = fingerprints(self._origins[view.namespace], np.frombuffer(key, np.int32))[view.start :]
            for tier in range(2):
                cell = view.cells["full", tier]
                if cell.present:
                    self.memory.expect("audit", cell.ids, numbers[: len(cell.ids) * size], side=tier)

    def tell(self) -> None:
        """Adds its counts to what was seen."""
        seen, stats = self.world.seen, self.cache.stats()
        seen.update(self.tiers.counts)
        seen.update({"hit": stats.hit, "host_hit": stats.host_hit, "partial_hit": stats.partial_hit})
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
        require(stats.leases == 0 and stats.private_pages == 0, "something is held by nobody", stats)
        require(stats.locked_pages == 0, "something is locked by nobody", stats)
        self.cache.flush()
        for pool in (self.cache.pool, *self.tiers.host_pools):
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
            self._look(until_s=config.call_timeout_s)
        require(breaker.open, "the breaker does not open")
        self.disk.outage = None
        self._require_recovery()
        self.disk.outage = "hangs"
        call = self._look(until_s=config.call_timeout_s)
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
            calls.append(self._look(until_s=0.2))
            calls = [call for call in calls if not call.done()]  # whoever calls asks until it has ended
        require(False, "a store that is back is not used again", self.store.breaker.open, self.store.slow)

    def _look(self, until_s: float) -> StoreCall[list[bytes]]:
        """A call, when it has ended or its time is over."""
        assert self.store is not None
        symbols = bytes(4 * self.cache.page_size)
        call = self.store.look(b"", symbols, 0, len(symbols))
        end_s = self.world.now_s + until_s
        while not call.done() and self.world.now_s <= end_s:
            self.world.pass_time(0.01)
        return call


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
