"""Advice: clients' knowledge of the future of prefixes, applied to a cache between the steps of an engine.

Knows the cache and its tiers, not the scheduler. `poll` moves its prefetches on, to the device. Advice is bounded, and
gives way to requests.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.expected import check_next_use
from mainstem.cache.namespaces import NamespaceLike
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.retention import LEAST_S, Kept
from mainstem.errors import BadArgument
from mainstem.runtime.hints.promotion import Promotion

Action = Literal["retain", "pin", "unpin", "demote", "end", "prefetch", "expect"]

_MOST_PREFETCHES = 16  # under way


class Advice:
    """Applies advice to a cache. One thread, that of the engine.

    Args:
        max_retain_s: the longest time that a prefix may be retained for.
    """

    def __init__(self, cache: PrefixCache, max_retain_s: float) -> None:
        self._cache, self._max_retain_s = cache, max_retain_s
        self._prefetches: list[Promotion] = []

    def apply(
        self,
        action: Action,
        tokens: NDArray[np.int32],
        namespace: NamespaceLike,
        now_s: float,
        ttl_s: float | None = None,
        next_use_s: float | None = None,
        next_use_steps: float | None = None,
    ) -> Kept:
        """Applies one piece of advice on a prefix, whose times `check` has allowed.

        retain: for `ttl_s` seconds. pin, unpin: without an end. demote: the device evicts it first. end: of a session:
        its retentions and pins end, and every tier evicts first what no other session has of it. prefetch: to the
        device. expect: it is used next in `next_use_s` seconds, or in `next_use_steps` steps; the device evicts first
        what is used last.

        Args:
            tokens: int32 [n], the prefix.
            now_s: the time, by the clock of the engine's steps.
            ttl_s: for "retain" only.
            next_use_s, next_use_steps: one of them, for "expect" only.

        Returns:
            The positions that it concerns (for a prefetch: that are on the device, or on their way), and those that
            are cached; for a prefetch, 0 and more than 0 means that too much else is under way.

        Raises:
            BadTokens: a token is out of range.
        """
        cache = self._cache
        if action == "retain" and ttl_s is not None:
            return cache.retention.retain(tokens, now_s + ttl_s, namespace)
        if action == "pin":
            return cache.retention.pin(tokens, namespace)
        if action == "prefetch":
            return self._prefetch(tokens, namespace)
        wait_s = cache.expected.wait(next_use_s, next_use_steps)
        if wait_s is not None:
            done = cache.expected.expect(tokens, now_s + wait_s, namespace)
        elif action == "unpin":
            done = cache.retention.unpin(tokens, namespace)
        else:
            done = cache.demote(tokens, namespace, over=action == "end")
        return Kept(done, done)

    def check(
        self,
        action: Action,
        ttl_s: float | None = None,
        next_use_s: float | None = None,
        next_use_steps: float | None = None,
    ) -> None:
        """Checks the times that an action needs.

        Raises:
            BadArgument: one of them is out of range, missing, or not for this action.
        """
        if action != "retain":
            if ttl_s is not None:
                raise BadArgument("ttl_s", ttl_s, f"left out for {action}")
        elif ttl_s is None or not LEAST_S <= ttl_s <= self._max_retain_s:
            raise BadArgument("ttl_s", ttl_s, f"seconds from {LEAST_S} to {self._max_retain_s:g} (max_retain_s)")
        check_next_use(next_use_s, next_use_steps, self._max_retain_s)
        if (action == "expect") != (next_use_s is not None or next_use_steps is not None):
            allowed = "seconds, or next_use_steps" if action == "expect" else f"left out for {action}"
            raise BadArgument("next_use_s", next_use_s, allowed)

    @property
    def busy(self) -> bool:
        """Whether prefetches are under way."""
        return bool(self._prefetches)

    def poll(self) -> None:
        """Moves prefetches on. Call it once a step, after the tiers were polled."""
        self._prefetches = [each for each in self._prefetches if each.go_on()]

    def close(self) -> None:
        for each in self._prefetches:
            each.close()
        self._prefetches.clear()

    def _prefetch(self, tokens: NDArray[np.int32], namespace: NamespaceLike) -> Kept:
        prompt = np.append(tokens, np.int32(0))  # of which the last token is not brought up
        there = self._cache.peek(prompt, namespace) // self._cache.page_size * self._cache.page_size
        if self._cache.tiers is None:
            return Kept(there, there)
        if len(self._prefetches) >= _MOST_PREFETCHES:
            return Kept(0, there)
        each = Promotion(self._cache, prompt, namespace)
        reading = len(tokens) // self._cache.page_size * self._cache.page_size if each.reading else 0
        if each.go_on():
            self._prefetches.append(each)
        return Kept(max(there, reading), there)
