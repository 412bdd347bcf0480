"""The requests that wait, and the order in which they are admitted.

Higher priority first. Within a priority: preempted requests; then requests that have waited longer than `age_limit_s`,
oldest first; then the rest, longest cached prefix first, then oldest. Each step looks up and ranks only the first 128
requests, by priority and arrival.

The queue defers a request while a running prefill of its namespace will soon publish a longer page-aligned prefix of it
than the cache has, unless the request is past the age limit: so shared prefixes are computed once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from mainstem.cache.components import State
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.runtime.schedule.checkpoints import Reason, last_boundary, plan_checkpoints
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.runtime.text.cuts import common_tokens
from mainstem.settings.engine import Limits

# Bounds the time of a step, however many requests wait.
_RANKED = 128


class WaitingQueue:
    """The requests that hold no pages.

    Args:
        cache: which prefixes are there.
        limits: of the scheduler.

    Attributes:
        sequences: by id, in order of arrival.
        now_s: the time of this step.
        plans_states: prompts have checkpoints, where the states of recurrent layers are kept.
    """

    def __init__(self, cache: PrefixCache, limits: Limits, now_s: float) -> None:
        self._cache, self._limits, self.now_s = cache, limits, now_s
        self.sequences: dict[str, Sequence] = {}
        self.plans_states = any(isinstance(component, State) for component in cache.tree.components)

    def rank(self) -> list[tuple[Sequence, int]]:
        """Returns the requests in admission order, each with the length of its hit."""
        oldest = heapq.nsmallest(_RANKED, self.sequences.values(), key=Sequence.precedence)

        def hit(sequence: Sequence) -> int:
            if sequence.most_cached == 0:
                return 0
            hit = self._cache.peek(sequence.tokens.encoded(), sequence.request.namespace)
            return hit if sequence.most_cached is None else min(hit, sequence.most_cached)

        def rank(entry: tuple[Sequence, int]) -> tuple[object, ...]:
            sequence, hit = entry
            fresh = not (sequence.was_preempted or self._is_aged(sequence))
            priority, first, arrival = sequence.precedence()
            return priority, first, fresh, -hit if fresh else 0, arrival

        return sorted(((sequence, hit(sequence)) for sequence in oldest), key=rank)

    def is_deferred(self, sequence: Sequence, hit: int, running: Iterable[Sequence]) -> bool:
        """Whether a running prefill will soon publish more of this prompt than the cache has, or has loaded it."""
        if not self._cache.enabled or self._is_aged(sequence):
            return False
        for other in running:
            if other.publishing and other.namespace == sequence.namespace and self._will_share(other, sequence, hit):
                return True
        return False

    def request_checkpoint(self, running: Sequence, sequence: Sequence) -> None:
        """Makes a running prefill keep its state where a waiting request parts from it."""
        wanted = self.plans_states and self._cache.enabled and sequence.id in self.sequences and running.publishing
        if wanted and running.namespace == sequence.namespace:
            running.add_checkpoint(self._shared(running, sequence), self._limits.states_per_path)

    def plan_checkpoints(self, sequence: Sequence, lease: Lease) -> dict[int, Reason]:
        """Plans after which positions of its prompt a request that is admitted keeps its state, and why."""
        if not self.plans_states or not self._cache.enabled or sequence.request.hints.no_store or sequence.mixed:
            return {}
        return plan_checkpoints(
            lease.hit,
            lease.reach,
            sequence.length,
            self._cache.page_size,
            marks=sequence.request.marks,
            interval=self._limits.checkpoint_tokens,
            limit=self._limits.states_per_path,
            atomic=sequence.atomic,
        )

    def _is_aged(self, sequence: Sequence) -> bool:
        return self.now_s - sequence.arrived_s > self._limits.age_limit_s

    def _will_share(self, other: Sequence, sequence: Sequence, hit: int) -> bool:
        """Whether a running prefill will publish, or has loaded, more of a prompt than `hit`."""
        shared, page = self._shared(other, sequence), self._cache.page_size
        if sequence.most_cached is not None:
            shared = min(shared, sequence.most_cached // page * page)
        if self.plans_states:
            shared = other.last_planned(shared)
        return shared > hit or shared > other.loading_from

    def _shared(self, one: Sequence, other: Sequence) -> int:
        """Returns the last page boundary up to which two prompts agree and at which `other` could start."""
        # One token is always left to compute, so a hit never includes the last one.
        page = self._cache.page_size
        ours, theirs = one.tokens.symbols, other.tokens.symbols
        if not np.array_equal(ours[:page], theirs[:page]):  # as is the case for most pairs
            return 0
        same = min(common_tokens(ours, theirs), other.length - 1)
        return last_boundary(same, page, other.atomic)
