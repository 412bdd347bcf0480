"""Tables of fleets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.recorded.numbers import Records, Row, short, table


def _fleet(records: Records) -> str:
    """Routers before several caches: hits as a share of those of one cache, balance, time to the first token."""
    if "fleet" not in records:
        return "Not recorded yet."
    rows = {(row["trace"], row["router"], row["replicas"]): row for row in records["fleet"]["rows"]}
    sizes = sorted({replicas for _, _, replicas in rows})

    def cell(row: Row | None) -> str:  # a router may not have been measured at every size
        return "–" if row is None else f"{row['share']:.1f} / {row['balance']:.2f} / {row['first_s']:.1f}"

    lines = [
        [trace.removesuffix("_trace"), router, *(cell(rows.get((trace, router, size))) for size in sizes)]
        for trace, router in dict.fromkeys((trace, router) for trace, router, _ in rows)
    ]
    return table(["trace", "router", *(f"{size} replicas" for size in sizes)], lines)


def _fleet_goals(records: Records) -> str:
    """The goals of routing, and the measured values."""
    if "fleet" not in records:
        return "Not recorded yet."
    goals = records["fleet"]["goals"]
    return table(
        ["", "measured", "goal", ""],
        ([goal["what"], short(goal["measured"]), f"{goal['goal']:g}", goal["unit"]] for goal in goals),
    )


def _fleet_first(records: Records) -> str:
    """The first token of a prompt that another server has computed, by where it comes from."""
    if "first" not in records.get("fleet", {}):
        return "Not recorded yet."

    def cells(row: Row) -> list[str]:
        spread = f"{short(row['least_s'])} to {short(row['most_s'])}"
        return [f"{row['tokens']:,}", row["way"], short(row["p50_s"]), spread, short(row["sooner"])]

    heads = ["tokens", "by", "first token, s, median", "least to most", "times sooner than computing"]
    return table(heads, map(cells, records["fleet"]["first"]))


def _fleet_apart(records: Records) -> str:
    """Requests that arrive while others are answered, by how servers divide the work."""
    if "apart" not in records.get("fleet", {}):
        return "Not recorded yet."

    def cells(row: Row) -> list[str]:
        first = [short(row[name]) for name in ("first_p50_s", "first_most_s")]
        return [row["way"], *first, *(short(1000 * row[name]) for name in ("token_p50_s", "token_most_s"))]

    heads = ["", "first token, s, median", "most", "each further token, ms, median", "most"]
    return table(heads, map(cells, records["fleet"]["apart"]))


FLEETS: Mapping[str, Callable[[Records], str]] = {
    "fleet": _fleet,
    "fleet goals": _fleet_goals,
    "fleet first": _fleet_first,
    "fleet apart": _fleet_apart,
}
