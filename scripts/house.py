"""Prints the size and shape of the code, and what changes and tests cost: one commit, or two side by side.

    python -m scripts.house                       the working tree
    python -m scripts.house --base c902b00        that commit beside the working tree
    python -m scripts.house --changes REV REV     the files that each commit touches
    python -m scripts.house --times FILE FILE     what pytest printed with --durations=0, or its JUnit XML, one a run

A line of code has more than blanks, comments and docstrings. Only git and the standard library are used.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PACKAGE, CORE = "src/mainstem", "src/mainstem/core/csrc"
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
CPP_COMMENT = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|//[^\n]*|/\*.*?\*/", re.DOTALL)
CPP_TABLES = ("namespace", "struct", "class", "NB_MODULE", "void bind_")  # no function, or one that lists bindings
MOST_METHODS = 25
TOP = 12

Cells = Sequence[object]


# ---------------------------------------------------------------- one file


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """Returns the numbers of the lines of code of a Python file."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return code


def python_functions(text: str) -> list[tuple[str, int]]:
    """Returns each function of a Python file with its lines of code."""
    tree = ast.parse(text)
    code = code_lines(text, tree)
    return [
        (node.name, len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1))))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def python_classes(text: str) -> list[tuple[str, int]]:
    """Returns each class of a Python file with the number of its methods."""
    return [
        (node.name, sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]


def without_comments(text: str) -> str:
    """Returns C++ without its comments; lines keep their numbers."""
    return CPP_COMMENT.sub(lambda part: part[0] if part[0][0] in "\"'" else "\n" * part[0].count("\n"), text)


def cpp_lines(text: str) -> int:
    """Returns the number of lines of code of a C++ file."""
    return sum(bool(line.strip()) for line in without_comments(text).splitlines())


def cpp_functions(text: str) -> list[tuple[str, int]]:
    """Returns each function outside of a class in a C++ file with its lines of code."""
    functions, begin, name = [], None, ""
    lines = without_comments(text).splitlines()
    for number, line in enumerate(lines):
        head = re.match(r"(?=[A-Za-z\[]).*?([\w:~]+)\(", line)
        if head and not line.startswith(CPP_TABLES):
            begin, name = number, head[1]
        if line == "}" and begin is not None:
            functions.append((name, sum(bool(each.strip()) for each in lines[begin:number])))
            begin = None
    return functions


def cpp_classes(text: str) -> list[tuple[str, int, int]]:
    """Returns each class of a C++ header with the numbers of its public and private functions."""
    classes = []
    for name, body in re.findall(r"\nclass (\w+)[^;{]*\{(.*?)\n\};", text, re.DOTALL):
        sections = re.split(r"\n (private|protected|public):\n", "\n private:\n" + body)
        counts: Counter[str] = Counter()
        for kind, members in zip(sections[1::2], sections[2::2], strict=True):
            counts[kind] += len(
                re.findall(r"^  (?!friend|using|return|static_assert)[^\s/}#][^;={]*?\b\w+\(", members, re.MULTILINE)
            )
        classes.append((name, counts["public"], counts["private"]))
    return classes


# ---------------------------------------------------------------- a commit


@dataclass
class Survey:
    """The size and shape of a commit."""

    lines: Counter[str] = field(default_factory=Counter)  # of code, by folder
    files: Counter[str] = field(default_factory=Counter)
    functions: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: {"Python": [], "C++": []})
    classes: list[tuple[int, str]] = field(default_factory=list)  # methods and name
    importers: dict[str, set[str]] = field(default_factory=dict)  # of each module of the package


def sources(revision: str | None) -> dict[str, str]:
    """Returns the Python and C++ files of a commit by their paths; None: of the working tree."""
    if revision is None:
        names = _git("ls-files", "-co", "--exclude-standard").decode().splitlines()
        paths = {name: ROOT / name for name in names if name.endswith((".py", ".cpp", ".h"))}
        return {name: path.read_text() for name, path in paths.items() if path.is_file()}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision))) as archive:
        return {
            member.name: file.read().decode()
            for member in archive
            if member.name.endswith((".py", ".cpp", ".h")) and (file := archive.extractfile(member))
        }


def survey(files: Mapping[str, str]) -> Survey:
    """Measures the files of a commit."""
    result = Survey()
    modules = {module(path): path for path in files if path.startswith(PACKAGE) and path.endswith(".py")}
    for path, text in files.items():
        folder = folder_of(path)
        result.files[folder] += 1
        in_package = path.startswith(PACKAGE)
        if not path.endswith(".py"):
            result.lines[folder] += cpp_lines(text)
            if in_package:
                result.functions["C++"] += [(lines, f"{path}: {name}") for name, lines in cpp_functions(text)]
                result.classes += [(public + own, f"{path}: {name}") for name, public, own in cpp_classes(text)]
            continue
        tree = ast.parse(text)
        result.lines[folder] += len(code_lines(text, tree))
        if in_package:
            result.functions["Python"] += [(lines, f"{path}: {name}") for name, lines in python_functions(text)]
            result.classes += [(methods, f"{path}: {name}") for name, methods in python_classes(text)]
            for imported in imports(tree) & modules.keys():
                result.importers.setdefault(imported, set()).add(module(path))
    return result


def module(path: str) -> str:
    """Returns the dotted name of a file of the package."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.AST) -> set[str]:
    """Returns the dotted names that a file imports, and that it imports names from."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def folder_of(path: str) -> str:
    """Returns the row of a file in the table of folders."""
    parts = path.split("/")
    if path.startswith(CORE):
        return "/".join(parts[: 5 if len(parts) > 5 else 4]) + " (C++)"
    if path.startswith(PACKAGE):
        return "/".join(parts[: 4 if len(parts) > 4 else 3][: len(parts) - 1])
    return "/".join(parts[: 2 if parts[0] == "tests" and len(parts) > 2 else 1]) + (
        "" if path.endswith(".py") else " (C++)"
    )


# ---------------------------------------------------------------- what changes and tests cost


def touched(revision: str) -> Cells:
    """Returns the row of a commit: its subject, and how many files it touches, of which kind."""
    subject, *paths = _git("show", "--format=%h %s", "--name-only", revision).decode().split("\n")
    paths = [path for path in paths if path]
    kinds = Counter(path.split("/")[0] for path in paths)
    others = len(paths) - kinds["src"] - kinds["tests"] - kinds["docs"]
    return (subject[:70], len(paths), kinds["src"], kinds["tests"], kinds["docs"], others)


def times(text: str) -> Counter[str]:
    """Returns the seconds of each test file, from what pytest printed or from its JUnit XML."""
    seconds: Counter[str] = Counter()
    if text.lstrip().startswith("<"):
        for case in ElementTree.fromstring(text).iter("testcase"):
            seconds[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", 0))  # type: ignore[assignment]
        return seconds
    for amount, path in re.findall(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+([^:\s]+)::", text, re.MULTILINE):
        seconds[path] += float(amount)  # type: ignore[assignment]
    return seconds


# ---------------------------------------------------------------- tables


def shape(surveys: Sequence[Survey]) -> Iterator[str]:
    """Yields the tables of one commit, or of two side by side."""
    heads = ["before", "after"][-len(surveys) :]
    folders = sorted({folder for each in surveys for folder in each.lines})
    rows: list[Cells] = [(folder, *_sums(surveys, [folder])) for folder in folders]
    source = [folder for folder in folders if folder.startswith(PACKAGE)]
    core = [folder for folder in source if folder.endswith("(C++)")]
    rows.append(("Python in src", *_sums(surveys, sorted({*source} - {*core}))))
    rows.append(("C++ in src", *_sums(surveys, core)))
    rows.append(("tests", *_sums(surveys, [folder for folder in folders if folder.startswith("tests")])))
    both = [f"{head} {what}" for head in heads for what in ("lines", "files")]
    yield table("Lines of code and files", ["folder", *both], rows)
    for language in ("Python", "C++"):
        spread = [_spread(each.functions[language]) for each in surveys]
        names = ("functions", "median", "95th percentile", "longest", "which")
        yield table(f"Functions, {language}", ["", *heads], [*zip(names, *spread, strict=True)])
    large = [[each for each in survey.classes if each[0] > MOST_METHODS] for survey in surveys]
    counts: list[Cells] = [("classes", *(len(each.classes) for each in surveys))]
    counts.append((f"classes with more than {MOST_METHODS} methods", *map(len, large)))
    fans = [Counter({name: len(each) for name, each in survey.importers.items()}) for survey in surveys]
    counts.append(("modules with one importer", *(sum(n == 1 for n in fan.values()) for fan in fans)))
    yield table("Classes and modules", ["", *heads], counts)
    longest = sorted(surveys[-1].classes, reverse=True)[:TOP]
    yield table("Classes with the most methods", ["class", "methods"], [(name, count) for count, name in longest])
    yield table("Modules by importers", ["module", "importers"], fans[-1].most_common(TOP))


def _sums(surveys: Iterable[Survey], folders: Sequence[str]) -> list[int]:
    return [sum(counts[folder] for folder in folders) for each in surveys for counts in (each.lines, each.files)]


def _spread(functions: Sequence[tuple[int, str]]) -> Cells:
    if not functions:
        return (0, 0, 0, 0, "")
    ordered = sorted(functions)
    lines = [count for count, _ in ordered]
    return (len(lines), int(statistics.median(lines)), lines[int(0.95 * (len(lines) - 1))], *ordered[-1])


def table(title: str, heads: Sequence[str], rows: Sequence[Cells]) -> str:
    """Returns a table as Markdown, numbers with thousands separators."""
    text = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *text, strict=True)]
    lines = [heads, ["-" * width for width in widths], *text]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(line)} |" for line in padded), ""])


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description=__doc__, formatter_class=raw)
    parser.add_argument("--base", metavar="REV", help="a commit to stand beside")
    parser.add_argument("--at", metavar="REV", help="a commit in place of the working tree")
    parser.add_argument("--changes", metavar="REV", nargs="+", default=[], help="commits whose files are counted")
    parser.add_argument("--times", metavar="FILE", nargs="+", default=[], help="runs whose durations are added up")
    options = parser.parse_args(arguments)
    if options.changes:
        heads = ["commit", "files", "src", "tests", "docs", "others"]
        print(table("Changes", heads, [touched(each) for each in options.changes]))
    if options.times:
        runs = [times(Path(each).read_text()) for each in options.times]
        rows = [(name, *(f"{run[name]:.1f}" for run in runs)) for name, _ in runs[-1].most_common(4 * TOP)]
        rows.append(("all", *(f"{sum(run.values()):.1f}" for run in runs)))
        print(table("Seconds of test files", ["file", *options.times], rows))
    if not options.changes and not options.times:
        commits = [options.base, options.at] if options.base else [options.at]
        print(*shape([survey(sources(each)) for each in commits]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
