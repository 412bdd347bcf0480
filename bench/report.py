"""The results of a benchmark: tables for the terminal, and JSON with the machine that it ran on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGES = ("mainstem", "numpy", "torch", "transformers")


@dataclass(slots=True)
class Report:
    """The results of one benchmark, which fills them in.

    Args:
        name: name of the benchmark.
        date: when it ran, ISO 8601.
        quick: whether it ran with fewer and smaller settings.
        progress: called with a line of text before each step.
        kind: of the machine, where each kind has a record of its own; empty otherwise.

    Attributes:
        rows: rows of the main table.
        more: further lists of rows, by their names in the JSON.
        failures: failed checks; the process fails if there are any.
    """

    name: str
    date: str
    quick: bool
    progress: Callable[[str], None]
    kind: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def show(self, console: Console) -> None:
        """Prints tables, notes and failures."""
        for table in self.tables:
            console.print(table)
        for note in self.notes:
            console.print(f"[bold]note[/bold]: {note}")
        for failure in self.failures:
            console.print(f"[bold]failed[/bold]: {failure}")

    def write(self, folder: Path, recorded: bool = False) -> Path:
        """Writes `<name>.json`, or `recorded-<name>.json`, which the repository keeps; returns its path.

        A kind follows the name: `<name>-<kind>.json`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}-{self.kind}" if self.kind else self.name
        path = folder / f"{'recorded-' if recorded else ''}{name}.json"
        path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        return path

    def as_json(self) -> dict[str, Any]:
        """Returns everything but the tables, which repeat the rows."""
        return {
            "name": self.name,
            "date": self.date,
            "quick": self.quick,
            "seconds": round(time.monotonic() - self._began),
            "commit": _commit(),
            "machine": _machine(),
            "versions": _versions() | self.versions,
            "settings": self.settings,
            "rows": self.rows,
            **self.more,
            "notes": self.notes,
        }


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Returns the commit that is checked out; None without a repository or git."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
