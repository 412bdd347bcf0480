"""The estimate of what a prefill costs: it learns a machine, follows it, and resists outliers."""

from __future__ import annotations

import random

import pytest

from mainstem.tiers.prefill import PrefillCost


def cost(tokens: int, context: int, a: float = 1e-3, b: float = 2e-7) -> float:
    """Returns the seconds on a machine that fits the model of the estimate."""
    return a * tokens + b * tokens * (context + tokens / 2)


def learned(prefill: PrefillCost, chunks: int, factor: float = 1.0, chunk: int = 512) -> PrefillCost:
    for at in range(chunks):
        context = chunk * (at % 16)
        prefill.observe([(chunk, context)], factor * cost(chunk, context))
    return prefill


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
    prefill = learned(PrefillCost(), 16)
    assert prefill.seconds(tokens, context) == pytest.approx(cost(tokens, context), rel=1e-3)


def test_several_sequences_of_a_forward_count_together() -> None:
    prefill = PrefillCost()
    for at in range(8):
        parts = [(300, 100 * at), (200, 0), (1, 700), (1, 50)]
        prefill.observe(parts, sum(cost(*part) for part in parts))
    assert prefill.seconds(400, 200) == pytest.approx(cost(400, 200), rel=0.05)


def test_nothing_costs_nothing() -> None:
    assert learned(PrefillCost(), 4).seconds(0, 0) == 0


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
    prefill = learned(PrefillCost(), 32)
    prefill.observe([(512, 0)], 100.0)
    seconds = prefill.seconds(4000, 0)
    assert seconds is not None and seconds < 2 * cost(4000, 0)
    assert learned(prefill, 64).seconds(4000, 0) == pytest.approx(cost(4000, 0), rel=0.05)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    prefill = learned(learned(PrefillCost(), 64), 96, factor)
    assert prefill.seconds(4000, 0) == pytest.approx(factor * cost(4000, 0), rel=0.1)


def test_short_forwards_do_not_outweigh_long_ones() -> None:
    """After a hit a few tokens are computed, at the price of reading all weights."""
    prefill = learned(PrefillCost(), 16)
    for _ in range(500):
        prefill.observe([(3, 8000)], 0.05)
    assert prefill.seconds(4000, 0) == pytest.approx(cost(4000, 0), rel=0.2)


def test_noise_on_short_prompts_does_not_distort_the_cost_of_long_ones() -> None:
    for seed in range(50):
        noise, prefill = random.Random(seed), PrefillCost()
        for _ in range(20):
            tokens = noise.randint(150, 512)
            prefill.observe([(tokens, 0)], cost(tokens, 0) * noise.uniform(0.7, 1.3))
        seconds = prefill.seconds(9000, 0)
        assert seconds is not None and 0.5 * cost(9000, 0, b=0) < seconds < 2 * cost(9000, 0)


def test_equal_forwards_give_equal_estimates() -> None:
    assert learned(PrefillCost(), 9).seconds(777, 3) == learned(PrefillCost(), 9).seconds(777, 3)
