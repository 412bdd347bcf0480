"""The core when memory runs out at any allocation: an error, and the tree as it was. See native/out_of_memory.cpp."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "src" / "mainstem" / "core" / "csrc"


def test_every_failing_allocation_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ and a linker with --wrap")
    program = tmp_path / "out_of_memory"
    sources = [ROOT / "tests" / "native" / "out_of_memory.cpp", CORE / "tree.cpp", CORE / "check.cpp"]
    command = [compiler, "-std=c++20", "-O1", f"-I{CORE}", *map(str, sources), "-Wl,--wrap=malloc", "-o", str(program)]
    subprocess.run(command, check=True, timeout=240)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stdout
    failed = [int(line.split()[-3]) for line in result.stdout.splitlines()]
    assert len(failed) == 8
    assert sum(failed) > 50
