"""The recording rules: rates, quantiles, ratios and the shares of events that miss an objective, per instance.

Named ``instance:<metric>:<operation>``, as Prometheus recommends: level, metric, what was done to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from monitoring.generate.objectives import Objective, Objectives
from monitoring.generate.rule import DAY, HOUR, MINUTE, Timescale

BURN_WINDOWS = {"5m": 5 * MINUTE, "30m": 30 * MINUTE, "1h": HOUR, "6h": 6 * HOUR, "3d": 3 * DAY}
"""Windows of the burn rates by their names; a name stays what it is when windows are scaled."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_HISTOGRAMS = {
    "time_to_first_token": "inflight_time_to_first_token_seconds",
    "inter_token": "inflight_inter_token_seconds",
    "request_duration": "inflight_request_duration_seconds",
    "request_queue": "inflight_request_queue_seconds",
    "request_prefill": "inflight_request_prefill_seconds",
    "request_decode": "inflight_request_decode_seconds",
}


@dataclass(frozen=True)
class Recording:
    """One recording rule."""

    record: str
    expr: str


def recordings(objectives: Objectives, scale: Timescale) -> dict[str, list[Recording]]:
    """Return the recording rules by their groups."""
    return {
        "inflight-rates": list(_rates(scale)),
        "inflight-quantiles": list(_quantiles(scale)),
        "inflight-saturation": list(_saturation(scale)),
        "inflight-objectives": [*_objective(objectives.ttft, scale), *_objective(objectives.itl, scale)],
    }


def _rates(scale: Timescale) -> Iterator[Recording]:
    window = scale.span(5 * MINUTE)
    yield Recording(
        "instance_outcome:inflight_requests:rate5m",
        f"sum by (instance, outcome) (rate(inflight_requests_total[{window}]))",
    )
    yield Recording("instance:inflight_requests:rate5m", _rate("inflight_requests_total", window))
    for name in ("prompt", "cached", "generated", "recomputed"):
        yield Recording(f"instance:inflight_{name}_tokens:rate5m", _rate(f"inflight_{name}_tokens_total", window))
    yield Recording("instance:inflight_preemptions:rate5m", _rate("inflight_preemptions_total", window))
    # Each admitted request has left the queue once, also where it goes back to it later.
    admissions = _rate("inflight_request_queue_seconds_count", window)
    yield Recording("instance:inflight_admissions:rate5m", admissions)


def _quantiles(scale: Timescale) -> Iterator[Recording]:
    window = scale.span(5 * MINUTE)
    for short, family in _HISTOGRAMS.items():
        for name, quantile in QUANTILES.items():
            yield Recording(
                f"instance:inflight_{short}_seconds:{name}_5m",
                f"histogram_quantile({quantile}, sum by (instance, le) (rate({family}_bucket[{window}])))",
            )
        # A quantile moves from one bucket's bound to the next, a mean by as much as the times do.
        yield Recording(
            f"instance:inflight_{short}_seconds:mean_5m",
            f"{_rate(f'{family}_sum', window)} / {_rate(f'{family}_count', window)}",
        )


def _saturation(scale: Timescale) -> Iterator[Recording]:
    window, half_hour = scale.span(5 * MINUTE), scale.span(30 * MINUTE)
    # Cached blocks can be had, so they are no load. Blocks that are promised cannot, though they are still free or
    # cached: with the policy guaranteed_no_evict a request is admitted with room for its longest answer. Engines that
    # promise none do not export them.
    used = 'sum by (instance) (inflight_kv_cache_blocks{state="used"})'
    yield Recording(
        "instance:inflight_kv_cache_committed:ratio",
        f"({used} + (sum by (instance) (inflight_kv_cache_reserved_blocks) or 0 * {used}))"
        " / sum by (instance) (inflight_kv_cache_blocks)",
    )
    yield Recording(
        "instance:inflight_queue:ratio",
        "sum by (instance) (inflight_waiting_requests) / sum by (instance) (inflight_queue_limit)",
    )
    yield Recording(
        "instance:inflight_batch_occupancy:ratio_rate5m",
        f"{_rate('inflight_step_sequences_total', window)} / {_rate('inflight_steps_total', window)}"
        " / sum by (instance) (inflight_batch_size_limit)",
    )
    yield Recording(
        "instance:inflight_prefix_hit:ratio_rate30m",
        f"{_rate('inflight_cached_tokens_total', half_hour)} / {_rate('inflight_prompt_tokens_total', half_hour)}",
    )


def _objective(objective: Objective, scale: Timescale) -> Iterator[Recording]:
    for name, seconds in BURN_WINDOWS.items():
        window = scale.span(seconds)
        good = f'rate({objective.family}_bucket{{le="{objective.bound}"}}[{window}])'
        yield Recording(
            f"instance:inflight_{objective.name}_slo_errors:ratio_rate{name}",
            f"1 - sum by (instance) ({good}) / {_rate(objective.family + '_count', window)}",
        )


def _rate(counter: str, window: str) -> str:
    return f"sum by (instance) (rate({counter}[{window}]))"
