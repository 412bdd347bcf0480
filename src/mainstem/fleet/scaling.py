"""The number of replicas that a fleet needs, by its queue, and by misses for lack of memory.

    queue       as many as keep the requests under way at each below `target_ongoing`
    hit rate    one more while fewer than `min_hit_rate` of the prompts' tokens are found and pages are evicted;
                none fewer while pages are evicted, since their memory would be missed

Pure functions of counts. Ray Serve calls them, and bounds and delays the changes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from mainstem.settings.fleet import Autoscaling


@dataclass(frozen=True, slots=True)
class Seen:
    """Counts of a replica over the last seconds.

    Args:
        prompt: tokens of the prompts that were admitted.
        cached: those of them that were found.
        evicted: pages that the device evicted.
    """

    prompt: float = 0.0
    cached: float = 0.0
    evicted: float = 0.0

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Self:
        """Makes it of numbers by name; those that are missing are 0."""
        return cls(**{each.name: float(numbers.get(each.name, 0.0)) for each in fields(cls)})


class Window:
    """Counts over the last seconds, from counts since the start.

    Args:
        length_s: of the window.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._known: deque[tuple[float, Seen]] = deque()

    def add(self, now_s: float, total: Seen) -> Seen:
        """Takes the counts since the start, and returns those of the window. The first call returns zeros."""
        self._known.append((now_s, total))
        while len(self._known) > 1 and self._known[1][0] <= now_s - self._length_s:
            self._known.popleft()
        first = self._known[0][1]
        return Seen(total.prompt - first.prompt, total.cached - first.cached, total.evicted - first.evicted)


def wanted(current: int, ongoing: float, scaling: Autoscaling, seen: Sequence[Seen]) -> int:
    """Returns how many replicas there should be.

    Args:
        current: how many there are.
        ongoing: requests under way and waiting, of all.
        scaling: the settings; `min_hit_rate` None: hits do not count.
        seen: by each replica, lately.
    """
    busy = math.ceil(ongoing / scaling.target_ongoing)
    if scaling.min_hit_rate is not None and any(each.evicted > 0 for each in seen):
        prompt, cached = sum(each.prompt for each in seen), sum(each.cached for each in seen)
        misses = prompt > 0 and cached < scaling.min_hit_rate * prompt
        busy = max(busy, current + 1 if misses else current)
    return max(scaling.min, min(scaling.max, busy))
