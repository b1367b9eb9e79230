"""``usage`` of OpenAI's completions."""

from __future__ import annotations

from typing import Any

from inflight.gateway.generation import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the counts of tokens as answers have them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
