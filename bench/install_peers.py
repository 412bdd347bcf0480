"""Installs the packages of requirements-peers.txt into the running interpreter, part by part.

A part that cannot be installed is reported and does not stop the others; the benchmark's tables name missing systems.
Needs only pip.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

LIST = Path(__file__).with_name("requirements-peers.txt")
PART = "# part: "
ALONE = "# without its needs"


def parts(text: str) -> dict[str, list[str]]:
    """Returns the lines of each part by name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith(PART):
            name = line.removeprefix(PART)
        elif line and not line.startswith("#"):
            found.setdefault(name, []).append(line)
    return found


def commands(lines: list[str]) -> list[list[str]]:
    """Returns the pip commands for a part: packages without their dependencies first, then the rest."""
    alone = [line.removesuffix(ALONE).strip() for line in lines if line.endswith(ALONE)]
    rest = [line for line in lines if not line.endswith(ALONE)]
    install = ["install", "--quiet", "--disable-pip-version-check"]
    calls = [[*install, "--no-deps", *alone]] if alone else []
    return calls + ([[*install, *rest]] if rest else [])


def install(text: str, pip: Callable[[list[str]], int]) -> list[str]:
    """Calls pip for each part; returns the parts that failed.

    Args:
        pip: called with its arguments; returns the exit status.
    """
    failed = []
    for name, lines in parts(text).items():
        print(f"peers: {name}", flush=True)
        if any(pip(arguments) for arguments in commands(lines)):
            failed.append(name)
    return failed


def _pip(arguments: list[str]) -> int:
    """Runs pip. Prints its output only on failure: otherwise it lists dependencies that were left out on purpose."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        print(*done.stderr.splitlines()[-5:], sep="\n", file=sys.stderr)
    return done.returncode


def main() -> None:
    """Installs the peers, and reports parts that could not be installed; these do not fail the script."""
    for name in install(LIST.read_text(), _pip):
        print(f"peers: not installed: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
