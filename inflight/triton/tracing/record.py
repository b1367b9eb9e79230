"""RequestTrace: what the stages send each other about a traced request. This module does not load OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from inflight.errors import as_told

Attributes = Mapping[str, Any]
"""A span's attributes: names to strings, numbers, booleans, or lists of one of them."""
TRACE_CONTEXT, TRACE_SPAN = "trace_context", "trace_span"
"""The tensors that carry a trace: from the tokenizer's stage to the engine's, and from there to the detokenizer's."""

_NOT_ALL_ZERO = "^[0-9a-f]*[1-9a-f][0-9a-f]*$"
_TraceId = Annotated[str, Field(pattern=_NOT_ALL_ZERO, min_length=32, max_length=32)]
_SpanId = Annotated[str, Field(pattern=_NOT_ALL_ZERO, min_length=16, max_length=16)]


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """How the server span ends; the last stage that the request passes adds the time of the end."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    attributes: Attributes
    error: str = ""
    """What the request failed with; empty: it did not fail."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request's server span that has not ended. It begins in one process and ends in another."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    trace_id: _TraceId
    span_id: _SpanId
    """The server span's own id."""
    parent_id: Literal[""] | _SpanId
    """The id of the client's span; empty: the request has begun the trace."""
    trace_state: str
    """W3C ``tracestate``, as it came."""
    sampled: bool
    """Whether its spans are written; the first stage of the request decides."""
    start_ns: Annotated[int, Field(ge=0, lt=1 << 63)]
    """``inflight.clock.now_ns()`` of the arrival."""
    name: str
    """The server span's name."""

    def to_tensor(self, rows: int, end: SpanEnd | None = None) -> np.ndarray:
        """Return the trace, and the span's end if it is known, as a BYTES tensor ``[rows, 1]`` of equal elements."""
        return np.full((rows, 1), _TENSOR.dump_json((self, end)), np.object_)

    @staticmethod
    def from_tensor(tensor: np.ndarray) -> tuple[RequestTrace, SpanEnd | None]:
        """Return what ``to_tensor`` was given.

        Raises:
            ValueError: ``to_tensor`` has not made the tensor; any client may send one to a stage.
        """
        return _TENSOR.validate_json(tensor.flat[0], strict=True)


_TENSOR: TypeAdapter[tuple[RequestTrace, SpanEnd | None]] = TypeAdapter(tuple[RequestTrace, SpanEnd | None])


def failure(error: Exception, request_id: str) -> SpanEnd:
    """Return the end of the server span of a request that failed."""
    told = as_told(error)
    attributes = identity(request_id) | {"inflight.outcome": told.label, "error.type": told.label}
    return SpanEnd(attributes, told.wire_message())


def identity(request_id: str) -> dict[str, object]:
    """Return the attribute that names the request, if its client did."""
    return {"inflight.request_id": request_id} if request_id else {}
