"""Chooses which tokens to compute next: continuous batching over one cache, one packed forward per step.

A step polls the tiers, allocates pages for the running requests, admits waiting requests while there is room, runs one
forward, and samples one token for every request whose prompt is done. It is single-threaded; clock and randomness are
passed in.

**Admission order.** Higher priority first. Within a priority: preempted requests; then requests that have waited longer
than `age_limit_s`, oldest first; then the rest, longest cached prefix first, then oldest. Each step looks up and ranks
only the first 128 requests, by priority and arrival. The first request that finds no pages blocks all later ones. So no
request starves within its priority: past the age limit, only older and preempted requests are admitted before it.

**Shared prefixes are computed once.** While a running prefill of its namespace will soon publish a longer page-aligned
prefix of a request than the cache has, the request is deferred, unless it is past the age limit.

**Host and storage.** A prompt is looked up in storage when it arrives. It is admitted when its prefetch no longer asks
it to wait. Where pages of a prefix can be used without those after them, it then computes from the front, while the
prefetch reads from the back. Where both meet, it is admitted again, after the pages that have arrived. The pages that
the host has are loaded layer by layer while the forward computes. If a load fails, its positions are computed instead.

**Sliding windows and recurrent states.** Window pages are allocated chunk by chunk. A recurrent state is copied at the
checkpoints of the prompt, at every page boundary of the answer (only the last copy stays), and where a waiting request
parts from a running prefill. Chunks end at these positions, and never inside an image that must not be split.

**Drafts.** A decode computes the next token and a few guesses (`drafts`), or what its grammar asks for, in one forward;
sampling keeps those that it agrees with, so it draws what it would have drawn without them. Models with states have
none: a state cannot go back.

**Log-probabilities of a prompt** need the logits of all its positions, and its embedding their hidden states. So such a
request hits nothing, and waits for nobody. What it computes is published as usual. The rows of logits in a step are
bounded.

**When pages run out**, the newest running request is preempted. What it computed stays in the cache. It resumes with
its generated tokens as part of its prompt. The oldest request always goes on, so every step makes progress.

```
   add -> waiting -- admit: lease, pages for the prompt --> running -- stop | length | cancelled | error --> gone
             ^                                                 |
             +---------------- preempt: no pages --------------+
```
The scheduler knows no threads, streams or models, and no tensors other than the logits that it samples from.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import random as random_module
from collections import abc
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.components import Full, Local, State, by_name
from mainstem.cache.keys import Encoded, Spliced
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.errors import BadArgument, BadTokens, OutOfPages, RequestTooLong
from mainstem.runtime.hints.sessions import Sessions
from mainstem.runtime.memory.sizing import window_pages
from mainstem.runtime.parallel.ranks import ONE_RANK, Ranks, require_equal
from mainstem.runtime.request import Delta, Progress, Request, TokenLogprob
from mainstem.runtime.sampling.grammars import CompiledGrammar, Grammars
from mainstem.runtime.sampling.processor import Ended, LogitsProcessor, check_rules
from mainstem.runtime.sampling.sampler import Choice, Sampler, verify
from mainstem.runtime.sampling.scores import keep_scores
from mainstem.runtime.schedule.checkpoints import Checkpoint, last_boundary, plan_checkpoints
from mainstem.runtime.schedule.drafts import begin_with, look_up
from mainstem.runtime.schedule.hits import Hits
from mainstem.runtime.schedule.meter import NO_FLOPS, Flops, Meter, Totals
from mainstem.runtime.schedule.sequence import Sequence, common_prefix, spliced_images
from mainstem.runtime.schedule.timeline import Timeline
from mainstem.runtime.segments import Segment
from mainstem.runtime.text.detokenizer import Detokenizer, Tokenizer, hiding, special_tokens
from mainstem.settings.engine import Limits
from mainstem.tiers.controller import Tiers
from mainstem.tiers.host.load import Load
from mainstem.tiers.prefetch.prefetch import Prefetch
from mainstem.tiers.prefill import PrefillCost

log = logging.getLogger(__name__)

# Bounds the time of a step, however many requests wait.
_RANKED = 128

_PREFETCHES = 4  # of one request
_MOST_LOGITS = 1 << 26  # of prompts in a step: 256 MiB, beside which a forward needs a few times as much
_MEASURED, _MEASUREMENTS = 48, 3  # tokens of a forward that is only measured; the number of such forwards

_POLL_S = 0.001  # between polls of transfers that all waiting requests need
_IDLE_POLL_S = 0.01  # the same, when no request waits

_NOTHING = Delta("")
_NOT_SAMPLED: list[Choice] = [(0, None)]
_NO_CHOICE: list[Choice] = [None]
_NO_LOGITS = "the model's logits hold NaN or infinity"

Event = tuple[str, Delta | Progress]
"""The id of a request, and what happened to it."""


class Runner(Protocol):
    """What the scheduler needs of a model."""

    @property
    def vocab_size(self) -> int:
        """Tokens that have logits."""

    def forward(self, segments: abc.Sequence[Segment]) -> torch.Tensor:
        """Returns logits, float32 [rows, vocab]: one row for each segment with `logits`, in order."""

    def embed(self, segment: Segment) -> None:
        """Encodes the images that a segment computes; called only for requests with images."""


class Scheduler:
    """Runs requests over one cache and one runner, step by step, on one thread.

    Args:
        cache: prefixes and pages; only the scheduler may hold leases on it.
        runner: runs the model.
        tokenizer: decodes tokens to text.
        limits: the bounds of a step.
        max_context: positions of one request, prompt and completion.
        eos: tokens that end a request, unless it ignores them.
        clock: monotonic, in seconds.
        random: the source of seeds for requests without one.
        ranks: the processes that serve the model together: each schedules the same, and rank 0 samples for all.
        flops: of the model, to count what is saved.

    Attributes:
        grammars: of requests; only rank 0 compiles any.
        hits: counts and explains what prompts find.
    """

    def __init__(
        self,
        cache: PrefixCache,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        max_context: int,
        eos: frozenset[int] = frozenset(),
        clock: abc.Callable[[], float],
        random: random_module.Random,
        ranks: Ranks = ONE_RANK,
        flops: Flops = NO_FLOPS,
    ) -> None:
        self.totals = Totals()
        self._cache, self._runner, self._tokenizer = cache, runner, tokenizer
        self._tiers: Tiers | None = cache.tiers
        self._limits, self._max_context, self._eos = limits, max_context, eos
        self._special = special_tokens(tokenizer)
        self.grammars = Grammars(tokenizer, runner.vocab_size)
        self._clock, self._random, self._ranks = clock, random, ranks
        self._now_s = clock()  # of this step, the same on all ranks
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}  # in order of admission
        self._events: list[Event] = []
        self._held = cache.pool.total * cache.page_size if "full" in cache.pools else max_context  # positions
        self._plans_states = any(isinstance(component, State) for component in cache.tree.components)
        components = by_name(cache.tree.components).items()
        self._local = {name: row for name, row in components if isinstance(row, Local)}
        # The request that found no pages, and `_room` at that time: it is not tried again before that changes.
        self._blocked: tuple[str, tuple[int, ...]] | None = None
        self._idle = False  # the last step had nothing to compute
        self._most_rows = self._rows = max(1, _MOST_LOGITS // runner.vocab_size)  # of prompts; left in this step
        self._sessions = Sessions(cache, limits.prefetch_sessions)
        self.totals.session_prefetches = self._sessions.counts
        prefill = PrefillCost() if self._tiers is None else self._tiers.prefill
        self._meter = Meter(prefill, clock)
        self.hits = Hits(cache, self.totals, prefill, flops, explains=limits.explain)

    @property
    def idle_s(self) -> float | None:
        """Seconds until a step may find something to do, if no request is added; None: never."""
        if self._events or (not self._idle and (self._running or self._waiting)):
            return 0.0
        if self._running or self._waiting:
            return _POLL_S
        if self._tiers is not None and self._tiers.busy:
            return _IDLE_POLL_S
        return self._sessions.idle_s(self._now_s)

    @property
    def waiting(self) -> int:
        """Requests that hold no pages."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a lease."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._waiting or self._running or self._events)

    def queued(self) -> int:
        """Returns about how many prompt tokens are to be computed: of a waiting request, those that are not cached."""
        running = sum(sequence.uncomputed for sequence in self._running.values() if sequence.prefilling)
        ranked = self._rank_waiting()
        lacking = sum(sequence.length - hit for sequence, hit in ranked)
        return running + lacking * len(self._waiting) // max(1, len(ranked))

    def check(self, request: Request) -> Encoded:
        """Rejects a request that could never run, otherwise encodes its prompt for `add`. Callable from any thread.

        Raises:
            RequestTooLong: it exceeds the context or the pool.
            BadTokens: a token is outside the vocabulary.
            BadArgument: a rule of its parameters names a token outside the vocabulary, or they leave none; its grammar
                does not compile; they ask how likely images are; or no pool holds the window of one of its images.
            UnsupportedModel: it has a grammar, which this model cannot follow.
        """
        if request.images and request.params.reads_prompt:
            name = "embedding" if request.params.embedding else "prompt_logprobs"
            raise BadArgument(name, getattr(request.params, name), "left out for a prompt with images")
        check_rules(request.params, self._eos, self._runner.vocab_size)
        if (request.said >= self._runner.vocab_size).any():
            raise BadTokens(f"said: token {request.said.max()}: must be below {self._runner.vocab_size}")
        self._compiled(request)
        prompt, new = len(request.tokens), request.params.max_tokens
        longest = max((image.length for image in request.images), default=0)
        # The last token is never computed, so it needs no page.
        if prompt + new > self._max_context or prompt + max(new, 1) - 1 > self._held:
            raise RequestTooLong("prompt", prompt, min(self._max_context, self._held), answer=new)
        for name, row in self._local.items():
            self._check_local(name, row, min(prompt, max(longest, self._limits.token_budget)))
        images = spliced_images(request)
        return Encoded.of(self._cache.tree.keys, Spliced(request.tokens, images) if images else request.tokens)

    def _compiled(self, request: Request) -> CompiledGrammar | None:
        grammar = request.params.grammar
        return None if grammar is None or self._ranks.rank > 0 else self.grammars.compile(grammar)

    def _check_local(self, name: str, row: Local, chunk: int) -> None:
        size, total = self._cache.page_size, self._cache.pools[name].total
        pages = window_pages(row.tokens, chunk, size, states=self._plans_states)
        if pages > total:
            allowed = f"fewer positions at once: with the {row.tokens} that a query sees they need {pages} {name} pages"
            raise BadArgument("prefill", chunk, f"{allowed} of {size} positions, and the memory for KV holds {total}")

    def add(self, id: str, request: Request, arrived_s: float | None = None, prompt: Encoded | None = None) -> None:
        """Adds a waiting request.

        Args:
            id: names it in events; unique among requests that have not ended.
            request: what to run.
            arrived_s: its arrival time, by the scheduler's clock; None: now.
            prompt: what `check` returned; None: `add` calls it.

        Raises:
            RequestTooLong, BadTokens, BadArgument: as `check`.
        """
        assert id not in self._waiting and id not in self._running
        prompt = self.check(request) if prompt is None else prompt
        arrived_s = self._clock() if arrived_s is None else arrived_s
        params = request.params
        rules = (params, request.tokens, self._eos, self._compiled(request)) if params.shapes_logits else None
        sampler = Sampler(params, self._random, None if rules is None else LogitsProcessor(*rules))
        skipped, hidden = hiding(params, self._special)
        content = request.content() if request.content is not None and params.stop else None
        shown = (skipped, params.include_stop_str_in_output, hidden, content)
        text = Detokenizer(self._tokenizer, params.stop, request.tokens, *shown)
        timeline, arrival = Timeline(self._clock, arrived_s), self.totals.requests
        self._waiting[id] = sequence = Sequence(id, request, prompt, arrival, arrived_s, sampler, text, timeline)
        self.totals.requests += 1
        self.totals.grammar_requests += params.grammar is not None
        self._idle = False
        if self._repeats(sequence):
            return
        for other in self._running.values():
            self._request_checkpoint(other, sequence)
        self._prefetch(sequence)
        self._sessions.arrived(sequence)

    def _repeats(self, sequence: Sequence) -> bool:
        """Repeats what another engine has said of the answer; returns whether that ends it.

        What is left is what a preempted request is: its prompt and some tokens, of which nothing is computed.
        """
        try:
            for token in sequence.request.said.tolist():
                sequence.repeat(token)
                self._report(sequence, token, (), sequence.sampler.ended)
                if sequence.id not in self._waiting:
                    return True
        except Exception as error:  # noqa: BLE001  # it logs
            self._fail(sequence, "cannot be continued", error)
        return sequence.id not in self._waiting

    def measure(self) -> None:
        """Times a few forwards, so that the first request knows what it costs not to wait for storage.

        Call it before the first request.
        """
        size, pools = self._cache.page_size, self._cache.pools
        room = min(pool.free * size for name, pool in pools.items() if name != State.name)
        n = min(_MEASURED, self._max_context, self._limits.token_budget, room)
        taken = {name: pool.allocate(1 if name == State.name else -(-n // size)) for name, pool in pools.items()}
        tables = tuple(ids for name, ids in taken.items() if name != State.name)
        state = int(taken[State.name][0]) if State.name in taken else -1
        try:
            for _ in range(_MEASUREMENTS):
                began_s = self._clock()
                logits = self._runner.forward([Segment(np.zeros(n, np.int32), 0, tables, True, state=state)])
                logits.argmax().item()  # waits for the forward
                if self._tiers is not None:
                    self._tiers.prefill.observe([(n, 0)], self._clock() - began_s)
        finally:
            for name, ids in taken.items():
                pools[name].release(ids)

    def cancel(self, id: str) -> None:
        """Ends a request; the next step returns its last event. Does nothing if it has ended."""
        sequence = self._waiting.get(id) or self._running.get(id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    def step(self, now_s: float | None = None) -> list[Event]:
        """Runs at most one forward, and returns all events since the last step, in order.

        Args:
            now_s: the time of the step, the same on all ranks, by the clock of rank 0; None: now.

        Raises:
            RankFailed: a rank has ended, or does not schedule what rank 0 does.
            Exception: with several ranks, any failure of a forward, since the others wait for this rank.
        """
        self._now_s = self._clock() if now_s is None else now_s
        self._rows = self._most_rows
        self._cache.poll(self._now_s, deliver=False)  # the engine delivers events after the step
        self._sessions.poll(self._now_s, self._spare)
        scheduled = self._schedule_running()
        scheduled += self._schedule_waiting(
            self._limits.token_budget - sum(n for sequence, n in scheduled if sequence.prefilling)
        )
        self._schedule_drafts([sequence for sequence, _ in scheduled])
        self._idle = not scheduled
        if scheduled:
            self._forward(scheduled)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends what was begun for requests that have not come."""
        self._sessions.close()

    def _preempt(self, sequence: Sequence) -> None:
        log.info("out of pages: request %s is preempted at %d positions", sequence.id, sequence.computed)
        sequence.keep_state()
        self._requeue(sequence)
        self.totals.preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Lets a running request wait again, to be admitted before those that never ran."""
        del self._running[sequence.id]
        sequence.close()
        sequence.was_preempted = True
        sequence.timeline.begin("queue")
        self._waiting[sequence.id] = sequence

    def _schedule_running(self) -> list[tuple[Sequence, int]]:
        """Schedules running requests, with the number of tokens of each: decodes first, then prefills, oldest first.

        Allocates the pages that they need. Where there are none, the newest request is preempted.
        """
        for sequence in tuple(self._running.values()):
            if sequence.prefetch is not None:
                self._meet(sequence, sequence.prefetch)
        self._allocate_running()
        running = tuple(self._running.values())
        budget = self._limits.token_budget
        scheduled: dict[str, tuple[Sequence, int]] = {}
        for sequence in sorted(running, key=lambda sequence: sequence.prefilling):
            if sequence.prefilling and budget <= 0:
                break
            n = self._chunk(sequence, budget)
            if n and self._allocate(sequence, partial(sequence.slide, n)):
                scheduled[sequence.id] = sequence, n
                budget -= n if sequence.prefilling else 0
        return [(sequence, n) for sequence, n in scheduled.values() if sequence.id in self._running]

    def _allocate_running(self) -> None:
        """Allocates a page for the newest token of every running request, oldest first."""
        for sequence in tuple(self._running.values()):
            self._allocate(sequence, sequence.reserve)

    def _allocate(self, sequence: Sequence, take: abc.Callable[[], None]) -> bool:
        """Allocates for a running request, preempting the newest ones, at last itself; returns whether it got pages."""
        while sequence.id in self._running:
            try:
                take()
                return True
            except OutOfPages:
                self._preempt(next(reversed(self._running.values())))
        return False

    def _schedule_waiting(self, budget: int) -> list[tuple[Sequence, int]]:
        """Admits requests that can compute something in this step; returns them, and how many tokens each computes."""
        scheduled: list[tuple[Sequence, int]] = []
        if not self._has_room(budget):
            return scheduled
        ranked = self._rank_waiting()
        for sequence, hit in ranked:
            if not self._has_room(budget):
                break
            if self._is_deferred(sequence, hit) or self._awaits_prefetch(sequence):
                continue
            if self._blocked == (sequence.id, self._room()):
                break
            try:
                self._admit(sequence, budget)
            except OutOfPages as error:
                if self._running or (self._tiers is not None and self._tiers.copying):
                    self._blocked = (sequence.id, self._room())
                    break
                self._finish(sequence, "error", error=str(error))  # nothing runs, so no page will ever be freed
                continue
            for other, _ in ranked:
                self._request_checkpoint(sequence, other)
            if n := self._chunk(sequence, budget):
                scheduled.append((sequence, n))
                budget -= n
        return scheduled

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Returns how many tokens a request computes next; 0: it waits for pages from storage."""
        ahead = None if sequence.prefetch is None else sequence.prefetch.ahead(sequence.computed)
        budget = budget if ahead is None else min(budget, ahead)
        if not sequence.scoring:
            return sequence.chunk(budget) if budget > 0 else 0
        n = sequence.chunk(min(budget, self._rows)) if min(budget, self._rows) > 0 else 0
        self._rows -= n
        return n

    def _schedule_drafts(self, scheduled: list[Sequence]) -> None:
        """Adds drafts to the decodes of a step. They share `draft_tokens` evenly, and preempt nobody."""
        decodes = [sequence for sequence in scheduled if sequence.draftable > 0]
        share = self._limits.draft_tokens // len(decodes) if decodes else 0
        forced = self._forced(decodes) if share else {}
        for sequence in decodes if share else ():
            most = min(share, sequence.draftable)
            begun = forced.get(sequence.id, ())[:most]
            draft = begin_with(begun, self._draft(sequence, sequence.pace.length(most, len(begun))))
            if len(draft):
                with contextlib.suppress(OutOfPages):
                    sequence.speculate(draft)

    def _forced(self, decodes: list[Sequence]) -> dict[str, tuple[int, ...]]:
        """Returns the tokens that grammars ask for next, by request; only rank 0 knows them."""
        held = [sequence for sequence in decodes if sequence.request.params.grammar is not None]
        return self._ranks.share(lambda: {each.id: each.sampler.forced for each in held}) if held else {}

    def _draft(self, sequence: Sequence, most: int) -> NDArray[np.int32]:
        """Returns up to `most` tokens that may come next: what the cache knows, else what the text itself repeats."""
        if most and self._cache.enabled:
            draft = self._cache.continuation(sequence.symbols, most, sequence.request.namespace)
            if len(draft):
                return draft
        return look_up(sequence.known, most)

    def _room(self) -> tuple[int, ...]:
        """Returns the pages and slots that are free or can be evicted, by component."""
        counts = [self._cache.tree.core.counts(row, 0) for row in range(len(self._cache.pools))]
        pools = self._cache.pools.values()
        return tuple(pool.free + present - locked for pool, (present, locked, _) in zip(pools, counts, strict=True))

    def _spare(self) -> int:
        """Returns the pages of the first component that no request needs; none while one waits."""
        size, running = self._cache.page_size, self._running.values()
        return 0 if self._waiting else self._room()[0] - sum(-(-sequence.left // size) for sequence in running)

    def _has_room(self, budget: int) -> bool:
        return budget > 0 and len(self._running) < self._limits.max_running

    def _rank_waiting(self) -> list[tuple[Sequence, int]]:
        """Returns the waiting requests in admission order, each with the length of its hit."""
        keys = self._cache.tree.keys
        oldest = heapq.nsmallest(_RANKED, self._waiting.values(), key=Sequence.precedence)

        def hit(sequence: Sequence) -> int:
            if sequence.reading:
                return 0
            return self._cache.peek(sequence.encoded(keys), sequence.request.namespace)

        hits = [(sequence, hit(sequence)) for sequence in oldest]

        def rank(entry: tuple[Sequence, int]) -> tuple[object, ...]:
            sequence, hit = entry
            fresh = not (sequence.was_preempted or self._is_aged(sequence))
            priority, first, arrival = sequence.precedence()
            return priority, first, fresh, -hit if fresh else 0, arrival

        return sorted(hits, key=rank)

    def _is_aged(self, sequence: Sequence) -> bool:
        return self._now_s - sequence.arrived_s > self._limits.age_limit_s

    def _is_deferred(self, sequence: Sequence, hit: int) -> bool:
        """Whether a running prefill will soon publish more of this prompt than the cache has, or has loaded it."""
        if not self._cache.enabled or sequence.reading or self._is_aged(sequence):
            return False
        for other in self._running.values():
            if other.publishing and other.namespace == sequence.namespace and self._will_share(other, sequence, hit):
                return True
        return False

    def _will_share(self, other: Sequence, sequence: Sequence, hit: int) -> bool:
        """Whether a running prefill will publish, or has loaded, more of a prompt than `hit`."""
        shared = self._shared(other, sequence)
        if self._plans_states:
            shared = other.last_planned(shared)
        return shared > hit or shared > other.loading_from

    def _shared(self, one: Sequence, other: Sequence) -> int:
        """Returns the last page boundary up to which two prompts agree and at which `other` could start."""
        # One token is always left to compute, so a hit never includes the last one.
        page = self._cache.page_size
        same = min(common_prefix(one.symbols, other.symbols, page), other.length - 1)
        return last_boundary(same, page, other.atomic)

    def _request_checkpoint(self, running: Sequence, sequence: Sequence) -> None:
        """Makes a running prefill keep its state where a waiting request parts from it."""
        wanted = self._plans_states and self._cache.enabled and sequence.id in self._waiting and running.publishing
        if wanted and running.namespace == sequence.namespace:
            running.add_checkpoint(self._shared(running, sequence), self._limits.states_per_path)

    def _prefetch(self, sequence: Sequence) -> None:
        """Starts to prefetch what neither device nor host has of a prompt."""
        if self._tiers is not None and self._cache.enabled and not sequence.reading:
            key = sequence.encoded(self._cache.tree.keys)
            prefetch = self._tiers.prefetch(key, sequence.request.namespace, bidirectional=True)
            sequence.begin_prefetch(prefetch, self._tiers.declined)

    def _awaits_prefetch(self, sequence: Sequence) -> bool:
        """Whether to wait, since storage may soon bring more of this request's prompt."""
        prefetch = sequence.prefetch
        if (
            prefetch is not None
            and prefetch.ended
            and prefetch.shared
            and prefetch.loaded
            and sequence.prefetches < _PREFETCHES
        ):
            sequence.drop_prefetch()  # it was shared with another prompt, which may part from this one further on
            self._prefetch(sequence)
        elif (
            prefetch is None
            and sequence.prefetches < _PREFETCHES
            and self._tiers is not None
            and self._tiers.can_prefetch
        ):
            self._prefetch(sequence)  # too many were under way
        return sequence.prefetch is not None and sequence.prefetch.waiting

    def _meet(self, sequence: Sequence, prefetch: Prefetch) -> None:
        """Lets a request go on after the pages that have arrived: it is admitted again, before others."""
        assert self._tiers is not None
        if prefetch.usable > sequence.computed and not sequence.loading:
            keys, namespace = self._cache.tree.keys, sequence.request.namespace
            found = self._cache.peek(sequence.encoded(keys), namespace) - sequence.computed
            if found > 0 and found >= self._tiers.load_min_tokens():
                self._requeue(sequence)
                sequence.met = True
                return
        if prefetch.ended:
            sequence.drop_prefetch()

    def _leads(self, sequence: Sequence, load: Load | None) -> bool:
        """Whether an admitted request computes while its prefetch goes on reading."""
        prefetch, met = sequence.prefetch, sequence.met
        sequence.met = False
        if prefetch is None or (met and load is None):
            return False  # what has arrived cannot be used
        key = sequence.encoded(self._cache.tree.keys).symbols
        sequence.leads = sequence.leads or prefetch.lead(key, sequence.computed)
        return sequence.leads

    def _admit(self, sequence: Sequence, budget: int) -> None:
        """Leases the longest cached prefix and reserves pages for the rest of the prompt, or raises OutOfPages."""
        request, reuse = sequence.request, not sequence.reading
        sequence.timeline.match()
        self.hits.before(sequence)
        lease = self._cache.lease(sequence.key, request.namespace, priority=request.priority, reuse=reuse)
        load = self._tiers.load(lease) if self._tiers is not None and self._fits(sequence, lease) else None
        try:
            sequence.open(lease, load, self._checkpoints(sequence, lease), self._cache.page_size)
            sequence.slide(sequence.chunk(budget))
        except OutOfPages:
            sequence.drop()
            raise
        del self._waiting[sequence.id]
        self._running[sequence.id] = sequence
        sequence.timeline.admitted(loads=load is not None)
        self.hits.admitted(sequence, lease, load, self._clock())
        if not self._leads(sequence, load):
            sequence.drop_prefetch()
        self._report_progress(sequence)

    def _checkpoints(self, sequence: Sequence, lease: Lease) -> list[Checkpoint]:
        """Plans at which positions a request's state is copied."""
        if not self._plans_states or not self._cache.enabled or sequence.request.hints.no_store:
            return []
        limits, page = self._limits, self._cache.page_size
        return plan_checkpoints(
            lease.hit,
            lease.reach,
            sequence.length,
            page,
            marks=sequence.request.marks,
            interval=limits.checkpoint_tokens,
            limit=limits.states_per_path,
            atomic=sequence.atomic,
        )

    def _forward(self, scheduled: list[tuple[Sequence, int]]) -> None:
        scheduled = [
            (sequence, n) for sequence, n in scheduled if not sequence.request.images or self._embeds(sequence, n)
        ]
        if not scheduled:
            return
        sampled = [sequence for sequence, n in scheduled if n == sequence.uncomputed]
        self._meter.begin(scheduled)
        try:
            segments = [sequence.segment(n) for sequence, n in scheduled]
            require_equal(self._ranks, lambda: [segment.digest for segment in segments], "requests or pages")
            logits, unscored = keep_scores(scheduled, self._runner.forward(segments), self._ranks)
            scheduled, sampled, logits = self._drop_failed_loads(scheduled, sampled, logits)
            choices = self._ranks.share(
                lambda: verify(logits, [each.sampler for each in sampled], [each.draft for each in sampled])
            )
            if choices or logits.device.type == "cpu":
                self._meter.end()
        except Exception as error:
            self._meter.drop()
            if self._ranks.size > 1:
                raise
            log.exception("a forward over %d requests failed; ending them", len(scheduled))
            for sequence, _ in scheduled:
                self._finish(sequence, "error", error=f"{type(error).__name__}: {error}")
            return
        chosen = {**dict(zip(sampled, choices, strict=True)), **dict.fromkeys(unscored, _NO_CHOICE)}
        for sequence, n in scheduled:
            self.totals.computed_tokens += n + len(sequence.draft)
            if chosen.get(sequence, _NOT_SAMPLED)[0] is None:  # what it has computed is not worth keeping
                self._finish(sequence, "error", error=_NO_LOGITS)
                continue
            was_prefilling = sequence.prefilling
            kept = sequence.advance(n)
            if kept is not None:
                self.totals.checkpoints[kept] += 1
            if was_prefilling:
                self._report_progress(sequence)
            if sequence.prefetch is not None:
                sequence.prefetch.reached(sequence.computed)
                if not sequence.prefilling:
                    sequence.drop_prefetch()
            if not sequence.prefilling:
                self.hits.settle(sequence)
        for sequence, choices_of in chosen.items():
            if choices_of[0] is None:
                continue
            try:
                self._process_choices(sequence, choices_of)
            except Exception as error:  # noqa: BLE001  # e.g. the tokenizer cannot decode it; other requests go on
                self._fail(sequence, "failed", error)

    def _embeds(self, sequence: Sequence, n: int) -> bool:
        """Encodes the images of the next n tokens; returns whether it could. A failure ends this request only."""
        try:
            self._runner.embed(sequence.segment(n))
        except Exception as error:  # noqa: BLE001  # it logs
            self._fail(sequence, "has images that cannot be encoded", error)
            return False
        return True

    def _drop_failed_loads(
        self, scheduled: list[tuple[Sequence, int]], sampled: list[Sequence], logits: torch.Tensor
    ) -> tuple[list[tuple[Sequence, int]], list[Sequence], torch.Tensor]:
        """Drops results that read pages which did not arrive; they are computed again, together with those pages."""
        failed = [sequence for sequence, _ in scheduled if not sequence.finish_load()]
        if not failed:
            return scheduled, sampled, logits
        for sequence in failed:
            self.hits.load_failed(sequence)
            sequence.drop_prefetch()  # what it brings cannot be used either
        rows = torch.split(logits, [1 + len(sequence.draft) for sequence in sampled])
        good = [at for at, sequence in enumerate(sampled) if sequence not in failed]
        scheduled = [(sequence, n) for sequence, n in scheduled if sequence not in failed]
        return scheduled, [sampled[at] for at in good], torch.cat([logits[:0], *(rows[at] for at in good)])

    def _fits(self, sequence: Sequence, lease: Lease) -> bool:
        """Whether all pages of a request can be allocated; if not, loading is wasted work."""
        if Full.name not in self._cache.pools:
            return True  # window pages are allocated chunk by chunk
        size = self._cache.page_size
        return -(-sequence.length // size) - lease.hit // size <= self._room()[0]

    def _report_progress(self, sequence: Sequence) -> None:
        if not sequence.generated:
            self._events.append((sequence.id, Progress(sequence.computed, sequence.length)))

    def _process_choices(self, sequence: Sequence, choices: list[Choice]) -> None:
        """Processes the next token, and those of the draft that were right, until the request ends."""
        if sequence.scores and not sequence.generated:
            self._events.append((sequence.id, Delta("", prompt_logprobs=tuple(sequence.scores))))
        if sequence.pooling is not None:
            vector = sequence.pooling.vector(sequence.length)
            if vector is None:
                self._finish(sequence, "error", error="the model's hidden states hold NaN or infinity")
                return
            self._events.append((sequence.id, Delta("", embedding=vector)))
        if not sequence.request.params.max_tokens:
            self._finish(sequence, "length")
            return
        last = choices[-1]
        ended = last if isinstance(last, str) else None
        sampled = [choice for choice in choices if not isinstance(choice, str)]
        drafted, kept = sequence.take_draft(), max(len(sampled) - 1, 0)
        if drafted:
            sequence.pace.observe(drafted, kept)
            self.totals.drafted_tokens += drafted
            self.totals.accepted_tokens += kept
        for at, choice in enumerate(sampled):
            if choice is None:
                self._finish(sequence, "error", error=_NO_LOGITS)
                return
            if at:
                sequence.advance(1)
            token, logprob = choice
            final = ended if at == len(sampled) - 1 else None
            self._process_token(sequence, token, () if logprob is None else (logprob,), final)
            if sequence.id not in self._running:
                return
        if ended is not None:  # no token at all
            self._finish(sequence, ended)

    def _process_token(
        self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...], ended: Ended | None
    ) -> None:
        """Appends a sampled token to its sequence, and reports it; ends the request if it was the last."""
        self.totals.generated_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock()
        sequence.append(token)
        self._report(sequence, token, logprobs, ended)

    def _report(self, sequence: Sequence, token: int, scores: tuple[TokenLogprob, ...], ended: Ended | None) -> None:
        """Reports the newest token of a sequence; ends the request if it was the last."""
        params = sequence.request.params
        if (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids:
            shown = sequence.text.push(token) if params.include_stop_str_in_output else ""
            self._finish(sequence, "stop", Delta(shown, (token,), scores))
            return
        delta = Delta(sequence.text.push(token), (token,), scores)
        if sequence.text.stop is not None:
            self._finish(sequence, "stop", delta)
        elif ended is not None:
            self._finish(sequence, ended, delta)
        elif sequence.generated == params.max_tokens:
            self._finish(sequence, "length", delta)
        else:
            self._events.append((sequence.id, delta))

    def _fail(self, sequence: Sequence, what: str, error: Exception) -> None:
        log.exception("request %s %s; ending it", sequence.id, what)
        self._finish(sequence, "error", error=f"{type(error).__name__}: {error}")

    def _finish(self, sequence: Sequence, reason: str, last: Delta = _NOTHING, error: str | None = None) -> None:
        self._waiting.pop(sequence.id, None)
        self._running.pop(sequence.id, None)
        sequence.drop_prefetch()
        self.hits.ended(sequence)
        sequence.close()
        prefixes = sequence.settle(self._cache.retention, self._now_s, reason)
        self.totals.errors += error is not None
        usage = sequence.usage(self._clock(), prefixes)
        if reason in ("stop", "length"):
            self._sessions.ended(sequence, self._now_s)
        text = last.text + sequence.flush(reason == "length")
        if (stop := sequence.text.stop) is not None and reason == "length":
            reason = "stop"
        self._events.append((sequence.id, Delta(text, last.tokens, last.logprobs, reason, usage, error, stop)))
