"""Instructions a request of a fixed run of the core, counted by callgrind and kept in bench/instructions.json.

    python -m bench.native.instructions [--write]

A figure that does not depend on how busy the machine is, nor on its caches; it does depend on the compiler, whose
version is kept beside it. An instruction counts to the source file that it was written in, also where it was inlined,
so a group is a file: match, insert, evict, order (the heap), children (the hash table) and so on. Code of libc is not
counted.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.native import CORE, ROOT, build, compiler_version

KEPT = ROOT / "bench" / "instructions.json"
RUNS = {
    "chats, page 1": "1", "chats, page 16": "16", "chats, page 64": "64", "128k in 1,024 nodes": "long",
    "chats, page 16, remembering": "16+4", "chats, page 16, remembering and full": "16+1",
    "chats, page 16, explaining": "16+4?",
}  # fmt: skip
"""What is counted, and the program's argument for it."""
TOTAL = "total"
STANDARD = "standard library"
"""Templates of the standard library, which are compiled into the core."""
GROWTH = 1.03
"""More than so many times the kept count fails a test: nobody makes the core slower without a word."""

Counts = dict[str, dict[str, float]]


def measure(runs: Iterable[str] = RUNS, core: Path = CORE) -> dict[str, Any]:
    """Builds and runs; the compiler, and instructions a request by run and group.

    Raises:
        CannotBuild: no g++, or it fails.
        FileNotFoundError: valgrind is missing.
    """
    if shutil.which("valgrind") is None:
        raise FileNotFoundError("valgrind was not found")
    program = build("instructions", ["-g"], core)
    return {"compiler": compiler_version(), "runs": {run: _count(program, RUNS[run]) for run in runs}}


def kept() -> dict[str, Any]:
    """What is kept in the repository, in the form of `measure`."""
    return dict(json.loads(KEPT.read_text()))


def growths(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """A line for each run whose total has grown by more than `GROWTH` allows."""
    lines = []
    for run, counts in new["runs"].items():
        before = old["runs"].get(run, {}).get(TOTAL)
        if before and counts[TOTAL] > GROWTH * before:
            lines.append(f"{run}: {counts[TOTAL]:.0f} instructions a request, {counts[TOTAL] / before - 1:.1%} more")
    return lines


def parse(lines: Iterable[str], program: str) -> Counter[str]:
    """Instructions by source file of one program, from callgrind's output (format "1", one event)."""
    names: dict[tuple[str, str], str] = {}
    counts: Counter[str] = Counter()
    current = {"ob": "", "fl": ""}
    skip = False
    for line in lines:
        if found := re.match(r"(ob|fl|fi|fe)=(\(\d+\))(?: (.*))?$", line):
            kind = "ob" if found[1] == "ob" else "fl"
            name = names.setdefault((kind, found[2]), found[3] or "")
            current[kind] = name
        elif found := re.match(r"(cob|cfi|cfl)=(\(\d+\))(?: (.*))?$", line):
            names.setdefault(("ob" if found[1] == "cob" else "fl", found[2]), found[3] or "")
        elif line.startswith("calls="):
            skip = True  # the next line is what the callee cost
        elif re.match(r"[+\-*\d]", line):
            if not skip and Path(current["ob"]).name == program:
                counts[current["fl"]] += int(line.split()[1])
            skip = False
    return counts


def table(old: dict[str, Any] | None, new: dict[str, Any]) -> Table:
    """Old, new and the change, a line for each run and group."""
    shown = Table("run", "group", "kept", "now", "change", title="instructions a request, libc excluded")
    for run, counts in new["runs"].items():
        before = old["runs"].get(run, {}) if old else {}
        for group in sorted(counts, key=lambda name: (name == TOTAL, -counts[name])):
            was = before.get(group)
            change = f"{counts[group] / was - 1:+.1%}" if was else "–"
            shown.add_row(run, group, f"{was:.0f}" if was else "–", f"{counts[group]:.0f}", change)
        shown.add_section()
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and with `--write` keeps the new counts."""
    parser = argparse.ArgumentParser(prog="python -m bench.native.instructions", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the new counts in {KEPT.name}")
    options = parser.parse_args(arguments)
    old = kept() if KEPT.exists() else None
    new = measure()
    console = Console()
    console.print(table(old, new))
    if old and old["compiler"] != new["compiler"]:
        console.print(f"kept: {old['compiler']}; now: {new['compiler']}; their counts differ for that alone")
    if options.write:
        KEPT.write_text(json.dumps(new, indent=1) + "\n")
        console.print(f"written to {KEPT.name}")


def _count(program: Path, argument: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        options = ["--tool=callgrind", "--toggle-collect=counted", "--compress-pos=no", f"--callgrind-out-file={out}"]
        command = ["valgrind", "--quiet", *options, str(program), argument]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        with out.open() as lines:
            files = parse(lines, program.name)
    return _by_group(files, int(done.stdout))


def _by_group(files: Counter[str], requests: int) -> dict[str, float]:
    groups: Counter[str] = Counter()
    for file, instructions in files.items():
        path = Path(file)
        if path.name not in ("instructions.cpp", "measure.h"):  # the run itself
            groups[path.stem if CORE.name in path.parts else STANDARD] += instructions
    counts = {group: round(n / requests, 1) for group, n in sorted(groups.items())}
    return counts | {TOTAL: round(sum(groups.values()) / requests, 1)}


if __name__ == "__main__":
    main()
