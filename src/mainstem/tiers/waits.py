"""How long a request does better to wait for storage than to compute, as one rank sees it.

    begun ----- what does storage have? ----- so many pages ----- they come ----- all there
          for as long as all of it would take              for as long as those would take
          to compute                                       to compute

Where nobody knows what computing takes, limits of the configuration stand in. A store that keeps somebody waiting in
vain is marked as slow: others do not wait for it until it has been quicker than that.
"""

from __future__ import annotations

from typing import Literal, get_args

from mainstem.tiers.prefill import PrefillCost
from mainstem.tiers.store import Store

Cause = Literal["timeout", "slow", "breaker", "fault", "host_room", "limit"]
LATE: tuple[Cause, ...] = get_args(Cause)
"""Why pages were computed that storage has, or might have.

    timeout     computing would have been as quick, or a call took longer than it may
    slow        the store had been marked as slow
    breaker     the store is left alone: the breaker is open, or it is closed
    fault       it was found, and then a page before it, or itself, could not be read
    host_room   the host had no room
    limit       `max_prefetches` were under way
"""


class Wait:
    """The wait for one prefetch.

    Args:
        store: that is asked.
        prefill: what computing takes.
        page_size: positions a page.
        have, pages: storage is asked for pages [have, pages) of the prompt.
    """

    def __init__(self, store: Store, prefill: PrefillCost, page_size: int, have: int, pages: int) -> None:
        self._store, self._prefill, self._page_size = store, prefill, page_size
        self._have, self._pages = have, pages - have
        self._began_s = store.clock()
        self._answered_s: float | None = None

    def answered(self, pages: int, took_s: float) -> None:
        """Storage has said that it has so many, in a call that took so long."""
        if took_s <= self._most_s():
            self._store.slow = False  # it would have been worth the wait
        self._pages, self._answered_s = pages, self._store.clock()

    @property
    def over(self) -> bool:
        """Whether nobody should wait any longer."""
        return self._store.breaker.open or self._store.slow or self.waited_s >= self._most_s()

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return self._store.clock() - self._began_s

    def _most_s(self) -> float:
        config, found = self._store.config, self._pages if self._answered_s is not None else 0
        if config.prefetch == "wait_complete":
            return config.call_timeout_s * (1 + found)
        cost_s = self._prefill.seconds(self._pages * self._page_size, self._have * self._page_size)
        if cost_s is None:
            return config.timeout_s + config.timeout_per_page_s * found
        return cost_s + (0.0 if self._answered_s is None else self._answered_s - self._began_s)
