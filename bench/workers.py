"""Starts processes that each run one system, and sends them tasks. See child.py for the tasks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

ROOT = Path(__file__).parents[1]


class Worker:
    """A process with one system. A context manager. It starts at once, and may still be starting.

    Args:
        system: its name in `entries.SYSTEMS`.
        python: the interpreter.

    Attributes:
        failure: why the process does not answer; None while it does.
    """

    def __init__(self, system: str, python: str) -> None:
        self.system = system
        self.failure: str | None = None
        self._versions: dict[str, str] | None = None
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115, closed by __exit__
        self._process = subprocess.Popen(
            [python, "-m", "bench.child", system],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def versions(self) -> dict[str, str]:
        """Waits until it is ready; returns the versions of the packages that it measures, none if it failed."""
        if self._versions is None:
            self._versions = self._read().get("versions", {})
        return self._versions

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """Sends a task; returns the answer, or {"error": why there is none}."""
        self.versions()
        if self.failure is not None:
            return {"error": self.failure}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace").split("\n")
        last = next((text.strip() for text in reversed(errors) if text.strip()), f"exit {self._process.returncode}")
        absent = last.startswith(("ModuleNotFoundError", "ImportError"))
        self.failure = ("not installed: " if absent else "failed: ") + last.replace(str(ROOT) + "/", "")
        return {"error": self.failure}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._errors.close()
