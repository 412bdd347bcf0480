"""Runs SPIN: makes the checker of a model, compiles it, and reads what it found."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from proof.checks import Check

_MODELS = Path(__file__).parent
_DEPTH = 5_000_000  # steps on the way to a state, at most
_MEMORY_MIB = 6000


class ProofError(Exception):
    """A model could not be checked: it does not compile, or the search ended before it was complete."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        error: what was violated, and after how many steps; None: no reachable state violates anything.
        states: different states.
        transitions: steps between them.
        memory_mib: memory in all.
        seconds: of the search.
    """

    error: str | None
    states: int
    transitions: int
    memory_mib: float
    seconds: float


def lacking() -> list[str]:
    """Returns the programs that are needed but not installed."""
    return [program for program in ("spin", "gcc") if shutil.which(program) is None]


def search(check: Check, bugs: Sequence[str] = ()) -> Found:
    """Visits every state of a model; stops at the first that violates something.

    Args:
        check: the model and its bounds.
        bugs: flags of bugs to reintroduce.

    Raises:
        ProofError: see there.
    """
    defines = [f"-D{name}" for name in (*check.bounds, *(f"BUG_{flag}" for flag in bugs))]
    with TemporaryDirectory(prefix="proof-") as name:
        folder = Path(name)
        _call(folder, "spin", *defines, "-a", str(_MODELS / f"{check.model}.pml"))
        how = ["-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", f"-DMEMLIM={_MEMORY_MIB}"]
        _call(folder, "gcc", "-O0" if bugs else "-O2", "-w", *how, "-o", "pan", "pan.c")
        return _read(_call(folder, "./pan", f"-m{_DEPTH}"))


def _call(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProofError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _read(text: str) -> Found:
    """Reads the report of a search."""
    error = re.search(r"^pan:\d+: (.*)", text, re.MULTILINE)
    if ("Search not completed" in text and error is None) or "max search depth too small" in text:
        raise ProofError(f"the search is not complete: {text[:2000]}")

    def number(pattern: str) -> float:
        found = re.search(pattern, text)
        if found is None:
            raise ProofError(f"no {pattern!r} in {text[:2000]}")
        return float(found[1])

    states, transitions = number(r"(\d+) states, stored"), number(r"(\d+) transitions")
    memory, seconds = number(r"([\d.]+)\s+total actual memory usage"), number(r"elapsed time ([\d.e+-]+)")
    return Found(error[1] if error else None, int(states), int(transitions), memory, seconds)
