"""Runs a workload on one system: microseconds per request and per part, and the hit rate. Runs in its process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.clock import freeze
from bench.systems import System

MODES = ("prepared", "lists", "parts")
"""Prompts in the system's own type; as lists, conversion included; and each part of a request timed separately."""


def measure(system: System, prompts: list[list[int]], mode: str) -> dict[str, Any]:
    """Serves all prompts once on a new system; returns microseconds per request, the hit rate and those of the parts.

    `us` is wall-clock time, `cpu_us` is CPU time of the process. They differ if other processes used the cores.
    """
    samples = _put_clocks(system) if mode == "parts" else {}
    convert, keys = _keys(system, prompts, mode)
    freeze()
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
    """Returns the conversion to include in the time, and the inputs of the system."""
    if mode != "lists" or system.lists == "own":
        return None, [system.prepare(prompt) for prompt in prompts]
    return None if system.lists == "accepted" else system.prepare, prompts


def _put_clocks(system: System) -> dict[str, list[int]]:
    """Wraps each part in a clock; returns the lists of nanoseconds."""
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
