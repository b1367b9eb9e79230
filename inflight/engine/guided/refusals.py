"""The error of a schema that cannot be enforced."""

from __future__ import annotations

from inflight.engine.guided.schema_keywords import Path, pointer
from inflight.errors import InvalidRequest


def refusal(place: Path, keyword: str | None, reason: str) -> InvalidRequest:
    """Return the error of a keyword, or of a schema as a whole, that cannot be enforced."""
    what = "the schema" if keyword is None else keyword
    return InvalidRequest(f"guided_decoding_guide: {what} at {pointer(place) or 'the root'}: {reason}")
