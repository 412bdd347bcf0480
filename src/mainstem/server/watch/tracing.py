"""Traces of requests for an OpenTelemetry collector: a span for each request, and one for each of its phases.

    POST /v1/chat/completions                        "chat MODEL": the body read, parsed, tokenised; generated; sent
      |- prepare | queue | match | prefetch | load | prefill | decode | store

Attributes follow the semantic conventions for generative AI; what these have no word for begins with `mainstem.`. No
text, no token and no key is in a span. https://github.com/open-telemetry/semantic-conventions-genai

Spans are made when a request has ended, from times that the engine noted. They wait in a bounded queue for the thread
that sends them; when it is full they are dropped and counted. So no request waits for a collector.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from mainstem import __version__
from mainstem.imports import needs
from mainstem.metric import Metric, each
from mainstem.runtime.request import Delta, Request, Usage
from mainstem.server.apis.replies import PromptTokensDetails, usage_body
from mainstem.server.run import Watcher

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

_WAITING = 8192  # spans that wait to be sent; about 8 of a request
_BATCH = 512
_DELAY_S = 1.0  # from the end of a span until it is sent
_SEND_S = 5.0  # for a batch, repetitions included
_CLOSING_S = 3.0  # how long `close` waits for what is left
_TALKATIVE = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
_NS = 1e9


def check_installed() -> None:
    """Checks that OpenTelemetry is installed.

    Raises:
        BackendUnavailable: it is not.
    """
    with needs("opentelemetry", "--otlp needs OpenTelemetry: pip install 'mainstem[otlp]'"):
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401


@dataclass(slots=True)
class SpanStats:
    """Counts of spans: sent; failed, because the collector did not take them; dropped, because too many waited."""

    sent: int = 0
    failed: int = 0
    dropped: int = 0

    METRICS: ClassVar = (
        Metric("mainstem_spans", "Spans of requests for the collector of traces, by outcome",
            each("{}", "sent", "failed", "dropped"), ("outcome",)),
    )  # fmt: skip


class Tracing:
    """Sends the traces of one server.

    Args:
        url: of a collector; traces go to its path /v1/traces, unless the URL ends in it.
        model: the name of the model, where requests name none.
        now: returns seconds since the epoch.
        delay_s: seconds from the end of a span until it is sent.
        waiting: the most spans that wait to be sent; further ones are dropped.

    Raises:
        BackendUnavailable: OpenTelemetry is not installed.

    The variables OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER mean
    what they do everywhere.
    """

    def __init__(
        self,
        url: str,
        model: str,
        now: Callable[[], float] = time.time,
        *,
        delay_s: float = _DELAY_S,
        waiting: int = _WAITING,
    ) -> None:
        check_installed()
        self._url = url.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._model, self.now = model, now
        self._stats = SpanStats()
        self._lock = threading.Lock()
        self._waiting, self._most = 0, waiting
        self._why = _Why()
        for name in _TALKATIVE:
            logging.getLogger(name).addFilter(self._why)
        self._provider = self._make_provider(delay_s)
        self.tracer = self._provider.get_tracer("mainstem", __version__)

    def _make_provider(self, delay_s: float) -> TracerProvider:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = OTLPSpanExporter(endpoint=self._url, timeout=_SEND_S)
        self._batches = BatchSpanProcessor(
            _exporting(self),
            max_queue_size=self._most,
            schedule_delay_millis=delay_s * 1000,
            max_export_batch_size=min(_BATCH, self._most),
        )
        own = Resource({"service.name": "mainstem", "service.version": __version__})
        provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(_bounding(self))
        return provider

    def begin(self, headers: Mapping[str, str], operation: Literal["chat", "text_completion"]) -> Trace:
        """Begins the trace of a request that arrives now, as a part of the one that its `traceparent` names."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return Trace(self, operation, self._model, TraceContextTextMapPropagator().extract(carrier))

    def stats(self) -> SpanStats:
        """Returns the counts since the start."""
        with self._lock:
            return SpanStats(self._stats.sent, self._stats.failed, self._stats.dropped)

    def flush(self) -> None:
        """Sends waiting spans, and waits for that: for tests."""
        self._batches.force_flush()

    def close(self) -> None:
        """Sends waiting spans, for some seconds at most. A second call does nothing."""
        sending = threading.Thread(target=self._batches.shutdown, name="mainstem-traces", daemon=True)
        sending.start()
        sending.join(_CLOSING_S)
        if sending.is_alive():
            self._exporter.shutdown()  # which ends its repetitions
        for name in _TALKATIVE:
            logging.getLogger(name).removeFilter(self._why)

    def put(self, span: ReadableSpan) -> None:
        """Queues a span that has ended, unless too many wait."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            room = self._waiting < self._most
            self._waiting += room
            self._stats.dropped += not room
        if room:
            self._batches.on_end(span)

    def send(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch. Only the first failure is logged."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._count(len(spans), sent=result is SpanExportResult.SUCCESS)
        return result

    def _count(self, spans: int, *, sent: bool) -> None:
        with self._lock:
            self._waiting -= spans
            if sent:
                self._stats.sent += spans
                return
            first = self._stats.failed == 0
            self._stats.failed += spans
        if first:
            log.warning("no traces at %s: %s; further failures are only counted", self._url, self._why.last)


class _Why(logging.Filter):
    """Keeps the last message of a logger in place of writing it: a collector that is gone would fill the log."""

    last = "unknown"

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False


def _exporting(tracing: Tracing) -> SpanExporter:
    """Returns the exporter of batches. Its class is made here, since its base may not be installed."""
    from opentelemetry.sdk.trace.export import SpanExporter

    class Exporting(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return tracing.send(spans)

    return Exporting()


def _bounding(tracing: Tracing) -> SpanProcessor:
    """Returns the processor of ended spans."""
    from opentelemetry.sdk.trace import SpanProcessor

    class Bounding(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            tracing.put(span)

    return Bounding()


class Trace:
    """The trace of one request. Made by `Tracing.begin`."""

    def __init__(self, tracing: Tracing, operation: str, model: str, parent: Context) -> None:
        self._tracing, self._operation, self._model, self._parent = tracing, operation, model, parent
        self._began_s = self._submitted_s = tracing.now()
        self._attributes: dict[str, Any] = {}
        self._ends: list[_End | None] = []  # of each choice; None: it goes on
        self._choices = 1  # of each prompt

    def submitted(self, requests: Sequence[Request], model: str | None, choices: int, stream: bool) -> list[Watcher]:
        """Notes that the request goes to the engine now, as these; returns the watcher of each."""
        self._submitted_s = self._tracing.now()
        self._model = model or self._model
        params = requests[0].params
        asked = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
            "stream": stream,
            "choice.count": choices,
        }
        self._attributes |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
        self._attributes["mainstem.prompts"] = len(requests) // choices
        self._ends, self._choices = [None] * len(requests), choices
        return [Watcher(partial(self._choice_ended, number)) for number in range(len(requests))]

    def answers(self, id: str, model: str) -> None:
        """Notes the id of the answer and its model."""
        self._attributes |= {"gen_ai.response.id": id, "gen_ai.response.model": model}

    def refused(self, status: int) -> None:
        """Ends the trace: the request did not reach the engine."""
        self._attributes["http.response.status_code"] = status
        span = self._root()
        self._fail(span, str(status), faulty=status >= 500)
        span.end(self._ns(self._tracing.now()))

    def _choice_ended(self, choice: int, finish: str, usage: Usage | None, deltas: Sequence[Delta]) -> None:
        """Notes that a choice has ended; ends the trace with the last of them."""
        self._ends[choice] = _End(finish, usage)
        ends = [each for each in self._ends if each is not None]
        if len(ends) == len(self._ends):
            self._export(ends, self._tracing.now())

    def _export(self, ends: Sequence[_End], now_s: float) -> None:
        from opentelemetry.trace import set_span_in_context

        self._attributes |= _used([end.usage for end in ends], self._choices)
        self._attributes["gen_ai.response.finish_reasons"] = [end.finish for end in ends]
        root = self._root()
        inside = set_span_in_context(root)
        self._child(inside, "prepare", self._began_s, self._submitted_s)
        for number, end in enumerate(ends):
            marked = {"mainstem.choice": number} if len(ends) > 1 else {}
            for stage, begin_s, end_s in () if end.usage is None else end.usage.phases:
                self._child(inside, stage, self._submitted_s + begin_s, self._submitted_s + end_s, marked)
        failed = [end.finish for end in ends if end.finish in ("error", "cancelled")]
        if failed:
            self._fail(root, failed[0], faulty=failed[0] == "error")
        root.end(self._ns(now_s))

    def _root(self) -> Span:
        from opentelemetry.trace import SpanKind

        attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "mainstem",
            "gen_ai.request.model": self._model,
            **self._attributes,
        }
        name = f"{self._operation} {self._model}"
        return self._tracing.tracer.start_span(
            name, self._parent, SpanKind.SERVER, attributes, start_time=self._ns(self._began_s)
        )

    def _child(
        self, inside: Context, name: str, begin_s: float, end_s: float, attributes: Mapping[str, Any] | None = None
    ) -> None:
        span = self._tracing.tracer.start_span(name, inside, attributes=attributes, start_time=self._ns(begin_s))
        span.end(self._ns(end_s))

    def _fail(self, span: Span, kind: str, *, faulty: bool) -> None:
        """Marks a span without an answer; faulty: the fault is the server's."""
        from opentelemetry.trace import StatusCode

        span.set_attribute("error.type", kind)
        if faulty:
            span.set_status(StatusCode.ERROR)

    @staticmethod
    def _ns(epoch_s: float) -> int:
        return round(epoch_s * _NS)


def _used(usages: Sequence[Usage | None], choices: int) -> dict[str, Any]:
    """Returns the attributes of what a request used, as its client reads it."""
    known = [each for each in usages if each is not None]
    if len(known) < len(usages):
        return {}
    body = usage_body(known, choices)
    assert isinstance(body.prompt_tokens_details, PromptTokensDetails), "all choices have ended"
    cached, tiers = body.prompt_tokens_details.cached_tokens, body.prompt_tokens_details.cached_tokens_by_tier
    first = [each.ttft_s for each in known if each.completion_tokens]
    return {
        "gen_ai.usage.input_tokens": body.prompt_tokens,
        "gen_ai.usage.output_tokens": body.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "mainstem.cached_tokens.device": tiers.device,
        "mainstem.cached_tokens.host": tiers.host,
        "mainstem.cached_tokens.storage": tiers.storage,
        "mainstem.computed_tokens": body.prompt_tokens - cached,
        "mainstem.queue_s": max(each.queue_s for each in known),
        **({"gen_ai.response.time_to_first_chunk": min(first)} if first else {}),
    }


class _End(NamedTuple):
    """The end of a choice; without usage if its last event never came."""

    finish: str
    usage: Usage | None
