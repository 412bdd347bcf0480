"""Measures one process: the time of single calls, and the memory that it holds. Knows no system.

|  now  |          call            |  now  |
|<-->|<---- the measured time ------->|<-->|    the overhead is measured once, with an empty call, and
                                                subtracted
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

STATUS = Path("/proc/self/status")


class _Nothing:
    """A placeholder for a system."""

    def call(self, _: Any = None) -> int:
        """Does nothing; a method with one argument."""
        return 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Timed calls: the microseconds and the result of each."""

    us: list[float]
    results: list[Any]


def sample(call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], budget_s: float = 1e9) -> Sample:
    """Times one call per tuple of arguments, and subtracts the time of the clock and of an empty call.

    Args:
        arguments: created one at a time, outside the timed part.
        budget_s: no further call starts after this many seconds; the first three always do.
    """
    times_ns, results = _time(call, arguments, budget_s)
    return Sample([max(ns - _overhead_ns(), 0) / 1000 for ns in times_ns], results)


def _time(
    call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], budget_s: float
) -> tuple[list[int], list[Any]]:
    times: list[int] = []
    results: list[Any] = []
    now = time.perf_counter_ns
    end = now() + int(budget_s * 1e9)
    for given in arguments:
        started = now()
        result = call(*given)
        stopped = now()
        times.append(stopped - started)
        results.append(result)
        if stopped > end and len(times) >= 3:
            break
    return times, results


@cache
def _overhead_ns() -> int:
    return int(median(_time(_Nothing().call, repeat((None,), 5000), 1.0)[0]))


def percentile(values: Iterable[float], part: float) -> float:
    """Returns the smallest value that at least `part` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(-int(-part * len(ordered) // 1) - 1, 0)]


def freeze() -> None:
    """Excludes all prepared objects from garbage collection."""
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Returns the anonymous resident memory of this process, after free memory was returned to the system.

    Raises:
        OSError: not Linux.
    """
    gc.collect()
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "malloc_trim"):  # glibc; other allocators return memory by themselves, or not at all
        allocator.malloc_trim(0)
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
