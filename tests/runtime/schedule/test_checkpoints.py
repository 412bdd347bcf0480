"""Where checkpoints are, and where chunks end."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.runtime.schedule.checkpoints import (
    MOST_MARKS,
    AtomicSpan,
    Reason,
    chunk_end,
    most_saving,
    plan_checkpoints,
)


class Prompt(NamedTuple):
    page_size: int
    hit: int
    reach: int
    length: int
    atomic: list[AtomicSpan]
    marks: list[int]

    def inside(self, position: int) -> bool:
        return any(span.start < position < span.end for span in self.atomic)

    def boundary(self, position: int) -> int:
        """The last page boundary at or before a position, outside all spans."""
        return max(at for at in range(0, position + 1, self.page_size) if not self.inside(at))

    def plan(self, interval: int, limit: int) -> dict[int, Reason]:
        return plan_checkpoints(
            self.hit,
            self.reach,
            self.length,
            self.page_size,
            marks=self.marks,
            interval=interval,
            limit=limit,
            atomic=self.atomic,
        )


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    length = draw(st.integers(1, 60 * page_size))
    bounds = sorted(draw(st.lists(st.integers(0, length), max_size=8, unique=True)))
    atomic = [AtomicSpan(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=False)]
    inside = {p for span in atomic for p in range(span.start + 1, span.end)}
    starts = [p for p in range(0, length, page_size) if p not in inside]
    hit = draw(st.sampled_from(starts))
    reach = draw(st.integers(hit // page_size, length // page_size)) * page_size
    marks = draw(st.lists(st.integers(0, length), max_size=6))
    return Prompt(page_size, hit, reach, length, atomic, marks)


intervals = st.sampled_from([0, 1, 3, 8, 16, 24, 64])
caps = st.integers(0, 10)


@given(prompts(), intervals, caps)
def test_checkpoints_are_page_boundaries_between_hit_and_last_token(p: Prompt, interval: int, limit: int) -> None:
    plan = p.plan(interval, limit)
    assert list(plan) == sorted(plan)
    assert len(plan) <= limit
    for position in plan:
        assert p.hit < position < p.length
        assert position % p.page_size == 0
        assert not p.inside(position)


@given(prompts(), intervals, st.integers(2, 10))
def test_the_branching_point_the_end_and_marks_make_room(p: Prompt, interval: int, limit: int) -> None:
    plan = p.plan(interval, limit)
    open_ = [at for at in range(p.hit + 1, p.length) if at % p.page_size == 0 and not p.inside(at)]
    wanted = {max((at for at in open_ if at <= bound), default=p.hit) for bound in (p.reach, p.length - 1)} - {p.hit}
    assert {at for at, reason in plan.items() if reason in ("branch", "end")} == wanted


@given(prompts(), intervals, caps)
def test_marks_count_at_the_boundary_before_them_and_after_what_the_tree_knows(
    p: Prompt, interval: int, limit: int
) -> None:
    plan = p.plan(interval, limit)
    kept = [at for at, reason in plan.items() if reason == "mark"]
    known, end = max(p.hit, p.boundary(p.reach)), p.boundary(p.length - 1)
    borders = {p.boundary(mark) for mark in p.marks}
    between = {at for at in borders if known < at < end}
    room = limit - sum(reason in ("branch", "end") for reason in plan.values())
    assert set(kept) <= between
    assert len(kept) == min(len(between), MOST_MARKS, room)


def computed(start: int, kept: list[int], marks: list[int]) -> int:
    """What is computed if one prompt parts at each mark: from the last state at or before it."""
    return sum(mark - max(at for at in [start, *kept] if at <= mark) for mark in marks)


@given(st.integers(0, 50), st.sets(st.integers(1, 200), max_size=7), st.integers(-1, 4))
def test_each_mark_that_is_chosen_saves_the_most_that_is_left_to_save(start: int, after: set[int], limit: int) -> None:
    marks = sorted(start + each for each in after)
    chosen = most_saving(start, marks, limit)
    assert len(chosen) == min(max(limit, 0), len(marks))
    for i, mark in enumerate(chosen):
        left = [other for other in marks if other not in chosen[:i]]
        best = min(computed(start, [*chosen[:i], other], marks) for other in left)
        assert computed(start, [*chosen[:i], mark], marks) == best


@given(prompts(), st.integers(1, 64), caps)
def test_regular_checkpoints_are_multiples_of_the_interval_and_of_a_page(p: Prompt, interval: int, limit: int) -> None:
    regular = [at for at, reason in p.plan(interval, limit).items() if reason == "regular"]
    assert all(position % interval == 0 for position in regular)


@given(prompts(), st.integers(1, 64), st.integers(1, 10), st.integers(0, 500))
def test_a_longer_prompt_has_the_checkpoints_of_a_shorter_one(p: Prompt, interval: int, limit: int, more: int) -> None:
    """So that each checkpoint of their shared prefix is kept once."""
    longer = p._replace(length=p.length + more, reach=p.hit, marks=[])
    shorter = p._replace(reach=p.hit, marks=[])
    planned = longer.plan(interval, limit).items()
    shared = {at for at, reason in planned if reason == "regular" and at < p.length - p.page_size}
    assert shared <= shorter.plan(interval, limit).keys()


@pytest.mark.parametrize(
    ("arguments", "interval", "limit", "expected"),
    [
        ((0, 0, 40), 0, 8, [(32, "end")]),
        ((0, 0, 48), 0, 8, [(32, "end")]),  # a state at 48 would not serve the same prompt again
        ((0, 0, 49), 0, 8, [(48, "end")]),
        ((0, 0, 16), 0, 8, []),
        ((32, 32, 40), 0, 8, []),
        ((0, 16, 40), 0, 8, [(16, "branch"), (32, "end")]),
        ((16, 16, 40), 0, 8, [(32, "end")]),  # no prompt parts where a state is already
        ((0, 48, 48), 0, 8, [(32, "end")]),  # all of it was known except the state
        ((0, 16, 40), 0, 1, [(16, "branch")]),
        ((0, 16, 40), 0, 0, []),
        ((0, 16, 200), 64, 8, [(16, "branch"), (64, "regular"), (128, "regular"), (192, "end")]),
        ((64, 64, 200), 64, 8, [(128, "regular"), (192, "end")]),
        ((0, 64, 200), 64, 8, [(64, "branch"), (128, "regular"), (192, "end")]),
        ((0, 0, 200), 24, 8, [(48, "regular"), (96, "regular"), (144, "regular"), (192, "end")]),
        ((0, 0, 1000), 64, 5, [(256, "regular"), (512, "regular"), (768, "regular"), (992, "end")]),
        ((0, 0, 1000), 64, 1, [(992, "end")]),
    ],
)
def test_plans(arguments: tuple[int, int, int], interval: int, limit: int, expected: list[tuple[int, str]]) -> None:
    assert plan_checkpoints(*arguments, 16, interval=interval, limit=limit) == dict(expected)


@pytest.mark.parametrize(
    ("known", "marks", "limit", "expected"),
    [
        (0, [100], 8, [96]),
        (0, [100, 15, 399, 400], 8, [96]),  # the first page, and the end of the prompt, need no mark
        (96, [100], 8, []),  # KV is there: if others had parted there, they would have left a state
        (96, [100, 150], 8, [144]),
        (0, [100], 1, []),  # the end comes first
        (0, [50, 100, 150, 200], 8, [96, 144]),
        (0, [300, 310, 350], 8, [288, 336]),
    ],
)
def test_plans_with_marks(known: int, marks: list[int], limit: int, expected: list[int]) -> None:
    plan = plan_checkpoints(0, known, 400, 16, marks=marks, limit=limit)
    assert [at for at, reason in plan.items() if reason == "mark"] == expected


def test_what_would_be_inside_a_span_moves_before_it() -> None:
    spans = [AtomicSpan(20, 70), AtomicSpan(100, 130)]
    plan = plan_checkpoints(0, 48, 120, 16, interval=16, atomic=spans)
    assert plan == {16: "branch", 80: "regular", 96: "end"}


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
    assert plan.keys() <= set(stops)


@given(prompts(), intervals, caps, st.integers(1, 70))
def test_chunks_are_as_long_as_may_be(p: Prompt, interval: int, limit: int, budget: int) -> None:
    plan = p.plan(interval, limit)
    end = chunk_end(p.hit, budget, plan, p.atomic)
    for further in range(end + 1, p.hit + budget + 1):
        assert p.inside(further) or any(p.hit < at < further for at in plan)


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
    assert chunk_end(computed, budget, [32, 64], [AtomicSpan(50, 90)]) == expected
