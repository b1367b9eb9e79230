"""A real server with its own collector, for tests of traces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.client import GenerateOptions
from tests.triton.support.otlp_sink import OtlpSink, Span
from tests.triton.support.servers import Running, on_engine, run

QUESTION = "What is a paged KV cache?"
SHORT = GenerateOptions(max_tokens=6, ignore_eos=True)
PHASES = ["tokenize", "queue", "prefill", "decode", "detokenize"]


@dataclass
class Traced:
    """A server and the collector that it sends its spans to."""

    server: Running
    sink: OtlpSink
    began_ns: int = field(default_factory=time.time_ns)
    """What was asked before is another test's, or that of a test which is tried again."""

    def trace_of(self, request_id: str, names: list[str] = PHASES) -> tuple[Span, dict[str, list[Span]]]:
        """Return the one server span of a request and the spans under it, once all of these names are there."""
        sink = self.sink

        def spans() -> list[Span]:
            return [span for span in sink.servers(request_id) if span.start >= self.began_ns]

        sink.wait(spans)
        server = spans()[-1]
        sink.wait(lambda: set(names) <= set(sink.children(server)))
        return server, sink.children(server)


def serve_traced(
    directory: Path, kind: str, decoupled: bool = True, observability: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Traced]:
    with OtlpSink() as sink:
        shown = {"trace_endpoint": sink.endpoint} | (observability or {})
        path = on_engine(kind, directory, observability=shown, decoupled=decoupled, **settings)
        for server in run(path, in_order=True):  # the last spans are sent at its end
            yield Traced(server, sink)


def context(sampled: bool = True) -> tuple[dict[str, str], str, str]:
    """Return a client's W3C headers with their trace id and span id."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return {"traceparent": f"00-{trace_id}-{span_id}-0{int(sampled)}", "tracestate": "vendor=1"}, trace_id, span_id
