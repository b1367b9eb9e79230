"""Timescale: the time windows of the rules, as committed or all shortened by one factor.

A test cannot wait hours for an alert. It takes the same rules with every window, ``for`` and age divided by the factor,
and scrapes as much more often.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import DeploymentError

MINUTE, HOUR, DAY = 60, 3600, 86400
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


@dataclass(frozen=True)
class Timescale:
    """How often a committed second fits into one of this scale's."""

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
