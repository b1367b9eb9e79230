"""A sweep against a server: each step is a load test of its own, and the server is idle before the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from inflight.client import GenerateOptions
from inflight.errors import InflightError
from inflight.load.result import LoadResult
from inflight.load.run_command import Target, run_scenario
from inflight.load.runner import client_for
from inflight.load.scenario import Scenario, ScenarioError, Slo
from inflight.load.sweep.scenario import Kind, StepLength, step_scenario
from inflight.load.sweep.search import Search
from inflight.load.sweep.step import Step

FAILURE_LIMIT = 0.02
"""A step of which more than 2 % of the requests end with an error is no answer: below it, errors alone cannot pass for
a server that does not keep up."""
_PROBE = "Hello"


class SweepError(InflightError):
    """A sweep that cannot go on; the message is one line."""


class Sweep:
    """Measures the steps of a sweep; ``measure`` is what a ``Search`` calls."""

    def __init__(
        self,
        scenario: Scenario,
        target: Target,
        kind: Kind,
        slo: Slo | None,
        seconds: float,
        seed: int,
        tell: Callable[[str], object],
    ) -> None:
        """
        Args:
            scenario: its requests are sent.
            target: where to.
            kind: what a load is.
            slo: in place of the scenario's limits.
            seconds: length of a step's window, at least.
            seed: of the first run at each load; repeats count up from it.
            tell: is given a line about each step.
        """
        self._scenario, self._target, self._kind, self._slo = scenario, target, kind, slo
        self._seed, self._tell = seed, tell
        self._length = StepLength(seconds, 0.0)
        self._first = True

    def measure(self, load: float, repeat: int) -> Step:
        """Run one step.

        Raises:
            KeyboardInterrupt: it was interrupted; what it had measured is dropped, as it is not of a whole window.
            ScenarioError: no request of the first step was answered.
            SweepError: requests failed; those that the server refuses are part of an answer.
        """
        self._tell(f"{load:g} {unit(self._kind)}{f', repeat {repeat}' if repeat else ''}")
        result = self._run(load, repeat)
        if self._first:
            result = self._after_first(load, repeat, result)
        step = Step.of(load, result)
        if step.failed > FAILURE_LIMIT * step.sent:
            raise SweepError(
                f"at a load of {load:g}, {step.failed} of {step.sent} requests failed; the first with {_error(result)}"
            )
        self._drain(step)
        self._tell(f"  {describe(step)}")
        return step

    def _run(self, load: float, repeat: int) -> LoadResult:
        scenario = step_scenario(self._scenario, self._kind, load, self._length, self._slo)
        result = run_scenario(scenario, self._target, self._seed + repeat, "inflight load sweep")
        if result.fault:
            raise SweepError(result.fault)
        if result.fault:
            raise SweepError(result.fault)
        if result.interrupted:
            raise KeyboardInterrupt
        return result

    def _after_first(self, load: float, repeat: int, result: LoadResult) -> LoadResult:
        """Learn how long requests take, and measure again if the step was too short for that."""
        figures = result.figures()
        if figures.e2e_ms is None:
            ended = ", ".join(f"{count} {name}" for name, count in figures.outcomes.items()) or "none was sent"
            raise ScenarioError(f"at the lowest load, {load:g}, no request was answered ({ended}); {_error(result)}")
        before, self._length = self._length, replace(self._length, slowest_s=figures.e2e_ms.p95 / 1000)
        self._first = False
        window = before.window_s(load, self._kind)
        if before.warm_up_s(window) >= 1.5 * self._length.slowest_s and window >= 4 * self._length.slowest_s:
            return result
        self._tell(f"  requests take {self._length.slowest_s:.1f} s: the step was too short, again")
        return self._run(load, repeat)

    def _drain(self, step: Step) -> None:
        """Wait until the server has nothing left to do. It has nothing where all requests have ended by themselves;
        where some were cut off, a last one waits for its turn behind them."""
        if step.left:
            asyncio.run(self._probe())

    async def _probe(self) -> None:
        async with client_for(self._target.url, self._target.http) as client:
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


def unit(kind: Kind) -> str:
    """Return what a load counts."""
    return "sessions/s" if kind == "rate" else "sessions at a time"


def describe(step: Step) -> str:
    """Return a step in a line."""
    figures = step.figures
    parts = [f"{step.answered:.2f} of {step.offered:.2f} requests/s answered"]
    for label, one in (("TTFT", figures.ttft_ms), ("ITL", figures.itl_ms)):
        if one is not None:
            parts.append(f"{label} p50 {one.p50:,.1f} p99 {one.p99:,.1f} ms")
    if figures.slo_attainment is not None:
        parts.append(f"{figures.slo_attainment:.1%} within the limits")
    parts += [f"{count} {name}" for name, count in sorted(figures.outcomes.items()) if name != "completed"]
    parts += [f"the client was the bottleneck: {reason}" for reason in step.client_reasons]
    return ", ".join(parts)


def _error(result: LoadResult) -> str:
    failed = [one.error for one in result.records if one.outcome == "failed"]
    return next(iter(failed or [one.error for one in result.records if one.error]), "no error was told")
