"""Quotas: what an owner is guaranteed gives way to nobody else, and what exceeds its maximum goes at once.

The simulator's profile "quotas" checks both over tiers, hybrids and faults; this file has each rule by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.cache import prefill
from rigs.components import SIZE, Rig
from rigs.policy_models import InPython

from mainstem import _core
from mainstem.cache.namespaces import Namespace, encode_namespace, owner_of, split_adapter
from mainstem.cache.policies import BUILT_IN
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.quotas import Quota, Quotas, Share
from mainstem.errors import BadArgument, OutOfPages

A, B, C = Namespace(tenant="a"), Namespace(tenant="b"), Namespace(salt="c")
ALL_POLICIES: list[Any] = [*BUILT_IN, InPython("lfu")]

TO_THE_OLD = ("mru", "filo")  # policies that prefer what has been there for long


def cached(cache: PrefixCache, tokens: Sequence[int], namespace: Any) -> int:
    """Returns how many positions of a prefix a match finds."""
    return cache.peek([*tokens, 10**6], namespace)


def fill(cache: PrefixCache, namespace: Any, first: int, prompts: int, pages: int = 2) -> list[list[int]]:
    """Serves prompts of whole pages that share nothing; returns them."""
    size, made = cache.page_size, []
    for at in range(prompts):
        made.append(list(range(first + at * pages * size, first + (at + 1) * pages * size)))
        prefill(cache, made[-1], namespace).finish(len(made[-1]))
    return made


def held(cache: PrefixCache, namespace: Any) -> int:
    """Returns the device pages of an owner."""
    return cache.tenants.usage().get(owner_of(encode_namespace(namespace)), [{"full": 0}])[0]["full"]


# ---------------------------------------------------------------- guarantees


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_what_is_guaranteed_gives_way_to_nobody_else(policy: Any) -> None:
    cache = PrefixCache(16, 2, policy=policy, quotas=Quotas({A: Quota(Share(guaranteed=0.5))}))
    ours = fill(cache, A, 0, 4)
    for at in range(6):
        fill(cache, B, 1000 + 1000 * at, 8)
        fill(cache, None, 10_000 + 1000 * at, 8)
    assert [cached(cache, prompt, A) for prompt in ours] == [4] * 4
    assert held(cache, A) == 8
    cache.check()


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_beyond_its_guarantee_an_owner_gives_way_down_to_it(policy: Any) -> None:
    cache = PrefixCache(16, 2, policy=policy, quotas=Quotas({A: Quota(Share(guaranteed=0.25))}))
    fill(cache, A, 0, 8)
    assert held(cache, A) == 16
    fill(cache, B, 1000, 30)
    assert held(cache, A) == 4 or (policy in TO_THE_OLD and held(cache, A) > 4)
    cache.check()


def test_its_own_requests_may_use_what_an_owner_is_guaranteed() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(0.25)), B: Quota(Share(0.25))}))
    fill(cache, A, 0, 2)
    fill(cache, B, 100, 2)
    lease = prefill(cache, range(1000, 1016), C)  # 8 pages in use: all that is not guaranteed
    newest = fill(cache, A, 2000, 1)
    assert cached(cache, newest[0], A) == 4 and held(cache, A) == held(cache, B) == 4
    lease.abort()
    cache.check()


def test_without_room_beside_guarantees_a_request_waits_and_nothing_changes() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(guaranteed=0.5))}))
    fill(cache, A, 0, 4)
    with cache.lease(range(100, 120), B) as lease:
        with pytest.raises(OutOfPages) as caught:
            lease.reserve(20)
        assert (caught.value.free, caught.value.evictable, cache.pool.free) == (8, 0, 8)
        lease.reserve(16)
    with cache.lease(range(200, 232), A) as lease:  # the owner itself has all of it
        lease.reserve(32)
        assert held(cache, A) == 0
    cache.check()


def test_what_is_removed_is_guaranteed_to_nobody() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(guaranteed=0.5))}))
    prompt = fill(cache, A, 0, 1, pages=6)[0]
    lease = cache.lease([*prompt, 1], A)
    assert cache.remove([], A) == 0 and held(cache, A) == 0  # a lease still uses it
    lease.abort()
    with cache.lease(range(100, 132), B) as other:
        other.reserve(32)
    cache.check()


def test_a_flush_takes_what_is_guaranteed_too() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(guaranteed=0.5))}))
    fill(cache, A, 0, 4)
    assert cache.flush() == 8 and cache.tenants.usage()[owner_of(A.encode())] == [{"full": 0}]


# ---------------------------------------------------------------- maxima


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_nobody_keeps_more_than_its_maximum(policy: Any) -> None:
    quotas = Quotas({A: Quota(Share(maximum=0.25))}, Quota(Share(maximum=0.5)))
    cache = PrefixCache(32, 2, policy=policy, quotas=quotas)
    for at in range(8):
        fill(cache, A, 1000 * at, 5)
        fill(cache, B, 1000 * at, 20)
        fill(cache, C, 1000 * at, 3)
        assert held(cache, A) <= 8 and held(cache, B) <= 16
        cache.check()
    kept = held(cache, A), held(cache, B), held(cache, C)
    assert sum(kept) == 32, "what one may not have, others may"
    assert kept[:2] == (8, 16) or policy in TO_THE_OLD or (policy == "tail" and min(kept) >= 7)  # it cuts all alike


def test_a_request_in_use_may_exceed_the_maximum_until_it_ends() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(maximum=0.25))}))
    lease = prefill(cache, range(20), A)
    lease.publish(20)
    assert held(cache, A) == 10
    lease.finish()
    assert held(cache, A) == 4 and cached(cache, range(20), A) == 8  # the beginning stays
    cache.check()


def test_an_owner_at_its_maximum_makes_room_itself() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(maximum=0.5))}))
    theirs = fill(cache, B, 0, 4)
    for at in range(10):
        fill(cache, A, 1000 + 100 * at, 4)
    assert [cached(cache, prompt, B) for prompt in theirs] == [4] * 4
    assert held(cache, A) == 8


def test_dropped_leases_are_settled() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(maximum=0.25))}))
    lease = prefill(cache, range(20), A)
    lease.publish(20)
    with pytest.warns(ResourceWarning):
        del lease
    fill(cache, B, 1000, 1)
    assert held(cache, A) == 4
    cache.check()


def test_what_was_behind_removed_pages_goes_with_the_removal_that_frees_them() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(maximum=0.125))}))
    lease = prefill(cache, range(8), A)
    lease.publish(8)
    cache.remove(range(8), A)  # its last page; the lease uses all four
    lease.abort()
    assert held(cache, A) == 3  # the removed page is after them still
    assert cache.remove([1000], B) == 1 and held(cache, A) == 2
    cache.check()


@pytest.mark.parametrize("policy", ["lru", "arc", "gittins"])
def test_an_owner_keeps_no_more_than_its_maximum_whatever_is_expected(policy: str) -> None:
    """The policy spares what is said to be used soon; that an owner has too much of it counts all the same."""
    draw, spared = random.Random(5), False
    cache = PrefixCache(24, 1, policy=policy, quotas=Quotas({A: Quota(Share(maximum=0.5))}))
    for turn in range(4000):  # right for long, and thus believed
        space = (A, B)[turn % 2]
        prompt = list(range(100 * (turn % 24), 100 * (turn % 24) + 3))
        if turn > 3000:
            prompt = [5000 + 10 * draw.randrange(40) + at for at in range(draw.randrange(1, 6))]
        cache.expected.poll(float(turn))
        prefill(cache, prompt, space).finish(len(prompt))
        cache.expected.expect(prompt, turn + draw.choice((1.0, 24.0, 1000.0)), space)
        assert held(cache, A) <= 12
        if turn > 3000:
            cache.check()
            spared = spared or cache.stats().tree.advice_won > 0
    assert spared
    cache.tenants.set_quotas(Quotas({A: Quota(Share(maximum=0.125)), B: Quota(Share(maximum=0.125))}))
    assert (held(cache, A), held(cache, B)) == (3, 3)
    cache.check()


# ---------------------------------------------------------------- owners


def test_quotas_can_change_while_the_cache_is_full() -> None:
    cache = PrefixCache(16, 2)
    ours, theirs = fill(cache, A, 0, 4), fill(cache, B, 100, 4)
    cache.tenants.set_quotas(Quotas({A: Quota(Share(guaranteed=0.5)), B: Quota(Share(maximum=0.25))}))
    assert (held(cache, A), held(cache, B)) == (8, 4)
    fill(cache, C, 1000, 20)
    assert [cached(cache, prompt, A) for prompt in ours] == [4] * 4
    assert sum(cached(cache, prompt, B) for prompt in theirs) == 0
    cache.tenants.set_quotas(Quotas())
    fill(cache, C, 2000, 20)
    assert held(cache, A) == 0
    cache.check()


def test_one_owner_has_all_its_namespaces() -> None:
    cache = PrefixCache(32, 2, quotas=Quotas({A: Quota(Share(maximum=0.25))}))
    spaces = [
        A,
        Namespace(tenant="a", salt="x"),
        Namespace(adapter="l", tenant="a"),
        Namespace(extra=("e",), tenant="a"),
    ]
    for at, space in enumerate(spaces):
        fill(cache, space, 1000 * at, 5)
        assert held(cache, A) == 8
    assert set(cache.tenants.usage()) == {owner_of(A.encode())}
    cache.check()


def test_owners_that_have_nothing_left_are_forgotten() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(guaranteed=0.1))}, Quota(Share(maximum=0.5))))
    for at in range(500):
        fill(cache, Namespace(salt=str(at)), 100 * at, 2)
        assert len(cache.tenants.usage()) <= 9
    cache.flush()
    assert list(cache.tenants.usage()) == [owner_of(A.encode())]
    cache.check()


def test_without_tenant_salt_or_name_there_is_no_quota_unless_it_is_named() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({}, Quota(Share(maximum=0.25))))
    fill(cache, None, 0, 8)
    assert held(cache, None) == 16
    cache.tenants.set_quotas(Quotas({None: Quota(Share(maximum=0.25))}))
    assert held(cache, None) == 4


def test_a_random_mix_keeps_every_bound() -> None:
    rng = random.Random(7)
    quotas = Quotas({A: Quota(Share(0.2, 0.4)), B: Quota(Share(0.1, 0.2)), C: Quota(Share(0.0, 0.9))})
    cache = PrefixCache(40, 2, quotas=quotas)
    floors, ceilings = {A: 8, B: 4, C: 0}, {A: 16, B: 8, C: 36}
    for _ in range(600):
        before = {space: held(cache, space) for space in floors}
        who = rng.choice([A, B, C, None])
        fill(cache, who, rng.randrange(40) * 8, 1, rng.randint(1, 4))
        for space, n in before.items():
            assert held(cache, space) <= ceilings[space]
            assert space == who or held(cache, space) >= min(n, floors[space])
    cache.check()


# ---------------------------------------------------------------- retention


def test_an_owner_retains_a_part_of_its_maximum() -> None:
    quotas = Quotas({A: Quota(Share(maximum=0.5)), B: Quota(Share(maximum=0.5), retained=1.0)})
    cache = PrefixCache(64, 2, quotas=quotas)
    ours, theirs = fill(cache, A, 0, 1, pages=16)[0], fill(cache, B, 1000, 1, pages=16)[0]
    cache.retention.poll(0.0)
    assert cache.retention.retain(ours, 10.0, A).positions == 16  # a quarter of 32 pages
    assert cache.retention.retain(theirs, 10.0, B).positions == 32  # all 16 pages
    assert cache.retention.pin(fill(cache, C, 2000, 1, pages=20)[0], C).positions == 16  # up to the reserve: half of 64
    cache.check()


def test_an_owner_that_may_retain_nothing_retains_nothing() -> None:
    cache = PrefixCache(64, 2, quotas=Quotas({A: Quota(retained=0.0)}))
    cache.retention.poll(0.0)
    for who, kept in ((A, 0), (B, 16)):
        tokens = fill(cache, who, 0, 1, pages=8)[0]
        assert cache.retention.retain(tokens, 10.0, who).positions == cache.retention.kept(who.encode()) == kept
    cache.check()


def test_retention_leaves_to_others_what_they_are_guaranteed() -> None:
    cache = PrefixCache(40, 2, retain_share=1.0, quotas=Quotas({A: Quota(Share(guaranteed=0.4))}))
    mine = fill(cache, B, 0, 1, pages=12)[0]
    cache.retention.poll(0.0)
    assert cache.retention.retain(mine, 10.0, B).positions == 8  # 40 - 20 in reserve - 16 guaranteed: 4 pages
    ours = fill(cache, A, 1000, 1, pages=16)[0]
    assert cache.retention.retain(ours, 10.0, A).positions == 32
    with cache.lease(range(5000, 5040), C) as lease:
        lease.reserve(40)  # the reserve
    cache.check()


def test_what_is_retained_is_evicted_beyond_the_maximum_when_its_time_is_up() -> None:
    cache = PrefixCache(32, 2, retain_share=1.0, quotas=Quotas({A: Quota(Share(maximum=0.25))}))
    cache.retention.poll(0.0)
    kept = fill(cache, A, 0, 1, pages=8)[0]
    assert cache.retention.retain(kept, 10.0, A).positions == 16
    running = prefill(cache, range(1000, 1008), A)
    running.publish(8)
    assert held(cache, A) == 12
    cache.retention.poll(11.0)
    assert held(cache, A) == 8
    running.abort()
    cache.check()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Share(guaranteed=-0.1), "guaranteed"),
        (lambda: Share(guaranteed=1.1), "guaranteed"),
        (lambda: Share(guaranteed=0.5, maximum=0.4), "maximum"),
        (lambda: Share(maximum=1.5), "maximum"),
        (lambda: Quota(retained=2.0), "retained"),
        (lambda: Quotas({}, Quota(Share(guaranteed=0.1))), "others"),
        (lambda: Quotas({A: Quota(), Namespace(tenant="a", salt="x"): Quota()}), "named"),
        (lambda: Quotas({A: Quota(Share(0.6)), B: Quota(Share(0.6))}), "guarantees of the device"),
        (lambda: PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(0.6))})), "guarantees of the device"),
    ],
)
def test_what_cannot_be_granted_is_refused(make: Any, named: str) -> None:
    with pytest.raises(BadArgument) as caught:
        make()
    assert caught.value.name == named


def test_a_quota_that_is_refused_changes_nothing() -> None:
    cache = PrefixCache(16, 2, quotas=Quotas({A: Quota(Share(maximum=0.25))}))
    with pytest.raises(BadArgument):
        cache.tenants.set_quotas(Quotas({B: Quota(Share(guaranteed=0.9))}))
    fill(cache, A, 0, 8)
    assert held(cache, A) == 4


NAMES = st.none() | st.text(max_size=5)


@given(NAMES, NAMES, NAMES, st.lists(st.text(max_size=3), max_size=2), st.binary(max_size=40))
def test_the_core_finds_the_owner_of_every_name(
    adapter: str | None, tenant: str | None, salt: str | None, extra: list[str], noise: bytes
) -> None:
    space = Namespace(adapter, salt, tuple(extra), tenant)
    owner = next(
        (Namespace(**{kind: name}) for kind, name in (("tenant", tenant), ("salt", salt)) if name is not None), None
    )
    assert owner_of(space.encode()) == (b"" if owner is None else owner.encode())
    assert owner_of(encode_namespace(noise)) == encode_namespace(noise)
    assert split_adapter(space.encode())[1].startswith(owner_of(space.encode()))
    assert _core.owner_of(noise) in (b"", _core.owner_of(_core.owner_of(noise)))


def test_guarantees_hold_on_the_host() -> None:
    rig = Rig("full", device=24, host=12)
    quotas = Quotas({A: Quota(host=Share(guaranteed=0.5)), B: Quota(host=Share(maximum=0.5))})
    rig.cache.tenants.set_quotas(quotas)
    host = owner_of(A.encode())

    def serve(space: Namespace, first: int, pages: int) -> None:
        prefill(rig.cache, range(first, first + pages * SIZE), space).finish()
        rig.settle()

    def below(owner: bytes) -> int:
        return rig.cache.tenants.usage()[owner][1]["full"]

    serve(A, 0, 6)
    assert below(host) == 6
    for at in range(8):
        serve(B, 1000 + 100 * at, 3)
        serve(C, 5000 + 100 * at, 3)
        assert below(host) == 6 and below(owner_of(B.encode())) <= 6
    rig.cache.check()


# ---------------------------------------------------------------- with "write_back", an eviction waits for copies


def copying(kind: str, device: int, parts: Sequence[int]) -> Rig:
    """Returns a rig in which A has a prompt of so many pages in all; the last part is being copied down."""
    rig = Rig(kind, device=device, write="write_back")
    for pages in parts:
        rig.settle()
        prompt = list(range(pages * SIZE))
        rig.finish(rig.cache.lease([*prompt, 99], A), prompt)
        assert rig.tiers.back_up(rig.cache.tree.match(prompt, A).node)
    assert rig.tiers.copying
    return rig


def test_what_a_copy_held_beyond_a_maximum_goes_with_the_eviction_that_waited_for_it() -> None:
    rig = copying("full", 8, [4])
    fill(rig.cache, B, 1000, 2)
    rig.cache.tenants.set_quotas(Quotas({A: Quota(Share(maximum=0.25))}))
    assert held(rig.cache, A) == 4
    with rig.cache.lease(range(2000, 2000 + SIZE), C) as lease:
        lease.reserve(SIZE)
        assert not rig.tiers.copying and held(rig.cache, A) == 2
        rig.cache.check()


def test_what_a_copy_held_goes_when_the_eviction_of_another_component_waited_for_it() -> None:
    rig = copying("full window", 24, [6, 8])
    rig.cache.tenants.set_quotas(Quotas({A: Quota(Share(maximum=0.25))}))
    assert not rig.tiers.copying and held(rig.cache, A) == 6
    rig.cache.check()
