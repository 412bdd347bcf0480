"""Builds the core with a C++ compiler and nanobind alone, for machines without CMake, scikit-build-core or a network.

    python scripts/build_core.py [folder]      the module goes to src/mainstem, or to another folder

Does nothing if the module is newer than all sources. CMakeLists.txt is the build that is installed; this one has the
same flags, but no link-time optimization. $CXX is the compiler, by default c++.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind

PACKAGE = Path(__file__).parents[1] / "src" / "mainstem"
CSRC = PACKAGE / "core" / "csrc"
NANOBIND = Path(nanobind.__file__).parent
INCLUDES = (CSRC, NANOBIND / "include", NANOBIND / "ext" / "robin_map" / "include", Path(sysconfig.get_path("include")))
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
FURTHER = {
    "python": ("-DNDEBUG",),  # nanobind would ask who holds the GIL at every reference that it takes
    "kernels": ("-ffp-contract=fast", "-Wno-psabi", "-Wno-ignored-attributes"),
    "src": ("-DNDEBUG",),  # nanobind itself
}


def build(folder: Path) -> Path:
    """Builds the module in a folder, unless it is there and newer than all sources; returns its path."""
    module = folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [*sorted(CSRC.rglob("*.cpp")), NANOBIND / "src" / "nb_combined.cpp"]
    newest = max(path.stat().st_mtime for path in [*sources, *CSRC.rglob("*.h")])
    if module.exists() and module.stat().st_mtime > newest:
        return module
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [str(Path(objects) / f"{number}.o") for number in range(len(sources))]
        list(pool.map(_compile, sources, made))
        fresh = module.with_suffix(".new")
        _call("-shared", *made, "-ldl", "-o", str(fresh))
        fresh.replace(module)
    return module


def _compile(source: Path, target: str) -> None:
    further = FURTHER.get(source.parent.name, ())
    _call(*FLAGS, *further, *(f"-I{include}" for include in INCLUDES), "-c", str(source), "-o", target)


def _call(*arguments: str) -> None:
    subprocess.run([os.environ.get("CXX", "c++"), *arguments], check=True)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE))
