"""The index alone: microseconds a request of Mainstem and its peers, each in its own process, taking turns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

from rich.table import Table

from bench.replay import MODES, SYSTEMS
from bench.report import Report
from bench.workload import Chats, digest

ROOT = Path(__file__).parents[1]
HIT_RATE_TOLERANCE = 1e-4
_SUMMARY = ("median", "least to most", "CPU", "× Mainstem", "× its CPU")
_PARTS = ("match", "insert", "evict")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Args:
        chats: the workload.
        capacity_tokens: slots of the pool.
        page_sizes: tokens a page.
        rounds: turns that each system has.
        systems: names from `replay.SYSTEMS`; the first is what the others are compared with.
    """

    chats: Chats = field(default_factory=Chats)
    capacity_tokens: int = 150_000
    page_sizes: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5
    systems: tuple[str, ...] = tuple(SYSTEMS)


QUICK = Settings(chats=Chats(chats=60), rounds=3)


class Worker:
    """A process that replays the workload on one system; made when it is ready, or has failed. A context manager.

    Attributes:
        versions: of the packages that it measures.
        failure: why it measures nothing (any more); None while it does.
    """

    def __init__(self, system: str, python: str, settings: Settings) -> None:
        self.system = system
        self.failure: str | None = None
        workload = json.dumps(asdict(settings.chats) | {"capacity_tokens": settings.capacity_tokens})
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115, closed by __exit__
        self._process = subprocess.Popen(
            [python, "-m", "bench.replay", system, workload],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        self.versions: dict[str, str] = self._read().get("versions", {})

    def measure(self, page_size: int, mode: str) -> dict[str, Any]:
        """One replay; nothing once it has failed."""
        if self.failure is None:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"page_size": page_size, "mode": mode}) + "\n")
            self._process.stdin.flush()
        return self._read() if self.failure is None else {}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").split("\n")
        last = next((text.strip() for text in reversed(said) if text.strip()), f"exit {self._process.returncode}")
        absent = last.startswith(("ModuleNotFoundError", "ImportError"))
        self.failure = ("not installed: " if absent else "failed: ") + last.replace(str(ROOT) + "/", "")
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._errors.close()


def run(settings: Settings, report: Report, peers_python: str | None = None) -> None:
    """Measures everything and adds its tables to the report.

    Args:
        peers_python: the interpreter that has the peers; None: this one.
    """
    with ExitStack() as stack:
        workers = []
        for name in settings.systems:
            report.progress(f"index: {SYSTEMS[name].label} starts")
            python = peers_python if peers_python and SYSTEMS[name].peer else sys.executable
            workers.append(stack.enter_context(Worker(name, python, settings)))
        samples = list(_take_turns(workers, settings, report))
    for worker in workers:
        report.versions.update(worker.versions)
    shape = asdict(settings.chats)
    report.settings.update(shape, capacity_tokens=settings.capacity_tokens, rounds=settings.rounds)
    report.settings["digest"] = digest(settings.chats.prompts())
    report.rows.extend(_rows(workers, samples, settings))
    report.notes.extend(_disagreements(report.rows))
    report.tables.extend([_requests_table(report.rows), _parts_table(report.rows), _lists_table(report.rows)])


def _take_turns(workers: Sequence[Worker], settings: Settings, report: Report) -> Iterator[dict[str, Any]]:
    for turn in range(settings.rounds):
        for page_size in settings.page_sizes:
            for mode in MODES:
                report.progress(f"index: round {turn + 1} of {settings.rounds}, page {page_size}, {mode}")
                for worker in workers:
                    if page_size in SYSTEMS[worker.system].page_sizes:
                        result = worker.measure(page_size, mode)
                        yield {"system": worker.system, "page_size": page_size, "mode": mode, **result}


def _rows(workers: Sequence[Worker], samples: list[dict[str, Any]], settings: Settings) -> Iterator[dict[str, Any]]:
    for page_size in settings.page_sizes:
        for worker in workers:
            yield _row(worker, page_size, samples, settings.systems[0])


def _row(worker: Worker, page_size: int, samples: list[dict[str, Any]], ours: str) -> dict[str, Any]:
    entry = SYSTEMS[worker.system]
    row: dict[str, Any] = {"system": worker.system, "label": entry.label, "page_size": page_size, "note": entry.note}
    if worker.failure is not None or page_size not in entry.page_sizes:
        return row | {"note": worker.failure or "not run: a hash for each token"}

    def of(system: str, mode: str) -> list[dict[str, Any]]:
        return [s for s in samples if (s["system"], s["page_size"], s["mode"]) == (system, page_size, mode)]

    parts = [sample["parts"] for sample in of(worker.system, "parts")]
    return row | {
        "prepared": _summary(of(worker.system, "prepared"), of(ours, "prepared")),
        "lists": _summary(of(worker.system, "lists"), of(ours, "lists")),
        "hit_rate": of(worker.system, "prepared")[0]["hit_rate"],
        "parts_us": {part: median(times[part] for times in parts) for part in parts[0]},
    }


def _summary(samples: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios are taken within each round, when the machine was as busy for both."""
    us = [sample["us"] for sample in samples]
    return {
        "us": median(us),
        "least_us": min(us),
        "most_us": max(us),
        "cpu_us": median(sample["cpu_us"] for sample in samples),
        "ratio": median(sample["us"] / base["us"] for sample, base in zip(samples, ours, strict=True)),
        "cpu_ratio": median(sample["cpu_us"] / base["cpu_us"] for sample, base in zip(samples, ours, strict=True)),
    }


def _disagreements(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Systems that were driven alike find the same tokens; where they do not, the table must not be trusted."""
    rates: dict[int, float] = {}
    for row in rows:
        if "hit_rate" in row:
            expected = rates.setdefault(row["page_size"], row["hit_rate"])
            if abs(row["hit_rate"] - expected) > HIT_RATE_TOLERANCE:
                yield f"{row['label']}, page {row['page_size']}: hit rate {row['hit_rate']:.4f}, not {expected:.4f}"


def _requests_table(rows: list[dict[str, Any]]) -> Table:
    title = "microseconds a request, all calls; prompts in each system's own type"
    table = Table("page", "system", *_SUMMARY, "hit rate", "", title=title)
    for row in rows:
        table.add_row(str(row["page_size"]), row["label"], *_cells(row.get("prepared")), _rate(row), row["note"])
    return table


def _parts_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("page", "system", *_PARTS, title="microseconds a call, median; one part at a time")
    for row in rows:
        if "parts_us" in row:
            parts = [f"{row['parts_us'][part]:.1f}" if part in row["parts_us"] else "–" for part in _PARTS]
            table.add_row(str(row["page_size"]), row["label"], *parts)
    return table


def _lists_table(rows: list[dict[str, Any]]) -> Table:
    title = "microseconds a request, all calls; prompts as lists of int, conversion counted"
    table = Table("page", "system", *_SUMMARY, title=title)
    for row in rows:
        if "lists" in row:
            table.add_row(str(row["page_size"]), row["label"], *_cells(row["lists"]))
    return table


def _cells(summary: dict[str, float] | None) -> list[str]:
    if summary is None:
        return ["–"] * len(_SUMMARY)
    spread = f"{summary['least_us']:.1f} to {summary['most_us']:.1f}"
    ratios = [f"{summary['ratio']:.2f}", f"{summary['cpu_ratio']:.2f}"]
    return [f"{summary['us']:.1f}", spread, f"{summary['cpu_us']:.1f}", *ratios]


def _rate(row: dict[str, Any]) -> str:
    return f"{row['hit_rate']:.4f}" if "hit_rate" in row else "–"
