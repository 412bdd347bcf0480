"""The positions at which a request keeps a copy of its recurrent state; its chunks end there.

    0 ---- hit ------- x ------- reach -- x -- mark ----- end -- length     positions are page boundaries
            |          |           |      |      |          |
            starts     |        branch    |      |         end of the prompt: make room for these three
            here       +------ interval --+------+         these take free slots only

A state is worth a slot where another sequence will part from this one. Two such positions are known. At `reach` this
prompt parts from what the tree has: KV was there and a state was not, so another sequence shares what is before it. At
the end of the prompt, the same prompt and its continuations start. After `reach` the structure of the prompt says more:
its marks are where messages begin. Up to `reach` the tree knows better, because other prompts parted there or did not.
Checkpoints at regular positions are a guess. They are the same for all requests, and never evict other states.

This module does not know slots, trees or models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Reason = Literal["branch", "mark", "end", "regular"]
"""Why the state before a position is kept. Other states may be evicted for it, unless the position is regular."""

MOST_MARKS = 2
"""Marks of one prompt at which states are kept. Each takes a slot from another prompt."""


class AtomicSpan(NamedTuple):
    """Positions [start, end) that must be computed in one forward."""

    start: int
    end: int


def plan_checkpoints(
    hit: int,
    reach: int,
    length: int,
    page_size: int,
    *,
    marks: Sequence[int] = (),
    interval: int = 0,
    limit: int = 8,
    atomic: Sequence[AtomicSpan] = (),
) -> dict[int, Reason]:
    """Chooses the checkpoints of a prompt.

    The end of the prompt is the last page boundary at or before its last token, even if the prompt fills its last page.
    One token is always left to compute, so a state after the last token would serve only longer prompts, and save them
    one page more than this one does.

    A mark counts at the last page boundary at or before it, and only between the branching point and the end. Of more
    than `MOST_MARKS`, those are chosen that save most if other prompts part at each mark equally often.

    Regular positions are multiples of the interval, counted from 0. If there are too many, the interval doubles, so
    that the positions of a longer prompt are among those of a shorter one.

    Args:
        hit: positions that need no compute; no checkpoint is at or before it.
        reach: how far the tree has KV of this prompt, at least `hit`.
        length: positions of the prompt.
        page_size: positions per page.
        marks: positions in [0, length] where other prompts are expected to part from this one, in any order.
        interval: positions between regular checkpoints, rounded to a multiple of the page size; 0: there are none.
        limit: checkpoints in all. The branching point comes first, then the end, marks, and regular ones.
        atomic: spans of the prompt, disjoint and ascending; no checkpoint is inside one.

    Returns:
        The reasons by position: page boundaries, ascending, all in (hit, length).
    """
    assert 0 <= hit <= reach and page_size >= 1 and interval >= 0 and limit >= 0
    end = last_boundary(length - 1, page_size, atomic)
    branch = min(last_boundary(reach, page_size, atomic), end)
    known: dict[int, Reason] = {branch: "branch", end: "end"}
    plan = dict([planned for planned in known.items() if planned[0] > hit][:limit])
    start = max(hit, branch)
    ends = {last_boundary(mark, page_size, atomic) for mark in marks}
    between = sorted(at for at in ends if start < at < end)
    plan |= dict.fromkeys(most_saving(start, between, min(MOST_MARKS, limit - len(plan))), "mark")
    regular = _regular(hit, end, math.lcm(interval, page_size), limit - len(plan), {*plan}, atomic)
    plan |= dict.fromkeys(regular, "regular")
    return dict(sorted(plan.items()))


def most_saving(start: int, marks: Sequence[int], limit: int) -> list[int]:
    """Returns at most `limit` of the marks, one after another the one that saves most.

    Other prompts are taken to part at each mark equally often. A prompt computes what is between the last state before
    the mark and the mark. So a state at a mark saves the distance to the state before it, once for each mark from there
    up to the next state.

    Args:
        start: the position of the last state before the marks.
        marks: ascending and distinct, all after `start`.
        limit: 0 or less: none.
    """
    chosen: list[int] = []

    def saved(mark: int) -> int:
        before = max([start, *(kept for kept in chosen if kept < mark)])
        after = min((kept for kept in chosen if kept > mark), default=math.inf)
        return (mark - before) * sum(mark <= other < after for other in marks)

    for _ in range(min(limit, len(marks))):
        chosen.append(max((mark for mark in marks if mark not in chosen), key=saved))
    return chosen


def last_boundary(position: int, page_size: int, atomic: Sequence[AtomicSpan]) -> int:
    """Returns the last page boundary at or before `position` that is inside no span."""
    boundary = position // page_size * page_size
    while span := _around(boundary, atomic):
        boundary = span.start // page_size * page_size
    return boundary


def chunk_end(computed: int, budget: int, checkpoints: Iterable[int], atomic: Sequence[AtomicSpan] = ()) -> int:
    """Returns where the chunk that begins at `computed` ends: at the next checkpoint at most, and never inside a span.

    Args:
        computed: positions done, not inside a span.
        budget: positions that may be computed, at least 1 and no more than are left.
        checkpoints: positions; those at or before `computed`, and those inside a span, do not count.
        atomic: spans of the prompt, disjoint and ascending.

    Returns:
        A position after `computed`. It is more than `budget` away only if a longer span begins at `computed`.
    """
    assert budget >= 1
    ahead = (at for at in checkpoints if at > computed and _around(at, atomic) is None)
    end = min(computed + budget, min(ahead, default=computed + budget))
    span = _around(end, atomic)
    if span is None:
        return end
    return span.start if span.start > computed else span.end


def _regular(hit: int, end: int, step: int, limit: int, taken: set[int], atomic: Sequence[AtomicSpan]) -> list[int]:
    """Returns the multiples of `step` in (hit, end) that are not taken; doubles `step` until `limit` is kept."""
    while step and limit > 0:
        multiples = range((hit // step + 1) * step, end, step)
        free = [at for at in multiples if at not in taken and _around(at, atomic) is None]
        if len(free) <= limit:
            return free
        step *= 2
    return []


def _around(position: int, atomic: Sequence[AtomicSpan]) -> AtomicSpan | None:
    """Returns the span that `position` would split, if any."""
    return next((span for span in atomic if span.start < position < span.end), None)
