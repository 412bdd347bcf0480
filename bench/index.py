"""Measures the index alone: Mainstem and its peers, each in its own process, taking turns.

requests     microseconds per request of a steady load, and hit rates that show whether all were driven alike
hits         hit rates with a small pool
scenarios    cases that a steady load does not show; see scenarios.py
goals        whether the rows meet the goals; see goals.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from bench import goals, tables
from bench.entries import SYSTEMS
from bench.replay import MODES
from bench.report import Report
from bench.scenarios import QUICK as QUICK_SIZES
from bench.scenarios import SCENARIOS, Sizes
from bench.systems import HASH_EACH
from bench.workers import Worker
from bench.workload import Chats, Documents, digest

HIT_RATE_TOLERANCE = 1e-4
HIT_RATE_PAGE = 16
OURS = "mainstem"
PARTS = ("requests", "hits", *SCENARIOS)
"""Parts that can be run alone."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        chats: the workload.
        capacity_tokens: slots of the pool.
        page_sizes: tokens per page.
        rounds: turns of each system.
        systems: names from `entries.SYSTEMS`; the others are compared with the first.
        documents: the other workload of the hit rates.
        hit_capacities: slots of the pools for the hit rates.
        sizes: sizes of the scenarios.
        scenario_rounds: turns of each system in each scenario.
        repeat_below_s: a scenario that took longer on a system is not repeated there.
        parts: names from `PARTS`.
    """

    chats: Chats = field(default_factory=Chats)
    capacity_tokens: int = 150_000
    page_sizes: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5
    systems: tuple[str, ...] = tuple(SYSTEMS)
    documents: Documents = field(default_factory=Documents)
    hit_capacities: tuple[int, ...] = (40_000, 60_000, 80_000)
    sizes: Sizes = field(default_factory=Sizes)
    scenario_rounds: int = 3
    repeat_below_s: float = 4.0
    parts: tuple[str, ...] = PARTS

    def only(self, parts: Sequence[str] | None, systems: Sequence[str] | None) -> Settings:
        """Returns the settings for some parts and systems; always keeps Mainstem's leases for comparison."""
        chosen = tuple(name for name in self.systems if systems is None or name in systems or name == OURS)
        return replace(self, parts=tuple(parts) if parts else self.parts, systems=chosen)


QUICK = Settings(
    chats=Chats(chats=40), rounds=2, documents=Documents(requests=400), sizes=QUICK_SIZES, scenario_rounds=1
)


def run(settings: Settings, report: Report, peers_python: str | None = None) -> None:
    """Measures everything and adds its tables to the report.

    Args:
        peers_python: the interpreter with the peers; None: this one.
    """
    with ExitStack() as stack:
        report.progress("index: starting the systems")
        workers = [stack.enter_context(Worker(name, _interpreter(name, peers_python))) for name in settings.systems]
        for worker in workers:
            report.versions.update(worker.versions())
        # First, while the processes that fork for each scenario have done nothing yet.
        scenarios = list(_scenarios(workers, settings, report))
        samples = list(_take_turns(workers, settings, report)) if "requests" in settings.parts else []
        hits = list(_hits(workers, settings, report)) if "hits" in settings.parts else []
    report.rows.extend(_rows(workers, samples, settings) if samples else ())
    report.more.update(hit_rates=hits, scenarios=scenarios)
    report.more["goals"] = goals.judge(goals.Rows(report.rows, scenarios))
    report.notes.extend(_absences(workers))
    report.notes.extend(_disagreements(report.rows))
    _describe(settings, report)
    _show(report)


def _interpreter(system: str, peers_python: str | None) -> str:
    return peers_python if peers_python and SYSTEMS[system].peer else sys.executable


def _describe(settings: Settings, report: Report) -> None:
    described = asdict(settings)
    chats = described.pop("chats")
    report.settings.update(chats, **described, digest=digest(settings.chats.prompts()))


def _show(report: Report) -> None:
    if report.rows:
        report.tables += [tables.requests_table(report.rows), tables.parts_table(report.rows)]
        report.tables.append(tables.lists_table(report.rows))
    if report.more["hit_rates"]:
        report.tables.append(tables.hits_table(report.more["hit_rates"]))
    if report.more["scenarios"]:
        report.tables.append(tables.scenarios_table(report.more["scenarios"]))
    report.tables.append(tables.goals_table(report.more["goals"]))


def _scenarios(workers: Sequence[Worker], settings: Settings, report: Report) -> Iterator[dict[str, Any]]:
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in range(settings.scenario_rounds):
        for name in SCENARIOS:
            if name not in settings.parts:
                continue
            report.progress(f"index: scenario {name}, round {turn + 1} of {settings.scenario_rounds}")
            for worker in workers:
                kept = answers.setdefault((name, worker.system), [])
                if all(_worth_repeating(answer, settings) for answer in kept):
                    kept.append(_ask_for(worker, name, settings))
    for (name, system), kept in answers.items():
        yield {"scenario": name, "system": system, "label": SYSTEMS[system].label, **_scenario_row(kept)}


def _ask_for(worker: Worker, scenario: str, settings: Settings) -> dict[str, Any]:
    small = SYSTEMS[worker.system].small
    worker.versions()  # waits until it has started
    started_s = time.monotonic()
    answer = worker.ask({"task": "scenario", "name": scenario, "sizes": asdict(settings.sizes), "small": small})
    return answer | {"took_s": time.monotonic() - started_s}


def _worth_repeating(answer: dict[str, Any], settings: Settings) -> bool:
    return "error" not in answer and answer["took_s"] <= settings.repeat_below_s


def _scenario_row(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarizes the measures over the rounds, with facts and note of the last. The note of a failure is its reason."""
    for answer in answers:
        if "error" in answer:
            return {"measures": {}, "facts": {}, "note": answer["error"]}
    measures = {}
    for name in answers[0]["measures"]:
        values = [answer["measures"][name] for answer in answers]
        measures[name] = {"median": median(values), "least": min(values), "most": max(values)}
    facts = answers[-1]["facts"] | {"rounds": len(answers), "took_s": round(answers[-1]["took_s"], 1)}
    return {"measures": measures, "facts": facts, "note": answers[-1]["note"]}


def _take_turns(workers: Sequence[Worker], settings: Settings, report: Report) -> Iterator[dict[str, Any]]:
    for turn in range(settings.rounds):
        for page_size in settings.page_sizes:
            for mode in MODES:
                report.progress(f"index: round {turn + 1} of {settings.rounds}, page {page_size}, {mode}")
                for worker in workers:
                    if page_size in SYSTEMS[worker.system].page_sizes:
                        task = _replay("chats", settings.chats, page_size, settings.capacity_tokens) | {"mode": mode}
                        yield {"system": worker.system, "page_size": page_size, **worker.ask(task), "mode": mode}


def _replay(name: str, workload: Chats | Documents, page_size: int, capacity_tokens: int) -> dict[str, Any]:
    return {
        "task": "replay", "workload": name, "settings": asdict(workload), "page_size": page_size,
        "capacity_tokens": capacity_tokens, "mode": "prepared",
    }  # fmt: skip


def _hits(workers: Sequence[Worker], settings: Settings, report: Report) -> Iterator[dict[str, Any]]:
    """Runs one replay each: results that follow from a seed need no second run."""
    workloads: dict[str, Chats | Documents] = {"chats": settings.chats, "reread": settings.documents}
    for name, workload in workloads.items():
        for capacity in settings.hit_capacities:
            report.progress(f"index: hit rates of {name}, {capacity} slots")
            task = _replay(name, workload, HIT_RATE_PAGE, capacity)
            for worker in workers:
                for policy in _policies(worker.system):
                    answer = worker.ask(task | {"task": "hits", "policy": policy})
                    rate = {"hit_rate": answer["hit_rate"]} if "hit_rate" in answer else {}
                    yield {
                        "workload": name, "capacity_tokens": capacity, "page_size": HIT_RATE_PAGE,
                        "system": worker.system, "label": SYSTEMS[worker.system].label, "policy": policy or "lru",
                        **rate, "note": answer.get("error", ""),
                    }  # fmt: skip


def _policies(system: str) -> Sequence[str | None]:
    """Returns Mainstem's built-in policies; other systems use their default, which is LRU."""
    if system != OURS:
        return (None,)
    from mainstem.cache.policies import BUILT_IN

    return tuple(BUILT_IN)


def _rows(workers: Sequence[Worker], samples: list[dict[str, Any]], settings: Settings) -> Iterator[dict[str, Any]]:
    for page_size in settings.page_sizes:
        for worker in workers:
            yield _row(worker, page_size, samples, settings.systems[0])


def _row(worker: Worker, page_size: int, samples: list[dict[str, Any]], ours: str) -> dict[str, Any]:
    entry = SYSTEMS[worker.system]
    row: dict[str, Any] = {"system": worker.system, "label": entry.label, "page_size": page_size, "note": entry.note}
    if page_size not in entry.page_sizes:
        return row | {"note": worker.failure or f"not run: {HASH_EACH}"}

    def of(system: str, mode: str) -> list[dict[str, Any]]:
        return [s for s in samples if (s["system"], s["page_size"], s["mode"]) == (system, page_size, mode)]

    errors = [sample["error"] for mode in MODES for sample in of(worker.system, mode) if "error" in sample]
    if errors:
        return row | {"note": errors[0]}
    parts = [sample["parts"] for sample in of(worker.system, "parts")]
    return row | {
        "prepared": _summary(of(worker.system, "prepared"), of(ours, "prepared")),
        "lists": _summary(of(worker.system, "lists"), of(ours, "lists")),
        "hit_rate": of(worker.system, "prepared")[0]["hit_rate"],
        "parts_us": {part: median(times[part] for times in parts) for part in parts[0]},
    }


def _summary(samples: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, float]:
    """Summarizes samples. Ratios are taken within each round, when the machine was equally busy for both."""
    us = [sample["us"] for sample in samples]
    return {
        "us": median(us),
        "least_us": min(us),
        "most_us": max(us),
        "cpu_us": median(sample["cpu_us"] for sample in samples),
        "ratio": median(sample["us"] / base["us"] for sample, base in zip(samples, ours, strict=True)),
        "cpu_ratio": median(sample["cpu_us"] / base["cpu_us"] for sample, base in zip(samples, ours, strict=True)),
    }


def _absences(workers: Sequence[Worker]) -> Iterator[str]:
    for worker in workers:
        if worker.failure is not None:
            yield f"{SYSTEMS[worker.system].label}: {worker.failure}"


def _disagreements(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields systems with a different hit rate. Systems driven alike hit the same tokens, or the table is wrong."""
    rates: dict[int, float] = {}
    for row in rows:
        if "hit_rate" in row:
            expected = rates.setdefault(row["page_size"], row["hit_rate"])
            if abs(row["hit_rate"] - expected) > HIT_RATE_TOLERANCE:
                yield f"{row['label']}, page {row['page_size']}: hit rate {row['hit_rate']:.4f}, not {expected:.4f}"
