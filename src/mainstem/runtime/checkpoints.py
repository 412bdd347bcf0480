"""Where a request keeps a copy of its recurrent state, and so where its chunks end.

    0 ---- hit ------- x ------- reach -- x ---------- end -- length      positions are page boundaries
            |          |           |      |             |
            starts     |        branch    |            end of the prompt: make room for these two
            here       +------ interval --+            these take free slots only

A state is worth a slot where another sequence will part from this one. Two such positions are known. At `reach` this
prompt parts from what the tree has: KV was there and a state was not, so another sequence shares what is before it. At
the end of the prompt, the same prompt and its continuations start. Checkpoints at regular positions are a guess. They
are the same for all requests, and never evict other states.

This module does not know slots, trees or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Positions [start, end) that must be computed in one forward."""

    start: int
    end: int


class Checkpoint(NamedTuple):
    """A position at which the state is copied.

    Args:
        position: a page boundary; the state is that of the tokens before it.
        room: whether other states may be evicted for it.
    """

    position: int
    room: bool


def plan_checkpoints(
    hit: int,
    reach: int,
    length: int,
    page_size: int,
    *,
    interval: int = 0,
    limit: int = 8,
    atomic: Sequence[Span] = (),
) -> list[Checkpoint]:
    """Chooses the checkpoints of a prompt.

    The end of the prompt is the last page boundary at or before its last token, even if the prompt fills its last page.
    One token is always left to compute, so a state after the last token would serve only longer prompts, and save them
    one page more than this one does.

    Regular positions are multiples of the interval, counted from 0. If there are too many, the interval doubles, so
    that the positions of a longer prompt are among those of a shorter one.

    Args:
        hit: positions that need no compute; no checkpoint is at or before it.
        reach: how far the tree has KV of this prompt, at least `hit`.
        length: positions of the prompt.
        page_size: positions per page.
        interval: positions between regular checkpoints, rounded to a multiple of the page size; 0: there are none.
        limit: checkpoints in all. The branching point comes first, then the end, then regular ones.
        atomic: spans of the prompt, disjoint and ascending; no checkpoint is inside one.

    Returns:
        Ascending by position, all in (hit, length).
    """
    assert 0 <= hit <= reach and page_size >= 1 and interval >= 0 and limit >= 0
    end = last_boundary(length - 1, page_size, atomic)
    branch = min(last_boundary(reach, page_size, atomic), end)
    wanted = [position for position in dict.fromkeys((branch, end)) if position > hit][:limit]
    regular = _regular(hit, end, math.lcm(interval, page_size), limit - len(wanted), {*wanted}, atomic)
    plan = [Checkpoint(position, True) for position in wanted]
    return sorted(plan + [Checkpoint(position, False) for position in regular])


def last_boundary(position: int, page_size: int, atomic: Sequence[Span]) -> int:
    """Returns the last page boundary at or before `position` that is inside no span."""
    boundary = position // page_size * page_size
    while span := _around(boundary, atomic):
        boundary = span.start // page_size * page_size
    return boundary


def chunk_end(computed: int, budget: int, checkpoints: Sequence[Checkpoint], atomic: Sequence[Span] = ()) -> int:
    """Returns where the chunk that begins at `computed` ends: at the next checkpoint at most, and never inside a span.

    Args:
        computed: positions done, not inside a span.
        budget: positions that may be computed, at least 1 and no more than are left.
        checkpoints: of the prompt; those at or before `computed`, and those inside a span, do not count.
        atomic: spans of the prompt, disjoint and ascending.

    Returns:
        A position after `computed`. It is more than `budget` away only if a longer span begins at `computed`.
    """
    assert budget >= 1
    ahead = (at for at, _ in checkpoints if at > computed and _around(at, atomic) is None)
    end = min(computed + budget, min(ahead, default=computed + budget))
    span = _around(end, atomic)
    if span is None:
        return end
    return span.start if span.start > computed else span.end


def _regular(hit: int, end: int, step: int, limit: int, taken: set[int], atomic: Sequence[Span]) -> list[int]:
    """Returns the multiples of `step` in (hit, end) that are not taken; doubles `step` until `limit` is kept."""
    while step and limit > 0:
        found = [
            position
            for position in range((hit // step + 1) * step, end, step)
            if position not in taken and _around(position, atomic) is None
        ]
        if len(found) <= limit:
            return found
        step *= 2
    return []


def _around(position: int, atomic: Sequence[Span]) -> Span | None:
    """Returns the span that `position` would split, if any."""
    return next((span for span in atomic if span.start < position < span.end), None)
