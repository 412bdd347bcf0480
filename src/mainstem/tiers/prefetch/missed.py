"""`Missed` and `Shortfall`: pages that storage has, or may have, and that requests could not use, and why."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, get_args

Cause = Literal["timeout", "slow", "breaker", "fault", "host_room", "limit", "meanwhile"]
Missing = Cause | Literal["component", "too_few", "unasked"]
LATE: tuple[Cause, ...] = get_args(Cause)
"""Why pages were computed although storage has them, or may have them.

    timeout     computing was expected to be as fast, or a call exceeded its deadline
    slow        the store was marked as slow
    breaker     no calls are made: the breaker is open, or the store is closed
    fault       storage had the page, but it or a page before it could not be read
    host_room   the host had no room
    limit       `max_prefetches` were under way
    meanwhile   they were computed while others were read
"""


class Missed(NamedTuple):
    """Pages of a prompt that storage has, or may have, and that a request could not use.

    Args:
        begin, end: pages of the prompt.
        cause: one of `LATE`; "component": storage lacks a component, which `detail` names; "too_few": storage
            has fewer pages than a read is worth; "unasked": fewer are missing than a lookup is worth.
        detail: the component, or the fault of storage.
    """

    begin: int
    end: int
    cause: Missing
    detail: str | None = None


class Shortfall:
    """What the requests of one prefetch could not use.

    Args:
        late: counts pages by cause, for all prefetches.

    Attributes:
        obstacle: why less is read than storage has; None: nothing is in the way.
    """

    def __init__(self, late: Counter[Cause]) -> None:
        self.obstacle: Literal["fault", "host_room"] | None = None
        self._late = late
        self._fault: str | None = None  # of the last page that did not arrive
        self._missed: list[Missed] = []

    def note(self, begin: int, end: int, cause: Missing, detail: str | None = None) -> None:
        """Notes that requests could not use [begin, end)."""
        if begin < end:
            self._missed.append(Missed(begin, end, cause, self._fault if cause == "fault" else detail))

    def count(self, begin: int, end: int, cause: Cause) -> None:
        """Notes it, and counts the pages as late."""
        self._late[cause] += end - begin
        self.note(begin, end, cause)

    def lost(self, fault: str | None) -> None:
        """Notes that a page did not arrive, because of this fault of storage."""
        self.obstacle, self._fault = "fault", fault

    def without_room(self) -> None:
        """Notes that the host has no room for all."""
        self.obstacle = self.obstacle or "host_room"

    def failed(self, begin: int, end: int, cause: Cause, fault: str | None) -> None:
        """Notes that storage did not say what it has of [begin, end)."""
        self._fault = fault
        self.note(begin, end, cause)

    def within(self, pages: int, otherwise: Missed | None) -> list[Missed]:
        """Returns what was missed of the first `pages`, each page with the first cause.

        Args:
            otherwise: counts where nothing was noted.
        """
        missed = self._missed or ([] if otherwise is None else [otherwise])
        cut = (each._replace(end=min(each.end, pages)) for each in missed)
        return [each for each in cut if each.begin < each.end]
