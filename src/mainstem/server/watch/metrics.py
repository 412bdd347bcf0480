"""Prometheus metrics: the engine's own counters, read at each scrape, and the latencies that the server measures.

Nothing is counted twice: the counts of the engine and the cache are read from `Engine.stats()` at scrape time, and cost
nothing in between. Each `Metrics` has its own registry, so that two servers in one process stay separate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric

from mainstem.cache.explain import Stretch
from mainstem.metric import Metric, rows
from mainstem.runtime.request import Delta, Usage
from mainstem.server.run import Watcher
from mainstem.settings.server import SavingsConfig

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_WAIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_AGE_BUCKETS_S = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

OUTCOMES = ("stop", "length", "cancelled", "error", "refused", "overloaded")
"""The ends of a request: four of a generation, of which `error` may come before it begins, too (500); `refused`
(4xx); or `overloaded` (429 and 503)."""


@dataclass(frozen=True, slots=True)
class SavingStats:
    """The value of the saved time, in joules and in the currency of the price."""

    joules: float
    cost: float

    METRICS: ClassVar = (
        Metric("mainstem_saved_joules", "The saved time, at the power of --watts", "joules"),
        Metric("mainstem_saved_cost", "The saved time, at the price of --price-per-hour", "cost"),
    )  # fmt: skip


class Savings:
    """Values the time that an engine saves.

    Args:
        engine: counts the time that it saved.
        assumed: power and price of time.
    """

    def __init__(self, engine: Engine, assumed: SavingsConfig) -> None:
        self._engine, self._assumed = engine, assumed

    def stats(self) -> SavingStats:
        """Returns the savings since the start; 0 of those without a setting."""
        saved_s, assumed = self._engine.stats().totals.saved_s, self._assumed
        return SavingStats(saved_s * (assumed.watts or 0.0), saved_s * (assumed.price_per_hour or 0.0) / 3600)


class Part(Protocol):
    """A part of a server that counts."""

    def stats(self) -> Any:
        """Returns its statistics, whose class has `METRICS`, as may those in its fields."""


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


class PartsCollector:
    """Turns statistics into metric families at scrape time; nothing is kept between scrapes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yields the metrics of one reading."""
        for part in self._parts:
            whole = part.stats()
            for path, row in rows(whole.__class__):
                stats = attrgetter(path)(whole) if path else whole
                if stats is not None:
                    yield _family(row, stats)


def _family(row: Metric, stats: Any) -> PrometheusMetric:
    kind = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
    family = kind(row.name, row.text, labels=row.labels)
    for labels, path in row.paths.items():
        for keys, number in read(stats, path):
            key = iter(keys)
            family.add_metric([next(key) if label == "*" else label for label in labels], number)
    return family


class Metrics:
    """All metrics of one server.

    Args:
        parts: the engine, and other parts with statistics.
        clock: returns seconds, monotonic; for the time between tokens.

    Attributes:
        reuse: measures how soon something is asked for again.
    """

    def __init__(self, parts: Iterable[Part], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(PartsCollector([*parts]))
        self._requests = Counter("mainstem_requests", "Requests by outcome", ["outcome"], registry=self._registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._latencies = Latencies(
            self._histogram("time_to_first_token", "Time from submit to the first token", _TTFT_BUCKETS_S),
            self._histogram("inter_token_latency", "Time between one token and the next", _TOKEN_BUCKETS_S),
            self._histogram("e2e_request_latency", "Time from submit to the last token", _E2E_BUCKETS_S),
            self._histogram("time_per_output_token", "Mean time of an answer's tokens but the first", _TOKEN_BUCKETS_S),
            self._histogram(
                "storage_wait", "Time that a request waited for storage before it was admitted", _WAIT_BUCKETS_S
            ),
        )
        self.reuse = Reuse(self._registry)
        text = "Requests with a field that is taken and does nothing, by its path"
        self._ignored = Counter("mainstem_ignored_fields", text, ["field"], registry=self._registry)

    def ignored(self, fields: Iterable[str]) -> None:
        """Counts the fields of a request that do nothing, by their paths without indices."""
        for field in fields:
            self._ignored.labels(field).inc()

    def refused(self, status: int) -> None:
        """Counts a request that never reached the engine, by its HTTP status."""
        overloaded, failed = status in (429, 503), status >= 500
        self._requests.labels("overloaded" if overloaded else "error" if failed else "refused").inc()

    def meter(self) -> RequestMeter:
        """Returns a meter for one generation."""
        return RequestMeter(self._clock, self._requests, self._latencies, self.reuse)

    def exposition(self) -> bytes:
        """Returns the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mainstem_{name}_seconds", text, buckets=buckets, registry=self._registry)


class Reuse:
    """Measures, for explained requests, the time from the last use of tokens until they are asked for again.

    Args:
        registry: of the metrics.

    Attributes:
        regret_tokens: prompt tokens that had been evicted.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.regret_tokens = 0
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
    """Histograms of times: to the first token, between tokens, to the last, for each token, for storage."""

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


class RequestMeter(Watcher):
    """Measures one generation. Made by `Metrics.meter`."""

    def __init__(self, clock: Callable[[], float], requests: Counter, latencies: Latencies, reuse: Reuse) -> None:
        super().__init__(self._count)
        self._clock, self._requests, self._latencies, self._reuse = clock, requests, latencies, reuse
        self._last_s: float | None = None

    def see(self, delta: Delta) -> None:
        if delta.tokens:
            now_s, count = self._clock(), len(delta.tokens)
            if self._last_s is not None:
                for _ in range(count):
                    self._latencies.gap.observe((now_s - self._last_s) / count)
            self._last_s = now_s
        super().see(delta)

    def _count(self, finish: str, usage: Usage | None, deltas: Sequence[Delta]) -> None:
        self._requests.labels(finish).inc()
        if usage is not None:
            self._reuse.observe(usage.explanation or ())
            if finish != "cancelled":
                self._latencies.observe(usage)
