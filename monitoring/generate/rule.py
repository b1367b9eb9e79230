"""What alert rules and recording rules are made of: an alert, and the scale of their time windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from inflight.errors import DeploymentError

MINUTE, HOUR, DAY = 60, 3600, 86400
RUNBOOKS_PATH = "/public/runbooks"
"""Where Grafana of docker-compose.yml serves docs/runbooks."""
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


@dataclass(frozen=True)
class Timescale:
    """The time windows of the rules, as committed or all shortened by one factor.

    A test cannot wait hours for an alert. It takes the same rules with every window, ``for`` and age divided by the
    factor, and scrapes as much more often.
    """

    factor: float = 1

    def __post_init__(self) -> None:
        """Refuse a factor that shortens nothing or turns time around.

        Raises:
            DeploymentError: the factor is below 1.
        """
        if not self.factor >= 1:
            raise DeploymentError(f"time scale: {self.factor:g} is not allowed; it must be 1 (as committed) or more")

    def seconds(self, seconds: float) -> float:
        """Return a committed number of seconds in this scale."""
        return seconds / self.factor

    def span(self, seconds: float) -> str:
        """Return a committed number of seconds as a duration of PromQL in this scale, to the millisecond."""
        left, text = max(1, round(self.seconds(seconds) * 1000)), ""
        for unit, size in _UNITS:
            count, left = divmod(left, size)
            text += f"{count}{unit}" if count else ""
        return text


@dataclass(frozen=True)
class Alert:
    """One alert rule; its expression has the windows of a time scale already."""

    name: str
    expr: str
    hold_s: float
    """How long it must be true before it fires, in committed seconds."""
    severity: Literal["critical", "warning"]
    """critical: somebody acts now; warning: somebody acts in working hours."""
    summary: str
    description: str

    def as_rule(self, scale: Timescale, runbooks: str) -> dict[str, Any]:
        """Return the rule as Prometheus reads it; ``runbooks`` is the URL of the folder of runbooks."""
        return {
            "alert": self.name,
            "expr": self.expr,
            **({"for": scale.span(self.hold_s)} if self.hold_s else {}),
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks.rstrip('/')}/{self.name}.md",
            },
        }
