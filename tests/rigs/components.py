"""A cache with every set of components over ghost memory, with a host tier and perhaps a store, driven by hand.

A page or state of a component at the end of a prefix holds a number that is a function of the component and all tokens
of the prefix. The test advances copies by a layer, or ends them, and runs calls to the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rigs.ghost_memory import GhostMemory, GhostTicket
from rigs.hand_driven import Clock, Driven, HandWorkers, fingerprint, make_store

from mainstem.cache.components import Chunked, Component, Full, State, Window, by_name
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.settings.engine import HostPolicy
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.host.load import Load
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.storage.store import Store

DEVICE, HOST = 0, 1
KINDS: dict[str, tuple[Component, ...]] = {
    "full": (Full(),),
    "full window": (Full(), Window(3)),
    "full state": (Full(), State()),
    "full window state": (Full(), Window(3), State()),
    "window": (Window(3),),
    "window state": (Window(3), State()),
    "full chunked": (Full(), Chunked(5)),
    "full chunked state": (Full(), Chunked(5), State()),
    "full window-7 window-3": (Full(), Window(7), Window(3)),
}
STATES = [kind for kind in KINDS if "state" in kind]
WINDOWS = [kind for kind in KINDS if "window" in kind.split()]
P = list(range(1, 9))
SIZE = 2


class Rig(Driven):
    """A cache over ghost memory, and an engine that computes a prompt page by page."""

    def __init__(
        self,
        kind: str,
        *,
        device: int = 24,
        host: int = 24,
        slots: int = 8,
        write: str = "write_through",
        backend: MemoryBackend | None = None,
        empty: int | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        self.rows = KINDS[kind]
        self.names = list(by_name(self.rows))
        sizes = {row: slots if isinstance(row, State) else device for row in self.rows}
        self.memory = GhostMemory([*sizes.values()], [host] * len(sizes), instant=False, empty=empty)
        tier = HostTier(self.memory, HostPolicy(write, load_min_tokens=1), pages=(host,) * len(sizes))  # type: ignore[arg-type]
        self.readers, self.writers = HandWorkers(), HandWorkers()
        self.store: Store | None = None
        if backend is not None:
            self.store = make_store(backend, self.readers, Clock(), writers=self.writers, **config)
        self.cache = PrefixCache(sizes, SIZE, copy_state=self.copy_state, host=tier, store=self.store)
        assert self.cache.tiers is not None
        self.tiers = self.cache.tiers

    # content

    def layers(self, name: str, tokens: Sequence[int]) -> list[int]:
        mark = fingerprint(name, tokens)
        return [mark * self.memory.layers + layer for layer in range(self.memory.layers)]

    def copy_state(self, source: int, target: int) -> None:
        slots = self.memory.device[self.names.index("state")]
        assert self.cache.pools["state"].owner(target) == "private"
        slots[:, target] = slots[:, source]

    def tables(self, lease: Lease) -> dict[str, list[int]]:
        names = [name for name in self.names if name != "state"]
        return {name: table.tolist() for name, table in zip(names, lease.tables, strict=False)}

    def holds(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Checks everything that a forward after these tokens reads."""
        for name, table in self.tables(lease).items():
            row = self.names.index(name)
            if row == self.memory.empty:
                continue
            component = self.rows[row]
            first = max(len(tokens) - component.tokens, 0) // SIZE if isinstance(component, Window) else 0
            if isinstance(component, Chunked):
                first = len(tokens) // component.tokens * component.tokens // SIZE
            for page in range(first, len(tokens) // SIZE):
                content = self.memory.device[row][:, table[page]].tolist()
                assert content == self.layers(name, tokens[: (page + 1) * SIZE]), (name, page)
        if lease.state >= 0 and tokens:
            assert self.state(lease) == self.layers("state", tokens)

    def state(self, lease: Lease) -> list[int]:
        slots: list[int] = self.memory.device[self.names.index("state")][:, lease.state].tolist()
        return slots

    # the engine

    def forward(self, lease: Lease, tokens: Sequence[int], begin: int, *, spoilt: bool = False) -> None:
        """Computes from `begin` on, into private pages; `spoilt` if it read pages that did not arrive."""
        lease.slide(begin, len(tokens))
        for name, table in self.tables(lease).items():
            row = self.names.index(name)
            for page in range(begin // SIZE, len(tokens) // SIZE):
                assert self.cache.pools[name].owner(table[page]) == "private"
                self.memory.device[row][:, table[page]] = self.layers(name, tokens[: (page + 1) * SIZE])
        if lease.state >= 0:
            row = self.names.index("state")
            self.memory.device[row][:, lease.state] = 0 if spoilt else self.layers("state", tokens)

    def finish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Computes and publishes page by page, with a checkpoint after each, and finishes."""
        lease.reserve(lease.length - lease.reserved)
        for begin in range(lease.hit, len(tokens), SIZE):
            self.holds(lease, tokens[:begin])
            self.forward(lease, tokens[: begin + SIZE], begin)
            lease.checkpoint(begin + SIZE)
            lease.publish(begin + SIZE)
        lease.finish(len(tokens))
        self.cache.check()

    def serve(self, tokens: Sequence[int]) -> int:
        lease = self.lease(tokens)
        hit = lease.hit
        self.finish(lease, tokens)
        return hit

    def lease(self, tokens: Sequence[int]) -> Lease:
        lease = self.cache.lease([*tokens, 99])
        self.holds(lease, tokens[: lease.hit])
        return lease

    def begin(self, tokens: Sequence[int], hit: int = 0) -> tuple[Lease, Load, GhostTicket]:
        """Returns a lease whose load is under way."""
        lease = self.lease(tokens)
        assert (lease.hit, lease.loadable) == (hit, len(tokens) - hit)
        load = self.tiers.load(lease)
        assert load is not None and load.arrived is None
        return lease, load, self.memory.tickets[-1]

    # the machine

    def evict(self, tier: int, *names: str) -> None:
        """Evicts everything of the named components, or of all."""
        pools = tuple(self.cache.pools.values()) if tier == DEVICE else self.tiers.host_pools
        for name in names or self.names:
            if tier == DEVICE and self.tiers.host.policy.write_policy == "write_back":
                self.tiers.make_room(self.names.index(name), 99)
            else:
                for pool, ids in zip(pools, self.cache.tree.evict(99, name, tier), strict=True):
                    pool.reclaim(ids)
        self.cache.check()

    def put_on_host(self, tokens: Sequence[int], *kept: int) -> None:
        """Puts a prompt on the host, with a state after each page, and prefixes of it on the device."""
        self.serve(tokens)
        self.settle()
        self.evict(DEVICE)
        for length in kept:
            self.serve(tokens[:length])
            self.settle()
