"""The tables of the index benchmark, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench.entries import SYSTEMS

_SUMMARY = ("median", "least to most", "CPU", "× Mainstem", "× its CPU")
_PARTS = ("match", "insert", "evict")

Row = dict[str, Any]


def requests_table(rows: Sequence[Row]) -> Table:
    """Microseconds per request, prompts prepared."""
    title = "microseconds per request, all calls; prompts in each system's own type"
    table = Table("page", "system", *_SUMMARY, "hit rate", "", title=title)
    for row in rows:
        table.add_row(str(row["page_size"]), row["label"], *_cells(row.get("prepared")), _rate(row), row["note"])
    return table


def parts_table(rows: Sequence[Row]) -> Table:
    """Microseconds per call."""
    table = Table("page", "system", *_PARTS, title="microseconds per call, median; one part at a time")
    for row in rows:
        if "parts_us" in row:
            parts = [f"{row['parts_us'][part]:.1f}" if part in row["parts_us"] else "–" for part in _PARTS]
            table.add_row(str(row["page_size"]), row["label"], *parts)
    return table


def lists_table(rows: Sequence[Row]) -> Table:
    """Microseconds per request, prompts as lists."""
    title = "microseconds per request, all calls; prompts as lists of int, conversion included"
    table = Table("page", "system", *_SUMMARY, title=title)
    for row in rows:
        if "lists" in row:
            table.add_row(str(row["page_size"]), row["label"], *_cells(row["lists"]))
    return table


def hits_table(rows: Sequence[Row]) -> Table:
    """Hit rates, a column for each workload and capacity."""
    columns = list(dict.fromkeys((row["workload"], row["capacity_tokens"]) for row in rows))
    heads = [f"{workload}\n{capacity:,}" for workload, capacity in columns]
    title = f"hit rate in percent, page {rows[0]['page_size']}; workload and slots of the pool"
    table = Table("system", "policy", *heads, title=title)
    for label, policy in dict.fromkeys((row["label"], row["policy"]) for row in rows):
        own = {(row["workload"], row["capacity_tokens"]): row for row in rows if _is(row, label, policy)}
        table.add_row(label, policy, *(_percent(own[column]) for column in columns))
    return table


def scenarios_table(rows: Sequence[Row]) -> Table:
    """One line per measure, one column per system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    heads = [SYSTEMS[system].short for system in systems]
    title = "scenarios: median, and least to most of the rounds"
    table = Table("scenario", "measure", *heads, title=title, show_lines=True)
    found = {(row["scenario"], row["system"]): row for row in rows}
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        own = [found[scenario, system] for system in systems]
        for name in dict.fromkeys(name for row in own for name in row["measures"]):
            table.add_row(scenario, name, *(_measure(row["measures"].get(name)) for row in own))
    return table


def goals_table(goals: Sequence[Row]) -> Table:
    """The goals, and whether they are met."""
    table = Table("goal", "at most", "measured", "unit", "met", title="goals")
    for goal in goals:
        measured = "–" if goal["measured"] is None else number(goal["measured"])
        met = {True: "yes", False: "no", None: "–"}[goal["met"]]
        table.add_row(goal["what"], number(goal["goal"]), measured, goal["unit"], met)
    return table


def number(value: float) -> str:
    """Formats a number with about three digits."""
    if abs(value) < 0.9995:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def _measure(value: dict[str, float] | None) -> str:
    if value is None:
        return "–"
    if value["least"] == value["most"]:
        return number(value["median"])
    return f"{number(value['median'])}\n{number(value['least'])}–{number(value['most'])}"


def _cells(summary: dict[str, float] | None) -> list[str]:
    if summary is None:
        return ["–"] * len(_SUMMARY)
    spread = f"{summary['least_us']:.1f} to {summary['most_us']:.1f}"
    ratios = [f"{summary['ratio']:.2f}", f"{summary['cpu_ratio']:.2f}"]
    return [f"{summary['us']:.1f}", spread, f"{summary['cpu_us']:.1f}", *ratios]


def _is(row: Row, label: str, policy: str) -> bool:
    return bool(row["label"] == label and row["policy"] == policy)


def _percent(row: Row) -> str:
    return f"{100 * row['hit_rate']:.2f}" if "hit_rate" in row else "–"


def _rate(row: Row) -> str:
    return f"{row['hit_rate']:.4f}" if "hit_rate" in row else "–"
