"""Advice: hints of requests in the scheduler, and what the engine does with advice on prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from rigs.components import DEVICE, KINDS, P, Rig
from rigs.scheduler import PAGE, Bench

from mainstem.cache.components import Component, Full, State, Window
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.retention import Kept
from mainstem.errors import BadArgument
from mainstem.runtime.hints.advice import Advice
from mainstem.runtime.request import Hints, Prefix

POOLS: dict[str, int | Mapping[Component, int]] = {
    "full": 64,
    "full window": {Full(): 64, Window(6): 64},
    "full state": {Full(): 64, State(): 24},
    "window state": {Window(6): 64, State(): 24},
}
PROMPT = list(range(1, 1 + 5 * PAGE))
ANSWER = 3 * PAGE


def ask(bench: Bench, hints: Hints, prompt: list[int] = PROMPT) -> str:
    id = bench.add(prompt, hints=hints, max_tokens=ANSWER, ignore_eos=True)
    bench.run()
    bench.assert_complete(id)
    return id


def whole(bench: Bench, id: str) -> list[int]:
    return [*bench.requests[id].tokens.tolist(), *bench.output(id)[0]]


def other(number: int) -> list[int]:
    """Returns a prompt that begins like no other one."""
    return [21 + number % 20, 1 + number // 20] * (5 * PAGE // 2)


def hit(bench: Bench, tokens: list[int]) -> int:
    return bench.cache.peek([*tokens, 0])


# ---------------------------------------------------------------- hints of requests


@pytest.mark.parametrize("kind", POOLS)
def test_without_hints_prompt_and_answer_stay(kind: str) -> None:
    bench = Bench(POOLS[kind])
    assert hit(bench, whole(bench, ask(bench, Hints()))) >= len(PROMPT) + ANSWER - PAGE
    bench.run_and_flush()


@pytest.mark.parametrize("kind", POOLS)
def test_the_answer_of_one_shot_does_not_stay_but_its_prompt_does(kind: str) -> None:
    bench = Bench(POOLS[kind])
    found = hit(bench, whole(bench, ask(bench, Hints(one_shot=True))))
    assert len(PROMPT) - PAGE <= found <= len(PROMPT)
    assert bench.cache.pool.cached == 5
    bench.run_and_flush()


@pytest.mark.parametrize("kind", POOLS)
def test_nothing_stays_of_what_is_not_to_be_stored_and_it_still_hits(kind: str) -> None:
    bench = Bench(POOLS[kind])
    ask(bench, Hints(no_store=True))
    assert all(pool.free == pool.total for pool in bench.cache.pools.values())
    ask(bench, Hints())
    before = {name: pool.cached for name, pool in bench.cache.pools.items()}
    again = ask(bench, Hints(no_store=True))
    assert bench.hit(again) > 0
    assert {name: pool.cached for name, pool in bench.cache.pools.items()} == before
    bench.run_and_flush()


def test_nobody_waits_for_a_prefix_that_will_not_be_stored() -> None:
    bench = Bench(token_budget=3 * PAGE)
    first = bench.add(PROMPT, hints=Hints(no_store=True), max_tokens=5, ignore_eos=True)
    bench.step()
    second = bench.add(PROMPT, max_tokens=5, ignore_eos=True)
    bench.step()
    assert bench.scheduler.running == 2
    bench.run()
    bench.assert_complete(first, second)


@pytest.mark.parametrize("kind", POOLS)
def test_a_preempted_request_that_stores_nothing_ends_all_the_same(kind: str) -> None:
    pools = POOLS[kind]
    sizes = 14 if isinstance(pools, int) else {row: 8 if isinstance(row, State) else 14 for row in pools}
    bench = Bench(sizes)
    ids = [
        bench.add(other(at), hints=hints, max_tokens=4 * PAGE, ignore_eos=True)
        for at, hints in enumerate([Hints(no_store=True), Hints(one_shot=True), Hints(no_store=True)])
    ]
    bench.run()
    assert bench.scheduler.totals.preemptions > 0 or kind == "window state"  # which needs few pages
    bench.assert_complete(*ids)
    bench.check_at_rest()


@pytest.mark.parametrize("kind", POOLS)
def test_a_request_retains_its_prompt_and_answer_until_the_time(kind: str) -> None:
    bench = Bench(POOLS[kind])
    mine = whole(bench, ask(bench, Hints(retain_s=500.0)))
    found = hit(bench, mine)
    assert found >= len(PROMPT) and bench.cache.retention.stats().prefixes == 1
    until = bench.now_s + 500
    for at in range(12):
        ask(bench, Hints(), other(at))
    assert bench.now_s < until and hit(bench, mine) == found
    bench.now_s = until
    bench.step()
    assert bench.cache.retention.stats().prefixes == 0 and hit(bench, mine) == found
    for at in range(12):
        ask(bench, Hints(), other(40 + at))
    assert hit(bench, mine) == 0
    bench.run_and_flush()


def marked(*prefixes: Prefix) -> Hints:
    return Hints(prefixes=prefixes)


def became(bench: Bench, id: str) -> list[tuple[int, int]]:
    """Returns of each prefix that a request marks how many tokens are retained, and how many cached."""
    return [(kept.positions, kept.cached) for _, kept in bench.usage(id).prefixes]


@pytest.mark.parametrize("kind", POOLS)
def test_a_prefix_of_a_prompt_is_retained_without_the_rest(kind: str) -> None:
    bench = Bench(POOLS[kind])
    end = 3 * PAGE + 1
    id = bench.add(PROMPT, hints=marked(Prefix(end, 500.0)), marks=(end,), max_tokens=ANSWER, ignore_eos=True)
    bench.run()
    bench.assert_complete(id)
    assert became(bench, id) == [(3 * PAGE, 3 * PAGE)]
    for at in range(12):
        ask(bench, Hints(), other(at))
    assert hit(bench, PROMPT) == 3 * PAGE
    bench.now_s += 500
    bench.step()
    assert bench.cache.retention.stats().prefixes == 0
    bench.run_and_flush()


def test_a_prefix_without_a_time_is_only_looked_for() -> None:
    bench = Bench()
    first = ask(bench, marked(Prefix(PAGE + 1), Prefix(len(PROMPT))))
    assert became(bench, first) == [(0, PAGE), (0, len(PROMPT))]
    assert bench.cache.retention.stats().prefixes == 0
    assert became(bench, ask(bench, Hints())) == []
    assert became(bench, ask(bench, Hints(no_store=True, prefixes=(Prefix(PAGE),)), other(1))) == [(0, 0)]


def test_a_later_hit_renews_a_prefix_that_says_so() -> None:
    bench = Bench()
    ask(bench, marked(Prefix(2 * PAGE, 500.0, renewed=True), Prefix(4 * PAGE, 500.0)))
    began = bench.now_s
    bench.now_s = began + 400
    ask(bench, Hints(), PROMPT[: 4 * PAGE] + [30] * PAGE)
    bench.now_s = began + 501
    bench.step()
    assert bench.cache.retention.stats().prefixes == 1
    for at in range(12):
        ask(bench, Hints(), other(at))
    assert hit(bench, PROMPT) == 2 * PAGE
    bench.now_s = began + 1500
    bench.step()
    assert bench.cache.retention.stats().prefixes == 0


def test_beyond_the_bound_of_its_owner_a_prefix_is_retained_from_the_root() -> None:
    bench = Bench(16)
    assert became(bench, ask(bench, marked(Prefix(5 * PAGE, 50.0)))) == [(4 * PAGE, 5 * PAGE)]


def test_what_a_cancelled_request_has_computed_of_a_prefix_is_retained() -> None:
    """It waited, or its client is gone: the usage is not seen, but what was asked for holds."""
    bench = Bench(token_budget=2 * PAGE)
    id = bench.add(PROMPT, hints=marked(Prefix(5 * PAGE, 50.0)), max_tokens=50, ignore_eos=True)
    bench.step(1)
    bench.scheduler.cancel(id)
    bench.run()
    assert became(bench, id) == [(2 * PAGE, 2 * PAGE)]
    assert bench.cache.retention.stats().prefixes == 1


@pytest.mark.parametrize("fields", [{"end": 0}, {"end": 3, "retain_s": 0.0}, {"end": 3, "retain_s": float("inf")}])
def test_the_numbers_of_a_prefix_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=[*fields][-1]):
        Prefix(**fields)


def test_a_cancelled_request_retains_nothing() -> None:
    bench = Bench()
    id = bench.add(PROMPT, hints=Hints(retain_s=5.0), max_tokens=50, ignore_eos=True)
    bench.step(3)
    bench.scheduler.cancel(id)
    bench.run()
    assert bench.cache.retention.stats().prefixes == 0


@pytest.mark.parametrize("retain_s", [0, -1, 1e-6, float("inf"), float("nan")])
def test_times_of_hints_are_checked(retain_s: float) -> None:
    with pytest.raises(BadArgument, match="retain_s"):
        Hints(retain_s=retain_s)
    with pytest.raises(BadArgument, match="no_store"):
        Hints(retain_s=1.0, no_store=True)


# ---------------------------------------------------------------- advice on prefixes


def apply(advice: Advice, action: Any, tokens: list[int] = P, ttl_s: float | None = None, now_s: float = 0.0) -> Kept:
    return advice.apply(action, np.array(tokens, np.int32), None, now_s, ttl_s)


def test_each_action_does_what_it_says() -> None:
    cache = PrefixCache(32, 2)
    advice = Advice(cache, 100.0)
    with cache.lease(P) as lease:
        lease.reserve(8)
        lease.finish(8)
    cache.retention.poll(0.0)
    assert apply(advice, "retain", ttl_s=7.0) == Kept(8, 8)
    assert apply(advice, "pin") == Kept(8, 8)
    assert apply(advice, "unpin") == Kept(8, 8)
    assert apply(advice, "unpin") == Kept(0, 0)
    assert cache.retention.stats().prefixes == 1
    assert apply(advice, "demote") == Kept(8, 8)
    assert apply(advice, "end") == Kept(8, 8)
    assert cache.retention.stats().prefixes == 0
    assert apply(advice, "prefetch") == Kept(8, 8)  # it is there
    assert apply(advice, "prefetch", [5, 5]) == apply(advice, "demote", [5, 5]) == Kept(0, 0)
    assert apply(advice, "prefetch", P[:3]) == Kept(2, 2), "whole pages"
    assert apply(advice, "prefetch", [P[0], 99]) == Kept(0, 0)


@pytest.mark.parametrize("ttl_s", [0.001, 100.0])
def test_a_retention_may_take_a_millisecond_and_the_longest_time(ttl_s: float) -> None:
    advice = Advice(PrefixCache(8, 4), 100.0)
    advice.check("retain", ttl_s)
    with pytest.raises(BadArgument, match="ttl_s"):
        advice.check("retain", 0.0009)


@pytest.mark.parametrize("ttl_s", [None, 0.0, -1.0, 101.0, float("nan")])
def test_a_retention_needs_a_time_within_its_range(ttl_s: float | None) -> None:
    advice = Advice(PrefixCache(8, 2), 100.0)
    with pytest.raises(BadArgument, match=r"ttl_s = .*: must be seconds from 0.001 to 100 \(max_retain_s\)"):
        advice.check("retain", ttl_s)
    with pytest.raises(BadArgument, match="left out for pin"):
        advice.check("pin", 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefetch_brings_to_the_device_what_the_host_has(kind: str) -> None:
    rig = Rig(kind)
    rig.put_on_host(P)
    advice = Advice(rig.cache, 100.0)
    assert apply(advice, "prefetch") == Kept(8, 8) and advice.busy
    rig.settle()
    advice.poll()
    assert not advice.busy and rig.cache.stats().leases.open == 0
    lease = rig.lease(P)
    assert (lease.hit, lease.loadable) == (8, 0)
    lease.abort()
    rig.evict(DEVICE)
    advice.close()
    rig.close()


def test_a_prefetch_under_way_can_be_ended() -> None:
    rig = Rig("full", device=80)
    rig.put_on_host(P)
    advice = Advice(rig.cache, 100.0)
    for _ in range(16):
        assert apply(advice, "prefetch").positions == 8
    assert apply(advice, "prefetch") == Kept(0, 8)  # enough are under way
    advice.close()
    assert not advice.busy
    rig.close()
