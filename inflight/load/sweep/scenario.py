"""The load test that one step of a sweep is: the scenario's requests at one load, warm-up first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inflight.load.arrivals import Phase
from inflight.load.scenario import Scenario, ScenarioError, Slo

Kind = Literal["rate", "concurrency"]
MOST_STRETCH = 3
"""How many times as long as asked for a window may get, to see enough requests."""
_ENOUGH_REQUESTS = 100
"""In a window: a share of 95 % is five of them."""
_SHORTEST_WARM_UP = 0.25
"""Of the window."""


@dataclass(frozen=True)
class StepLength:
    """How long a step lasts. It is fixed before the step begins: a step that ended at a moment chosen by what it
    measures would be biased towards what ends it."""

    seconds: float
    """Of the window that is measured, at least."""
    slowest_s: float
    """How long the slowest requests take on a server without load (95th percentile of E2E)."""

    def window_s(self, load: float, kind: Kind) -> float:
        """Return the length of the window: enough requests, each of which is short beside it, but no more than
        ``MOST_STRETCH`` times ``seconds``."""
        expected = load if kind == "rate" else load / max(self.slowest_s, 1e-3)
        wanted = max(_ENOUGH_REQUESTS / expected, 4 * self.slowest_s)
        return min(max(self.seconds, wanted), MOST_STRETCH * self.seconds)

    def warm_up_s(self, window_s: float) -> float:
        """Return the time before the window: requests must have begun to end before it begins."""
        return max(_SHORTEST_WARM_UP * window_s, 1.5 * self.slowest_s)


def step_scenario(base: Scenario, kind: Kind, load: float, length: StepLength, slo: Slo | None) -> Scenario:
    """Return ``base`` at one load.

    Args:
        base: classes, seed and, of an open loop, the kind of arrivals are its own.
        kind: what ``load`` is: sessions per second, or at a time.
        load: see ``kind``.
        length: how long it lasts.
        slo: limits of all classes, in place of the scenario's.
    """
    window = length.window_s(load, kind)
    warm_up = length.warm_up_s(window)
    what: dict[str, object] = {"concurrency": round(load)} if kind == "concurrency" else {"rate": load}
    if kind == "rate" and base.phases and base.phases[0].open:
        steady = next(phase for phase in base.phases if phase.steady)
        what["arrivals"] = steady.arrivals
        if steady.arrivals == "gamma":
            what["burstiness"] = steady.burstiness
    phases = (
        Phase.model_validate({"name": "warm-up", "duration_s": warm_up, "steady": False, **what}),
        Phase.model_validate({"name": "steady", "duration_s": window, **what}),
    )
    # An overloaded server has at most this load's share of the step to work off.
    update: dict[str, object] = {"phases": phases, "drain_s": max(base.drain_s, 2 * (window + warm_up))}
    limited = base if slo is None else base.with_limits(slo)
    return limited.model_copy(update=update)


def check_sweepable(scenario: Scenario, is_open: bool) -> None:
    """Refuse a scenario whose load cannot be chosen.

    Raises:
        ScenarioError: it replays a trace; or it is to be swept as an open loop and a class has conversations, whose
            later turns come so long after a step's begin that its load would not be the one it is named after.
    """
    if scenario.trace is not None:
        raise ScenarioError(f"{scenario.name}: a trace has its own load; a sweep needs a scenario with `classes`")
    talking = [one.name for one in scenario.classes if one.turns is not None or one.conversations is not None]
    if is_open and talking:
        raise ScenarioError(
            f"{scenario.name}: conversations (class {', '.join(map(repr, talking))}) cannot be swept with --kind rate, "
            f"as later turns come when earlier ones are answered; --kind concurrency can"
        )


def has_limits(scenario: Scenario, slo: Slo | None) -> bool:
    """Return whether there is any limit for a request to keep."""
    given = [slo] if slo is not None else [scenario.slo, *(one.slo for one in scenario.classes)]
    return any(one not in (None, Slo()) for one in given)
