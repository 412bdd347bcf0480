"""The calls of a store: each runs on a worker, has a deadline, and fails as a miss that is counted by its cause."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mainstem.errors import StorageError
from mainstem.settings.engine import StorageConfig
from mainstem.storage.breaker import Breaker
from mainstem.tiers.storage.workers import Call, Workers

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Answer(Generic[T]):
    """The result of a worker: a value, and the faults on the way by cause."""

    value: T
    causes: Counter[str]
    took_s: float
    ended_s: float
    failed: bool = False  # the call as a whole


class StoreCall(Generic[T]):
    """A call to a store. Once it is done its value is valid; a failed call has the value of a miss."""

    def __init__(
        self, calls: Calls, call: Call[_Answer[T]] | None, nothing: T, deadline_s: Callable[[], float]
    ) -> None:
        self._calls, self._call, self._deadline_s = calls, call, deadline_s
        self._overdue = False
        self._reported = call is None
        self.value = nothing
        self.failed = call is None  # as a whole; valid once it is done
        self.fault = "breaker" if call is None else None  # what went wrong, if anything did
        self.took_s = self.ended_s = math.inf  # once it has returned

    def done(self) -> bool:
        """Whether it has ended and released its slots."""
        if self._call is None:
            return True
        if self._call.done():
            self._report(self._call)
            return True
        self.overdue()
        return False

    @property
    def refused(self) -> bool:
        """Whether it was never made, because the breaker was open or the store closed."""
        return self._call is None

    def overdue(self) -> bool:
        """Whether it has exceeded its deadline. It counts as failed, but may still return."""
        if not self._overdue and self._call is not None and not self._call.done():
            if self._calls.clock() < self._deadline_s():
                return False
            self._overdue, self.fault = True, "timeout"
            self._calls.timed_out()
        return self._overdue

    def over(self, *, patient: bool = True) -> bool:
        """Whether nobody waits for it any more: it has ended or is late, or the store is slow and nobody is patient."""
        return self.done() or self._overdue or (not patient and self._calls.slow)

    def _report(self, call: Call[_Answer[T]]) -> None:
        if self._reported:
            return
        self._reported = True
        answer = call.result()
        self.value, self.failed = answer.value, answer.failed
        self.fault = self.fault or next(iter(answer.causes), None)
        self.took_s, self.ended_s = answer.took_s, answer.ended_s
        self._calls.returned(answer, late=self._overdue)


class Calls:
    """Which calls are under way, late or failed, and whether the store is to be called at all. One thread at a time.

    Attributes:
        closed: whether every later call is a miss.
    """

    def __init__(self, config: StorageConfig, clock: Callable[[], float]) -> None:
        self._timeout_s, self.clock = config.call_timeout_s, clock
        self._breaker = Breaker(config.breaker_failures, config.breaker_cooldown_s, clock)
        self._faults: Counter[str] = Counter()
        self.closed = self._slow = False
        self._vain_s = 0.0
        self._under_way: list[StoreCall[Any]] = []

    @property
    def breaker(self) -> Breaker:
        """Stops calls after repeated failures."""
        self.settle()
        return self._breaker

    @property
    def slow(self) -> bool:
        """Whether a request has waited in vain, and no call has been quicker since then."""
        self.settle()
        return self._slow

    @property
    def faults(self) -> Counter[str]:
        """How many faults there were so far, by cause."""
        self.settle()
        return self._faults

    def stats(self) -> dict[str, Any]:
        """Returns its counts up to the last `settle`, by the names of `TierStats`. Callable from any thread."""
        breaker = self._breaker
        return {"faults": dict(self._faults), "breaker_open": breaker.open, "breaker_openings": breaker.openings}

    def submit(
        self, workers: Workers, work: Callable[[Counter[str]], T], nothing: T, *, queued: bool = False
    ) -> StoreCall[T]:
        """Has a worker do it. The value of the call is that of a miss, `nothing`, until it has succeeded.

        Args:
            queued: its time runs only once a worker begins it, because others may be queued before it.
        """
        self.settle()
        if self.closed or not self._breaker.allow():
            self.count("closed" if self.closed else "breaker")
            return StoreCall(self, None, nothing, lambda: 0.0)

        submitted_s = self.clock()
        begun_s: list[float] = []  # at most one

        def run() -> _Answer[T]:
            causes: Counter[str] = Counter()
            began_s = self.clock()
            begun_s.append(began_s)
            value, failed = nothing, True
            with caught(causes):
                value, failed = work(causes), False
            ended_s = self.clock()
            return _Answer(value, causes, ended_s - began_s, ended_s, failed)

        def deadline_s() -> float:
            start_s = (begun_s[0] if begun_s else math.inf) if queued else submitted_s
            return start_s + self._timeout_s

        call = StoreCall(self, workers.submit(run), nothing, deadline_s)
        self._under_way.append(call)
        return call

    def settle(self) -> None:
        """Notes which calls have ended or are late, also those that nobody asks for any more."""
        self._under_way = [call for call in self._under_way if not call.done()]

    def gave_up(self, waited_s: float) -> None:
        """Marks the store as slow after a wait in vain, until a call takes less time than that wait."""
        self._vain_s = min(waited_s, self._vain_s) if self._slow else waited_s
        self._slow = True

    def was_quick(self) -> None:
        """Removes that mark."""
        self._slow = False

    def took(self, seconds: float) -> None:
        """Notes how long a call took to return."""
        self._slow = self._slow and seconds > self._vain_s

    def timed_out(self) -> None:
        """Notes a call that has exceeded its deadline."""
        self.gave_up(self._timeout_s)
        self.count("timeout")
        self._breaker.fail()

    def returned(self, answer: _Answer[Any], *, late: bool) -> None:
        """Notes a call that has returned. If it is late, it counted as failed already."""
        for cause, count in answer.causes.items():
            self.count(cause, count)
        self.took(answer.took_s)
        if late:
            return
        if answer.failed:
            self._breaker.fail()
        else:
            self._breaker.succeed()

    def count(self, cause: str, times: int = 1) -> None:
        """Counts a fault, and logs the first of each cause."""
        if cause not in self._faults and cause not in ("absent", "breaker"):
            log.warning("storage: %s; further faults of this kind are only counted", cause)
        self._faults[cause] += times


@contextmanager
def caught(causes: Counter[str]) -> Iterator[None]:
    """Counts by its cause what goes wrong meanwhile."""
    try:
        yield
    except StorageError as error:
        causes[error.cause] += 1
        log.debug("storage: %s", error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # third-party code: a client in Rust panics with a `BaseException`
        causes["crashed"] += 1
        log.debug("storage: the back end raised", exc_info=True)
