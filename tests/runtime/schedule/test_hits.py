"""What a scheduler counts of prompts: hits and misses by cause add up, whatever happens to a request."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rigs.ghost import prompt
from rigs.scheduler import Bench
from rigs.tiered import TieredBench

from mainstem.cache.components import Full, State, Window
from mainstem.errors import StorageError
from mainstem.runtime.request import Hints, Usage
from mainstem.runtime.schedule.meter import Flops
from mainstem.settings.engine import Limits

EXPLAINS = Limits(explain=True)


def check(bench: Bench) -> None:
    """Every prompt is settled, and every stretch of it is found, or has a cause."""
    totals = bench.scheduler.totals
    assert totals.prompt_tokens == totals.cached_tokens + sum(totals.missed.values()), totals
    causes = dict.fromkeys(totals.missed, 0)
    for id in bench.requests:
        usage = bench.usage(id)
        if usage.explanation is None:
            continue  # it ended before it was admitted
        bounds = [0, *(each.end for each in usage.explanation)]
        assert bounds == [*(each.begin for each in usage.explanation), usage.prompt_tokens]
        found = dict.fromkeys(("device", "host", "storage"), 0)
        for each in usage.explanation:
            if each.tier is not None:
                found[each.tier] += each.end - each.begin
            elif each.cause is not None:
                causes[each.cause] += each.end - each.begin
        assert found["host"] == usage.host_tokens and found["storage"] == usage.storage_tokens
        assert sum(found.values()) == usage.cached_tokens
    assert causes == totals.missed


def causes_of(usage: Usage) -> list[tuple[int, int, str | None]]:
    assert usage.explanation is not None
    return [(each.begin, each.end, each.tier or each.cause) for each in usage.explanation]


@pytest.mark.parametrize("seed", range(3))
def test_hits_and_misses_add_up_on_one_tier(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(chance.randint(14, 40), explain=True, token_budget=chance.choice([3, 7, 64]), max_running=4)
    for _ in range(60):
        tokens = prompt(chance.randrange(4), chance.randint(1, 30))
        if chance.random() < 0.3:
            tokens = [*tokens[: len(tokens) // 2], *prompt(9 + chance.randrange(2), 7)]
        hints = Hints(no_store=True) if chance.random() < 0.2 else Hints()
        scores = 0 if chance.random() < 0.1 else None
        id = bench.add(tokens, max_tokens=chance.randint(1, 8), hints=hints, prompt_logprobs=scores)
        bench.step(chance.randint(0, 4))
        if chance.random() < 0.1:
            bench.scheduler.cancel(id)
    bench.run()
    check(bench)
    assert bench.scheduler.totals.missed["not_stored"] > 0 or bench.scheduler.totals.missed["scored"] > 0


@pytest.mark.parametrize("policy", ["timeout", "wait_complete", "best_effort"])
@pytest.mark.parametrize("seed", range(2))
def test_hits_and_misses_add_up_over_tiers_whatever_fails(seed: int, policy: str, monkeypatch: Any) -> None:
    chance = random.Random(seed)
    bench = TieredBench(pages=24, host_pages=40, limits=EXPLAINS, prefetch=policy, breaker_cooldown_s=0.05)
    bench.workers.instant = chance.random() < 0.7

    def fails(*arguments: Any) -> Any:
        raise StorageError("io", "the disk is gone")

    for _ in range(60):
        bench.add(prompt(chance.randrange(6), chance.randint(2, 40)), max_tokens=chance.randint(1, 4))
        for _ in range(chance.randint(0, 4)):
            bench.step()
            bench.workers.run_all()
        if chance.random() < 0.2:
            bench.forget_device()
        bench.host.fail_up = RuntimeError("the copy engine is gone") if chance.random() < 0.2 else None
        with monkeypatch.context() as broken:
            if chance.random() < 0.2:
                broken.setattr(bench.backend, chance.choice(["exists", "get"]), fails)
            for _ in range(3):
                bench.step()
                bench.workers.run_all()
    bench.host.fail_up = None
    bench.workers.instant = True
    for _ in range(3000):
        bench.workers.run_all()
        if not bench.scheduler.busy:
            break
        bench.step()
    check(bench)
    totals = bench.scheduler.totals
    assert totals.host_tokens > 0 and totals.storage_tokens + totals.missed["late"] + totals.missed["failed"] > 0


def test_what_states_and_windows_keep_from_being_used_is_named() -> None:
    bench = Bench({Full(): 64, State(): 8}, explain=True)
    tokens = prompt(1, 30)
    bench.one(tokens)
    parted = bench.one([*tokens[:18], *prompt(2, 9)])
    found = causes_of(bench.usage(parted))
    assert (found[0][0], found[0][2]) == (0, "state_missing")
    bench.scheduler.close()
    sliding = Bench({Full(): 64, Window(8): 12}, explain=True)
    sliding.one(tokens)
    for number in range(3, 7):
        sliding.one(prompt(number, 22))
    again = causes_of(sliding.usage(sliding.one(tokens)))
    assert any(cause == "window_missing" for _, _, cause in again), again


def test_saved_operations_and_time_are_those_of_what_was_cached() -> None:
    assert Flops(2.0, 4.0).of(3) == 2.0 * 3 + 4.0 * (1 + 2 + 3)
    bench = Bench(64, explain=False)
    tokens = prompt(1, 22)
    bench.one(tokens)
    assert bench.scheduler.totals.saved_s == 0
    assert bench.scheduler.totals.missed == {}
    assert bench.usage("r0").explanation is None


def test_without_explanations_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(64)
    monkeypatch.setattr(bench.cache, "explain", None)  # calling it would fail
    bench.one(prompt(1, 22))
    assert bench.usage("r0").explanation is None


def test_who_ends_before_the_prompt_is_computed_is_settled_too() -> None:
    bench = Bench(64, explain=True, token_budget=3)
    id = bench.add(prompt(1, 30), max_tokens=4)
    bench.step(3)
    assert sum(bench.scheduler.totals.missed.values()) == 0, "it is not known yet what it will meet"
    bench.scheduler.cancel(id)
    bench.run()
    assert sum(bench.scheduler.totals.missed.values()) == 30
    check(bench)


def test_what_was_not_stored_as_asked_is_named() -> None:
    bench = Bench(64, explain=True)
    bench.cache.tree.core.remember(256)  # else it cannot know that nothing was evicted
    bench.one(prompt(1, 30), hints=Hints(no_store=True))
    again = causes_of(bench.usage(bench.one(prompt(1, 30))))
    assert again[0] == (0, 28, "not_stored")
