"""Builds the core with a C++ compiler and nanobind alone: in seconds after an edit, and where no CMake is.

    python scripts/build_core.py [folder]      the module goes to src/mainstem, or to another folder
    python scripts/build_core.py --installed   it takes the place of the one that pip installed into this environment

Only what has changed is compiled; object files are kept in build/core. Nothing happens if the module is newer than all
sources. CMakeLists.txt is the build that is installed; this one has the same flags, but no link-time optimization,
which alone takes more than a minute.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mainstem"
CSRC = PACKAGE / "core" / "csrc"
NANOBIND = Path(nanobind.__file__).parent
INCLUDES = (CSRC, NANOBIND / "include", NANOBIND / "ext" / "robin_map" / "include", Path(sysconfig.get_path("include")))
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing")
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Wno-array-bounds")  # the last: GCC 12 errs
FURTHER = {
    "python": ("-DNDEBUG",),  # nanobind would ask who holds the GIL at every reference that it takes
    "kernels": ("-ffp-contract=fast", "-Wno-psabi", "-Wno-ignored-attributes"),
    "src": ("-DNDEBUG",),  # nanobind itself
}
COMPILER = os.environ.get("CXX", "c++")


def build(folder: Path) -> Path:
    """Builds the module in a folder, unless it is there and newer than all sources; returns its path."""
    module = folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [*sorted(CSRC.rglob("*.cpp")), NANOBIND / "src" / "nb_combined.cpp"]
    if _is_newer(module, [*sources, *CSRC.rglob("*.h")]):
        return module
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_compile, sources))
    fresh = module.with_suffix(".new")
    _call("-shared", *map(str, objects), "-ldl", "-o", str(fresh))
    fresh.replace(module)
    return module


def _compile(source: Path) -> Path:
    """Returns the object file of a source, which other flags or another compiler would place elsewhere."""
    flags = [*FLAGS, *FURTHER.get(source.parent.name, ()), *(f"-I{include}" for include in INCLUDES)]
    flags += WARNINGS if source.is_relative_to(CSRC) else ()
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(repr((version, flags, source)).encode()).hexdigest()[:16]
    target = ROOT / "build" / "core" / f"{source.stem}-{key}.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    uses = target.with_suffix(".d")  # the compiler writes into it which headers the source includes
    if uses.exists() and _is_newer(target, map(Path, re.findall(r"[^\s\\:]+", uses.read_text().partition(":")[2]))):
        return target
    fresh = target.with_suffix(f".{os.getpid()}")
    _call(*flags, "-MMD", "-MF", str(uses), "-c", str(source), "-o", str(fresh))
    fresh.replace(target)
    return target


def _is_newer(path: Path, others: Iterable[Path]) -> bool:
    try:
        return path.stat().st_mtime > max(other.stat().st_mtime for other in others)
    except FileNotFoundError:
        return False


def _call(*arguments: str) -> None:
    subprocess.run([COMPILER, *arguments], check=True)


if __name__ == "__main__":
    installed = Path(sysconfig.get_path("platlib"), "mainstem")
    print(build(installed if sys.argv[1:] == ["--installed"] else Path((sys.argv[1:] or [PACKAGE])[0])))
