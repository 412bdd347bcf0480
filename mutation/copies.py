"""Patched copies of the package and of the repository, and how they are run; the core, compiled file by file.

Nothing is ever changed in the working tree: a mutant lives in a copy, which comes first on the path of every process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mainstem"
POLICIES = "core/csrc/eviction/policies/"

# As many mutants run at a time as there are cores: more threads would spin while they wait for each other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

# An editable installation finds the package where it was installed from, whatever the path says. Each process that a
# test starts imports this as well.
_SITE = """import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""


def copy_package(folder: Path, core: Path | None = None) -> Path:
    """Copies the package into a folder, with its compiled modules; returns the copy.

    Args:
        core: takes the place of the core.
    """
    copy = folder / "mainstem"
    # With its compiled modules, but for those that are being written.
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("csrc", "*.pyc.*"))
    core = core or core_file()
    shutil.copy(core, copy / core.name)
    return copy


def copy_repository(copy: Path, root: Path = ROOT) -> None:
    """Makes a copy equal to the repository, without what git ignores, but with the core."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    wanted = {name for name in done.stdout.split("\0") if name and (root / name).is_file()}
    kept = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    for name in kept - wanted:
        if not name.endswith(".pyc"):
            (copy / name).unlink()
    for name in wanted:
        write(copy / name, (root / name).read_bytes())
    core = core_file()
    (copy / "src" / "mainstem" / core.name).unlink(missing_ok=True)
    shutil.copy2(core, copy / "src" / "mainstem" / core.name)


def write(path: Path, content: bytes) -> None:
    """Writes a file unless it has this content; Python then compiles it anew, however fast it was changed."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def environment(folder: Path, *further: Path) -> dict[str, str]:
    """Returns the environment of processes that import the package from a folder before any other."""
    site = folder / "sitecustomize.py"
    if not site.exists():
        site.write_text(_SITE)
    path = os.pathsep.join(map(str, (folder, *further)))
    return {**os.environ, "PYTHONPATH": path, **_ONE_THREAD}


def core_file() -> Path:
    """Returns the compiled core of this installation."""
    found = importlib.util.find_spec("mainstem._core")
    assert found is not None and found.origin is not None
    return Path(found.origin)


class Builder:
    """Compiles the core, file by file; what was compiled once is used for every mutant.

    Args:
        folder: for object files; those of the same sources that are there are used again.
    """

    def __init__(self, folder: Path) -> None:
        import nanobind  # type: ignore[import-untyped]

        binder = Path(nanobind.__file__).parent
        includes = [binder / "include", binder / "ext" / "robin_map" / "include", sysconfig.get_path("include")]
        self._flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
        self._flags += [f"-I{include}" for include in includes]
        csrc = PACKAGE / "core" / "csrc"
        self._standard = folder / "standard.h"
        sources = [*sorted(csrc.rglob("*.cpp")), binder / "src" / "nb_combined.cpp"]
        self._objects = {source.name: folder / f"{source.stem}.o" for source in sources}
        made, now = folder / "made", self._digest(csrc)
        if made.exists() and made.read_text() == now:
            return
        self._precompile(csrc.rglob("*.[hc]*"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(self._compile, csrc=csrc, folder=folder), sources))
        made.write_text(now)

    def build(self, file: str, text: str, folder: Path) -> Path:
        """Returns the module in which a file, below the package, has another text.

        Raises:
            subprocess.CalledProcessError: it does not compile.
        """
        csrc = folder / "core" / "csrc"
        shutil.copytree(PACKAGE / "core" / "csrc", csrc)
        (folder / file).write_text(text)
        changed = [folder / file]
        if POLICIES in file:
            changed = [csrc / "eviction" / "eviction.cpp"]  # which alone makes policies
        elif changed[0].suffix == ".h":
            changed = [source for source in csrc.rglob("*.cpp") if self._includes(source, file)]
        objects = {source.name: self._compile(source, csrc, folder) for source in changed}
        objects |= {name: compiled for name, compiled in self._objects.items() if name not in objects}
        module = folder / core_file().name
        self._call([*map(str, objects.values()), "-shared", "-o", str(module)])
        return module

    def _digest(self, csrc: Path) -> str:
        texts = [path.read_bytes() for path in sorted(csrc.rglob("*.[hc]*"))]
        return hashlib.sha256(repr((self._flags, texts)).encode()).hexdigest()

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
