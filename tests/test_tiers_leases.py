"""Leases of every set of components over the host tier: what is loaded, and what a failed load leaves.

A page or state of a component at the end of a prefix holds a number that is a function of the component and all tokens
of the prefix. The test advances copies by a layer, or ends them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from rigs.ghost_memory import GhostMemory, GhostTicket
from rigs.hand_driven import fingerprint

from mainstem.cache import Lease, PrefixCache
from mainstem.components import Chunked, Component, Full, State, Window
from mainstem.errors import BadArgument, OutOfPages
from mainstem.settings.engine import HostPolicy
from mainstem.tiers.host import HostTier
from mainstem.tiers.load import Load

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
}
STATES = [kind for kind in KINDS if "state" in kind]
WINDOWS = [kind for kind in KINDS if "window" in kind]
P = list(range(1, 9))
SIZE = 2


class Rig:
    """A cache over ghost memory, and an engine that computes a prompt page by page."""

    def __init__(
        self, kind: str, *, device: int = 24, host: int = 24, slots: int = 8, write: str = "write_through"
    ) -> None:
        self.rows = KINDS[kind]
        self.names = [row.name for row in self.rows]
        sizes = {row: slots if isinstance(row, State) else device for row in self.rows}
        self.memory = GhostMemory([*sizes.values()], [host] * len(sizes), instant=False)
        tier = HostTier(self.memory, HostPolicy(write, load_min_tokens=1), pages=(host,) * len(sizes))  # type: ignore[arg-type]
        self.cache = PrefixCache(sizes, SIZE, copy_state=self.copy_state, host=tier)
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

    def settle(self) -> None:
        for _ in range(50):
            for ticket in self.memory.tickets:
                ticket.wait()
            self.memory.tickets.clear()
            self.tiers.poll()
            self.cache.check()
            if not self.tiers.busy:
                return
        raise AssertionError("never at rest")

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

    def close(self) -> None:
        """Checks that once everything has ended nothing is held."""
        self.settle()
        stats = self.cache.stats()
        assert stats.leases.open == 0 and all(pool.private == pool.locked == 0 for pool in stats.pools.values())
        self.cache.flush()
        for pool in (*self.cache.pools.values(), *self.tiers.host_pools):
            assert pool.free == pool.total
        assert self.cache.tree.stats().nodes == 0


# ---------------------------------------------------------------- loads that arrive


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_host_has_is_loaded_and_is_a_hit_of_the_next_one(kind: str, write: str) -> None:
    rig = Rig(kind, write=write)
    rig.put_on_host(P)
    lease, load, ticket = rig.begin(P)
    assert load.pages == 4
    ticket.wait()
    assert load.wait() and lease.hit == 8
    rig.holds(lease, P)
    rig.finish(lease, [*P, 10, 11][:8])
    assert rig.serve([*P, 10, 11]) == 8
    rig.close()


@pytest.mark.parametrize("kind", KINDS)
def test_pages_on_the_device_are_not_loaded(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P, 4)
    lease, load, ticket = rig.begin(P, 4)
    assert load.pages == 2
    ticket.wait()
    assert load.wait() and lease.hit == 8
    rig.holds(lease, P)
    lease.abort()
    rig.close()


@pytest.mark.parametrize("kind", WINDOWS)
def test_only_pages_inside_the_window_are_loaded(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    lease, _, _ = rig.begin(P)
    window = rig.tables(lease)["window"]
    assert [page >= 0 for page in window] == [False, False, True, True]  # the last 3 positions
    lease.abort()
    rig.close()


@pytest.mark.parametrize("kind", STATES)
def test_the_published_state_is_the_loaded_one_though_the_forward_has_continued(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    lease, load, ticket = rig.begin(P)
    longer = [*P, 20, 21]
    lease.reserve(1)
    for layer in range(rig.memory.layers):
        ticket.wait_layer(layer)
    rig.forward(lease, [*P, 20], 8)
    assert load.wait()
    assert rig.state(lease) == rig.layers("state", [*P, 20])
    with rig.lease(longer) as other:
        assert other.hit == 8  # lease() has checked its state
    lease.abort()
    rig.close()


@pytest.mark.parametrize("kind", STATES)
def test_without_a_slot_for_the_tree_a_load_still_serves_its_lease(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    others = [rig.cache.lease([50 + at]) for at in range(7)]  # each has its own state
    lease, load, ticket = rig.begin(P)
    ticket.wait()
    assert load.wait() and lease.hit == 8
    rig.holds(lease, P)
    for other in (lease, *others):
        other.abort()
    assert rig.lease(P).hit == 0
    gc.collect()
    rig.close()


# ---------------------------------------------------------------- loads that fail


@pytest.mark.parametrize("forward", [True, False], ids=["computed with", "settled before"])
@pytest.mark.parametrize("kept", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_load_leaves_everything_as_it_was_at_the_hit(kind: str, kept: int, forward: bool) -> None:
    rig = Rig(kind)
    rig.put_on_host(P, *([kept] if kept else []))
    lease, load, ticket = rig.begin(P, kept)
    lease.reserve(1)
    ticket.step()  # one layer arrives
    ticket.fail(RuntimeError("on purpose"))
    if forward:
        rig.forward(lease, [*P, 20], 8, spoilt=True)
    rig.tiers.poll()
    assert load.arrived is False and not load.wait()
    assert (lease.hit, lease.published, lease.loadable) == (kept, kept, 0)
    rig.holds(lease, P[:kept])
    if "window" in rig.names:
        assert len(rig.tables(lease)["window"]) == kept // SIZE
        assert rig.cache.pools["window"].private == 0
    if "state" in rig.names:
        assert rig.cache.pools["state"].private == 1, "its own, and no checkpoint"
    rig.finish(lease, P)
    assert rig.serve(P) == 8
    rig.close()


@pytest.mark.parametrize("kept", [2, 4, 6])
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_failed_load_leaves_the_window_where_the_hit_ends(kind: str, kept: int) -> None:
    """The table does not name pages before the window of the hit again, and none is private."""
    rig = Rig(kind)
    rig.put_on_host(P, kept)
    lease = rig.lease(P)
    before = rig.tables(lease)
    assert [page >= 0 for page in before["window"]] == [page >= (kept - 3) // SIZE for page in range(kept // SIZE)]
    free = {name: pool.free for name, pool in rig.cache.pools.items()}
    load = rig.tiers.load(lease)
    assert load is not None
    rig.memory.tickets[-1].fail(RuntimeError("on purpose"))
    assert not load.wait()
    assert rig.tables(lease)["window"] == before["window"]
    assert rig.cache.pools["window"].free == free["window"]
    rig.finish(lease, P)
    assert rig.serve(P) == 8
    rig.close()


def test_the_end_of_one_load_is_not_the_end_of_another() -> None:
    """Two leases end while their loads write: each copy frees the pages of its own lease only."""
    rig = Rig("full")
    q = [token + 40 for token in P[:4]]
    rig.put_on_host(P)
    rig.put_on_host(q)
    (one, first, ticket), (other, second, later) = rig.begin(P), rig.begin(q)
    one.abort()
    other.abort()
    pool = rig.cache.pools["full"]
    assert pool.private == 6
    later.wait()
    assert second.wait()
    assert pool.private == 4, "the pages of the first are still being written"
    ticket.fail(RuntimeError("on purpose"))
    assert not first.wait()
    assert pool.private == 0
    rig.close()


@pytest.fixture
def little_garbage() -> Iterator[None]:
    """Limits garbage collection to new objects: with PyTorch imported a full one takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("how", ["abort", "finish", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_a_lease_that_ends_during_a_load_are_freed_after_the_copy(kind: str, how: str, arrives: bool) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    lease, load, ticket = rig.begin(P)
    if how == "drop":
        del lease
        gc.collect()
    else:
        lease.abort() if how == "abort" else lease.finish(lease.published)
    rig.tiers.poll()
    for name, pool in rig.cache.pools.items():
        assert pool.private == {"full": 4, "window": 2, "chunked": 2, "state": 2}[name], (
            "pages being written are not free"
        )
    if not arrives:
        ticket.fail(RuntimeError("on purpose"))
    ticket.wait()
    assert load.wait() == arrives
    del load
    gc.collect()
    rig.cache.check()
    assert all(pool.private == 0 for pool in rig.cache.pools.values())
    rig.close()


@pytest.mark.parametrize("kind", STATES)
def test_a_checkpoint_before_a_load_is_not_lost(kind: str) -> None:
    for arrives in (True, False):
        rig = Rig(kind)
        rig.put_on_host(P, 4)
        lease = rig.lease(P)
        assert lease.checkpoint(4)
        load = rig.tiers.load(lease)
        assert load is not None
        if not arrives:
            rig.memory.tickets[-1].fail(RuntimeError("on purpose"))
        rig.memory.tickets[-1].wait()
        assert load.wait() == arrives
        rig.holds(lease, P[: lease.hit])
        rig.finish(lease, P)
        rig.close()


# ---------------------------------------------------------------- loads that do not begin


@pytest.mark.parametrize("kind", STATES)
def test_a_lease_that_finds_no_slot_unlocks_both_tiers(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P, 4)
    others = [rig.cache.lease([50 + at]) for at in range(8)]  # each has its own state
    with pytest.raises(OutOfPages, match="state slots"):
        rig.cache.lease([*P, 99])
    locked = [rig.cache.tree.core.counts(row, tier)[1] for row in range(len(rig.rows)) for tier in (DEVICE, HOST)]
    assert locked == [0] * len(locked)
    assert rig.cache.stats().leases.open == 8
    for other in others:
        other.abort()
    rig.close()


LACKS: list[tuple[str, str]] = [(kind, name) for kind in KINDS if " " in kind for name in kind.split()]


@pytest.mark.parametrize(("kind", "lacks"), LACKS)
def test_a_prefix_that_is_only_partly_on_the_host_is_not_loaded(kind: str, lacks: str) -> None:
    """The host lacks a part of it, though both tiers together have it."""
    rig = Rig(kind)
    rig.serve(P)
    rig.settle()
    rig.evict(HOST, lacks)
    rig.evict(DEVICE, *(name for name in rig.names if name != lacks))
    lease = rig.cache.lease([*P, 99])
    assert (lease.hit, lease.loadable) == (0, 0)
    assert rig.tiers.load(lease) is None
    rig.finish(lease, P)
    assert rig.serve(P) == 8
    rig.close()


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_that_lies_on_both_tiers_in_part_is_not_loaded(kind: str) -> None:
    rig = Rig(kind, write="write_back")
    rig.serve(P)
    rig.tiers.make_room(rig.names.index("window"), 3)  # 3 of 4 pages; the last two are needed
    lease = rig.cache.lease([*P, 99])
    assert (lease.hit, lease.loadable) == (0, 0)
    rig.finish(lease, P)
    rig.close()


def test_without_room_for_one_component_nothing_is_allocated_for_another() -> None:
    rig = Rig("full window", device=8)
    rig.put_on_host(P)
    holder = rig.cache.lease([*range(60, 74)])
    holder.reserve(14)
    holder.slide(0, 14)  # 7 of 8 window pages
    lease = rig.lease(P)
    assert lease.loadable == 8 and rig.tiers.load(lease) is None
    assert rig.tiers.counts["load_skipped"] == 4
    assert (rig.cache.pools["full"].private, rig.cache.pools["window"].private) == (7, 7)
    holder.abort()
    load = rig.tiers.load(lease)
    assert load is not None
    rig.settle()
    rig.holds(lease, P)
    lease.abort()
    rig.close()


# ---------------------------------------------------------------- operations during a load


@pytest.mark.parametrize("kind", STATES)
def test_no_state_is_put_aside_while_one_is_on_its_way(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P, 4)
    lease, _, _ = rig.begin(P, 4)
    with pytest.raises(BadArgument, match="position"):
        lease.checkpoint(4)
    lease.abort()
    rig.close()


@pytest.mark.parametrize("kind", WINDOWS)
def test_pages_on_their_way_stay_though_the_window_goes_on(kind: str) -> None:
    """An engine may begin the next forward before it checks whether the load has arrived."""
    rig = Rig(kind)
    rig.put_on_host(P)
    lease, _, ticket = rig.begin(P)
    written = {page for page in rig.tables(lease)["window"] if page >= 0}
    lease.append(list(range(30, 37)))
    lease.reserve(8)
    lease.slide(8, 12)
    lease.slide(12, 16)
    assert written.isdisjoint(rig.tables(lease)["window"][6:])
    ticket.wait()
    lease.abort()
    rig.close()


# ---------------------------------------------------------------- back up


@pytest.mark.parametrize("kind", STATES)
def test_states_that_are_evicted_are_written_back(kind: str) -> None:
    rig = Rig(kind, write="write_back")
    rig.serve(P)
    rig.settle()
    states = rig.tiers.host_pools[-1]
    assert states.cached == 0
    rig.evict(DEVICE, "state")
    assert states.cached == 4  # one after each page
    assert rig.cache.pools["state"].free == rig.cache.pools["state"].total
    rig.evict(DEVICE)
    lease, load, ticket = rig.begin(P)
    ticket.wait()
    assert load.wait() and lease.hit == 8
    rig.holds(lease, P)
    lease.abort()
    rig.close()


def test_loaded_pages_that_the_tree_had_already_are_freed() -> None:
    rig = Rig("full state")
    rig.serve(P)
    rig.settle()
    rig.evict(DEVICE, "state")
    lease, load, ticket = rig.begin(P)
    loaded = rig.tables(lease)["full"]
    ticket.wait()
    assert load.wait()
    rig.holds(lease, P)
    assert rig.cache.stats().leases.duplicate_pages == len(loaded) == 4
    assert set(loaded).isdisjoint(rig.tables(lease)["full"])
    lease.abort()
    rig.close()


def test_the_checks_detect_a_wrong_state_and_a_wrong_page() -> None:
    rig = Rig("full window state")
    rig.serve(P)
    for name, wrong in (("full", 0), ("window", 3), ("state", 0)):
        lease = rig.lease(P)
        table: Any = rig.tables(lease).get(name, [lease.state])
        rig.memory.device[rig.names.index(name)][1, table[wrong]] += np.uint64(1)
        with pytest.raises(AssertionError):
            rig.holds(lease, P)
        rig.memory.device[rig.names.index(name)][1, table[wrong]] -= np.uint64(1)
        lease.abort()
    rig.settle()
