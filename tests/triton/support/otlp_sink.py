"""A collector for tests: takes OTLP traces over HTTP and keeps their spans, or fails as it is told."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Span:
    """One span as it was exported; ids in hexadecimal, times in nanoseconds since the epoch."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    name: str
    is_server: bool
    start: int
    end: int
    attributes: dict[str, Any]
    error: str | None
    """The status' description; None: the status is not an error."""


class OtlpSink:
    """Listens on a free port of this machine. Use as a context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.posts = 0
        self.answer: Callable[[], int] = lambda: 200
        """Returns the HTTP status of each post; it may take its time. What is not answered with 200 is not kept."""
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                answer = sink.answer  # a test that counts the post may set another
                sink.posts += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = answer()
                if status == 200:
                    sink.spans += _decode(gzip.decompress(body) if self.headers["Content-Encoding"] else body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # a stage that ends does not wait for a collector that hangs

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> OtlpSink:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def servers(self, request_id: str) -> list[Span]:
        """Return the server spans of the requests with this id."""
        return [one for one in self.spans if one.is_server and one.attributes.get("inflight.request_id") == request_id]

    def children(self, server: Span) -> dict[str, list[Span]]:
        """Return the spans under a server span, by name."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace_id == server.trace_id and span.parent_id == server.span_id:
                found.setdefault(span.name, []).append(span)
        return found

    def wait(self, holds: Callable[[], object], timeout_s: float = 20) -> None:
        """Wait until something holds; fail if it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, [(span.name, span.attributes) for span in self.spans]
            time.sleep(0.05)


def _decode(body: bytes) -> list[Span]:
    return [
        _span(span, {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"])
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _span(span: SpanProto, service: str) -> Span:
    return Span(
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.name,
        span.kind == SpanProto.SPAN_KIND_SERVER,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {one.key: _value(one.value) for one in span.attributes},
        span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
