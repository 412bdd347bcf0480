"""A process that has imported what tests need of others, and forks for each run of tests: `python -m mutation.forks`.

It reads requests as lines of JSON, and answers with events as lines of JSON. PyTorch takes seconds to import, most runs
take less. It never imports the package itself, so that each child finds it as it is in the copy then, with a mutant.

    {"task": "tests", "files": [...], "wanted": {"node id": place}, "all": false, "coverage": null}
    {"task": "simulate", "profile": "cache", "seeds": 8, "operations": 1500, "coverage": null}
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 6 << 30  # that a run may allocate: a loop without end would take all memory

Tell = Callable[[dict[str, Any]], None]


def main() -> int:
    """Imports the modules named in a file, then serves requests until its input ends."""
    events = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)

    def tell(event: dict[str, Any]) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
    for name in json.loads(Path(sys.argv[1]).read_text()):
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  what cannot be imported alone, a test imports
            continue
    assert "mainstem" not in sys.modules
    tell({"ready": threading.active_count()})
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(nothing, 0)
            os._exit(_serve(request, tell))
        tell({"child": child})
        _, status = os.waitpid(child, 0)
        tell({"end": os.waitstatus_to_exitcode(status)})
    return 0


def _serve(request: dict[str, Any], tell: Tell) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    traced = _traced(request["coverage"]) if request["coverage"] else None
    status = 70
    try:
        status = _simulate(request, tell, traced) if request["task"] == "simulate" else _test(request, tell, traced)
        if traced is not None:
            traced.stop()
            traced.save()
            tell({"modules": sorted(name for name, module in list(sys.modules.items()) if _is_foreign(name, module))})
    except BaseException as error:  # noqa: BLE001  the end of a child is told, whatever ended it
        tell({"failed": "the run itself", "what": repr(error)[:300]})
    return status


def _traced(path: str) -> Any:
    import coverage

    found = coverage.Coverage(data_file=path, source=["src/mainstem"], config_file=False)
    found.start()
    return found


def _is_foreign(name: str, module: Any) -> bool:
    """Whether a module belongs to a package that is installed; those of processes tell that one was started."""
    path = getattr(module, "__file__", None) or ""
    return "site-packages" in path and not name.startswith(("mainstem", "_pytest", "coverage"))


# ---------------------------------------------------------------- tests


class _Plugin:
    """Runs the wanted tests in their order, and tells what becomes of each."""

    def __init__(self, wanted: dict[str, int] | None, tell: Tell, traced: Any) -> None:
        self._wanted, self._tell, self._traced = wanted, tell, traced
        self._starts: set[str] = set()
        sys.addaudithook(self._heard)
        self._test, self._seconds = "", 0.0

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        popen = event == "import" and str(arguments[0]).startswith("multiprocessing.popen")
        if self._test not in self._starts and (popen or event in ("subprocess.Popen", "os.fork", "os.posix_spawn")):
            self._starts.add(self._test)
            self._tell({"starts": self._test})

    def pytest_collection(self) -> None:
        """Lets no test of random values make its failure smaller: one is enough."""
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutants", settings.default, phases=phases, database=None, derandomize=True)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = self._wanted
        if wanted is not None:
            items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])
        for item in items:
            if self._traced is not None and item.get_closest_marker("deadline"):
                self._tell({"deadline": item.nodeid})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell({"failed": report.nodeid, "what": _said(report)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test, self._seconds = nodeid, 0.0
        self._tell({"test": nodeid})
        if self._traced is not None:
            self._traced.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds += report.duration
        if report.failed:
            self._tell({"failed": report.nodeid, "what": _said(report)})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell({"done": nodeid, "seconds": self._seconds})


def _said(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:200].split("\n")[0]


def _test(request: dict[str, Any], tell: Tell, traced: Any) -> int:
    import pytest

    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "--timeout=0", "-m", "not slow"]
    if not request["all"]:
        arguments.append("-x")
    return int(pytest.main([*arguments, *request["files"]], plugins=[_Plugin(request["wanted"], tell, traced)]))


# ---------------------------------------------------------------- the simulator


def _simulate(request: dict[str, Any], tell: Tell, traced: Any) -> int:
    from simulator.campaign import run_seed

    profile = request["profile"]
    for seed in range(request["seeds"]):
        name = f"simulator: {profile}"
        tell({"test": name})
        if traced is not None:
            traced.switch_context(name)
        found = run_seed(profile, seed, request["operations"])
        if found.failures:
            tell({"failed": name, "what": found.failures[0][1].split("\n")[0][:200]})
            return 1
        tell({"done": name, "seconds": found.seconds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
