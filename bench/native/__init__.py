"""The core in C++ without Python: how its benchmark programs are built."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src" / "mainstem" / "core" / "csrc"
PROGRAMS = Path(__file__).parent
OUT = ROOT / "build" / "native" / "bench"
FLAGS = ("-std=c++20", "-O2", "-flto=auto")
"""As the wheel is built (CMakeLists.txt): optimised at link time as well, assertions kept."""


class CannotBuild(Exception):
    """There is no compiler, or it refuses the sources; says which."""


def build(name: str, flags: Sequence[str] = (), core: Path = CORE, out: Path = OUT) -> Path:
    """Builds `<name>.cpp` with the core, if the result is older than any source; the program.

    Args:
        flags: besides `FLAGS`.
        core: folder of the core's sources.
        out: folder of the program.

    Raises:
        CannotBuild: no g++, or it fails.
    """
    sources = [PROGRAMS / f"{name}.cpp", *sorted(path for path in core.glob("*/*.cpp") if path.parent.name != "python")]
    program = out / name
    newest = max(path.stat().st_mtime for folder in (core, PROGRAMS) for path in folder.rglob("*.*"))
    if program.exists() and program.stat().st_mtime > newest:
        return program
    command = [_compiler(), *FLAGS, *flags, f"-I{core}", *map(str, sources), "-o", str(program)]
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(done.stderr)
    return program


def compiler_version() -> str:
    """The first line of what the compiler says of itself.

    Raises:
        CannotBuild: no g++.
    """
    command = [_compiler(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("g++ was not found")
    return compiler
