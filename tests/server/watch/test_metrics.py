"""The metrics: names, units and values, as a scraper reads them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rigs.fake_engine import FakeEngine
from rigs.full_stats import filled, parts, present
from rigs.hand_driven import Clock
from starlette.testclient import TestClient

from mainstem.metric import rows
from mainstem.runtime.engine_core import EngineStats
from mainstem.runtime.request import Delta, Usage
from mainstem.runtime.text.vision import VisionStats
from mainstem.server.app import create_app
from mainstem.server.kept.answers import AnswerStats
from mainstem.server.kept.precompute import TurnStats
from mainstem.server.prefill import PrefillStats
from mainstem.server.watch.metrics import OUTCOMES, Metrics, SavingStats
from mainstem.server.watch.recording import RecordStats
from mainstem.server.watch.tracing import SpanStats

USAGE = Usage(10, 4, 3, 0.0, 0.2, 0.7)
COUNTED = {
    "engine": EngineStats, "recorder": RecordStats, "answers": AnswerStats, "turns": TurnStats, "spans": SpanStats,
    "savings": SavingStats, "prefills": PrefillStats,
}  # fmt: skip
NOT_EXPORTED = {
    "engine.totals": {"requests", "cached_tokens", "computed_tokens", "errors"},
    "engine.cache.leases": {"open", "partial_hit", "partial_missed", "duplicate_pages", "host_hit"},
    "engine.cache.tree": {
        "match_calls", "queried_symbols", "hit_symbols", "insert_calls", "inserted_pages", "splits",
        "cached_pages", "locked_pages", "evictable_pages", "in_flight_pages", "nodes", "namespaces",
        "advice_won", "advice_lost",
    },
    "engine.cache.retention": {"pinned", "owners", "limits.*"},
    "engine.tiers": {
        "host_total", "host_free", "host_cached", "host_private", "host_pools.*.locked",
        "prefetches", "prefetch_skipped", "breaker_openings", "under_way",
    },
    "engine.vision": {"images"},
}  # fmt: skip
"""Numbers that `/metrics` does not show as they are; a counter that is added is exported or named here."""


def samples(text: bytes | str) -> dict[str, float]:
    text = text.decode() if isinstance(text, bytes) else text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def numbers(kind: Any, path: str) -> Iterator[str]:
    """Yields the path of every number in statistics of this type."""
    kind = present(kind)
    if kind in (int, float, bool):
        yield path
    else:
        for name, part in parts(kind).items():
            yield from numbers(part, f"{path}.{name}")


def everything() -> tuple[dict[str, Any], dict[str, float]]:
    """Returns full statistics by the part of the server, and the metrics that show them."""
    stats = full()
    return stats, samples(exposition(stats))


def full() -> dict[str, Any]:
    count = itertools.count(100)
    return {part: filled(kind, count) for part, kind in COUNTED.items()}


def exposition(stats: Mapping[str, Any]) -> str:
    return Metrics([SimpleNamespace(stats=lambda part=part: part) for part in stats.values()]).exposition().decode()


def test_every_number_is_exported_or_named_as_one_that_is_not() -> None:
    exported = [
        ".".join(filter(None, (part, path, own)))
        for part, kind in COUNTED.items()
        for path, row in rows(kind)
        for own in row.paths.values()
    ]
    kept = [f"{part}.{name}" for part, names in NOT_EXPORTED.items() for name in names]
    counted = [path for part, kind in COUNTED.items() for path in numbers(kind, part)]
    derived = {
        "engine.totals.device_tokens",
        *(f"engine.cache.pool.{owner}" for owner in ("free", "cached", "private")),
    }
    assert sorted(counted) == sorted({*exported, *kept} - derived)
    assert len(set(exported)) == len(exported) and not set(exported) & set(kept)


OTHER_WORDS = {
    ("mainstem_moved_pages", "device", "host"): "backed_up",
    ("mainstem_moved_pages", "host", "device"): "loaded",
    ("mainstem_moved_pages", "storage", "host"): "prefetched",
    ("mainstem_audits", "*"): "prefixes.*",
    ("mainstem_kv_events",): "published",
    ("mainstem_prefills", "*"): "outcomes.*",
    ("mainstem_shared_prefixes", "*"): "anchors.*",
    ("mainstem_anchors",): "retention.spare",
    ("mainstem_anchor_pages",): "retention.spare_pages",
    ("mainstem_anchors_dropped",): "retention.given_way",
}
"""Numbers whose metric says it in other words than their field."""


def shows(name: tuple[str, ...], path: str) -> bool:
    """Returns whether a metric, with the values of its labels, is named as the number at a path."""
    if name in OTHER_WORDS:
        return path == OTHER_WORDS[name]
    said = [word for part in name for word in part.split("_")]
    own = [part for part in path.split(".") if part != "*"][-1]
    return name.count("*") == path.count("*") and all(
        any(word.startswith(each[:4]) for word in said) for each in own.split("_")
    )


def test_a_metric_is_named_as_the_number_that_it_shows_and_as_no_other() -> None:
    """So two rows, or two labels of a row, whose paths are exchanged fail."""
    shown = [
        (part, path, (row.name, *labels), own)
        for part, kind in COUNTED.items()
        for path, row in rows(kind)
        for labels, own in row.paths.items()
    ]
    assert [name for _, _, name, own in shown if not shows(name, own)] == []
    assert not {*OTHER_WORDS} - {name for _, _, name, _ in shown}
    for (part, path, name, own), (*where, other, its) in itertools.combinations(shown, 2):
        if where == [part, path]:
            assert not (shows(name, its) and shows(other, own)), f"{name} and {other} could be exchanged"


def test_the_documentation_lists_every_metric() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    listed = re.findall(r"^\| `(mainstem_\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    found = []
    for family in text_string_to_metric_families(exposition(full())):
        if family.name.endswith("_created"):
            continue
        name = family.name + "_total" * (family.type == "counter")
        labels = sorted({f"`{label}`" for sample in family.samples for label in sample.labels} - {"`le`"})
        found.append((name, ", ".join(labels), family.documentation))
    assert sorted((name, ", ".join(sorted(labels.split(", "))), text) for name, labels, text in listed) == sorted(found)


def test_every_part_is_counted() -> None:
    stats, values = everything()
    tiers, totals, cache = stats["engine"].tiers, stats["engine"].totals, stats["engine"].cache
    expected = {
        "mainstem_host_pages{component=first,owner=free}": tiers.host_pools["first"].free,
        "mainstem_pool_pages{component=second,owner=locked}": cache.pools["second"].locked,
        "mainstem_cached_tokens_total{tier=device}": totals.cached_tokens - totals.host_tokens - totals.storage_tokens,
        "mainstem_cached_tokens_total{tier=storage}": totals.storage_tokens,
        "mainstem_moved_pages_total{from=device,to=host}": tiers.backed_up,
        "mainstem_moved_pages_total{from=host,to=device}": tiers.loaded,
        "mainstem_moved_pages_total{from=storage,to=host}": tiers.prefetched,
        "mainstem_moved_pages_total{from=host,to=storage}": tiers.stored,
        "mainstem_dropped_pages_total{reason=load_failed}": tiers.load_failed,
        "mainstem_late_pages_total{cause=first}": tiers.late["first"],
        "mainstem_storage_faults_total{cause=second}": tiers.faults["second"],
        "mainstem_storage_queued_pages": tiers.queued,
        "mainstem_storage_breaker_open": 1,
        "mainstem_recorded_requests_total{outcome=dropped}": stats["recorder"].dropped,
        "mainstem_answers_bytes": stats["answers"].bytes,
        "mainstem_precomputed_turns_total{outcome=skipped}": stats["turns"].skipped,
    }
    assert {name: values[name] for name in expected} == expected
    assert sum(name.startswith("mainstem_pool_pages") for name in values) == 10


def test_the_engine_is_read_when_scraped() -> None:
    engine = FakeEngine()
    server = TestClient(create_app(engine))  # type: ignore[arg-type]
    for _ in range(2):
        server.post("/v1/completions", json={"model": "fake", "prompt": "x" * 40})
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = samples(response.text)
    expected = {
        "mainstem_prompt_tokens_total": 80,
        "mainstem_prefix_cache_queries_tokens_total": 80,
        "mainstem_prefix_cache_hits_tokens_total": 32,
        "mainstem_generation_tokens_total": 0,
        "mainstem_preemptions_total": 0,
        "mainstem_evicted_pages_total": 7,
        "mainstem_requests_running": 0,
        "mainstem_requests_waiting": 0,
        "mainstem_kv_pages{owner=free}": 60,
        "mainstem_kv_pages{owner=cached}": 30,
        "mainstem_kv_pages{owner=private}": 10,
        "mainstem_checkpoints_total": 5,
        "mainstem_checkpoints_missed_total": 2,
        "mainstem_adapters": 0,
        "mainstem_requests_total{outcome=stop}": 2,
        "mainstem_time_to_first_token_seconds_count": 2,
        "mainstem_e2e_request_latency_seconds_count": 2,
    }
    assert {name: values[name] for name in expected} == expected


def test_adapters_and_images_are_counted(tmp_path: Path) -> None:
    engine = FakeEngine()
    metrics = Metrics([engine])  # type: ignore[arg-type]
    assert not [name for name in samples(metrics.exposition()) if "image" in name]
    engine.load_adapter("french", tmp_path)
    engine.images = VisionStats(encoder_runs=3, hits=8, images=2, bytes=4096)
    values = samples(metrics.exposition())
    expected = {
        "mainstem_adapters": 1,
        "mainstem_image_encoder_runs_total": 3,
        "mainstem_image_embedding_hits_total": 8,
        "mainstem_image_embeddings_bytes": 4096,
    }
    assert {name: values[name] for name in expected} == expected


def test_every_name_is_ours() -> None:
    values = samples(Metrics([FakeEngine()]).exposition())  # type: ignore[arg-type]
    assert all(name.startswith("mainstem_") for name in values)
    assert {f"mainstem_requests_total{{outcome={outcome}}}" for outcome in OUTCOMES} <= set(values)


def test_the_latencies_of_one_generation() -> None:
    clock = Clock(0.0)
    metrics = Metrics([FakeEngine()], clock)  # type: ignore[arg-type]
    meter = metrics.meter()
    for now_s, tokens in ((1.0, (1,)), (1.5, (2,)), (2.5, (3, 4)), (2.6, ())):
        clock.now_s = now_s
        meter.see(Delta("x", tokens))
    clock.now_s = 9.0
    meter.see(Delta("", (), (), "length", USAGE))
    meter.close()
    meter.close()
    values = samples(metrics.exposition())
    assert values["mainstem_inter_token_latency_seconds_count"] == 3
    assert values["mainstem_inter_token_latency_seconds_sum"] == pytest.approx(0.5 + 0.5 + 0.5)
    assert values["mainstem_time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert values["mainstem_e2e_request_latency_seconds_sum"] == pytest.approx(0.7)
    assert values["mainstem_requests_total{outcome=length}"] == 1
    assert values["mainstem_requests_total{outcome=cancelled}"] == 0


def test_a_generation_without_an_end_is_cancelled() -> None:
    metrics = Metrics([FakeEngine()])  # type: ignore[arg-type]
    metrics.meter().close()
    values = samples(metrics.exposition())
    assert values["mainstem_requests_total{outcome=cancelled}"] == 1
    assert values["mainstem_time_to_first_token_seconds_count"] == 0


def test_refusals() -> None:
    engine = FakeEngine(max_waiting=0)
    server = TestClient(create_app(engine))  # type: ignore[arg-type]

    def ask(**fields: Any) -> int:
        return server.post("/v1/completions", json={"model": "fake", "prompt": "x", **fields}).status_code

    assert [ask(n=0), ask(model="y"), ask(), ask(prompt="fail!")] == [400, 404, 429, 429]
    values = samples(server.get("/metrics").text)
    assert values["mainstem_requests_total{outcome=refused}"] == 2
    assert values["mainstem_requests_total{outcome=overloaded}"] == 2


def test_two_servers_have_separate_metrics() -> None:
    first, second = Metrics([FakeEngine()]), Metrics([FakeEngine()])  # type: ignore[arg-type]
    first.refused(400)
    assert samples(second.exposition())["mainstem_requests_total{outcome=refused}"] == 0
