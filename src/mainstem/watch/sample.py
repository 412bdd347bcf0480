"""The metrics of servers at a moment, and between two moments.

A `Sample` is one scrape in Prometheus' text format. A `Window` is the time between two of them; its rates and quantiles
are those of PromQL (`rate` without extrapolation, `histogram_quantile`).
https://prometheus.io/docs/prometheus/latest/querying/functions/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

from prometheus_client.parser import text_string_to_metric_families

from mainstem.errors import MainstemError

Key = tuple[str, frozenset[tuple[str, str]]]
"""The name of a series and its labels."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape, or the sum of several servers'.

    Args:
        at_s: when, in seconds of the caller's clock.
        values: the value of each series.
    """

    at_s: float
    values: Mapping[Key, float]

    @classmethod
    def parse(cls, text: str, at_s: float) -> Sample:
        """Reads the text of a scrape.

        Raises:
            MainstemError: it is not in Prometheus' format, or has no metric of Mainstem.
        """
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            raise MainstemError(f"no metrics in Prometheus' format: {error}") from error
        values = {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}
        if not any(name.startswith("mainstem_") for name, _ in values):
            raise MainstemError("no metrics of Mainstem")
        return cls(at_s, values)

    @classmethod
    def of_all(cls, samples: Iterable[Sample]) -> Sample:
        """Returns the sum of the samples of several servers, taken at about the same time."""
        listed = list(samples)
        total: dict[Key, float] = {}
        for sample in listed:
            for key, value in sample.values.items():
                total[key] = total.get(key, 0.0) + value
        return cls(max((sample.at_s for sample in listed), default=0.0), total)

    def total(self, name: str, **labels: str) -> float | None:
        """Returns the sum of the series with this name and these labels; None: there is none."""
        wanted = labels.items()
        found = [value for (key, have), value in self.values.items() if key == name and wanted <= have]
        return math.fsum(found) if found else None

    def since(self, earlier: Sample) -> Sample:
        """Returns how much each series grew. One that fell began anew, at 0, when its server was restarted."""
        grown = {}
        for key, value in self.values.items():
            before = earlier.values.get(key, 0.0)
            grown[key] = value - before if value >= before else value
        return Sample(self.at_s, grown)


@dataclass(frozen=True, slots=True)
class Window:
    """The time between two scrapes.

    Args:
        now: the later one.
        growth: what came since the earlier one.
        seconds: between them, above 0.
    """

    now: Sample
    growth: Sample
    seconds: float

    @classmethod
    def between(cls, earlier: Sample, later: Sample) -> Window:
        """Returns the time between two scrapes of the same servers."""
        return cls(later, later.since(earlier), max(later.at_s - earlier.at_s, 1e-9))

    def gauge(self, name: str, **labels: str) -> float | None:
        """Returns a value as it is now."""
        return self.now.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float | None:
        """Returns how much a counter grew, per second."""
        grown = self.growth.total(name, **labels)
        return None if grown is None else grown / self.seconds

    def quantile(self, name: str, q: float) -> float | None:
        """Returns a quantile of a histogram's new observations, in its unit; None: there is none.

        Linear within a bucket, whose lowest begins at 0; beyond the last bound, that bound.
        """
        buckets = sorted(
            (float(dict(labels)["le"]), count)
            for (key, labels), count in self.growth.values.items()
            if key == f"{name}_bucket"
        )
        if not buckets or buckets[-1][1] <= 0:
            return None
        rank = q * buckets[-1][1]
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= rank and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            low, below = (low if math.isinf(bound) else bound), count
        return low


def ratio(part: float | None, whole: float | None) -> float | None:
    """Returns a part of a whole; None: one of them is unknown, or the whole is 0."""
    return None if part is None or not whole else part / whole


@dataclass(frozen=True, slots=True)
class Measure:
    """One number that is shown.

    Args:
        name: of the field in JSON; it ends in the unit: `_s`, `_per_s`, `_ratio`, or nothing for a count.
        title: in a table.
        of: computes it; None: the server has nothing of the kind, or nothing happened.
        grows: whether it counts events, and so has a total since the start; else it is the state of a moment.
    """

    name: str
    title: str
    of: Callable[[Window], float | None]
    grows: bool = True

    @property
    def total_name(self) -> str:
        """The name of its total."""
        return self.name.removesuffix("_per_s")


_rate, _gauge, _quantile = (partial(methodcaller, name) for name in ("rate", "gauge", "quantile"))


def _found(**labels: str) -> Callable[[Window], float | None]:
    """The part of the new prompt tokens that was found in the cache."""
    cached, prompt = "mainstem_cached_tokens_total", "mainstem_prompt_tokens_total"
    return lambda window: ratio(window.growth.total(cached, **labels), window.growth.total(prompt))


def _part(metric: str, *owners: str) -> Callable[[Window], float | None]:
    """The part of a tier's pages and slots that these owners have."""

    def of(window: Window) -> float | None:
        had = [window.gauge(metric, owner=owner) for owner in owners]
        return ratio(math.fsum(pages or 0 for pages in had), window.gauge(metric, owner="total"))

    return of


MEASURES = (
    Measure("requests_per_s", "requests", _rate("mainstem_requests_total")),
    Measure("overloaded_per_s", "  turned away", _rate("mainstem_requests_total", outcome="overloaded")),
    Measure("errors_per_s", "  failed", _rate("mainstem_requests_total", outcome="error")),
    Measure("running", "running", _gauge("mainstem_requests_running"), False),
    Measure("waiting", "waiting", _gauge("mainstem_requests_waiting"), False),
    Measure("prompt_tokens_per_s", "prompt tokens", _rate("mainstem_prompt_tokens_total")),
    Measure("hit_ratio", "  found in the cache", _found()),
    Measure("device_hit_ratio", "    on the device", _found(tier="device")),
    Measure("host_hit_ratio", "    on the host", _found(tier="host")),
    Measure("storage_hit_ratio", "    in storage", _found(tier="storage")),
    Measure("generated_tokens_per_s", "generated tokens", _rate("mainstem_generation_tokens_total")),
    Measure("ttft_p50_s", "first token, p50", _quantile("mainstem_time_to_first_token_seconds", 0.5)),
    Measure("ttft_p99_s", "first token, p99", _quantile("mainstem_time_to_first_token_seconds", 0.99)),
    Measure("token_p50_s", "next token, p50", _quantile("mainstem_inter_token_latency_seconds", 0.5)),
    Measure("preemptions_per_s", "preemptions", _rate("mainstem_preemptions_total")),
    Measure("device_used_ratio", "device pages in use", _part("mainstem_pool_pages", "private", "locked"), False),
    Measure("device_filled_ratio", "  in use or cached", _part("mainstem_pool_pages", "private", "cached"), False),
    Measure("host_filled_ratio", "host pages filled", _part("mainstem_host_pages", "private", "cached"), False),
    Measure("retained_pages", "retained pages", _gauge("mainstem_retained_pages"), False),
    Measure("evicted_pages_per_s", "evicted pages", _rate("mainstem_evicted_pages_total")),
    Measure("late_pages_per_s", "late pages", _rate("mainstem_late_pages_total")),
    Measure("storage_faults_per_s", "storage faults", _rate("mainstem_storage_faults_total")),
    Measure("storage_breakers_open", "storage breakers open", _gauge("mainstem_storage_breaker_open"), False),
)
"""The rows of `mainstem top`, in order."""


def measure(window: Window) -> dict[str, float | None]:
    """Returns every measure by its name."""
    return {each.name: each.of(window) for each in MEASURES}


def totals(sample: Sample) -> dict[str, float | None]:
    """Returns the total since the start of every measure that has one, by its name."""
    start = Window(sample, sample, 1.0)  # in which all of it came
    return {each.total_name: each.of(start) for each in MEASURES if each.grows}
