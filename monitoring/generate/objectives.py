"""The service level objectives: what share of events must be faster than what. The one place that says so.

Alert rules and dashboards take their numbers from here; after a change, ``make dashboards``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.errors import DeploymentError
from inflight.metrics import FAMILIES


@dataclass(frozen=True)
class Objective:
    """A share ``target`` of the events of a histogram takes ``threshold_s`` seconds at most."""

    name: str
    """Short, as it stands in the names of rules: ``ttft``."""
    title: str
    family: str
    """The histogram of seconds that it is measured by."""
    threshold_s: float
    target: float
    minimum: Mapping[str, int]
    """How many events of which histograms the long window of an alert must have: one slow request at night is no
    outage, however many tokens it has."""

    def __post_init__(self) -> None:
        """Refuse what cannot be counted.

        Raises:
            DeploymentError: the threshold is no bucket's bound, so that good events cannot be told from bad ones, or
                the target is not between 0 and 1.
        """
        bounds = FAMILIES[self.family].buckets
        if self.threshold_s not in bounds:
            near = min(bounds, key=lambda bound: abs(bound - self.threshold_s))
            allowed = ", ".join(f"{bound:g}" for bound in bounds)
            raise DeploymentError(
                f"objective {self.name}: {self.threshold_s:g} s is no bucket of {self.family}: {allowed} "
                f"(did you mean {near:g}?)"
            )
        if not 0 < self.target < 1:
            raise DeploymentError(f"objective {self.name}: a target between 0 and 1 is expected, not {self.target:g}")

    @property
    def budget(self) -> float:
        """The share of events that may be slower."""
        return round(1 - self.target, 6)

    @property
    def bound(self) -> str:
        """The threshold as Triton writes it into the label ``le``: 0.1, 1."""
        return f"{self.threshold_s:g}"

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.target * 100:g} % of {self.title} within {self.threshold_s:g} s"


_FIRST, _NEXT = "inflight_time_to_first_token_seconds", "inflight_inter_token_seconds"
_REQUESTS = {_FIRST: 20}
TTFT = Objective("ttft", "times to first token", _FIRST, 1.0, 0.99, _REQUESTS)
ITL = Objective("itl", "inter-token times", _NEXT, 0.1, 0.99, _REQUESTS | {_NEXT: 1000})


@dataclass(frozen=True)
class Objectives:
    """What a server is held to."""

    ttft: Objective = TTFT
    itl: Objective = ITL
