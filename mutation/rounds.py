"""A round: each mutant of a sample against the tests that reach it, a wider choice and the simulator.

A folder keeps each result, line by line, so that a round goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Protocol

from mutation.copies import Builder, write
from mutation.reach import OPERATIONS, SEEDS, Reach
from mutation.runner import Run, Runner
from mutation.sample import PACKAGE, Mutant, draw, mutants_of
from mutation.sites import Site

TESTS = {
    "tiers": ("tests/tiers/",),
    "storage": ("tests/storage/",),
    "cache": ("tests/cache/",),
    "runtime": ("tests/runtime/",),
    "server": ("tests/server/", "tests/commands/"),
    "fleet": ("tests/fleet/",),
    "owner and events": ("tests/owner/", "tests/events/"),
    "integrations": ("tests/integrations/", "tests/runtime/test_hf.py"),
    "replay": ("tests/replay/",),
    "the rest": ("tests/watch/", "tests/commands/", "tests/house/", "tests/runtime/test_settings.py"),
}
"""The wider choice of each area."""

CORE_TESTS = {
    "kernels": ("tests/runtime/kernels/", "tests/runtime/attention/"),
    "replay": ("tests/replay/",),
    "routing": ("tests/fleet/", "tests/events/"),
    "python": ("tests/cache/", "tests/core/", "tests/replay/", "tests/runtime/kernels/"),
    "": ("tests/cache/", "tests/tiers/"),
}
"""The tests of each folder of the core, whose lines are not recorded; "": of all others."""

NO_PROFILES = ("kernels", "replay")
"""Folders of the core that no profile of the simulator runs."""


class SourceChanged(RuntimeError):
    """The package is another than when the round began."""


@dataclass(frozen=True)
class Budget:
    """The recorded seconds of tests that a mutant is tried with.

    Args:
        first_s: of those that reach it, fast ones of few files first.
        reach_s: of further ones that reach it.
        wider_s: of the wider choice.
        simulator_s: of the profiles of the simulator.
        every: whether a mutant that was killed meets the other tests that reach it, too.
    """

    first_s: float = 8.0
    reach_s: float = 40.0
    wider_s: float = 60.0
    simulator_s: float = 25.0
    every: bool = False


@dataclass
class Verdict:
    """The result of a mutant.

    Args:
        outcome: "killed", "survived", or "invalid" if it does not compile.
        how: it was killed: "failed", "hung" or "died".
        by: the first test or profile that saw it.
        what: what that said.
        stage: "reach", "wider" or "simulator": who saw it.
        tests: how many ran.
        left: how many of those chosen did not, for want of time.
        killers: all that saw it, where all were asked.
    """

    outcome: str = "survived"
    how: str = ""
    by: str = ""
    what: str = ""
    stage: str = ""
    tests: int = 0
    left: int = 0
    seconds: float = 0.0
    killers: list[str] = field(default_factory=list)


class Work(Protocol):
    """Mutants that wait for a verdict."""

    def waiting(self) -> Iterator[Mutant]:
        """Yields those that are left."""

    def note(self, mutant: Mutant, verdict: Verdict) -> None:
        """Takes a verdict."""


class Again:
    """Mutants that were drawn once, where their lines are now; a line that has another text has them no more."""

    def __init__(self, root: Path, keys: Iterable[tuple[str, str, str, int]]) -> None:
        wanted = set(keys)
        files = sorted({file for file, *_ in wanted if (root / PACKAGE / file).exists()})
        self._mutants = [mutant for file in files for mutant in mutants_of(root, file) if mutant.key in wanted]

    def waiting(self) -> Iterator[Mutant]:
        """Yields all of them."""
        yield from self._mutants

    def note(self, mutant: Mutant, verdict: Verdict) -> None:
        """Keeps nothing: a round is what was seen at its time."""


class Round:
    """The mutants of a seed, with the verdicts that are known.

    Args:
        folder: that keeps both.
        root: the repository.

    Raises:
        SourceChanged: the round began with another package.
    """

    def __init__(self, folder: Path, root: Path, seed: int, python: int, native: int) -> None:
        self.root, self.seed, self.python, self.native = root, seed, python, native
        self._folder, self._lock = folder, Lock()
        plan = folder / "plan.json"
        sources = digest(root)
        if not plan.exists():
            folder.mkdir(parents=True, exist_ok=True)
            mutants = [asdict(mutant) for mutant in draw(root, seed, python, native)]
            drawn = {"sources": sources, "python": python, "native": native, "commit": commit(root), "mutants": mutants}
            write(plan, json.dumps(drawn, indent=1).encode())
        kept = json.loads(plan.read_text())
        if kept["sources"] != sources or (kept["python"], kept["native"]) != (python, native):
            raise SourceChanged(
                f"round {seed} began at {kept['commit']} with {kept['python']} mutants of Python and "
                f"{kept['native']} of the core: end it there, or begin one with another seed (or remove {folder})"
            )
        self.commit: str = kept["commit"]
        self.mutants = [Mutant(each["file"], Site(**each["site"]), each["occurrence"]) for each in kept["mutants"]]
        self.verdicts: dict[tuple[str, str, str, int], Verdict] = {}
        results = folder / "results.jsonl"
        for line in results.read_text().splitlines() if results.exists() else ():
            entry = json.loads(line)
            self.verdicts[tuple(entry["key"])] = Verdict(**entry["verdict"])

    def waiting(self) -> Iterator[Mutant]:
        """Yields the mutants that are left, as long as the round needs more."""
        for mutant in self.mutants:
            if mutant.key not in self.verdicts and (mutant.area != "core" or self.valid("core") < self.native):
                yield mutant

    def valid(self, area: str) -> int:
        """Returns how many mutants of an area have a verdict."""
        known = (self.verdicts.get(mutant.key) for mutant in self.mutants if mutant.area == area)
        return sum(verdict is not None and verdict.outcome != "invalid" for verdict in known)

    def note(self, mutant: Mutant, verdict: Verdict) -> None:
        """Keeps a verdict."""
        with self._lock:
            self.verdicts[mutant.key] = verdict
            with (self._folder / "results.jsonl").open("a") as file:
                file.write(json.dumps({"key": mutant.key, "verdict": asdict(verdict)}) + "\n")

    @property
    def is_whole(self) -> bool:
        """Whether each mutant has its verdict."""
        return next(self.waiting(), None) is None


class Bench:
    """Copies of the repository in which mutants are made, one at a time in each.

    Args:
        runners: by their copies.
        builder: makes what compiles the core, when the first mutant of the core comes.
        clock: in seconds.
    """

    def __init__(
        self,
        reach: Reach,
        root: Path,
        runners: Sequence[tuple[Path, Runner]],
        builder: Callable[[], Builder],
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reach, self._root, self._budget, self._clock, self._builder = reach, root, budget, clock, builder
        self._sound: set[str] = set()
        self._unsound: set[str] = set()
        self._lock = Lock()
        self._core: Builder | None = None
        self._free: SimpleQueue[tuple[Path, Runner]] = SimpleQueue()
        for each in runners:
            self._free.put(each)

    def judge(self, mutant: Mutant) -> Verdict:
        """Makes a mutant in a copy that is free, and lets everything look at it that may see it."""
        began_s = self._clock()
        copy, runner = self._free.get()
        try:
            verdict = self._judge(mutant, copy, runner)
        finally:
            self._free.put((copy, runner))
        verdict.seconds = round(self._clock() - began_s, 1)
        return verdict

    def _judge(self, mutant: Mutant, copy: Path, runner: Runner) -> Verdict:
        text = mutant.source(self._root)
        if text is None:
            return Verdict("invalid")
        try:
            while True:
                with self._made(mutant, text, copy):
                    verdict = self._look(mutant, runner)
                if self._is_sound(verdict.by, runner):
                    return verdict
        except subprocess.CalledProcessError as error:
            return Verdict("invalid", what=" ".join(error.stderr.split())[-200:])

    def _built(self) -> Builder:
        """Returns what compiles the core, made when it is needed first."""
        with self._lock:
            self._core = self._core or self._builder()
            return self._core

    def _is_sound(self, test: str, runner: Runner) -> bool:
        """Whether a test passes without any mutant here and now; one that does not is asked no more."""
        if "::" in test and test not in self._sound:
            failed = runner.test([test.partition("::")[0]], [test], self._reach.seconds).failed
            (self._unsound if failed else self._sound).add(test)
        return test not in self._unsound

    @contextmanager
    def _made(self, mutant: Mutant, text: str, copy: Path) -> Iterator[None]:
        """Puts a mutant into a copy, and takes it out."""
        place = copy / PACKAGE / mutant.file
        with tempfile.TemporaryDirectory(prefix="mutant-") as name:
            if mutant.area == "core":
                module = self._built().build(mutant.file, text, Path(name))
                place, changed = copy / PACKAGE / module.name, module.read_bytes()
            else:
                changed = text.encode()
        before = place.read_bytes()
        write(place, changed)
        try:
            yield
        finally:
            write(place, before)

    def _look(self, mutant: Mutant, runner: Runner) -> Verdict:
        verdict, budget = Verdict(), self._budget
        tests, profiles, wider = self._choice(mutant)
        first = self._within(tests, budget.first_s)
        further = self._within([test for test in tests if test not in set(first)], budget.reach_s)
        for stage, chosen in (("reach", first), ("reach", further)):
            if not verdict.by or budget.every:
                self._test(verdict, stage, chosen, runner)
        if not verdict.by:
            ran = {*first, *further}
            chosen = self._within([*(test for test in tests if test not in ran), *wider], budget.wider_s)
            self._test(verdict, "wider", chosen, runner)
            verdict.left = len({*tests, *wider} - {*ran, *chosen})
        for profile in () if verdict.by else profiles:
            run = runner.simulate(profile.removeprefix("simulator: "), SEEDS, OPERATIONS, most_s=budget.simulator_s)
            if _noted(verdict, "simulator", run):
                break
        return verdict

    def _choice(self, mutant: Mutant) -> tuple[list[str], list[str], list[str]]:
        """Returns tests that reach a mutant, profiles that do, and further tests."""
        if mutant.area != "core":
            found = self._reach.reaching(mutant.file, mutant.site.line)
            tests = [name for name in found if name.startswith("tests/")]
            profiles = [name for name in found if not name.startswith("tests/")]
            return tests, profiles, self._reach.wider(mutant.file, mutant.site.line, tests, TESTS[mutant.area])
        folder = mutant.file.split("/")[2]
        tests = self._reach.of(CORE_TESTS.get(folder, CORE_TESTS[""]))
        others = [each for each in CORE_TESTS[""] + CORE_TESTS["python"] if each not in CORE_TESTS.get(folder, ())]
        wider = [test for test in self._reach.of(others) if test not in set(tests)]
        profiles = [name for name in self._reach.parts if name.startswith("simulator: ") and folder not in NO_PROFILES]
        return tests, profiles, wider

    def _within(self, tests: Sequence[str], most_s: float) -> list[str]:
        """Returns the first tests that fit a time, with what their files take before any test."""
        chosen: list[str] = []
        files, spent_s = set(), 0.0
        for test in (test for test in tests if test not in self._unsound):
            file = test.partition("::")[0]
            cost_s = self._reach.seconds[test] + (0.0 if file in files else self._reach.overhead(test))
            if spent_s + cost_s <= most_s or not chosen:
                chosen.append(test)
                files.add(file)
                spent_s += cost_s
        return chosen

    def _test(self, verdict: Verdict, stage: str, tests: Sequence[str], runner: Runner) -> None:
        """Runs tests; one that a busy machine may fail has to fail twice."""
        left = list(tests)
        while left:
            files = list(dict.fromkeys(test.partition("::")[0] for test in left))
            most_s = 60.0 + 3.0 * (self._budget.reach_s + self._budget.wider_s)
            run = runner.test(files, left, self._reach.seconds, every=self._budget.every, most_s=most_s)
            doubtful = run.failed.keys() & self._reach.deadline
            if doubtful and not runner.test([min(doubtful).partition("::")[0]], [min(doubtful)]).failed:
                run.failed = {test: what for test, what in run.failed.items() if test not in doubtful}
                left = [test for test in left if test not in run.done and test not in doubtful]
                run.how = run.how if run.failed else ""
            else:
                left = []
            _noted(verdict, stage, run)


def _noted(verdict: Verdict, stage: str, run: Run) -> bool:
    """Adds a run to a verdict; returns whether the mutant is killed."""
    verdict.tests += len(run.done)
    if run.failed and not verdict.by:
        by, what = next(iter(run.failed.items()))
        verdict.outcome, verdict.how, verdict.by, verdict.what, verdict.stage = "killed", run.how, by, what, stage
    verdict.killers += run.failed
    return bool(run.failed)


def go_on(
    work: Work,
    judge: Callable[[Mutant], Verdict],
    jobs: int,
    end_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Judges mutants that are left, so many at a time, until none is or a time of the clock has come."""
    left, lock = work.waiting(), Lock()

    def judge_some() -> None:
        while clock() < end_s:
            with lock:
                mutant = next(left, None)
            if mutant is None:
                return
            verdict = judge(mutant)
            work.note(mutant, verdict)
            seen = f"{verdict.how} {verdict.by}" if verdict.by else verdict.what
            where = f"{mutant.file}:{mutant.site.line} {mutant.site.operator}"
            say(f"{verdict.outcome:<9}{verdict.seconds:>6.1f} s  {where}  {seen}")

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(judge_some) for _ in range(jobs)]:
            done.result()


def digest(root: Path) -> str:
    """Returns a digest of the sources of the package."""
    total = hashlib.sha256()
    for path in sorted((root / PACKAGE).rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def commit(root: Path) -> str:
    """Returns the commit that is checked out, with a + if there are changes."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
