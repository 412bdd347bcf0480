"""The metrics: names, units and values, as a scraper reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mainstem.runtime.request import Delta, Usage
from mainstem.runtime.vision import VisionStats
from mainstem.server.app import create_app
from mainstem.server.metrics import OUTCOMES, Metrics

USAGE = Usage(10, 4, 3, 0.0, 0.2, 0.7)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def samples(text: bytes | str) -> dict[str, float]:
    text = text.decode() if isinstance(text, bytes) else text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


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


def test_every_component_has_its_pool() -> None:
    values = samples(Metrics(FakeEngine()).exposition())  # type: ignore[arg-type]
    found = {name: value for name, value in values.items() if name.startswith("mainstem_pool_pages")}
    counts = {
        "full": {"total": 100, "free": 60, "cached": 30, "private": 10, "locked": 8},
        "state": {"total": 9, "free": 2, "cached": 4, "private": 3, "locked": 1},
    }
    assert found == {
        f"mainstem_pool_pages{{component={component},owner={owner}}}": count
        for component, owners in counts.items()
        for owner, count in owners.items()
    }


def test_adapters_and_images_are_counted(tmp_path: Path) -> None:
    engine = FakeEngine()
    metrics = Metrics(engine)  # type: ignore[arg-type]
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
    values = samples(Metrics(FakeEngine()).exposition())  # type: ignore[arg-type]
    assert all(name.startswith("mainstem_") for name in values)
    assert {f"mainstem_requests_total{{outcome={outcome}}}" for outcome in OUTCOMES} <= set(values)


def test_the_latencies_of_one_generation() -> None:
    clock = Clock()
    metrics = Metrics(FakeEngine(), clock)  # type: ignore[arg-type]
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
    metrics = Metrics(FakeEngine())  # type: ignore[arg-type]
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
    first, second = Metrics(FakeEngine()), Metrics(FakeEngine())  # type: ignore[arg-type]
    first.refused(400)
    assert samples(second.exposition())["mainstem_requests_total{outcome=refused}"] == 0
