"""How long a request waits for storage rather than compute, and how much it computes meanwhile, as one rank sees it.

    begin ----- lookup: what does storage have? ------ n pages found ----- reads ----- all read
          up to the time that computing                    up to the time that computing
          everything would take                            these pages would take

A request that can go on computing while storage reads for it hardly waits: it computes what it can until the next pages
are due, and looks again. It waits only where computing would gain next to nothing. What is overdue is expected to take
as much longer as it is late.

Before there is an estimate of what computing takes, limits of the configuration apply. A store that a request has
waited for in vain is marked as slow: no request waits for it until a call takes less time than that wait.
"""

from __future__ import annotations

import math

from mainstem.tiers.costs import Costs
from mainstem.tiers.storage.store import Store

ANY = 1 << 30
"""As many positions as there are."""

_NOTHING_GAINED = 0.05  # of the time that computing everything takes; waiting for so long costs as little
_WORTH_A_FORWARD = 32  # positions; fewer take a forward nearly as long


class Wait:
    """The wait for one prefetch.

    Args:
        page_bytes: bytes of a stored page.
        have, pages: storage is asked for pages [have, pages) of the prompt.
    """

    def __init__(self, store: Store, costs: Costs, page_size: int, page_bytes: int, have: int, pages: int) -> None:
        self._store, self._costs, self._page_size, self._page_bytes = store, costs, page_size, page_bytes
        self._have, self._end, self._pages = have, pages, pages - have
        self._began_s = self._since_s = store.clock()
        self._answered_s: float | None = None
        self._reads_since_s = 0.0
        self._read_bytes = 0

    def answered(self, pages: int, took_s: float) -> None:
        """Notes that storage has `pages` of them, after a lookup that took `took_s`."""
        if took_s <= self._limit_s():
            self._store.calls.was_quick()  # it would have been worth the wait
        self._costs.look_up.observe(1, took_s)
        self._pages, self._end = pages, self._have + pages
        self._answered_s = self._since_s = self._store.clock()

    def asked(self, first: bool) -> None:
        """Notes that a read has begun, the first one if no other is under way."""
        if first:
            self._reads_since_s, self._read_bytes = self._store.clock(), 0
            self._since_s = self._reads_since_s

    def arrived(self, pages: int, ended_s: float) -> None:
        """Notes that a read of so many pages ended at `ended_s`."""
        self._read_bytes += pages * self._page_bytes
        self._costs.read.observe(self._read_bytes, ended_s - self._reads_since_s)
        self._since_s = max(self._since_s, ended_s)

    @property
    def over(self) -> bool:
        return self._store.breaker.open or self._store.slow or self.waited_s >= self._limit_s()

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return self._store.clock() - self._began_s

    def gains(self, pages: int) -> bool:
        """Whether a request that computes while so many pages are read goes on sooner than one that waits for them."""
        whole_s = self._costs.prefill.seconds(pages * self._page_size, self._have * self._page_size)
        read_s = self._read_s(pages)
        return whole_s is not None and (read_s is None or read_s > _NOTHING_GAINED * whole_s)

    def positions(self, front: int, under_way: int, left: int) -> int:
        """Returns how many positions to compute before looking again; 0: wait; `ANY`: do not wait.

        Args:
            front: pages of the prompt that are computed, or need not be.
            under_way: pages that are being read.
            left: pages that will be read after those.
        """
        computed = front * self._page_size
        whole_s = self._costs.prefill.seconds(self._pages * self._page_size, self._have * self._page_size)
        if self.over:
            return ANY
        if whole_s is None:
            return 0
        soon_s, all_s = self._expected_s(under_way, left)
        if self.waited_s + all_s <= _NOTHING_GAINED * whole_s:
            return 0
        rest = self._end * self._page_size - computed
        if rest <= 0:
            return ANY
        positions = self._costs.computed_within(soon_s, computed, rest)
        return positions if positions >= min(rest, _WORTH_A_FORWARD) else 0

    def _expected_s(self, under_way: int, left: int) -> tuple[float, float]:
        """Returns when what is under way is expected to have ended, and when everything will have arrived."""
        since_s = self._store.clock() - self._since_s
        if self._answered_s is None:
            expected_s, later_s = self._costs.look_up.seconds(1), self._read_s(self._pages)
        else:
            expected_s = self._read_s(under_way)
            later_s = self._read_s(left, more=True)
        if expected_s is None or later_s is None:
            return since_s if expected_s is None else abs(expected_s - since_s), math.inf
        return abs(expected_s - since_s), abs(expected_s - since_s) + later_s

    def _read_s(self, pages: int, more: bool = False) -> float | None:
        """Returns what it takes to read so many pages; `more`: after others."""
        seconds, latency_s = self._costs.read.seconds(pages * self._page_bytes), self._costs.read.seconds(0)
        if seconds is None or latency_s is None:
            return None
        return seconds - latency_s if more or self._read_bytes else seconds

    def _limit_s(self) -> float:
        config, pages = self._store.config, self._pages if self._answered_s is not None else 0
        if config.prefetch == "wait_complete":
            return config.call_timeout_s * (1 + pages)
        cost_s = self._costs.prefill.seconds(self._pages * self._page_size, self._have * self._page_size)
        if cost_s is None:
            return config.prefetch_timeout_s + config.prefetch_timeout_per_page_s * pages
        return cost_s + (0.0 if self._answered_s is None else self._answered_s - self._began_s)
