"""A request's KV retention in TensorRT-LLM's terms: which of its blocks are evicted first is decided there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from inflight.engine.kv.retention import Retention


def retention_arguments(retention: Retention, prompt_tokens: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the keyword arguments of each ``TokenRangeRetentionConfig``, and the others of ``KvCacheRetentionConfig``.

    Args:
        retention: what the request says; what begins behind the prompt is of generated tokens.
        prompt_tokens: the prompt's length.
    """
    ranges: list[dict[str, Any]] = []
    # Some builds of 1.2 take no None for the directory, which is their own default; it is of another transfer mode.
    others: dict[str, Any] = {"directory": ""}
    for one in retention:
        duration = None if one.duration_ms is None else timedelta(milliseconds=one.duration_ms)
        if one.start >= prompt_tokens:
            others |= {"decode_retention_priority": one.priority, "decode_duration_ms": duration}
        else:
            of_range = {"token_start": one.start, "token_end": one.end, "priority": one.priority}
            ranges.append(of_range | {"duration_ms": duration})
    return ranges, others
