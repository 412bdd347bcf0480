"""Installs what requirements-peers.txt lists into the interpreter that runs this, part by part.

A part that cannot be installed is named and does not stop the others: the benchmark's tables say which systems are
missing. Needs pip, and nothing else.
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
    """The lines of each part, by its name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith(PART):
            name = line.removeprefix(PART)
        elif line and not line.startswith("#"):
            found.setdefault(name, []).append(line)
    return found


def commands(lines: list[str]) -> list[list[str]]:
    """What pip is called with for a part: what comes without its needs, then the rest."""
    alone = [line.removesuffix(ALONE).strip() for line in lines if line.endswith(ALONE)]
    rest = [line for line in lines if not line.endswith(ALONE)]
    install = ["install", "--quiet", "--disable-pip-version-check"]
    calls = [[*install, "--no-deps", *alone]] if alone else []
    return calls + ([[*install, *rest]] if rest else [])


def install(text: str, pip: Callable[[list[str]], int]) -> list[str]:
    """Calls pip for each part; the parts that failed.

    Args:
        pip: called with its arguments; gives its exit status.
    """
    failed = []
    for name, lines in parts(text).items():
        print(f"peers: {name}", flush=True)
        if any(pip(arguments) for arguments in commands(lines)):
            failed.append(name)
    return failed


def _pip(arguments: list[str]) -> int:
    """What pip says is passed on where it fails; else it is a long list of needs that were left out on purpose."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        print(*done.stderr.splitlines()[-5:], sep="\n", file=sys.stderr)
    return done.returncode


def main() -> None:
    """Installs, and names what could not be installed; that is no failure of this script."""
    for name in install(LIST.read_text(), _pip):
        print(f"peers: not installed: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
