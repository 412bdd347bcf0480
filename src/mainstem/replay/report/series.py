"""The contents of a replay's charts: curves and their looks, computed from rows. Draws nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mainstem.replay.info import TraceInfo
from mainstem.replay.simulate import optimum
from mainstem.replay.simulate.rows import Row, Timeline

Point = tuple[float, float]

MAX_SPANS = 60
"""Maximum number of points of a curve over time."""

TIER_COLOURS = {"device": "#0072B2", "host": "#E69F00", "storage": "#009E73"}
COMPUTED_COLOUR = "#dddddd"
LIMIT_LINE = "unlimited cache"
LRU_LINE = "lru by reuse distances"


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a curve. The colours are safe for colour-blind readers (Okabe and Ito, "Color Universal Design",
    2008), and no two looks differ only in colour.

    Args:
        colour: as #rrggbb.
        dash: lengths on and off; empty: a solid line.
        marker: circle, square, triangle or diamond.
    """

    colour: str
    dash: tuple[int, ...] = ()
    marker: str = "circle"


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES: tuple[tuple[int, ...], ...] = ((), (2, 3), (8, 3, 2, 3))
_MARKERS = ("circle", "square", "triangle", "diamond")
_OPTIMUM = Look("#111111", (6, 4), "square")
BACKGROUND = Look("#c4c4c4")
LIMIT = Look("#777777", (2, 4))


@dataclass(frozen=True, slots=True)
class Measure:
    """A share that each row has.

    Args:
        name: the quantity of which it is a share.
        label: label of the axis.
        of: computes the share of a row.
        ideal: the share of an unlimited cache; None: unknown.
    """

    name: str
    label: str
    of: Callable[[Row], float]
    ideal: float | None


def measures(info: TraceInfo, rows: Sequence[Row]) -> list[Measure]:
    """Returns the measures that all rows have."""
    found = [
        Measure("Blocks", "share of blocks hit", lambda row: row.block_hit_rate, info.block_hit_rate),
        Measure("Tokens", "share of tokens hit", lambda row: row.token_hit_rate, info.token_hit_rate),
    ]
    if all(row.prefill_flops for row in rows):
        found.append(Measure("Prefill FLOPs", "share of prefill FLOPs saved", _saved, None))
    return found


def _saved(row: Row) -> float:
    return (row.saved_flops or 0.0) / (row.prefill_flops or 1.0)


def looks(rows: Sequence[Row]) -> dict[str, Look]:
    """Returns the look of each policy, in the order of the rows."""
    names = [name for name in dict.fromkeys(row.policy for row in rows) if name != optimum.NAME]
    found = {name: _look(at) for at, name in enumerate(names)}
    return {name: found.get(name, _OPTIMUM) for name in dict.fromkeys(row.policy for row in rows)}


def back_to_front(looks: Mapping[str, Look]) -> list[tuple[str, Look]]:
    """Returns the looks in drawing order: the optimum first, so that it does not cover the others."""
    return sorted(looks.items(), key=lambda item: item[0] != optimum.NAME)


def _look(at: int) -> Look:
    colours = len(_COLOURS)
    return Look(_COLOURS[at % colours], _DASHES[at // colours % len(_DASHES)], _MARKERS[at % len(_MARKERS)])


def by_capacity(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Groups rows by capacity in blocks, the smallest first; each group has one row per policy, in row order."""
    once = {(row.policy, row.capacity_blocks): row for row in rows}
    ordered = sorted(once.values(), key=lambda row: row.capacity_blocks)
    return {capacity: list(same) for capacity, same in groupby(ordered, lambda row: row.capacity_blocks)}


def curve(rows: Sequence[Row], policy: str, measure: Measure) -> list[Point]:
    """Returns the curve of one policy: capacity in blocks, and the measure."""
    own = {row.capacity_blocks: measure.of(row) for row in rows if row.policy == policy}
    return [(float(capacity), own[capacity]) for capacity in sorted(own)]


def lru_curve(info: TraceInfo, rows: Sequence[Row]) -> list[Point]:
    """Returns LRU's block hit rate at powers of two, from reuse distances; empty unless the rows are of one cache."""
    if any(row.replicas > 1 or len(row.tiers) > 1 or row.ttl_s is not None for row in rows):
        return []
    return [(float(reuse.high), reuse.lru_hit_rate) for reuse in info.reuses]


def domain(rows: Sequence[Row]) -> Point:
    """Returns the smallest and the largest capacity to show, with some margin."""
    capacities = [row.capacity_blocks for row in rows]
    return min(capacities) / 1.5, max(capacities) * 1.5


def marked(blocks: int, info: TraceInfo) -> str:
    """Formats a capacity as a share of the distinct blocks."""
    percent = 100 * blocks / max(1, info.distinct_blocks)
    return f"{round(percent, 1):,g} %" if percent >= 0.095 else f"{percent:.2g} %"


def doublings(distance: float) -> float:
    """Returns the place of a reuse distance on the axis: 0 to 1 below a distance of 1, then 1 for each doubling."""
    return math.log2(distance) + 1 if distance >= 1 else distance


def decades(info: TraceInfo) -> list[tuple[float, str]]:
    """Returns the powers of ten among the reuse distances: their places and labels."""
    highest = max((reuse.high for reuse in info.reuses), default=1)
    return [(doublings(10.0**power), f"{10**power:,}") for power in range(len(str(highest)))]


def merged(timeline: Timeline, max_spans: int = MAX_SPANS) -> Timeline:
    """Merges a timeline into wider spans, at most `max_spans` of them."""
    step = max(1, -(-len(timeline.block_accesses) // max_spans))
    starts = range(0, len(timeline.block_accesses), step)
    accesses, hits = (
        tuple(sum(counts[at : at + step]) for at in starts) for counts in (timeline.block_accesses, timeline.block_hits)
    )
    return Timeline(timeline.width_s * step, accesses, hits)


def rates(timeline: Timeline) -> list[tuple[float, float | None]]:
    """Returns the middle of each span in seconds, and the share of blocks hit; None: the span has no request."""
    return [
        ((at + 0.5) * timeline.width_s, hits / accesses if accesses else None)
        for at, (accesses, hits) in enumerate(zip(timeline.block_accesses, timeline.block_hits, strict=True))
    ]


def time_unit(span_s: float) -> tuple[float, str]:
    """Returns the unit for a span: its seconds and its name."""
    units: Mapping[float, str] = {1.0: "s", 60.0: "min", 3600.0: "h", 86400.0: "days"}
    fitting = [seconds for seconds in units if span_s >= 3 * seconds]
    seconds = max(fitting, default=1.0)
    return seconds, units[seconds]


def tier_shares(row: Row) -> list[tuple[str, float]]:
    """Returns the share of a row's blocks from each tier; the computed share comes last."""
    accesses = max(1, row.block_accesses)
    return [
        *((tier.name, tier.block_hits / accesses) for tier in row.tiers),
        ("computed", (row.block_accesses - row.block_hits) / accesses),
    ]
