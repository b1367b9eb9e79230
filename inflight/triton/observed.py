"""The traces and log lines of requests, taken around the stages: what is not traced or logged passes by none of this.

The stage that ends a request ends its server span too: the tokenizer one that it refuses, the engine's stage one that
fails there or was sent to it directly, the detokenizer all others.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from inflight.deployment import Deployment
from inflight.errors import InvalidRequest, as_told, readable
from inflight.text.prepare import RawRequest
from inflight.tracing.record import RequestTrace, SpanEnd
from inflight.triton.responses import Arrays

if TYPE_CHECKING:
    from inflight.tracing.tracer import Tracer

log = logging.getLogger("inflight.requests")

TRACE_CONTEXT, TRACE_SPAN = "trace_context", "trace_span"
MAX_STREAMS = 65_536
"""Streams whose detokenizing is timed at once; that of a stream which failed midway goes when so many are newer."""


def make_tracer(deployment: Deployment) -> Tracer | None:
    """Return the tracer of this stage, or None where the deployment has no traces: then OpenTelemetry is not loaded."""
    settings = deployment.observability
    if settings.trace_endpoint is None:
        return None
    from inflight.tracing.tracer import Tracer

    return Tracer(settings.trace_endpoint, settings.trace_sample_ratio)


def span_name(operation: str, deployment: Deployment) -> str:
    """Return the name of a server span, as OpenTelemetry's conventions for generative AI have it."""
    return f"{operation} {readable(deployment.model.name)}"


def failure(error: Exception, request_id: str) -> SpanEnd:
    """Return the end of the server span of a request that failed."""
    told = as_told(error)
    attributes = identity(request_id) | {"inflight.outcome": told.label, "error.type": told.label}
    return SpanEnd(attributes, told.wire_message())


def identity(request_id: str) -> dict[str, object]:
    """Return the attribute that names the request, if its client did."""
    return {"inflight.request_id": request_id} if request_id else {}


def elements(data: bytes, rows: int) -> np.ndarray:
    """Return a BYTES tensor ``[rows, 1]`` with this element in each row."""
    return np.full((rows, 1), data, np.object_)


class Preparer(Protocol):
    """What the tokenizer stage hands its batches to."""

    def prepare(self, requests: Sequence[RawRequest]) -> list[Arrays | Exception]:
        """Return for each request its output arrays, or the error that it ends with."""


class ObservedPreparer:
    """A preparer whose requests begin their traces here, and are logged where they end here."""

    def __init__(self, preparer: Preparer, deployment: Deployment, tracer: Tracer | None) -> None:
        self._preparer = preparer
        self._deployment = deployment
        self._tracer = tracer
        self._level = log_level(deployment)

    def prepare(self, requests: Sequence[RawRequest]) -> list[Arrays | Exception]:
        """Return what the preparer returns, with each request's trace for the engine's stage."""
        began = time.time_ns()
        results = self._preparer.prepare(requests)
        ended = time.time_ns()
        for request, result in zip(requests, results, strict=True):
            trace = self._trace(request, result, began, ended, len(requests)) if self._tracer else None
            if isinstance(result, Exception) and self._level:
                fields = {
                    "request_id": request.request_id,
                    "trace_id": trace.trace_id if trace else "",
                    "outcome": as_told(result).label,
                    "total_ms": milliseconds(began, ended),
                }
                log.log(self._level, "request finished", extra=fields)
        return results

    def _trace(
        self, request: RawRequest, result: Arrays | Exception, began: int, ended: int, batch_size: int
    ) -> RequestTrace:
        assert self._tracer is not None
        operation = "chat" if "messages" in request.arrays else "text_completion"
        trace = self._tracer.begin(request.parameters, span_name(operation, self._deployment), began)
        attributes: dict[str, object] = {"inflight.batch_size": batch_size}
        if isinstance(result, Exception):
            self._tracer.end(trace, failure(result, request.request_id), ended)
        else:
            rows = len(result["input_ids"])
            result[TRACE_CONTEXT] = elements(trace.write(), rows)
            attributes["inflight.prompt_tokens"] = int(result["input_lengths"].sum())
        self._tracer.child(trace, "tokenize", began, ended, attributes)
        return trace


def observed_preparer(preparer: Preparer, deployment: Deployment, tracer: Tracer | None) -> Preparer:
    """Return the preparer that the tokenizer stage is to use: the given one, unless requests are traced or logged."""
    watched = tracer is not None or log_level(deployment)
    return ObservedPreparer(preparer, deployment, tracer) if watched else preparer


class Assembler(Protocol):
    """What the detokenizer stage hands its responses to."""

    def assemble(self, arrays: Mapping[str, np.ndarray], request_id: str = "") -> Arrays | None:
        """Return the client's arrays for one response of the engine, or None if it has nothing for the client."""

    def is_final(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether nothing comes after this response of the engine."""

    def stops(self, arrays: Mapping[str, np.ndarray]) -> list[Arrays]:
        """Return the engine inputs that end the streams of this response."""

    def ends_engine(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether the engine is to be stopped after the response just assembled."""


@dataclass(slots=True)
class _Work:
    """What the detokenizer has done for one stream."""

    began_ns: int
    busy_ns: int = 0
    calls: int = 0


class TracedAssembler:
    """An assembler that times its work, and ends the server spans of requests that end here."""

    def __init__(self, assembler: Assembler, tracer: Tracer) -> None:
        self._assembler = assembler
        self._tracer = tracer
        self._work: OrderedDict[int, _Work] = OrderedDict()
        self.is_final, self.stops, self.ends_engine = assembler.is_final, assembler.stops, assembler.ends_engine

    def assemble(self, arrays: Mapping[str, np.ndarray], request_id: str = "") -> Arrays | None:
        """Return what the assembler returns.

        Raises:
            InvalidRequest: the trace is not what the engine's stage sends.
        """
        began = time.time_ns()
        try:
            outputs = self._assembler.assemble(arrays, request_id)
        except Exception as error:
            if "stream_key" in arrays:
                self._book(arrays, began, failure(error, request_id))
            raise
        if outputs is not None:  # else it was a heartbeat
            self._book(arrays, began)
        return outputs

    def _book(self, arrays: Mapping[str, np.ndarray], began: int, failed: SpanEnd | None = None) -> None:
        key, ended = int(arrays["stream_key"].flat[0]), time.time_ns()
        work = self._work.pop(key, None) or _Work(began)
        work.busy_ns += ended - began
        work.calls += 1
        if self.is_final(arrays):
            if TRACE_SPAN in arrays:
                try:
                    trace, end = RequestTrace.read(arrays[TRACE_SPAN].flat[0])
                except ValueError:
                    raise InvalidRequest("trace_span is not what the engine's stage sends; leave it out") from None
                attributes = {"inflight.calls": work.calls, "inflight.busy_ms": work.busy_ns / 1e6}
                self._tracer.child(trace, "detokenize", work.began_ns, ended, attributes)
                if (last := failed or end) is not None:
                    self._tracer.end(trace, last, ended)
            return
        self._work[key] = work
        while len(self._work) > MAX_STREAMS:
            self._work.popitem(last=False)


def traced_assembler(assembler: Assembler, tracer: Tracer | None) -> Assembler:
    """Return the assembler that the detokenizer stage is to use: the given one, unless requests are traced."""
    return TracedAssembler(assembler, tracer) if tracer is not None else assembler


def log_level(deployment: Deployment) -> int:
    """Return the level of the line of each finished request; 0: none is logged."""
    level = deployment.observability.log_requests
    return int(getattr(logging, level.upper())) if level else 0


def milliseconds(began_ns: int, ended_ns: int) -> float:
    """Return the time between two moments in milliseconds, to the microsecond."""
    return round((ended_ns - began_ns) / 1e6, 3)
