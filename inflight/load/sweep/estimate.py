"""How long a sweep will take, said before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator

from inflight.load.sweep.scenario import Kind, StepLength
from inflight.load.sweep.search import Plan


def estimate(plan: Plan, seconds: float) -> str:
    """Return a line on how long a sweep takes at the most, if noise makes it repeat nothing.

    Args:
        plan: what it looks for.
        seconds: of a step's window, at least.
    """
    kind: Kind = "rate" if plan.open else "concurrency"
    length = StepLength(seconds, 0.0)  # how long requests take is not known yet
    ladder = list(_ladder(plan))
    up = [window + length.warm_up_s(window) for window in (length.window_s(load, kind) for load in ladder)]
    closing = closing_steps(plan)
    most = sum(up) + closing * (seconds + length.warm_up_s(seconds))
    return (
        f"up to {len(ladder)} steps from {plan.low:g} to {plan.high:g}, as far as the server keeps up, and about "
        f"{closing} to close in: {_minutes(most)} at the most, and longer where noise makes it repeat steps"
    )


def closing_steps(plan: Plan) -> int:
    """Return how often the gaps around the points that are looked for are halved, until they are within tolerance."""
    points = 1 if plan.share is None else 2
    gap, tolerance = math.log(min(plan.factor, plan.high / plan.low)), math.log1p(plan.tolerance)
    return points * max(math.ceil(math.log2(max(gap, tolerance) / tolerance)), 0)


def _ladder(plan: Plan) -> Iterator[float]:
    """Yield the loads of the way up."""
    load = plan.low
    while load < plan.high:
        yield load
        load *= plan.factor
    yield plan.high


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
