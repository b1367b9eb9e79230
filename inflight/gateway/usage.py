"""``usage`` of OpenAI's completions, and where streams have it."""

from __future__ import annotations

from typing import Any, NamedTuple

from inflight.gateway.fields import Fields
from inflight.gateway.generation import Usage


class StreamedCounts(NamedTuple):
    """Which chunks of a stream have the counts of tokens."""

    at_the_end: bool
    """Whether one more chunk at the end has them."""
    in_each: bool
    """Whether all the others have them too."""

    @classmethod
    def asked(cls, fields: Fields) -> StreamedCounts:
        """Return what a request asks for. As with vLLM, ``continuous_usage_stats`` alone asks for nothing."""
        options = fields.get("stream_options", {})
        at_the_end = options.get("include_usage", False)
        return cls(at_the_end, at_the_end and options.get("continuous_usage_stats", False))


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the counts of tokens as answers have them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
