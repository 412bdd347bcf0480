"""Traces: what a collector receives of requests, and that nobody waits for one that is gone."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import eventually, patience
from rigs.app_client import complete
from rigs.fake_engine import FakeEngine
from rigs.hand_driven import Clock
from rigs.servers import free_port
from rigs.serving import server_of, tiny_folder, unlike
from starlette.testclient import TestClient

from mainstem.errors import BackendUnavailable, BadArgument, EngineClosed, EngineFull, RankFailed, RequestTooLong
from mainstem.server.app import create_app
from mainstem.server.errors import ApiError
from mainstem.server.serving import bind
from mainstem.server.watch import tracing
from mainstem.server.watch.metrics import OUTCOMES
from mainstem.server.watch.tracing import Tracing
from mainstem.settings.server import ServerConfig

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed: pip install 'mainstem[otlp]'")

from doubles.collector import Collector, Span, collecting

SERVER = 2  # the kind of a span that answers a request
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a-word-of-the-prompt"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


class Traced:
    """A server over a scripted engine, whose traces are sent to a URL."""

    def __init__(self, url: str, engine: FakeEngine | None = None, **options: Any) -> None:
        self.clock = Clock(1_700_000_000.0)
        self.tracing = Tracing(url, "fake", self.clock, **options)
        self.engine = engine or FakeEngine()
        self.http = TestClient(create_app(self.engine, ServerConfig(), tracing=self.tracing))  # type: ignore[arg-type]

    def chat(self, content: str = SECRET, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        body = {"model": "fake", "messages": messages, **fields}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def counts(self, what: str = "spans") -> dict[str, int]:
        text = self.http.get("/metrics").text
        found = re.findall(rf'^mainstem_{what}_total\{{outcome="(\w+)"\}} (\S+)', text, re.M)
        return {name: int(float(count)) for name, count in found}


@pytest.fixture
def traced(collector: Collector) -> Iterator[Traced]:
    made = Traced(collector.url)
    yield made
    made.tracing.close()


def root_of(collector: Collector) -> Span:
    (root,) = [span for span in collector.spans if span.kind == SERVER]
    return root


def test_a_request_is_a_span_with_the_attributes_of_generative_ai(traced: Traced, collector: Collector) -> None:
    answer = traced.chat(max_tokens=20, temperature=0.5, top_p=0.9, seed=7).json()
    traced.tracing.flush()
    root = root_of(collector)
    assert root.name == "chat fake"
    assert root.parent == ""
    assert root.begin_ns == 1_700_000_000 * 10**9
    prompt = answer["usage"]["prompt_tokens"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mainstem",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "mainstem.cached_tokens.device": 0,
        "mainstem.computed_tokens": prompt,
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert [span.name for span in collector.spans if span.parent == root.id] == ["prepare"]
    assert collector.resource["service.name"] == "mainstem"
    assert collector.paths == ["/v1/traces"]
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_what_was_cached_is_an_attribute(traced: Traced, collector: Collector) -> None:
    traced.chat("a prompt of more than two pages of tokens each")
    cached = traced.chat("a prompt of more than two pages of tokens each").json()["usage"]["prompt_tokens_details"]
    traced.tracing.flush()
    found = [span.attributes["gen_ai.usage.cache_read.input_tokens"] for span in collector.named("chat fake")]
    assert sorted(found) == [0, cached["cached_tokens"]]
    assert cached["cached_tokens"] > 0


def test_an_incoming_traceparent_is_the_parent(traced: Traced, collector: Collector) -> None:
    traced.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    traced.tracing.flush()
    assert root_of(collector).parent == PARENT
    assert {span.trace for span in collector.spans} == {TRACE}


def test_a_caller_who_samples_not_is_heeded(traced: Traced, collector: Collector) -> None:
    traced.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    traced.chat(headers={"traceparent": "nonsense"})
    traced.tracing.flush()
    assert root_of(collector).trace != TRACE


def test_the_choices_of_a_request_share_a_span(traced: Traced, collector: Collector) -> None:
    answer = traced.chat(n=3).json()
    traced.tracing.flush()
    root = root_of(collector)
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 3
    assert root.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]


def test_streams_and_completions_are_traced(traced: Traced, collector: Collector) -> None:
    traced.chat(stream=True)
    traced.http.post("/v1/completions", json={"model": "fake", "prompt": "hi"})
    traced.tracing.flush()
    assert [span.name for span in collector.spans if span.kind == SERVER] == ["chat fake", "text_completion fake"]
    assert collector.named("chat fake")[0].attributes["gen_ai.request.stream"] is True


def test_a_refused_request_says_so(traced: Traced, collector: Collector) -> None:
    assert traced.chat(temperature=-1).status_code == 400
    assert traced.http.post("/v1/completions", json={"model": "fake", "prompt": "fail!"}).status_code == 500
    traced.tracing.flush()
    refused, failed = (span for span in collector.spans if span.kind == SERVER)
    assert (refused.attributes["error.type"], refused.attributes["http.response.status_code"]) == ("400", 400)
    assert refused.status == 0  # the client's fault
    assert failed.attributes["error.type"] == "error"
    assert failed.status == 2


FAULTS: list[tuple[Exception, int, str, bool]] = [
    (BadArgument("temperature", 9, "less"), 400, "refused", False),
    (RequestTooLong("prompt", 9, 8), 400, "refused", False),
    (ApiError(401, "no"), 401, "refused", False),
    (ApiError(404, "no"), 404, "refused", False),
    (ApiError(409, "no"), 409, "refused", False),
    (EngineFull("full"), 429, "overloaded", False),
    (ApiError(500, "no"), 500, "error", True),
    (RankFailed("rank 1 has ended"), 500, "error", True),
    (ZeroDivisionError("a mistake of ours"), 500, "error", True),
    (EngineClosed("closed"), 503, "overloaded", True),
]


def test_what_fails_before_it_begins_is_counted_and_traced_by_whose_fault_it_is(
    traced: Traced, collector: Collector
) -> None:
    raised: list[Exception] = []

    def submit(request: Any) -> Any:
        raise raised[-1]

    traced.engine.submit = submit  # type: ignore[method-assign]
    expected, counted = [], Counter[str]()
    for error, status, outcome, faulty in FAULTS:
        raised.append(error)
        for ask, stream in ((traced.chat, True), (partial(complete, traced.http), False)):
            assert ask(stream=stream).status_code == status
            counted[outcome] += 1
            expected.append((str(status), status, 2 if faulty else 0))
        values = re.findall(
            r'^mainstem_requests_total\{outcome="(\w+)"\} (\S+)', traced.http.get("/metrics").text, re.M
        )
        assert {name: float(value) for name, value in values} == {name: counted[name] for name in OUTCOMES}
    traced.tracing.flush()
    ends = [span for span in collector.spans if span.kind == SERVER]
    assert [
        (span.attributes["error.type"], span.attributes["http.response.status_code"], span.status) for span in ends
    ] == expected


@pytest.fixture
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a collector that does not answer given up in a tenth of the time."""
    for name in ("_SEND_S", "_CLOSING_S"):
        monkeypatch.setattr(tracing, name, getattr(tracing, name) / 10)


@pytest.mark.usefixtures("sooner")
def test_a_collector_that_is_gone_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(f"http://127.0.0.1:{free_port()}", delay_s=0.01)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            traced.chat()
            traced.tracing.flush()
        began_s = time.monotonic()
        traced.tracing.close()
    assert time.monotonic() - began_s < patience(2)
    assert [record.message for record in caplog.records if "no traces at" in record.message].__len__() == 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert traced.counts() == {"sent": 0, "failed": 6, "dropped": 0}


@pytest.mark.usefixtures("sooner")
def test_nobody_waits_for_a_collector_that_hangs(collector: Collector) -> None:
    collector.goes_on.clear()
    traced = Traced(collector.url, delay_s=0.01, waiting=8)
    began_s = time.monotonic()
    for _ in range(20):
        assert traced.chat().status_code == 200
    assert time.monotonic() - began_s < patience(4)
    counts = traced.counts()
    assert counts["dropped"] >= 20, counts
    assert counts["sent"] == 0
    began_s = time.monotonic()
    traced.tracing.close()
    assert time.monotonic() - began_s < patience(2)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What OpenTelemetry is given; it sends nothing."""
    given: dict[str, Any] = {"shut": []}

    def exporter(**options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(shutdown=lambda: given["shut"].append("exporter"))

    def processor(_: object, **options: Any) -> Any:
        given.update(options)
        shutdown = lambda: given["shut"].append("processor")  # noqa: E731
        return SimpleNamespace(on_start=print, on_end=lambda span: None, shutdown=shutdown)

    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter", exporter)
    monkeypatch.setattr("opentelemetry.sdk.trace.export.BatchSpanProcessor", processor)
    return given


def test_spans_are_sent_after_a_second_within_five(still: dict[str, Any]) -> None:
    Tracing("http://collector", "fake")
    assert (still["schedule_delay_millis"], still["timeout"]) == (1000, 5)
    assert (still["max_queue_size"], still["max_export_batch_size"]) == (8192, 512)


def test_so_many_spans_wait_and_further_ones_are_dropped(still: dict[str, Any]) -> None:
    tracing = Tracing("http://collector", "fake")
    span: Any = SimpleNamespace(context=SimpleNamespace(trace_flags=SimpleNamespace(sampled=True)))
    for _ in range(8192):
        tracing.put(span)
    assert tracing.stats().dropped == 0
    for count in range(1, 4):
        tracing.put(span)
        assert tracing.stats().dropped == count


@pytest.mark.parametrize("hangs", [False, True])
def test_the_end_waits_for_three_seconds(hangs: bool, still: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Sender:
        def __init__(self, target: Any, **_: Any) -> None:
            self.start = (lambda: None) if hangs else target

        def join(self, timeout_s: float) -> None:
            waited.append(timeout_s)

        def is_alive(self) -> bool:
            return hangs

    tracing = Tracing("http://collector", "fake")
    monkeypatch.setattr(threading, "Thread", Sender)
    for _ in range(2):
        tracing.close()
    assert waited == [3.0, 3.0] and still["shut"] == (["exporter"] if hangs else ["processor"]) * 2


def test_a_collector_that_comes_back_gets_what_is_new(collector: Collector) -> None:
    collector.status = 400
    traced = Traced(collector.url)
    traced.chat()
    traced.tracing.flush()
    collector.status = 200
    traced.chat()
    traced.tracing.close()
    assert traced.counts() == {"sent": 2, "failed": 2, "dropped": 0}
    assert len(collector.spans) == 2


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BackendUnavailable, match=r"--otlp needs OpenTelemetry: pip install 'mainstem\[otlp\]'"):
        bind(ServerConfig(port=0, otlp="http://127.0.0.1:4318"))
    bind(ServerConfig(port=0)).close()


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://here:4317", "http://", "http://a b", "http://a?b"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadArgument, match="otlp"):
        ServerConfig(otlp=url)


@pytest.mark.deadline
def test_a_real_server_sends_every_phase(tmp_path: Path, collector: Collector) -> None:
    """One prompt is computed, pushed out by others to the host and from there to storage, and asked for again."""
    model = tiny_folder("llama", tmp_path / "tiny")
    page_bytes = 12288
    options = {
        "kv-bytes": str(42 * page_bytes),
        "host-bytes": str(168 * page_bytes),
        "storage": f"file:{tmp_path / 'store'}?capacity=64MiB",
        "storage-secret": "0123456789abcdef",
        "prefetch": "wait_complete",
        "prefetch-min-tokens": "16",
        "otlp": f"{collector.url}/v1/traces",
    }
    with server_of(model, tmp_path, {"page-size": "16"})(options) as server:
        for number in [*range(20), 14, 0]:
            server.ask(unlike(number, 20 * 16 + 5))
            server.settle()
        eventually(lambda: len([span for span in collector.spans if span.kind == SERVER]) == 22, patience(20))
        assert server.used["host"] and server.used["storage"]
    roots = sorted((span for span in collector.spans if span.kind == SERVER), key=lambda span: span.begin_ns)
    by_root = {root.id: {span.name: span for span in collector.spans if span.parent == root.id} for root in roots}
    always = {"prepare", "queue", "match", "prefill", "decode", "store"}
    stages = [set(by_root[root.id]) for root in roots]
    assert all(always <= each for each in stages)
    assert "load" not in stages[0]
    assert {"load"} <= stages[20]
    assert {"prefetch", "load"} <= stages[21]
    for root in roots:
        children = by_root[root.id]
        assert all(root.begin_ns <= span.begin_ns <= span.end_ns for span in children.values())
        slack = 50_000_000  # the engine's clock and the server's are read apart
        assert all(span.end_ns <= root.end_ns + slack for span in children.values())
        assert children["queue"].end_ns <= children["match"].end_ns <= children["prefill"].end_ns
        assert children["prefill"].end_ns == children["decode"].begin_ns
    assert roots[21].attributes["mainstem.cached_tokens.storage"] > 0
    assert roots[20].attributes["mainstem.cached_tokens.host"] > 0
