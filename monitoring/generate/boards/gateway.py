"""Gateway: what do clients of OpenAI's API ask, and what do they get?"""

from __future__ import annotations

from monitoring.generate.panels import TOKENS_PER_SECOND, Row, board, time_series
from monitoring.generate.promql import Query, quantiles, rate, total

REQUESTS = Row(
    "Requests",
    (
        time_series(
            "Answers by status",
            "Answers per second, by the status of HTTP; 499: the client left before its answer began.",
            (Query(rate("inflight_gateway_requests_total", "status"), "{{status}}"),),
            "reqps",
            stacked=True,
            alerts=("InflightGatewayDown", "InflightGatewayFaults"),
        ),
        time_series(
            "Answers by route",
            "Answers per second, by the path of the route.",
            (Query(rate("inflight_gateway_requests_total", "route"), "{{route}}"),),
            "reqps",
            stacked=True,
        ),
        time_series(
            "Requests under way",
            "Requests that have no whole answer yet, by the path of the route.",
            (Query(total("inflight_gateway_running_requests", "route"), "{{route}}"),),
            stacked=True,
        ),
    ),
)

TIMES = Row(
    "Times",
    (
        time_series(
            "First token at the gateway",
            "Quantiles, from the arrival at the gateway to the engine's first token, streamed or not.",
            quantiles("inflight_gateway_time_to_first_token_seconds", "p50", "p95", "p99"),
            "s",
        ),
        time_series(
            "Duration at the gateway",
            "Quantiles, from the arrival at the gateway to the end of the answer.",
            quantiles("inflight_gateway_request_duration_seconds", "p50", "p95", "p99"),
            "s",
        ),
        time_series(
            "Tokens of answers",
            "Tokens per second, by the path of the route.",
            (Query(rate("inflight_gateway_output_tokens_total", "route"), "{{route}}"),),
            TOKENS_PER_SECOND,
            stacked=True,
        ),
    ),
)

CLIENTS = Row(
    "Clients and engine",
    (
        time_series(
            "Clients that left",
            "Clients per second that left before the end of their answer, and those of them that read too slowly.",
            (
                Query(rate("inflight_gateway_disconnects_total"), "left"),
                Query(rate("inflight_gateway_slow_clients_total"), "too slow"),
            ),
            "reqps",
        ),
        time_series(
            "Unknown fields",
            "Fields of requests per second that are not known and had no effect, by name.",
            (Query(rate("inflight_gateway_ignored_fields_total", "field"), "{{field}}"),),
            "ops",
        ),
        time_series(
            "Engine ready",
            "1 while the gateway can call the engine, 0 while it answers 503.",
            (Query(total("inflight_gateway_engine_ready", "instance"), "{{instance}}"),),
        ),
    ),
)

BREAKS = time_series(
    "Breaks of the engine",
    "Requests per second whose engine broke away, by what came of them: resumed, repeated, or ended with an error.",
    (Query(rate("inflight_gateway_resumed_total", "outcome"), "{{outcome}}"),),
    "reqps",
    stacked=True,
)
_TOKENS = rate("inflight_gateway_quality_tokens_total", "mode")
_DRIFT = " - ".join(rate(f"inflight_gateway_quality_{one}_nats_total", "mode") for one in ("above", "below"))
QUALITY = Row(
    "Resumed answers, and quality in production",
    (
        BREAKS,
        time_series(
            "Drift from the reference",
            "Nats for a token: its log-prob as served less the reference's, the mean, by how tokens are chosen. Of the "
            "mode plain it estimates the KL divergence of the served model from the reference.",
            (Query(f"({_DRIFT}) / {_TOKENS}", "{{mode}}"),),
            alerts=("InflightQualityDrift",),
        ),
        time_series(
            "Difference in an answer",
            "Quantiles over answers, in nats: the absolute difference of log-probs, the mean of an answer's tokens.",
            quantiles("inflight_gateway_quality_answer_difference_nats", "p50", "p95", "p99"),
            alerts=("InflightQualityDrift",),
        ),
        time_series(
            "Tokens that the reference likes best",
            "The share of scored tokens that are the reference's likeliest, by how tokens are chosen.",
            (Query(f"{rate('inflight_gateway_quality_agreeing_tokens_total', 'mode')} / {_TOKENS}", "{{mode}}"),),
            "percentunit",
            alerts=("InflightQualityDrift",),
        ),
        time_series(
            "Tokens scored by the reference",
            "Tokens per second that the reference has scored, by how tokens are chosen.",
            (Query(_TOKENS, "{{mode}}"),),
            TOKENS_PER_SECOND,
            stacked=True,
        ),
        time_series(
            "Answers scored by the reference",
            "Answers per second, by what came of them: compared, failed, or dropped since too many waited.",
            (Query(rate("inflight_gateway_quality_answers_total", "outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
    ),
)

GATEWAY_BOARD = board(
    "inflight-gateway",
    "Inflight / Gateway",
    "What do clients of OpenAI's API ask, and what do they get?",
    (REQUESTS, TIMES, CLIENTS, QUALITY),
)
