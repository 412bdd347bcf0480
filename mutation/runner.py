"""Drives a process that forks for each run of tests (`mutation.forks`): what has failed, hung or died."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation.copies import environment

RECORDING_S = 900.0  # that a test may take while it is recorded
START_S = 120.0  # that the imports of a run, and the collection of its tests, may take
TEST_S, TIMES = 10.0, 8.0  # a test may take the first and so many times its recorded time
SEED_S = 5.0  # that a seed of the simulator takes


@dataclass
class Run:
    """The result of a run.

    Args:
        failed: tests that failed, in order, each with what it said.
        how: "" if all passed; "failed", "hung" or "died".
        late: it was ended after the time that it had, and the tests that were left did not run.
        test: that ran last.
        done: the seconds that each test took that has ended.
    """

    failed: dict[str, str] = field(default_factory=dict)
    how: str = ""
    late: bool = False
    test: str = ""
    done: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    starts: set[str] = field(default_factory=set)
    deadline: set[str] = field(default_factory=set)
    modules: list[str] = field(default_factory=list)


class Runner:
    """Runs tests and profiles of the simulator in a copy of the repository.

    Args:
        copy: of the repository.
        modules: of other packages, imported once for all runs.
        command: starts the process.
        test_s: that a test may take besides a multiple of its recorded time.
        clock: in seconds.
    """

    def __init__(
        self,
        copy: Path,
        modules: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-m", "mutation.forks"),
        test_s: float = TEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._rest, self._test_s = clock, b"", test_s
        names = copy / "modules.json"
        names.write_text(json.dumps(list(modules)))
        env = environment(copy / "src", copy)
        env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [*command, str(names)], cwd=copy, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._child = 0
        if next(self._events(lambda: START_S), None) is None:
            raise ChildProcessError("the process that forks for tests did not start")

    def close(self) -> None:
        """Ends the process."""
        self._kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def test(
        self,
        files: Sequence[str],
        wanted: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
        *,
        every: bool = False,
        coverage: Path | None = None,
        most_s: float = math.inf,
    ) -> Run:
        """Runs tests of files, in the order of `wanted` (None: all), until one fails, or `every` one of them.

        Args:
            seconds: that each test took when it was recorded.
            coverage: a file that the lines are recorded in.
            most_s: that they may take together.
        """
        places = None if wanted is None else {name: place for place, name in enumerate(wanted)}
        request = {"task": "tests", "files": list(files), "wanted": places, "all": every}
        return self._run({**request, "coverage": str(coverage) if coverage else None}, seconds or {}, most_s)

    def simulate(
        self, profile: str, seeds: int, operations: int, coverage: Path | None = None, most_s: float = math.inf
    ) -> Run:
        """Runs so many seeds of a profile, until one fails."""
        request = {"task": "simulate", "profile": profile, "seeds": seeds, "operations": operations}
        seconds = {f"simulator: {profile}": SEED_S}
        return self._run({**request, "coverage": str(coverage) if coverage else None}, seconds, most_s)

    def _run(self, request: dict[str, Any], seconds: Mapping[str, float], most_s: float) -> Run:
        run, began_s = Run(), self._clock()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

        def limit() -> float:
            if request["coverage"]:
                return RECORDING_S
            own = self._test_s + TIMES * seconds.get(run.test, 1.0) if run.test else START_S
            return max(0.0, min(own, began_s + most_s - self._clock()))

        ended = self._hear(run, limit)
        if not ended and self._process.poll() is not None:
            raise ChildProcessError("the process that forks for tests has died")
        run.late = not ended and self._clock() - began_s >= most_s
        if not ended and not run.late:
            run.how = "hung"
        if run.how in ("hung", "died"):
            run.failed.setdefault(run.test or "the imports", run.how)
        self._kill()
        if not ended:  # the process tells of the end of the child that was killed
            self._hear(Run(), lambda: START_S)
        run.seconds = self._clock() - began_s
        return run

    def _hear(self, run: Run, limit: Callable[[], float]) -> bool:
        """Notes what events say of a run; returns whether the child has ended."""
        for event in self._events(limit):
            ((kind, said),) = ((kind, said) for kind, said in event.items() if kind not in ("what", "seconds"))
            if kind == "child":
                self._child = said
            elif kind == "test":
                run.test = said
            elif kind == "failed":
                run.failed.setdefault(said, event["what"])
            elif kind == "done":
                run.done[said] = event["seconds"]
            elif kind == "starts":
                run.starts.add(said)
            elif kind == "deadline":
                run.deadline.add(said)
            elif kind == "modules":
                run.modules = said
            elif kind == "end":
                run.how = _how(said, run)
                return True
        return False

    def _events(self, limit: Callable[[], float]) -> Iterator[dict[str, Any]]:
        """Yields events until none comes for as long as the limit says, or the process is gone."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                yield json.loads(line)
                continue
            if not select.select([descriptor], [], [], limit())[0]:
                return
            data = os.read(descriptor, 1 << 16)
            if not data:
                return
            self._rest += data

    def _kill(self) -> None:
        """Ends the child with all processes that its tests started."""
        if self._child:
            with suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)
        self._child = 0


def _how(status: int, run: Run) -> str:
    """Names the end of a child; pytest returns 5 if it found no test."""
    if run.failed:
        return "failed"
    return "" if status in (0, 5) else "died"
