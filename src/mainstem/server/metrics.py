"""Prometheus metrics: the engine's own counters, read at each scrape, and the latencies that the server measures.

Nothing is counted twice: the counts of the engine and the cache are read from `Engine.stats()` at scrape time, and cost
nothing in between. Each `Metrics` has its own registry, so that two servers in one process stay separate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mainstem.cache import PoolStats
from mainstem.runtime.request import Delta
from mainstem.tiers.controller import TierStats

if TYPE_CHECKING:
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.vision import VisionStats
    from mainstem.server.recording import Recorder

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

OUTCOMES = ("stop", "length", "cancelled", "error", "refused", "overloaded")
"""How a request can end: the four ends of a generation, `refused` (4xx), or `overloaded` (429 and 503)."""


class EngineCollector:
    """Turns one `EngineStats` into metric families at scrape time.

    Args:
        engine: the engine whose statistics are read; nothing is kept between scrapes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of one reading. The client library appends `_total` to the names of counters."""
        stats = self._engine.stats()
        cache = stats.cache
        counters = {
            "mainstem_prompt_tokens": ("Prompt tokens of admitted requests", stats.prompt_tokens),
            "mainstem_generation_tokens": ("Tokens generated", stats.generated_tokens),
            "mainstem_preemptions": ("Running requests preempted to free pages", stats.preemptions),
            "mainstem_prefix_cache_queries_tokens": ("Prompt tokens looked up in the cache", cache.queried),
            "mainstem_prefix_cache_hits_tokens": ("Prompt tokens found in the cache", cache.hit),
            "mainstem_evicted_pages": ("Pages evicted from the cache", cache.evicted_pages),
            "mainstem_checkpoints": ("Checkpoints of recurrent states added to the cache", cache.checkpoints),
            "mainstem_checkpoints_missed": ("Checkpoints not kept because no slot was free", cache.checkpoints_missed),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily("mainstem_requests_running", "Running requests", value=stats.running)
        yield GaugeMetricFamily("mainstem_requests_waiting", "Waiting requests", value=stats.waiting)
        kv_pages = GaugeMetricFamily("mainstem_kv_pages", "Pages of the KV pool, by owner", labels=["owner"])
        owners = {"free": cache.free_pages, "cached": cache.cached_pages, "private": cache.private_pages}
        for owner, count in owners.items():
            kv_pages.add_metric([owner], count)
        yield kv_pages
        yield _pools(cache.pools)
        yield GaugeMetricFamily("mainstem_adapters", "Loaded LoRA adapters", value=stats.adapters)
        tiers = CounterMetricFamily(
            "mainstem_cached_tokens", "Prompt tokens found in the cache, by tier", labels=["tier"]
        )
        off_device = stats.host_tokens + stats.storage_tokens
        for tier, count in (
            ("device", stats.cached_tokens - off_device),
            ("host", stats.host_tokens),
            ("storage", stats.storage_tokens),
        ):
            tiers.add_metric([tier], count)
        yield tiers
        if stats.tiers is not None:
            yield from _tier_metrics(stats.tiers)
        if stats.vision is not None:
            yield from _vision_metrics(stats.vision)


def _pools(pools: Mapping[str, PoolStats]) -> Metric:
    family = GaugeMetricFamily(
        "mainstem_pool_pages",
        "Pages or slots of each component's pool, by owner; cached includes locked",
        labels=["component", "owner"],
    )
    for component, pool in pools.items():
        for owner in ("free", "cached", "private", "locked", "total"):
            family.add_metric([component, owner], getattr(pool, owner))
    return family


def _vision_metrics(vision: VisionStats) -> Iterator[Metric]:
    yield CounterMetricFamily("mainstem_image_encoder_runs", "Images encoded", value=vision.encoder_runs)
    yield CounterMetricFamily(
        "mainstem_image_embedding_hits", "Images whose embeddings were still cached", value=vision.hits
    )
    yield GaugeMetricFamily("mainstem_image_embeddings_bytes", "Size of cached image embeddings", value=vision.bytes)


def _tier_metrics(tiers: TierStats) -> Iterator[Metric]:
    host = GaugeMetricFamily("mainstem_host_pages", "Pages of the host tier, by owner", labels=["owner"])
    owners = {"free": tiers.host_free, "cached": tiers.host_cached, "private": tiers.host_private}
    for owner, count in owners.items():
        host.add_metric([owner], count)
    yield host
    moved = CounterMetricFamily("mainstem_moved_pages", "Pages moved between tiers", labels=["from", "to"])
    moved.add_metric(["device", "host"], tiers.backed_up)
    moved.add_metric(["host", "device"], tiers.loaded)
    moved.add_metric(["storage", "host"], tiers.prefetched)
    moved.add_metric(["host", "storage"], tiers.stored)
    yield moved
    dropped = CounterMetricFamily("mainstem_dropped_pages", "Pages that were not moved, by reason", labels=["reason"])
    for reason in (
        "backup_failed", "backup_skipped", "load_failed", "load_skipped", "prefetch_dropped", "write_dropped",
    ):  # fmt: skip
        dropped.add_metric([reason], getattr(tiers, reason))
    yield dropped
    late = CounterMetricFamily(
        "mainstem_late_pages", "Pages computed although storage has (or may have) them, by cause", labels=["cause"]
    )
    for cause, count in tiers.late.items():
        late.add_metric([cause], count)
    yield late
    faults = CounterMetricFamily("mainstem_storage_faults", "Storage faults, by cause", labels=["cause"])
    for cause, count in sorted(tiers.faults.items()):
        faults.add_metric([cause], count)
    yield faults
    yield GaugeMetricFamily("mainstem_storage_queued_pages", "Pages waiting for a write to storage", value=tiers.queued)
    yield GaugeMetricFamily(
        "mainstem_storage_breaker_open", "Whether the breaker stops calls to storage", value=int(tiers.breaker_open)
    )


class RecorderCollector:
    """Turns the counts of a recorder into a metric family at scrape time.

    Args:
        recorder: the recorder whose counts are read.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of one reading."""
        stats = self._recorder.stats()
        family = CounterMetricFamily(
            "mainstem_recorded_requests", "Requests to be recorded, by outcome", labels=["outcome"]
        )
        for outcome in ("written", "dropped", "failed"):
            family.add_metric([outcome], getattr(stats, outcome))
        yield family


class Metrics:
    """All metrics of one server.

    Args:
        engine: the engine whose statistics are exported.
        clock: returns seconds, monotonic; for the time between tokens.
        recorder: the recorder whose counts are exported, if there is one.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.monotonic, recorder: Recorder | None = None
    ) -> None:
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(engine))
        if recorder is not None:
            self._registry.register(RecorderCollector(recorder))
        self._requests = Counter("mainstem_requests", "Requests by outcome", ["outcome"], registry=self._registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._ttft = self._histogram("time_to_first_token", "Time from submit to the first token", _TTFT_BUCKETS_S)
        self._gap = self._histogram("inter_token_latency", "Time between one token and the next", _TOKEN_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency", "Time from submit to the last token", _E2E_BUCKETS_S)

    def refused(self, status: int) -> None:
        """Counts a request that never reached the engine, by its HTTP status."""
        self._requests.labels("overloaded" if status in (429, 503) else "refused").inc()

    def meter(self) -> RequestMeter:
        """Returns a meter for one generation."""
        return RequestMeter(self._clock, self._requests, self._ttft, self._gap, self._e2e)

    def exposition(self) -> bytes:
        """Returns the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mainstem_{name}_seconds", text, buckets=buckets, registry=self._registry)


class RequestMeter:
    """Watches the events of one generation. Made by `Metrics.meter`."""

    def __init__(
        self, clock: Callable[[], float], requests: Counter, ttft: Histogram, gap: Histogram, e2e: Histogram
    ) -> None:
        self._clock = clock
        self._requests = requests
        self._ttft = ttft
        self._gap = gap
        self._e2e = e2e
        self._last_s: float | None = None
        self._ended = False

    def see(self, delta: Delta) -> None:
        """Takes one event into account."""
        if delta.tokens:
            self._tokens(len(delta.tokens))
        if delta.finish_reason is not None:
            self._end(delta.finish_reason)
            if delta.usage is not None and delta.usage.completion_tokens:
                self._ttft.observe(delta.usage.ttft_s)
                self._e2e.observe(delta.usage.duration_s)

    def close(self) -> None:
        """Ends the watch: without a last event the generation counts as cancelled. A second call does nothing."""
        self._end("cancelled")

    def _tokens(self, count: int) -> None:
        now_s = self._clock()
        if self._last_s is not None:
            for _ in range(count):
                self._gap.observe((now_s - self._last_s) / count)
        self._last_s = now_s

    def _end(self, outcome: str) -> None:
        if not self._ended:
            self._requests.labels(outcome).inc()
        self._ended = True
