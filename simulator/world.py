"""`World`: time, random choices and counters. A run is a function of its seed."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from random import Random


class WrongError(AssertionError):
    """A check of the simulator failed."""


def require(holds: bool, what: str, *facts: object) -> None:
    """Checks a condition.

    Raises:
        WrongError: it does not hold.
    """
    if not holds:
        raise WrongError(f"{what}: {', '.join(map(str, facts))}" if facts else what)


class World:
    """Virtual time, seeded random choices, and the faults of one run.

    Args:
        seed: with the profile it identifies the run: the same pair gives the same run.
        profile: name of the workload.
    """

    def __init__(self, seed: int, profile: str) -> None:
        self.random = Random(f"{profile}/{seed}")
        self.now_s = 0.0
        self.operations = self.reads = 0
        self.faults: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()  # counters of the cache
        self.calm = False  # whether faults have stopped
        self.rate = self.random.choice((0.0, 0.1, 0.2, 0.3, 0.4, 0.5))  # fraction of calls that fail
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._digest = blake2b(digest_size=16)

    def clock(self) -> float:
        """Seconds since the run began."""
        return self.now_s

    def did(self, what: str, *facts: object) -> None:
        """Counts an operation and adds its result to the digest."""
        self.operations += 1
        self._digest.update(f"{self.now_s} {what} {facts}\n".encode())

    def digest(self) -> str:
        """Returns the digest of all events."""
        return self._digest.hexdigest()

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Schedules an event. Events complete transfers and calls; they never call the cache."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))

    def pass_time(self, seconds: float) -> None:
        """Advances the clock and runs the events that are due."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self._next()
        self.now_s = end_s

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Simulates a blocking call: advances time until `done` is true."""
        while not done():
            require(bool(self._events), "a wait that no event will end")
            self._next()

    def _next(self) -> None:
        self.now_s, _, event = heapq.heappop(self._events)
        event()

    # ---------------------------------------------------------------- random choices

    def chance(self, probability: float) -> bool:
        """Returns True with this probability."""
        return self.random.random() < probability

    def delay_s(self, mean_s: float) -> float:
        """Draws a duration: usually short, sometimes very long."""
        return self.random.expovariate(1 / mean_s) * (20.0 if not self.calm and self.chance(0.03) else 1.0)

    def fault(self, *kinds: str) -> str | None:
        """Draws the fault of this call, or None."""
        if self.calm or self.random.random() >= self.rate:
            return None
        kind = self.random.choice(kinds)
        self.faults[kind] += 1
        return kind
