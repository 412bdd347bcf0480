"""`python -m fuzz`: searches each target for bytes that break it, by coverage (atheris), for so many seconds in all.

    python -m fuzz --seconds 60                all targets, as many at a time as there are cores
    python -m fuzz --seconds 600 tree cache    some of them

What is found is kept in `tests/fuzz/corpus`, where `tests/core/test_fuzz_corpus.py` replays it. What only reaches more
of the code is kept beside the fuzzer's packages, so that a later search goes on from there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_ROOT = Path(__file__).parents[2]
_REACHED = _ROOT / ".venv-fuzz" / "reached"
_TELLS = "ERROR: libFuzzer"
_LIMITS = ("-max_len=4096", "-timeout=30", "-rss_limit_mb=3000", "-print_final_stats=1", "-verbosity=0")


def main() -> int:
    """Returns 0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of targets; none: all")
    parser.add_argument("--seconds", type=int, default=60, help="in all")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _fuzz(options.targets[0], options.seconds)
    from fuzz.targets import TARGETS

    names = options.targets or [target.name for target in TARGETS]
    if unknown := [name for name in names if name not in {target.name for target in TARGETS}]:
        parser.error(f"no target is named {unknown[0]}")
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: make fuzz")
    share = max(1, options.seconds // len(names))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each has a process, whose imports take as long as its share
        clean = list(pool.map(partial(_search, seconds=share), names))
    found = [name for name, nothing in zip(names, clean, strict=True) if not nothing]
    for name in found:
        print(f"FOUND {name}: see {CORPUS / name}")
    return int(bool(found))


def _search(name: str, seconds: int) -> bool:
    """Returns whether nothing was found."""
    for folder in (CORPUS / name, _REACHED / name):
        folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fuzz", "--child", "--seconds", str(seconds), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    runs = next((line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line), "?")
    print(f"{name:<18}{runs:>12} runs in {seconds} s{'' if done.returncode == 0 else ': FAILED'}", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], *(line for line in done.stderr.splitlines() if _TELLS in line), sep="\n")
    return done.returncode == 0


def _fuzz(name: str, seconds: int) -> None:
    """Fuzzes one target in this process, which ends with it."""
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["mainstem"], enable_loader_override=False):
        from fuzz.targets import TARGETS

        run = next(target for target in TARGETS if target.name == name).make()
    folders: Sequence[str] = [str(_REACHED / name), str(CORPUS / name)]
    how = [*_LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix={CORPUS / name}/"]
    atheris.Setup([sys.argv[0], *how, *folders], run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
