"""How many replicas there should be: by the queue, and by hits that are missed because memory is short."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.fleet.front.policy import ReplicaPolicy
from mainstem.fleet.scaling import Seen, Window, wanted
from mainstem.settings.fleet import Autoscaling

BY_QUEUE = Autoscaling(min=1, max=4, target_ongoing=8)
BY_HITS = Autoscaling(min=1, max=4, target_ongoing=8, min_hit_rate=0.5)
SHORT, FULL, GOOD = Seen(1000, 400, 20), Seen(1000, 700, 20), Seen(1000, 400, 0)


@given(st.integers(1, 4), st.floats(0, 100), st.lists(st.builds(Seen, *[st.floats(0, 1000)] * 3), max_size=4))
def test_it_stays_within_its_bounds_and_follows_the_queue(current: int, ongoing: float, seen: list[Seen]) -> None:
    found = wanted(current, ongoing, BY_QUEUE, seen)
    assert 1 <= found <= 4
    assert found == 4 or found * 8 >= ongoing
    assert found == 1 or (found - 1) * 8 < ongoing
    assert wanted(current, ongoing, BY_HITS, seen) >= found


def test_one_more_where_hits_are_missed_because_memory_is_short() -> None:
    assert wanted(2, 3, BY_HITS, [SHORT, GOOD]) == 3
    assert wanted(4, 3, BY_HITS, [SHORT]) == 4
    assert wanted(2, 3, BY_QUEUE, [SHORT, GOOD]) == 1
    assert wanted(2, 30, BY_HITS, [SHORT]) == 4


def test_memory_that_is_used_is_kept_and_other_misses_need_no_memory() -> None:
    assert wanted(3, 3, BY_HITS, [FULL, FULL]) == 3  # with fewer, what is hit would be evicted
    assert wanted(3, 3, BY_HITS, [GOOD, GOOD]) == 1  # new prompts, and there is room
    assert wanted(3, 0, BY_HITS, [Seen(0, 0, 5)]) == 3
    assert wanted(3, 0, BY_HITS, []) == 1


def test_a_window_counts_what_is_recent() -> None:
    window = Window(60.0)
    assert window.add(0, Seen(100, 50, 3)) == Seen()
    assert window.add(30, Seen(150, 60, 3)) == Seen(50, 10, 0)
    assert window.add(60, Seen(200, 60, 4)) == Seen(100, 10, 1)
    assert window.add(100, Seen(300, 60, 4)) == Seen(150, 0, 1)
    assert window.add(1000, Seen(300, 60, 4)) == Seen()


@pytest.mark.parametrize(
    ("at_s", "since"), [(59.9, 0.0), (60.0, 0.0), (89.9, 0.0), (90.0, 30.0), (90.1, 30.0), (1e6, 60.0)]
)
def test_a_window_begins_with_the_last_count_that_is_as_old_as_it_is_long(at_s: float, since: float) -> None:
    window = Window(60.0)
    for then_s in (0.0, 30.0, 60.0)[: 3 if at_s > 60 else 2]:
        window.add(then_s, Seen(then_s, 0, 0))
    assert window.add(at_s, Seen(100.0, 0, 0)) == Seen(100.0 - since, 0, 0)


@pytest.mark.parametrize(("cached", "replicas"), [(0, 3), (499, 3), (500, 2), (501, 2), (1000, 2)])
def test_another_one_is_started_below_the_hit_rate_and_not_at_it(cached: float, replicas: int) -> None:
    scaling = Autoscaling(min=1, max=4, min_hit_rate=0.5)
    assert wanted(2, 0, scaling, [Seen(600, cached, 1), Seen(400, 0, 0)]) == replicas


def test_serves_policy_takes_the_counts_of_every_replica() -> None:
    counts = {name: {"a": getattr(SHORT, name), "b": getattr(GOOD, name)} for name in asdict(SHORT)}
    context = SimpleNamespace(aggregated_metrics=counts, total_num_requests=3, target_num_replicas=2)
    assert ReplicaPolicy(**vars(BY_HITS))(context) == (3, {})
    assert ReplicaPolicy(**vars(BY_QUEUE))(context) == (1, {})
    context.aggregated_metrics = None
    assert ReplicaPolicy(**vars(BY_HITS))(context) == (1, {})


def test_counts_go_from_process_to_process() -> None:
    assert Seen.of(asdict(SHORT)) == SHORT
    assert Seen.of({}) == Seen()
