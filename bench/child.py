"""One system in a process of its own: takes tasks from standard input, a line of JSON each, and answers alike.

    workers.py  --{"task": "scenario", "name": "miss", ...}-->  child.py SYSTEM
                <--{"measures": {"µs": 1.0}, "facts": {}, "note": ""}-- or --{"error": "WrongAnswer: ..."}--

It needs no more than the standard library, NumPy and the system, so it also runs in an interpreter that has the peers
and not Mainstem. A scenario runs in a fork of this process, which has imported everything and done nothing yet: its
memory is new, what it leaves behind ends with it, and it can be given up.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any, TextIO

from bench.clock import freeze
from bench.entries import SYSTEMS
from bench.replay import measure
from bench.scenarios import SCENARIOS, Sizes
from bench.systems import System
from bench.workload import WORKLOADS

Task = dict[str, Any]
"""What is asked for: "task" is one of `TASKS`, the rest are its settings."""


@cache
def _prompts(workload: str, settings: str) -> list[list[int]]:
    return list(WORKLOADS[workload](**json.loads(settings)).prompts())


def replay(system: type[System], task: Task) -> dict[str, Any]:
    """A whole workload on a new system; see `replay.measure`."""
    prompts = _prompts(task["workload"], json.dumps(task["settings"]))
    make: Callable[..., System] = system
    policy = {"policy": task["policy"]} if task.get("policy") else {}
    return measure(make(task["page_size"], task["capacity_tokens"], **policy), prompts, task["mode"])


def hits(system: type[System], task: Task) -> dict[str, Any]:
    """The hit rate of a workload where the pool is small, or why the system has none."""
    return {"error": system.lacks["hits"]} if "hits" in system.lacks else replay(system, task)


def scenario(system: type[System], task: Task) -> dict[str, Any]:
    """A scenario in a fork; what went wrong there is its error, as is why the system cannot do it."""
    if task["name"] in system.lacks:
        return {"error": system.lacks[task["name"]]}
    sizes = Sizes(**task["sizes"])
    return run_apart(lambda: asdict(SCENARIOS[task["name"]](system, sizes, task["small"])), sizes.limit_s)


def run_apart(work: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """What `work` returns in a fork of this process, or {"error": why}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_end(work, writer)
    os.close(writer)
    try:
        said = _read_all(reader, limit_s)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        return {"error": f"took more than {limit_s:g} s"}
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    answer: dict[str, Any] = json.loads(said) if said else {"error": f"ended by signal {status & 127}"}
    return answer


def _answer_and_end(work: Callable[[], dict[str, Any]], writer: int) -> None:
    """Never returns: what the parent had opened or registered for its own end must not end twice."""
    try:
        answer = work()
    except Exception as error:  # noqa: BLE001, whatever it is: the answer names it
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(writer, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def _read_all(reader: int, limit_s: float) -> bytes:
    said = b""
    while True:
        ready, _, _ = select.select([reader], [], [], limit_s)
        if not ready:
            raise TimeoutError
        more = os.read(reader, 2**16)
        if not more:
            return said
        said += more


TASKS = {"replay": replay, "hits": hits, "scenario": scenario}


def _private_stdout() -> TextIO:
    """Standard output for answers alone; what a system prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main(name: str) -> None:
    """Says which versions it runs, then answers tasks until the input ends."""
    answers = _private_stdout()
    system = SYSTEMS[name].find()
    versions = system.load()
    freeze()  # what was imported is not looked at, and so not copied, in each fork
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(TASKS[task["task"]](system, task)), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
