"""Draws the charts of a replay as one image, with matplotlib (the extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mainstem.errors import BadArgument
from mainstem.imports import needs
from mainstem.replay.info import TraceInfo
from mainstem.replay.report import series
from mainstem.replay.simulate import optimum
from mainstem.replay.simulate.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}


def check_plot(path: str | PathLike[str]) -> None:
    """Checks that an image can be drawn, before hours are spent on its contents.

    Raises:
        BadArgument: the file has an unsupported suffix.
        BackendUnavailable: matplotlib is missing.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise BadArgument("plot", str(path), f"a file that ends in {', '.join(_SUFFIXES)}")
    with needs("matplotlib", "a plot needs matplotlib: pip install 'mainstem[plot]'"):
        import matplotlib  # noqa: F401


def write_plot(path: str | PathLike[str], info: TraceInfo, rows: Sequence[Row]) -> None:
    """Draws hit rates by capacity, reuse distances, and, at the middle capacity, hits over time and by tier.

    Args:
        path: the file, .png, .svg or .pdf.
        info: statistics of the replayed trace.
        rows: one or more rows, as returned by `sweep`.

    Raises:
        BadArgument: there are no rows, or the file has an unsupported suffix.
        BackendUnavailable: matplotlib is missing.
        OSError: the file cannot be written.
    """
    check_plot(path)
    if not rows:
        raise BadArgument("rows", rows, "one row or more")
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 9), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        figure.suptitle(f"Replay of {info.trace}", fontsize=14)
        (rates, time), (tiers, reuse) = figure.subplots(2, 2)
        capacities = series.by_capacity(rows)
        middle = list(capacities)[(len(capacities) - 1) // 2]
        at = f" at {middle:,} blocks ({series.marked(middle, info)})"
        draw_rates = _draw_rates if len(capacities) > 1 else _draw_rate
        draw_rates(rates, info, rows)
        _draw_time(time, series.looks(rows), capacities[middle], at)
        _draw_tiers(tiers, capacities[middle], at)
        _draw_reuse(reuse, info)
        lines, names = (rates if len(capacities) > 1 else time).get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(path)


def _draw_rates(axes: Axes, info: TraceInfo, rows: Sequence[Row]) -> None:
    blocks = series.measures(info, rows)[0]
    low, high = series.domain(rows)
    if exact := [point for point in series.lru_curve(info, rows) if low <= point[0] <= high]:
        axes.plot(*zip(*exact, strict=True), color=series.BACKGROUND.colour, linewidth=5, label=series.LRU_LINE)
    axes.axhline(info.block_hit_rate, color=series.LIMIT.colour, linestyle=":", label=series.LIMIT_LINE)
    for policy, look in series.back_to_front(series.looks(rows)):
        xs, ys = zip(*series.curve(rows, policy, blocks), strict=True)
        style = (0, look.dash) if look.dash else "-"
        axes.plot(xs, ys, color=look.colour, linestyle=style, marker=_MARKERS[look.marker], label=_label(policy))
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = _spaced(list(series.by_capacity(rows)), math.log(high / low) / 11)
    axes.set_xticks(ticks, [f"{at:,}\n{series.marked(at, info)}" for at in ticks], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("capacity in blocks, and of all distinct blocks (log scale)")
    _shares(axes, "Hit rate by capacity", blocks.label)


def _draw_rate(axes: Axes, info: TraceInfo, rows: Sequence[Row]) -> None:
    """Draws bars: one capacity has no curve."""
    blocks = series.measures(info, rows)[0]
    (capacity,) = series.by_capacity(rows)
    shares = {policy: dict(series.curve(rows, policy, blocks))[capacity] for policy in series.looks(rows)}
    shares[series.LIMIT_LINE] = info.block_hit_rate
    colours = ["#56B4E9"] * (len(shares) - 1) + [series.BACKGROUND.colour]
    bars = axes.barh(range(len(shares)), list(shares.values()), height=0.7, color=colours)
    axes.bar_label(bars, [f"{share:.2%}" for share in shares.values()], padding=3, fontsize=9)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(shares.values()) or 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel(blocks.label)
    axes.set_title(f"Hit rate at {capacity:,} blocks ({series.marked(capacity, info)})", loc="left", fontsize=11)


def _spaced(capacities: Sequence[int], room: float) -> list[int]:
    """Returns the capacities that are far enough apart, on a log scale, to be labelled."""
    kept = [capacities[0]]
    for capacity in capacities[1:]:
        if math.log(capacity / kept[-1]) >= room:
            kept.append(capacity)
    return kept


def _draw_time(axes: Axes, looks: dict[str, series.Look], rows: Sequence[Row], at: str) -> None:
    timeline = series.merged(rows[0].timeline)
    span_s = timeline.width_s * len(timeline.block_accesses)
    unit_s, unit = series.time_unit(span_s)
    for row in sorted(rows, key=lambda row: row.policy != optimum.NAME):
        look, points = looks[row.policy], series.rates(series.merged(row.timeline))
        xs, ys = [at / unit_s for at, _ in points], [float("nan") if rate is None else rate for _, rate in points]
        style = (0, look.dash) if look.dash else "-"
        axes.plot(xs, ys, color=look.colour, linestyle=style, linewidth=1.5, label=_label(row.policy))
    axes.set_xlim(0, max(1.0, span_s / unit_s))
    axes.set_xlabel(f"time since the trace began, {unit}")
    _shares(axes, f"Hits over time{at}", "share of blocks hit")


def _draw_tiers(axes: Axes, rows: Sequence[Row], at: str) -> None:
    shares = [dict(series.tier_shares(row)) for row in rows]
    left = [0.0] * len(rows)
    for name in dict.fromkeys(name for share in shares for name in share):
        widths = [share.get(name, 0.0) for share in shares]
        colour = series.TIER_COLOURS.get(name, series.COMPUTED_COLOUR)
        axes.barh(range(len(rows)), widths, left=left, height=0.7, color=colour, label=name)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [row.policy for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("share of block accesses")
    axes.set_title(f"Where blocks came from{at}", loc="left", fontsize=11, pad=24)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=9, borderaxespad=0)


def _draw_reuse(axes: Axes, info: TraceInfo) -> None:
    shares = [reuse.uses / max(1, info.blocks) for reuse in info.reuses]
    axes.bar(range(len(shares)), shares, width=0.95, align="edge", color="#56B4E9")
    ticks = [(0.0, "0"), *series.decades(info)]
    axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=9)
    axes.set_xlim(0, max(1, len(shares)))
    axes.set_xlabel("other blocks used in between (log scale)")
    _shares(axes, "Reuse distances", "share of block accesses")


def _shares(axes: Axes, title: str, label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    highest = float(axes.dataLim.y1)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.08 * highest if highest > 0 else 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(axis="y", color="#e3e3e3")
    axes.set_axisbelow(True)


def _label(policy: str) -> str:
    """Returns a policy's label; matplotlib omits names that begin with an underscore from legends."""
    return f" {policy}" if policy.startswith("_") else policy
