"""What tests of the tiers drive by hand: a clock, workers that run a call on demand, stores that fail."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, TypeVar

import numpy as np
from rigs.ghost_memory import GhostMemory, GhostTicket

from mainstem.cache.identity import Identity
from mainstem.cache.namespaces import encode_namespace
from mainstem.cache.policies import Policy
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.settings.engine import HostPolicy, StorageConfig
from mainstem.storage.base import Backend
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.load import Load
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.storage.sealer import Sealer
from mainstem.tiers.storage.store import Store

T = TypeVar("T")

IDENTITY = Identity(
    model="ghost",
    weights="0123",
    dtype="uint64",
    quantization="none",
    layout="layer, number",
    shape="2 layers",
    attention="gqa",
    rope="none",
    tokenizer="letters",
    symbols="TokenKeys/4",
    page_size=2,
)
SECRET = b"a secret of the tests"


class Clock:
    """A clock that the test advances."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class HandCall(Future[T]):
    """A call that waits for `run`."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def run(self) -> None:
        try:
            self.set_result(self._function())
        except BaseException as error:  # noqa: BLE001  # as a thread would
            self.set_exception(error)


class HandWorkers:
    """Calls in order of submission. Each runs on `run`, or at once if `instant`."""

    def __init__(self, *, instant: bool = False) -> None:
        self.instant = instant
        self.waiting: list[HandCall[Any]] = []
        self.submitted = 0
        self.closed = False
        self.stuck = False  # whether calls have not ended at `close`

    def submit(self, function: Callable[[], T]) -> HandCall[T]:
        call = HandCall(function)
        self.submitted += 1
        if self.instant:
            call.run()
        else:
            self.waiting.append(call)
        return call

    def run(self, at: int = 0) -> None:
        self.waiting.pop(at).run()

    def run_all(self) -> int:
        ran = 0
        while self.waiting:
            self.run()
            ran += 1
        return ran

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        if not self.stuck:
            self.run_all()
        return not self.stuck


class FaultyBackend(MemoryBackend):
    """A store with injected faults, which records the calls that reach it.

    `instead` has faults by the name of the method, `always` one for all others: an exception is raised, a function is
    called in place of the method, with the same arguments.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.always: Any = None
        self.instead: dict[str, Any] = {}
        self.calls: list[str] = []

    def _turn(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        self.calls.append(name)
        fault = self.instead.get(name, self.always)
        if isinstance(fault, BaseException):
            raise fault
        return real(*arguments) if fault is None else fault(*arguments)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self._turn("exists", super().exists, keys)  # type: ignore[no-any-return]

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        return self._turn("get", super().get, keys, buffers)  # type: ignore[no-any-return]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return self._turn("put", super().put, keys, buffers)  # type: ignore[no-any-return]

    def delete(self, keys: Sequence[bytes]) -> None:
        self._turn("delete", super().delete, keys)

    def stored_keys(self) -> list[bytes]:
        return list(self._values)

    def value(self, key: bytes) -> bytes:
        return self._values[key]

    def set_value(self, key: bytes, value: bytes) -> None:
        self._values[key] = value


def make_store(
    backend: Backend,
    workers: HandWorkers | None = None,
    clock: Clock | None = None,
    *,
    writers: HandWorkers | None = None,
    identity: dict[str, Any] | None = None,
    **config: Any,
) -> Store:
    """Makes a store whose calls run on one set of workers, at once if none is given."""
    readers = workers or HandWorkers(instant=True)
    sealer = Sealer(replace(IDENTITY, **(identity or {})), SECRET)
    limits = StorageConfig(**{"prefetch_min_tokens": 1, **config})
    return Store(backend, sealer, limits, readers=readers, writers=writers or readers, clock=clock or Clock())


# ---------------------------------------------------------------- a cache with tiers, and the content of its pages


def fingerprint(space: str | None, tokens: Sequence[int]) -> int:
    """Returns the content of a page that ends after these tokens; it differs for any other prefix."""
    return zlib.crc32(repr((space, tuple(tokens))).encode()) + 1


def prompt(pages: int, *marks: int, size: int = 2) -> list[int]:
    """Returns `pages` whole pages and one more token. Page i has mark i, or the last mark, or zeros."""
    kinds = [marks[min(at, len(marks) - 1)] if marks else 0 for at in range(pages)]
    return [kind for kind in kinds for _ in range(size)] + [999]


MADE: deque[Driven] = deque(maxlen=16)
"""Rigs of the running test, to be closed when it ends; of random tests, which make thousands, the newest."""


class Driven:
    """A cache with tiers over ghost memory, of which the test drives every completion."""

    memory: GhostMemory
    readers: HandWorkers
    writers: HandWorkers
    cache: PrefixCache
    tiers: Tiers

    def __init__(self) -> None:
        MADE.append(self)

    @property
    def copies(self) -> list[GhostTicket]:
        """Copies under way, in the order in which they began."""
        self.memory.tickets = [ticket for ticket in self.memory.tickets if not ticket.done()]
        return self.memory.tickets

    def poll(self) -> None:
        self.tiers.poll()
        self.verify()

    def verify(self) -> None:
        self.cache.check()

    def settle(self, rounds: int = 50) -> None:
        """Completes everything under way."""
        for _ in range(rounds):
            for ticket in self.copies:
                ticket.wait()
            ran = self.readers.run_all() + self.writers.run_all()
            self.poll()
            if not (ran or self.tiers.busy or self.copies):
                return
        raise AssertionError(f"never at rest: {self.tiers.stats()}")

    def close(self) -> None:
        """Checks that once everything has ended nothing is held."""
        self.settle()
        held, stats, tree = self.tiers.stats(), self.cache.stats(), self.cache.tree
        assert held.host_private == held.under_way == held.queued == stats.leases.open == 0
        assert all(pool.private == pool.locked == 0 for pool in stats.pools.values())
        for row, tier in product(range(len(self.memory.device)), (0, 1)):
            assert tree.core.counts(row, tier)[1:] == (0, 0), "locked, or in flight"
        self.cache.flush()
        for pool in (*self.cache.pools.values(), *self.tiers.host_pools):
            assert pool.free == pool.total
        assert tree.stats().nodes == 0
        self.cache.check()


class Rig(Driven):
    """A cache with a host tier and perhaps a store. The test drives every completion.

    Every computed page gets its fingerprint, and `verify` checks every page in the tree.
    """

    def __init__(
        self,
        device: int = 16,
        host: int = 32,
        *,
        size: int = 2,
        backend: MemoryBackend | None = None,
        host_options: dict[str, Any] | None = None,
        policy: str | Policy = "lru",
        copies: bool = False,
        **config: Any,
    ) -> None:
        super().__init__()
        self.size = size
        self.clock = Clock()
        self.memory = GhostMemory([device], [host], instant=False)
        self.readers, self.writers = HandWorkers(), HandWorkers()
        self.store: Store | None = None
        if backend is not None:
            self.store = make_store(backend, self.readers, self.clock, writers=self.writers, **config)
        options: dict[str, Any] = {"load_min_tokens": 1, **(host_options or {})}
        agree = options.pop("agree", None)
        self.cache = PrefixCache(
            device,
            size,
            policy=policy,
            copy_page=self.copy_page if copies else None,
            host=HostTier(self.memory, HostPolicy(**options), agree=agree),
            store=self.store,
        )
        assert self.cache.tiers is not None
        self.tiers = self.cache.tiers

    # the engine

    def serve(self, tokens: Sequence[int], space: str | None = None, *, load: bool = False) -> int:
        """Runs a prompt from lease to finish; returns its hit, whose content is checked."""
        with self.cache.lease(list(tokens), space) as lease:
            if load and (loading := self.tiers.load(lease)) is not None:
                loading.wait()
            hit = lease.hit
            lease.reserve(lease.length - lease.reserved)
            self.compute(lease, tokens, space)
            lease.publish(lease.length)
        self.verify()
        return hit

    def compute(self, lease: Lease, tokens: Sequence[int], space: str | None = None) -> None:
        """Checks the hit and writes the rest."""
        table = lease.page_table
        for page in range(len(tokens) // self.size):
            expected = self.layers(space, tokens[: (page + 1) * self.size])
            if page < lease.hit // self.size:
                assert self.memory.device[0][:, table[page]].tolist() == expected, "a hit on wrong content"
            else:
                assert self.cache.pool.owner(int(table[page])) == "private"
                self.memory.device[0][:, table[page]] = expected

    def copy_page(self, source: int, target: int, positions: int) -> None:
        """Copies nothing: a page has a fingerprint only once it is computed to its end."""
        assert (self.cache.pool.owner(source), self.cache.pool.owner(target)) == ("cached", "private")

    def layers(self, space: str | None, tokens: Sequence[int]) -> list[int]:
        mark = fingerprint(space, tokens)
        return [mark * self.memory.layers + layer for layer in range(self.memory.layers)]

    # the machine

    def end_copy(self, at: int = 0, *, fail: bool = False) -> None:
        ticket = self.copies[at]
        if fail:
            ticket.fail(RuntimeError("a copy failed on purpose"))
        ticket.wait()

    # checks

    def verify(self) -> None:
        self.cache.check()
        stats = self.tiers.stats()
        assert stats.host_free + stats.host_cached + stats.host_private == stats.host_total == self.memory.pages
        keys: dict[int, bytes] = {0: b""}
        for view in self.cache.tree.nodes():
            key = keys[view.node] = keys[view.parent] + view.key
            tokens = np.frombuffer(key, np.int32).tolist()
            for tier, content in ((0, self.memory.device[0]), (1, self.memory.host[0])):
                cell = view.cells["full", tier]
                for page, held in enumerate(cell.ids.tolist() if cell.present else []):
                    end = view.start + (page + 1) * self.size
                    expected = self.layers(self.spaces[view.namespace], tokens[:end])
                    assert content[:, held].tolist() == expected, f"wrong content on tier {tier}"

    spaces: ClassVar[dict[bytes, str | None]] = {encode_namespace(space): space for space in (None, "a", "b")}

    def on(self, tier: int, tokens: Sequence[int], space: str | None = None) -> int:
        """Returns how many whole pages of a prompt are present on a tier, from the first; changes nothing."""
        name, held = encode_namespace(space), set[bytes]()
        keys: dict[int, bytes] = {0: b""}
        for view in self.cache.tree.nodes(space):
            assert view.namespace == name
            key = keys[view.node] = keys[view.parent] + view.key
            if view.cells["full", tier].present and not view.removed:
                width = self.size * 4
                held |= {key[:end] for end in range(view.start * 4 + width, len(key) + 1, width)}
        symbols = np.array(tokens, np.int32).tobytes()
        pages = len(tokens) // self.size
        return next((page for page in range(pages) if symbols[: (page + 1) * self.size * 4] not in held), pages)


# ---------------------------------------------------------------- what tests of several parts begin with


A, B, C = prompt(4, 1), prompt(4, 2), prompt(4, 3)


def begin_load(rig: Rig, tokens: Sequence[int]) -> tuple[Lease, Load]:
    lease = rig.cache.lease(list(tokens))
    load = rig.tiers.load(lease)
    assert load is not None
    return lease, load


def only_on_host(rig: Rig, *prompts: Sequence[int]) -> None:
    """Serves prompts, backs all of them up, and evicts them from the device."""
    for tokens in prompts:
        rig.serve(tokens)
        rig.settle()
    while len(freed := rig.cache.tree.flush()[0]):
        rig.cache.pool.reclaim(freed)
    assert [rig.on(0, tokens) for tokens in prompts] == [0] * len(prompts)
    rig.verify()


def stored(*prompts: Sequence[int]) -> FaultyBackend:
    """Returns a store that another process has filled."""
    backend = FaultyBackend()
    for tokens in prompts:
        rig = Rig(backend=backend)
        rig.serve(tokens)
        rig.settle()
    return backend


def stored_keys(tokens: Sequence[int]) -> list[bytes]:
    """Returns the keys of a prompt's pages in storage."""
    rig = Rig(backend=MemoryBackend())
    assert rig.store is not None
    sealer = rig.store.sealer
    return sealer.keys(sealer.names(sealer.root(b""), rig.cache.tree.keys.encode(tokens), 8), "full")
