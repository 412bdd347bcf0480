"""What tests are on: their device, and deadlines that scale with how slow or busy this machine is.

Most tests have their own clock. Tests of real servers, processes and threads wait for events and give up after
`patience(seconds)`: that many seconds on the machine on which the tests were written, and longer in proportion if this
machine is slower or busier.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import cache

DEVICE = os.environ.get("MAINSTEM_GPU_DEVICE", "cpu")
"""Of tests that can run on several: the CPU, or a GPU with `make test-gpu`."""
REFERENCE_S = 0.014
"""What `_work` takes on an idle core of the machine on which the deadlines were written."""
MAX_SLOWNESS = 40.0
"""With a higher factor, a test that waits for an event that never comes would take hours to fail."""


def patience(seconds: float) -> float:
    """Returns a deadline of `seconds`, or longer while this machine is slower than the reference machine."""
    wall_s, cpu_s = _measured()
    return seconds * slowness(wall_s, cpu_s, os.getloadavg()[0], os.cpu_count() or 1)


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Waits until a condition is true; fails if it is not within `patience(within_s)`."""
    end_s = time.monotonic() + patience(within_s)
    while not condition():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.005)


def slowness(wall_s: float, cpu_s: float, load: float, cores: int) -> float:
    """Returns how many times longer work takes than on the reference machine, at least 1.

    Args:
        wall_s: wall-clock time of `_work` when the tests began; shows whether CPU time is limited.
        cpu_s: the same in CPU time.
        load: the number of processes that want to run now; it changes while the tests run.
        cores: the number of cores that they share.
    """
    busy = max(1.0, load / cores)
    return min(MAX_SLOWNESS, max(1.0, wall_s / REFERENCE_S, busy * cpu_s / REFERENCE_S))


@cache
def _measured() -> tuple[float, float]:
    """Returns the seconds that `_work` takes: wall-clock time, which includes waiting for a core, and CPU time."""
    runs = [_timed() for _ in range(12)]
    return statistics.mean(wall for wall, _ in runs), min(cpu for _, cpu in runs)


def _timed() -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    _work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def _work() -> int:
    return sum(number * number % 7 for number in range(200_000))
