"""Which tests, and which profiles of the simulator, reach which lines of the package: recorded once, with contexts.

Each test file is recorded by itself, so that the recording goes on where it ended, and a file that has changed is
recorded again. Lines of the package that have moved since are found by the text around them. A line that another
process runs, which a test has started, is not seen: `wider` names such tests.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from coverage.numbits import num_in_numbits

from mutation.copies import write
from mutation.runner import Run, Runner

SEEDS, OPERATIONS = 6, 1500
"""Of a profile of the simulator, whether it is recorded or looks at a mutant."""


@dataclass
class Part:
    """The recording of a test file, or of a profile of the simulator.

    Args:
        name: "tests/..." or "simulator: profile".
        digest: of the test file.
        sources: the state of the package that it was recorded with.
        seconds: of each test that passed.
        starts: tests that start processes.
        deadline: tests that a busy machine may fail.
        overhead: the seconds of imports and collection.
        modules: of other packages that it has imported.
        failed: tests that did, though nothing was changed: they are never asked.
    """

    name: str
    digest: str
    sources: str
    seconds: dict[str, float] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)
    deadline: list[str] = field(default_factory=list)
    overhead: float = 0.0
    modules: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Reach:
    """All recordings.

    Args:
        folder: with the recording.
        root: the repository, as it is now.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self.parts: dict[str, Part] = {}
        for path in sorted(folder.glob("*.json")):
            part = Part(**json.loads(path.read_text()))
            self.parts[part.name] = part
        self._lines: dict[tuple[str, str], dict[int, int]] = {}
        self._bits: dict[tuple[str, str], list[tuple[str, bytes]]] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the test files and profiles that are not recorded as they are now."""
        return [
            name for name in names if name not in self.parts or self.parts[name].digest != _digest(self._root, name)
        ]

    def record(self, name: str, runner: Runner) -> Part:
        """Records a test file or a profile; the runner's copy has no mutant in it."""
        path = self._folder / f"{_slug(name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".coverage").unlink(missing_ok=True)
        sources, digest = self._keep_sources(), _digest(self._root, name)
        run = self._run(name, runner, path.with_suffix(".coverage"))
        if run.failed.keys() & run.deadline:  # on a busy machine; once more
            path.with_suffix(".coverage").unlink(missing_ok=True)
            run = self._run(name, runner, path.with_suffix(".coverage"))
        part = _part(name, digest, sources, run)
        path.with_suffix(".json").write_text(json.dumps(asdict(part), indent=1))
        self.parts[name] = part
        return part

    def _run(self, name: str, runner: Runner, coverage: Path) -> Run:
        if name.startswith("tests/"):
            return runner.test([name], every=True, coverage=coverage)
        return runner.simulate(name.removeprefix("simulator: "), SEEDS, OPERATIONS, coverage)

    def modules(self) -> list[str]:
        """Returns modules of other packages that many test files import, which need importing only once."""
        counts: dict[str, int] = {}
        for part in self.parts.values():
            for module in part.modules:
                counts[module] = counts.get(module, 0) + 1
        return sorted(module for module, count in counts.items() if count >= max(2, len(self.parts) // 12))

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The seconds of each test that passed."""
        return {test: seconds for part in self.parts.values() for test, seconds in part.seconds.items()}

    @cached_property
    def deadline(self) -> set[str]:
        """Tests that a busy machine may fail."""
        return {test for part in self.parts.values() for test in part.deadline}

    def overhead(self, test: str) -> float:
        """Returns the seconds that a test's file takes before any test, beyond what every file takes."""
        return self.parts[test.partition("::")[0]].overhead - self._least

    @cached_property
    def _least(self) -> float:
        return min((part.overhead for part in self.parts.values()), default=0.0)

    def reaching(self, file: str, line: int) -> list[str]:
        """Returns the tests and profiles that reach a line of a Python file of the package, the first to try first."""
        source = (self._root / "src" / "mainstem" / file).read_text()
        own, around = lines_of(source, line)
        found = self._at(file, own)
        if "" in found:
            found |= self._at(file, around)
        return self.ordered(found & self.seconds.keys())

    def ordered(self, tests: Collection[str]) -> list[str]:
        """Orders tests: one of each function before its other parameters, fast ones before slow ones."""
        ranks: dict[str, int] = {}
        keyed = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            rank = ranks[function] = ranks.get(function, -1) + 1
            keyed.append((min(rank, 2), self.seconds[test], test))
        return [test for _, _, test in sorted(keyed)]

    def wider(self, file: str, line: int, reaching: Collection[str], folders: Sequence[str]) -> list[str]:
        """Returns the further tests that might see a mutant, likely ones first.

        These are tests of the folders whose files start processes, whose lines are not recorded; then those that share
        a file, and with it fixtures, with one that reaches the line. A line that an import runs may matter to any test
        of the folders; another one cannot to those that never run it.
        """
        beside = {test.partition("::")[0] for test in reaching}
        started = {part.name for part in self.parts.values() if part.starts}
        inside = self.of(folders)
        found = [test for test in inside if test.partition("::")[0] in started]
        found += self.ordered([test for name in beside if name in self.parts for test in self.parts[name].seconds])
        own, around = lines_of((self._root / "src" / "mainstem" / file).read_text(), line)
        if "" in self._at(file, own):
            found += [*self.ordered(self._at(file, around) & self.seconds.keys()), *inside]
        return [test for test in dict.fromkeys(found) if test not in set(reaching) and test.startswith("tests/")]

    def of(self, folders: Sequence[str]) -> list[str]:
        """Returns all tests of folders, in the order to try them."""
        names = [name for name in self.parts if name.startswith(tuple(folders))]
        return self.ordered([test for name in names for test in self.parts[name].seconds])

    def _at(self, file: str, lines: Collection[int]) -> set[str]:
        """Returns the contexts in which one of the lines was run; "" is an import."""
        found: set[str] = set()
        for name, part in self.parts.items():
            moved = self._moved(part.sources, file)
            there = [moved[line] for line in lines if line in moved]
            for context, bits in self._contexts(name, file):
                if context not in found and any(num_in_numbits(line, bits) for line in there):
                    found.add(context)
        return found

    def _contexts(self, name: str, file: str) -> list[tuple[str, bytes]]:
        if (name, file) not in self._bits:
            query = (
                "select context.context, numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id where file.path like ?"
            )
            path = self._folder / f"{_slug(name)}.coverage"
            if not path.exists():
                return []
            with sqlite3.connect(path) as base:
                self._bits[name, file] = base.execute(query, (f"%/src/mainstem/{file}",)).fetchall()
            base.close()
        return self._bits[name, file]

    def _moved(self, sources: str, file: str) -> dict[int, int]:
        """Returns where each line of a file was when the package was recorded."""
        if (sources, file) not in self._lines:
            kept = self._folder / "sources" / sources / file
            now = (self._root / "src" / "mainstem" / file).read_text().splitlines()
            then = kept.read_text().splitlines() if kept.exists() else []
            if then == now:
                moved = {n: n for n in range(1, len(now) + 1)}
            else:
                blocks = difflib.SequenceMatcher(None, then, now, autojunk=False).get_matching_blocks()
                moved = {b + n + 1: a + n + 1 for a, b, count in blocks for n in range(count)}
            self._lines[sources, file] = moved
        return self._lines[sources, file]

    def _keep_sources(self) -> str:
        package = self._root / "src" / "mainstem"
        texts = {path.relative_to(package).as_posix(): path.read_bytes() for path in sorted(package.rglob("*.py"))}
        name = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
        if not (self._folder / "sources" / name).exists():
            for file, text in texts.items():
                write(self._folder / "sources" / name / file, text)
        return name


def files_of_tests(root: Path) -> list[str]:
    """Returns the test files of a repository, those of the models last, which take longest."""
    names = [path.relative_to(root).as_posix() for path in sorted((root / "tests").rglob("test_*.py"))]
    late = ("tests/runtime/", "tests/benchmarks/")
    return [*(name for name in names if not name.startswith(late)), *(name for name in names if name.startswith(late))]


def lines_of(source: str, line: int) -> tuple[set[int], set[int]]:
    """Returns the lines that run where a line does, and those that use what it says when it is imported.

    A statement of a function runs as a whole. An import runs the statements of a module or a class, and the head of a
    function: then the lines of the function count, or those that name what is assigned, or else all of the file.
    """
    tree = ast.parse(source)
    path = _path(tree, line)
    functions = [node for node in path if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    everything = set(range(1, source.count("\n") + 2))
    statement = next((node for node in reversed(path) if isinstance(node, ast.stmt)), None)
    if statement is None:
        return {line}, everything
    own = set(range(statement.lineno, _head_end(statement) + 1)) | {line}
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return set(range(statement.body[0].lineno, (statement.end_lineno or statement.lineno) + 1)), everything
    if functions:
        return own, everything
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names)) or r"(?!)")
    users = {n for n, text in enumerate(source.splitlines(), 1) if pattern.search(text)} - own
    return (users or everything), everything


def _path(tree: ast.AST, line: int) -> list[ast.AST]:
    """Returns the nodes around a line, from the outside in."""
    found: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None:
        found.append(node)
        node = next((each for each in ast.iter_child_nodes(node) if _spans(each, line)), None)
    return found


def _spans(node: ast.AST, line: int) -> bool:
    first = min((each.lineno for each in getattr(node, "decorator_list", ())), default=getattr(node, "lineno", 0))
    return first <= line <= (getattr(node, "end_lineno", None) or -1)


def _head_end(statement: ast.stmt) -> int:
    """Returns the last line of a statement without the statements in it."""
    body = getattr(statement, "body", None)
    return max(statement.lineno, body[0].lineno - 1) if body else (statement.end_lineno or statement.lineno)


def _part(name: str, digest: str, sources: str, run: Run) -> Part:
    passed = {test: round(seconds, 3) for test, seconds in run.done.items() if test not in run.failed}
    overhead = round(max(0.0, run.seconds - sum(run.done.values())), 2)
    starts = sorted(run.starts & passed.keys())
    return Part(name, digest, sources, passed, starts, sorted(run.deadline), overhead, run.modules, sorted(run.failed))


def _digest(root: Path, name: str) -> str:
    path = root / name
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", name.removesuffix(".py").lower())
