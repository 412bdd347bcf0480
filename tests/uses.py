"""The files that a test depends on: those that it imports, and all that those import in turn."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/mainstem"
PROCESSES = {"subprocess", "multiprocessing"}
"""Modules that start processes, which may import anything of the package."""


def closure(paths: Iterable[Path], root: Path = ROOT) -> set[Path]:
    """Returns Python files and all files of the repository that they import.

    The core is part of the package, and all of the package is part of a test that starts processes.
    """
    found: set[Path] = set()
    waiting = [*paths, *(path for path in [root / "tests" / "conftest.py"] if path.exists())]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            used, starts = imports(path, root)
            waiting += used
            if starts and not path.is_relative_to(root / PACKAGE):
                waiting += (root / PACKAGE).rglob("*.py")
    if any(path.is_relative_to(root / PACKAGE) for path in found):
        found.update(path for path in (root / PACKAGE / "core").rglob("*.*") if path.suffix in (".h", ".cpp"))
    return found


def digest(paths: Iterable[Path], root: Path = ROOT) -> str:
    """Returns one digest of the names and contents of files."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


@cache
def imports(path: Path, root: Path) -> tuple[frozenset[Path], bool]:
    """Returns the files of the repository that a file imports, and whether it starts processes."""
    names = set(_names(ast.parse(path.read_text())))
    parts = {".".join(name.split(".")[:count]) for name in names for count in range(1, len(name.split(".")) + 1)}
    bases = (root / "src", root, root / "tests")
    candidates = (base.joinpath(*name.split(".")) for name in parts for base in bases)
    files = (each for path in candidates for each in (path.with_suffix(".py"), path / "__init__.py"))
    return frozenset(path for path in files if path.is_file()), bool(names & PROCESSES)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
