"""Alert: one alert rule, before it is written for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from inflight.monitoring.timescale import Timescale

RUNBOOKS_PATH = "/public/runbooks"
"""Where Grafana of docker-compose.yml serves docs/runbooks."""


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
