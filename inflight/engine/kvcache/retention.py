"""Retention: what a request says about how long its blocks are worth keeping, as the upstream contract has it.

A range of tokens gets a priority from 0 to 100; blocks of lower priority are evicted first, whatever the eviction
policy says. A block belongs to the range that its first token is in. A duration counts from the moment when the request
gives the block back; after it the priority is the default again. Blocks in no range keep the priority that they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inflight.engine.kvcache.prefix_tree import Node
from inflight.errors import InvalidRequest

MAX_PRIORITY = 100
_NAMES = "retention_token_range_"


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Tokens ``start`` to ``end`` of a sequence, and the priority of their blocks."""

    start: int
    end: int | None
    """Exclusive; None: to the end of the sequence."""
    priority: int
    duration_ms: int | None
    """None: for good."""


Retention = tuple[RetentionRange, ...]
"""Ranges in their order, none overlapping; empty: the request says nothing."""


def apply_retention(retention: Retention, nodes: Iterable[Node], block_size: int, now_ns: int) -> None:
    """Give the blocks of a sequence that ends, ``nodes`` in their order, the priorities that it asked for."""
    ranges = iter(retention)
    one = next(ranges, None)
    for position, node in enumerate(nodes):
        token = position * block_size
        while one is not None and one.end is not None and one.end <= token:
            one = next(ranges, None)
        if one is not None and one.start <= token:
            node.priority = one.priority
            node.expires_ns = None if one.duration_ms is None else now_ns + one.duration_ms * 1_000_000


def retention_of(
    starts: Sequence[int], ends: Sequence[int], priorities: Sequence[int], durations_ms: Sequence[int],
    decode_priority: int | None, decode_duration_ms: int | None, prompt_tokens: int,
) -> Retention:  # fmt: skip
    """Return what the contract's six ``retention_*`` tensors say.

    Args:
        starts: of the prompt's ranges.
        ends: of each, exclusive; -1: the prompt's end. None at all: each is open.
        priorities: of each.
        durations_ms: of each; -1: for good. None at all: for good.
        decode_priority: of generated tokens; None: the default.
        decode_duration_ms: how long that holds; None or -1: for good.
        prompt_tokens: the prompt's length; what comes behind it is generated.

    Raises:
        InvalidRequest: naming the tensor, the value and what is allowed.
    """
    ends, durations_ms = (values or [-1] * len(starts) for values in (ends, durations_ms))
    for name, values in (("ends", ends), ("priorities", priorities), ("durations_ms", durations_ms)):
        if len(values) != len(starts):
            raise InvalidRequest(
                f"{_NAMES}{name} has {len(values)} elements; it must have as many as {_NAMES}starts ({len(starts)})"
            )
    ranges: list[RetentionRange] = []
    for start, end, priority, duration in zip(starts, ends, priorities, durations_ms, strict=True):
        _require(end == -1 or end > start, f"{_NAMES}ends", end, f"above its start ({start}), or -1: open")
        before = ranges[-1].end if ranges else 0
        if before is None:
            raise InvalidRequest(f"{_NAMES}ends has -1, open, before its last element; ranges must not overlap")
        _require(start >= before, f"{_NAMES}starts", start, f"at least {before}: ranges rise, and do not overlap")
        ranges.append(_range(start, end, priority, duration, (f"{_NAMES}priorities", f"{_NAMES}durations_ms")))
    prompt = [
        replace(one, end=prompt_tokens if one.end is None else min(one.end, prompt_tokens))
        for one in ranges
        if one.start < prompt_tokens
    ]
    if decode_priority is None and decode_duration_ms is not None:
        raise InvalidRequest("retention_decode_duration_ms is given without retention_decode_priority")
    if decode_priority is None:
        return tuple(prompt)
    names = ("retention_decode_priority", "retention_decode_duration_ms")
    duration = -1 if decode_duration_ms is None else decode_duration_ms
    return (*prompt, _range(prompt_tokens, -1, decode_priority, duration, names))


def _range(start: int, end: int, priority: int, duration_ms: int, names: tuple[str, str]) -> RetentionRange:
    """Return a range; ``names``: the tensors that its priority and its duration come from."""
    _require(0 <= priority <= MAX_PRIORITY, names[0], priority, f"between 0 and {MAX_PRIORITY}")
    _require(duration_ms >= 1 or duration_ms == -1, names[1], duration_ms, "at least 1, or -1: for good")
    return RetentionRange(start, None if end == -1 else end, priority, None if duration_ms == -1 else duration_ms)


def _require(holds: bool, name: str, value: int, limit: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} is {value}; it must be {limit}")
