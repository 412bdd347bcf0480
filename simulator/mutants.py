"""Known bugs, each made again in a copy of the package, and what finds it: a profile of the simulator, or a named test.

    python -m simulator.mutants [names] [--native] [--changed] [--write]

`simulator.bugs` lists them: small text patches, each of which must fit exactly once. Those of the C++ core (`--native`)
are compiled from a copy of its sources. `--write` records which were found, with a digest of the file that has the bug
and of what found it; `--changed` leaves out those whose digest is still the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutation.copies import PACKAGE as _PACKAGE
from mutation.copies import ROOT as _ROOT
from mutation.copies import Builder, copy_package, environment, write
from mutation.record import table_of
from simulator.bugs import NATIVE, PYTHON, Mutant
from simulator.campaign import PROFILES

_PAGE = _ROOT / "docs" / "reliability.md"
_RECORD = _ROOT / "tests" / "recorded" / "mutants.json"
_APART = {"bugs.py", "mutants.py", "record.py"}  # of the simulator, but no part of a run
_HEAD = "| bug | like | where | found by | after |\n|---|---|---|---|---|\n"
_MOST_OPERATIONS = 1_500_000
_CONTROL_OPERATIONS = 10_000  # of each profile with no mutant, which must find nothing
_MOST_S = 400.0


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
    copy = copy_package(folder, core)
    if core is None and mutant.patches:
        write(copy / mutant.file, _patched(mutant).encode())
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


def _patched(mutant: Mutant) -> str:
    """Returns the mutant's file; raises ValueError if a text is not there exactly once."""
    text = (_PACKAGE / mutant.file).read_text()
    for old, new in mutant.patches:
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: the text stands {text.count(old)} times in {mutant.file}: {old!r}")
        text = text.replace(old, new)
    return text


def _run(folder: Path, module: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    env = {**environment(folder, _ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, "", "it hangs")


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
            core = builder.build(mutant.file, _patched(mutant), built) if builder and mutant in NATIVE else None
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
    before, table, after = table_of(page, _HEAD)
    kept = {line.split(" | ")[0][2:]: line for line in table} | rows
    lines = [kept[mutant.name] + "\n" for mutant in (*PYTHON, *NATIVE) if mutant.name in kept]
    return before + "".join(lines) + after


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
