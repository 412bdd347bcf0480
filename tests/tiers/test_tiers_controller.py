"""`Tiers` as a whole: construction, what a scheduler asks, drain, close and removal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from rigs.ghost_memory import GhostMemory
from rigs.hand_driven import A, B, C, FaultyBackend, HandWorkers, Rig, begin_load, make_store, prompt, stored

from mainstem.cache.components import Full, State
from mainstem.cache.pool import Pool
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument
from mainstem.settings.engine import HostPolicy
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.tier import HostTier
from mainstem.tiers.pending import ARRIVED, Pending


def test_a_tree_that_does_not_fit_is_rejected() -> None:
    host = HostTier(GhostMemory([4], [4]))
    with pytest.raises(BadArgument, match="tiers"):
        Tiers(Tree(2), [Pool(4)], host)
    with pytest.raises(BadArgument, match="pages"):
        Tiers(Tree(2, components=(Full(), State()), tiers=2), [Pool(4), Pool(4)], host)
    with pytest.raises(BadArgument, match="pages"):
        Tiers(Tree(2, tiers=2), [Pool(4), Pool(4)], host)
    with pytest.raises(BadArgument, match="pages"):
        Tiers(Tree(2, tiers=2), [Pool(4)], HostTier(host.memory, pages=(5,)))
    with pytest.raises(BadArgument, match="store"):
        PrefixCache(4, store=make_store(MemoryBackend()))


def test_the_memory_of_host_pages_is_registered_with_the_store() -> None:
    class Registering(MemoryBackend):
        regions: Sequence[memoryview] = ()

        def register(self, buffers: Sequence[memoryview]) -> None:
            self.regions = buffers

    backend = Registering()
    rig = Rig(backend=backend)
    assert [bytes(region) for region in backend.regions] == [bytes(region) for region in rig.memory.regions()]


# ---------------------------------------------------------------- what a scheduler asks


def test_copying_says_whether_a_transfer_holds_device_pages() -> None:
    rig = Rig(backend=FaultyBackend())
    assert not rig.tiers.copying
    rig.serve(A)
    rig.poll()
    assert rig.tiers.copying and rig.tiers.busy
    rig.end_copy()
    rig.poll()
    assert not rig.tiers.copying and rig.tiers.busy, "storage reads host pages"
    rig.settle()
    rig.cache.pool.reclaim(rig.cache.tree.flush()[0])
    lease, load = begin_load(rig, A)
    assert rig.tiers.copying
    load.wait()
    assert not rig.tiers.copying
    lease.abort()


def test_a_disabled_cache_does_not_use_its_tiers() -> None:
    memory = GhostMemory([8], [8], instant=False)
    cache = PrefixCache(8, 2, enabled=False, host=HostTier(memory, HostPolicy(load_min_tokens=1)))
    assert cache.tiers is not None
    for _ in range(2):
        with cache.lease(A) as lease:
            assert (lease.hit, cache.tiers.load(lease)) == (0, None)
            lease.reserve(9)
            lease.publish(8)
        cache.tiers.poll()
    assert memory.tickets == []
    cache.check()


# ---------------------------------------------------------------- drain and close


class Alone:
    """Tiers of an engine with an allocator of its own. While `drain` sleeps, copies and calls advance by a step."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.backend, self.workers, self.stuck = FaultyBackend(), HandWorkers(), stuck
        self.slept_s: list[float] = []
        self.tree, self.pool = Tree(2, tiers=2), Pool(32)
        self.memory = GhostMemory([32], [32], instant=False)
        store = make_store(self.backend, self.workers, batch_pages=1, writes=1)
        self.tiers = Tiers(self.tree, [self.pool], HostTier(self.memory), store, sleep=self.sleep)

    def publish(self, tokens: Sequence[int]) -> None:
        page_ids = self.pool.allocate(len(tokens) // 2)
        node = self.tree.insert(list(tokens), page_ids).node
        self.pool.publish(page_ids)
        assert self.tiers.back_up(node)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        if self.stuck:
            return
        for ticket in self.memory.tickets:
            ticket.step()
        if self.workers.waiting:
            self.workers.run()


def test_drain_waits_for_copies_and_for_the_writes_that_follow() -> None:
    alone = Alone()
    for tokens in (A, B, C):
        alone.publish(tokens)
    assert alone.tiers.drain(5.0)
    assert not alone.tiers.busy
    assert len(alone.backend.stored_keys()) == 12
    assert alone.tiers.drain(5.0)


def test_drain_gives_up_after_its_time() -> None:
    alone = Alone(stuck=True)
    alone.publish(A)
    assert not alone.tiers.drain(1.0)
    assert sum(alone.slept_s) == pytest.approx(1.0)
    alone.stuck = False
    assert alone.tiers.drain(1.0)
    assert Alone(stuck=True).tiers.drain(0.0), "nothing is under way"


class Ended(Pending):
    """Has ended, and asks another function for what is under way while it is settled."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.ask, self.answer = ask, 0

    def vote(self) -> int:
        return ARRIVED

    def settle(self, outcome: int) -> None:
        self.answer = self.ask()


def test_what_is_being_settled_counts_as_under_way_until_what_it_begins_has_begun() -> None:
    """Another thread may ask in the middle of a poll: between a backup's end and its write, all would seem done."""
    tiers = Alone().tiers
    ended = tiers.pending.add(Ended(lambda: tiers.stats().under_way))
    tiers.poll()
    assert (ended.answer, tiers.stats().under_way) == (1, 0)


class Lasting(FaultyBackend):
    """Keeps its values when it is closed."""

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("writes", [1, 2, 8])
def test_waiting_writes_are_made_at_close(writes: int) -> None:
    backend = Lasting()
    rig = Rig(device=64, host=64, backend=backend, writes=writes)
    for mark in range(8):
        rig.serve(prompt(4, mark))
        rig.poll()
        rig.end_copy()
        rig.poll()
    assert len(rig.writers.waiting) == writes
    rig.tiers.close()
    assert len(backend.stored_keys()) == 32
    assert backend.calls[-1] == "close"
    rig.poll()
    assert (rig.tiers.stats().queued, rig.tiers.stats().stored) == (0, 32)


def test_after_close_no_request_waits_for_storage() -> None:
    rig = Rig(backend=stored(A), prefetch="wait_complete")
    rig.tiers.close()
    prefetch = rig.tiers.prefetch(A)
    rig.poll()
    assert prefetch is not None and prefetch.ended and not rig.tiers.busy
    rig.serve(B)
    rig.poll()
    rig.end_copy()
    rig.poll()
    rig.poll()
    assert not rig.tiers.busy


# ---------------------------------------------------------------- removal


def test_a_removed_prefix_leaves_device_host_and_storage() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.serve(B)
    rig.settle()
    stored_before = len(backend.stored_keys())
    assert rig.cache.remove(A[:8]) == 1
    rig.verify()
    assert (rig.on(0, A), rig.on(1, A), rig.on(1, B)) == (3, 3, 4)
    rig.settle()
    assert len(backend.stored_keys()) == stored_before - 1
    rig.cache.remove([])
    rig.settle()
    assert (rig.on(0, B), rig.on(1, B), backend.stored_keys()) == (0, 0, [])


def test_a_prefix_removed_while_it_is_backed_up_is_neither_found_nor_stored() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.poll()
    rig.cache.remove([])
    assert rig.on(0, A) == 0
    rig.settle()
    assert (rig.on(1, A), backend.stored_keys()) == (0, [])
    assert rig.tiers.stats().queued == 0
    rig.verify()
