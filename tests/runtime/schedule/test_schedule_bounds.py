"""What the scheduler holds back, ranks, tries and remembers at most. Tiers and caches are the tests' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mainstem.runtime.request import Delta
from mainstem.runtime.schedule.checkpoints import plan_checkpoints
from mainstem.runtime.schedule.drafts import Pace
from mainstem.runtime.schedule.explaining import Unstored
from mainstem.runtime.schedule.handoff import PrefillHandoff
from mainstem.runtime.schedule.prompt_prefetch import PromptPrefetch
from mainstem.runtime.schedule.waiting import WaitingQueue

END: Any = ("request", Delta("", (1,), finish_reason="stop"))


class BusyTiers:
    """Tiers with so many transfers under way, of which each is new in a new step."""

    def __init__(self) -> None:
        self.pending: list[object] = ["first"]
        self.busy = True


@pytest.mark.parametrize(("after_s", "passes"), [(1.999, False), (2.0, True), (2000.0, True)])
def test_an_end_is_held_back_for_two_seconds_while_one_transfer_goes_on(after_s: float, passes: bool) -> None:
    tiers: Any = BusyTiers()
    handoff = PrefillHandoff(tiers)
    assert handoff.pass_on([END], 10.0) == []
    assert handoff.pass_on([], 10.0 + after_s) == [END] * passes
    assert handoff.pass_on([], 10.0 + 1e6) == [END] * (not passes)
    assert handoff.pass_on([], 10.0 + 2e6) == []


def test_an_end_is_held_back_until_all_under_way_has_ended_four_times() -> None:
    """It waits for what was pending, then for three rounds: what was touched is backed up, copied, written."""
    tiers: Any = BusyTiers()
    handoff = PrefillHandoff(tiers)
    assert handoff.pass_on([END], 0.0) == []
    for step in range(3):
        tiers.pending = [step]
        assert handoff.pass_on([], 0.1) == handoff.pass_on([], 0.1) == []
    tiers.pending = ["last"]
    assert handoff.pass_on([], 0.1) == [END]


def test_a_pause_of_drafts_is_sixteen_steps_however_many_were_wrong() -> None:
    pace, asked, steps = Pace(), 0, 0
    while asked < 3000:
        steps += 1
        if n := pace.length(7):
            asked += 1
            pace.observe(n, 0)
            pause = 0
        else:
            pause += 1
            assert pause <= 16
    assert steps == 1 + 1 + 4 + 8 + 16 + 17 * 2995
    while not (n := pace.length(7)):
        pass
    pace.observe(n, n)  # one that was right makes the pace that of a new one
    assert pace.length(7) == 2 * n


@pytest.mark.parametrize(("length", "kept"), [(9, [*range(1, 9)]), (10, [2, 4, 6, 8, 9]), (10_001, 7)])
def test_a_prompt_has_eight_checkpoints_at_most(length: int, kept: list[int] | int) -> None:
    plan = [*plan_checkpoints(0, 0, length, 1, interval=1)]
    assert plan == kept if isinstance(kept, list) else kept / 2 < len(plan) <= 8


@pytest.mark.parametrize("waiting", [1, 127, 128, 129, 1000])
def test_the_first_128_requests_are_ranked(waiting: int) -> None:
    """Also where a later one would come first by its hit."""
    looked: list[int] = []
    cache: Any = SimpleNamespace(
        tree=SimpleNamespace(components=[]), peek=lambda number, namespace: looked.append(number) or number
    )
    queue = WaitingQueue(cache, SimpleNamespace(age_limit_s=5.0), 0.0)  # type: ignore[arg-type]
    for number in reversed(range(waiting)):
        queue.sequences[f"{number}"] = Waiting(number)  # type: ignore[assignment]
    ranked = [each.number for each, _ in queue.rank()]  # type: ignore[attr-defined]
    assert sorted(looked) == [*range(min(waiting, 128))]
    assert ranked == [*reversed(range(min(waiting, 128)))]


class Waiting:
    """What a queue reads of a request that waits; the hit of the tests' cache is its number."""

    def __init__(self, number: int) -> None:
        self.number, self.was_preempted, self.arrived_s, self._arrival = number, False, 0.0, number
        self.most_cached = None
        self.request = SimpleNamespace(namespace=None, priority=0)
        self.tokens = SimpleNamespace(encoded=lambda: number)

    def precedence(self) -> tuple[int, bool, int]:
        return 0, True, self.number


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 1000])
def test_a_request_begins_four_prefetches_at_most(steps: int) -> None:
    begun = 0

    def prefetch(*_: Any, **__: Any) -> None:
        nonlocal begun
        begun += 1  # there are too many under way

    tiers = SimpleNamespace(prefetch=prefetch, can_prefetch=True, declined=None)
    cache: Any = SimpleNamespace(enabled=True, tiers=tiers)
    tokens: Any = SimpleNamespace(encoded=lambda: SimpleNamespace(symbols=[]))
    made = PromptPrefetch(cache, tokens, None, SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(steps):
        assert not made.waits(again=True)
    assert begun == min(steps, 4)
    assert not made.waits(again=False) and begun == min(steps, 4)


def test_the_newest_65536_pages_that_were_not_stored_are_known() -> None:
    unstored, prompt = Unstored(1), np.arange(65_538, dtype=np.int32)
    unstored.add(prompt[:65_536], b"", 0)
    assert unstored.find(prompt[:10], b"") == (0, 10)
    unstored.add(prompt[:3], b"", 2)  # known already: it is the newest again, and takes no more room
    assert unstored.find(prompt[:10], b"") == (0, 10)
    unstored.add(prompt, b"", 65_536)
    assert unstored.find(prompt[:10], b"") == (2, 10)
    assert unstored.find(prompt[:10], b"another") == (0, 0)
