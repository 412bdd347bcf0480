"""An OpenTelemetry collector: takes traces over OTLP/HTTP, and decodes them with the protocol's own package."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it arrived; `parent` is "" for one without."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


class Collector:
    """What a collector has received.

    Attributes:
        status: of its answers.
        hangs: set it, and posts are not answered until it is cleared.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.resource: dict[str, Any] = {}
        self.spans: list[Span] = []
        self.status = 200
        self.url = ""
        self.goes_on = threading.Event()
        self.goes_on.set()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        self.bodies.append(body)
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = _plain(part.resource.attributes)
            self.spans += [_span(span) for scope in part.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def _span(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        _plain(span.attributes),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector at `url`."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.goes_on.wait()
            if collector.status == 200:
                collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.goes_on.set()
            server.shutdown()
            thread.join()
