"""Tracer: makes spans with the OpenTelemetry SDK and exports them by OTLP over HTTP. Imported only if traces are on.

Spans are made when they have ended, from times that the stages record anyway, and directly as the SDK's exported form.
The SDK's own way, to begin and end a span, takes five times as long and cannot set a span's id; but a server span must
have the id that its children in other processes know. A background thread exports the spans in batches: with a slow or
absent collector spans are lost, but no request waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from inflight.triton.tracing.record import Attributes, RequestTrace, SpanEnd

log = logging.getLogger(__name__)

EXPORT_INTERVAL_MS = 1_000
"""How long a span waits for others, to be sent in one batch."""
FLUSH_S = 3.0
"""How long a stage at its end waits for the collector to take its last spans."""
_PROPAGATOR = TraceContextTextMapPropagator()
_SCOPE, _SAMPLED = InstrumentationScope("inflight"), otel.TraceFlags(otel.TraceFlags.SAMPLED)


class Tracer:
    """Makes the spans of one stage's process."""

    def __init__(self, endpoint: str, sample_ratio: float) -> None:
        """Post OTLP traces to the URL ``endpoint``; ``sample_ratio`` of those whose client has not decided."""
        self._sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        self._ids = RandomIdGenerator()
        # The environment is merged last: attributes given to `create` would override its service name.
        self._resource = _OneResource(
            Resource.create({SERVICE_NAME: "inflight"}).merge(OTELResourceDetector().detect()).attributes
        )
        self._processor = BatchSpanProcessor(_Exporter(endpoint), schedule_delay_millis=EXPORT_INTERVAL_MS)

    def begin(self, parameters: Mapping[str, object], name: str, start_ns: int) -> RequestTrace:
        """Begin a request's server span, as child of the client's if its W3C context is valid, else of none.

        An invalid context is no error: https://www.w3.org/TR/trace-context/#processing-model has a new trace begin.
        """
        carrier = {key.lower(): value for key, value in parameters.items() if isinstance(value, str)}
        context = _PROPAGATOR.extract(carrier, Context())
        parent = otel.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        sampled = self._sampler.should_sample(context, trace_id, name).decision is Decision.RECORD_AND_SAMPLE
        return RequestTrace(
            trace_id=otel.format_trace_id(trace_id),
            span_id=otel.format_span_id(self._ids.generate_span_id()),
            parent_id=otel.format_span_id(parent.span_id) if parent.is_valid else "",
            trace_state=parent.trace_state.to_header() if parent.is_valid else "",
            sampled=sampled,
            start_ns=start_ns,
            name=name,
        )

    def child(self, trace: RequestTrace, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """Write a span under the request's server span, if the trace is sampled."""
        times = {"start_time": start_ns, "end_time": end_ns}
        self._write(trace, name, self._ids.generate_span_id(), trace.span_id, attributes=attributes, **times)

    def end(self, trace: RequestTrace, end: SpanEnd, end_ns: int) -> None:
        """Write the request's server span, if the trace is sampled."""
        status = otel.Status(otel.StatusCode.ERROR, end.error) if end.error else otel.Status()
        times = {"start_time": trace.start_ns, "end_time": end_ns}
        server = {"kind": otel.SpanKind.SERVER, "status": status, "attributes": end.attributes}
        self._write(trace, trace.name, int(trace.span_id, 16), trace.parent_id, **server, **times)

    def _write(self, trace: RequestTrace, name: str, span_id: int, parent_id: str, **fields: Any) -> None:
        if trace.sampled:
            own = _context(trace, span_id)
            parent = _context(trace, int(parent_id, 16), is_remote=True) if parent_id else None
            span = ReadableSpan(name, own, parent, self._resource, instrumentation_scope=_SCOPE, **fields)
            self._processor.on_end(span)

    def close(self) -> None:
        """Send the remaining spans; those that the collector has not taken within ``FLUSH_S`` are lost."""
        # The SDK's own limit is half a minute, longer than a server may take to stop.
        thread = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def _context(trace: RequestTrace, span_id: int, is_remote: bool = False) -> otel.SpanContext:
    state = otel.TraceState.from_header([trace.trace_state]) if trace.trace_state else None
    return otel.SpanContext(int(trace.trace_id, 16), span_id, is_remote, _SAMPLED, state)


class _OneResource(Resource):
    """A resource compared by identity: the encoder groups spans by resource, and each hash of one makes its JSON."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class _LastMessage(logging.Handler):
    """Keeps the last message of OpenTelemetry's loggers, which log a line for each try, and does not log it.

    No export reports the spans that are lost because the queue is full, so that this class logs it, once.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = "no reason is known"
        self._queue_was_full = False
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if not text.startswith("Queue full"):
            self.text = text
        elif not self._queue_was_full:
            self._queue_was_full = True
            log.warning("spans are lost: they come faster than the collector takes them, and the queue is full")


class _Exporter(OTLPSpanExporter):
    """An exporter that logs once when the collector stops taking spans, and once when it takes them again."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._url = url
        self._failing = False
        self._reason = _LastMessage()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("spans are lost: %s does not take them (%s)", self._url, self._reason.text)
        elif self._failing and not failed:
            log.info("%s takes spans again", self._url)
        self._failing = failed
        return result
