"""`Tiers`: back up, load, prefetch and write, with completions and failures driven by hand, in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from ghost_memory import GhostMemory
from hand_driven import FaultyBackend, HandWorkers, Rig, make_store, prompt

from mainstem.cache import Lease, PrefixCache
from mainstem.components import Full, State
from mainstem.errors import BadArgument, BadTokens, OutOfPages, StaleHandle, StorageError
from mainstem.keys import BigramKeys, Image, TypedKeys
from mainstem.pool import Pool
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host import HostTier
from mainstem.tiers.load import Load
from mainstem.tiers.prefetch import Prefetch
from mainstem.tiers.waits import LATE
from mainstem.tree import Tree

A, B, C = prompt(4, 1), prompt(4, 2), prompt(4, 3)


def begin(rig: Rig, tokens: Sequence[int], space: str | None = None) -> tuple[Lease, Load]:
    lease = rig.cache.lease(list(tokens), space)
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


def stored(*prompts: Sequence[int], identity: Any = None) -> FaultyBackend:
    """Returns a store that another process has filled."""
    backend = FaultyBackend()
    for tokens in prompts:
        rig = Rig(backend=backend)
        rig.serve(tokens)
        rig.settle()
    return backend


def counts(rig: Rig) -> dict[str, int]:
    """Returns the counts so far, without zeros."""
    return {name: n for name, n in rig.tiers.counts.items() if n}


# ---------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("name", "value"),
    [("write", "sometimes"), ("hits", 0), ("hits", 1.0), ("load_min_tokens", 0), ("load_min_tokens", None)],
)
def test_an_option_outside_its_range_is_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        HostTier(GhostMemory([1], [1]), **{name: value})
    assert caught.value.name == name


def test_a_tree_that_does_not_fit_is_rejected() -> None:
    host = HostTier(GhostMemory([4], [4]))
    with pytest.raises(BadArgument, match="tiers"):
        Tiers(Tree(2), [Pool(4)], host)
    with pytest.raises(BadArgument, match="pages"):
        Tiers(Tree(2, components=(Full(), State()), tiers=2), [Pool(4), Pool(4)], host)
    with pytest.raises(BadArgument, match="pages"):
        Tiers(Tree(2, tiers=2), [Pool(4), Pool(4)], host)
    tree = Tree(2, components=(Full(), State()), tiers=2)
    with pytest.raises(BadArgument, match="full attention only"):
        Tiers(tree, [Pool(4)] * 2, HostTier(host.memory, pages=(4, 4)), make_store(MemoryBackend()))
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


# ---------------------------------------------------------------- back up


def test_write_through_backs_up_published_pages() -> None:
    rig = Rig()
    rig.serve(A)
    assert rig.copies == [] and not rig.tiers.busy, "only at a poll"
    rig.poll()
    assert len(rig.copies) == 1 and rig.tiers.busy
    assert rig.on(1, A) == 0
    assert rig.tiers.stats().host_private == 4
    rig.end_copy()
    assert rig.on(1, A) == 0, "only at a poll"
    rig.poll()
    assert rig.on(1, A) == 4 and not rig.tiers.busy
    assert counts(rig) == {"backed_up": 4}
    rig.close_all()


def test_pages_on_the_host_are_not_copied_again() -> None:
    rig = Rig()
    rig.serve(A)
    rig.settle()
    for _ in range(3):
        rig.serve(A)
        rig.settle()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.settle()
    assert counts(rig) == {"backed_up": 6}


@pytest.mark.parametrize("hits", [1, 2, 3])
def test_selective_backs_up_prefixes_with_enough_hits(hits: int) -> None:
    rig = Rig(host_options={"write": "write_through_selective", "hits": hits})
    for served in range(5):
        rig.serve(A)
        rig.settle()
        assert rig.on(1, A) == (4 if served >= hits else 0)
    rig.close_all()


def test_selective_backs_up_the_shared_part() -> None:
    rig = Rig(host_options={"write": "write_through_selective", "hits": 2})
    one, two, three = (prompt(4, 7, 7, mark) for mark in (1, 2, 3))
    for tokens in (one, two, three):
        rig.serve(tokens)
        rig.settle()
    assert [rig.on(1, tokens) for tokens in (one, two, three)] == [2, 2, 2]


def test_write_back_backs_up_when_the_device_is_full() -> None:
    rig = Rig(device=10, host_options={"write": "write_back"})
    rig.serve(A)
    rig.serve(B)
    rig.poll()
    assert rig.copies == [] and (rig.on(1, A), rig.on(1, B)) == (0, 0)
    rig.serve(C)
    assert (rig.on(0, A), rig.on(1, A), rig.on(1, B), rig.on(1, C)) == (1, 4, 0, 0)
    assert rig.on(0, C) == 4
    assert rig.serve(A, load=True) == 8
    rig.close_all()


def test_write_back_frees_device_pages_when_the_host_has_no_room() -> None:
    rig = Rig(device=5, host=3, host_options={"write": "write_back"})
    for tokens in (A, B, C):
        rig.serve(tokens)
    assert rig.tiers.stats().backup_skipped > 0
    rig.close_all()


def test_write_back_frees_device_pages_when_the_copy_fails() -> None:
    rig = Rig(device=5, host_options={"write": "write_back"})
    down = rig.memory.down

    def failing(moves: Any) -> Any:
        ticket = down(moves)
        ticket.fail(RuntimeError("on purpose"))
        return ticket

    rig.memory.down = failing  # type: ignore[method-assign]
    for tokens in (A, B, C):
        assert rig.serve(tokens) == 0
    assert rig.tiers.stats().backup_failed > 0
    assert rig.on(1, A) == 0
    rig.close_all()


def test_write_back_moves_many_prompts_through_a_small_device() -> None:
    rig = Rig(device=6, host=64, host_options={"write": "write_back"})
    prompts = [prompt(4, mark // 3, mark) for mark in range(12)]
    for tokens in prompts:
        rig.serve(tokens)
    assert [rig.serve(tokens, load=True) for tokens in prompts] == [8] * 12
    rig.close_all()


def test_back_up_returns_whether_everything_is_under_way() -> None:
    rig = Rig(host=5)
    rig.serve(A)
    rig.serve(B)
    one, two = (rig.cache.tree.match(tokens).node for tokens in (A, B))
    assert rig.tiers.back_up(one) and rig.tiers.back_up(one)
    assert len(rig.copies) == 1
    assert not rig.tiers.back_up(two), "the host is full of pages in flight"
    assert counts(rig) == {"backup_skipped": 4}
    rig.end_copy()
    rig.poll()
    rig.settle()
    rig.verify()
    rig.close_all()
    with pytest.raises(StaleHandle):
        rig.tiers.back_up(one)


def test_pages_that_are_being_copied_are_not_evicted_from_the_device() -> None:
    rig = Rig(device=6)
    rig.serve(A)
    rig.poll()
    with rig.cache.lease(B) as lease:
        with pytest.raises(OutOfPages):
            lease.reserve(9)
        rig.settle()
        lease.reserve(9)
    rig.close_all()


def test_a_failed_copy_is_made_again_when_the_prefix_is_used() -> None:
    rig = Rig()
    rig.serve(A)
    rig.poll()
    rig.end_copy(fail=True)
    rig.poll()
    assert rig.on(1, A) == 0 and not rig.tiers.busy
    assert rig.tiers.stats().host_free == 32
    rig.poll()
    assert rig.copies == []
    rig.serve(A)
    rig.settle()
    assert rig.on(1, A) == 4
    assert counts(rig) == {"backup_failed": 4, "backed_up": 4}
    rig.close_all()


def test_a_node_may_be_split_while_it_is_copied() -> None:
    for fail in (False, True):
        rig = Rig(backend=MemoryBackend())
        rig.serve(prompt(4, 1, 1, 2, 2))
        rig.poll()
        rig.serve(prompt(4, 1, 1, 3, 3))
        rig.serve(prompt(4, 1, 4, 4, 4))
        rig.poll()
        assert len(rig.copies) >= 2
        rig.end_copy(fail=fail)
        rig.poll()
        rig.settle()
        expected = [0, 0, 0] if fail else [4, 4, 4]
        assert [rig.on(1, prompt(4, *marks)) for marks in ((1, 1, 2), (1, 1, 3), (1, 4))] == expected
        rig.settle()
        assert rig.tiers.stats().stored == (0 if fail else 9)
        assert rig.writers.submitted == (0 if fail else 3), "one call per copy"
        rig.close_all()


# A tree of four nodes, each copied by its own transfer:  A - B - C
#                                                          \ D
BRANCHES = {"a": prompt(1, 1), "b": prompt(2, 1, 2), "c": prompt(3, 1, 2, 3), "d": prompt(2, 1, 9)}
ABOVE = {"a": "a", "b": "ab", "c": "abc", "d": "ad"}


def four_copies(**options: Any) -> Rig:
    rig = Rig(**options)
    for tokens in BRANCHES.values():
        rig.serve(tokens)
        rig.poll()
    assert len(rig.copies) == 4
    return rig


def present(rig: Rig) -> dict[str, bool]:
    return {name: rig.on(1, tokens) == len(tokens) // 2 for name, tokens in BRANCHES.items()}


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")), ids="".join)
def test_copies_may_end_in_any_order_and_fail_with_their_parents(order: tuple[str, ...]) -> None:
    for failing in itertools.product([False, True], repeat=4):
        rig = four_copies()
        tickets = dict(zip("abcd", rig.copies, strict=True))
        good: dict[str, bool] = {}
        for name, fails in zip(order, failing, strict=True):
            if fails:
                tickets[name].fail(RuntimeError("on purpose"))
            tickets[name].wait()
            good[name] = not fails
            rig.poll()
            assert present(rig) == {at: all(good.get(above, False) for above in ABOVE[at]) for at in "abcd"}
        assert not rig.tiers.busy
        arrived = sum(present(rig).values())
        assert rig.tiers.stats().host_private == 0
        assert counts(rig) == {name: n for name, n in (("backed_up", arrived), ("backup_failed", 4 - arrived)) if n}


@pytest.mark.parametrize("failing", list(itertools.product([False, True], repeat=4)))
def test_copies_that_all_ended_are_settled_at_one_poll(failing: tuple[bool, ...]) -> None:
    rig = four_copies()
    for fails in failing:
        rig.end_copy(fail=fails)
    rig.poll()
    fails = dict(zip("abcd", failing, strict=True))  # type: ignore[assignment]
    assert present(rig) == {at: not any(fails[above] for above in ABOVE[at]) for at in "abcd"}  # type: ignore[index]
    assert not rig.tiers.busy
    rig.close_all()


@pytest.mark.parametrize("fail", [False, True])
def test_a_copy_below_a_failed_copy_that_is_not_undone_yet_fails_with_it(fail: bool) -> None:
    rig = Rig()
    rig.serve(prompt(1, 1))
    rig.poll()
    rig.serve(prompt(2, 1, 2))
    rig.poll()
    rig.end_copy(fail=True)  # of the parent, while that of the child is under way
    rig.poll()
    rig.serve(prompt(3, 1, 2, 3))
    rig.serve(prompt(2, 1, 8))
    rig.poll()
    while rig.copies:
        rig.end_copy(-1, fail=fail)
        rig.poll()
    assert [rig.on(1, tokens) for tokens in BRANCHES.values()] == [0, 0, 0, 0]
    assert rig.tiers.stats().host_free == 32
    rig.close_all()


# ---------------------------------------------------------------- eviction on the host


def test_the_host_evicts_the_least_recently_used_prefix() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B)
    with rig.cache.lease(A):
        pass  # used again
    only_on_host(rig, C)
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 0, 4]


def test_the_host_evicts_no_more_than_it_needs_and_keeps_prefixes_connected() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B, prompt(2, 3))
    assert [rig.on(1, tokens) for tokens in (A, B, prompt(2, 3))] == [2, 4, 2]


def test_the_host_never_evicts_pages_that_are_being_loaded() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B)
    lease, load = begin(rig, A)
    rig.serve(C)
    rig.poll()
    assert (rig.on(1, A), rig.on(1, B)) == (4, 0)
    for ticket in rig.copies:
        ticket.wait()
    rig.poll()
    assert load.arrived and lease.hit == 8
    rig.compute(lease, A)
    lease.abort()
    rig.close_all()


def test_the_host_never_evicts_pages_in_flight() -> None:
    rig = Rig(host=4)
    rig.serve(A)
    rig.poll()
    rig.serve(B)
    rig.poll()
    assert rig.tiers.stats().backup_skipped == 4
    rig.settle()
    assert (rig.on(1, A), rig.on(1, B)) == (4, 0)


def test_the_host_never_evicts_pages_that_are_being_written() -> None:
    rig = Rig(host=4, backend=MemoryBackend())
    rig.serve(A)
    rig.poll()
    rig.end_copy()
    rig.poll()
    rig.serve(B)
    rig.poll()
    assert (rig.on(1, A), rig.tiers.stats().backup_skipped) == (4, 4)
    assert rig.tiers.flush() == 0
    rig.settle()
    assert rig.tiers.flush() == 4


def test_nothing_is_evicted_for_a_copy_that_would_not_fit_even_then() -> None:
    rig = Rig(host=8)
    only_on_host(rig, A, B)
    lease, load = begin(rig, A)
    rig.serve(prompt(5, 3))
    rig.poll()
    assert rig.tiers.stats().backup_skipped == 5
    assert (rig.on(1, A), rig.on(1, B)) == (4, 4)
    assert load.wait()
    lease.abort()
    rig.close_all()


def test_a_waiting_write_gives_way_to_a_copy_and_a_running_one_does_not() -> None:
    rig = Rig(host=8, backend=FaultyBackend(), writes=1)
    for tokens in (A, B):
        rig.serve(tokens)
        rig.poll()
        rig.end_copy()
        rig.poll()
    assert (rig.tiers.stats().queued, len(rig.writers.waiting)) == (8, 1)
    rig.serve(C)
    rig.poll()
    assert rig.tiers.stats().write_dropped == 4
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 0, 4]
    assert rig.tiers.stats().stored == 8
    rig.close_all()


def test_a_waiting_write_does_not_give_way_to_a_copy_that_would_not_fit_even_then() -> None:
    rig = Rig(host=8, backend=FaultyBackend(), writes=1)
    for tokens in (A, B):
        rig.serve(tokens)
        rig.poll()
        rig.end_copy()
        rig.poll()
    rig.serve(prompt(5, 3))
    rig.poll()
    assert (rig.tiers.stats().backup_skipped, rig.tiers.stats().write_dropped) == (5, 0)
    rig.settle()
    assert rig.tiers.stats().stored == 8
    rig.close_all()


def test_the_host_may_evict_pages_that_the_device_has() -> None:
    rig = Rig(host=4)
    rig.serve(A)
    rig.settle()
    rig.serve(B)
    rig.settle()
    assert [(rig.on(0, tokens), rig.on(1, tokens)) for tokens in (A, B)] == [(4, 0), (4, 4)]
    assert rig.serve(A) == 8


def test_flush_does_not_change_storage() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    assert rig.tiers.flush() == 4
    assert rig.tiers.flush() == 0
    assert (rig.on(0, A), rig.on(1, A)) == (4, 0)
    assert len(backend.stored_keys()) == 4
    rig.cache.flush()
    assert rig.tiers.prefetch(A) is not None
    rig.settle()
    assert rig.on(1, A) == 4


# ---------------------------------------------------------------- load


def test_pages_evicted_from_the_device_are_loaded_from_the_host() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease = rig.cache.lease(A)
    assert (lease.hit, lease.loadable) == (0, 8)
    load = rig.tiers.load(lease)
    assert load is not None and load.pages == 4 and load.arrived is None
    assert rig.cache.stats().pool.private == 4
    rig.poll()
    assert load.arrived is None and lease.hit == 0
    rig.end_copy()
    rig.poll()
    assert load.arrived is True
    assert (lease.hit, lease.published, lease.loadable) == (8, 8, 0)
    rig.compute(lease, A)
    lease.finish()
    assert rig.on(0, A) == 4
    assert counts(rig) == {"backed_up": 4, "loaded": 4}
    assert rig.cache.stats().leases.host_hit == 8
    rig.close_all()


def test_only_pages_that_the_device_lacks_are_loaded() -> None:
    rig = Rig()
    only_on_host(rig, A)
    rig.serve(prompt(2, 1))
    lease, load = begin(rig, A)
    assert (lease.hit, load.pages) == (4, 2)
    assert load.wait()
    assert lease.hit == 8
    rig.compute(lease, A)
    lease.abort()
    rig.close_all()


def test_layers_arrive_in_order_and_can_be_read_before_all_have_arrived() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin(rig, A)
    expected = [rig.layers(None, A[: 2 * page + 2]) for page in range(4)]
    for layer in range(rig.memory.layers):
        load.ticket.wait_layer(layer)
        read = rig.memory.device[0][: layer + 1, lease.page_table].T.tolist()
        assert read == [page[: layer + 1] for page in expected]
        assert load.arrived is None
    assert load.wait()
    lease.abort()
    rig.close_all()


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("how", ["abort", "finish", "finish upto", "drop"])
def test_a_lease_may_end_while_it_is_loaded_and_its_pages_wait_for_the_copy(how: str, fail: bool) -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin(rig, A)
    lease.reserve(1)
    if how == "drop":
        del lease
    elif how == "abort":
        lease.abort()
    else:
        lease.finish(0 if how == "finish upto" else None)
    for _ in range(2):
        rig.poll()
        assert rig.cache.stats().pool.private >= 4, "the copy still writes to them"
        assert rig.tiers.flush() == 0, "and reads these"
    rig.end_copy(fail=fail)
    if how == "drop":
        del load
        with pytest.warns(ResourceWarning, match="lease"):
            rig.tiers.poll()
        rig.poll()
    else:
        rig.poll()
        assert load.arrived is not fail
    assert rig.cache.stats().pool.private == 0
    assert rig.cache.stats().leases.open == 0
    rig.close_all()


def test_after_a_failed_load_the_lease_computes() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin(rig, A)
    rig.end_copy(fail=True)
    assert load.wait() is False and load.arrived is False
    assert (lease.hit, lease.published, lease.loadable, lease.reserved) == (0, 0, 0, 8)
    lease.reserve(1)
    rig.compute(lease, A)
    lease.finish()
    assert rig.on(0, A) == 4
    assert counts(rig) == {"backed_up": 4, "load_failed": 4}
    assert rig.cache.stats().leases.host_hit == 0
    rig.close_all()


def test_pages_are_not_published_before_they_have_arrived() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin(rig, A)
    with pytest.raises(BadArgument):
        lease.publish(8)
    assert rig.cache.peek(A) == 8 and rig.on(0, A) == 0
    assert load.wait()
    lease.finish()
    rig.close_all()


def test_two_leases_may_load_the_same_pages() -> None:
    for order in ((0, 0), (1, 0)):
        rig = Rig()
        only_on_host(rig, A)
        leases = [begin(rig, A)[0] for _ in range(2)]
        for at in order:
            rig.end_copy(at)
            rig.poll()
        assert [lease.hit for lease in leases] == [8, 8]
        assert leases[0].page_table.tolist() == leases[1].page_table.tolist()
        for lease in leases:
            rig.compute(lease, A)
            lease.finish()
        assert rig.cache.stats().pool.cached == 4
        rig.close_all()


def test_a_lease_is_loaded_once_and_before_anything_is_reserved() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin(rig, A)
    with pytest.raises(BadArgument):
        rig.tiers.load(lease)
    assert load.wait()
    assert rig.tiers.load(lease) is None, "the host has nothing more"
    lease.abort()
    rig.cache.pool.reclaim(rig.cache.tree.flush()[0])
    with rig.cache.lease(A) as other:
        other.reserve(1)
        with pytest.raises(BadArgument):
            rig.tiers.load(other)
    assert rig.tiers.load(other) is None, "it is closed"
    rig.cache.pool.reclaim(rig.cache.tree.flush()[0])
    with rig.cache.lease(A) as other:
        other.reserve(9)
        rig.compute(other, A)
        other.publish(8)
        with pytest.raises(BadArgument):
            rig.tiers.load(other)
    rig.close_all()


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
    lease, load = begin(rig, A)
    assert rig.tiers.copying
    load.wait()
    assert not rig.tiers.copying
    lease.abort()
    rig.close_all()


@pytest.mark.parametrize(("minimum", "loads"), [(1, True), (8, True), (9, False)])
def test_too_few_tokens_are_computed_rather_than_loaded(minimum: int, loads: bool) -> None:
    rig = Rig(host_options={"load_min_tokens": minimum})
    only_on_host(rig, A)
    with rig.cache.lease(A) as lease:
        assert (rig.tiers.load(lease) is not None) == loads
        rig.settle()
        assert lease.hit == 8 * loads
        lease.reserve(lease.length - lease.reserved)
        rig.compute(lease, A)
    rig.close_all()


def test_without_room_on_the_device_nothing_is_loaded() -> None:
    rig = Rig(device=6)
    only_on_host(rig, A)
    with rig.cache.lease(B) as other:
        other.reserve(9)
        with rig.cache.lease(A) as lease:
            assert rig.tiers.load(lease) is None
            assert (lease.hit, lease.loadable, lease.reserved) == (0, 8, 0)
    assert rig.tiers.stats().load_skipped == 4
    assert rig.serve(A, load=True) == 8
    rig.close_all()


def test_pages_are_evicted_from_the_device_to_load_others() -> None:
    rig = Rig(device=5)
    only_on_host(rig, A, B)
    for tokens in (A, B, A):
        assert rig.serve(tokens, load=True) == 8
    rig.close_all()


def test_namespaces_share_nothing_on_the_host() -> None:
    rig = Rig()
    for space in (None, "a"):
        rig.serve(A, space)
        rig.settle()
    assert rig.tiers.stats().backed_up == 8
    rig.cache.pool.reclaim(rig.cache.tree.flush()[0])
    assert rig.serve(A, "b", load=True) == 0
    assert rig.serve(A, "a", load=True) == 8
    rig.close_all()


@pytest.mark.parametrize("device", range(6))
@pytest.mark.parametrize("host", range(6))
def test_a_hit_never_ends_inside_an_image_whichever_tier_has_its_pages(device: int, host: int) -> None:
    memory = GhostMemory([8], [8])
    tokens = [1, 2, Image(bytes(16), 8), 3]
    cache = PrefixCache(8, 2, keys=TypedKeys(), host=HostTier(memory, load_min_tokens=1))
    assert cache.tiers is not None
    with cache.lease(tokens) as lease:
        lease.reserve(11)
        lease.publish(11)
    cache.tiers.poll()
    cache.tiers.poll()
    cache.pool.reclaim(cache.tree.evict(5 - device)[0])
    cache.tiers.host_pools[0].reclaim(cache.tree.evict(5 - host, tier=1)[0])
    whole = {0: 0, 2: 2, 10: 3}  # positions where a token ends, and the tokens up to there
    peeked = cache.peek(tokens)
    with cache.lease(tokens) as lease:
        assert lease.hit in whole and lease.hit_tokens == whole[lease.hit]
        load = cache.tiers.load(lease)
        assert load is None or load.wait()
        assert lease.hit in whole and lease.hit_tokens == whole[lease.hit]
        assert lease.hit <= peeked <= 2 * max(device, host)
        if device in (0, 1, 5):
            assert lease.hit == peeked
    cache.check()


def test_bigrams_are_loaded_from_the_host() -> None:
    memory = GhostMemory([8], [8])
    cache = PrefixCache(8, 2, keys=BigramKeys(), host=HostTier(memory, load_min_tokens=1))
    assert cache.tiers is not None
    for hit in (0, 4):
        with cache.lease([1, 2, 3, 4, 5, 6]) as lease:
            assert (load := cache.tiers.load(lease)) is None or load.wait()
            assert (lease.hit, lease.length) == (hit, 5)
            lease.reserve(5 - lease.reserved)
            lease.publish(5)
        cache.tiers.poll()
        cache.tiers.poll()
        cache.pool.reclaim(cache.tree.flush()[0])
    cache.check()


def test_a_disabled_cache_does_not_use_its_tiers() -> None:
    memory = GhostMemory([8], [8], instant=False)
    cache = PrefixCache(8, 2, enabled=False, host=HostTier(memory, load_min_tokens=1))
    assert cache.tiers is not None
    for _ in range(2):
        with cache.lease(A) as lease:
            assert (lease.hit, cache.tiers.load(lease)) == (0, None)
            lease.reserve(9)
            lease.publish(8)
        cache.tiers.poll()
    assert memory.tickets == []
    cache.check()


# ---------------------------------------------------------------- prefetch


def test_stored_pages_are_prefetched_to_the_host_and_loaded_to_the_device() -> None:
    rig = Rig(backend=stored(A))
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None and prefetch.waiting and not prefetch.ended
    rig.settle()
    assert prefetch.ended and not prefetch.waiting and prefetch.loaded == 8
    assert rig.on(1, A) == 4
    assert rig.serve(A, load=True) == 8
    assert counts(rig) == {"prefetches": 1, "prefetched": 4, "loaded": 4}
    rig.close_all()


def test_the_last_token_is_left_to_compute() -> None:
    rig = Rig(backend=stored(A))
    prefetch = rig.tiers.prefetch(A[:8])
    assert prefetch is not None
    rig.settle()
    assert prefetch.loaded == 6


def test_namespaces_and_identities_share_nothing_in_storage() -> None:
    backend = stored(A)
    rig = Rig(backend=backend)
    assert rig.tiers.prefetch(A, "a") is not None
    rig.settle()
    assert rig.on(1, A, "a") == 0
    other = Rig(backend=backend, identity={"weights": "others"})
    assert other.tiers.prefetch(A) is not None
    other.settle()
    assert other.on(1, A) == 0


def test_without_a_store_or_with_too_little_missing_there_is_no_prefetch() -> None:
    assert Rig().tiers.prefetch(A) is None
    rig = Rig(backend=stored(A), prefetch_min_tokens=8)
    assert rig.tiers.prefetch(A[:8]) is None
    assert rig.tiers.prefetch([5]) is None
    assert rig.tiers.prefetch(A) is not None
    rig.settle()
    assert rig.tiers.prefetch(A) is None, "the host has it"
    with pytest.raises(BadTokens):
        rig.tiers.prefetch([-1] * 20)


@pytest.mark.parametrize(("minimum", "found"), [(6, 6), (8, 0)])
def test_a_prefix_of_which_storage_has_too_little_is_not_read(minimum: int, found: int) -> None:
    rig = Rig(backend=stored(prompt(3, 1)), prefetch_min_tokens=minimum)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.settle()
    assert prefetch.ended and prefetch.loaded == found


def test_best_effort_waits_for_nothing() -> None:
    rig = Rig(backend=stored(A), prefetch="best_effort")
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None and not prefetch.waiting
    rig.settle()
    assert prefetch.loaded == 8


def test_wait_complete_waits_for_everything_that_was_found() -> None:
    rig = Rig(backend=stored(A), prefetch="wait_complete", batch_pages=1, batches=2, call_timeout_s=5.0)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.clock.now_s += 4.9
    rig.readers.run()
    rig.poll()
    for _ in range(4):
        assert prefetch.waiting
        rig.clock.now_s += 4.9  # slow, but each within its deadline
        rig.readers.run()
        rig.poll()
    assert prefetch.ended and prefetch.loaded == 8
    assert rig.tiers.stats().faults == {}


def test_wait_complete_does_not_wait_for_a_stuck_call() -> None:
    rig = Rig(backend=stored(A), prefetch="wait_complete", call_timeout_s=5.0)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.readers.run()
    rig.poll()
    rig.clock.now_s += 5.0
    assert prefetch.waiting
    rig.poll()
    assert not prefetch.waiting and not prefetch.ended
    assert rig.tiers.stats().faults == {"timeout": 1}
    rig.settle()
    assert prefetch.ended and prefetch.loaded == 8, "late pages are kept"


def test_timeout_waits_longer_for_more_pages() -> None:
    rig = Rig(backend=stored(A), prefetch="timeout", timeout_s=1.0, timeout_per_page_s=0.5, batch_pages=1)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    rig.clock.now_s += 0.9
    rig.poll()
    assert prefetch.waiting
    rig.readers.run()
    rig.poll()
    rig.clock.now_s += 2.0
    rig.poll()
    assert prefetch.waiting, "1 s and 4 pages of 0.5 s"
    rig.clock.now_s += 0.2
    rig.poll()
    assert not prefetch.waiting and not prefetch.ended
    rig.settle()
    assert prefetch.loaded == 8, "late pages are kept"
    rig.close_all()


def test_after_an_unanswered_lookup_no_request_waits_until_storage_answers() -> None:
    rig = Rig(backend=stored(A, B, C), prefetch="timeout", timeout_s=1.0, timeout_per_page_s=0.0)
    first = rig.tiers.prefetch(A)
    rig.clock.now_s += 1.0
    rig.poll()
    assert first is not None and not first.waiting
    second = rig.tiers.prefetch(B)
    rig.poll()
    assert second is not None and not second.waiting, "no time has passed"
    rig.settle()
    assert (first.loaded, second.loaded) == (8, 8)
    third = rig.tiers.prefetch(C)
    rig.poll()
    assert third is not None and third.waiting
    rig.settle()
    rig.close_all()


def test_a_prompt_that_takes_too_long_to_read_does_not_mark_the_store_as_slow() -> None:
    """Storage has answered the lookup; only an unanswered one marks it as slow."""
    rig = Rig(backend=stored(A, B), timeout_s=0.1, timeout_per_page_s=0.01)
    one = rig.tiers.prefetch(A)
    rig.readers.run()
    rig.poll()
    rig.clock.now_s += 1.0
    rig.poll()
    two = rig.tiers.prefetch(B)
    rig.poll()
    assert one is not None and two is not None
    assert (one.waiting, two.waiting) == (False, True)
    rig.settle()
    rig.close_all()


def test_an_open_breaker_is_not_waited_for() -> None:
    backend = stored(A)
    rig = Rig(backend=backend, breaker_failures=1, prefetch="wait_complete", breaker_cooldown_s=5.0)
    backend.always = StorageError("unreachable", "on purpose")
    first = rig.tiers.prefetch(A)
    rig.settle()
    assert first is not None and first.ended and first.loaded == 0
    assert rig.tiers.stats().breaker_open and rig.tiers.stats().breaker_openings == 1
    second = rig.tiers.prefetch(A)
    rig.poll()
    assert second is not None and not second.waiting
    assert rig.readers.waiting == []
    backend.always = None
    rig.clock.now_s += 5.0
    third = rig.tiers.prefetch(A)
    rig.settle()
    assert third is not None and third.loaded == 8
    assert not rig.tiers.stats().breaker_open
    rig.close_all()


def test_a_breaker_that_opens_ends_the_wait() -> None:
    backend = stored(A)
    rig = Rig(backend=backend, breaker_failures=1, prefetch="wait_complete")
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None and prefetch.waiting
    rig.serve(B)
    rig.poll()
    rig.end_copy()
    rig.poll()
    backend.always = StorageError("full", "on purpose")
    rig.writers.run_all()
    rig.poll()
    assert rig.tiers.stats().breaker_open
    rig.poll()
    assert not prefetch.waiting and not prefetch.ended, "its lookup has not returned"
    rig.settle()
    rig.close_all()


def test_the_number_of_prefetches_is_limited() -> None:
    rig = Rig(backend=stored(A, B, C), max_prefetches=2)
    prefetches = [rig.tiers.prefetch(tokens) for tokens in (A, B, C)]
    assert [prefetch is not None for prefetch in prefetches] == [True, True, False]
    assert counts(rig) == {"prefetches": 2, "prefetch_skipped": 1}
    rig.settle()
    assert rig.tiers.prefetch(C) is not None
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 4, 4]


def test_prefetches_hold_only_a_part_of_the_host() -> None:
    rig = Rig(host=8, backend=stored(prompt(8, 1), B), host_fraction=0.5, batch_pages=1)
    prefetches = [rig.tiers.prefetch(tokens) for tokens in (prompt(8, 1), B)]
    peak = 0
    for _ in range(20):
        peak = max(peak, rig.tiers.stats().host_private)
        if rig.readers.waiting:
            rig.readers.run()
        rig.poll()
    assert peak == 4
    assert all(prefetch is not None and prefetch.ended for prefetch in prefetches)
    rig.close_all()


@pytest.mark.parametrize("batch_pages", [1, 2, 32])
def test_a_prompt_longer_than_a_prefetch_may_hold_at_once_is_read_in_parts(batch_pages: int) -> None:
    """Pages being read when the room ends are kept, and make room for more; they were dropped once."""
    rig = Rig(host=8, backend=stored(prompt(6, 1)), host_fraction=0.5, batch_pages=batch_pages)
    prefetch = rig.tiers.prefetch(prompt(6, 1))
    assert prefetch is not None
    for _ in range(10):
        if rig.readers.waiting:
            rig.readers.run()
        rig.poll()
    assert prefetch.ended and rig.on(1, prompt(6, 1)) == 6
    rig.close_all()


def test_the_number_of_calls_of_one_prefetch_is_limited() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=2, batches=3)
    prefetch = rig.tiers.prefetch(prompt(8, 1))
    rig.readers.run()
    rig.poll()
    assert len(rig.readers.waiting) == 3
    rig.readers.run(2)
    rig.poll()
    assert len(rig.readers.waiting) == 2, "in order"
    rig.readers.run()
    rig.poll()
    assert len(rig.readers.waiting) == 2
    rig.settle()
    assert prefetch is not None and prefetch.loaded == 16


def test_reads_may_return_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        rig = Rig(backend=stored(prompt(6, 1)), batch_pages=2, batches=3)
        prefetch = rig.tiers.prefetch(prompt(6, 1))
        rig.readers.run()
        rig.poll()
        calls = list(rig.readers.waiting)
        arrived: set[int] = set()
        for at in order:
            calls[at].run()
            rig.readers.waiting.remove(calls[at])
            arrived.add(at)
            rig.poll()
            whole = next((n for n in range(3) if n not in arrived), 3)
            assert rig.on(1, prompt(6, 1)) == 2 * whole
        assert prefetch is not None and prefetch.ended and prefetch.loaded == 12
        rig.close_all()


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("how", ["absent", "altered", "short"])
def test_no_page_from_the_first_damaged_one_on_is_added_to_the_tree(how: str, at: int, batch: int) -> None:
    backend = stored(A)
    assert rig_keys(A) == backend.stored_keys()
    rig = Rig(backend=backend, batch_pages=batch)
    prefetch = rig.tiers.prefetch(A)
    rig.readers.run()
    key = backend.stored_keys()[at]
    if how == "absent":  # lost after it was found
        backend.delete([key])
    else:
        backend.set_value(key, bytes(len(backend.value(key))) if how == "altered" else b"short")
    rig.settle()
    assert prefetch is not None and prefetch.ended
    assert prefetch.loaded == 2 * at and rig.on(1, A) == at
    cause = {"absent": "absent", "altered": "altered", "short": "length"}[how]
    assert rig.tiers.stats().faults == {cause: 1}
    assert rig.serve(A, load=True) == 2 * at
    rig.close_all()


def test_nothing_is_read_after_a_damaged_page() -> None:
    backend = stored(A)
    rig = Rig(backend=backend, batch_pages=1, batches=1)
    rig.tiers.prefetch(A)
    rig.readers.run()
    backend.delete([backend.stored_keys()[1]])
    calls = len(backend.calls)
    rig.settle()
    assert backend.calls[calls:] == ["get", "get"]
    rig.close_all()


def rig_keys(tokens: Sequence[int]) -> list[bytes]:
    rig = Rig(backend=MemoryBackend())
    assert rig.store is not None
    return rig.store.sealer.keys(rig.store.sealer.root(b""), rig.cache.tree.keys.encode(tokens), 8)


def test_a_revoked_prefetch_begins_no_more_reads_and_keeps_pages_being_read() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=1, batches=2)
    prefetch = rig.tiers.prefetch(prompt(8, 1))
    assert prefetch is not None
    rig.readers.run()
    rig.poll()
    prefetch.revoke()
    rig.settle()
    assert prefetch.ended and prefetch.loaded == 4
    assert rig.on(1, prompt(8, 1)) == 2
    rig.close_all()


def test_a_prefetch_revoked_before_storage_answers_reads_nothing() -> None:
    backend = stored(A)
    rig = Rig(backend=backend)
    prefetch = rig.tiers.prefetch(A)
    assert prefetch is not None
    prefetch.revoke()
    calls = len(backend.calls)
    rig.settle()
    assert prefetch.ended and prefetch.loaded == 0
    assert backend.calls[calls:] == ["exists"]
    rig.close_all()


def test_two_requests_share_one_prefetch_and_one_may_revoke_it() -> None:
    rig = Rig(backend=stored(A))
    one, two = rig.tiers.prefetch(A), rig.tiers.prefetch(A)
    assert one is not None and one is two and one.users == 2 and one.shared
    assert counts(rig) == {"prefetches": 1}
    one.revoke()
    rig.settle()
    assert one.loaded == 8
    rig.close_all()


def test_a_revoked_prefetch_continues_for_a_request_that_comes_in_time() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=1, batches=1)
    one = rig.tiers.prefetch(prompt(8, 1))
    assert one is not None
    rig.readers.run()
    one.revoke()
    two = rig.tiers.prefetch(prompt(8, 1))
    assert two is one
    rig.settle()
    assert rig.on(1, prompt(8, 1)) == 8
    rig.close_all()


def test_prefetches_of_two_prompts_with_a_common_prefix() -> None:
    one, two = prompt(4, 1, 1, 2), prompt(4, 1, 1, 3)
    rig = Rig(backend=stored(one, two), batch_pages=1)
    first = rig.tiers.prefetch(one)
    rig.readers.run()
    rig.poll()
    rig.readers.run()
    rig.poll()
    second = rig.tiers.prefetch(two)
    assert second is not None and second is not first
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (one, two)] == [4, 4]
    rig.close_all()


def test_pages_computed_while_they_are_read_are_kept_once() -> None:
    rig = Rig(backend=stored(A))
    prefetch = rig.tiers.prefetch(A)
    rig.readers.run()
    rig.poll()
    rig.serve(A)
    rig.poll()
    while rig.copies:
        rig.end_copy()
    rig.poll()
    assert rig.on(1, A) == 4
    rig.settle()
    assert prefetch is not None and prefetch.ended and prefetch.loaded == 0
    assert counts(rig)["prefetch_dropped"] == 4
    rig.close_all()


def extended() -> tuple[Rig, Prefetch, Sequence[int]]:
    """Returns a prompt whose first pages are only on the device, and whose rest is being read."""
    whole = prompt(6, 1, 1, 2)
    rig = Rig(backend=stored(whole))
    rig.serve(prompt(2, 1))
    prefetch = rig.tiers.prefetch(whole)
    assert prefetch is not None
    rig.readers.run()
    rig.poll()
    rig.readers.run()
    rig.poll()
    assert not prefetch.ended and len(rig.copies) == 1, "the first pages are in flight to the host"
    return rig, prefetch, whole


def test_pages_that_arrive_wait_for_the_pages_before_them_to_be_on_the_host() -> None:
    rig, prefetch, whole = extended()
    assert rig.on(1, whole) == 0
    rig.end_copy()
    rig.poll()
    assert prefetch.ended and prefetch.loaded == 8 and rig.on(1, whole) == 6
    assert rig.serve(whole, load=True) == 12
    rig.close_all()


def test_pages_that_arrive_after_pages_whose_copy_failed_are_dropped() -> None:
    rig, prefetch, whole = extended()
    rig.end_copy(fail=True)
    rig.poll()
    assert prefetch.ended and prefetch.loaded == 0
    assert counts(rig)["prefetch_dropped"] == 4
    assert rig.on(1, whole) == 0 and rig.tiers.stats().host_free == 32
    rig.close_all()


@pytest.mark.parametrize("write", ["write_through_selective", "write_back"])
def test_a_prefetch_backs_up_the_pages_before_it_whatever_the_policy(write: str) -> None:
    whole = prompt(6, 1, 1, 2)
    rig = Rig(backend=stored(whole), host_options={"write": write, "hits": 9})
    rig.serve(prompt(2, 1))
    rig.settle()
    assert rig.on(1, whole) == 0
    prefetch = rig.tiers.prefetch(whole)
    rig.settle()
    assert prefetch is not None and prefetch.loaded == 8
    assert rig.on(1, whole) == 6
    rig.close_all()


def test_pages_being_read_do_not_end_in_the_wrong_place_after_a_flush() -> None:
    rig, prefetch, whole = extended()
    rig.cache.flush()
    rig.end_copy()
    rig.poll()
    rig.cache.flush()
    rig.settle()
    assert prefetch.ended
    rig.close_all()
    assert rig.on(1, whole) == 0


def test_a_host_full_of_locked_pages_takes_no_prefetch() -> None:
    rig = Rig(host=4, backend=stored(B))
    only_on_host(rig, A)
    lease, load = begin(rig, A)
    prefetch = rig.tiers.prefetch(B)
    rig.readers.run_all()
    rig.poll()
    assert prefetch is not None and prefetch.ended and prefetch.loaded == 0
    load.wait()
    lease.abort()
    rig.close_all()


# ---------------------------------------------------------------- write


def test_pages_on_the_host_are_written_to_storage() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.poll()
    assert rig.tiers.stats().queued == 0
    rig.end_copy()
    rig.poll()
    assert rig.tiers.stats().queued == 4 and len(rig.writers.waiting) == 1
    rig.writers.run()
    rig.poll()
    assert (rig.tiers.stats().stored, rig.tiers.stats().queued) == (4, 0)
    assert backend.stored_keys() == rig_keys(A)
    rig.close_all()


def test_only_new_pages_are_written() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.poll()
    rig.end_copy()
    rig.poll()
    assert rig.tiers.stats().queued == 2
    rig.settle()
    assert rig.tiers.stats().stored == 6 and len(backend.stored_keys()) == 6
    assert backend.calls.count("put") == 2


@pytest.mark.parametrize("queue_pages", [8, 11])
def test_a_full_queue_drops_the_newest_and_counts_it(queue_pages: int) -> None:
    rig = Rig(device=32, backend=FaultyBackend(), queue_pages=queue_pages, writes=1)
    for tokens in (A, B, C):
        rig.serve(tokens)
        rig.poll()
        rig.end_copy()
        rig.poll()
    assert (rig.tiers.stats().queued, rig.tiers.stats().write_dropped) == (8, 4)
    assert len(rig.writers.waiting) == 1, "one at a time"
    rig.settle()
    assert (rig.tiers.stats().queued, rig.tiers.stats().stored) == (0, 8)
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 4, 4]
    rig.close_all()


def test_a_write_longer_than_the_queue_is_accepted_when_the_queue_is_empty() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend, queue_pages=3)
    rig.serve(A)
    rig.settle()
    assert len(backend.stored_keys()) == 4
    backend.clear()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.settle()
    assert len(backend.stored_keys()) == 6, "the gap heals"
    assert rig.tiers.stats().write_dropped == 0
    rig.close_all()


def test_a_gap_in_storage_heals_when_something_longer_is_written() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    backend.clear()
    rig.serve(prompt(6, 1, 1, 1, 1, 2))
    rig.settle()
    assert sorted(backend.stored_keys()) == sorted(rig_keys(prompt(6, 1, 1, 1, 1, 2)))
    rig.close_all()


def test_a_stuck_store_never_blocks_and_holds_no_more_than_its_queue() -> None:
    rig = Rig(device=64, host=64, backend=FaultyBackend(), queue_pages=8, writes=2, breaker_cooldown_s=1.0)
    for mark in range(10):
        rig.serve(prompt(4, mark))
        rig.poll()
        rig.end_copy()
        rig.poll()
        rig.clock.now_s += 10
    stats = rig.tiers.stats()
    assert stats.queued == 8 and stats.write_dropped == 32
    assert stats.faults["timeout"] == 2
    assert rig.tiers.flush() == 32, "all but the stuck writes"
    rig.settle()
    rig.close_all()


def test_a_stuck_store_does_not_occupy_the_host() -> None:
    """Waiting writes hold host pages; they are dropped, the oldest first, when a copy needs the room."""
    rig = Rig(device=64, host=16, backend=FaultyBackend(), queue_pages=64, writes=1)
    for mark in range(8):
        rig.serve(prompt(4, mark))
        rig.poll()
        rig.end_copy()
        rig.poll()
    stats = rig.tiers.stats()
    assert stats.backup_skipped == 0
    assert stats.backed_up == 32
    assert stats.write_dropped == 16, "of 32 pages 4 are being written and 12 wait"
    rig.settle()
    assert rig.tiers.stats().queued == 0
    rig.close_all()


@pytest.mark.parametrize("cause", StorageError.CAUSES)
def test_a_failing_store_loses_the_write_and_nothing_else(cause: str) -> None:
    backend = FaultyBackend()
    backend.always = StorageError(cause, "on purpose")
    rig = Rig(backend=backend)
    rig.serve(A)
    rig.settle()
    assert rig.tiers.stats().faults == {cause: 1} and rig.tiers.stats().stored == 0
    backend.always = None
    rig.serve(prompt(5, 1, 1, 1, 1, 2))
    rig.settle()
    assert len(backend.stored_keys()) == 5, "the gap heals"
    rig.close_all()


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
    rig.close_all()


def test_a_stuck_store_is_abandoned_at_close() -> None:
    backend = Lasting()
    rig = Rig(device=64, host=64, backend=backend)
    rig.serve(A)
    rig.poll()
    rig.end_copy()
    rig.poll()
    rig.writers.stuck = True
    rig.tiers.close(0.0)
    assert "close" not in backend.calls
    rig.poll()


# ---------------------------------------------------------------- late pages


def late(rig: Rig) -> dict[str, int]:
    """Returns the pages that were computed although storage has them, by cause, without zeros."""
    return {cause: pages for cause, pages in rig.tiers.stats().late.items() if pages}


def after(rig: Rig, seconds: float) -> None:
    rig.clock.now_s += seconds
    rig.poll()


def test_pages_that_arrive_in_time_are_not_late() -> None:
    rig = Rig(backend=stored(A))
    rig.tiers.prefetch(A)
    rig.settle()
    after(rig, 100.0)
    assert late(rig) == {} and not rig.tiers.busy
    assert set(rig.tiers.stats().late) == set(LATE)


def test_pages_that_have_not_arrived_when_the_wait_ends_are_late_once() -> None:
    rig = Rig(backend=stored(prompt(8, 1)), batch_pages=2, batches=1, timeout_s=1.0, timeout_per_page_s=0.0)
    prefetch = rig.tiers.prefetch(prompt(8, 1))
    for _ in range(2):  # the lookup, and two pages
        rig.readers.run()
        rig.poll()
    after(rig, 1.0)
    assert late(rig) == {"timeout": 6}
    rig.settle()
    assert prefetch is not None and prefetch.loaded == 16
    assert late(rig) == {"timeout": 6}


def test_if_the_store_does_not_answer_all_pages_of_the_lookup_are_late() -> None:
    rig = Rig(backend=stored(A, B), timeout_s=1.0)
    rig.tiers.prefetch(A)
    after(rig, 1.0)
    assert late(rig) == {"timeout": 4}
    rig.tiers.prefetch(B)
    rig.poll()
    assert late(rig) == {"timeout": 4, "slow": 4}
    rig.settle()
    rig.tiers.prefetch(C)
    rig.settle()
    assert late(rig) == {"timeout": 4, "slow": 4}, "storage has none of it"


def test_pages_kept_back_by_an_open_breaker_are_late_because_of_it() -> None:
    backend = stored(A)
    rig = Rig(backend=backend, breaker_failures=1)
    backend.always = StorageError("unreachable", "on purpose")
    rig.tiers.prefetch(A)
    rig.settle()
    assert late(rig) == {}, "storage reported that it has nothing"
    rig.tiers.prefetch(A)
    rig.poll()
    assert late(rig) == {"breaker": 4}


def test_pages_after_a_damaged_page_are_late_because_of_a_fault() -> None:
    backend = stored(A)
    rig = Rig(backend=backend)
    rig.tiers.prefetch(A)
    rig.readers.run()
    key = backend.stored_keys()[1]
    backend.set_value(key, bytes(len(backend.value(key))))
    rig.settle()
    assert late(rig) == {"fault": 3}


def test_pages_without_room_on_the_host_are_late_because_of_it() -> None:
    rig = Rig(host=4, backend=stored(prompt(8, 1)))
    rig.serve(B)
    rig.poll()  # in flight to every page of the host
    rig.tiers.prefetch(prompt(8, 1))
    rig.readers.run()
    rig.poll()
    assert late(rig) == {"host_room": 8}
    rig.settle()
    assert late(rig) == {"host_room": 8}


def test_pages_that_are_not_looked_up_are_late_because_of_the_limit() -> None:
    rig = Rig(backend=stored(A, B), max_prefetches=1)
    assert rig.tiers.prefetch(A) is not None and rig.tiers.prefetch(B) is None
    assert late(rig) == {"limit": 4}


@pytest.mark.parametrize("how", ["revoked", "warm"])
def test_pages_that_no_request_waits_for_are_not_late(how: str) -> None:
    backend = stored(A)
    if how == "warm":
        before = Rig(backend=backend)
        before.serve(A)
        before.settle()
        before.tiers.remember()
        before.settle()
    rig = Rig(backend=backend, timeout_s=1.0)
    if how == "warm":
        rig.tiers.warm()
        rig.readers.run()
        rig.poll()
        rig.poll()
    elif (prefetch := rig.tiers.prefetch(A)) is not None:
        prefetch.revoke()
    assert rig.tiers.stats().prefetches == 1
    after(rig, 1.0)
    assert late(rig) == {}
    assert rig.store is not None and rig.store.slow == (how == "revoked")
    rig.settle()


# ---------------------------------------------------------------- restart


def restarted(backend: MemoryBackend, **options: Any) -> Rig:
    rig = Rig(backend=backend, **options)
    rig.tiers.warm()
    assert rig.tiers.busy
    rig.settle()
    return rig


def test_the_hottest_prefixes_are_warmed_after_a_restart() -> None:
    backend = FaultyBackend()
    before = Rig(device=32, backend=backend)
    for tokens in (A, B, B, C, C, C):
        before.serve(tokens)
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, host=9, host_fraction=1.0, max_prefetches=2)
    assert rig.on(1, C) + rig.on(1, B) + rig.on(1, A) > 4
    rig = restarted(backend, max_prefetches=4)
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [4, 4, 4]
    assert [rig.serve(tokens, load=True) for tokens in (A, B, C)] == [8, 8, 8]
    rig.close_all()


@pytest.mark.parametrize("limit", [1, 2, 3, 16])
def test_every_listed_prefix_is_warmed_whatever_the_limit(limit: int) -> None:
    backend = FaultyBackend()
    before = Rig(device=64, host=64, backend=backend)
    prompts = [prompt(2, mark) for mark in range(10)]
    for tokens in prompts:
        before.serve(tokens)
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, max_prefetches=limit)
    assert [rig.on(1, tokens) for tokens in prompts] == [2] * 10


def test_a_prefix_of_any_length_is_warmed() -> None:
    backend, size = FaultyBackend(), 5000
    document = prompt(20, *range(20), size=size)  # 100,000 tokens
    before = Rig(21, 20, backend=backend, size=size)
    before.serve(document)
    before.settle()
    before.tiers.remember()
    before.settle()
    assert restarted(backend, host=20, size=size).on(1, document) == 20


@pytest.mark.parametrize("room", [1, 7, 20])
def test_as_many_prefixes_are_warmed_as_the_host_has_room_for_hottest_first(room: int) -> None:
    backend, size = FaultyBackend(), 5000
    prompts = [prompt(1, mark, size=size) for mark in range(20)]  # 100,000 tokens in all
    before = Rig(21, 20, backend=backend, size=size)
    for times, tokens in enumerate(prompts):
        before.serve(tokens)
        for _ in prompts[times:]:
            before.cache.tree.match(tokens)
    before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, host=room, size=size, host_fraction=1.0)
    assert [rig.on(1, tokens) for tokens in prompts] == [1] * room + [0] * (20 - room)


def test_a_conversation_is_warmed_whole_though_each_turn_adds_little() -> None:
    backend = FaultyBackend()
    before = Rig(device=32, backend=backend)
    whole = prompt(10, *range(10))
    for turns in range(1, 11):
        before.serve(prompt(turns, *range(turns)))
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend, prefetch_min_tokens=8, max_prefetches=8)
    assert rig.on(1, whole) == 10


def test_no_list_is_written_while_the_last_one_is_being_written() -> None:
    rig = Rig(backend=FaultyBackend())
    rig.serve(A)
    rig.settle()
    rig.tiers.remember()
    rig.tiers.remember()
    assert len(rig.writers.waiting) == 1
    rig.settle()
    rig.tiers.remember()
    assert len(rig.writers.waiting) == 1
    rig.close_all()


def test_pages_of_requests_are_not_evicted_to_warm_others() -> None:
    backend = FaultyBackend()
    before = Rig(device=32, backend=backend)
    for tokens in (A, B):
        before.serve(tokens)
        before.settle()
    before.tiers.remember()
    before.settle()
    rig = Rig(host=4, backend=backend)
    rig.tiers.warm()
    rig.serve(C)
    rig.settle()
    assert [rig.on(1, tokens) for tokens in (A, B, C)] == [0, 0, 4]
    rig.close_all()


def test_an_empty_host_does_not_replace_the_list_of_another() -> None:
    backend = FaultyBackend()
    before = Rig(backend=backend)
    before.serve(A)
    before.settle()
    before.tiers.remember()
    before.settle()
    empty = Rig(backend=backend)
    empty.tiers.remember()
    empty.settle()
    assert restarted(backend).on(1, A) == 4


def test_warmed_prefixes_keep_their_namespaces() -> None:
    backend = FaultyBackend()
    before = Rig(backend=backend)
    before.serve(A, "a")
    before.settle()
    before.tiers.remember()
    before.settle()
    rig = restarted(backend)
    assert (rig.on(1, A, "a"), rig.on(1, A)) == (4, 0)


@pytest.mark.parametrize("how", ["none", "damaged", "of another model", "failing"])
def test_a_damaged_or_missing_list_warms_nothing(how: str) -> None:
    backend = FaultyBackend()
    before = Rig(backend=backend)
    before.serve(A)
    before.settle()
    if how != "none":
        before.tiers.remember()
        before.settle()
    if how == "damaged":
        (note,) = set(backend.stored_keys()) - set(rig_keys(A))
        backend.set_value(note, bytes(len(backend.value(note))))
    if how == "failing":
        backend.instead["get"] = StorageError("io", "on purpose")
    rig = restarted(backend, identity={"weights": "others"} if how == "of another model" else None)
    assert rig.on(1, A) == 0 and not rig.tiers.busy
    rig.close_all()


def test_without_a_store_nothing_is_remembered() -> None:
    rig = Rig()
    rig.tiers.remember()
    rig.tiers.warm()
    assert not rig.tiers.busy
    rig.tiers.close()


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
    rig.close_all()


def test_close_leaves_the_store_closed() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.tiers.close()
    assert rig.readers.closed and rig.writers.closed
    with pytest.raises(StorageError, match="closed"):
        backend.stats()


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
    rig.close_all()


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
    rig.close_all()


def test_a_prefix_removed_while_its_write_waits_is_not_written() -> None:
    backend = FaultyBackend()
    rig = Rig(backend=backend, writes=1)
    rig.serve(B)
    rig.serve(A)
    for _ in range(4):
        rig.poll()
        while rig.copies and not rig.copies[0].done():
            rig.end_copy()
    assert rig.tiers.stats().queued == 8
    rig.cache.remove(A[:2])
    rig.settle()
    assert rig.tiers.stats().queued == 0
    assert len(backend.stored_keys()) == 4
    rig.verify()
    rig.close_all()
