"""Where checkpoints are, and where chunks end."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.runtime.checkpoints import Checkpoint, Span, chunk_end, plan_checkpoints


class Prompt(NamedTuple):
    page_size: int
    hit: int
    reach: int
    length: int
    atomic: list[Span]

    def inside(self, position: int) -> bool:
        return any(span.start < position < span.end for span in self.atomic)

    def plan(self, interval: int, limit: int) -> list[Checkpoint]:
        return plan_checkpoints(
            self.hit, self.reach, self.length, self.page_size, interval=interval, limit=limit, atomic=self.atomic
        )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    length = draw(st.integers(1, 60 * page_size))
    bounds = sorted(draw(st.lists(st.integers(0, length), max_size=8, unique=True)))
    atomic = [Span(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=False)]
    inside = {p for span in atomic for p in range(span.start + 1, span.end)}
    starts = [p for p in range(0, length, page_size) if p not in inside]
    hit = draw(st.sampled_from(starts))
    reach = draw(st.integers(hit // page_size, length // page_size)) * page_size
    return Prompt(page_size, hit, reach, length, atomic)


intervals = st.sampled_from([0, 1, 3, 8, 16, 24, 64])
caps = st.integers(0, 10)


def positions(plan: list[Checkpoint]) -> list[int]:
    return [checkpoint.position for checkpoint in plan]


@given(prompts(), intervals, caps)
def test_checkpoints_are_page_boundaries_between_hit_and_last_token(p: Prompt, interval: int, limit: int) -> None:
    plan = positions(p.plan(interval, limit))
    assert plan == sorted(set(plan))
    assert len(plan) <= limit
    for position in plan:
        assert p.hit < position < p.length
        assert position % p.page_size == 0
        assert not p.inside(position)


@given(prompts(), intervals, st.integers(2, 10))
def test_the_branching_point_and_the_end_make_room(p: Prompt, interval: int, limit: int) -> None:
    plan = p.plan(interval, limit)
    open_ = [at for at in range(p.hit + 1, p.length) if at % p.page_size == 0 and not p.inside(at)]
    wanted = {max((at for at in open_ if at <= bound), default=p.hit) for bound in (p.reach, p.length - 1)} - {p.hit}
    assert {checkpoint.position for checkpoint in plan if checkpoint.room} == wanted


@given(prompts(), st.integers(1, 64), caps)
def test_regular_checkpoints_are_multiples_of_the_interval_and_of_a_page(p: Prompt, interval: int, limit: int) -> None:
    regular = [checkpoint.position for checkpoint in p.plan(interval, limit) if not checkpoint.room]
    assert all(position % interval == 0 for position in regular)


@given(prompts(), st.integers(1, 64), st.integers(1, 10), st.integers(0, 500))
def test_a_longer_prompt_has_the_checkpoints_of_a_shorter_one(p: Prompt, interval: int, limit: int, more: int) -> None:
    """So that each checkpoint of their shared prefix is kept once."""
    longer = p._replace(length=p.length + more, reach=p.hit)
    shorter = p._replace(reach=p.hit)
    shared = [at for at, room in longer.plan(interval, limit) if not room and at < p.length - p.page_size]
    assert set(shared) <= set(positions(shorter.plan(interval, limit)))


@pytest.mark.parametrize(
    ("arguments", "interval", "limit", "expected"),
    [
        ((0, 0, 40), 0, 8, [(32, True)]),
        ((0, 0, 48), 0, 8, [(32, True)]),  # a state at 48 would not serve the same prompt again
        ((0, 0, 49), 0, 8, [(48, True)]),
        ((0, 0, 16), 0, 8, []),
        ((32, 32, 40), 0, 8, []),
        ((0, 16, 40), 0, 8, [(16, True), (32, True)]),
        ((16, 16, 40), 0, 8, [(32, True)]),  # no prompt parts where a state is already
        ((0, 48, 48), 0, 8, [(32, True)]),  # all of it was known except the state
        ((0, 16, 40), 0, 1, [(16, True)]),
        ((0, 16, 40), 0, 0, []),
        ((0, 16, 200), 64, 8, [(16, True), (64, False), (128, False), (192, True)]),
        ((64, 64, 200), 64, 8, [(128, False), (192, True)]),
        ((0, 64, 200), 64, 8, [(64, True), (128, False), (192, True)]),
        ((0, 0, 200), 24, 8, [(48, False), (96, False), (144, False), (192, True)]),
        ((0, 0, 1000), 64, 5, [(256, False), (512, False), (768, False), (992, True)]),
        ((0, 0, 1000), 64, 1, [(992, True)]),
    ],
)
def test_plans(arguments: tuple[int, int, int], interval: int, limit: int, expected: list[tuple[int, bool]]) -> None:
    assert plan_checkpoints(*arguments, 16, interval=interval, limit=limit) == expected


def test_what_would_be_inside_a_span_moves_before_it() -> None:
    spans = [Span(20, 70), Span(100, 130)]
    plan = plan_checkpoints(0, 48, 120, 16, interval=16, atomic=spans)
    assert plan == [(16, True), (80, False), (96, True)]


@given(prompts(), intervals, caps, st.integers(1, 70))
def test_chunks_stop_at_every_checkpoint_and_cut_no_span(p: Prompt, interval: int, limit: int, budget: int) -> None:
    plan = p.plan(interval, limit)
    computed, stops = p.hit, []
    while computed < p.length:
        end = chunk_end(computed, min(budget, p.length - computed), plan, p.atomic)
        assert computed < end <= p.length
        assert not p.inside(end)
        if end > computed + budget:
            assert any(span.start <= computed and span.end == end for span in p.atomic)
        computed = end
        stops.append(end)
    assert set(positions(plan)) <= set(stops)


@given(prompts(), intervals, caps, st.integers(1, 70))
def test_chunks_are_as_long_as_may_be(p: Prompt, interval: int, limit: int, budget: int) -> None:
    plan = p.plan(interval, limit)
    end = chunk_end(p.hit, budget, plan, p.atomic)
    for further in range(end + 1, p.hit + budget + 1):
        assert p.inside(further) or any(p.hit < at < further for at in positions(plan))


@pytest.mark.parametrize(
    ("computed", "budget", "expected"),
    [
        (0, 10, 10),
        (0, 40, 32),  # the checkpoint
        (32, 40, 50),  # the span after it begins
        (50, 4, 90),  # a span is longer than the budget
        (50, 60, 110),
        (32, 58, 90),
    ],
)
def test_chunks(computed: int, budget: int, expected: int) -> None:
    assert chunk_end(computed, budget, [Checkpoint(32, True), Checkpoint(64, False)], [Span(50, 90)]) == expected
