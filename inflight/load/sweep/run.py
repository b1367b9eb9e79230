"""A sweep against a server: each step is a load test of its own, warm-up first; the server is idle before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from inflight.client import GenerateOptions
from inflight.errors import InflightError
from inflight.load.arrivals import Phase
from inflight.load.report import FEW_SAMPLES
from inflight.load.result import LoadResult
from inflight.load.run_command import Target, run_scenario
from inflight.load.runner import client_for
from inflight.load.scenario import Scenario, ScenarioError
from inflight.load.sweep.search import Search
from inflight.load.sweep.step import Step

MOST_STRETCH = 3
"""How many times as long as asked for a window may get, to see enough requests."""
_ENOUGH_REQUESTS = 100
"""The requests that a window should see: 5 % of them, which may miss a limit, are five."""
_SHORTEST_WARM_UP = 0.25
"""The shortest warm-up, as a share of the window."""
FAILURE_LIMIT = 0.02
"""A step of which more than 2 % of the requests end with an error is no answer: below it, errors alone cannot pass for
a server that does not keep up."""
_PROBE = "Hello"


class SweepError(InflightError):
    """A sweep that cannot go on; the message is one line."""


@dataclass(frozen=True)
class StepLength:
    """How long a step lasts. It is fixed before the step begins: a step that ended at a moment chosen by what it
    measures would be biased towards what ends it."""

    seconds: float
    """Shortest length of the window that is measured."""
    slowest_s: float = 0.0
    """How long the slowest requests take on a server without load (95th percentile of E2E); 0: it is not known yet."""

    def window_s(self, load: float, is_open: bool) -> float:
        """Return the length of the window: enough requests, each of which is short beside it, but no more than
        ``MOST_STRETCH`` times ``seconds``."""
        expected = load if is_open else load / max(self.slowest_s, 1e-3)
        wanted = max(_ENOUGH_REQUESTS / expected, 4 * self.slowest_s)
        return min(max(self.seconds, wanted), MOST_STRETCH * self.seconds)

    def warm_up_s(self, window_s: float) -> float:
        """Return the time before the window: requests must have begun to end before it begins."""
        return max(_SHORTEST_WARM_UP * window_s, 1.5 * self.slowest_s)


def step_scenario(base: Scenario, is_open: bool, load: float, length: StepLength) -> Scenario:
    """Return ``base`` at one load: classes, seed and, of an open loop, the kind of arrivals are its own."""
    window = length.window_s(load, is_open)
    warm_up = length.warm_up_s(window)
    what: dict[str, object] = {"rate": load} if is_open else {"concurrency": round(load)}
    if is_open and base.phases and base.phases[0].open:
        steady = next(phase for phase in base.phases if phase.steady)
        what["arrivals"] = steady.arrivals
        if steady.arrivals == "gamma":
            what["burstiness"] = steady.burstiness
    phases = (
        Phase.model_validate({"name": "warm-up", "duration_s": warm_up, "steady": False, **what}),
        Phase.model_validate({"name": "steady", "duration_s": window, **what}),
    )
    # An overloaded server has at most this load's share of the step to work off.
    return base.model_copy(update={"phases": phases, "drain_s": max(base.drain_s, 2 * (window + warm_up))})


@dataclass
class Sweep:
    """Measures the steps of a sweep; ``measure`` is what a ``Search`` calls."""

    scenario: Scenario
    target: Target
    open: bool
    """Whether a load is sessions per second; else sessions at a time."""
    length: StepLength
    """How long requests take is learnt by the first step."""
    seed: int
    """The seed of the first run at each load; repeats count up from it."""
    tell: Callable[[str], object]
    """Takes a line about each step."""

    def measure(self, load: float, repeat: int) -> Step:
        """Run one step.

        Raises:
            KeyboardInterrupt: it was interrupted; what it had measured is dropped, as it is not of a whole window.
            ScenarioError: no request of the first step was answered.
            SweepError: requests failed; those that the server refuses are part of an answer.
        """
        unit = "sessions/s" if self.open else "sessions at a time"
        self.tell(f"{load:g} {unit}{f', repeat {repeat}' if repeat else ''}")
        result = self._run(load, repeat)
        if not self.length.slowest_s:
            result = self._after_first(load, repeat, result)
        step = Step.of(load, result)
        if step.failed > FAILURE_LIMIT * step.sent:
            raise SweepError(
                f"at a load of {load:g}, {step.failed} of {step.sent} requests failed; the first with {_error(result)}"
            )
        if step.left:
            asyncio.run(self._drain())
        self.tell(f"  {describe(step)}")
        return step

    def _run(self, load: float, repeat: int) -> LoadResult:
        scenario = step_scenario(self.scenario, self.open, load, self.length)
        result = run_scenario(scenario, self.target, self.seed + repeat, "inflight load sweep")
        if result.fault:
            raise SweepError(result.fault)
        if result.interrupted:
            raise KeyboardInterrupt
        return result

    def _after_first(self, load: float, repeat: int, result: LoadResult) -> LoadResult:
        """Learn how long requests take, and measure again if the step was too short for that."""
        figures = result.figures
        if figures.e2e_ms is None:
            ended = ", ".join(f"{count} {name}" for name, count in figures.outcomes.items()) or "none was sent"
            raise ScenarioError(f"at the lowest load, {load:g}, no request was answered ({ended}); {_error(result)}")
        before, self.length = self.length, replace(self.length, slowest_s=figures.e2e_ms.p95 / 1000)
        window, slowest_s = before.window_s(load, self.open), self.length.slowest_s
        if before.warm_up_s(window) >= 1.5 * slowest_s and window >= 4 * slowest_s:
            return result
        self.tell(f"  requests take {slowest_s:.1f} s: the step was too short, again")
        return self._run(load, repeat)

    async def _drain(self) -> None:
        """Wait until the server has done with requests that were cut off: one more waits for its turn behind them."""
        async with client_for(self.target.url, self.target.http) as client:
            await client.generate(_PROBE, GenerateOptions(max_tokens=1))


def run_search(search: Search) -> str:
    """Run a search; return what stopped it before its end, or nothing.

    Raises:
        InflightError: what stopped it, if nothing had been measured by then.
    """
    try:
        search.run()
    except KeyboardInterrupt:
        return "it was interrupted"
    except InflightError as error:
        if not search.levels:
            raise
        return str(error)
    return ""


def describe(step: Step) -> str:
    """Return a step in a line."""
    figures = step.figures
    parts = [f"{step.answered:.2f} of {step.offered:.2f} requests/s answered"]
    for label, one in (("TTFT", figures.ttft_ms), ("ITL", figures.itl_ms)):
        if one is not None:
            few = f" of {one.count} samples" if one.count < FEW_SAMPLES else ""
            parts.append(f"{label} p50 {one.p50:,.1f} p99 {one.p99:,.1f} ms{few}")
    if figures.slo_attainment is not None:
        parts.append(f"{figures.slo_attainment:.1%} within the limits")
    parts += [f"{count} {name}" for name, count in sorted(figures.outcomes.items()) if name != "completed"]
    parts += [f"the client was the bottleneck: {reason}" for reason in step.client_reasons]
    return ", ".join(parts)


def _error(result: LoadResult) -> str:
    failed = [one.error for one in result.records if one.outcome == "failed"]
    return next(iter(failed or [one.error for one in result.records if one.error]), "no error was told")
