"""Every number of the package that limits, fades, ages or times out, and the test that moves it.

    python -m scripts.bounds [parts of names]

A constant is a number that stands at the top of a module or class of Python under a name in capitals, the default of a
parameter or field whose name says what it limits, a number that a call gives to `maxsize`, `maxlen` or a timeout, or a
`constexpr` of the core. `tests/house/bounds.toml` has a row for each. Those that bound something name a test.

This command changes each bound in a copy of the package, to a thousand times as much and, where it counts, to one
more, and runs its test, which has to fail. Bounds of the core are compiled, with `--native`.
"""

from __future__ import annotations

import argparse
import ast
import operator
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "mainstem"
TABLE = ROOT / "tests" / "house" / "bounds.toml"

# Constants that move nothing: no run shows more or less, later or earlier, because of these.
STILL = {
    "layout": "bytes, bits, codes and ranges of formats, protocols and other people's interfaces; marks for no value",
    "grain": "how much is done at a time, and by how many threads: the pace, never the result",
    "formula": "numbers of a formula, whose worth benchmarks and exactness tests measure; samples of self-tests",
    "shown": "edges of histograms, sizes of pictures, lengths of texts for people",
}

_CAPITALS = re.compile(r"_?[A-Z][A-Z0-9_]*")
_LIMITS = re.compile(r"(.*_)?(s|ms|bytes|limit|threads|entries|maximum)")
_CALLS = re.compile(r"maxsize|maxlen|(.*_)?timeout(_s|_ms)?")
_CONSTEXPR = re.compile(r"\bconstexpr\s+(?P<type>[\w:]+(?:<[^<>]*>)?)\s+(?P<rest>k[A-Z]\w*\s*(?:=|\{)[^;]*);")
_DECLARED = re.compile(r"(k[A-Z]\w*)\s*=\s*((?:[^,(){}]|\([^()]*\)|\{[^{}]*\})+)(?:,|$)")
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
_COUNTED = 1 << 16  # up to here one more is a change that a test sees


@dataclass(frozen=True)
class Constant:
    """One constant: its file below the package, its name, and where its value stands in the text."""

    file: str
    name: str
    value: str
    begin: int
    end: int

    @property
    def changes(self) -> list[str]:
        """What `main` puts in its place."""
        thousand = f"({self.value}) * 1000"
        if self.value.startswith("(") and "," in self.value:
            thousand = f"tuple(1000 * _one for _one in {self.value})"
        number = _number(self.value)
        return [thousand, f"({self.value}) + 1"] if isinstance(number, int) and number <= _COUNTED else [thousand]


def _number(text: str) -> int | float | None:
    """The value of arithmetic over literals, in Python or C++; None if anything else is in it."""
    found = re.sub(r"std::\w+\{(\d+)\}", r"\1", text).strip()
    try:
        return _worth(ast.parse(re.sub(r"(?<=\d)(?:ull|u|f)\b", "", found), mode="eval").body)
    except (SyntaxError, KeyError):
        return None


def _worth(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_worth(node.operand)
    if isinstance(node, ast.BinOp):
        worth: int | float = _OPERATORS[type(node.op)](_worth(node.left), _worth(node.right))
        return worth
    raise KeyError(ast.dump(node))


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is arithmetic over numbers and constants, or a tuple of such."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return _CAPITALS.fullmatch(node.id) is not None
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    return isinstance(node, ast.Tuple) and bool(node.elts) and all(map(_is_number, node.elts))


class _Reader(ast.NodeVisitor):
    def __init__(self, file: str, text: str) -> None:
        self.found: list[Constant] = []
        self._file, self._within = file, list[str]()
        self._lines = [0]
        for line in text.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bytes = text.encode()
        self._has_calls = re.search(rf"\b(?:{_CALLS.pattern})=\d", text) is not None

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if self._has_calls or not isinstance(child, ast.expr):  # most have none, and are read twice as fast
                self.visit(child)

    def _add(self, name: str, node: ast.expr) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        value = self._bytes[begin:end].decode()
        self.found.append(Constant(self._file, ".".join([*self._within, name]), value, begin, end))

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned([node.target], node.value)
        self.generic_visit(node)

    def _assigned(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for one, number in zip(target.elts, value.elts, strict=False):
                    self._assigned([one], number)
            elif isinstance(target, ast.Name) and _is_number(value) and self._counts(target.id, value):
                self._add(target.id, value)

    def _counts(self, name: str, value: ast.expr) -> bool:
        return _CAPITALS.fullmatch(name) is not None or self._limits(name, value)

    @staticmethod
    def _limits(name: str, value: ast.expr) -> bool:
        number = _number(ast.unparse(value))
        few = (-1, 0, None) if name.endswith("_s") else (-1, 0, 1, None)  # of which nobody would say that they limit
        return _LIMITS.fullmatch(name) is not None and number not in few

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        args = [*node.args.posonlyargs, *node.args.args]
        plain = zip(args[len(args) - len(node.args.defaults) :], node.args.defaults, strict=True)
        self._within.append(node.name)
        for arg, default in [*plain, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
            if default is not None and self._limits(arg.arg, default):
                self._add(arg.arg, default)
        self._within.pop()
        self._inside(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            named = keyword.arg is not None and _CALLS.fullmatch(keyword.arg)
            if (
                named
                and isinstance(keyword.value, ast.Constant)
                and _number(repr(keyword.value.value)) not in (0, 1, None)
            ):
                self._add(keyword.arg or "", keyword.value)
        self.generic_visit(node)


def of_python(file: str, text: str) -> list[Constant]:
    """The constants of a module."""
    reader = _Reader(file, text)
    reader.visit(ast.parse(text))
    return reader.found


def of_cpp(file: str, text: str) -> list[Constant]:
    """The constants of a source of the core: numbers, not texts, tables or functions."""
    # A comment keeps its length, so that places stay.
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL)
    found = []
    for declared in _CONSTEXPR.finditer(bare):
        if declared["type"] in ("bool", "auto", "char", "Shape", "Words", "Join") or "kTemplate" in declared["rest"]:
            continue
        for one in _DECLARED.finditer(declared["rest"]):
            begin, end = (len(bare[: declared.start("rest") + place].encode()) for place in one.span(2))
            found.append(Constant(file, one[1], one[2].strip(), begin, end))
    return found


def constants(package: Path = PACKAGE) -> Iterator[Constant]:
    """All constants of the package, in the order of files."""
    for path in sorted(package.rglob("*.py")):
        yield from of_python(str(path.relative_to(package)), path.read_text())
    for path in sorted((package / "core" / "csrc").rglob("*.[hc]*")):
        yield from of_cpp(str(path.relative_to(package)), path.read_text())


def table(path: Path = TABLE) -> dict[str, Any]:
    """The committed table: kinds of what moves nothing (`still`), `bound` with a test for each, and `open`."""
    return tomllib.loads(path.read_text())


def rows(table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each row: its kind, a pattern of files, and a pattern of names."""
    kinds = {**table["still"], "bound": table["bound"], "open": table["open"]}
    for kind, files in kinds.items():
        for file, names in files.items():
            yield from ((kind, file, name) for name in (names.split() if isinstance(names, str) else names))


def tests(table: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """The test of each bound, by file and name."""
    return {(file, name): test for file, rows in table["bound"].items() for name, test in rows.items()}


# ---------------------------------------------------------------- whether a test sees its bound


def _verdict(constant: Constant, value: str, test: str, builder: Any) -> str:
    """Returns how the test saw a changed bound; "" if it did not."""
    from simulator.bugs import Mutant
    from simulator.mutants import judge

    text = (PACKAGE / constant.file).read_bytes()
    changed = text[: constant.begin] + value.encode() + text[constant.end :]
    with tempfile.TemporaryDirectory(prefix="bound-") as folder, tempfile.TemporaryDirectory(prefix="bound-") as built:
        if test.startswith("tests/native/"):
            return _native(constant, changed, test, Path(folder))
        begin, end = text.rfind(b"\n", 0, constant.begin) + 1, text.find(b"\n", constant.end)
        new = changed[begin : len(changed) - len(text) + end]
        patch = ((f"\n{text[begin:end].decode()}\n", f"\n{new.decode()}\n"),)
        mutant = Mutant(f"{constant.name} = {value}", "-", constant.file, patch, test)
        core = builder.build(mutant, Path(built)) if builder and constant.file.startswith("core/") else None
        seen = judge(mutant, Path(folder), core)
    return seen.sight if seen.killed else ""


def _native(constant: Constant, changed: bytes, test: str, folder: Path) -> str:
    """The same for a test in C++ that includes headers alone."""
    shutil.copytree(PACKAGE / "core" / "csrc", folder / "csrc")
    (folder / "csrc" / Path(constant.file).relative_to("core/csrc")).write_bytes(changed)
    source, _, name = test.partition("::")
    build_native(ROOT / source, folder / "csrc", folder / "bounds")
    return subprocess.run([folder / "bounds", name], capture_output=True, text=True, check=False).stdout.strip()


def build_native(source: Path, csrc: Path, program: Path) -> None:
    """Compiles a test in C++ that includes headers of the core alone."""
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["c++", "-std=c++20", "-O1", *warnings, f"-I{csrc}", source, "-o", program], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if each test saw its bound."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bounds", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of FILE:NAME of those wanted; none: all")
    parser.add_argument("--native", action="store_true", help="those of the C++ core, too")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), help="tests that run at the same time")
    options = parser.parse_args(arguments)
    by = tests(table())
    wanted = [
        (constant, value, by[constant.file, constant.name])
        for constant in constants()
        if (constant.file, constant.name) in by
        and (options.native or not constant.file.startswith("core/"))
        and (not options.names or any(name in f"{constant.file}:{constant.name}" for name in options.names))
        for value in constant.changes
    ]
    unseen = 0
    with tempfile.TemporaryDirectory(prefix="bound-") as objects, ThreadPoolExecutor(options.at_once) as pool:
        builder = None
        if any(
            constant.file.startswith("core/") and not test.startswith("tests/native/") for constant, _, test in wanted
        ):
            from simulator.mutants import Builder

            builder = Builder(Path(objects))

        def seen(row: tuple[Constant, str, str]) -> str:
            try:
                return _verdict(*row, builder)
            except subprocess.CalledProcessError as error:
                return f"NOT COMPILED: {' '.join(error.stderr.split())[-300:]}"

        for (constant, value, test), sight in zip(wanted, pool.map(seen, wanted), strict=True):
            unseen += not sight
            print(f"{constant.file}: {constant.name} = {value}: {sight or f'NOT SEEN by {test}'}", flush=True)
    print(f"{len(wanted)} changes, {len(wanted) - unseen} seen, {unseen} not")
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
