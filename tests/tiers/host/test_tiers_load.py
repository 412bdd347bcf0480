"""Loads, with completions and failures driven by hand, in any order."""

from __future__ import annotations

import pytest
from rigs.ghost_memory import GhostMemory
from rigs.hand_driven import A, B, Rig, begin_load, only_on_host

from mainstem.cache.keys import BigramKeys, Image, TypedKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument
from mainstem.settings.engine import HostPolicy
from mainstem.tiers.host.tier import HostTier


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
    assert rig.tiers.counts == {"backed_up": 4, "loaded": 4}
    assert rig.cache.stats().leases.host_hit == 8


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("reserves", ["before the end of the load", "after it", "before it and after it"])
def test_what_a_load_brings_counts_as_a_hit_once_whenever_pages_are_reserved(reserves: str, fails: bool) -> None:
    rig = Rig()
    only_on_host(rig, A)
    before = rig.cache.stats().leases
    lease, load = begin_load(rig, A)
    if "before" in reserves:
        lease.reserve(1)
        rig.cache.check()
    rig.end_copy(fail=fails)
    rig.poll()
    assert load.arrived is not fails and lease.hit == (0 if fails else 8)
    if "after" in reserves:
        lease.reserve(1)
        rig.cache.check()
    counts = rig.cache.stats().leases
    assert counts.queried - before.queried == len(A) and counts.hit - before.hit == lease.hit == counts.host_hit
    lease.finish(lease.hit)
    rig.cache.check()
    assert rig.cache.stats().leases.hit == counts.hit


def test_layers_arrive_in_order_and_can_be_read_before_all_have_arrived() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin_load(rig, A)
    expected = [rig.layers(None, A[: 2 * page + 2]) for page in range(4)]
    for layer in range(rig.memory.layers):
        load.ticket.wait_layer(layer)
        read = rig.memory.device[0][: layer + 1, lease.page_table].T.tolist()
        assert read == [page[: layer + 1] for page in expected]
        assert load.arrived is None
    assert load.wait()
    lease.abort()


def test_pages_are_not_published_before_they_have_arrived() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin_load(rig, A)
    with pytest.raises(BadArgument):
        lease.publish(8)
    assert rig.cache.peek(A) == 8 and rig.on(0, A) == 0
    assert load.wait()
    lease.finish()


def test_two_leases_may_load_the_same_pages() -> None:
    for order in ((0, 0), (1, 0)):
        rig = Rig()
        only_on_host(rig, A)
        leases = [begin_load(rig, A)[0] for _ in range(2)]
        for at in order:
            rig.end_copy(at)
            rig.poll()
        assert [lease.hit for lease in leases] == [8, 8]
        assert leases[0].page_table.tolist() == leases[1].page_table.tolist()
        for lease in leases:
            rig.compute(lease, A)
            lease.finish()
        assert rig.cache.stats().pool.cached == 4
        rig.close()


def test_a_lease_is_loaded_once_and_before_anything_is_reserved() -> None:
    rig = Rig()
    only_on_host(rig, A)
    lease, load = begin_load(rig, A)
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


@pytest.mark.parametrize(("minimum", "hit"), [(4, 2), (5, 3)])
def test_a_page_is_copied_in_part_only_if_too_few_tokens_are_loaded(minimum: int, hit: int) -> None:
    asked, other = [1, 1, 2, 2, 3, 3, 999], [1, 1, 2, 7, 999]
    rig = Rig(host_options={"load_min_tokens": minimum}, copies=True)
    only_on_host(rig, asked)
    rig.serve(other)
    assert rig.cache.peek(asked) == 6, "a page is loaded or copied in part, never both"
    with rig.cache.lease(asked) as lease:
        assert (lease.loadable, lease.hit) == (4, hit)


def test_pages_are_evicted_from_the_device_to_load_others() -> None:
    rig = Rig(device=5)
    only_on_host(rig, A, B)
    for tokens in (A, B, A):
        assert rig.serve(tokens, load=True) == 8


def test_namespaces_share_nothing_on_the_host() -> None:
    rig = Rig()
    for space in (None, "a"):
        rig.serve(A, space)
        rig.settle()
    assert rig.tiers.stats().backed_up == 8
    rig.cache.pool.reclaim(rig.cache.tree.flush()[0])
    assert rig.serve(A, "b", load=True) == 0
    assert rig.serve(A, "a", load=True) == 8


@pytest.mark.parametrize("device", range(6))
@pytest.mark.parametrize("host", range(6))
def test_a_hit_never_ends_inside_an_image_whichever_tier_has_its_pages(device: int, host: int) -> None:
    memory = GhostMemory([8], [8])
    tokens = [1, 2, Image(bytes(16), 8), 3]
    cache = PrefixCache(8, 2, keys=TypedKeys(), host=HostTier(memory, HostPolicy(load_min_tokens=1)))
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
    cache = PrefixCache(8, 2, keys=BigramKeys(), host=HostTier(memory, HostPolicy(load_min_tokens=1)))
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
