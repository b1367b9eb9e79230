"""Alerts on a server that does not do its work: gone, not ready, dead inside, standing still, failing its requests."""

from __future__ import annotations

from inflight.contract import DETOKENIZER, ENGINE, ENSEMBLE, TOKENIZER
from inflight.errors import DeadlineExceeded, EngineFailure, QueueFull
from monitoring.generate.promql import FAILURES_COUNTED
from monitoring.generate.rule import HOUR, MINUTE, Alert, Timescale

JOB, READY_JOB = "inflight", "inflight-ready"
"""Jobs of monitoring/prometheus.yml: Triton's metrics, and its readiness endpoint."""
HEARTBEAT_S = 60
SLOWEST_START_S = 10 * MINUTE
"""A server that starts has no metrics port: Triton opens it once the last model is loaded. Where a start takes longer,
raise this and ``make dashboards``."""
RESTARTS_WINDOW_S, RESTARTS = HOUR, 3
"""So many starts within the window are a loop: a server that takes up to twenty minutes to start is seen in one."""
FEWEST, FEWEST_WINDOW_S = 3, 30 * MINUTE
"""Failed requests within the window below which none of them is an alert: of two requests at night one is a half."""
OUTAGE = 10
"""Failed requests within five minutes from which on somebody gets up if they are the most."""
STAGES = (TOKENIZER, ENGINE, DETOKENIZER)
_ON = "on {{ $labels.instance }}"


def health(scale: Timescale) -> list[Alert]:
    """Return the alerts on health."""
    return [*_presence(), *_stages(scale), *_failures(scale)]


def _presence() -> list[Alert]:
    down = f'up{{job="{JOB}"}} == 0 or absent(up{{job="{JOB}"}})'
    where = "{{ with $labels.instance }}{{ . }}{{ else }}any server{{ end }}"
    missing = f"count by (instance) (inflight_heartbeat_time_seconds) == {len(STAGES)}"
    return [
        Alert(
            "InflightTargetDown",
            down,
            MINUTE,
            "warning",
            f"No metrics from {where}",
            "Prometheus cannot scrape the metrics port: the server has ended, starts, or cannot be reached.",
        ),
        Alert(
            "InflightTargetGone",
            down,
            SLOWEST_START_S,
            "critical",
            f"No metrics from {where} for longer than a start takes",
            "Prometheus cannot scrape the metrics port: the server has ended, does not come up, or cannot be reached.",
        ),
        Alert(
            "InflightNotReady",
            f'up{{job="{READY_JOB}"}} == 0 and on (instance) up{{job="{JOB}"}} == 1',
            MINUTE,
            "critical",
            "{{ $labels.instance }} runs but is not ready",
            "Its metrics port answers; GET /v2/health/ready does not answer 200.",
        ),
        Alert(
            "InflightMetricsMissing",
            f'up{{job="{JOB}"}} == 1 unless on (instance) {missing}',
            5 * MINUTE,
            "warning",
            f"A stage exports no metrics {_ON}",
            f"The target answers, but not each of {', '.join(STAGES)} shows a heartbeat: the other alerts are blind.",
        ),
    ]


def _stages(scale: Timescale) -> list[Alert]:
    age = "time() - max by (instance, model) (inflight_heartbeat_time_seconds)"
    starts = f"changes(inflight_start_time_seconds[{scale.span(RESTARTS_WINDOW_S)}])"
    return [
        Alert(
            "InflightStageDead",
            f"{age} > {scale.seconds(HEARTBEAT_S):g}",
            0,
            "critical",
            f"The stage {{{{ $labels.model }}}} is dead or stopped {_ON}",
            "Its process last showed that it lives {{ $value | humanizeDuration }} ago. Triton may still "
            "call itself ready.",
        ),
        Alert(
            "InflightNoTokenProgress",
            f"{_standing('running', scale)} + {_standing('waiting', scale)} > 0 "
            f"unless ({_increase('inflight_generated_tokens_total', scale)} > 0 "
            f"or {_increase('inflight_step_tokens_total', scale)} > 0)",
            MINUTE,
            "critical",
            f"Requests run and no token is computed {_ON}",
            "{{ $value }} requests have been in the engine for a minute or more without one token of progress.",
        ),
        Alert(
            "InflightRestartLoop",
            f"max by (instance) ({starts}) >= {RESTARTS}",
            0,
            "critical",
            "{{ $labels.instance }} starts again and again",
            "It has started {{ $value }} times within an hour.",
        ),
    ]


def _failures(scale: Timescale) -> list[Alert]:
    outcomes = "instance_outcome:inflight_requests:rate5m"
    share = "/ on (instance) group_left () instance:inflight_requests:rate5m"
    internal = f'outcome="{EngineFailure.label}"'
    refused = f'outcome=~"{QueueFull.label}|{DeadlineExceeded.label}"'
    return [
        Alert(
            "InflightEngineErrors",
            f"{outcomes}{{{internal}}} {share} > 0.01 "
            f"and on (instance) {_count(f'inflight_requests_total{{{internal}}}', scale)}",
            2 * MINUTE,
            "critical",
            f"The engine fails requests {_ON}",
            "{{ $value | humanizePercentage }} of the requests end with a fault of the engine's own.",
        ),
        Alert(
            "InflightRequestsRefused",
            f"{outcomes}{{{refused}}} {share} > 0.05 "
            f"and on (instance) {_count(f'inflight_requests_total{{{refused}}}', scale)}",
            5 * MINUTE,
            "warning",
            f"Requests end as {{{{ $labels.outcome }}}} {_ON}",
            "{{ $value | humanizePercentage }} of the requests: the server gets more than it can do.",
        ),
        *_unanswered(scale),
    ]


def _unanswered(scale: Timescale) -> list[Alert]:
    """Return the alerts on requests that get no answer: the objectives count only those that get a token."""
    failures, successes = (f'nv_inference_request_{end}{{model="{ENSEMBLE}"}}' for end in ("failure", "success"))
    failed, done = (
        f"sum by (instance) (rate({counter}[{scale.span(5 * MINUTE)}]))" for counter in (failures, successes)
    )
    failed = f"{failed} / {FAILURES_COUNTED}"
    share = f"({failed}) / ({failed} + {done})"
    return [
        Alert(
            "InflightRequestsFailing",
            f"{share} > 0.1 and {_count(failures, scale, FAILURES_COUNTED * FEWEST)}",
            5 * MINUTE,
            "warning",
            f"Triton answers requests with errors {_ON}",
            "{{ $value | humanizePercentage }} of the requests to the ensemble fail, for whatever reason: refused as "
            "invalid, refused for load, or met by a stage that is gone.",
        ),
        Alert(
            "InflightMostRequestsFailing",
            f"{share} > 0.5 and {_count(failures, scale, FAILURES_COUNTED * OUTAGE, 5 * MINUTE)}",
            2 * MINUTE,
            "critical",
            f"Triton answers most requests with errors {_ON}",
            "{{ $value | humanizePercentage }} of the requests to the ensemble fail, for whatever reason.",
        ),
    ]


def _count(counter: str, scale: Timescale, minimum: int = FEWEST, seconds: float = FEWEST_WINDOW_S) -> str:
    """Return the condition that a counter has counted enough to be judged."""
    return f"sum by (instance) (increase({counter}[{scale.span(seconds)}])) >= {minimum / scale.factor:g}"


def _standing(state: str, scale: Timescale) -> str:
    return f"sum by (instance) (min_over_time(inflight_{state}_requests[{scale.span(MINUTE)}]))"


def _increase(counter: str, scale: Timescale) -> str:
    return f"sum by (instance) (increase({counter}[{scale.span(MINUTE)}]))"
