"""Chooses which tokens to compute next: continuous batching over one cache, one packed forward per step.

A step polls the tiers, allocates pages for the running requests, admits waiting requests while there is room, runs one
forward, and samples one token for every request whose prompt is done. It is single-threaded; clock and randomness are
passed in.

**Admission.** `waiting` ranks the requests that wait. The first one that finds no pages blocks all later ones. So no
request starves within its priority: past the age limit, only older and preempted requests are admitted before it.

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
request hits nothing, and waits for nobody, unless scores are kept beside pages (`memory.scores`). What it computes is
published as usual. The rows of logits in a step are bounded.

**The lowest priority** is that of requests that nobody waits for, such as those of batches. While there is another one,
they compute only in their share of the steps (`batch_share`), and are the first to be preempted, also for its slot.

**When the weights change**, between two steps, a request goes on from KV that `versions` lets it find, or is computed
anew from its prompt and the tokens of its answer.

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

import logging
import random as random_module
from collections import abc
from functools import partial
from typing import Protocol

import numpy as np
import torch

from mainstem.cache.components import Full, State
from mainstem.cache.keys import Encoded
from mainstem.cache.prefix_cache import Lease, PrefixCache
from mainstem.errors import OutOfPages
from mainstem.runtime.audit.auditor import Auditor
from mainstem.runtime.hints.anchors import Anchors
from mainstem.runtime.hints.replaced import Replaced
from mainstem.runtime.hints.sessions import Sessions
from mainstem.runtime.memory.scores import KeptScores
from mainstem.runtime.parallel.ranks import ONE_RANK, Ranks, require_equal
from mainstem.runtime.request import Request
from mainstem.runtime.sampling.sampler import Choice, verify
from mainstem.runtime.sampling.scores import keep_scores
from mainstem.runtime.schedule.drafter import Drafter
from mainstem.runtime.schedule.hits import Hits
from mainstem.runtime.schedule.intake import Intake
from mainstem.runtime.schedule.meter import NO_FLOPS, Flops, Meter, Totals
from mainstem.runtime.schedule.outputs import NO_LOGITS, End, Event, Outputs
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.runtime.schedule.versions import Versions
from mainstem.runtime.schedule.waiting import WaitingQueue
from mainstem.runtime.segments import Segment
from mainstem.runtime.text.detokenizer import Tokenizer
from mainstem.settings.engine import Limits
from mainstem.tiers.controller import Tiers
from mainstem.tiers.costs import PrefillCost
from mainstem.tiers.host.load import Load

log = logging.getLogger(__name__)

_MOST_LOGITS = 1 << 26  # of prompts in a step: 256 MiB, beside which a forward needs a few times as much
_MEASURED, _MEASUREMENTS = 48, 3  # tokens of a forward that is only measured; the number of such forwards

_POLL_S = 0.001  # between polls of transfers that all waiting requests need
_IDLE_POLL_S = 0.01  # the same, when no request waits

_NOT_SAMPLED: list[Choice] = [(0, None)]
_NO_CHOICE: list[Choice] = [None]


class Runner(Protocol):
    """A model's runner, as the scheduler needs it."""

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
        auditor: computes hits again while there is nothing else to do; None: nobody does.
        scores: those beside the pages of the first component; None: none are kept.

    Attributes:
        totals: what it counts.
        intake: checks requests.
        hits: counts and explains what prompts find.
        versions: of the model's weights.
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
        auditor: Auditor | None = None,
        scores: KeptScores | None = None,
    ) -> None:
        self.totals = Totals()
        self._cache, self._runner, self._limits = cache, runner, limits
        self._tiers: Tiers | None = cache.tiers
        self._clock, self._ranks, self._auditor, self._scores = clock, ranks, auditor, scores
        self._now_s = clock()  # of this step, the same on all ranks
        self.intake = Intake(cache, runner.vocab_size, tokenizer, limits, max_context, eos, clock, random, ranks)
        self._queue = WaitingQueue(cache, limits, self._now_s)
        self._running: dict[str, Sequence] = {}  # in order of admission
        self.versions = Versions(cache)
        self._outputs = Outputs(self.totals, eos, clock)
        # The request that found no pages, and `_room` at that time: it is not tried again before that changes.
        self._blocked: tuple[str, tuple[int, ...]] | None = None
        self._idle = False  # the last step had nothing to compute
        self._shared = 0  # steps in which there were requests that somebody waits for, and others
        self._yields = False  # those that nobody waits for compute nothing in this step
        self._most_rows = self._rows = max(1, _MOST_LOGITS // runner.vocab_size)  # of prompts; left in this step
        self._drafter = Drafter(cache, limits.draft_tokens, ranks)
        self._sessions = Sessions(cache, limits.prefetch_sessions)
        self._anchors, self._replaced = Anchors(cache, limits.anchor_share), Replaced(cache)
        self.totals.session_prefetches, self.totals.anchors = self._sessions.counts, self._anchors.counts
        prefill = PrefillCost() if self._tiers is None else self._tiers.prefill
        self._meter = Meter(prefill, clock)
        self._measured = min(_MEASURED, max_context, limits.token_budget)  # tokens, see `measure`
        self.hits = Hits(cache, self.totals, prefill, flops, explains=limits.explain)

    @property
    def idle_s(self) -> float | None:
        """Seconds until a step may find something to do, if no request is added; None: never."""
        if self._outputs.events or (not self._idle and (self._running or self._queue.sequences)):
            return 0.0
        if self._running or self._queue.sequences:
            return _POLL_S
        if self._tiers is not None and self._tiers.busy:
            return _IDLE_POLL_S
        waits_s = self._sessions.idle_s(self._now_s), None if self._auditor is None else self._auditor.idle_s
        return min((each for each in waits_s if each is not None), default=None)

    @property
    def waiting(self) -> int:
        """Requests that hold no pages."""
        return len(self._queue.sequences)

    @property
    def running(self) -> int:
        """Requests that hold a lease."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._queue.sequences or self._running or self._outputs.events)

    def queued(self) -> int:
        """Returns about how many prompt tokens are to be computed: of a waiting request, those that are not cached."""
        running = sum(sequence.uncomputed for sequence in self._running.values() if sequence.prefilling)
        ranked = self._queue.rank()
        lacking = sum(sequence.length - hit for sequence, hit in ranked)
        return running + lacking * self.waiting // max(1, len(ranked))

    def add(self, id: str, request: Request, arrived_s: float | None = None, prompt: Encoded | None = None) -> None:
        """Adds a waiting request.

        Args:
            id: names it in events; unique among requests that have not ended.
            request: what to run.
            arrived_s: its arrival time, by the scheduler's clock; None: now.
            prompt: what `Intake.check` returned; None: it is called.

        Raises:
            MainstemError: as `Intake.check`.
        """
        waiting = self._queue.sequences
        assert id not in waiting and id not in self._running
        prompt = self.intake.check(request) if prompt is None else prompt
        request, base = self.versions.place(request, prompt)
        given = (id, request, prompt, self.totals.requests, arrived_s)
        waiting[id] = sequence = self.intake.sequence(*given, self.versions.number, base)
        if self._scores is not None:
            sequence.expect_scores(self._scores)
        self.totals.requests += 1
        self.totals.grammar_requests += request.params.grammar is not None
        self._idle = False
        if self._repeats(sequence):
            return
        for other in self._running.values():
            self._queue.request_checkpoint(other, sequence)
        if sequence.most_cached != 0:
            sequence.prefetch.begin()
        self._sessions.arrived(sequence)

    def _repeats(self, sequence: Sequence) -> bool:
        """Repeats what another engine has said of the answer; returns whether that ends it.

        The request is then like one that was preempted: a prompt and some tokens, of which nothing is computed.
        """
        try:
            for token in sequence.request.said.tolist():
                sequence.repeat(token)
                if (end := self._outputs.token(sequence, token, (), sequence.sampler.ended)) is not None:
                    self._finish(sequence, end)
                    return True
        except Exception as error:  # noqa: BLE001  # it logs
            self._fail(sequence, "cannot be continued", error)
            return True
        return False

    def measure(self) -> None:
        """Times a few forwards, so that the first request knows what it costs not to wait for storage.

        Call it before the first request.
        """
        size, pools = self._cache.page_size, self._cache.pools
        room = min(pool.free * size for name, pool in pools.items() if name != State.name)
        n = min(self._measured, room)
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

    def renew(self, name: str, mode: str, lag: int = 0) -> int:
        """Goes on with other weights, which are in place, and returns the number of their version.

        A running request whose KV may still be used goes on, and what it computes from here on is kept for nobody. Any
        other waits again, and its prompt and the tokens of its answer are computed anew.

        Args:
            name, mode, lag: see `Versions.renew`.
        """
        versions = self.versions
        versions.renew(name, mode, lag)
        for sequence in tuple(self._running.values()):
            if sequence.base in versions.older(sequence.request) and not sequence.loading:
                sequence.renew(versions.number)
            else:
                self._requeue(sequence)
                self.totals.preemptions += 1
        for sequence in self._queue.sequences.values():
            request, base = versions.place(sequence.request, sequence.tokens.encoded())
            sequence.move(request, versions.number, base)
        if self._auditor is not None:
            self._auditor.forget()
        versions.drop()
        self._blocked, self._idle = None, False
        return versions.number

    def cancel(self, id: str) -> None:
        """Ends a request; the next step returns its last event. Does nothing if it has ended."""
        sequence = self._queue.sequences.get(id) or self._running.get(id)
        if sequence is not None:
            self._finish(sequence, End("cancelled"))

    def step(self, now_s: float | None = None) -> list[Event]:
        """Runs at most one forward, and returns all events since the last step, in order.

        Args:
            now_s: the time of the step, the same on all ranks, by the clock of rank 0; None: now.

        Raises:
            RankFailed: a rank has ended, or does not schedule what rank 0 does.
            Exception: with several ranks, any failure of a forward, since the others wait for this rank.
        """
        self._now_s = self._queue.now_s = self._clock() if now_s is None else now_s
        self._rows = self._most_rows
        self._cache.poll(self._now_s, deliver=False)  # the engine delivers events after the step
        self._sessions.poll(self._now_s, self._spare)
        self._yields = self._yield()
        scheduled = self._schedule_running()
        admitted = self._schedule_waiting(
            self._limits.token_budget - sum(n for sequence, n in scheduled if sequence.prefilling)
        )
        again = {sequence.id for sequence, _ in admitted}  # some may have given way to others, and been admitted again
        scheduled = [pair for pair in scheduled if pair[0].id in self._running and pair[0].id not in again] + admitted
        self._drafter.add(sequence for sequence, _ in scheduled)
        self._idle = not scheduled
        if scheduled:
            self._forward(scheduled)
        elif self._auditor is not None and not (self.busy or (self._tiers is not None and self._tiers.busy)):
            self._auditor.poll()
        return self._outputs.take()

    def check(self) -> None:
        """Checks the counts, and that a request waits or runs, with a lease of its own if it runs.

        Raises:
            AssertionError: a rule is broken.
        """
        self.totals.check()
        self._sessions.check()
        self._anchors.check()
        self._replaced.check()
        self.versions.check()
        waiting = self._queue.sequences
        assert not waiting.keys() & self._running.keys(), "a request waits or runs"
        assert len(waiting) + len(self._running) + self.totals.errors <= self.totals.requests, "each was counted"
        assert self._cache.stats(settle=False).leases.open >= len(self._running), "who runs has a lease"

    def close(self) -> None:
        """Ends what was begun for requests that have not come."""
        self._sessions.close()

    def _preempt(self, sequence: Sequence) -> None:
        log.info("request %s is preempted at %d positions", sequence.id, sequence.computed)
        sequence.keep_state()
        self._requeue(sequence)
        self.totals.preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Lets a running request wait again, to be admitted before those that never ran."""
        del self._running[sequence.id]
        sequence.close()
        sequence.was_preempted = True
        sequence.timeline.begin("queue")
        self._queue.sequences[sequence.id] = sequence

    def _schedule_running(self) -> list[tuple[Sequence, int]]:
        """Schedules running requests, with the number of tokens of each: decodes first, then prefills, oldest first.

        Allocates the pages that they need. Where there are none, the newest request is preempted.
        """
        for sequence in tuple(self._running.values()):
            if sequence.prefetch.meets(sequence.computed, loading=sequence.loading):
                self._requeue(sequence)
        for sequence in tuple(self._running.values()):  # a page for the newest token, oldest request first
            self._allocate(sequence, sequence.reserve)
        running = tuple(self._running.values())
        budget = self._limits.token_budget
        scheduled: dict[str, tuple[Sequence, int]] = {}
        for sequence in sorted(running, key=lambda sequence: sequence.prefilling):
            if sequence.prefilling and budget <= 0:
                break
            if self._yields and sequence.lowest:
                continue
            n = self._chunk(sequence, budget)
            if n and self._allocate(sequence, partial(sequence.slide, n)):
                scheduled[sequence.id] = sequence, n
                budget -= n if sequence.prefilling else 0
        return [(sequence, n) for sequence, n in scheduled.values() if sequence.id in self._running]

    def _allocate(self, sequence: Sequence, take: abc.Callable[[], None]) -> bool:
        """Allocates for a running request, preempting the newest ones, at last itself; returns whether it got pages."""
        while sequence.id in self._running:
            try:
                take()
                return True
            except OutOfPages:
                if not self._give_way():
                    self._preempt(next(reversed(self._running.values())))
        return False

    def _yield(self) -> bool:
        """Whether requests that nobody waits for compute nothing in this step, which counts for their share."""
        held, share = (self._running, self._queue.sequences), self._limits.batch_share
        if all(sequence.lowest for each in held for sequence in each.values()):
            return False
        if share:  # else the first request says all, however many wait
            self._shared += any(sequence.lowest for each in held for sequence in each.values())
        return int(self._shared * share) == int((self._shared - 1) * share)

    def _somebody_queues(self) -> bool:
        return not all(sequence.lowest for sequence in self._queue.sequences.values())

    def _give_way(self) -> bool:
        """Preempts the newest running request that nobody waits for; returns whether there was one."""
        newest = next((sequence for sequence in reversed(self._running.values()) if sequence.lowest), None)
        if newest is not None:
            self._preempt(newest)
        return newest is not None

    def _schedule_waiting(self, budget: int) -> list[tuple[Sequence, int]]:
        """Admits requests that can compute something in this step; returns them, and how many tokens each computes."""
        scheduled: list[tuple[Sequence, int]] = []
        if len(self._running) >= self._limits.max_running and self._somebody_queues():
            self._give_way()
        if not self._has_room(budget):
            return scheduled
        ranked = self._queue.rank()
        for sequence, hit in ranked:
            if not self._has_room(budget) or (self._yields and sequence.lowest):
                break
            running = [other for other in self._running.values() if sequence.lowest or not other.lowest]
            again = sequence.most_cached != 0
            if self._queue.is_deferred(sequence, hit, running) or sequence.prefetch.waits(again=again):
                continue
            if self._blocked == (sequence.id, self._room()):
                break
            try:
                self._admit_before_others(sequence, budget)
            except OutOfPages as error:
                if self._running or (self._tiers is not None and self._tiers.copying):
                    self._blocked = (sequence.id, self._room())
                    break
                self._finish(sequence, End("error", error=str(error)))  # nothing runs, so no page will ever be freed
                continue
            for other, _ in ranked:
                self._queue.request_checkpoint(sequence, other)
            if n := self._chunk(sequence, budget):
                scheduled.append((sequence, n))
                budget -= n
        return scheduled

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Returns how many tokens a request computes next; 0: it waits for pages from storage."""
        ahead = sequence.prefetch.ahead(sequence.computed)
        budget = budget if ahead is None else min(budget, ahead)
        if not sequence.scoring:
            return sequence.chunk(budget) if budget > 0 else 0
        most = min(budget, self._rows + sequence.score_from - sequence.computed)
        n = sequence.chunk(most) if most > 0 else 0
        self._rows -= sequence.rows(n) if n else 0
        return n

    def _room(self) -> tuple[int, ...]:
        """Returns the pages and slots that are free or can be evicted, by component."""
        counts = [self._cache.tree.core.counts(row, 0) for row in range(len(self._cache.pools))]
        pools = self._cache.pools.values()
        return tuple(pool.free + present - locked for pool, (present, locked, _) in zip(pools, counts, strict=True))

    def _spare(self) -> int:
        """Returns the pages of the first component that no request needs; none while one waits."""
        if self._queue.sequences:
            return 0
        size, running = self._cache.page_size, self._running.values()
        return self._room()[0] - sum(-(-sequence.tokens.room // size) for sequence in running)

    def _has_room(self, budget: int) -> bool:
        return budget > 0 and len(self._running) < self._limits.max_running

    def _admit_before_others(self, sequence: Sequence, budget: int) -> None:
        """Admits a request in the place of those that nobody waits for, as many as it takes, or raises OutOfPages."""
        while True:
            try:
                return self._admit(sequence, budget)
            except OutOfPages:
                if sequence.lowest or not self._give_way():
                    raise

    def _admit(self, sequence: Sequence, budget: int) -> None:
        """Leases the longest cached prefix and reserves pages for the rest of the prompt, or raises OutOfPages."""
        request = sequence.request
        sequence.timeline.match()
        self.hits.before(sequence)
        lease, load, loaded = self._find(sequence)
        try:
            sequence.open(lease, load, self._queue.plan_checkpoints(sequence, lease), self._cache.page_size)
            sequence.slide(sequence.chunk(budget))
        except OutOfPages:
            sequence.drop()
            raise
        del self._queue.sequences[sequence.id]
        self._running[sequence.id] = sequence
        sequence.timeline.admitted(loads=load is not None)
        first = sequence.admitted_s is None or sequence.prefetch.met
        if self._auditor is not None and first and not sequence.mixed:
            self._auditor.note(request, sequence.tokens.known[: sequence.computed])
        self.hits.admitted(sequence, lease, load, loaded, self._clock())
        sequence.prefetch.begins_to_lead(sequence.computed, loads=load is not None)
        self._outputs.progress(sequence)

    def _find(self, sequence: Sequence) -> tuple[Lease, Load | None, int]:
        """Leases what is cached of a prompt, and loads what the host has of that.

        Returns:
            The lease; the load that is under way; how many tokens of what is cached the host had.
        """
        request = sequence.request
        lease = partial(self._cache.lease, sequence.tokens.key(), request.namespace, priority=request.priority)
        found = lease(most=sequence.most_cached)
        load = self._tiers.load(found) if self._tiers is not None and self._fits(sequence, found) else None
        loaded = 0 if load is None else load.pages * self._cache.page_size
        if self._scores is None or not sequence.scoring:
            return found, load, loaded
        begin = found.hit
        if load is not None:
            load.wait()  # its pages have the scores that say how much of it is used
        most = sequence.find_scores(found, self._scores)
        if most is not None and most < found.hit:
            found.abort()
            found = lease(most=most)
        return found, None, max(0, found.hit - begin)

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
            best = 0 if self._scores is None else self._scores.best
            logits, unscored = keep_scores(scheduled, self._runner.forward(segments), self._ranks, best)
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
                self._finish(sequence, End("error", error=f"{type(error).__name__}: {error}"))
            return
        chosen = {**dict(zip(sampled, choices, strict=True)), **dict.fromkeys(unscored, _NO_CHOICE)}
        for sequence, n in scheduled:
            self.totals.computed_tokens += n + len(sequence.draft)
            if chosen.get(sequence, _NOT_SAMPLED)[0] is None:  # what it has computed is not worth keeping
                self._finish(sequence, End("error", error=NO_LOGITS))
                continue
            was_prefilling = sequence.prefilling
            kept = sequence.advance(n)
            if kept is not None:
                self.totals.checkpoints[kept] += 1
            if self._scores is not None and sequence.scores and not sequence.generated:
                sequence.keep_scores(self._scores)
            if was_prefilling:
                self._outputs.progress(sequence)
            sequence.prefetch.reached(sequence.computed, prefilling=sequence.prefilling)
            if not sequence.prefilling:
                self.hits.settle(sequence)
        for sequence, choices_of in chosen.items():
            if choices_of[0] is None:
                continue
            try:
                if (end := self._outputs.process(sequence, choices_of)) is not None:
                    self._finish(sequence, end)
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
            sequence.prefetch.end()  # what it brings cannot be used either
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

    def _fail(self, sequence: Sequence, what: str, error: Exception) -> None:
        log.exception("request %s %s; ending it", sequence.id, what)
        self._finish(sequence, End("error", error=f"{type(error).__name__}: {error}"))

    def _finish(self, sequence: Sequence, end: End) -> None:
        self._queue.sequences.pop(sequence.id, None)
        self._running.pop(sequence.id, None)
        sequence.prefetch.end()
        self.hits.ended(sequence)
        sequence.close()
        prefixes = sequence.settle(self._cache.retention, self._now_s, end.reason)
        self.totals.errors += end.error is not None
        usage = sequence.usage(self._clock(), prefixes)
        if end.reason in ("stop", "length") and not sequence.mixed:
            self._sessions.ended(sequence, self._now_s)
            self._anchors.ended(sequence, self._now_s)
            self.totals.replaced_prompts += self._replaced.ended(sequence)
        self._outputs.end(sequence, end, usage)
