"""One system in a process of its own: takes tasks from standard input, a line of JSON each, and answers alike.

    index.py  --{"page_size": 16, "mode": "prepared"}-->  replay.py SYSTEM WORKLOAD
              <--{"us": 15.1, "cpu_us": 15.0, "hit_rate": 0.88, "parts": {}}--

It needs no more than the standard library, NumPy and the system, so it also runs in an interpreter that has the peers
and not Mainstem. A system that fails ends the process; the last line of its standard error says why.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any, TextIO

from bench.systems import Make, System
from bench.workload import Chats

MODES = ("prepared", "lists", "parts")
"""Prompts in the system's own type; as lists, conversion counted; and each part of a request timed alone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A system: what it is called, the class that drives it, and whether it is of another project.

    `page_sizes` are those that make sense for it; `note` says what its figures do not include.
    """

    label: str
    place: str
    peer: bool = False
    page_sizes: tuple[int, ...] = (1, 16, 64)
    note: str = ""

    def make(self) -> Make:
        """The class. Raises ImportError."""
        module, _, name = self.place.partition(":")
        loaded: Make = getattr(import_module(module), name)
        return loaded


HASHED = (16, 64)
"""Page sizes of systems that hash each page: a hash for each token is not how they are used."""

SYSTEMS = {
    "mainstem": Entry("Mainstem, leases", "bench.systems:MainstemLease"),
    "mainstem-tree": Entry("Mainstem, Tree and Pool", "bench.systems:MainstemTree"),
    "python": Entry("plain Python", "bench.systems:PythonRadix"),
    "sglang-rust": Entry("SGLang, Rust core", "bench.peers:SGLangRust", peer=True),
    "sglang-python": Entry("SGLang, RadixCache", "bench.peers:SGLangPython", peer=True),
    "vllm": Entry("vLLM, sha256", "bench.peers:VLLM", peer=True, page_sizes=HASHED),
    "dynamo": Entry(
        "Dynamo, RadixTree", "bench.peers:Dynamo", peer=True, page_sizes=HASHED, note="index only: no pool, no eviction"
    ),
}


def measure(make: Make, prompts: list[list[int]], capacity_tokens: int, page_size: int, mode: str) -> dict[str, Any]:
    """Serves all prompts once on a new system: microseconds a request, hit rate, and, by mode, those of the parts.

    `us` is time by the clock, `cpu_us` what the process spent of it: where the two differ, others had the cores.
    """
    system = make(page_size, capacity_tokens)
    samples = _put_clocks(system) if mode == "parts" else {}
    convert, keys = _keys(system, prompts, mode)
    gc.collect()
    gc.freeze()  # the collector need not look at the workload again and again
    hit = 0
    started_ns, cpu_started_ns = time.perf_counter_ns(), time.process_time_ns()
    for key in keys:
        hit += system.serve(convert(key) if convert else key)
    cpu_ns, ns = time.process_time_ns() - cpu_started_ns, time.perf_counter_ns() - started_ns
    gc.unfreeze()
    return {
        "us": ns / len(keys) / 1000,
        "cpu_us": cpu_ns / len(keys) / 1000,
        "hit_rate": hit / sum(map(len, prompts)),
        "parts": {part: median(times) / 1000 for part, times in samples.items() if times},
    }


def _keys(system: System, prompts: list[list[int]], mode: str) -> tuple[Callable[[list[int]], Any] | None, list[Any]]:
    """What is given to the system, and the conversion that is to be timed with it."""
    if mode != "lists" or system.lists == "own":
        return None, [system.prepare(prompt) for prompt in prompts]
    return None if system.lists == "accepted" else system.prepare, prompts


def _put_clocks(system: System) -> dict[str, list[int]]:
    """Times each call of each part, in nanoseconds."""
    samples: dict[str, list[int]] = {part: [] for part in system.parts}
    for part, (owner, method) in system.parts.items():
        setattr(owner, method, _timed(getattr(owner, method), samples[part]))
    return samples


def _timed(call: Callable[..., Any], times_ns: list[int]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started_ns = time.perf_counter_ns()
        result = call(*args, **kwargs)
        times_ns.append(time.perf_counter_ns() - started_ns)
        return result

    return timed


def _private_stdout() -> TextIO:
    """Standard output for answers alone; what a system prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main(name: str, workload: str) -> None:
    """Says which versions it runs, then answers tasks until the input ends."""
    answers = _private_stdout()
    settings = json.loads(workload)
    entry, capacity_tokens = SYSTEMS[name], settings.pop("capacity_tokens")
    make = entry.make()
    prompts = list(Chats(**settings).prompts())
    print(json.dumps({"versions": dict(make(entry.page_sizes[0], capacity_tokens).versions)}), file=answers)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(measure(make, prompts, capacity_tokens, task["page_size"], task["mode"])), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
