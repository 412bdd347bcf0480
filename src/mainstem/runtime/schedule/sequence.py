"""Sequence: one request on its way through the scheduler.

It holds the request's tokens so far, its lease and load, and its progress. It makes what a forward computes next, and
publishes what it has computed. It knows no other sequence. The scheduler decides whose turn it is and who is preempted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.explain import Stretches
from mainstem.cache.keys import Encoded
from mainstem.cache.namespaces import encode_namespace
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.cache.retention import Kept, Retention
from mainstem.runtime.memory.scores import KeptScores
from mainstem.runtime.request import LOWEST_PRIORITY, Prefix, Request, TokenLogprob, Usage
from mainstem.runtime.sampling.pooling import Pooling
from mainstem.runtime.sampling.sampler import Sampler
from mainstem.runtime.schedule.checkpoints import AtomicSpan, Reason, chunk_end
from mainstem.runtime.schedule.drafts import Pace
from mainstem.runtime.schedule.explaining import Circumstances
from mainstem.runtime.schedule.prompt_prefetch import PromptPrefetch
from mainstem.runtime.schedule.timeline import Timeline
from mainstem.runtime.schedule.tokens import Tokens
from mainstem.runtime.segments import Segment
from mainstem.runtime.text.detokenizer import Detokenizer
from mainstem.tiers.host.load import Load

_LOWEST_CHUNK = 32


class Sequence:
    """One request on its way through the scheduler.

    ```
    tokens   [ prompt | generated ]        room for max_tokens
             0  computed       length      computed <= length - 1: the newest token's KV is never computed yet
    ```
    """

    def __init__(
        self,
        id: str,
        request: Request,
        cache: PrefixCache,
        prompt: Encoded,
        arrival: int,
        arrived_s: float,
        sampler: Sampler,
        text: Detokenizer,
        timeline: Timeline,
        version: int = 0,
        base: int = 0,
    ) -> None:
        self.id = id
        self.timeline = timeline
        self.request = request
        self.namespace = encode_namespace(request.namespace)
        self.version, self.base = version, base  # of the weights: that computes next, and whose KV it goes on from
        self._own: int | None = None if base == version else 0  # positions that `base` has computed; None: all
        self._generated: dict[int, int] = {}  # tokens by version
        self.arrived_s = arrived_s
        self.sampler = sampler
        self.text = text
        self.tokens = Tokens(request, prompt, cache.tree.keys)
        self.computed = 0
        self.draft = self.tokens.ids[:0]  # after the known tokens, computed with the newest of them; see `speculate`
        self.pace = Pace()
        self.scores: list[TokenLogprob] = []  # of the prompt's tokens from `logprob_start` on, if they are asked for
        self.scored_from = request.params.reads_from  # what is cached ends there, so that the rest is scored
        self._scores_kept = 0  # the position up to which they are beside the pages
        self._finds_scores = False
        self.pooling = Pooling() if request.params.embedding else None
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_tokens = self.host_tokens = self.storage_tokens = 0
        self.cached_end = 0  # how far the device had it when it was first admitted
        self.was_preempted = False
        self.prefetch = PromptPrefetch(cache, self.tokens, request.namespace, timeline)
        self.explained: Circumstances | None = None  # why its prompt is computed, as far as it is known yet
        self.explanation: Stretches | None = None  # once it is
        self.settled = False  # whether its misses are counted
        self.counted: tuple[int, int] | None = None  # tokens of the load that count as cached: on the host, in storage
        self.atomic = [AtomicSpan(image.start, image.end) for image in request.images if not image.splits]
        self._arrival = arrival
        self._lease: Lease | None = None
        self._load: Load | None = None
        self._checkpoints: dict[int, Reason] = {}  # by position
        self._page_size = 0  # stays 0 unless the model has states
        self._prefill_end = self.length

    @property
    def length(self) -> int:
        """The number of known tokens: the prompt's, and the generated ones."""
        return self.tokens.length

    @property
    def generated(self) -> int:
        """The number of generated tokens."""
        return self.length - len(self.request.tokens)

    @property
    def uncomputed(self) -> int:
        """Known tokens that are not computed yet."""
        return self.length - self.computed

    @property
    def kept(self) -> int:
        """Positions computed that stay in the cache for others."""
        kept = self.request.hints.kept(len(self.request.tokens), self.computed)
        return kept if self._own is None else min(kept, self._own)

    @property
    def mixed(self) -> bool:
        """Whether it computes on top of another version's KV, so that nothing of that is kept."""
        return self._own is not None

    @property
    def prefilling(self) -> bool:
        """Whether tokens that were known at admission are left to compute."""
        return self.computed < self._prefill_end

    @property
    def lowest(self) -> bool:
        """Whether nobody waits for it."""
        return self.request.priority == LOWEST_PRIORITY

    @property
    def most_cached(self) -> int | None:
        """How much of the prompt may be cached, where something about the positions after it is left to compute.

        None where the scores of cached pages may be known: `find_scores` then says how much.
        """
        if self.pooling is None and (self._finds_scores or not self.scoring):
            return None
        return self.request.params.reads_from

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are left to compute."""
        params = self.request.params
        return params.prompt_logprobs is not None and len(self.scores) < len(self.request.tokens) - params.first_scored

    @property
    def publishing(self) -> bool:
        """Whether others will be able to use what it computes next."""
        return self.prefilling and not self.request.hints.no_store and not self.mixed

    @property
    def loading(self) -> bool:
        """Whether the next forward waits for pages that are being loaded from the host."""
        return self._load is not None

    @property
    def loading_from(self) -> int:
        """The first position that is being loaded; `length` if there is none."""
        return self.length if self._load is None or self._lease is None else self._lease.hit

    def precedence(self) -> tuple[int, bool, int]:
        """The sort key of admission without hits and age; the lowest is first."""
        return -self.request.priority, not self.was_preempted, self._arrival

    def renew(self, version: int) -> None:
        """Goes on with other weights, running: of what it computes from here on, nothing is kept."""
        self.version = version
        if self._own is None:
            self._own = self.computed
            self._checkpoints = {}

    def move(self, request: Request, version: int, base: int) -> None:
        """Waits with other weights, to go on from what version `base` has of it; `request`: in that namespace."""
        assert self._lease is None
        if not self.generated:  # what was found or computed before is of other weights
            self.scores, self.scored_from, self._scores_kept = [], request.params.reads_from, 0
            self.pooling = Pooling() if request.params.embedding else None
        self.prefetch.move(request.namespace, self.storage_tokens)
        self.request, self.namespace = request, encode_namespace(request.namespace)
        self.version, self.base, self._own = version, base, None if base == version else 0
        self.computed = 0
        if self.most_cached != 0:
            self.prefetch.begin()

    def open(self, lease: Lease, load: Load | None, checkpoints: dict[int, Reason], page_size: int) -> None:
        """Takes over a lease, and reserves pages for all known tokens.

        Positions that are being loaded count as computed: the forward waits for them, layer by layer.

        Raises:
            OutOfPages: `drop` then releases what was taken.
        """
        self._lease, self._load = lease, load
        self._scores_kept = lease.hit
        self.computed = lease.hit if load is None else lease.reserved
        lease.reserve(max(0, self.length - lease.reserved))
        self._checkpoints = checkpoints
        self._page_size = page_size if lease.state >= 0 else 0
        self._prefill_end = self.length

    def drop(self) -> None:
        """Ends an admission that found no pages."""
        assert self._lease is not None
        self._lease.abort()
        self._lease = self._load = None
        self.computed = 0

    def chunk(self, budget: int) -> int:
        """Returns how many tokens to compute next: at most the budget, except for an image that must not be split."""
        if not self.prefilling:
            return 1
        if self.lowest:
            budget = min(budget, _LOWEST_CHUNK)
        budget = min(budget, self.uncomputed)
        if self._page_size and budget < self.uncomputed:  # a preempted request keeps its state only at a page boundary
            boundary = (self.computed + budget) // self._page_size * self._page_size
            budget = max(boundary - self.computed, 0) or budget
        return chunk_end(self.computed, budget, self._checkpoints, self.atomic) - self.computed

    def add_checkpoint(self, position: int, limit: int) -> None:
        """Adds a checkpoint at a page boundary, unless `limit` of them were requested already."""
        requested = [at for at, reason in self._checkpoints.items() if reason != "regular"]
        if position > self.computed and position not in requested and len(requested) < limit:
            self._checkpoints[position] = "branch"

    def last_planned(self, position: int) -> int:
        """Returns the last planned checkpoint at or before `position`; 0 if there is none."""
        return max((at for at in self._checkpoints if self.computed < at <= position), default=0)

    def slide(self, n: int) -> None:
        """Frees window pages that nothing reads any more, and allocates those of the next n tokens.

        OutOfPages: there are too few for all; what was freed stays freed, and nothing else has changed.

        A model with states keeps the window before the last page boundary: a state that is kept there needs it.
        """
        assert self._lease is not None
        begin = self.computed - self.computed % self._page_size if self._page_size else self.computed
        self._lease.slide(begin, self.computed + n)

    def finish_load(self) -> bool:
        """Returns whether all pages that a forward read had arrived. If not, computing restarts at the hit."""
        load, self._load = self._load, None
        if load is not None:
            self.timeline.end("load")
        if load is None or load.wait():
            self.counted = None
            return True
        assert self._lease is not None
        self.computed = self._lease.hit
        return False

    def reserve(self) -> None:
        """Reserves a page for the newest token; OutOfPages changes nothing."""
        assert self._lease is not None
        missing = self.length - self._lease.reserved
        if missing > 0:
            self._lease.reserve(missing)

    @property
    def draftable(self) -> int:
        """How many tokens may be drafted after the newest: none before the last of the prompt, or if it has a state."""
        if self.prefilling or self._page_size:
            return 0
        return self.tokens.room - 1  # the last token of all is never computed

    def speculate(self, draft: NDArray[np.int32]) -> None:
        """Computes a draft in the next forward, too.

        OutOfPages: there is no draft. What was reserved for it stays, for the tokens that come in its place.
        """
        assert self._lease is not None and len(draft) <= self.draftable
        missing = self.length + len(draft) - self._lease.reserved
        if missing > 0:
            self._lease.reserve(missing)
        self.slide(1 + len(draft))
        self.draft = self.tokens.ids[self.length : self.length + len(draft)]
        self.draft[:] = draft

    def take_draft(self) -> int:
        """Ends the draft, which was computed, and returns its length. What was right of it is appended by `append`."""
        drafted, self.draft = len(self.draft), self.draft[:0]
        return drafted

    def rows(self, n: int) -> int:
        """Returns of how many of the next n tokens, and of the draft, logits are needed: always the last ones."""
        last = 1 + len(self.draft) if n == self.uncomputed else 0
        return max(last, self.computed + n - self.score_from) if self.scoring else last

    def scored(self, n: int) -> NDArray[np.int32]:
        """Returns the tokens whose log-probabilities the next n tokens give: each of a row has the one after it."""
        return self.tokens.known[self.score_from + 1 : self.computed + n + 1]

    def keep(self, scores: list[TokenLogprob]) -> None:
        """Keeps the log-probabilities of the tokens after those that are computed next."""
        del self.scores[self.score_from + 1 - self.request.params.first_scored :]  # of before a preemption
        self.scores += scores

    @property
    def score_from(self) -> int:
        """The first position that is computed next, or later, whose logits give a log-probability of the prompt."""
        return max(self.computed, self.request.params.first_scored - 1)

    def expect_scores(self, kept: KeptScores) -> None:
        """Cached pages may have the scores that are asked for."""
        most = self.request.params.prompt_logprobs
        self._finds_scores = most is not None and most <= kept.best

    def find_scores(self, lease: Lease, kept: KeptScores) -> int | None:
        """Takes the scores of cached pages; returns how much of the prompt may be cached, so that the others follow.

        None: nothing is left to score, or only what `most_cached` says may be cached.
        """
        if not (self._finds_scores and self.scoring):
            return None
        first = self.request.params.first_scored
        self.scores = kept.read(lease.tables[0], first, self.tokens.known[first : lease.hit])
        self.scored_from = first + len(self.scores) - 1
        return self.scored_from

    def keep_scores(self, kept: KeptScores) -> None:
        """Keeps new scores beside the pages that are published, which may be those of another request."""
        assert self._lease is not None
        first = self.request.params.first_scored
        begin, end = max(self._scores_kept, first), min(self._lease.published, first + len(self.scores))
        if begin < end:
            kept.write(self._lease.tables[0], begin, self.scores[begin - first : end - first])
            self._scores_kept = end

    def segment(self, n: int) -> Segment:
        """Returns the next n tokens to compute, and the draft."""
        assert self._lease is not None and 0 < n <= self.uncomputed
        begin, end = self.computed, self.computed + n + len(self.draft)
        return Segment(
            self.tokens.ids[begin:end],
            begin,
            self._lease.tables,
            self.rows(n),
            None if self._load is None else self._load.ticket,
            state=self._lease.state,
            images=self.request.images,
            positions=self.request.positions_of(begin, end),
            adapter=self.request.adapter,
            namespace=self.namespace,
            pooling=self.pooling,
        )

    def advance(self, n: int) -> Reason | None:
        """Counts n tokens as computed, and publishes every page that they fill, so that others can use it at once.

        A model with states publishes the pages of the answer at its end: they are no use without its state.

        Returns:
            The reason of the planned checkpoint that was kept there; None if there was none, or no slot.
        """
        assert self._lease is not None
        kept, prefilling = None, self.prefilling
        self.computed += n
        if prefilling or not self._page_size:
            reason = self._checkpoints.get(self.computed)
            if reason and self._lease.checkpoint(self.computed, room=reason != "regular", mark=reason == "mark"):
                kept = reason
            if self.kept >= self._lease.published:
                self._lease.publish(self.kept)
        if not self.prefilling:
            self.keep_state()
        return kept

    def append(self, token: int) -> None:
        """Appends a sampled token."""
        assert self._lease is not None and self.uncomputed == 0
        self.timeline.generates()
        self.tokens.append(token)
        self._generated[self.version] = self._generated.get(self.version, 0) + 1
        self._lease.append([token])

    def repeat(self, token: int) -> None:
        """Appends a token of the answer that another engine has sampled, before anything is computed."""
        self.tokens.append(token)
        self.sampler.repeat(token)

    def close(self) -> None:
        """Ends the lease, if there is one. What was computed stays in the cache, but nothing of a failed step."""
        self.timeline.end("queue", "load", "prefill", "decode")
        if self._lease is not None and self._load is not None:
            self._lease.abort()  # nothing is computed yet
        elif self._lease is not None:
            self.timeline.begin("store")
            self._lease.finish(self.kept)
            self.timeline.end("store")
        self._lease = self._load = self.counted = None
        self._own = None if self._own is None else 0  # it may be computed again

    def keep_state(self) -> None:
        """Keeps the state after what is computed, where it fills pages that stay in the cache, to resume there."""
        assert self._lease is not None
        boundary = self._page_size and self.computed % self._page_size == 0
        if boundary and self.computed > self._lease.hit and self.kept == self.computed:
            self._lease.checkpoint(self.computed)

    def settle(self, retention: Retention, now_s: float, reason: str) -> tuple[tuple[Prefix, Kept], ...]:
        """Retains what its hints ask for, once it has ended and is closed.

        Returns:
            The prefixes that the request marks, each with how much of it the cache has, and retains; none if it failed.
        """
        hints, namespace = self.request.hints, self.request.namespace
        if self.mixed:
            return ()
        if hints.retain_s is not None and reason in ("stop", "length"):
            retention.retain(self.tokens.key(), now_s + hints.retain_s, namespace)

        def kept(prefix: Prefix) -> Kept:
            tokens = self.tokens.key(prefix.end)
            if prefix.retain_s is None:
                return retention.find(tokens, namespace)
            renew_s = prefix.retain_s if prefix.renewed else 0.0
            return retention.retain(tokens, now_s + prefix.retain_s, namespace, renew_s=renew_s)

        return () if reason == "error" else tuple((prefix, kept(prefix)) for prefix in hints.prefixes)

    def usage(self, now_s: float, prefixes: tuple[tuple[Prefix, Kept], ...] = ()) -> Usage:
        """Returns the usage up to now; `prefixes`: what became of those that the request marks."""
        prompt = len(self.request.tokens)
        beyond = max(0, self.cached_tokens - prompt)  # cached tokens of an answer that another engine has begun
        storage = max(0, self.storage_tokens - beyond)
        return Usage(
            prompt_tokens=prompt,
            cached_tokens=self.cached_tokens - beyond,
            completion_tokens=self.generated,
            queue_s=(now_s if self.admitted_s is None else self.admitted_s) - self.arrived_s,
            ttft_s=0.0 if self.first_token_s is None else self.first_token_s - self.arrived_s,
            duration_s=now_s - self.arrived_s,
            host_tokens=max(0, self.host_tokens - max(0, beyond - self.storage_tokens)),
            storage_tokens=storage,
            prefixes=prefixes,
            phases=self.timeline.phases(),
            explanation=self.explanation,
            weight_versions=tuple(self._generated.items()) or ((self.version, 0),),
        )
