"""The C++ core alone: the tests in native/, built with address and undefined-behaviour sanitizers, and its instruction
counts compared with the recorded ones. These runs are short; `make native` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from machine import patience
from skips import COMPILER, VALGRIND

from bench.native import compiler_version, instructions
from scripts.bounds import build_native

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests" / "native"


@pytest.fixture(scope="module")
def build() -> None:
    COMPILER.need()


@pytest.mark.slow
@pytest.mark.usefixtures("build")
def test_a_compiler_and_nanobind_alone_build_the_core(tmp_path: Path) -> None:
    """As on a machine without CMake or a network."""
    build = [sys.executable, str(ROOT / "scripts" / "build_core.py"), str(tmp_path)]
    module = subprocess.run(build, capture_output=True, text=True, check=True, timeout=patience(280)).stdout.strip()
    use = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("mainstem._core", {module!r})
sys.modules["mainstem._core"] = core = module_from_spec(spec)
spec.loader.exec_module(core)
import mainstem
cache = mainstem.PrefixCache(pages=8, page_size=4)
for hit in (0, 8):
    with cache.lease(range(9)) as lease:
        assert lease.hit == hit, lease.hit
        lease.reserve(9 - hit)
        lease.publish(9)
        lease.finish()
print(sys.modules['mainstem._core'].__file__)
"""
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == module


@pytest.mark.slow
@pytest.mark.usefixtures("build")
def test_bounds_that_only_thousands_of_events_reach(tmp_path: Path) -> None:
    build_native(NATIVE / "bounds.cpp", ROOT / "src" / "mainstem" / "core" / "csrc", tmp_path / "bounds")
    done = subprocess.run([tmp_path / "bounds"], capture_output=True, text=True, check=False, timeout=patience(60))
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.usefixtures("build")
def test_random_operations_and_failing_allocations() -> None:
    # Kept between runs, so that only what was edited is rebuilt.
    out = ROOT / "build" / "native" / "short"
    options = ["FLAVOUR=asan", "OPTIMISE=-O0", f"OUT={out}", "SEEDS=1", "OPERATIONS=100"]
    command = ["make", "--silent", "--jobs=2", "--directory", str(NATIVE), *options, "run"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(280))
    assert result.returncode == 0, result.stdout + result.stderr
    failed = [int(line.split()[-3]) for line in (out / "asan" / "out_of_memory.txt").read_text().splitlines()]
    assert len(failed) > 100
    assert sum(failed) > 500


@pytest.mark.slow
@pytest.mark.usefixtures("build")
def test_instructions_have_not_grown() -> None:
    """A change with a good reason for more instructions commits the new counts, for reviewers to see."""
    VALGRIND.need()
    kept = instructions.kept()
    if kept["compiler"] != compiler_version():
        pytest.skip(f"the counts that are kept are of {kept['compiler']}, this is {compiler_version()}")
    grown = instructions.growths(kept, instructions.measure(list(kept["runs"])))
    assert not grown, "\n".join([*grown, "if this is intended: make instructions ARGS=--write"])


def test_growth_is_named_from_three_percent_on() -> None:
    def counts(total: float) -> dict[str, object]:
        return {"runs": {"a": {"total": total}}}

    assert instructions.growths(counts(1000), counts(1030)) == []
    assert instructions.growths(counts(1000), counts(1031)) == ["a: 1031 instructions a request, 3.1% more"]
    assert instructions.growths({"runs": {}}, counts(1100)) == []


def test_counts_are_read_by_the_file_that_was_compiled() -> None:
    lines = """events: Ir
ob=(1) /build/instructions
fl=(1) /core/tree.cpp
fn=(1) one
12 5
fi=(2) /core/order.h
3 2
cob=(2) /lib/libc.so.6
cfi=(3) /libc/malloc.c
cfn=(2) malloc
calls=1 7
14 100
fe=(1)
15 1
ob=(2)
fl=(3)
fn=(2)
7 100"""
    assert instructions.parse(lines.splitlines(), "instructions") == {"/core/tree.cpp": 6, "/core/order.h": 2}
