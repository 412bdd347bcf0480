"""Tests too heavy for every run: each lane records its result, and runs again only if what it tests has changed.

    python -m tests.lanes run lmcache       runs the tests, then writes tests/recorded/lmcache.json
    python -m tests.lanes check             runs lanes whose record is out of date; fails if one has no record

    python -m tests.lanes check slow        the same for lanes whose names begin so
    python -m tests.lanes check --seconds 900   as far as there is time, those that take least first

A lane is a row of `LANES`. Its record says when and at which commit it passed, and has the digest of every file that
its outcome depends on. CI compares the digests: a lane whose files have not changed counts as passed. A lane that needs
an environment of its own must have a record; another one runs where it has none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.uses import closure, digest

ROOT = Path(__file__).parents[1]
PARALLEL = ("--numprocesses", "auto", "--dist", "worksteal")
LEFT_OUT = ".pytest_cache/left-out"  # what tests/skips.py writes if the machine lacks a tool


@dataclass(frozen=True)
class Lane:
    """Tests with a record.

    Args:
        name: `make test-NAME` sets up what the lane needs, runs it and writes its record.
        tests: the arguments for pytest; or for Python, if the first is "-m".
        files: what the outcome depends on: files and patterns, relative to the root of the repository.
        pins: packages whose lines in constraints.txt the outcome depends on.
        python: the interpreter that runs the tests, relative to the root of the repository; empty: this one.
        imports: Python files that the outcome depends on together with all that they import, as patterns.
        environment: variables that the tests read.
        own: whether it has an environment of its own, which CI lacks; then no test may be skipped.
    """

    name: str
    tests: tuple[str, ...]
    files: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    python: str = ""
    imports: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    own: bool = True

    @property
    def record(self) -> str:
        """The path of its record, relative to the root of the repository."""
        return f"tests/recorded/{self.name}.json"


Tests = Callable[[Lane, Path], tuple[int, str]]


def slow(name: str, *tests: str, files: tuple[str, ...] = (), imports: bool = True) -> Lane:
    """Returns the lane of the slow tests of some files."""
    paths = tuple(f"tests/{test}.py" for test in tests)
    return Lane(
        f"slow-{name}",
        ("-m", "pytest", *PARALLEL, "-m", "slow", *paths),
        files if imports else (*files, *paths),
        imports=paths if imports else (),
        own=False,
    )


def simulation(name: str, *options: str) -> Lane:
    """Returns the lane of a long simulation."""
    simulator = ("simulator/__main__.py",)
    return Lane(name, ("-m", "simulator", "--until-operations", *options), imports=simulator, own=False)


LANES = (
    slow(
        "core",
        "core/test_native",
        "core/test_spin",
        files=(
            "bench/instructions.json",
            "bench/native/*.*",
            "proof/**/*.*",
            "scripts/build_core.py",
            "src/mainstem/cache/*.py",
            "src/mainstem/core/csrc/**/*.*",
            "tests/native/*",
        ),
        imports=False,
    ),
    slow(
        "scheduler",
        "runtime/schedule/test_scheduler",
        "runtime/schedule/test_scheduler_components",
        "runtime/hints/test_sessions",
        "runtime/test_engine_hybrid",
        "runtime/test_engine_eight_bits",
        "cache/test_lease_components",
        "cache/test_stateful",
        "cache/policies/test_expected",
        "cache/policies/test_policies_gittins",
        "cache/policies/test_retention",
        "tiers/test_tiers_components",
    ),
    slow(
        "benchmarks",
        "benchmarks/test_bench",
        "benchmarks/test_bench_agents",
        "benchmarks/test_bench_codec",
        "benchmarks/test_bench_gpu",
        "benchmarks/test_bench_loading",
        "benchmarks/test_bench_models",
    ),
    slow(
        "kernels",
        "runtime/attention/test_page_attention",
        "runtime/kernels/test_step_graphs",
        "runtime/attention/test_triton_attention",
        "runtime/test_bits",
        "runtime/test_gpu_bits",
        "runtime/test_exactness",
        "runtime/audit/test_audit",
        "runtime/memory/test_states",
        "runtime/models/test_runner",
        "runtime/sampling/test_grammars",
        "runtime/sampling/test_reading",
        "runtime/test_hf",
    ),
    slow(
        "storage",
        "storage/file/test_storage_file_crash",
        "storage/file/test_storage_file_faults",
        "storage/test_storage_mooncake",
        "storage/test_storage_nixl",
    ),
    slow(
        "pages",
        "pages/test_docs",
        "pages/test_site",
        "commands/test_demo",
        files=("docs/**/*.md", "README.md", "examples/*.py"),
    ),
    slow(
        "serving",
        "server/test_app",
        "server/serve/test_serve_answers",
        "server/serve/test_serve_echo",
        "server/serve/test_serve_hybrids",
        "server/serve/test_serve_load",
        "server/serve/test_serve_owner",
        "server/serve/test_serve_tiers",
        "server/serve/test_serve_tools",
        "server/test_server_fuzz",
        "server/fields/test_structured",
        "server/watch/test_live_page",
        "runtime/test_tp",
        "fleet/test_deploy",
    ),
    Lane(
        "kills",
        ("tests/storage/file/test_storage_file_kill.py",),
        imports=("tests/storage/file/test_storage_file_kill.py",),
        environment=(("MAINSTEM_KILLS", "500"),),
        own=False,
    ),
    simulation("simulation", "2000000"),
    simulation("simulation-of-fleets", "500000", "--profile", "fleet"),
    Lane(
        "lmcache",
        ("tests/storage/test_storage_lmcache.py",),
        (
            "src/mainstem/storage/vendors/lmcache.py",
            "src/mainstem/storage/base.py",
            "src/mainstem/storage/conformance.py",
            "tests/storage/test_storage_lmcache.py",
            "tests/doubles/lmcache_server.py",
            "tests/requirements-lmcache.txt",
        ),
    ),
    Lane(
        "sglang",
        ("tests/integrations/test_sglang.py",),
        (
            "src/mainstem/integrations/sglang.py",
            "src/mainstem/tiers/keyed.py",
            "src/mainstem/tiers/storage/slots.py",
            "tests/integrations/test_sglang.py",
            "tests/rigs/kept_store.py",
            "tests/rigs/sglang_*.py",
            "bench/peers.py",
            "tests/doubles/sglang_hicache.py",
            "tests/recorded/sglang-calls.json.xz",
            "tests/requirements-sglang.txt",
        ),
        python=".venv-sglang/bin/python",
    ),
    Lane(
        "routers",
        ("tests/events/test_events_routers.py", "tests/benchmarks/test_bench_dynamo.py"),
        (
            "bench/dynamo.py",
            "src/mainstem/events/*.py",
            "src/mainstem/core/csrc/tree/journal.*",
            "tests/benchmarks/test_bench_dynamo.py",
            "tests/events/test_events_routers.py",
            "tests/rigs/dynamo_router.py",
            "tests/requirements-routers.txt",
        ),
        ("pyzmq", "msgspec"),
    ),
    Lane(
        "clients",
        ("tests/server/test_clients.py",),
        (
            "src/mainstem/server/**/*.py",
            "src/mainstem/runtime/sampling/grammars.py",
            "src/mainstem/runtime/text/prompts.py",
            "tests/server/test_clients.py",
            "tests/clients/*",
            "tests/rigs/client_calls.py",
            "tests/rigs/scripted_model.py",
        ),
        ("llguidance",),
    ),
    Lane(
        "fleet",
        ("tests/fleet/test_fleet.py", "tests/fleet/test_kubernetes.py"),
        (
            "deploy/kubernetes/*.yaml",
            "src/mainstem/fleet/**/*.py",
            "src/mainstem/settings/fleet.py",
            "src/mainstem/settings/mapping.py",
            "tests/requirements-fleet.txt",
            "tests/rigs/kubernetes_models.py",
            "tests/fleet/test_fleet.py",
            "tests/fleet/test_kubernetes.py",
        ),
        ("starlette", "uvicorn"),
    ),
    Lane(
        "vllm",
        ("tests/integrations/test_vllm.py", "tests/events/test_events_vllm.py"),
        (
            "src/mainstem/batch/order.py",
            "src/mainstem/events/wire.py",
            "src/mainstem/integrations/block_*.py",
            "src/mainstem/integrations/files.py",
            "src/mainstem/integrations/options.py",
            "src/mainstem/integrations/vllm.py",
            "src/mainstem/integrations/vllm_plugin.py",
            "src/mainstem/tiers/storage/slots.py",
            "tests/doubles/vllm_interface.py",
            "tests/requirements-vllm.txt",
            "tests/rigs/vllm_*.py",
            "tests/events/test_events_vllm.py",
            "tests/integrations/test_vllm.py",
            "tests/recorded/vllm-*.json.xz",
        ),
    ),
)


def digests(lane: Lane, root: Path = ROOT) -> dict[str, str]:
    """Returns the current digest of each file and the current line of each pin.

    Raises:
        FileNotFoundError: a file, pattern or pin of the lane does not exist.
    """
    found: dict[str, str] = {}
    for pattern in lane.files:
        paths = sorted(path for path in root.glob(pattern) if path.is_file() and path.suffix != ".pyc")
        if not paths:
            raise FileNotFoundError(f"lane {lane.name}: there is no {pattern}")
        for path in paths:
            found[path.relative_to(root).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    for pattern in lane.imports:
        paths = sorted(root.glob(pattern))
        if not paths:
            raise FileNotFoundError(f"lane {lane.name}: there is no {pattern}")
        found[f"{pattern} and what it imports"] = digest(closure(paths, root), root)
    constraints = (root / "constraints.txt").read_text() if lane.pins else ""
    for pin in lane.pins:
        line = re.search(rf"^{re.escape(pin)}==\S+$", constraints, re.MULTILINE)
        if line is None:
            raise FileNotFoundError(f"lane {lane.name}: constraints.txt does not pin {pin}")
        found[f"constraints.txt: {pin}"] = line[0]
    return found


def changed(lane: Lane, root: Path = ROOT) -> list[str] | None:
    """Returns the files and pins that have changed since the lane passed; None without a record."""
    path = root / lane.record
    if not path.exists():
        return None
    then, now = json.loads(path.read_text())["digests"], digests(lane, root)
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def run(lane: Lane, root: Path = ROOT, tests: Tests | None = None) -> int:
    """Runs the lane; writes its record if all tests pass and none is left out; returns the exit status.

    Args:
        tests: runs the tests; returns the exit status and what pytest printed.
    """
    before, began = digests(lane, root), time.monotonic()
    (root / LEFT_OUT).unlink(missing_ok=True)
    status, output = (tests or _pytest)(lane, root)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", output.strip().rpartition("\n")[2])}
    if status or (lane.own and "skipped" in counts):
        print(f"lane {lane.name}: failed, or skipped tests; its record is unchanged")
        return 1
    if (root / LEFT_OUT).exists() and not lane.own:
        print(f"lane {lane.name}: passed, but this machine lacks something optional; its record is unchanged")
        return 0
    record = {
        "passed": counts.get("passed", 1),
        "seconds": round(time.monotonic() - began),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(root),
        "python": platform.python_version(),
        "digests": before,
    }
    (root / lane.record).write_text(json.dumps(record, indent=1) + "\n")
    print(f"lane {lane.name}: written to {lane.record}")
    return 0


def check(
    lanes: Iterable[Lane] = LANES,
    root: Path = ROOT,
    make: Callable[[str], int] | None = None,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Accepts a lane whose files have not changed since it passed, else runs it; returns 0 if all pass.

    Args:
        make: runs a target of the Makefile; returns its exit status.
        seconds: that may pass. Unless they are infinite, lanes are checked in the order of what they took before, and
            one that would take more than is left is named and not run, unless it needs an environment of its own.
        clock: in seconds.
    """
    failed, end = 0, clock() + seconds
    for lane in lanes if seconds == math.inf else sorted(lanes, key=lambda lane: _seconds(lane, root)):
        names = changed(lane, root)
        if names != [] and not lane.own and clock() + _seconds(lane, root) > end:
            print(f"lane {lane.name}: is left to `make nightly`, for want of time", flush=True)
            continue
        if names is None and lane.own:
            print(f"lane {lane.name}: no record; run `make test-{lane.name}` and commit {lane.record}")
            failed += 1
        elif names is None:
            print(f"lane {lane.name}: runs, since it has no record; commit {lane.record}", flush=True)
            failed += (make or _make)(f"test-{lane.name}") != 0
        elif names:
            print(f"lane {lane.name}: runs again because of changes in: {', '.join(names)}", flush=True)
            failed += (make or _make)(f"test-{lane.name}") != 0
        else:
            record: dict[str, Any] = json.loads((root / lane.record).read_text())
            print(f"lane {lane.name}: {record['passed']} passed on {record['date'][:10]}, nothing has changed since")
    return int(failed > 0)


def _seconds(lane: Lane, root: Path) -> float:
    """Returns how long the lane took when it passed; 0 if it never did."""
    path = root / lane.record
    return float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    names = [lane.name for lane in LANES]
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=__doc__)
    parser.add_argument("task", choices=["run", "check"])
    parser.add_argument("lanes", nargs="*", metavar="lane", help=f"one of {', '.join(names)}; default: all")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="check no lane that would take longer than this"
    )
    options = parser.parse_args(arguments)
    meant = {
        each: [each] if each in names else [n for n in names if n.startswith(f"{each}-")] for each in options.lanes
    }
    if unknown := sorted(each for each, lanes in meant.items() if not lanes):
        parser.error(f"no such lane: {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [lane for lane in LANES if not meant or any(lane.name in lanes for lanes in meant.values())]
    return check(chosen, seconds=options.seconds) if options.task == "check" else max(run(lane) for lane in chosen)


def _pytest(lane: Lane, root: Path) -> tuple[int, str]:
    python = str(root / lane.python) if lane.python else sys.executable
    command = [python, *(() if lane.tests[0] == "-m" else ("-m", "pytest", "-q")), *lane.tests]
    env = {**os.environ, **dict(lane.environment)}
    done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return done.returncode, done.stdout


def _make(target: str) -> int:
    return subprocess.run(["make", target], cwd=ROOT, check=False).returncode


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
