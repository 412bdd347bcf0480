"""Adds drafts to the decodes of a step: what their grammars ask for, what the cache knows, what their texts repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import OutOfPages
from mainstem.runtime.parallel.ranks import Ranks
from mainstem.runtime.schedule.drafts import begin_with, look_up
from mainstem.runtime.schedule.sequence import Sequence


class Drafter:
    """Drafts for one scheduler.

    Args:
        most: tokens that are drafted in a step.
        ranks: only rank 0 knows what grammars ask for.
    """

    def __init__(self, cache: PrefixCache, most: int, ranks: Ranks) -> None:
        self._cache, self._most, self._ranks = cache, most, ranks

    def add(self, scheduled: Iterable[Sequence]) -> None:
        """Adds drafts to the decodes of a step, which share `most` tokens evenly, and preempt nobody."""
        decodes = [sequence for sequence in scheduled if sequence.draftable > 0]
        share = self._most // len(decodes) if decodes else 0
        if not share:
            return
        forced = self._forced(decodes)
        for sequence in decodes:
            most = min(share, sequence.draftable)
            first = forced.get(sequence.id, ())[:most]
            draft = begin_with(first, self._guess(sequence, sequence.pace.length(most, len(first))))
            if len(draft):
                with contextlib.suppress(OutOfPages):
                    sequence.speculate(draft)

    def _forced(self, decodes: list[Sequence]) -> dict[str, tuple[int, ...]]:
        """Returns the tokens that grammars ask for next, by request."""
        guided = [sequence for sequence in decodes if sequence.request.params.grammar is not None]
        return self._ranks.share(lambda: {each.id: each.sampler.forced for each in guided}) if guided else {}

    def _guess(self, sequence: Sequence, most: int) -> NDArray[np.int32]:
        """Returns up to `most` tokens that may come next: what the cache knows, else what the text itself repeats."""
        if most and self._cache.enabled:
            draft = self._cache.continuation(sequence.tokens.symbols, most, sequence.request.namespace)
            if len(draft):
                return draft
        return look_up(sequence.tokens.known, most)
