"""``KvCacheRetentionConfig``, with the recorded arguments and the checks between them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any


def _check(priority: int, duration_ms: timedelta | None) -> None:
    if not 0 <= priority <= 100:
        raise RuntimeError("Invalid priority value. Must be between 0 and 100")
    if not isinstance(duration_ms, timedelta | None):
        raise TypeError(f"incompatible function arguments: {type(duration_ms).__name__} is no timedelta")


class KvCacheRetentionConfig:
    """How long a request's blocks are worth keeping."""

    @dataclass
    class TokenRangeRetentionConfig:
        """What the blocks of some tokens of the prompt are worth."""

        token_start: int
        token_end: int | None
        priority: int
        duration_ms: timedelta | None = None

        def __post_init__(self) -> None:
            _check(self.priority, self.duration_ms)

    def __init__(
        self,
        token_range_retention_configs: list[TokenRangeRetentionConfig],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
        transfer_mode: Any = None,
        directory: str | None = None,
    ) -> None:
        _check(decode_retention_priority, decode_duration_ms)
        if not isinstance(directory, str):
            raise TypeError("incompatible function arguments: directory is no str")
        ends = [one.token_end for one in token_range_retention_configs[:-1]]
        starts = [one.token_start for one in token_range_retention_configs[1:]]
        if any(end is None or end > start for end, start in zip(ends, starts, strict=True)):
            raise RuntimeError("Token ranges must not overlap, and rise")
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms
