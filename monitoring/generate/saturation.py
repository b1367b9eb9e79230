"""Alerts on what runs out: KV cache and queue; and on what wastes them: preemptions and a cold prefix cache."""

from __future__ import annotations

from monitoring.generate.rule import HOUR, MINUTE, Alert, Timescale

KV_HIGH, KV_FULL = 0.9, 0.95
QUEUE_NEAR_LIMIT = 0.8
PREEMPTIONS_PER_ADMISSION = 0.1
WORTHWHILE_HIT_RATIO = 0.2
"""Below it the prefix cache did little before, and a drop costs little."""
HIT_RATE_REQUESTS = 20
"""Admitted requests that a hit rate is judged by, at least: the first request after a quiet night hits nothing."""
_ON = "on {{ $labels.instance }}"


def saturation(scale: Timescale) -> list[Alert]:
    """Return the alerts on saturation."""
    return [*_kv_cache(), *_queue(scale), *_waste(scale)]


def _kv_cache() -> list[Alert]:
    committed = "instance:inflight_kv_cache_committed:ratio"
    text = (
        "{{ $value | humanizePercentage }} of the blocks belong to running requests or are promised to them. Cached "
        "blocks are not counted: they are given up as soon as a request needs them."
    )
    return [
        Alert(
            "InflightKvCacheHigh",
            f"{committed} > {KV_HIGH}",
            5 * MINUTE,
            "warning",
            f"The KV cache is more than {KV_HIGH:.0%} taken {_ON}".replace("%", " %"),
            text,
        ),
        Alert(
            "InflightKvCacheFull",
            f"{committed} > {KV_FULL}",
            2 * MINUTE,
            "critical",
            f"The KV cache is full {_ON}",
            f"{text} New requests wait, or running ones are preempted.",
        ),
    ]


def _queue(scale: Timescale) -> list[Alert]:
    ratio = "instance:inflight_queue:ratio"
    ahead = scale.seconds(30 * MINUTE)
    # A queue that stepped up and stays looks as if it grew until the step has left the long window: it must be held
    # for as long, and grow now.
    window, now = scale.span(10 * MINUTE), scale.span(5 * MINUTE)
    return [
        Alert(
            "InflightQueueGrowing",
            f"predict_linear({ratio}[{window}], {ahead:g}) > 1 and deriv({ratio}[{now}]) > 0 and {ratio} > 0.1",
            10 * MINUTE,
            "warning",
            f"The queue grows towards its limit {_ON}",
            "As it has grown in the last ten minutes, it will be at {{ $value | humanizePercentage }} of its limit in "
            "half an hour; at 100 % requests are refused.",
        ),
        Alert(
            "InflightQueueNearLimit",
            f"{ratio} > {QUEUE_NEAR_LIMIT}",
            MINUTE,
            "critical",
            f"The queue is nearly full {_ON}",
            "It holds {{ $value | humanizePercentage }} of what may wait; beyond that requests are refused.",
        ),
    ]


def _waste(scale: Timescale) -> list[Alert]:
    hits = "instance:inflight_prefix_hit:ratio_rate30m"
    hour = f"offset {scale.span(HOUR)}"
    before = f"({hits} {hour})"
    admitted = f"inflight_request_queue_seconds_count[{scale.span(30 * MINUTE)}]"
    enough = " and ".join(
        f"sum by (instance) (increase({one})) >= {HIT_RATE_REQUESTS / scale.factor:g}"
        for one in (admitted, f"{admitted} {hour}")
    )
    return [
        Alert(
            "InflightPrefixHitRateDropped",
            f"{hits} < 0.5 * {before} and {before} > {WORTHWHILE_HIT_RATIO} and {enough}",
            15 * MINUTE,
            "warning",
            f"The prefix cache hits half as often as an hour ago {_ON}",
            "{{ $value | humanizePercentage }} of the prompt tokens of the last half hour came from the cache; the "
            "rest is computed, and first tokens come later.",
        ),
        Alert(
            "InflightPreemptions",
            f"instance:inflight_preemptions:rate5m > {PREEMPTIONS_PER_ADMISSION} * instance:inflight_admissions:rate5m",
            10 * MINUTE,
            "warning",
            f"Requests lose their blocks and are computed again {_ON}",
            '{{ $value | printf "%.2f" }} preemptions per second, more than one for ten admitted requests: the KV '
            "cache is too small for what runs.",
        ),
    ]
