"""Overview: is it well, what does it do, and is it as fast as promised?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, timeseries

from inflight.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    QueueFull,
    ShuttingDown,
    UnsupportedFeature,
)
from monitoring.generate.alerts import BURNS
from monitoring.generate.objectives import ITL, TTFT, Objective
from monitoring.generate.panels import TOKENS_PER_SECOND, Row, board, number, time_series
from monitoring.generate.promql import FAILURES_COUNTED, Query, mean, quantiles, rate, selector, total
from monitoring.generate.saturation import KV_HIGH, QUEUE_NEAR_LIMIT

_ERRORS = "|".join(
    kind.label
    for kind in (EngineFailure, InvalidRequest, UnsupportedFeature, QueueFull, ShuttingDown, DeadlineExceeded)
)
"""What the stages end requests with; the other errors are the clients' or stop a start."""


def _objective_panel(objective: Objective) -> timeseries.Panel:
    name = objective.name
    errors = f"instance:inflight_{name}_slo_errors:ratio_rate"
    return time_series(
        f"Late {objective.title}",
        f"Share of events that miss the objective ({objective.text}), over four windows. The line is the budget.",
        tuple(Query(f'max({errors}{window}{{instance=~"$instance"}})', window) for window in ("5m", "1h", "6h", "3d")),
        "percentunit",
        width=12,
        limit=objective.budget,
        alerts=tuple(f"Inflight{name.capitalize()}Burn{burn.name}" for burn in BURNS),
    )


def _number(title: str, text: str, expr: str, unit: str, alerts: tuple[str, ...] = ()) -> stat.Panel:
    return number(title, text, Query(expr), unit, width=4, height=4, alerts=alerts)


NOW = Row(
    "Now",
    (
        _number(
            "Servers up",
            "Targets that Prometheus can scrape.",
            'sum(up{job="inflight", instance=~"$instance"})',
            "short",
            ("InflightTargetDown", "InflightTargetGone", "InflightNotReady"),
        ),
        _number(
            "Alerts firing",
            "Alerts of these servers that fire now; Prometheus' page /alerts names them.",
            'count(ALERTS{alertstate="firing", alertname=~"Inflight.*", instance=~"$instance"}) or vector(0)',
            "short",
        ),
        _number("Requests", "Requests that end per second, well or not.", rate("inflight_requests_total"), "reqps"),
        _number(
            "Generated tokens",
            "Tokens generated per second.",
            rate("inflight_generated_tokens_total"),
            TOKENS_PER_SECOND,
        ),
        _number(
            "TTFT p95",
            f"Time to first token, from the arrival at the engine. Objective: {TTFT.text}.",
            quantiles(TTFT.family, "p95")[0].expr,
            "s",
            ("InflightTtftHigh",),
        ),
        _number(
            "ITL p95",
            f"Time between two tokens of a sequence. Objective: {ITL.text}.",
            quantiles(ITL.family, "p95")[0].expr,
            "s",
            ("InflightItlHigh",),
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        time_series(
            "Requests by outcome",
            "How requests end: stop, length and cancelled are ordinary ends; the others are errors.",
            (Query(rate("inflight_requests_total", "outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
            alerts=("InflightEngineErrors", "InflightRequestsRefused"),
        ),
        time_series(
            "Tokens",
            "Prompt tokens, those of them that came from the prefix cache, and tokens generated.",
            tuple(
                Query(rate(f"inflight_{name}_tokens_total"), legend)
                for name, legend in (("prompt", "prompt"), ("cached", "of these cached"), ("generated", "generated"))
            ),
            TOKENS_PER_SECOND,
        ),
        time_series(
            "Share of errors",
            "Requests that end with an error of Inflight's, and those that Triton answers with any error: "
            "a dead stage shows in the second only.",
            (
                Query(
                    f"{rate('inflight_requests_total', outcome='~' + _ERRORS)} / {rate('inflight_requests_total')}",
                    "Inflight",
                ),
                Query(
                    f"({rate('nv_inference_request_failure', model='ensemble')} / {FAILURES_COUNTED}) / "
                    f"({rate('nv_inference_request_failure', model='ensemble')} / {FAILURES_COUNTED} + "
                    f"{rate('nv_inference_request_success', model='ensemble')})",
                    "Triton",
                ),
            ),
            "percentunit",
            alerts=("InflightRequestsFailing", "InflightMostRequestsFailing"),
        ),
    ),
)

SPEED = Row(
    "Speed",
    (
        time_series(
            "Time to first token",
            "Quantiles, from the arrival at the engine. The line is the objective.",
            quantiles(TTFT.family, "p50", "p95", "p99"),
            "s",
            limit=TTFT.threshold_s,
            alerts=("InflightTtftHigh", "InflightTtftRising"),
        ),
        time_series(
            "Inter-token time",
            "Quantiles of the time between two tokens of one sequence. The line is the objective.",
            quantiles(ITL.family, "p50", "p95", "p99"),
            "s",
            limit=ITL.threshold_s,
            alerts=("InflightItlHigh", "InflightItlRising"),
        ),
        time_series(
            "Request duration",
            "From the arrival at the engine to the end of the request.",
            (
                *quantiles("inflight_request_duration_seconds", "p50", "p95", "p99"),
                Query(mean("inflight_request_duration_seconds"), "mean"),
            ),
            "s",
        ),
        _objective_panel(TTFT),
        _objective_panel(ITL),
    ),
)

SATURATION = Row(
    "Saturation",
    (
        time_series(
            "KV cache taken",
            "Blocks that belong to running requests or are promised to them, as a share of all. Cached blocks can be "
            "had and do not count.",
            (Query('instance:inflight_kv_cache_committed:ratio{instance=~"$instance"}', "{{instance}}"),),
            "percentunit",
            limit=KV_HIGH,
            alerts=("InflightKvCacheHigh", "InflightKvCacheFull"),
        ),
        time_series(
            "Queue",
            "Waiting requests as a share of the queue's limit.",
            (Query('instance:inflight_queue:ratio{instance=~"$instance"}', "{{instance}}"),),
            "percentunit",
            limit=QUEUE_NEAR_LIMIT,
            alerts=("InflightQueueGrowing", "InflightQueueNearLimit"),
        ),
        time_series(
            "Running and waiting",
            "Sequences in the running batch and in the queue; the batch's limit.",
            (
                Query(total("inflight_running_requests"), "running"),
                Query(total("inflight_waiting_requests"), "waiting"),
                Query(f"sum({selector('inflight_batch_size_limit')})", "batch limit"),
            ),
            alerts=("InflightNoTokenProgress",),
        ),
    ),
)

OVERVIEW = board(
    "inflight-overview",
    "Inflight / Overview",
    "Is it well, what does it do, and is it as fast as promised?",
    (NOW, TRAFFIC, SPEED, SATURATION),
)
