"""Compares every built-in policy with `lru` and the offline optimum, in replays of many kinds of workloads.

A cell is a workload at a capacity.

    gain      percentage points of the block hit rate over `lru`
    closed    the gain as a share of the gap between `lru` and the optimum, if that is half a point or more
    cost      CPU time of all its replays over that of `lru`'s, including lookups and insertions

The workloads are those of `mainstem.replay.generate`, the pure shapes of `shapes.py`, and given traces. Everything but
the cost follows from the seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from os import cpu_count
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from bench.report import Report
from bench.shapes import SHAPES, shape
from bench.tables import goals_table
from mainstem.cache.policies import BUILT_IN
from mainstem.replay.generate import (
    Agents,
    BestOfN,
    Chat,
    Documents,
    Mix,
    Prompts,
    Tenants,
    Workload,
    generate,
)
from mainstem.replay.readers.open import open_trace
from mainstem.replay.simulate.optimum import Optimum
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Trace

LRU = "lru"
MIN_GAP = 0.5
"""Percentage points; a share of a smaller gap is meaningless."""

Row = dict[str, Any]
Named = tuple[str, Callable[[], Trace]]

GENERATED: dict[str, tuple[Workload, int]] = {
    "chat": (Chat(), 128),
    "chat, long": (Chat(turns=12.0, think_s=15.0, question_tokens=200.0, answer_tokens=500.0), 512),
    "chat, slow": (Chat(turns=4.0, think_s=600.0, think_sigma=1.5), 128),
    "chat, all think alike": (Chat(think_s=60.0, think_sigma=0.0), 128),
    "chat, small blocks": (Chat(prompts=20), 16),
    "agents": (Agents(), 512),
    "agents, one by one": (Agents(burst=1.0, steps=8.0, tool_s=20.0), 256),
    "documents": (Documents(), 512),
    "documents, drifting": (Documents(drift_s=600.0, zipf=1.1), 512),
    "documents, many": (Documents(documents=20_000, zipf=0.9, questions=1.5), 512),
    "prompts": (Prompts(prompts=300, zipf=0.9), 256),
    "prompts, drifting": (Prompts(prompts=300, zipf=1.2, drift_s=900.0), 256),
    "best of n": (BestOfN(), 128),
    "tenants": (Tenants(), 256),
    "tenants, many": (Tenants(prompts=2000, zipf=0.8, turns=1.5), 256),
    "mix": (Mix(parts=((Chat(), 5.0), (Agents(), 1.0), (Documents(), 2.0)), rate_per_s=2.0), 256),
}
"""Workloads by name, each with a block size that suits its lengths."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        percents: capacities in percent of the distinct blocks.
        policies: names from `mainstem.cache.policies.BUILT_IN`; `lru` is always measured.
        accesses: approximate block accesses of a generated workload.
        generated: names from `GENERATED`.
        shapes: names from `SHAPES`.
        traces: files, see `mainstem.replay.readers.open`.
        seed: seed of all workloads.
        workers: threads, each with a workload; None: one per CPU core.
    """

    percents: tuple[float, ...] = (1, 2, 5, 10, 25, 50)
    policies: tuple[str, ...] = tuple(BUILT_IN)
    accesses: int = 200_000
    generated: tuple[str, ...] = tuple(GENERATED)
    shapes: tuple[str, ...] = tuple(SHAPES)
    traces: tuple[str, ...] = ()
    seed: int = 0
    workers: int | None = None


QUICK = Settings(accesses=20_000)


@dataclass(frozen=True, slots=True)
class Goal:
    """The limit of a measure of a policy."""

    policy: str
    what: str
    at_most: float
    unit: str
    measure: Callable[[Row], float]


GOALS = (
    Goal("gittins", "gittins, below lru at worst", 0.3, "points", lambda row: -row["worst"]["gain"]),
    Goal("gittins", "gittins, CPU time over lru's", 3, "ratio", lambda row: row["cost"]),
)


def run(settings: Settings, report: Report) -> None:
    """Replays everything, and adds the cells, one row per policy and the table to the report.

    Raises:
        BadArgument: there is no such policy.
        OSError, TraceError: a file cannot be read, or is not a trace.
    """
    named = list(workloads(settings))
    others = [policy for policy in settings.policies if policy != LRU]
    with ThreadPoolExecutor(settings.workers or cpu_count()) as pool:
        cells = []
        for own in pool.map(lambda each: measure(each[0], each[1], others, settings.percents), named):
            report.progress(
                f"policies: {own[0]['workload']}" if own else "policies: a trace too short for any capacity"
            )
            cells += own
    report.settings.update(asdict(settings))
    report.rows.extend(summarise(cells))
    report.more |= {"cells": cells, "goals": judge(report.rows)}
    report.tables.append(table(report.rows))
    if report.more["goals"]:
        report.tables.append(goals_table(report.more["goals"]))


def workloads(settings: Settings) -> Iterator[Named]:
    """Yields names and functions that create traces: each trace exists only during its turn."""
    for path in settings.traces:
        yield Path(path).name, partial(open_trace, path)
    for name in settings.generated:
        yield name, partial(_generated, name, settings)
    for name in settings.shapes:
        yield name, partial(shape, name, settings.accesses // 5, seed=settings.seed)


def measure(
    name: str, make: Callable[[], Trace], policies: Sequence[str], percents: Sequence[float] = Settings().percents
) -> list[Row]:
    """Returns the cells of one workload: per capacity, `lru` and then the policies. Skips capacities below a block."""
    trace = make()
    optimum = Optimum(trace)
    cells = []
    for percent in percents:
        capacity = int(trace.distinct_blocks * percent / 100)
        if not capacity:
            continue
        best = 100 * optimum.replay(capacity).block_hit_rate
        of_lru, lru_s = _timed(trace, LRU, capacity)
        for policy in (LRU, *policies):
            rate, cpu_s = (of_lru, lru_s) if policy == LRU else _timed(trace, policy, capacity)
            cells.append({
                "workload": name, "policy": policy, "percent": percent, "capacity_blocks": capacity,
                "hit_rate": rate, "gain": rate - of_lru,
                "closed": 100 * (rate - of_lru) / (best - of_lru) if best - of_lru >= MIN_GAP else None,
                "cpu_s": cpu_s, "lru_cpu_s": lru_s,
            })  # fmt: skip
    return cells


def summarise(cells: Iterable[Row]) -> list[Row]:
    """Returns one row per policy over its cells, see the module docstring; `closed` is None if no cell has a gap."""
    by_policy: dict[str, list[Row]] = {}
    for cell in cells:
        by_policy.setdefault(cell["policy"], []).append(cell)
    rows = []
    for policy, own in by_policy.items():
        shares = [cell["closed"] for cell in own if cell["closed"] is not None]
        by_gain = sorted(own, key=lambda cell: cell["gain"])
        rows.append({
            "policy": policy,
            "closed": mean(shares) if shares else None,
            "gain": mean(cell["gain"] for cell in own),
            "worst": _place(by_gain[0]),
            "best": _place(by_gain[-1]),
            "cost": sum(cell["cpu_s"] for cell in own) / sum(cell["lru_cpu_s"] for cell in own),
        })  # fmt: skip
    return rows


def judge(rows: Sequence[Row], goals: Sequence[Goal] = GOALS) -> list[Row]:
    """Returns a row for each goal of a measured policy: what, goal, unit, measured, met."""
    found = {row["policy"]: row for row in rows}
    measured = [(goal, goal.measure(found[goal.policy])) for goal in goals if goal.policy in found]
    return [
        {"what": goal.what, "goal": goal.at_most, "unit": goal.unit, "measured": value, "met": value <= goal.at_most}
        for goal, value in measured
    ]


def table(rows: Sequence[Row]) -> Table:
    """Builds a table with one line per policy."""
    heads = ("policy", "% of the gap", "points", "worst", "", "best", "", "cost")
    shown = Table(*heads, title="versus lru: mean share of the gap to the optimum closed, points of hit rate, CPU time")
    for row in rows:
        closed = "–" if row["closed"] is None else f"{row['closed']:.1f}"
        ends = [text for end in ("worst", "best") for text in _end(row[end])]
        shown.add_row(row["policy"], closed, f"{row['gain']:+.2f}", *ends, f"{row['cost']:.2f}")
    return shown


def _generated(name: str, settings: Settings) -> Trace:
    """Generates as many requests as give about the requested number of block accesses."""
    workload, block_size = GENERATED[name]
    make = partial(generate, workload, seed=settings.seed, block_size=block_size)
    mean_blocks = len(make(500).whole.blocks) / 500
    return make(max(1, round(settings.accesses / mean_blocks)))


def _timed(trace: Trace, policy: str, capacity: int) -> tuple[float, float]:
    """Returns the block hit rate in percent, and CPU seconds of this thread."""
    started_s = time.thread_time()
    row = replay(trace, policy, capacity)
    return 100 * row.block_hit_rate, time.thread_time() - started_s


def _place(cell: Row) -> Row:
    return {"gain": cell["gain"], "workload": cell["workload"], "percent": cell["percent"]}


def _end(place: Row) -> tuple[str, str]:
    if abs(place["gain"]) < 0.005:
        return "0", ""
    return f"{place['gain']:+.2f}", f"{place['workload']}, {place['percent']:g} %"
