"""Clocks and scales for one process: the time of single calls, and the memory that it holds. Knows no system.

|  now  |          call            |  now  |
|<-->|<------- what is wanted ------->|<-->|    the rest is measured once, with a call that does nothing, and
                                                taken off
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
    """Stands in for a system."""

    def call(self, _: Any = None) -> int:
        """Does nothing, as a method of one argument."""
        return 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Calls that were timed: microseconds of each, and what each returned."""

    us: list[float]
    results: list[Any]


def sample(call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], budget_s: float = 1e9) -> Sample:
    """Times each call, one for each tuple of arguments, less what the clock and an empty call take.

    Args:
        arguments: made one at a time, outside the clock.
        budget_s: no call is begun any more when so many seconds are spent; the first three always are.
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
    """The smallest value that at least `part` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(-int(-part * len(ordered) // 1) - 1, 0)]


def freeze() -> None:
    """The collector need not look at what was prepared again and again."""
    gc.collect()
    gc.freeze()


def resident_bytes() -> int:
    """Memory of this process that is in use and no file's, after what is free was given back to the system.

    Raises:
        OSError: not Linux.
    """
    gc.collect()
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "malloc_trim"):  # glibc; others give back by themselves, or do not
        allocator.malloc_trim(0)
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
