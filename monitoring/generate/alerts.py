"""The alert rules: what is wrong, how bad, and where it is written what to do.

An alert is named after its symptom. Each has a runbook of its name in docs/runbooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from monitoring.generate.gateway import gateway
from monitoring.generate.health import health
from monitoring.generate.objectives import Objective, Objectives
from monitoring.generate.rule import DAY, HOUR, MINUTE, Alert, Timescale
from monitoring.generate.saturation import saturation


@dataclass(frozen=True)
class Burn:
    """One tier of the multi-window alerts on the burn rate of an error budget.

    Both windows must burn: the long one says that it matters, the short one that it still goes on. Factors and windows
    are those of Google's SRE Workbook, "Alerting on SLOs", table 5-8, for a budget of 30 days.
    """

    name: str
    factor: float
    long: str
    short: str
    long_s: float
    severity: Literal["critical", "warning"]
    spent: str

    @property
    def pace(self) -> str:
        """How fast it burns, in words."""
        return "too fast" if self.factor == 1 else f"{self.factor:g} times too fast"


BURNS = (
    Burn("Fast", 14.4, "1h", "5m", HOUR, "critical", "2 % of the month's budget per hour"),
    Burn("Slow", 6, "6h", "30m", 6 * HOUR, "warning", "5 % of the month's budget in six hours"),
    Burn("Sustained", 1, "3d", "6h", 3 * DAY, "warning", "10 % of the month's budget in three days"),
)
RISING_FACTOR = 2


def alerts(objectives: Objectives, scale: Timescale) -> dict[str, list[Alert]]:
    """Return the alert rules by their groups."""
    latency = [
        *_latency(objectives.ttft, "Ttft", "time_to_first_token", scale),
        *_latency(objectives.itl, "Itl", "inter_token", scale),
    ]
    return {
        "inflight-latency": latency,
        "inflight-saturation": saturation(scale),
        "inflight-health": health(scale),
        "inflight-gateway": gateway(scale),
    }


def _latency(objective: Objective, name: str, short: str, scale: Timescale) -> list[Alert]:
    p95, mean = (f"instance:inflight_{short}_seconds:{what}_5m" for what in ("p95", "mean"))
    floor = f"{objective.threshold_s / 4:g}"
    return [
        *(_burn(objective, name, burn, scale) for burn in BURNS),
        Alert(
            f"Inflight{name}High",
            f"{p95} > {objective.bound}",
            10 * MINUTE,
            "warning",
            f"More than 5 % of {objective.title} are above {objective.bound} s on {{{{ $labels.instance }}}}",
            "The 95th percentile of the last five minutes is {{ $value | humanizeDuration }}; "
            f"the objective is {objective.text}.",
        ),
        # Below a quarter of the objective a doubling is noise: nobody waits for it.
        Alert(
            f"Inflight{name}Rising",
            f"{mean} > {RISING_FACTOR} * ({mean} offset {scale.span(HOUR)}) and {mean} > {floor} "
            f"and {_enough(objective, 5 * MINUTE, scale)}",
            10 * MINUTE,
            "warning",
            f"{objective.title.capitalize()} have doubled within an hour on {{{{ $labels.instance }}}}",
            "Their mean is {{ $value | humanizeDuration }}, more than twice that of an hour ago.",
        ),
    ]


def _burn(objective: Objective, name: str, burn: Burn, scale: Timescale) -> Alert:
    errors = f"instance:inflight_{objective.name}_slo_errors:ratio_rate"
    limit = f"{burn.factor} * {objective.budget:g}"
    return Alert(
        f"Inflight{name}Burn{burn.name}",
        f"{errors}{burn.long} > {limit} and {errors}{burn.short} > {limit} "
        f"and {_enough(objective, burn.long_s, scale)}",
        2 * MINUTE,
        burn.severity,
        f"The error budget of {objective.title} burns {burn.pace} on {{{{ $labels.instance }}}}",
        f"{{{{ $value | humanizePercentage }}}} of {objective.title} in the last {burn.long} took longer than "
        f"{objective.bound} s; the objective is {objective.text}. That is at least {burn.spent}.",
    )


def _enough(objective: Objective, seconds: float, scale: Timescale) -> str:
    """Return the condition that a window has the events that it takes to judge an objective."""
    return " and ".join(
        f"sum by (instance) (increase({family}_count[{scale.span(seconds)}])) >= {minimum / scale.factor:g}"
        for family, minimum in objective.minimum.items()
    )
