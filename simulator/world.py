"""`World`: time, chance and everything that was counted. All that happens in a run follows from its seed."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from random import Random


class WrongError(AssertionError):
    """Something was served, kept or lost that must not be."""


def require(holds: bool, what: str, *facts: object) -> None:
    """What the simulator checks.

    Raises:
        WrongError: it does not hold.
    """
    if not holds:
        raise WrongError(f"{what}: {', '.join(map(str, facts))}" if facts else what)


class World:
    """Virtual time, seeded chance, and the faults of one run.

    Args:
        seed: and the profile name the run; the same ones make the same run.
        profile: what is done in it.
    """

    def __init__(self, seed: int, profile: str) -> None:
        self.random = Random(f"{profile}/{seed}")
        self.now_s = 0.0
        self.operations = self.reads = 0
        self.faults: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()  # what the cache did, in its own counts
        self.calm = False  # no faults any more
        self.rate = self.random.choice((0.0, 0.1, 0.2, 0.3, 0.4, 0.5))  # of calls that go wrong
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._digest = blake2b(digest_size=16)

    def clock(self) -> float:
        """Seconds since the run began."""
        return self.now_s

    def did(self, what: str, *facts: object) -> None:
        """Counts an operation and what came of it."""
        self.operations += 1
        self._digest.update(f"{self.now_s} {what} {facts}\n".encode())

    def digest(self) -> str:
        """Of everything that happened."""
        return self._digest.hexdigest()

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Has something happen later. Events complete transfers and calls; they never call the cache."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), event))

    def pass_time(self, seconds: float) -> None:
        """Lets everything happen that is due by then."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self._next()
        self.now_s = end_s

    def wait_for(self, done: Callable[[], bool]) -> None:
        """What a call that blocks does: time passes until it may go on."""
        while not done():
            require(bool(self._events), "a wait that nothing will end")
            self._next()

    def _next(self) -> None:
        self.now_s, _, event = heapq.heappop(self._events)
        event()

    # ---------------------------------------------------------------- chance

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.random.random() < probability

    def delay_s(self, mean_s: float) -> float:
        """A time that something takes: short mostly, sometimes very long."""
        return self.random.expovariate(1 / mean_s) * (20.0 if not self.calm and self.chance(0.03) else 1.0)

    def fault(self, *kinds: str) -> str | None:
        """What goes wrong this time, if anything."""
        if self.calm or self.random.random() >= self.rate:
            return None
        kind = self.random.choice(kinds)
        self.faults[kind] += 1
        return kind
