"""Counts what of each prompt was found, and on which tier; what that saved; and, if asked for, why the rest was not.

    before --> admitted --> met, or a load fails --> settle: the prompt is computed, or the request has ended

A prompt is settled once. Its hits and its misses by cause then add up to its length.
"""

from __future__ import annotations

import numpy as np

from mainstem.cache.explain import CAUSES, Stretches, Tier, count_missed
from mainstem.cache.keys import Encoded
from mainstem.cache.namespaces import encode_namespace
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.runtime.request import Request
from mainstem.runtime.schedule.explaining import Circumstances, TierHit, Unstored, known_to
from mainstem.runtime.schedule.meter import Flops, Totals
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.tiers.costs import PrefillCost
from mainstem.tiers.host.load import Load


class Hits:
    """Counts for one scheduler.

    Args:
        cache: where prompts are found.
        totals: counted up.
        prefill: estimates what computing takes.
        flops: of the model.
        explains: whether misses are explained.
    """

    def __init__(
        self, cache: PrefixCache, totals: Totals, prefill: PrefillCost, flops: Flops, *, explains: bool
    ) -> None:
        self._cache, self._totals, self._prefill, self._flops = cache, totals, prefill, flops
        self._explains, self._unstored = explains, Unstored(cache.page_size)
        if explains:
            totals.missed.update(dict.fromkeys(CAUSES, 0))

    def before(self, sequence: Sequence) -> None:
        """Asks the cache about a prompt that is about to be admitted for the first time."""
        if not self._explains or sequence.admitted_s is not None:
            return
        key, namespace = sequence.tokens.encoded(), sequence.request.namespace
        unstored = self._unstored.find(sequence.tokens.symbols, sequence.namespace)
        known = known_to(self._cache, key, namespace)
        sequence.explained = Circumstances(known, self._cache.page_size, unstored=unstored)

    def look(self, request: Request, prompt: Encoded, *, distances: bool) -> Stretches:
        """Explains a prompt as it would be found now; see `known_to`. Storage is not asked."""
        namespace = request.namespace
        known = known_to(self._cache, prompt, namespace, distances=distances)
        symbols, page = np.frombuffer(prompt.symbols, np.int32), self._cache.page_size
        most = request.params.reads_from
        hit = 0 if most == 0 else self._cache.peek(prompt, namespace)
        hit = hit if most is None else min(hit, most)
        device = next((each.begin for each in known if each.tier != "device"), len(request.tokens))
        short = self._cache.tiers is None or hit - device < self._cache.tiers.load_min_tokens()
        hit = min(hit, -(-device // page) * page) if short else hit
        found = [TierHit(each.begin, min(each.end, hit), each.tier) for each in known if each.tier and each.begin < hit]
        unstored = self._unstored.find(symbols, encode_namespace(namespace))
        return Circumstances(known, page, found, unstored=unstored, scored_from=most, too_short=short).explain()

    def admitted(self, sequence: Sequence, lease: Lease, load: Load | None, loaded: int, now_s: float) -> None:
        """Counts what an admitted request found: all of it the first time, then what it has met.

        Args:
            sequence: of the request.
            lease: its lease.
            load: what it waits for.
            loaded: tokens up to what is cached that the host had, whether they have arrived or not.
            now_s: the time.
        """
        if sequence.admitted_s is None:
            sequence.admitted_s = now_s
            sequence.cached_tokens = sequence.cached_end = sequence.computed - loaded
            self._totals.prompt_tokens += sequence.length
            self._totals.cached_tokens += sequence.cached_tokens
            self._note(sequence, 0, sequence.cached_tokens, "device")
            self._count_load(sequence, load, loaded)
            if sequence.scored_from is None:
                self._totals.stateless_tokens += max(0, lease.reach - sequence.computed)
            if sequence.explained is not None and self._cache.tiers is not None and not loaded:
                sequence.explained.too_short = lease.loadable < self._cache.tiers.load_min_tokens()
        elif sequence.prefetch.met:  # the beginning of a page may have been copied before
            begin = sequence.computed - loaded
            self._count_load(sequence, load, loaded - min(max(sequence.cached_end - begin, 0), loaded))

    def load_failed(self, sequence: Sequence) -> None:
        """Takes back what was counted of a load."""
        if sequence.counted is None:
            return  # it failed at an admission that did not count
        host, storage = sequence.counted
        sequence.counted = None
        self._add_cached(sequence, -host, -storage)
        if sequence.explained is not None:
            sequence.explained.fail()

    def settle(self, sequence: Sequence) -> None:
        """Counts what a prompt missed, and what its hits saved. A second call does nothing."""
        if sequence.settled or sequence.admitted_s is None:
            return
        sequence.settled = True
        cached = sequence.cached_tokens
        self._totals.saved_flops += self._flops.of(cached)
        self._totals.saved_s += (self._prefill.seconds(cached, 0) or 0.0) if cached else 0.0
        explained = sequence.explained
        if explained is None:
            return
        explained.missed, explained.scored_from = sequence.prefetch.missed, sequence.scored_from
        sequence.explanation = explained.explain()
        for cause, tokens in count_missed(sequence.explanation).items():
            self._totals.missed[cause] += tokens

    def ended(self, sequence: Sequence) -> None:
        """Settles a request that has ended, and notes what of it was not stored as it asked."""
        self.settle(sequence)
        if self._explains and sequence.kept < sequence.computed:
            self._unstored.add(sequence.tokens.symbols[: sequence.computed], sequence.namespace, sequence.kept)

    def _count_load(self, sequence: Sequence, load: Load | None, loaded: int) -> None:
        """Counts what is loaded as cached tokens, by tier: what storage brought is the end of it."""
        storage = min(sequence.prefetch.loaded - sequence.storage_tokens, loaded)
        sequence.counted = None if load is None else (loaded - storage, storage)
        self._add_cached(sequence, loaded - storage, storage)
        begin, end = sequence.computed - loaded, sequence.computed
        self._note(sequence, begin, end - storage, "host")
        self._note(sequence, end - storage, end, "storage")

    def _add_cached(self, sequence: Sequence, host: int, storage: int) -> None:
        sequence.cached_tokens += host + storage
        sequence.host_tokens += host
        sequence.storage_tokens += storage
        self._totals.cached_tokens += host + storage
        self._totals.host_tokens += host
        self._totals.storage_tokens += storage

    def _note(self, sequence: Sequence, begin: int, end: int, tier: Tier) -> None:
        if sequence.explained is not None and begin < end:
            sequence.explained.found.append(TierHit(begin, end, tier))
