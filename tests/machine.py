"""How slow this machine is, and what that makes of a deadline.

Most tests are driven by a clock of their own. Those of real servers, processes and threads wait for what must happen,
and give up on it after `patience(seconds)`: so many seconds on the machine on which they were written, and as many more
as this one is slower or has more to do.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import cache

REFERENCE_S = 0.014
"""What `_work` takes on an idle core of the machine on which the deadlines were written."""
MOST = 40.0
"""Beyond it a test that waits for what never comes would take hours to fail."""


def patience(seconds: float) -> float:
    """So many seconds, or more where and while this machine is slower than the one on which they were chosen."""
    wall_s, cpu_s = _measured()
    return seconds * slowness(wall_s, cpu_s, os.getloadavg()[0], os.cpu_count() or 1)


def slowness(wall_s: float, cpu_s: float, load: float, cores: int) -> float:
    """How many times longer than on the reference machine things take, at least 1.

    Args:
        wall_s: what `_work` took when the tests began, by the clock; where processor time is rationed that says it.
        cpu_s: the same in processor time.
        load: how many processes want to run now; it grows and falls while the tests run.
        cores: that they share.
    """
    busy = max(1.0, load / cores)
    return min(MOST, max(1.0, wall_s / REFERENCE_S, busy * cpu_s / REFERENCE_S))


@cache
def _measured() -> tuple[float, float]:
    """Seconds that `_work` takes: by the clock, with the moments in which others ran; and of processor time."""
    runs = [_timed() for _ in range(12)]
    return statistics.mean(wall for wall, _ in runs), min(cpu for _, cpu in runs)


def _timed() -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.thread_time()
    _work()
    return time.perf_counter() - wall, time.thread_time() - cpu


def _work() -> int:
    return sum(number * number % 7 for number in range(200_000))
