"""Alerts on the gateway of OpenAI's API: away, answering with faults, or serving another model than the reference."""

from __future__ import annotations

from inflight.metrics import PART_UP
from monitoring.generate.rule import MINUTE, Alert, Timescale

GATEWAY_JOB = "inflight-gateway"
"""The job of monitoring/prometheus.yml for the gateways' metrics."""
FAULTS, FEWEST_FAULTS = 0.05, 3
"""The share of faults among the answers from which on it is an alert, and how many there must be."""
DRIFT_NATS, DRIFT_WINDOW_S, DRIFT_TOKENS = 0.05, 30 * MINUTE, 2000
"""The difference of log-probs from the reference's, in nats for a token, from which on it is an alert, as much as
`inflight build` allows a quantized checkpoint (``quality.max_kl_divergence``); and how many tokens must be scored."""
_ON = "on {{ $labels.instance }}"


def gateway(scale: Timescale) -> list[Alert]:
    """Return the alerts on the gateway."""
    window = scale.span(5 * MINUTE)
    answers = f"sum by (instance) (rate(inflight_gateway_requests_total[{window}]))"
    faulty = 'inflight_gateway_requests_total{status="500"}'
    faults = f"sum by (instance) (rate({faulty}[{window}]))"
    enough = f"sum by (instance) (increase({faulty}[{window}])) >= {FEWEST_FAULTS / scale.factor:g}"
    # The page of all parts answers for a gateway that is away: there only its own word tells.
    answers_at_all = f'min by (instance) (up{{job="{GATEWAY_JOB}"}} or {PART_UP.name}{{part="gateway"}})'
    return [
        Alert(
            "InflightGatewayDown",
            f'{answers_at_all} == 0 and on (instance) up{{job="inflight"}} == 1',
            2 * MINUTE,
            "critical",
            f"No answer from the gateway {_ON}",
            "The server runs; its gateway does not answer GET /metrics with 200, so clients of OpenAI's API get none.",
        ),
        Alert(
            "InflightGatewayFaults",
            f"{faults} / {answers} > {FAULTS} and {enough}",
            2 * MINUTE,
            "critical",
            f"The gateway answers requests with 500 {_ON}",
            "{{ $value | humanizePercentage }} of its answers are faults of the gateway's or the engine's own.",
        ),
        _drift(scale),
    ]


def _drift(scale: Timescale) -> Alert:
    """Return the alert on answers that the reference finds less likely than the server did."""
    window = scale.span(DRIFT_WINDOW_S)
    above, below, tokens = (
        f"sum by (instance, mode) (increase(inflight_gateway_quality_{name}_total[{window}]))"
        for name in ("above_nats", "below_nats", "tokens")
    )
    return Alert(
        "InflightQualityDrift",
        f"({above} - {below}) / {tokens} > {DRIFT_NATS} and {tokens} >= {DRIFT_TOKENS / scale.factor:g}",
        10 * MINUTE,
        "warning",
        f"Answers drift from the reference's {_ON}",
        "A token of the answers whose mode is {{ $labels.mode }} has {{ $value | humanize }} nats less at the "
        "reference than as served.",
    )
