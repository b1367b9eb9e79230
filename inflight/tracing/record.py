"""RequestTrace: what the stages tell each other of a traced request. Knows no OpenTelemetry: none is loaded for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Attributes = Mapping[str, Any]
"""Of a span: names to strings, numbers, booleans, or lists of one of them."""

_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """How the server span ends, apart from when: the last stage that the request passes adds the time."""

    attributes: Attributes
    error: str = ""
    """What the request failed with; empty: it did not."""

    def __post_init__(self) -> None:
        """Check the fields: any client of the detokenizer may send it an end.

        Raises:
            ValueError: one is not of its type.
        """
        if not isinstance(self.attributes, Mapping) or not isinstance(self.error, str):
            raise ValueError("not the end of a span: `attributes` is a mapping, `error` a string")


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request's server span, before it has ended: begun in one process, ended in another."""

    trace_id: str
    """32 lower-case hexadecimal digits."""
    span_id: str
    """16 of them; of the server span."""
    parent_id: str
    """Of the client's span; empty: the request has begun the trace."""
    trace_state: str
    """W3C ``tracestate``, as it came."""
    sampled: bool
    """Whether its spans are written; decided once, where the trace meets the server."""
    start_ns: int
    """``time.time_ns()`` of the arrival."""
    name: str
    """Of the server span."""

    def __post_init__(self) -> None:
        """Check the fields: any client of the engine's stage may send it a trace.

        Raises:
            ValueError: one is not of its type, or no id of W3C's.
        """
        if not all(isinstance(one, str) for one in (self.trace_id, self.span_id, self.parent_id, self.trace_state)):
            raise ValueError("not the trace of a request: ids and state are strings")
        ids = (self.trace_id, 32), (self.span_id, 16), (self.parent_id or "1" * 16, 16)
        if not all(len(one) == digits and _HEX.fullmatch(one) and one.strip("0") for one, digits in ids):
            raise ValueError("not the trace of a request: an id is 16 or 32 hexadecimal digits, not all 0")
        if type(self.start_ns) is not int or not 0 <= self.start_ns < 1 << 63 or type(self.sampled) is not bool:
            raise ValueError("not the trace of a request: `start_ns` is a time, `sampled` is true or false")
        if not isinstance(self.name, str):
            raise ValueError("not the trace of a request: `name` is a string")

    def write(self, end: SpanEnd | None = None) -> bytes:
        """Return the trace, with the span's end if it is known, as the bytes of a tensor's element."""
        trace = {name: getattr(self, name) for name in self.__slots__}  # `asdict` copies, and is ten times slower
        told = end and {"attributes": end.attributes, "error": end.error}
        return json.dumps({"trace": trace, "end": told}).encode()

    @classmethod
    def read(cls, data: bytes) -> tuple[RequestTrace, SpanEnd | None]:
        """Return what ``write`` was given.

        Raises:
            ValueError: these are not such bytes.
        """
        try:
            fields = json.loads(data)
            return cls(**fields["trace"]), SpanEnd(**fields["end"]) if fields["end"] else None
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not the trace of a request: {error}") from None
