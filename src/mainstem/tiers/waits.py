"""How long a request waits for storage rather than compute, as one rank sees it.

    begin ----- lookup: what does storage have? ------ n pages found ----- reads ----- all read
          up to the time that computing                    up to the time that computing
          everything would take                            these pages would take

Before there is an estimate of that time, limits of the configuration apply. A store that a request has waited for in
vain is marked as slow: no request waits for it until a call takes less time than that wait.
"""

from __future__ import annotations

from typing import Literal, get_args

from mainstem.tiers.prefill import PrefillCost
from mainstem.tiers.store import Store

Cause = Literal["timeout", "slow", "breaker", "fault", "host_room", "limit"]
LATE: tuple[Cause, ...] = get_args(Cause)
"""Why pages were computed although storage has them, or may have them.

    timeout     computing was expected to be as fast, or a call exceeded its deadline
    slow        the store was marked as slow
    breaker     no calls are made: the breaker is open, or the store is closed
    fault       storage had the page, but it or a page before it could not be read
    host_room   the host had no room
    limit       `max_prefetches` were under way
"""


class Wait:
    """The wait for one prefetch.

    Args:
        store: the store.
        prefill: the estimate of what computing takes.
        page_size: positions per page.
        have, pages: storage is asked for pages [have, pages) of the prompt.
    """

    def __init__(self, store: Store, prefill: PrefillCost, page_size: int, have: int, pages: int) -> None:
        self._store, self._prefill, self._page_size = store, prefill, page_size
        self._have, self._pages = have, pages - have
        self._began_s = store.clock()
        self._answered_s: float | None = None

    def answered(self, pages: int, took_s: float) -> None:
        """Notes that storage has `pages` of them, after a lookup that took `took_s`."""
        if took_s <= self._limit_s():
            self._store.was_quick()  # it would have been worth the wait
        self._pages, self._answered_s = pages, self._store.clock()

    @property
    def over(self) -> bool:
        """Whether to stop waiting."""
        return self._store.breaker.open or self._store.slow or self.waited_s >= self._limit_s()

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return self._store.clock() - self._began_s

    def _limit_s(self) -> float:
        config, found = self._store.config, self._pages if self._answered_s is not None else 0
        if config.prefetch == "wait_complete":
            return config.call_timeout_s * (1 + found)
        cost_s = self._prefill.seconds(self._pages * self._page_size, self._have * self._page_size)
        if cost_s is None:
            return config.prefetch_timeout_s + config.prefetch_timeout_per_page_s * found
        return cost_s + (0.0 if self._answered_s is None else self._answered_s - self._began_s)
