"""One system in its own process: reads tasks from standard input, one JSON object per line, and answers likewise.

    workers.py  --{"task": "scenario", "name": "miss", ...}-->  child.py SYSTEM
                <--{"measures": {"µs": 1.0}, "facts": {}, "note": ""}-- or --{"error": "WrongAnswer: ..."}--

Needs only the standard library, NumPy and the system, so it also runs in an interpreter that has the peers but not
Mainstem. A scenario runs in a fork of this process, which has imported everything and done nothing yet. The fork has
fresh memory, leaves nothing when it ends, and can be killed.
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
"""A task: "task" is one of `TASKS`, the other fields are its settings."""


@cache
def _prompts(workload: str, settings: str) -> list[list[int]]:
    return list(WORKLOADS[workload](**json.loads(settings)).prompts())


def replay(system: type[System], task: Task) -> dict[str, Any]:
    """Runs a whole workload on a new system; see `replay.measure`."""
    prompts = _prompts(task["workload"], json.dumps(task["settings"]))
    make: Callable[..., System] = system
    policy = {"policy": task["policy"]} if task.get("policy") else {}
    return measure(make(task["page_size"], task["capacity_tokens"], **policy), prompts, task["mode"])


def hits(system: type[System], task: Task) -> dict[str, Any]:
    """Returns the hit rate of a workload with a small pool, or why the system has none."""
    return {"error": system.lacks["hits"]} if "hits" in system.lacks else replay(system, task)


def scenario(system: type[System], task: Task) -> dict[str, Any]:
    """Runs a scenario in a fork. Returns an error if it failed, or if the system does not support it."""
    if task["name"] in system.lacks:
        return {"error": system.lacks[task["name"]]}
    sizes = Sizes(**task["sizes"])
    return run_apart(lambda: asdict(SCENARIOS[task["name"]](system, sizes, task["small"])), sizes.limit_s)


def run_apart(work: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """Returns the result of `work` in a fork of this process, or {"error": why}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer_and_end(work, writer)
    os.close(writer)
    try:
        output = _read_all(reader, limit_s)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        return {"error": f"took more than {limit_s:g} s"}
    finally:
        os.close(reader)
        _, status = os.waitpid(child, 0)
    answer: dict[str, Any] = json.loads(output) if output else {"error": f"ended by signal {status & 127}"}
    return answer


def _answer_and_end(work: Callable[[], dict[str, Any]], writer: int) -> None:
    """Answers and exits; never returns, because the parent's exit handlers must not run twice."""
    try:
        answer = work()
    except Exception as error:  # noqa: BLE001, the answer names any error
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(writer, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def _read_all(reader: int, limit_s: float) -> bytes:
    output = b""
    while True:
        ready, _, _ = select.select([reader], [], [], limit_s)
        if not ready:
            raise TimeoutError
        more = os.read(reader, 2**16)
        if not more:
            return output
        output += more


TASKS = {"replay": replay, "hits": hits, "scenario": scenario}


def _private_stdout() -> TextIO:
    """Reserves standard output for answers; output of a system goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main(name: str) -> None:
    """Prints the versions of the system, then answers tasks until the input ends."""
    answers = _private_stdout()
    system = SYSTEMS[name].find()
    versions = system.load()
    freeze()  # the collector would touch imported objects, and so copy them, in each fork
    print(json.dumps({"versions": versions}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(TASKS[task["task"]](system, task)), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
