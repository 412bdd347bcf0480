"""Leases of every set of components over the host tier: what is loaded, and what a failed load leaves."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from rigs.components import DEVICE, HOST, KINDS, SIZE, STATES, WINDOWS, P, Rig

from mainstem.errors import BadArgument, OutOfPages

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


@pytest.mark.parametrize("kind", WINDOWS)
def test_only_pages_inside_the_window_are_loaded(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    lease, _, _ = rig.begin(P)
    window = rig.tables(lease)["window"]
    assert [page >= 0 for page in window] == [False, False, True, True]  # the last 3 positions
    lease.abort()


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


@pytest.mark.usefixtures("little_garbage")
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
    assert (rig.tiers.counts["load_failed"], rig.cache.stats().leases.host_hit) == ((8 - kept) // SIZE, 0)
    rig.holds(lease, P[:kept])
    if "window" in rig.names:
        assert len(rig.tables(lease)["window"]) == kept // SIZE
        assert rig.cache.pools["window"].private == 0
    if "state" in rig.names:
        assert rig.cache.pools["state"].private == 1, "its own, and no checkpoint"
    rig.finish(lease, P)
    assert rig.serve(P) == 8


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
    rig.tiers.flush()
    for name, held in rig.tiers.stats().host_pools.items():
        assert held.cached >= {"full": 4, "window-7": 4, "state": 1}.get(name, 2), "the copy reads these"
    for name, pool in rig.cache.pools.items():
        assert pool.private == {"full": 4, "window-7": 4}.get(name, 2), "pages being written are not free"
    if not arrives:
        ticket.fail(RuntimeError("on purpose"))
    ticket.wait()
    assert load.wait() == arrives
    del load
    gc.collect()
    rig.cache.check()
    assert all(pool.private == 0 for pool in rig.cache.pools.values())


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


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_that_lies_on_both_tiers_in_part_is_not_loaded(kind: str) -> None:
    rig = Rig(kind, write="write_back")
    rig.serve(P)
    rig.tiers.make_room(rig.names.index("window"), 3)  # 3 of 4 pages; the last two are needed
    lease = rig.cache.lease([*P, 99])
    assert (lease.hit, lease.loadable) == (0, 0)
    rig.finish(lease, P)


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


# ---------------------------------------------------------------- operations during a load


@pytest.mark.parametrize("kind", STATES)
def test_no_state_is_put_aside_while_one_is_on_its_way(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P, 4)
    lease, _, _ = rig.begin(P, 4)
    with pytest.raises(BadArgument, match="position"):
        lease.checkpoint(4)
    lease.abort()


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
