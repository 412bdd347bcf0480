"""Retention over every set of components, a host tier and every policy: what is retained is found until its time.

`test_stateful` compares retention on one tier with a model of it, call by call; this file has what only tiers, windows
and states show, and what a caller sees.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from rigs.cache import prefill
from rigs.components import DEVICE, HOST, KINDS, SIZE, STATES, P, Rig
from rigs.policy_models import InPython

from mainstem.cache.components import Chunked, Full
from mainstem.cache.namespaces import Namespace, encode_namespace
from mainstem.cache.policies import BUILT_IN
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.retention import Kept
from mainstem.errors import BadArgument, BadTokens

ALL_POLICIES: list[Any] = [*BUILT_IN, InPython("lfu")]


def cached(cache: PrefixCache, tokens: Sequence[int], namespace: Any = None) -> int:
    """Returns how many positions of a prefix a match finds on any tier."""
    return cache.peek([*tokens, 10**6], namespace)


def flood(cache: PrefixCache, first: int, prompts: int = 40, pages: int = 3) -> None:
    """Serves prompts that share nothing, many times the cache."""
    for at in range(prompts):
        begin = first + at * pages * cache.page_size
        prefill(cache, list(range(begin, begin + pages * cache.page_size + 1))).finish()


def left_after_a_flood(cache: PrefixCache, first: int) -> int:
    flood(cache, first)
    return cached(cache, P)


# ---------------------------------------------------------------- one tier


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_no_policy_evicts_what_is_retained_until_it_expires(policy: Any) -> None:
    cache = PrefixCache(16, 2, policy=policy)
    prefill(cache, P).finish()
    cache.retention.poll(0.0)
    assert cache.retention.retain(P, 10.0) == cache.retention.retain(P, 5.0)
    for now in (1.0, 9.9):
        flood(cache, 1000 + int(now * 1000))
        cache.retention.poll(now)
        assert cached(cache, P) == 8
    assert cache.stats().pool.locked == 4
    cache.retention.poll(10.0)
    assert cache.stats().pool.locked == 0 and cached(cache, P) == 8  # expiry deletes nothing
    cache.check()
    assert cache.flush() == 16 - cache.pool.free or cache.pool.free == 16


def test_a_pin_lasts_until_it_is_taken_back() -> None:
    cache = PrefixCache(16, 2)
    prefill(cache, P).finish()
    assert cache.retention.pin(P).positions == 8
    cache.retention.poll(1e12)
    assert left_after_a_flood(cache, 1000) == 8
    assert (cache.retention.unpin(P), cache.retention.unpin(P)) == (8, 0)
    assert left_after_a_flood(cache, 5000) == 0


def test_a_time_goes_on_when_the_pin_ends() -> None:
    cache = PrefixCache(16, 2)
    prefill(cache, P).finish()
    cache.retention.poll(0.0)
    cache.retention.pin(P)
    cache.retention.retain(P, 5.0)
    assert cache.retention.stats().prefixes == cache.retention.stats().pinned == 1
    assert cache.retention.unpin(P) == 8
    assert (cache.retention.stats().prefixes, cache.retention.stats().pinned) == (1, 0)
    cache.retention.poll(5.0)
    assert cache.retention.stats().prefixes == 0


def test_a_hit_renews_what_it_has_all_of() -> None:
    cache = PrefixCache(32, 2)
    prefill(cache, [*P, 50, 51]).finish()
    cache.retention.poll(0.0)
    assert not cache.retention.renews
    cache.retention.retain(P[:4], 10.0)
    cache.retention.retain(P, 10.0, renew_s=5.0)
    assert cache.retention.renews
    cache.retention.poll(8.0)
    for prompt, most in ((P[:6], None), ([*P[:7], 99, 98], None), ([*P, 50, 51], 0)):  # not all of it; no hit
        cache.lease(prompt, most=most).abort()
    cache.lease([*P, 50, 51], "another").abort()
    cache.retention.poll(10.0)
    assert cache.retention.stats().prefixes == 0
    cache.retention.retain(P[:4], 20.0)
    cache.retention.retain(P, 20.0, renew_s=5.0)
    cache.retention.poll(18.0)
    cache.lease([*P, 60, 61]).abort()  # until 23
    cache.retention.poll(20.0)
    assert cache.retention.stats().prefixes == 1  # the other is not renewed
    cache.retention.poll(22.9)
    cache.check()
    assert left_after_a_flood(cache, 1000) == 8
    cache.retention.poll(23.0)
    assert cache.retention.stats().prefixes == 0 and not cache.retention.renews
    assert left_after_a_flood(cache, 5000) == 0


def test_what_has_expired_is_not_renewed() -> None:
    """A pin may hold it longer, and ends it."""
    cache = PrefixCache(32, 2)
    prefill(cache, P).finish()
    cache.retention.poll(0.0)
    cache.retention.retain(P, 5.0, renew_s=5.0)
    cache.retention.pin(P)
    cache.retention.poll(6.0)
    cache.lease([*P, 60]).abort()
    assert cache.retention.unpin(P) == 8
    assert cache.retention.stats().prefixes == 0
    cache.check()


def test_what_is_left_of_a_removed_prefix_is_renewed_as_it_was() -> None:
    cache = PrefixCache(32, 2)
    prefill(cache, P).finish()
    cache.retention.poll(0.0)
    cache.retention.retain(P, 10.0, renew_s=10.0)
    cache.remove(P[:5])
    cache.retention.poll(5.0)
    cache.lease([*P[:4], 60]).abort()  # until 15
    cache.retention.poll(14.0)
    assert cache.retention.stats().prefixes == 1
    cache.check()


def test_a_renewal_under_a_pin_lasts_longer_than_the_pin() -> None:
    cache = PrefixCache(32, 2)
    prefill(cache, P).finish()
    cache.retention.poll(0.0)
    cache.retention.retain(P, 5.0, renew_s=5.0)
    cache.retention.pin(P)
    cache.retention.poll(4.0)
    cache.lease([*P, 60]).abort()  # until 9
    cache.retention.poll(6.0)
    cache.retention.unpin(P)
    assert cache.retention.stats().prefixes == 1
    cache.retention.poll(9.0)
    assert cache.retention.stats().prefixes == 0
    cache.check()


@pytest.mark.parametrize("kind", KINDS)
def test_renewals_follow_a_plain_list_of_times(kind: str) -> None:
    """Over every set of components, with a host: a list says until when each prefix is retained."""
    rng, rig, moved = random.Random(3), Rig(kind), 0
    retention, now = rig.cache.retention, 0.0
    times: dict[tuple[int, ...], tuple[float, float]] = {}
    for round_ in range(60):
        now += rng.random() * 2
        retention.poll(now)
        rig.cache.check()
        times = {prefix: (until, renew_s) for prefix, (until, renew_s) in times.items() if until > now}
        assert retention.stats().prefixes == len(times), (round_, now, times)
        tokens = [rng.choice((10, 20, 30)), *range(2, 2 + rng.choice((3, 5, 7)))]
        held = [prefix for prefix in times if tuple(tokens[: len(prefix)]) == prefix]
        rig.serve(tokens)
        if rng.random() < 0.5:
            rig.settle()
        moved += sum(retention.stats().host.values())
        for prefix in held:
            until, renew_s = times[prefix]
            times[prefix] = max(until, now + renew_s) if renew_s else until, renew_s
        renew_s = rng.choice((0.0, 1.0, 3.0))
        kept = retention.retain(tokens, now + 2.0, renew_s=renew_s)
        if kept.positions:
            end = tuple(tokens[: kept.positions])
            until, before = times.get(end, (0.0, 0.0))
            times[end] = max(until, now + 2.0), max(before, renew_s)
    assert moved > 0
    retention.clear()
    rig.cache.check()


@pytest.mark.parametrize("renew_s", [-1.0, math.inf, math.nan])
def test_a_renewal_is_a_number_of_seconds(renew_s: float) -> None:
    cache = PrefixCache(16, 2)
    with pytest.raises(BadArgument, match="renew_s"):
        cache.retention.retain(P, 5.0, renew_s=renew_s)


def test_what_is_there_can_be_looked_for() -> None:
    cache = PrefixCache(16, 2)
    prefill(cache, P).finish()
    assert cache.retention.find([*P, 77]) == cache.retention.find(P) == Kept(0, 8)
    assert cache.retention.find(P[:5]) == Kept(0, 4)
    assert cache.retention.find(P, "another") == cache.retention.find([]) == Kept(0, 0)
    assert cache.stats().retention.prefixes == 0 and cache.stats().pool.locked == 0


def test_beyond_the_bound_as_much_is_retained_as_fits_from_the_root() -> None:
    cache = PrefixCache(20, 2, retain_share=0.25)
    prompt = list(range(16))
    prefill(cache, prompt).finish()
    kept = cache.retention.pin(prompt)
    assert (kept.positions, kept.cached) == (10, 16)
    assert cache.retention.pin(prompt) == kept  # renewing costs nothing
    other = [*prompt[:4], *range(100, 104)]
    prefill(cache, other).finish()
    assert cache.retention.pin(other).positions == 4  # shared, so it is free
    flood(cache, 1000)
    assert cached(cache, prompt) == 10


def test_owners_do_not_take_from_each_other_but_the_reserve_is_common() -> None:
    cache = PrefixCache(40, 2, retain_share=0.125, reserve={"full": 32})
    prompt = list(range(16))
    spaces = [Namespace(salt="a"), Namespace(salt="b"), Namespace("adapter", "a")]
    for space in spaces:
        prefill(cache, prompt, space).finish()
    kept = [cache.retention.pin(prompt, space).positions for space in spaces]
    assert kept == [10, 6, 0]  # 5 pages of an owner, 8 of all
    cache.retention.unpin(prompt, spaces[0])
    assert cache.retention.pin(prompt, spaces[1]).positions == 10


def test_the_reserve_lets_the_longest_request_run() -> None:
    cache = PrefixCache(20, 2, retain_share=1.0, reserve={"full": 15})
    prefill(cache, list(range(20))).finish()
    assert cache.retention.pin(list(range(20))).positions == 10
    lease = cache.lease(list(range(100, 131)))
    lease.reserve(30)
    lease.abort()


@pytest.mark.parametrize("until", [math.inf, math.nan, -1.0, 3.0])
def test_a_time_that_has_passed_or_is_none_is_refused(until: float) -> None:
    cache = PrefixCache(8, 2)
    prefill(cache, P[:4]).finish()
    cache.retention.poll(3.0)
    with pytest.raises(BadArgument, match="until = "):
        cache.retention.retain(P[:4], until)
    with pytest.raises(BadTokens):
        cache.retention.pin([-1])
    assert cache.retention.stats().prefixes == 0


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(BadArgument, match="retain_share"):
        PrefixCache(8, 2, retain_share=share)


def test_what_is_not_cached_cannot_be_retained() -> None:
    cache = PrefixCache(8, 2)
    assert (cache.retention.pin(P).positions, cache.retention.pin(P).cached) == (0, 0)
    assert cache.retention.pin([]).cached == 0
    assert cache.tree.stats().nodes == 0


def test_a_removal_ends_a_retention_and_what_is_left_stays_retained() -> None:
    cache = PrefixCache(32, 2)
    prefill(cache, P).finish()
    assert cache.retention.pin(P).positions == 8
    assert cache.remove(P[:5]) == 2
    assert cache.retention.stats().device["full"] == 2
    flood(cache, 1000)
    assert cached(cache, P) == 4
    assert cache.remove([]) and cache.retention.stats().prefixes == 0
    cache.check()


def test_a_flush_ends_all_retentions() -> None:
    cache = PrefixCache(16, 2)
    prefill(cache, P).finish()
    cache.retention.pin(P)
    assert cache.flush() == 4 and cache.pool.free == 16
    assert cache.retention.stats() == PrefixCache(16, 2).retention.stats()


def test_many_renewals_do_not_grow_the_heap() -> None:
    cache = PrefixCache(16, 2)
    prefill(cache, P).finish()
    cache.retention.poll(0.0)
    most = 0
    for at in range(1000):
        cache.retention.retain(P, 1e6 + at)
        most = max(most, len(cache.retention._times))
    assert most == 2 * 1 + 64  # twice the entries, and a few: memory stays flat


# ---------------------------------------------------------------- what nobody has asked for

A, B = Namespace(tenant="a"), Namespace(tenant="b")


def keep(cache: PrefixCache, first: int, pages: int, worth: float, space: Any = A, share: float = 0.2) -> int:
    """Computes a prompt and keeps it; returns how many pages are kept."""
    prompt = list(range(first, first + pages * cache.page_size))
    prefill(cache, prompt, space).finish()
    kept = cache.retention.keep(prompt, 10.0, space, renew_s=10.0, share=share, worth=worth)
    cache.check()
    return kept.positions // cache.page_size


def test_what_is_worth_less_gives_way_and_what_is_worth_more_stays() -> None:
    cache = PrefixCache(40, 2)  # 8 pages
    assert keep(cache, 0, 4, 3.0) == keep(cache, 100, 4, 1.0) == 4
    assert keep(cache, 200, 4, 2.0) == 0  # not by more than 1
    assert keep(cache, 300, 5, 2.5) == 4
    assert (cache.retention.stats().spare, cache.retention.stats().given_way) == (2, 1)
    flood(cache, 1000)
    assert [cached(cache, range(first, first + 8), A) for first in (0, 100, 200, 300)] == [8, 0, 0, 8]
    cache.retention.poll(10.0)
    assert cache.retention.stats().spare == cache.retention.stats().spare_pages == 0


def test_a_share_is_of_all_owners_together_and_of_what_is_asked_for_too() -> None:
    cache = PrefixCache(40, 2)  # 8 pages
    prefill(cache, P, A).finish()
    cache.retention.pin(P, A)
    assert keep(cache, 100, 3, 1.0) == 3
    assert keep(cache, 100, 6, 1.0, B) == 1
    assert keep(cache, 300, 6, 9.0, Namespace(salt="c")) == 0  # what others keep does not give way to it
    assert keep(cache, 200, 6, 9.0, share=0.0) == 0


def test_one_s_own_gives_way_before_what_others_keep() -> None:
    cache = PrefixCache(40, 2, retain_share=0.5, reserve={"full": 30})  # 10 of all
    assert keep(cache, 0, 4, 1.0, B, 0.5) == keep(cache, 100, 4, 2.0, A, 0.5) == 4
    prompt = list(range(200, 212))
    prefill(cache, prompt, A).finish()
    assert cache.retention.retain(prompt, 5.0, A).positions == 12
    assert cached(cache, list(range(8)), B) == 8 and cache.retention.stats().spare == 1


def test_what_was_a_part_of_something_asked_for_is_bounded_when_that_ends() -> None:
    cache = PrefixCache(40, 2)  # 8 pages
    prompt = list(range(20))
    prefill(cache, prompt, A).finish()
    cache.retention.retain(prompt, 5.0, A)
    assert cache.retention.keep(prompt[:18], 10.0, A, renew_s=1.0, share=0.2, worth=1.0).positions == 18
    cache.retention.poll(5.0)
    cache.check()
    assert cache.retention.stats().spare == 0 and cache.retention.stats().given_way == 1


def test_what_is_kept_and_then_asked_for_has_the_time_that_was_asked_for() -> None:
    cache = PrefixCache(40, 2)
    assert keep(cache, 0, 4, 1.0) == 4
    cache.retention.retain(list(range(8)), 3.0, A)
    assert cache.retention.stats().spare == 0 and cache.retention.stats().prefixes == 1
    assert keep(cache, 0, 4, 1.0) == 4 and cache.retention.stats().spare == 0
    cache.retention.poll(3.0)
    assert cache.retention.stats().prefixes == 0
    assert cache.retention.stats().given_way == 0


def test_what_others_keep_gives_way_only_where_they_are_in_the_way() -> None:
    cache = PrefixCache(40, 2, retain_share=0.25, reserve={"full": 24})  # 10 an owner, 16 of all
    assert keep(cache, 0, 8, 1.0, B) == 8
    prompt = list(range(100, 140))
    prefill(cache, prompt, A).finish()
    assert cache.retention.pin(prompt[:12], A).positions == 12
    assert cache.retention.stats().spare == 1  # there was room
    assert cache.retention.pin(prompt, A).positions == 20
    assert cache.retention.stats().spare == 0
    roomy = PrefixCache(80, 2, retain_share=0.125)  # 10 an owner, 40 of all
    assert keep(roomy, 0, 8, 1.0, B, share=0.1) == 8
    prefill(roomy, prompt, A).finish()
    assert roomy.retention.pin(prompt, A).positions == 20
    assert roomy.retention.stats().spare == 1  # its own bound is in the way
    roomy.check()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_asked_for_has_all_the_room_whatever_is_kept_beside(seed: int) -> None:
    """The same requests with and without anything that is kept: each gets the same, and keeps it."""
    rng, now, given_way = random.Random(seed), 0.0, 0
    caches = [PrefixCache(2000, 2, retain_share=0.01, reserve={"full": 1970}) for _ in range(2)]  # 20 an owner, 30
    for _ in range(200):
        space, tokens = rng.choice((A, B)), [rng.randrange(3) for _ in range(2 * rng.randrange(1, 13))]
        roll = rng.random()
        for cache in caches:
            prefill(cache, tokens, space).finish()
        if roll < 0.4:
            terms = {"renew_s": rng.choice((0.0, 5.0)), "share": rng.choice((0.005, 1.0)), "worth": 4 * rng.random()}
            before = caches[0].retention.kept(encode_namespace(space))
            caches[0].retention.keep(tokens, now + 5, space, **terms)
            after = caches[0].retention.kept(encode_namespace(space))
            assert after <= max(before, 2 * int(2000 * min(0.01, terms["share"])))
        elif roll < 0.65:
            got = [cache.retention.retain(tokens, now + 3, space) for cache in caches]
            assert got[0] == got[1]
        elif roll < 0.75:
            got = [cache.retention.pin(tokens, space) for cache in caches]
            assert got[0] == got[1]
            for cache in caches if rng.random() < 0.8 else ():
                cache.retention.unpin(tokens, space)
        else:
            now += 1.0
            for cache in caches:
                cache.retention.poll(now)
        stats = [cache.retention.stats() for cache in caches]
        assert stats[0].given_way >= given_way and stats[0].prefixes - stats[0].spare == stats[1].prefixes
        given_way = stats[0].given_way
        for cache in caches:
            cache.check()
    assert given_way > 0


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("until", {"until": -1.0}),
        ("renew_s", {"renew_s": -1.0}),
        ("share", {"share": 1.1}),
        ("worth", {"worth": math.inf}),
    ],
)
def test_what_keep_refuses(name: str, given: dict[str, float]) -> None:
    cache = PrefixCache(8, 2)
    cache.retention.poll(0.0)
    good = {"until": 1.0, "renew_s": 0.0, "share": 0.5, "worth": 1.0} | given
    with pytest.raises(BadArgument, match=f"{name} = "):
        cache.retention.keep(P, good.pop("until"), **good)


# ---------------------------------------------------------------- demotion


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)
def test_every_policy_evicts_what_is_demoted_first(policy: Any) -> None:
    cache = PrefixCache(16, 2, policy=policy)
    for first in (0, 100, 200):
        prefill(cache, list(range(first, first + 8))).finish()
    prefill(cache, list(range(100, 108))).finish()  # used twice, and last
    assert cache.demote(list(range(100, 108))) == 8
    prefill(cache, list(range(300, 308))).finish()
    assert [cached(cache, range(first, first + 8)) for first in (0, 100, 200)] == [8, 8, 8]
    prefill(cache, list(range(400, 408))).finish()
    assert [cached(cache, range(first, first + 8)) for first in (0, 100, 200)] == [8, 0, 8]
    cache.check()


def test_what_others_share_is_not_demoted_and_a_use_ends_it() -> None:
    cache = PrefixCache(16, 2)
    prefill(cache, [*P[:4], 20, 21]).finish()
    prefill(cache, [*P[:4], 30, 31]).finish()
    assert cache.demote([*P[:4], 30, 31]) == 2
    prefill(cache, [*P[:4], 30, 31, 40, 41]).finish()  # used again
    assert cache.demote([*P[:4], 20, 21]) == 2
    flood(cache, 1000, prompts=4)
    assert (cached(cache, [*P[:4], 20, 21]), cached(cache, [*P[:4], 30, 31])) == (4, 6)
    assert cache.demote([7, 7]) == 0


def test_a_use_that_computes_nothing_ends_it_too() -> None:
    cache, other = PrefixCache(16, 2), list(range(500, 507))
    prefill(cache, P[:6]).finish()
    assert cache.demote(P[:6]) == 6
    prefill(cache, other).finish()
    cache.lease([*P[:6], 99]).abort()
    flood(cache, 1000, prompts=4)
    assert cached(cache, P[:6]) == 6 and cached(cache, other) < 6


def test_pages_that_several_retentions_share_count_once() -> None:
    cache = PrefixCache(32, 2)
    prefill(cache, P).finish()
    assert cache.retention.pin(P).positions == 8
    assert cache.retention.pin(P[:4]).positions == 4
    assert cache.retention.stats().device == {"full": 4}
    assert cache.retention.unpin(P) == 8
    assert cache.retention.stats().device == {"full": 2}


def test_what_parts_inside_a_page_is_another_session() -> None:
    cache = PrefixCache(32, 4)
    one, other = [*range(8), 8, 8, 8, 8], [*range(8), 8, 8, 9, 9]
    for prompt in (one, other):
        prefill(cache, prompt).finish()
        cache.retention.pin(prompt)
    assert cache.demote(one[:11], over=True) == 4 and cache.retention.stats().prefixes == 1
    assert cache.demote([*range(8), 7], over=True) == cache.demote([7], over=True) == 0
    assert cache.demote(other[:10], over=True) == 16  # both begin with this, and nothing else does
    assert cache.retention.stats().prefixes == 0
    assert cache.demote([0, 1]) == 16


def test_a_session_of_which_less_is_cached_ends_too_unless_another_goes_on_from_there() -> None:
    cache = PrefixCache(32, 2)
    prefill(cache, P).finish()
    cache.retention.pin(P)
    assert cache.demote([*P[:4], 90, 91], over=True) == 0  # what follows is another's
    assert cache.demote([*P, 90, 91], over=True) == 8
    assert cache.retention.stats().prefixes == 0


def test_the_end_of_a_session_ends_its_retentions_not_those_of_what_it_shares() -> None:
    cache = PrefixCache(32, 2, retain_share=0.5)
    system, session = P[:4], [*P[:4], 20, 21, 22, 23]
    prefill(cache, session).finish()
    prefill(cache, [*system, 30, 31]).finish()
    cache.retention.pin(system)
    cache.retention.pin(session[:6])
    cache.retention.pin(session)
    assert cache.demote(session) == 4 and cache.retention.stats().prefixes == 3
    assert cache.demote(session, over=True) == 4
    assert cache.retention.stats().prefixes == 1 and cache.retention.kept(b"") == 4
    cache.check()


# ---------------------------------------------------------------- a host tier


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_retained_moves_down_and_is_found_there(kind: str, write: str) -> None:
    rig = Rig(kind, device=24, host=24, write=write)
    rig.serve(P)
    rig.tiers.pending.settle()
    kept = rig.cache.retention.pin(P)
    assert kept.positions == kept.cached == 8
    assert rig.cache.retention.stats().device[rig.names[0]] == len(P) // SIZE or kind.startswith("window")
    rig.settle()
    rig.cache.retention.poll(1.0)
    assert not any(rig.cache.retention.stats().device.values())
    assert all(n > 0 for n in rig.cache.retention.stats().host.values())
    rig.evict(DEVICE)
    rig.evict(HOST)
    lease, load, ticket = rig.begin(P)
    ticket.wait()
    assert load.wait() and lease.hit == 8
    lease.abort()
    rig.cache.retention.unpin(P)
    rig.evict(DEVICE)
    rig.evict(HOST)
    assert cached(rig.cache, P) == 0
    rig.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_host_has_is_retained_there(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    assert rig.cache.retention.pin(P).positions == 8
    assert not any(rig.cache.retention.stats().device.values())
    rig.evict(HOST)
    assert cached(rig.cache, P) == 8
    rig.cache.flush()
    rig.close()


def test_the_chunk_before_a_boundary_counts_though_it_is_gone_and_nothing_is_left_of_it() -> None:
    """A lock holds the last pages of its prefix, needed or not."""
    cache = PrefixCache({Full(): 16, Chunked(4): 16}, SIZE)
    lease = cache.lease([*P, 9])
    lease.reserve(9)
    for end in range(2, 9, 2):
        lease.slide(end - 2, end)
    lease.publish(8)
    lease.finish(8)
    assert cache.retention.pin(P[:4]).positions == 4
    stats = cache.stats()
    assert stats.retention.device == {"full": 2, "chunked": 2}
    assert [pool.locked for pool in stats.pools.values()] == [2, 0]
    cache.check()
    assert cache.retention.unpin(P[:4]) == 4
    assert cache.stats().retention.device == {"full": 0, "chunked": 0}
    cache.flush()
    assert all(pool.free == pool.total for pool in cache.stats().pools.values())


def test_the_tier_that_keeps_more_is_chosen() -> None:
    rig = Rig("full")
    rig.serve(P[:4])
    rig.settle()
    rig.serve(P)  # the rest has not been copied yet
    assert rig.cache.retention.pin(P).positions == 8
    stats = rig.cache.retention.stats()
    assert (stats.device, stats.host) == ({"full": 4}, {"full": 0})
    rig.cache.retention.clear()
    rig.close()


@pytest.mark.parametrize("kind", STATES)
def test_states_are_bounded_too(kind: str) -> None:
    rig = Rig(kind, slots=8, host=1)  # two states an owner
    kept = []
    for first in (100, 200, 300):
        prompt = list(range(first, first + 4))
        rig.serve(prompt)
        kept.append(rig.cache.retention.pin(prompt).positions)
    assert kept == [4, 4, 0]
    assert rig.cache.retention.stats().device["state"] == 2
    rig.cache.retention.clear()
    rig.close()


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        pytest.param(
            kind, write, marks=[] if write == "write_back" or kind == "full window state" else pytest.mark.slow
        )
        for kind in KINDS
        for write in ("write_through", "write_back", "write_through_selective")
    ],
)
def test_nothing_retained_is_lost_whatever_happens(kind: str, write: str) -> None:
    """Random requests, evictions, copies that end late, retentions, pins, hints and removals."""
    rng = random.Random(f"{kind} {write}")
    rig = Rig(kind, device=20, host=28, slots=10, write=write)
    retention, now = rig.cache.retention, 0.0
    promised: dict[tuple[int, ...], float] = {}
    for _ in range(250):
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
        roll = rng.random()
        if roll < 0.4:
            rig.serve(tokens)
        elif roll < 0.6:
            ttl = rng.choice([1.0, 3.0, math.inf])
            kept = retention.pin(tokens) if ttl == math.inf else retention.retain(tokens, now + ttl)
            if kept.positions:
                prefix = tuple(tokens[: kept.positions])
                promised[prefix] = max(promised.get(prefix, now), now + ttl)
        elif roll < 0.7:
            now += rng.choice([0.5, 1.0])
            retention.poll(now)
            promised = {prefix: until for prefix, until in promised.items() if until > now}
        elif roll < 0.75:
            rig.settle()
            retention.poll(now)
        elif roll < 0.85:
            rig.evict(rng.choice([DEVICE, HOST]), *rng.sample(rig.names, 1))
        elif roll < 0.9:
            rig.cache.demote(tokens)
        elif roll < 0.95:
            pinned = retention.unpin(tokens)
            promised.pop(tuple(tokens[:pinned]), None)
        elif roll < 0.97:
            rig.cache.remove(tokens)
            promised = {prefix: until for prefix, until in promised.items() if list(prefix[: len(tokens)]) != tokens}
        rig.cache.check()
        for prefix in promised:
            assert cached(rig.cache, prefix) >= len(prefix), prefix
    retention.clear()
    rig.close()
