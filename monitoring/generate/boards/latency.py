"""Latency anatomy: where does a request's time go?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries

from monitoring.generate.objectives import ITL, TTFT
from monitoring.generate.panels import Row, board, heat_map, time_series
from monitoring.generate.promql import Query, mean, per_server, quantiles, rate

_PHASES = ("queue", "prefill", "decode")


def _phase(name: str, text: str) -> timeseries.Panel:
    return time_series(name.capitalize(), text, quantiles(f"inflight_request_{name}_seconds", "p50", "p95", "p99"), "s")


def _stage(name: str, text: str) -> timeseries.Panel:
    histogram = f"inflight_{name}_seconds"
    return time_series(
        name.capitalize(), text, (*quantiles(histogram, "p50", "p99"), Query(mean(histogram), "mean")), "s"
    )


WHOLE = Row(
    "The whole request",
    (
        time_series(
            "Mean time by phase",
            "Where the mean request spends its time in the engine: waiting, computing its prompt, generating.",
            tuple(Query(mean(f"inflight_request_{phase}_seconds"), phase) for phase in _PHASES),
            "s",
            width=12,
            stacked=True,
            alerts=("InflightTtftBurnFast", "InflightTtftBurnSlow"),
        ),
        time_series(
            "End to end",
            "From the arrival at the engine to the end of the request.",
            quantiles("inflight_request_duration_seconds", "p50", "p95", "p99"),
            "s",
            width=12,
        ),
        heat_map(
            "End to end, all requests", "Requests per second by duration.", "inflight_request_duration_seconds", 24
        ),
    ),
)

FIRST = Row(
    "To the first token",
    (
        _phase("queue", "From the arrival at the engine to the first step: the queue and what admission waits for."),
        _phase("prefill", "From the first step to the first token: the prompt, without what the prefix cache has."),
        time_series(
            "Time to first token",
            "Queue and prefill. The line is the objective.",
            quantiles(TTFT.family, "p50", "p95", "p99"),
            "s",
            limit=TTFT.threshold_s,
            alerts=("InflightTtftHigh", "InflightTtftRising"),
        ),
        heat_map("Queue, all requests", "Requests per second by time in the queue.", "inflight_request_queue_seconds"),
        heat_map("Time to first token, all requests", "Requests per second by time to first token.", TTFT.family),
    ),
)

NEXT = Row(
    "From token to token",
    (
        _phase("decode", "From the first token to the last."),
        time_series(
            "Inter-token time",
            "Between two tokens of one sequence. The line is the objective.",
            quantiles(ITL.family, "p50", "p95", "p99"),
            "s",
            limit=ITL.threshold_s,
            alerts=("InflightItlHigh", "InflightItlRising", "InflightItlBurnFast", "InflightItlBurnSlow"),
        ),
        time_series(
            "Step duration",
            "The engine's part of the inter-token time.",
            quantiles("inflight_step_seconds", "p50", "p99"),
            "s",
        ),
        heat_map("Inter-token time, all tokens", "Tokens per second by the time since the one before.", ITL.family, 24),
    ),
)

STAGES = Row(
    "The text stages",
    (
        _stage("tokenizer", "Of one request."),
        _stage("detokenizer", "Of one response."),
        time_series(
            "Busy",
            "Share of wall time that the tokenizer and the detokenizer work, the mean of the servers. Near 100 % one "
            "of them is the bottleneck.",
            (
                Query(per_server("inflight_tokenizer_seconds_sum"), "tokenizer"),
                Query(per_server("inflight_detokenizer_seconds_sum"), "detokenizer"),
            ),
            "percentunit",
        ),
        time_series(
            "Calls",
            "Requests that the tokenizer and responses that the detokenizer handles per second.",
            (
                Query(rate("inflight_tokenizer_seconds_count"), "tokenizer"),
                Query(rate("inflight_detokenizer_seconds_count"), "detokenizer"),
            ),
            "ops",
            width=12,
        ),
        time_series(
            "Queue in Triton",
            "Mean time that a call of a stage waits in Triton before the stage gets it.",
            (
                Query(
                    f"{rate('nv_inference_queue_duration_us', 'model')} / 1e6 / "
                    f"{rate('nv_inference_request_success', 'model')}",
                    "{{model}}",
                ),
            ),
            "s",
            width=12,
        ),
    ),
)

LATENCY = board(
    "inflight-latency",
    "Inflight / Latency anatomy",
    "Where does a request's time go?",
    (WHOLE, FIRST, NEXT, STAGES),
)
