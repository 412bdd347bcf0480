"""The estimates of what computing and loading take: they are learned, follow changes, and ignore stalls."""

from __future__ import annotations

import math
import operator
import random
from types import SimpleNamespace
from typing import Any

import pytest

from mainstem.tiers.costs import Costs, LoadCost, PrefillCost
from mainstem.tiers.prefetch.waits import Wait

LATENCY_S, RATE = 0.004, 1e9


def cost(size: int) -> float:
    return LATENCY_S + size / RATE


def learned(load: LoadCost, count: int = 12, factor: float = 1.0) -> LoadCost:
    for at in range(count):
        size = (1 + at % 4) * 10_000_000
        load.observe(size, factor * cost(size))
    return load


@pytest.mark.parametrize("count", [3, 4, 20, 14_000])
def test_a_load_counts_a_twentieth_less_after_each_further_one(count: int) -> None:
    """After a thousand half-lives, of 13.5 loads each, the first ones count for nothing."""
    load = LoadCost()
    times_s = [1.0, 1.0, 1.0, *(1.0 + 0.3 * (at * 7 % 5 - 2) / 2 for at in range(count - 3))]
    for seconds in times_s:
        load.observe(1000, seconds)
    weights = [0.95 ** (count - 1 - at) for at in range(count)]
    expected = sum(map(operator.mul, weights, times_s)) / sum(weights)
    assert load.seconds(1000) == pytest.approx(expected, rel=1e-9)
    for _ in range(14_000):
        load.observe(1000, 1.2)
    fresh = LoadCost()
    for _ in range(3):
        fresh.observe(1000, 1.2)
    assert load.seconds(1000) == pytest.approx(fresh.seconds(1000), rel=1e-9)


def test_there_is_no_estimate_before_a_few_observations() -> None:
    load = LoadCost()
    assert load.seconds(100) is None and not load.known
    for _ in range(2):
        load.observe(1000, 1.0)
        assert load.seconds(1000) is None, "both may be outliers"
    load.observe(1000, 1.0)
    assert load.known and load.seconds(1000) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [0, 1000, 5_000_000, 400_000_000])
def test_latency_and_rate_are_found(size: int) -> None:
    assert learned(LoadCost()).seconds(size) == pytest.approx(cost(size), rel=1e-6)


def test_with_loads_of_one_size_the_time_is_proportional() -> None:
    load = LoadCost()
    for _ in range(5):
        load.observe(1000, 2.0)
    assert load.seconds(500) == pytest.approx(1.0)


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (-1, 1.0), (10, 0.0), (10, -1.0), (10, float("inf"))])
def test_what_says_nothing_is_ignored(size: int, seconds: float) -> None:
    load = LoadCost()
    for _ in range(5):
        load.observe(size, seconds)
    assert not load.known


@pytest.mark.parametrize("at", range(3))
def test_an_outlier_among_the_first_does_not_count(at: int) -> None:
    load = LoadCost()
    for number in range(3):
        load.observe(10_000_000, 60.0 if number == at else 0.01)
    seconds = load.seconds(10_000_000)
    assert seconds is not None and seconds < 0.05


def test_a_stall_changes_the_estimate_little() -> None:
    load = learned(LoadCost(), 40)
    load.observe(20_000_000, 30.0)
    seconds = load.seconds(20_000_000)
    assert seconds is not None and seconds < 1.5 * cost(20_000_000)


@pytest.mark.parametrize("factor", [0.04, 25.0])
def test_a_sudden_change_is_believed_after_a_few_observations(factor: float) -> None:
    load = learned(LoadCost(), 40)
    for _ in range(2):
        load.observe(20_000_000, factor * cost(20_000_000))
    before = load.seconds(20_000_000)
    assert before is not None and 0.5 < before / cost(20_000_000) < 2.0, "both may be outliers"
    load.observe(20_000_000, factor * cost(20_000_000))
    assert load.seconds(20_000_000) == pytest.approx(factor * cost(20_000_000), rel=0.01)


def test_outliers_in_both_directions_in_turns_change_the_estimate_little() -> None:
    load = learned(LoadCost(), 40)
    for factor in (30.0, 0.03, 30.0, 0.03):
        load.observe(20_000_000, factor * cost(20_000_000))
    seconds = load.seconds(20_000_000)
    assert seconds is not None and 0.5 < seconds / cost(20_000_000) < 2.0


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_it_follows_a_store_that_becomes_slower_or_faster(factor: float) -> None:
    load = learned(learned(LoadCost(), 40), 120, factor)
    assert load.seconds(20_000_000) == pytest.approx(factor * cost(20_000_000), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_no_estimate_negative(seed: int) -> None:
    noise, load = random.Random(seed), LoadCost()
    for _ in range(50):
        load.observe(noise.randrange(1, 10**7), 0.01 * noise.uniform(0.2, 5.0))
    estimates = [load.seconds(size) for size in (0, 10**3, 10**6, 10**8)]
    assert all(seconds is not None and seconds >= 0 for seconds in estimates)
    assert estimates == sorted(estimates, key=lambda seconds: seconds or 0.0)


# ---------------------------------------------------------------- prefills


def prefill_s(tokens: int, context: int, a: float = 1e-3, b: float = 2e-7) -> float:
    return a * tokens + b * tokens * (context + tokens / 2)


def trained(prefill: PrefillCost, chunks: int, factor: float = 1.0, chunk: int = 512) -> PrefillCost:
    for at in range(chunks):
        context = chunk * (at % 16)
        prefill.observe([(chunk, context)], factor * prefill_s(chunk, context))
    return prefill


@pytest.mark.parametrize(
    ("forwards", "tokens", "known"),
    [(2, 64, False), (3, 42, False), (3, 43, True), (127, 1, False), (128, 1, True), (2, 64_000, False)],
)
def test_an_estimate_takes_three_forwards_and_128_tokens(forwards: int, tokens: int, known: bool) -> None:
    prefill = PrefillCost()
    for _ in range(forwards):
        prefill.observe([(tokens, 0)], 0.001 * tokens)
    assert (prefill.seconds(100, 0) is not None) == known


@pytest.mark.parametrize("count", [3, 10, 200, 6_000])
def test_a_forward_counts_less_by_the_tokens_after_it(count: int) -> None:
    """1/e after 8,192 tokens; after a thousand half-lives the first ones count for nothing."""
    prefill = PrefillCost()
    times_s = [1.0, 1.0, 1.0, *(1.0 + 0.3 * (at * 7 % 5 - 2) / 2 for at in range(count - 3))]
    for seconds in times_s:
        prefill.observe([(1024, 0)], seconds)
    weights = [math.exp(-1024 / 8192 * (count - 1 - at)) for at in range(count)]
    expected = sum(map(operator.mul, weights, times_s)) / sum(weights)
    assert prefill.seconds(1024, 0) == pytest.approx(expected, rel=1e-9)
    for _ in range(6_000):
        prefill.observe([(1024, 0)], 1.2)
    assert prefill.seconds(1024, 0) == pytest.approx(1.2, rel=1e-9)


def test_at_first_there_is_no_estimate() -> None:
    prefill = PrefillCost()
    assert prefill.seconds(100, 0) is None
    for _ in range(2):
        prefill.observe([(512, 0)], 1.0)
        assert prefill.seconds(100, 0) is None, "both may be outliers"
    prefill.observe([(512, 0)], 1.0)
    assert prefill.seconds(512, 0) == pytest.approx(1.0)


def test_a_few_tokens_give_no_estimate() -> None:
    prefill = PrefillCost()
    for _ in range(60):
        prefill.observe([(2, 100)], 0.02)
    assert prefill.seconds(100, 0) is None


@pytest.mark.parametrize(("tokens", "context"), [(512, 0), (16, 1000), (8000, 0), (4000, 4000), (1, 0)])
def test_it_learns_the_cost_of_tokens_and_of_their_context(tokens: int, context: int) -> None:
    prefill = trained(PrefillCost(), 16)
    assert prefill.seconds(tokens, context) == pytest.approx(prefill_s(tokens, context), rel=1e-3)


def test_several_sequences_of_a_forward_count_together() -> None:
    prefill = PrefillCost()
    for at in range(8):
        parts = [(300, 100 * at), (200, 0), (1, 700), (1, 50)]
        prefill.observe(parts, sum(prefill_s(*part) for part in parts))
    assert prefill.seconds(400, 200) == pytest.approx(prefill_s(400, 200), rel=0.05)


def test_nothing_costs_nothing() -> None:
    assert trained(PrefillCost(), 4).seconds(0, 0) == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_is_not_positive_and_finite_is_ignored(seconds: float) -> None:
    prefill = PrefillCost()
    for _ in range(9):
        prefill.observe([(512, 0)], seconds)
        prefill.observe([], 1.0)
    assert prefill.seconds(512, 0) is None


@pytest.mark.parametrize("at", range(4))
def test_a_first_forward_that_compiles_does_not_count(at: int) -> None:
    prefill = PrefillCost()
    for number in range(4):
        prefill.observe([(512, 0)], 60.0 if number == at else 0.5)
    seconds = prefill.seconds(512, 0)
    assert seconds is not None and seconds < 1.0


def test_one_pause_changes_little_and_is_forgotten() -> None:
    prefill = trained(PrefillCost(), 32)
    prefill.observe([(512, 0)], 100.0)
    seconds = prefill.seconds(4000, 0)
    assert seconds is not None and seconds < 2 * prefill_s(4000, 0)
    assert trained(prefill, 64).seconds(4000, 0) == pytest.approx(prefill_s(4000, 0), rel=0.05)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    prefill = trained(trained(PrefillCost(), 64), 96, factor)
    assert prefill.seconds(4000, 0) == pytest.approx(factor * prefill_s(4000, 0), rel=0.1)


def test_short_forwards_do_not_outweigh_long_ones() -> None:
    """After a hit a few tokens are computed, at the price of reading all weights."""
    prefill = trained(PrefillCost(), 16)
    for _ in range(500):
        prefill.observe([(3, 8000)], 0.05)
    assert prefill.seconds(4000, 0) == pytest.approx(prefill_s(4000, 0), rel=0.2)


def test_noise_on_short_prompts_does_not_distort_the_cost_of_long_ones() -> None:
    for seed in range(50):
        noise, prefill = random.Random(seed), PrefillCost()
        for _ in range(20):
            tokens = noise.randint(150, 512)
            prefill.observe([(tokens, 0)], prefill_s(tokens, 0) * noise.uniform(0.7, 1.3))
        seconds = prefill.seconds(9000, 0)
        assert seconds is not None and 0.5 * prefill_s(9000, 0, b=0) < seconds < 2 * prefill_s(9000, 0)


def test_equal_forwards_give_equal_estimates() -> None:
    assert trained(PrefillCost(), 9).seconds(777, 3) == trained(PrefillCost(), 9).seconds(777, 3)


# ---------------------------------------------------------------- what follows from both


def costs(token_s: float, load: LoadCost | None = None, read: LoadCost | None = None) -> Costs:
    """Returns estimates of a machine that computes a token in `token_s`, at any position."""
    known = Costs(load=load or LoadCost(), read=read or LoadCost())
    for _ in range(4):
        known.prefill.observe([(512, 0)], 512 * token_s)
        known.look_up.observe(1, 0.05)
    return known


PAGE_BYTES, PAGE = 1_000_000, 16


def test_loads_are_worth_it_from_where_computing_takes_as_long() -> None:
    fast, slow = learned(LoadCost()), learned(LoadCost(), factor=100.0)
    assert costs(1e-3, fast).load_min_pages(PAGE_BYTES, PAGE) == 1
    assert costs(1e-4, fast).load_min_pages(PAGE_BYTES, PAGE) == 7, "4 ms and 1 ms a page, or 1.6 ms a page"
    pages = costs(1e-4, slow).load_min_pages(PAGE_BYTES, PAGE)
    assert pages is not None and pages > 10_000, "never"


def test_without_both_estimates_there_is_no_least_load() -> None:
    assert Costs().load_min_pages(PAGE_BYTES, PAGE) is None
    assert Costs(load=learned(LoadCost())).load_min_pages(PAGE_BYTES, PAGE) is None
    assert costs(1e-3).load_min_pages(PAGE_BYTES, PAGE) is None


def test_what_is_computed_before_storage_sends_a_page_is_not_looked_up() -> None:
    known = costs(1e-3, read=learned(LoadCost()))
    assert known.prefetch_min_tokens(PAGE_BYTES, 4096) in (54, 55), "50 ms, and 5 ms"
    assert costs(1e-6, read=learned(LoadCost())).prefetch_min_tokens(PAGE_BYTES, 4096) == 4096
    assert costs(1e-3).prefetch_min_tokens(PAGE_BYTES, 4096) is None


@pytest.mark.parametrize(("seconds", "found"), [(0.0, 0), (0.0999, 99), (0.1001, 100), (9.0, 300)])
def test_as_much_is_computed_as_the_time_allows(seconds: float, found: int) -> None:
    assert costs(1e-3).computed_within(seconds, 0, 300) == found


def test_reads_are_measured_from_the_first_one_after_a_pause() -> None:
    now_s, seen = 0.0, list[tuple[int, float]]()
    store: Any = SimpleNamespace(clock=lambda: now_s)
    read: Any = SimpleNamespace(observe=lambda size, seconds: seen.append((size, seconds)))
    wait = Wait(store, Costs(read=read), page_size=PAGE, page_bytes=100, have=0, pages=8)
    for begun_s in (1.0, 10.0):
        now_s = begun_s
        wait.asked(first=True)
        now_s = begun_s + 1
        wait.asked(first=False)
        wait.arrived(2, begun_s + 2)
        wait.arrived(1, begun_s + 3)
    assert seen == [(200, 2.0), (300, 3.0)] * 2
