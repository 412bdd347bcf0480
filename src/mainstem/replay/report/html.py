"""The HTML report of a replay: charts with their numbers below, in one file that needs no network and no script.

Every chart is drawn twice, for wide and for narrow screens, and the report shows one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path

from mainstem import __version__
from mainstem.errors import BadArgument
from mainstem.replay.info import Reuse, TraceInfo
from mainstem.replay.report import series
from mainstem.replay.report.markup import Markup, join, tag
from mainstem.replay.report.series import Look, Measure, back_to_front, doublings
from mainstem.replay.report.svg import Axis, Bar, Line, Tick, bar_chart, line_chart, linear, percents, sample
from mainstem.replay.simulate import optimum
from mainstem.replay.simulate.rows import Row, Share, TierRow, median_below
from mainstem.units import show_bytes, show_seconds

_WIDE, _NARROW = 880, 400


def write_report(path: str | PathLike[str], info: TraceInfo, rows: Sequence[Row]) -> None:
    """Writes the report.

    Args:
        path: the file, .html.
        info: statistics of the replayed trace.
        rows: one or more rows, as returned by `sweep`.

    Raises:
        BadArgument: there are no rows.
        OSError: the file cannot be written.
    """
    Path(path).write_text(page(info, rows), encoding="utf-8", errors="backslashreplace")


def page(info: TraceInfo, rows: Sequence[Row]) -> str:
    """Returns the report as HTML, see `write_report`."""
    if not rows:
        raise BadArgument("rows", rows, "one row or more")
    title = f"Replay of {info.trace}"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    style = Path(__file__).with_name("report.css").read_text("utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", title),
        tag("style", Markup(f"\n{style}{_highlights(len(series.looks(rows)) + _BACKGROUND_LINES)}")),
    )
    sections = [_hit_rates, _over_time, _tiers, _reuse, _groups]
    body = tag(
        "body",
        tag("h1", title),
        _facts(info, rows),
        *(part for section in sections for part in section(info, rows)),
        tag("footer", f"mainstem {__version__}"),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


# --- sections -----------------------------------------------------------------------------------------------------


def _facts(info: TraceInfo, rows: Sequence[Row]) -> Markup:
    first = rows[0]
    facts = {
        "Requests": f"{info.requests:,} in {show_seconds(info.span_s)}",
        "Prompts": f"{info.input_tokens:,} tokens, {info.prompt_tokens.mean:,.0f} on average",
        "Blocks": f"{info.blocks:,} of {info.block_size:,} tokens, {info.distinct_blocks:,} distinct",
        "Unlimited cache": f"hits {_percent(info.block_hit_rate)} of blocks",
        "Policies": ", ".join(series.looks(rows)),
    }
    if first.replicas > 1:
        facts["Replicas"] = f"{first.replicas:,} of each capacity, routing by {first.routing}"
    if first.ttl_s is not None:
        facts["Time to live"] = show_seconds(first.ttl_s)
    if info.notes:
        facts["Notes"] = " ".join(info.notes)
    entries = (tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items())
    return tag("dl", *entries)


def _hit_rates(info: TraceInfo, rows: Sequence[Row]) -> Iterator[Markup]:
    many = len(series.by_capacity(rows)) > 1
    yield tag("h2", "Hit rate by capacity" if many else f"Hit rate at {_capacity(rows[0].capacity_blocks, info)}")
    best = " opt is the offline optimum: no policy can hit more blocks." if optimum.NAME in series.looks(rows) else ""
    tiers = " Hits are totals over all tiers." if any(len(row.tiers) > 1 for row in rows) else ""
    grey = " The grey line is LRU at each doubling of the capacity." if many and series.lru_curve(info, rows) else ""
    yield tag(
        "p", f"The share of the requested blocks that each policy hits.{best}{tiers}{grey}{_HINT if many else ''}"
    )
    draw = _rate_panel if many else _rate_bars
    yield _tabs("rate", [(measure.name, draw(info, rows, measure)) for measure in series.measures(info, rows)])
    yield tag("details", tag("summary", "All numbers"), _rows_table(info, rows))


def _rate_panel(info: TraceInfo, rows: Sequence[Row], measure: Measure) -> Markup:
    lines = _rate_lines(info, rows, measure)
    return join(_chart(lines, _rate_chart(info, rows, measure, lines)), _rate_table(info, rows, measure))


def _rate_bars(info: TraceInfo, rows: Sequence[Row], measure: Measure) -> Markup:
    """Draws bars: one capacity has no curve."""
    shares = [(row.policy, measure.of(row), "#56B4E9") for row in series.by_capacity(rows)[rows[0].capacity_blocks]]
    if measure.ideal is not None:
        shares.append((series.LIMIT_LINE, measure.ideal, series.BACKGROUND.colour))
    largest = max(share for _, share, _ in shares) or 1.0
    bars = (
        join(
            tag("b", name),
            tag("div", tag("i", style=f"width:{100 * share / largest:.3f}%;background:{colour}"), class_="split"),
            tag("u", _percent(share)),
        )
        for name, share, colour in shares
    )
    return join(tag("p", measure.label.capitalize()), tag("div", *bars, class_="splits"))


def _rate_lines(info: TraceInfo, rows: Sequence[Row], measure: Measure) -> list[Line]:
    low, high = series.domain(rows)
    lines = []
    if measure.ideal is not None:
        lines.append(Line(series.LIMIT_LINE, series.LIMIT, [(low, measure.ideal), (high, measure.ideal)]))
    exact = [point for point in series.lru_curve(info, rows) if low <= point[0] <= high]
    if exact and measure.name == "Blocks":
        lines.append(Line(series.LRU_LINE, series.BACKGROUND, exact, width=5))
    for policy, look in back_to_front(series.looks(rows)):
        points = series.curve(rows, policy, measure)
        tips = [f"{policy} at {x:,.0f} blocks: {_percent(y)}" for x, y in points]
        lines.append(Line(policy, look, points, tips))
    return lines


def _rate_chart(info: TraceInfo, rows: Sequence[Row], measure: Measure, lines: Sequence[Line]) -> Markup:
    ticks = tuple(
        Tick(capacity, (f"{capacity:,}", series.marked(capacity, info))) for capacity in series.by_capacity(rows)
    )
    device = "capacity" if all(len(row.tiers) == 1 for row in rows) else "device"
    label = f"{device} in blocks, and of all distinct blocks (log scale)"
    low, high = series.domain(rows)
    highest = max(y for line in lines for _, y in line.points if y is not None)
    x, y = Axis(label, low, high, ticks, math.log), percents(measure.label, highest)
    return _both(lambda width: line_chart(f"{measure.label}, by capacity", x, y, lines, width=width, height=400))


def _rate_table(info: TraceInfo, rows: Sequence[Row], measure: Measure) -> Markup:
    capacities = list(series.by_capacity(rows))
    cells = []
    for policy in series.looks(rows):
        found = dict(series.curve(rows, policy, measure))
        cells.append([policy, *(_percent(found[at]) if at in found else "" for at in capacities)])
    heads = [f"{capacity:,} ({series.marked(capacity, info)})" for capacity in capacities]
    return _table(f"{measure.label.capitalize()}, by capacity in blocks", ["policy", *heads], cells)


def _rows_table(info: TraceInfo, rows: Sequence[Row]) -> Markup:
    best = {row.capacity_blocks: row.block_hits for row in rows if row.policy == optimum.NAME}
    lines = (_row_cells(info, row, best.get(row.capacity_blocks)) for row in rows)
    return _named_table("One line per policy and capacity", lines)


def _row_cells(info: TraceInfo, row: Row, best: int | None) -> Iterator[tuple[str, str]]:
    yield "policy", row.policy
    yield "blocks", f"{row.capacity_blocks:,}"
    yield "of distinct", series.marked(row.capacity_blocks, info)
    yield "blocks hit", _percent(row.block_hit_rate)
    if best is not None:
        yield "of optimum", _percent(row.block_hits / max(1, best))
    yield "tokens hit", _percent(row.token_hit_rate)
    if row.saved_flops is not None and row.prefill_flops:
        yield "FLOPs saved", _percent(row.saved_flops / row.prefill_flops)
    for name, seconds in (("p50", row.ttft_p50_s), ("p90", row.ttft_p90_s), ("p99", row.ttft_p99_s)):
        yield f"first token, {name}", show_seconds(seconds)
    yield "evicted", f"{row.evicted_blocks:,}"
    if row.ttl_s is not None:
        yield "expired", f"{row.tiers[0].expired_blocks:,}"


def _over_time(info: TraceInfo, rows: Sequence[Row]) -> Iterator[Markup]:
    if not rows[0].timeline.block_accesses:
        return
    timeline = series.merged(rows[0].timeline)
    unit_s, unit = series.time_unit(timeline.width_s * len(timeline.block_accesses))
    yield tag("h2", "Hits over time")
    yield tag("p", f"Each point covers {show_seconds(timeline.width_s)}. A cache starts empty.{_HINT}")
    span = timeline.width_s * len(timeline.block_accesses) / unit_s
    x = linear(f"time since the trace began, {unit}", span, lambda at: f"{at:g}", max_ticks=8, nice=False)
    panels, looks = [], back_to_front(series.looks(rows))
    for capacity, same in series.by_capacity(rows).items():
        lines = [_time_line(row, look, unit_s) for name, look in looks for row in same if row.policy == name]
        chart = _both(_time_chart(f"Hits over time at {capacity:,} blocks", x, lines))
        panels.append((_capacity(capacity, info), join(_chart(lines, chart), _time_table(same, unit_s, unit))))
    yield _tabs("time", panels)
    yield _load(x, [count / timeline.width_s for count in timeline.block_accesses], timeline.width_s / unit_s)


def _time_line(row: Row, look: Look, unit_s: float) -> Line:
    points = [(at / unit_s, rate) for at, rate in series.rates(series.merged(row.timeline))]
    return Line(row.policy, look, points, width=1.8)


def _time_chart(title: str, x: Axis, lines: Sequence[Line]) -> Callable[[int], Markup]:
    y = percents("share of blocks hit", max(rate or 0.0 for line in lines for _, rate in line.points))
    return lambda width: line_chart(title, x, y, lines, width=width, height=340)


def _load(x: Axis, rates: Sequence[float], width: float) -> Markup:
    bars = [
        Bar(at * width, min(x.high, (at + 1) * width), rate, f"{rate:,.1f} blocks per second")
        for at, rate in enumerate(rates)
    ]
    y = linear("block accesses per second", max(rates), lambda rate: f"{rate:,g}", max_ticks=3)
    title = "Block accesses over time"
    return _both(lambda width: bar_chart(title, x, y, bars, width=width, height=170, colour="#b5b5b5"))


def _time_table(rows: Sequence[Row], unit_s: float, unit: str) -> Markup:
    timelines = [series.merged(row.timeline) for row in rows]
    first = timelines[0]
    cells = [
        [
            f"{at * first.width_s / unit_s:,.1f}",
            f"{accesses:,}",
            *(_percent(one.block_hits[at] / accesses) if accesses else "" for one in timelines),
        ]
        for at, accesses in enumerate(first.block_accesses)
    ]
    table = _table("Blocks hit", [f"from, {unit}", "block accesses", *(row.policy for row in rows)], cells, words=0)
    return tag("details", tag("summary", "Numbers"), table)


def _tiers(info: TraceInfo, rows: Sequence[Row]) -> Iterator[Markup]:
    yield tag("h2", "Where blocks came from")
    names = dict.fromkeys(name for row in rows for name, _ in series.tier_shares(row))
    yield tag(
        "p",
        "Shares of all block accesses: found on a tier and on none above it, or computed; by capacity of the device.",
    )
    yield tag("div", *(tag("span", _swatch(name), name) for name in names), class_="legend")
    capacities = series.by_capacity(rows).items()
    yield _tabs(
        "tier", [(_capacity(at, info), tag("div", *map(_split, same), class_="splits")) for at, same in capacities]
    )
    numbers = (_tier_cells(row, tier) for row in rows for tier in row.tiers)
    yield tag("details", tag("summary", "Numbers"), _named_table("Blocks by tier", numbers, words=2))


def _swatch(name: str) -> Markup:
    return tag("i", class_="swatch", style=f"background:{series.TIER_COLOURS.get(name, series.COMPUTED_COLOUR)}")


def _split(row: Row) -> Markup:
    shares = series.tier_shares(row)
    parts = [
        tag(
            "i",
            title=f"{name}: {_percent(share)}",
            style=f"width:{100 * share:.3f}%;background:{series.TIER_COLOURS.get(name, series.COMPUTED_COLOUR)}",
        )
        for name, share in shares
    ]
    words = ", ".join(f"{name} {_percent(share)}" for name, share in shares[:-1])
    return join(tag("b", row.policy), tag("div", *parts, class_="split", role="img", aria_label=words), tag("u", words))


def _tier_cells(row: Row, tier: TierRow) -> Iterator[tuple[str, str]]:
    yield "policy", row.policy
    yield "tier", tier.name
    yield "device blocks", f"{row.capacity_blocks:,}"
    yield "blocks", f"{tier.capacity_blocks:,}"
    yield "hits", f"{tier.block_hits:,}"
    yield "of all", _percent(tier.block_hits / max(1, row.block_accesses))
    yield "written", _moved(tier.written_blocks, tier.written_bytes)
    yield "loaded", _moved(tier.loaded_blocks, tier.loaded_bytes)
    yield "evicted", f"{tier.evicted_blocks:,}"
    yield "expired", f"{tier.expired_blocks:,}"
    yield "median age", _median(tier.age_s)
    yield "median idle", _median(tier.idle_s)


def _median(histogram: Sequence[int]) -> str:
    """Returns a bound below which the age or idle time of half of the evicted blocks was."""
    bound = median_below(histogram)
    return "" if bound is None else f"< {show_seconds(bound)}"


def _reuse(info: TraceInfo, rows: Sequence[Row]) -> Iterator[Markup]:
    if not info.reuses:
        return
    yield tag("h2", "Reuse distances")
    sampled = "" if info.sampled == 1 else f" Sampled: 1 block in {round(1 / info.sampled)}."
    again = sum(reuse.uses for reuse in info.reuses) / max(1, info.blocks)
    yield tag(
        "p",
        f"The number of other blocks used before a block is reused: LRU needs room for more than these. "
        f"{_percent(again)} of block accesses are reuses; the others are new blocks, which no cache has. "
        f"Dashed: the replayed capacities.{sampled}",
    )
    x, y = _distances(info), percents("share of block accesses", max(map(_uses(info), info.reuses)), max_ticks=5)
    bars = [
        Bar(doublings(reuse.low), doublings(reuse.high), _uses(info)(reuse), f"{_range(reuse)}: {reuse.uses:,}")
        for reuse in info.reuses
    ]
    marks = [
        Tick(doublings(capacity), (series.marked(capacity, info),))
        for capacity in series.by_capacity(rows)
        if doublings(capacity) <= x.high
    ]
    yield _both(lambda width: bar_chart("Reuse distances", x, y, bars, width=width, height=340, marks=marks))
    cells = [
        [_range(reuse), f"{reuse.uses:,}", _percent(_uses(info)(reuse)), _percent(reuse.lru_hit_rate)]
        for reuse in info.reuses
    ]
    heads = ["blocks between", "uses", "of all", "hit rate of LRU with this room"]
    yield tag("details", tag("summary", "Numbers"), _table("Uses by reuse distance", heads, cells, words=0))


def _uses(info: TraceInfo) -> Callable[[Reuse], float]:
    return lambda reuse: reuse.uses / max(1, info.blocks)


def _range(reuse: Reuse) -> str:
    return f"{reuse.low:,}" if reuse.high == reuse.low + 1 else f"{reuse.low:,} to {reuse.high - 1:,}"


def _distances(info: TraceInfo) -> Axis:
    high = max(doublings(reuse.high) for reuse in info.reuses)
    ticks = (Tick(0.0, ("0",)), *(Tick(place, (text,)) for place, text in series.decades(info)))
    return Axis("other blocks used in between (log scale)", 0.0, high, ticks)


def _groups(info: TraceInfo, rows: Sequence[Row]) -> Iterator[Markup]:
    """Yields tables of tenants and kinds, if the trace has any."""
    for title, name in (("tenant", "tenants"), ("kind", "kinds")):
        shares = [(row, share) for row in rows for share in getattr(row, name)]
        if not shares:
            continue
        shares.sort(key=lambda both: (-both[1].block_accesses, both[1].name))
        shown = shares[:_MAX_GROUPS]
        left = f"; {len(shares) - len(shown):,} more lines with --json" if len(shares) > len(shown) else ""
        yield tag("h2", f"By {title}")
        opened = {"open": ""} if len(shown) <= _SHOWN_GROUPS else {}
        table = _named_table(f"Hits by {title}", (_share_cells(title, row, share) for row, share in shown), words=2)
        yield tag("details", tag("summary", f"Numbers{left}"), table, **opened)


def _share_cells(title: str, row: Row, share: Share) -> Iterator[tuple[str, str]]:
    yield title, share.name or "(none)"
    yield "policy", row.policy
    yield "blocks", f"{row.capacity_blocks:,}"
    yield "requests", f"{share.requests:,}"
    yield "block accesses", f"{share.block_accesses:,}"
    yield "blocks hit", _percent(share.block_hits / max(1, share.block_accesses))
    yield "tokens hit", _percent(share.token_hits / max(1, share.input_tokens))


_MAX_GROUPS = 500
_SHOWN_GROUPS = 24  # lines that show without a click


# --- parts --------------------------------------------------------------------------------------------------------


def _both(draw: Callable[[int], Markup]) -> Markup:
    """Draws a chart for wide screens and one for narrow screens."""
    return join(tag("figure", draw(_WIDE), class_="wide"), tag("figure", draw(_NARROW), class_="narrow"))


_BACKGROUND_LINES = 2  # of a chart, besides those of policies
_HINT = " Hover over a name to highlight its curve."


def _chart(lines: Sequence[Line], picture: Markup) -> Markup:
    """Joins a chart of lines with its legend; hovering over a name, or touching it, fades the other lines."""
    entries = (
        tag(
            "span", sample(line.look, marks=bool(line.tips), width=line.width), line.name, data_at=str(at), tabindex="0"
        )
        for at, line in enumerate(lines)
    )
    return tag("div", tag("div", *entries, class_="legend"), picture, class_="chart")


def _highlights(lines: int) -> str:
    return "".join(
        f'.chart:has([data-at="{at}"]:is(span:hover, span:focus, .curve:hover)) .curve:not([data-at="{at}"]) '
        "{ opacity: 0.1; }\n"
        for at in range(lines)
    )


def _tabs(group: str, panels: Sequence[tuple[str, Markup]]) -> Markup:
    """Shows one panel at a time, with radio buttons; a single panel has none."""
    if len(panels) == 1:
        return panels[0][1]
    parts = []
    for at, (name, panel) in enumerate(panels):
        checked = {"checked": ""} if at == 0 else {}
        parts.append(tag("input", type="radio", name=group, id=f"{group}{at}", **checked))
        parts.append(tag("label", name, for_=f"{group}{at}"))
        parts.append(tag("div", panel, class_="panel"))
    return tag("div", *parts, class_="tabs")


def _named_table(caption: str, lines: Iterable[Iterable[tuple[str, str]]], *, words: int = 1) -> Markup:
    """Builds a table from lines of cells with the heads of their columns, which may lack some; see `_table`."""
    found = [dict(line) for line in lines]
    heads = list(dict.fromkeys(head for line in found for head in line))
    return _table(caption, heads, [[line.get(head, "") for head in heads] for line in found], words=words)


def _table(caption: str, heads: Sequence[str], lines: Iterable[Sequence[str]], *, words: int = 1) -> Markup:
    """Builds a table whose first `words` columns are text; the others are numbers."""

    def line(cell: str, texts: Sequence[str]) -> Markup:
        left = (tag(cell, text, class_="left") for text in texts[:words])
        return tag("tr", *left, *(tag(cell, text) for text in texts[words:]))

    body = tag("tbody", *(line("td", texts) for texts in lines))
    return tag("div", tag("table", tag("caption", caption), tag("thead", line("th", heads)), body), class_="scroll")


def _capacity(capacity: int, info: TraceInfo) -> str:
    return f"{capacity:,} blocks ({series.marked(capacity, info)})"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _moved(blocks: int, size: int | None) -> str:
    return f"{blocks:,}" if size is None else f"{blocks:,} ({show_bytes(size)})"
