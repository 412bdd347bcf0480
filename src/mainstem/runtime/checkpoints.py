"""Where a request sets its recurrent state aside, and so how far its chunks go.

    0 ---- hit ------- x ------- reach -- x ---------- end -- length      positions are borders of pages
            |          |           |      |             |
            starts     |        branch    |            end of the prompt: make room for these two
            here       +------ interval --+            these take free slots only

A state is worth a slot where another sequence will part from this one. Two such places are known: where this prompt
left what the tree knows (`reach`: KV was there, a state was not, so somebody shares what is before it), and the end of
the prompt, from which the same prompt and its continuations start. The rest is a guess at regular positions, the same
for all requests, and never worth the state of somebody else.

Knows nothing of slots, trees or models.
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
    """A position at which the state is set aside.

    Args:
        position: a border of pages; the state is that of the tokens before it.
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
    most: int = 8,
    atomic: Sequence[Span] = (),
) -> list[Checkpoint]:
    """Choose where a prompt plants states.

    The end of the prompt is the last border at or before its last token, also where the prompt fills its last page: one
    token is always left to compute, so a state behind the last one would serve longer prompts only, and save them one
    page more than this one does.

    Regular positions are multiples of the interval, counted from 0. When they are too many the interval doubles, so
    that those of a longer prompt are among those of a shorter one.

    Args:
        hit: positions that need no compute; nothing is planted at or before it.
        reach: how far the tree has KV of this prompt, at least `hit`.
        length: positions of the prompt.
        page_size: positions a page.
        interval: positions between regular checkpoints, made a multiple of the page size; 0: there are none.
        most: checkpoints in all. The branching point comes first, then the end, then regular ones.
        atomic: spans of the prompt, disjoint and ascending; nothing is planted inside one.

    Returns:
        Ascending by position, all in (hit, length).
    """
    assert 0 <= hit <= reach and page_size >= 1 and interval >= 0 and most >= 0
    end = last_boundary(length - 1, page_size, atomic)
    branch = min(last_boundary(reach, page_size, atomic), end)
    wanted = [position for position in dict.fromkeys((branch, end)) if position > hit][:most]
    regular = _regular(hit, end, math.lcm(interval, page_size), most - len(wanted), {*wanted}, atomic)
    plan = [Checkpoint(position, True) for position in wanted]
    return sorted(plan + [Checkpoint(position, False) for position in regular])


def last_boundary(position: int, page_size: int, atomic: Sequence[Span]) -> int:
    """The last border of pages at or before `position` that is in no span."""
    border = position // page_size * page_size
    while span := _around(border, atomic):
        border = span.start // page_size * page_size
    return border


def chunk_end(computed: int, budget: int, checkpoints: Sequence[Checkpoint], atomic: Sequence[Span] = ()) -> int:
    """How far the chunk that begins at `computed` may go: to the next checkpoint at most, and never into a span.

    Args:
        computed: positions done, not inside a span.
        budget: positions that may be computed, at least 1 and no more than are left.
        checkpoints: of the prompt; those at or before `computed`, and those inside a span, do not count.
        atomic: spans of the prompt, disjoint and ascending.

    Returns:
        A position behind `computed`; more than `budget` away only if a span that is longer begins there.
    """
    assert budget >= 1
    ahead = (at for at, _ in checkpoints if at > computed and _around(at, atomic) is None)
    end = min(computed + budget, min(ahead, default=computed + budget))
    span = _around(end, atomic)
    if span is None:
        return end
    return span.start if span.start > computed else span.end


def _regular(hit: int, end: int, step: int, most: int, taken: set[int], atomic: Sequence[Span]) -> list[int]:
    """Multiples of `step`, or of what it doubles to, in (hit, end): at most `most` besides those that are taken."""
    while step and most > 0:
        found = [
            position
            for position in range((hit // step + 1) * step, end, step)
            if position not in taken and _around(position, atomic) is None
        ]
        if len(found) <= most:
            return found
        step *= 2
    return []


def _around(position: int, atomic: Sequence[Span]) -> Span | None:
    """The span that `position` cuts in two."""
    return next((span for span in atomic if span.start < position < span.end), None)
