"""Measures the core in C++ (native/core.cpp) against the limits of memory. Builds the program, runs it several times,
and makes a table of its output. Knows no Python binding: index.py measures what Python adds.

    measure        median of the runs' medians; for single calls also the 99th percentile
    floor          the same bytes compared and copied at the same addresses, alternating with the measure
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.native import build, compiler_version
from bench.report import Report
from bench.tables import goals_table, number

FLOOR, RATIO, P50, P99 = ", floor", ", over its floor", ", p50", ", p99"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        runs: runs of the whole program.
        quick: fewer rounds, and a large tree of a tenth of the size.
    """

    runs: int = 3
    quick: bool = False


QUICK = Settings(runs=1, quick=True)


@dataclass(frozen=True, slots=True)
class Goal:
    """The limit of a measure."""

    what: str
    measure: str
    at_most: float
    unit: str


def _long(nodes: int, limit: float) -> Goal:
    what = f"long match in {nodes:,} nodes, page 16, over its floor"
    return Goal(what, f"long match, page 16, {nodes} nodes{RATIO}", limit, "ratio")


GOALS = (
    _long(1, 1.10),
    _long(64, 1.10),
    _long(1024, 2.0),
    Goal("a miss of 131,072 tokens", "miss of 131072 tokens", 1, "µs"),
    Goal("a miss of 512 tokens", "miss of 512 tokens", 1, "µs"),
    Goal("16 tokens more behind 100,000, Lease, 1,000 nodes", "16 tokens more, Lease, 1,000 nodes", 1, "µs"),
    Goal("the same, joined", "16 tokens more, Lease, joined", 1, "µs"),
    Goal("the same by Tree::insert, 1,000 nodes", "16 tokens more, Tree::insert, 1,000 nodes", 1, "µs"),
    Goal("the same by Tree::insert, joined", "16 tokens more, Tree::insert, joined", 1, "µs"),
    Goal("a chunk of 512 behind 128k over behind 1k", "chunk of 512 tokens, far over near", 1.5, "ratio"),
    Goal("evict a page of 50,000 leaves, p50", f"evict a page, leaves all free{P50}", 1, "µs"),
    Goal("the same, p99", f"evict a page, leaves all free{P99}", 3, "µs"),
    Goal("the same, half of them locked, p50", f"evict a page, leaves half locked{P50}", 1, "µs"),
    Goal("the same, half of them locked, p99", f"evict a page, leaves half locked{P99}", 3, "µs"),
    Goal("a cold match in a large tree, p50", f"cold match of 512 tokens{P50}", 3, "µs"),
    Goal("memory, nodes of 4,096 tokens", "memory, nodes of 4096 tokens, as malloc counts", 5, "bytes a token"),
    Goal("memory, nodes of 256 tokens", "memory, nodes of 256 tokens, as malloc counts", 8, "bytes a token"),
    Goal("held after the worst split, over what lives", "two pages left of 128k, over the same alone", 2, "ratio"),
)


def run(settings: Settings, report: Report) -> None:
    """Measures everything and adds its table and its goals to the report.

    Raises:
        CannotBuild: there is no g++, or it fails.
    """
    report.progress("core: building the program")
    program = build("core")
    samples = []
    for turn in range(settings.runs):
        report.progress(f"core: run {turn + 1} of {settings.runs}")
        samples.append(_run(program, settings.quick))
    report.settings.update(asdict(settings))
    report.versions["compiler"] = compiler_version()
    report.rows.extend(summarise(samples))
    report.more["goals"] = judge(report.rows)
    report.tables += [table(report.rows), goals_table(report.more["goals"])]


def summarise(samples: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Summarizes each measure over all runs: name, unit, median, least and most."""
    rows = []
    for same in zip(*samples, strict=True):
        values = [sample["value"] for sample in same]
        spread = {"median": median(values), "least": min(values), "most": max(values)}
        rows.append({"name": same[0]["name"], "unit": same[0]["unit"], **spread})
    return rows


def judge(rows: Sequence[dict[str, Any]], goals: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """Returns a row for each goal: what, goal, unit, measured, met."""
    found = {row["name"]: row["median"] for row in rows}
    return [
        {
            "what": goal.what,
            "goal": goal.at_most,
            "unit": goal.unit,
            "measured": found[goal.measure],
            "met": found[goal.measure] <= goal.at_most,
        }
        for goal in goals
    ]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Builds a table with one line per measure, with its 99th percentile and its floor if it has them."""
    found = {row["name"]: row for row in rows}
    heads = ("measure", "median", "least to most", "p99", "floor", "over it", "unit")
    shown = Table(*heads, title="the core in C++")
    for row in rows:
        name = row["name"]
        if name.endswith((FLOOR, RATIO, P99)):
            continue
        base = name.removesuffix(P50)
        more = (found.get(base + suffix) for suffix in (P99, FLOOR, RATIO))
        cells = [number(other["median"]) if other else "" for other in more]
        spread = "" if row["least"] == row["most"] else f"{number(row['least'])} to {number(row['most'])}"
        shown.add_row(base, number(row["median"]), spread, *cells, row["unit"])
    return shown


def _run(program: Path, quick: bool) -> list[dict[str, Any]]:
    command = [str(program), *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
