"""Known bugs, each made again in a copy of the package, and what finds it: a profile of the simulator, or a named test.

    python -m simulator.mutants [names] [--native] [--changed] [--write]

`simulator.bugs` lists them: small text patches, each of which must fit exactly once. Those of the C++ core (`--native`)
are compiled from a copy of its sources. `--write` records which were found, with a digest of the file that has the bug
and of what found it; `--changed` leaves out those whose digest is still the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from simulator.bugs import NATIVE, POLICIES, PYTHON, Mutant
from simulator.campaign import PROFILES

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "src" / "mainstem"
_PAGE = _ROOT / "docs" / "reliability.md"
_RECORD = _ROOT / "tests" / "recorded" / "mutants.json"
_APART = {"bugs.py", "mutants.py", "record.py"}  # of the simulator, but no part of a run
_HEAD = "| bug | like | where | found by | after |\n|---|---|---|---|---|\n"
_MOST_OPERATIONS = 1_500_000
_CONTROL_OPERATIONS = 10_000  # of each profile with no mutant, which must find nothing
_MOST_S = 400.0

# As many mutants run at a time as there are cores: more threads would spin while they wait for each other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

# An editable installation finds the package where it was installed from, whatever the path says.
_WITHOUT_EDITABLE = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
import mainstem
assert mainstem.__file__.startswith({copy!r}), mainstem.__file__
sys.argv[1:] = {arguments!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Verdict:
    """Whether a mutant was found, after how many operations (None: a test saw it, or the process died), and how."""

    killed: bool
    operations: int | None
    seconds: float
    sight: str


def judge(mutant: Mutant, folder: Path, core: Path | None = None, most: int = _MOST_OPERATIONS) -> Verdict:
    """Makes the mutant in an empty folder and lets its killer look at it, for so many operations at most."""
    began_s = time.perf_counter()
    copy = folder / "mainstem"
    # With its compiled modules, but for those that are being written.
    shutil.copytree(_PACKAGE, copy, ignore=shutil.ignore_patterns("csrc", "*.pyc.*"))
    core = core or _core_file()
    shutil.copy(core, copy / core.name)
    if core == _core_file():
        _patch(mutant, copy)
    if mutant.by.startswith("tests/"):
        arguments = ["-x", "-q", "-p", "no:cacheprovider", mutant.by]
        done = _run(folder, "pytest", arguments)
        failed = re.search(r"FAILED \S+::(\S+)", done.stdout)
        sight = failed[1] if failed else done.stdout[-200:]
        return Verdict(failed is not None, None, time.perf_counter() - began_s, sight)
    record = folder / "record.json"
    arguments = ["--profile", mutant.by, "--seeds", "0:", "--until-operations", str(most)]
    done = _run(folder, "simulator", [*arguments, "--processes", "1", "--failures", "1", "--json", str(record)])
    seconds = time.perf_counter() - began_s
    if not record.exists():  # it did not even end
        last = done.stderr.strip().rpartition("\n")[2].rpartition("core/csrc/")[2]
        return Verdict(done.returncode < 0, None, seconds, f"the process died ({-done.returncode}): {last}")
    (found,) = json.loads(record.read_text())["profiles"].values()
    sight = found["failures"][0][1].split("\n")[0] if found["failures"] else "not seen"
    return Verdict(bool(found["failures"]), found["operations"], seconds, sight.split(" operations, ")[-1])


def _patch(mutant: Mutant, package: Path) -> None:
    """Raises ValueError if a text is not there exactly once."""
    if not mutant.patches:
        return
    path = package / mutant.file
    text = path.read_text()
    for old, new in mutant.patches:
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: the text stands {text.count(old)} times in {mutant.file}: {old!r}")
        text = text.replace(old, new)
    path.write_text(text)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def _run(folder: Path, module: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    code = _WITHOUT_EDITABLE.format(copy=str(folder), arguments=list(arguments), module=module)
    path = os.pathsep.join([str(folder), str(_ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **_ONE_THREAD}
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_MOST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", "it hangs")


def _core_file() -> Path:
    found = importlib.util.find_spec("mainstem._core")
    assert found is not None and found.origin is not None
    return Path(found.origin)


# ---------------------------------------------------------------- the core


class Builder:
    """Compiles the core, file by file; what was compiled once is used for every mutant.

    Args:
        folder: for object files.
    """

    def __init__(self, folder: Path) -> None:
        import nanobind  # type: ignore[import-untyped]

        binder = Path(nanobind.__file__).parent
        includes = [binder / "include", binder / "ext" / "robin_map" / "include", sysconfig.get_path("include")]
        self._flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
        self._flags += [f"-I{include}" for include in includes]
        csrc = _PACKAGE / "core" / "csrc"
        self._standard = folder / "standard.h"
        self._precompile(csrc.rglob("*.[hc]*"))
        sources = [*sorted(csrc.rglob("*.cpp")), binder / "src" / "nb_combined.cpp"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(partial(self._compile, csrc=csrc, folder=folder), sources)
            self._objects = {source.name: compiled for source, compiled in zip(sources, objects, strict=True)}

    def build(self, mutant: Mutant, folder: Path) -> Path:
        """The module with the mutant in it."""
        csrc = folder / "core" / "csrc"
        shutil.copytree(_PACKAGE / "core" / "csrc", csrc)
        _patch(mutant, folder)
        changed = [folder / mutant.file]
        if POLICIES in mutant.file:
            changed = [csrc / "eviction" / "eviction.cpp"]  # which alone makes policies
        elif changed[0].suffix == ".h":
            changed = [source for source in csrc.rglob("*.cpp") if self._includes(source, mutant.file)]
        objects = {source.name: self._compile(source, csrc, folder) for source in changed}
        objects |= {name: compiled for name, compiled in self._objects.items() if name not in objects}
        module = folder / _core_file().name
        self._call([*map(str, objects.values()), "-shared", "-o", str(module)])
        return module

    def _includes(self, source: Path, header: str) -> bool:
        """Whether a source has to be compiled again for a header; the bindings are left as they are."""
        files = self._objects[source.name].with_suffix(".d").read_text().split()
        return source.parent.name != "python" and any(file.endswith(header) for file in files)

    def _precompile(self, sources: Iterable[Path]) -> None:
        """Reads what the standard library declares once: a third of the time that a small source takes."""
        includes = {include for source in sources for include in re.findall(r"#include <[a-z_]+>", source.read_text())}
        self._standard.write_text("\n".join(sorted(includes)) + "\n")
        self._call(["-x", "c++-header", str(self._standard), "-o", f"{self._standard}.gch"])

    def _compile(self, source: Path, csrc: Path, folder: Path) -> Path:
        target = folder / (source.stem + ".o")
        standard = ["-include", str(self._standard)] if source.is_relative_to(csrc) else []
        self._call([f"-I{csrc}", *standard, "-MMD", "-c", str(source), "-o", str(target)])
        return target

    def _call(self, arguments: Sequence[str]) -> None:
        subprocess.run(["g++", *self._flags, *arguments], check=True, capture_output=True, text=True)


# ---------------------------------------------------------------- all of them


def digest(mutant: Mutant) -> str:
    """Returns a digest of a mutant, of the file that it changes, and of the test or simulator that finds it."""
    finder = mutant.by.partition("::")[0]
    paths = [_ROOT / finder] if finder.startswith("tests/") else sorted((_ROOT / "simulator").glob("*.py"))
    total = hashlib.sha256(repr(mutant).encode())
    for path in [_PACKAGE / mutant.file, *(path for path in paths if path.name not in _APART)]:
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def changed(mutants: Iterable[Mutant], record: Mapping[str, str]) -> list[Mutant]:
    """Returns the mutants that were not found yet as they are now."""
    return [mutant for mutant in mutants if record.get(mutant.name) != digest(mutant)]


def _recorded() -> dict[str, str]:
    """Returns the digests of the mutants that were found, by name."""
    return dict(json.loads(_RECORD.read_text())) if _RECORD.exists() else {}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        yield Path(name)


def _verdicts(mutants: Sequence[Mutant], end_s: float = math.inf) -> Iterator[tuple[Mutant, Verdict | None]]:
    """In order, as many at a time as there are cores; None for those that would begin after a time of the clock."""

    def verdict(mutant: Mutant) -> Verdict | None:
        return _verdict(mutant, builder) if time.monotonic() < end_s else None

    with _folder() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        builder = Builder(objects) if any(mutant in NATIVE for mutant in mutants) else None
        yield from zip(mutants, pool.map(verdict, mutants), strict=True)


def _control(profile: str) -> Verdict:
    """Runs a profile without any bug, which must find nothing."""
    with _folder() as folder:
        return judge(Mutant("nothing", "", "", (), profile), folder, most=_CONTROL_OPERATIONS)


def _is_wanted(mutant: Mutant, names: Sequence[str]) -> bool:
    return not names or any(name in mutant.name for name in names)


def _verdict(mutant: Mutant, builder: Builder | None = None) -> Verdict:
    with _folder() as folder, _folder() as built:
        try:
            core = builder.build(mutant, built) if builder and mutant in NATIVE else None
        except subprocess.CalledProcessError as error:
            return Verdict(False, None, 0.0, "it does not compile: " + " ".join(error.stderr.split())[-500:])
        return judge(mutant, folder, core)


def row(mutant: Mutant, after: str) -> str:
    """Returns a mutant as a row of a table; `after`: how many operations it took to find it, or "-"."""
    by = mutant.by.rpartition("::")[2]
    return f"| {mutant.name} | {mutant.like} | `{mutant.file}` | `{by}` | {after} |"


def written(page: str, rows: Mapping[str, str]) -> str:
    """A page with rows in its table, by the names of mutants; those of others stay, in the order of the list.

    Raises:
        ValueError: the page has no such table.
    """
    before, head, rest = page.partition(_HEAD)
    if not head:
        raise ValueError("there is no table of mutants")
    table = re.match(r"(?:\|.*\n)*", rest)
    assert table is not None
    kept = {line.split(" | ")[0][2:]: line for line in table[0].splitlines()} | rows
    lines = [kept[mutant.name] + "\n" for mutant in (*PYTHON, *NATIVE) if mutant.name in kept]
    return before + head + "".join(lines) + rest[table.end() :]


def main() -> int:
    """0 if every mutant was found."""
    parser = argparse.ArgumentParser(prog="python -m simulator.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of those wanted; none: all")
    parser.add_argument("--native", action="store_true", help="those of the C++ core, too")
    parser.add_argument("--changed", action="store_true", help="only those that were not found yet as they are now")
    parser.add_argument("--write", action="store_true", help=f"what was found, into docs/{_PAGE.name} and the record")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="none begins later; in an order that each state of the files changes",
    )
    options = parser.parse_args()
    end_s = time.monotonic() + options.seconds
    known = [*PYTHON, *(NATIVE if options.native else ())]
    wanted = [mutant for mutant in known if _is_wanted(mutant, options.names)]
    if options.changed and not (wanted := changed(wanted, _recorded())):
        print("no mutant has changed since all were found")
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for profile, control in zip(PROFILES, pool.map(_control, PROFILES), strict=True):
            if control.killed or control.operations is None:
                print(f"without any bug profile {profile} fails: {control.sight}")
                return 1
    survivors: list[str] = []
    found: dict[str, str] = {}
    digests = {mutant.name: digest(mutant) for mutant in wanted}  # before they run: a file may be edited meanwhile
    if options.seconds < math.inf:
        wanted.sort(key=lambda mutant: digests[mutant.name])
    left = 0
    print(_HEAD.replace(" |\n", " | what was seen |\n", 1).replace("-|\n", "-|---|\n"), end="")
    for mutant, verdict in _verdicts(wanted, end_s):
        if verdict is None:
            left += 1
            continue
        line = row(mutant, "-" if verdict.operations is None else f"{verdict.operations:,}")
        if verdict.killed:
            found[mutant.name] = line
        else:
            survivors.append(f"not found: {mutant.name}: {verdict.sight}")
        sight = verdict.sight.replace("|", "/")[: 100 if verdict.killed else None]
        print(line, sight if verdict.killed else f"**not found**: {sight}", "|", flush=True)
    if options.write:
        _PAGE.write_text(written(_PAGE.read_text(), found))
        names = {mutant.name for mutant in (*PYTHON, *NATIVE)}
        record = {**_recorded(), **{name: digests[name] for name in found}}
        kept = {name: record[name] for name in sorted(names & record.keys()) if name in found or name not in digests}
        _RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    # Once more at the end, where whoever reads a long log looks first.
    ran = len(wanted) - left
    print(*survivors, f"{ran} mutants, {ran - len(survivors)} found, {len(survivors)} not", sep="\n")
    if left:
        print(f"{left} are left to `make nightly`, for want of time")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
