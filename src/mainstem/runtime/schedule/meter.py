"""The counters of a scheduler, and the times of its forwards, from which prefill times are estimated."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from mainstem.metric import Metric, each
from mainstem.runtime.schedule.checkpoints import Reason
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.tiers.costs import PrefillCost


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of a prefill.

    Args:
        token: of a token, whatever it attends to.
        pair: of each position that a token attends to, over all layers.
    """

    token: float = 0.0
    pair: float = 0.0

    def of(self, tokens: int) -> float:
        """Returns those of the first tokens of a prompt."""
        return self.token * tokens + self.pair * tokens * (tokens + 1) / 2


NO_FLOPS = Flops()


@dataclass
class Totals:
    """Counters since the start.

    Args:
        requests: added.
        prompt_tokens: of the requests admitted.
        cached_tokens: prompt tokens that were in the cache at the first admission.
        host_tokens, storage_tokens: cached tokens that were on the host; in storage.
        computed_tokens: all that went through the model.
        generated_tokens: sampled.
        drafted_tokens: computed as a guess, see `drafts`; and those of them that were right: accepted_tokens.
        preemptions: times a running request was preempted.
        errors: requests that ended with an error.
        stateless_tokens: prompt tokens computed although full attention had them: no state or window was kept there.
        grammar_requests: added with a grammar.
        checkpoints: states kept at planned positions of prompts, by reason.
        missed: prompt tokens that were computed, by cause, of prompts that are settled (`hits`); none unless misses are
            explained.
        saved_flops, saved_s: operations, and the estimated time, of computing what was cached.
        session_prefetches: sessions that were to be brought up, by what came of it; see `sessions`.
        anchors: prefixes that sessions were seen to share, and sessions that came to one; see `anchors`.
        replaced_prompts: earlier prompts that are evicted first, since a summary has replaced them; see `replaced`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    errors: int = 0
    stateless_tokens: int = 0
    grammar_requests: int = 0
    checkpoints: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(Reason), 0))
    session_prefetches: dict[str, int] = field(default_factory=dict)
    anchors: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    replaced_prompts: int = 0
    saved_flops: float = 0.0
    saved_s: float = 0.0

    def check(self) -> None:
        """Checks what no count may exceed.

        Raises:
            AssertionError: a rule is broken.
        """
        kept = (self.checkpoints, self.session_prefetches, self.anchors, self.missed)
        values = [value for value in vars(self).values() if not isinstance(value, dict)]
        assert min([0, *values, *(n for counts in kept for n in counts.values())]) == 0, "a count is below 0"
        assert self.cached_tokens <= self.prompt_tokens, "cached_tokens <= prompt_tokens"
        assert self.host_tokens + self.storage_tokens <= self.cached_tokens, "host + storage <= cached"
        assert self.accepted_tokens <= self.drafted_tokens, "accepted_tokens <= drafted_tokens"
        assert max(self.errors, self.grammar_requests) <= self.requests, "errors, grammar_requests <= requests"
        assert self.cached_tokens + sum(self.missed.values()) <= self.prompt_tokens, "cached + missed <= prompt"

    METRICS: ClassVar = (
        Metric("mainstem_prompt_tokens", "Prompt tokens of admitted requests", "prompt_tokens"),
        Metric("mainstem_generation_tokens", "Tokens generated", "generated_tokens"),
        Metric("mainstem_drafted_tokens", "Tokens guessed and computed", "drafted_tokens"),
        Metric("mainstem_accepted_tokens", "Guessed tokens that were right", "accepted_tokens"),
        Metric("mainstem_preemptions", "Running requests preempted to free pages", "preemptions"),
        Metric("mainstem_cached_tokens", "Prompt tokens found in the cache, by tier",
            each("{}_tokens", "device", "host", "storage"), ("tier",)),
        Metric("mainstem_prompt_checkpoints", "Recurrent states kept at planned positions of prompts, by reason",
            {("*",): "checkpoints.*"}, ("reason",)),
        Metric("mainstem_session_prefetches", "Sessions to be brought to the device ahead, by what came of it",
            {("*",): "session_prefetches.*"}, ("outcome",)),
        Metric("mainstem_shared_prefixes", "Prefixes that sessions share: those found, and sessions counted at them",
            {("*",): "anchors.*"}, ("event",)),
        Metric("mainstem_replaced_prompts", "Prompts that are evicted first, since a summary has replaced them",
            "replaced_prompts"),
        Metric("mainstem_misses_tokens", "Prompt tokens computed, by cause; only with --explain", {("*",): "missed.*"},
            ("cause",)),
        Metric("mainstem_saved_flops", "Floating-point operations of computing what was cached", "saved_flops"),
        Metric("mainstem_saved_seconds", "Estimated time of computing what was cached", "saved_s"),
        Metric("mainstem_stateless_tokens", "Prompt tokens computed again: their KV was cached, but no state or window",
            "stateless_tokens"),
        Metric("mainstem_grammar_requests", "Requests with a grammar", "grammar_requests"),
    )  # fmt: skip

    def copy(self) -> Totals:
        """Returns the counts as they are at one moment, so that differences of them never go back. For any thread."""
        counts: dict[str, Any] = vars(self).copy()  # at once: no other thread runs meanwhile
        for name in ("checkpoints", "session_prefetches", "anchors", "missed"):
            counts[name] = dict(counts[name])
        return Totals(**counts)

    @property
    def device_tokens(self) -> int:
        """Cached tokens that were on the device."""
        return self.cached_tokens - self.host_tokens - self.storage_tokens


class Meter:
    """Measures forwards.

    On a GPU, a forward that samples nothing may still run when the call returns. Its time is measured together with
    that of the next forward that samples.

    Args:
        prefill: learns from the measurements.
        clock: monotonic, in seconds.
    """

    def __init__(self, prefill: PrefillCost, clock: abc.Callable[[], float]) -> None:
        self._prefill, self._clock = prefill, clock
        self._parts: list[tuple[int, int]] = []  # tokens of each sequence, and the positions before them
        self._began_s = 0.0

    def begin(self, scheduled: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Begins to measure a forward over these sequences, each with its number of tokens."""
        if not self._parts:
            self._began_s = self._clock()
        if any(sequence.loading for sequence, _ in scheduled):
            self.drop()  # it also waits for pages
        elif any(sequence.prefilling for sequence, _ in scheduled):
            self._parts += [(n, sequence.computed) for sequence, n in scheduled]

    def end(self) -> None:
        """Takes the time: the forward has ended."""
        self._prefill.observe(self._parts, self._clock() - self._began_s)
        self.drop()

    def drop(self) -> None:
        """Forgets what was begun."""
        self._parts = []
