"""The fields that the objects inside of a chat's fields may have."""

from __future__ import annotations

from typing import Any

from inflight.gateway.fields import RenderedShape, Shape, hint, refused, table
from inflight.gateway.values import string


def _known(names: str) -> dict[str, Any]:
    """Return the shape of an object with fields of these names, in which anything may stand."""
    return dict.fromkeys(names.split())


_CACHE = _known("cache_control prompt_cache_breakpoint")
"""What clients put beside the ends of prefixes; equal ones are reused by themselves."""
_NAMED = _known("type") | {"function": _known("name")}
TOOL: Shape = _known("type cache_control custom") | {"function": _known("name description parameters strict")}
TOOL_CHOICE: Shape = _NAMED | {"allowed_tools": _known("mode") | {"tools": _NAMED | _known("custom")}}
RESPONSE_FORMAT: Shape = _known("type schema format structures triggers") | {
    "json_schema": _known("name description schema strict")
}
MESSAGE: Shape = RenderedShape(
    {
        **_known("role name tool_call_id reasoning reasoning_content thinking annotations cache_control"),
        "content": _known("type text") | _CACHE,
        "tool_calls": RenderedShape(_known("id type index") | {"function": RenderedShape(_known("name arguments"))}),
        **table(
            refused("function_call", "OpenAI has replaced it by `tool_calls`"),
            refused("audio", "the models served take text"),
            refused("refusal", "send its text as `content`"),
        ),
    }
)
CACHE_OPTIONS: Shape = {
    **_known("mode ttl"),
    **table(
        refused("prewarm", "each request generates", False),
        hint("comparison_response_id", string(), "nothing is stored"),
    ),
}
