"""Prometheus metrics: the engine's own counters, read at each scrape, and the latencies that the server measures.

Nothing is counted twice: the counts of the engine and the cache are read from `Engine.stats()` at scrape time, and cost
nothing in between. Each `Metrics` has its own registry, so that two servers in one process stay separate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mainstem.cache.explain import Stretch
from mainstem.runtime.request import Delta, Usage
from mainstem.settings.server import SavingsConfig
from mainstem.watch.sample import Sample

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.engine_core import EngineStats
    from mainstem.server.kept.answers import Answers, AnswerStats
    from mainstem.server.kept.precompute import Precompute, TurnStats
    from mainstem.server.prefill import Prefills
    from mainstem.server.watch.recording import Recorder, RecordStats
    from mainstem.server.watch.tracing import SpanStats, Tracing

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_WAIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_AGE_BUCKETS_S = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

OUTCOMES = ("stop", "length", "cancelled", "error", "refused", "overloaded")
"""How a request can end: the four ends of a generation, `refused` (4xx), or `overloaded` (429 and 503)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of the table.

    Args:
        name: the client library appends `_total` to the names of counters.
        kind: a counter or a gauge.
        text: its description.
        values: where its value is in the statistics of its part, as a path; with labels, the path for each combination
            of their values. A `*` in both stands for every key of a mapping.
        labels: the names of its labels.
    """

    name: str
    kind: Callable[..., CounterMetricFamily | GaugeMetricFamily]
    text: str
    values: str | Mapping[tuple[str, ...], str]
    labels: tuple[str, ...] = ()

    @property
    def paths(self) -> Mapping[tuple[str, ...], str]:
        """The paths of its values, by the values of its labels."""
        return {(): self.values} if isinstance(self.values, str) else self.values


def _each(path: str, *names: str) -> dict[tuple[str, ...], str]:
    """Returns a path for each of the values of a label, which it contains."""
    return {(name,): path.format(name) for name in names}


COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily

TABLE: Mapping[str, tuple[Row, ...]] = {
    "engine": (
        Row("mainstem_prompt_tokens", COUNTER, "Prompt tokens of admitted requests", "totals.prompt_tokens"),
        Row("mainstem_generation_tokens", COUNTER, "Tokens generated", "totals.generated_tokens"),
        Row("mainstem_drafted_tokens", COUNTER, "Tokens guessed and computed", "totals.drafted_tokens"),
        Row("mainstem_accepted_tokens", COUNTER, "Guessed tokens that were right", "totals.accepted_tokens"),
        Row("mainstem_preemptions", COUNTER, "Running requests preempted to free pages", "totals.preemptions"),
        Row("mainstem_cached_tokens", COUNTER, "Prompt tokens found in the cache, by tier",
            _each("totals.{}_tokens", "device", "host", "storage"), ("tier",)),
        Row("mainstem_prompt_checkpoints", COUNTER, "Recurrent states kept at planned positions of prompts, by reason",
            {("*",): "totals.checkpoints.*"}, ("reason",)),
        Row("mainstem_session_prefetches", COUNTER, "Sessions to be brought to the device ahead, by what came of it",
            {("*",): "totals.session_prefetches.*"}, ("outcome",)),
        Row("mainstem_misses_tokens", COUNTER, "Prompt tokens computed, by cause; only with --explain",
            {("*",): "totals.missed.*"}, ("cause",)),
        Row("mainstem_saved_flops", COUNTER, "Floating-point operations of computing what was cached",
            "totals.saved_flops"),
        Row("mainstem_saved_seconds", COUNTER, "Estimated time of computing what was cached", "totals.saved_s"),
        Row("mainstem_stateless_tokens", COUNTER,
            "Prompt tokens computed again: their KV was cached, but no state or window", "totals.stateless_tokens"),
        Row("mainstem_grammar_requests", COUNTER, "Requests with a grammar", "totals.grammar_requests"),
        Row("mainstem_compiled_grammars", COUNTER, "Grammars compiled; the others were cached", "compiled_grammars"),
        Row("mainstem_requests_running", GAUGE, "Running requests", "running"),
        Row("mainstem_requests_waiting", GAUGE, "Waiting requests", "waiting"),
        Row("mainstem_adapters", GAUGE, "Loaded LoRA adapters", "adapters"),
    ),
    "engine.cache": (
        Row("mainstem_prefix_cache_queries_tokens", COUNTER, "Prompt tokens looked up in the cache", "leases.queried"),
        Row("mainstem_prefix_cache_hits_tokens", COUNTER, "Prompt tokens found in the cache", "leases.hit"),
        Row("mainstem_evicted_pages", COUNTER, "Pages evicted from the cache", "tree.evicted_pages"),
        Row("mainstem_checkpoints", COUNTER, "Checkpoints of recurrent states added to the cache",
            "leases.checkpoints"),
        Row("mainstem_checkpoints_missed", COUNTER, "Checkpoints not kept because no slot was free",
            "leases.checkpoints_missed"),
        Row("mainstem_kv_pages", GAUGE, "Pages of the KV pool, by owner",
            _each("pool.{}", "free", "cached", "private"), ("owner",)),
        Row("mainstem_pool_pages", GAUGE, "Pages or slots of each component's pool, by owner; cached includes locked",
            {("*", owner): f"pools.*.{owner}" for owner in ("free", "cached", "private", "locked", "total")},
            ("component", "owner")),
        Row("mainstem_retained_pages", GAUGE, "Pages or slots of each component that are retained, by tier",
            {("*", tier): f"retention.{tier}.*" for tier in ("device", "host")}, ("component", "tier")),
        Row("mainstem_retained_prefixes", GAUGE, "Prefixes that are retained for a time or pinned",
            "retention.prefixes"),
    ),
    "engine.tiers": (
        Row("mainstem_host_pages", GAUGE, "Pages or slots of each component on the host, by owner",
            {("*", owner): f"host_pools.*.{owner}" for owner in ("free", "cached", "private", "total")},
            ("component", "owner")),
        Row("mainstem_moved_pages", COUNTER, "Pages moved between tiers",
            {
                ("device", "host"): "backed_up",
                ("host", "device"): "loaded",
                ("storage", "host"): "prefetched",
                ("host", "storage"): "stored",
            }, ("from", "to")),
        Row("mainstem_dropped_pages", COUNTER, "Pages that were not moved, by reason",
            _each("{}", "backup_failed", "backup_skipped", "load_failed", "load_skipped", "prefetch_dropped",
                  "write_dropped"), ("reason",)),
        Row("mainstem_late_pages", COUNTER, "Pages computed although storage has (or may have) them, by cause",
            {("*",): "late.*"}, ("cause",)),
        Row("mainstem_prefetch_short_pages", COUNTER, "Pages in storage that a component kept from being used",
            {("*",): "prefetch_short.*"}, ("component",)),
        Row("mainstem_storage_faults", COUNTER, "Storage faults, by cause", {("*",): "faults.*"}, ("cause",)),
        Row("mainstem_peer_requests", COUNTER, "Requests of other engines for pages, by outcome",
            {("*",): "peer_requests.*"}, ("outcome",)),
        Row("mainstem_peer_given_bytes", COUNTER, "Bytes of pages given to other engines", "peer_given_bytes"),
        Row("mainstem_peer_faults", COUNTER, "Times that other engines did not give what was asked, by cause",
            {("*",): "peer_faults.*"}, ("cause",)),
        Row("mainstem_storage_queued_pages", GAUGE, "Pages waiting for a write to storage", "queued"),
        Row("mainstem_storage_breaker_open", GAUGE, "Whether the breaker stops calls to storage", "breaker_open"),
    ),
    "engine.vision": (
        Row("mainstem_image_encoder_runs", COUNTER, "Images encoded", "encoder_runs"),
        Row("mainstem_image_embedding_hits", COUNTER, "Images whose embeddings were still cached", "hits"),
        Row("mainstem_image_embeddings_bytes", GAUGE, "Size of cached image embeddings", "bytes"),
    ),
    "engine.events": (
        Row("mainstem_kv_events", COUNTER, "KV events published", "published"),
        Row("mainstem_kv_events_queued", GAUGE, "KV events that wait to be sent", "queued"),
        Row("mainstem_kv_event_replays", COUNTER, "Requests of routers for KV events that they missed", "replays"),
        Row("mainstem_kv_events_dropped_pages", COUNTER,
            "Pages that moved without a KV event: everything was published anew", "dropped"),
    ),
    "recorder": (
        Row("mainstem_recorded_requests", COUNTER, "Requests to be recorded, by outcome",
            _each("{}", "written", "dropped", "failed"), ("outcome",)),
    ),
    "answers": (
        Row("mainstem_answers_remembered", COUNTER, "Answers whose tokens were kept", "remembered"),
        Row("mainstem_answers_found", COUNTER, "Answers found again in prompts", "found"),
        Row("mainstem_answer_tokens", COUNTER, "Tokens of the answers found again", "tokens"),
        Row("mainstem_answers_bytes", GAUGE, "Size of the answers that are kept", "bytes"),
    ),
    "turns": (
        Row("mainstem_precomputed_turns", COUNTER, "Next turns that could be computed, by outcome",
            _each("{}", "started", "unchanged", "skipped"), ("outcome",)),
    ),
    "savings": (
        Row("mainstem_saved_joules", COUNTER, "The saved time, at the power of --watts", "joules"),
        Row("mainstem_saved_cost", COUNTER, "The saved time, at the price of --price-per-hour", "cost"),
    ),
    "prefills": (
        Row("mainstem_prefills", COUNTER, "Requests whose prompts were to be computed elsewhere, by what came of it",
            {("*",): "*"}, ("outcome",)),
    ),
    "spans": (
        Row("mainstem_spans", COUNTER, "Spans of requests for the collector of traces, by outcome",
            _each("{}", "sent", "failed", "dropped"), ("outcome",)),
    ),
}  # fmt: skip
"""What is read at a scrape, by the part of the `Readings` that has it. A part that is None has no metrics."""


@dataclass(frozen=True, slots=True)
class SavingStats:
    """What the saved time is worth, in joules and in the currency of the price."""

    joules: float
    cost: float


class Savings:
    """Values the time that an engine saves.

    Args:
        engine: whose time.
        assumed: what time is worth.
    """

    def __init__(self, engine: Engine, assumed: SavingsConfig) -> None:
        self._engine, self._assumed = engine, assumed

    def stats(self) -> SavingStats:
        """Returns what was saved since the start; 0 of what nothing is assumed."""
        saved_s, assumed = self._engine.stats().totals.saved_s, self._assumed
        return SavingStats(saved_s * (assumed.watts or 0.0), saved_s * (assumed.price_per_hour or 0.0) / 3600)


@dataclass(frozen=True, slots=True)
class Readings:
    """The statistics that one scrape reads; None: there is no such part."""

    engine: EngineStats
    recorder: RecordStats | None = None
    answers: AnswerStats | None = None
    turns: TurnStats | None = None
    spans: SpanStats | None = None
    savings: SavingStats | None = None
    prefills: Mapping[str, int] | None = None


def read(stats: object, path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yields the numbers at a path, each with the keys that its `*` stand for."""
    first, _, rest = path.partition(".")
    for key, value in _at(stats, first):
        if rest:
            yield from ((key + keys, number) for keys, number in read(value, rest))
        else:
            yield key, float(value)


def _at(stats: Any, name: str) -> list[tuple[tuple[str, ...], Any]]:
    return [((key,), value) for key, value in stats.items()] if name == "*" else [((), getattr(stats, name))]


class TableCollector:
    """Turns the statistics into metric families at scrape time, by the table.

    Args:
        sources: return the statistics of each part of the `Readings`; nothing is kept between scrapes.
    """

    def __init__(self, sources: Mapping[str, Callable[[], Any]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of one reading."""
        readings = Readings(**{part: read() for part, read in self._sources.items()})
        for part, rows in TABLE.items():
            stats = attrgetter(part)(readings)
            for row in rows if stats is not None else ():
                family = row.kind(row.name, row.text, labels=row.labels)
                for labels, path in row.paths.items():
                    for keys, number in read(stats, path):
                        found = iter(keys)
                        family.add_metric([next(found) if label == "*" else label for label in labels], number)
                yield family


class Metrics:
    """All metrics of one server.

    Args:
        engine: the engine whose statistics are exported.
        clock: returns seconds, monotonic; for the time between tokens.
        recorder, answers, turns, spans, savings, prefills: whose counts are exported, too, if there are any.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
        answers: Answers | None = None,
        turns: Precompute | None = None,
        spans: Tracing | None = None,
        savings: Savings | None = None,
        prefills: Prefills | None = None,
    ) -> None:
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        parts: dict[str, Any] = {"engine": engine, "recorder": recorder, "answers": answers}
        parts |= {"turns": turns, "spans": spans, "savings": savings, "prefills": prefills}
        sources = {name: part.stats for name, part in parts.items() if part is not None}
        self._registry.register(TableCollector(sources))
        self._requests = Counter("mainstem_requests", "Requests by outcome", ["outcome"], registry=self._registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._ttft = self._histogram("time_to_first_token", "Time from submit to the first token", _TTFT_BUCKETS_S)
        self._gap = self._histogram("inter_token_latency", "Time between one token and the next", _TOKEN_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency", "Time from submit to the last token", _E2E_BUCKETS_S)
        self._tpot = self._histogram(
            "time_per_output_token", "Mean time of an answer's tokens but the first", _TOKEN_BUCKETS_S
        )
        self._wait = self._histogram(
            "storage_wait", "Time that a request waited for storage before it was admitted", _WAIT_BUCKETS_S
        )
        self._reuse = Reuse(self._registry)
        text = "Requests with a field that is taken and does nothing, by its path"
        self._ignored = Counter("mainstem_ignored_fields", text, ["field"], registry=self._registry)

    def ignored(self, fields: Iterable[str]) -> None:
        """Counts the fields of a request that do nothing, by their paths without indices."""
        for field in fields:
            self._ignored.labels(field).inc()

    def refused(self, status: int) -> None:
        """Counts a request that never reached the engine, by its HTTP status."""
        self._requests.labels("overloaded" if status in (429, 503) else "refused").inc()

    def meter(self) -> RequestMeter:
        """Returns a meter for one generation."""
        latencies = Latencies(self._ttft, self._gap, self._e2e, self._tpot, self._wait)
        return RequestMeter(self._clock, self._requests, latencies, self._reuse)

    def exposition(self) -> bytes:
        """Returns the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def sample(self, at_s: float) -> Sample:
        """Returns every value as it is now."""
        found = [one for family in self._registry.collect() for one in family.samples]
        return Sample(at_s, {(one.name, frozenset(one.labels.items())): one.value for one in found})

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mainstem_{name}_seconds", text, buckets=buckets, registry=self._registry)


class Reuse:
    """Measures how long after its last use something is asked for again, found or evicted since; of explained requests.

    Args:
        registry: of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Prompt tokens that had been evicted, by the tier that they left and why; only with --explain"
        self._tokens = Counter("mainstem_regret_tokens", text, ["tier", "why"], registry=registry)
        text = "Time from an eviction until it was asked for again"
        self._gone = Histogram("mainstem_regret_seconds", text, buckets=_AGE_BUCKETS_S, registry=registry)
        text = "How long what was asked for again had not been used when it was evicted"
        self._idle = Histogram("mainstem_regret_idle_seconds", text, buckets=_AGE_BUCKETS_S, registry=registry)
        text = (
            "Time from one use to the next of what was found, and of what was evicted in between; only with --explain"
        )
        self._gap = Histogram("mainstem_reuse_seconds", text, ["outcome"], buckets=_AGE_BUCKETS_S, registry=registry)
        for outcome in ("found", "evicted"):
            self._gap.labels(outcome)

    def observe(self, stretches: Iterable[Stretch]) -> None:
        """Takes one request into account."""
        for each in stretches:
            if each.tier is not None and each.idle_s is not None:
                self._gap.labels("found").observe(each.idle_s)
            if each.eviction is not None and each.cause is not None:
                self._tokens.labels(each.eviction.tier, each.eviction.why).inc(each.end - each.begin)
                ago_s, idle_s = each.eviction.ago_s, each.eviction.idle_s
                for histogram, seconds in ((self._gone, ago_s), (self._idle, idle_s)):
                    if seconds is not None:
                        histogram.observe(seconds)
                if ago_s is not None and idle_s is not None:
                    self._gap.labels("evicted").observe(ago_s + idle_s)


@dataclass(frozen=True, slots=True)
class Latencies:
    """The histograms of one request: to the first token, from token to token, to the last, a token, for storage."""

    ttft: Histogram
    gap: Histogram
    e2e: Histogram
    per_token: Histogram
    storage: Histogram

    def observe(self, usage: Usage) -> None:
        """Takes a request into account that has ended."""
        if usage.completion_tokens:
            self.ttft.observe(usage.ttft_s)
            self.e2e.observe(usage.duration_s)
        if usage.completion_tokens > 1:
            self.per_token.observe((usage.duration_s - usage.ttft_s) / (usage.completion_tokens - 1))
        asked_s = next((phase.begin_s for phase in usage.phases if phase.stage == "prefetch"), None)
        if asked_s is not None:  # it may go on while the prompt is computed
            ended_s = max(phase.end_s for phase in usage.phases if phase.stage == "prefetch")
            self.storage.observe(max(min(ended_s, usage.queue_s) - asked_s, 0.0))


class RequestMeter:
    """Watches the events of one generation. Made by `Metrics.meter`."""

    def __init__(self, clock: Callable[[], float], requests: Counter, latencies: Latencies, reuse: Reuse) -> None:
        self._clock = clock
        self._requests = requests
        self._latencies, self._reuse = latencies, reuse
        self._last_s: float | None = None
        self._ended = False

    def see(self, delta: Delta) -> None:
        """Takes one event into account."""
        if delta.tokens:
            self._tokens(len(delta.tokens))
        if delta.finish_reason is not None:
            self._end(delta.finish_reason)
            if delta.usage is not None:
                self._reuse.observe(delta.usage.explanation or ())
            if delta.usage is not None and delta.finish_reason != "cancelled":
                self._latencies.observe(delta.usage)

    def close(self) -> None:
        """Ends the watch: without a last event the generation counts as cancelled. A second call does nothing."""
        self._end("cancelled")

    def _tokens(self, count: int) -> None:
        now_s = self._clock()
        if self._last_s is not None:
            for _ in range(count):
                self._latencies.gap.observe((now_s - self._last_s) / count)
        self._last_s = now_s

    def _end(self, outcome: str) -> None:
        if not self._ended:
            self._requests.labels(outcome).inc()
        self._ended = True
