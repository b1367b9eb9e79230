"""W3C trace context of a request: what it is given, or its application's own, without a need for OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from inflight.errors import InvalidRequest

NAMES = ("traceparent", "tracestate")


def trace_headers(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers that a request carries: those given or, with None, those of the caller's current span.

    Raises:
        InvalidRequest: naming what is no such header, or cannot be one's value.
    """
    if given is None:
        return _current()
    for name, value in given.items():
        if name not in NAMES:
            raise InvalidRequest(f"trace_context has {name!r}; it may have {' and '.join(NAMES)}")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise InvalidRequest(f"trace_context has {name} {value!r}; it must be printable ASCII")
    return dict(given)


def _current() -> dict[str, str]:
    """Return the context of the current span; an application that never imported OpenTelemetry has none."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers
