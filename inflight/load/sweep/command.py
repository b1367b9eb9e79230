"""``inflight load sweep``: how much load a server takes."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from inflight.load.result import REPORT, make_directory, write
from inflight.load.run_command import DeploymentAtUrl, Http, Limits, Serve, Url, check_target, target_at
from inflight.load.scenario import Scenario, ScenarioError, load_scenario, parse_slo
from inflight.load.sweep.report import SweepResult, sweep_page
from inflight.load.sweep.run import StepLength, Sweep, run_search
from inflight.load.sweep.search import Search, SweepPlan
from inflight.report.failures import one_line_errors

SWEEP = "sweep.json"
DEFAULT_SHARE = 0.95
_MOST_DOUBLINGS = 12
_console = Console(stderr=True, highlight=False)


Kind = Annotated[
    Literal["rate", "concurrency"] | None,
    typer.Option(help="Sessions per second (open loop) or at a time (closed loop); the scenario's by default."),
]
High = Annotated[
    float | None, typer.Option("--to", help="Highest load; 4096 times the lowest by default.", show_default=False)
]
Share = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, help="Of the requests that must keep every limit, 0.95 by default; 0.99: a P99."),
]
Seconds = Annotated[
    float, typer.Option(min=0.5, help="Measured window of a step; up to three times as long for few requests.")
]


def sweep(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, or the name of one; its requests are sent.")],
    kind: Kind = None,
    low: Annotated[float, typer.Option("--from", min=0.001, help="Lowest load.")] = 1.0,
    high: High = None,
    factor: Annotated[float, typer.Option(min=1.05, help="From one load to the next.")] = 2.0,
    slo: Limits = None,
    share: Share = None,
    tolerance: Annotated[float, typer.Option(min=0.005, max=1.0, help="How closely loads are told apart.")] = 0.05,
    repeats: Annotated[int, typer.Option(min=1, help="Runs at one load at most, where noise decides.")] = 3,
    step_seconds: Seconds = 20.0,
    url: Url = None,
    serve: Serve = None,
    deployment: DeploymentAtUrl = None,
    http: Http = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed in place of the scenario's; each repeat adds one.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Result directory; artifacts/load/sweep-NAME-TIME by default.")
    ] = None,
) -> None:
    """Raise the load step by step: find the knee, and the highest load that keeps the limits.

    Ctrl-C, or a server that dies, leaves what was measured; the exit code is then 1.
    """
    with one_line_errors(_console):
        check_target(url, serve, deployment)
        settings = load_scenario(scenario)
        is_open = settings.open if kind is None else kind == "rate"
        check_sweepable(settings, is_open)
        limits = None if slo is None else parse_slo(slo)
        limited = settings if limits is None else settings.with_limits(limits)
        if share is not None and not limited.has_limits:
            raise ScenarioError("--share needs limits: give --slo, or a scenario that has them (`slo`)")
        kept = (DEFAULT_SHARE if share is None else share) if limited.has_limits else None
        plan = SweepPlan(
            is_open, low, low * 2**_MOST_DOUBLINGS if high is None else high, factor, tolerance, kept, repeats
        )
        _check_plan(plan, step_seconds)
        first = settings.seed if seed is None else seed
        output = make_directory(output, f"sweep-{settings.name}")
        _tell(estimate(plan, step_seconds))
        with target_at(url, serve, deployment, http) as target:
            runs = Sweep(limited, target, is_open, StepLength(step_seconds), first, _tell)
            search = Search(plan, runs.measure)
            stopped = run_search(search)
        command = _command(scenario, plan, slo, step_seconds, first, http)
        result = SweepResult(settings, limits, plan, first, search.levels, command, stopped)
        if not result.levels:
            raise ScenarioError("nothing was measured: the first step was interrupted")
        for line in result.lines:  # said before anything is written, lest it be lost where nothing can be
            typer.echo(line)
        write(output / SWEEP, json.dumps(result.as_json(), indent=1) + "\n")
        _console.print(f"{write(output / REPORT, sweep_page(result))}", markup=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(1)


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


def _check_plan(plan: SweepPlan, seconds: float) -> None:
    """Refuse what typer takes for a number (a lower bound does not exclude inf), and a range that is none."""
    numbers = (plan.low, plan.high, plan.factor, plan.tolerance, plan.share, seconds)
    names = ("--from", "--to", "--factor", "--tolerance", "--share", "--step-seconds")
    for name, value in zip(names, numbers, strict=True):
        if value is not None and not math.isfinite(value):
            raise ScenarioError(f"{name} is {value}: a finite number is expected")
    if plan.high < plan.low:
        raise ScenarioError(f"--to {plan.high:g} is below --from {plan.low:g}")
    for name, load in (("--from", plan.low), ("--to", plan.high)):
        if not plan.open and (load < 1 or load != round(load)):
            raise ScenarioError(f"{name} {load:g}: a concurrency is a whole number of sessions, 1 or more")


def estimate(plan: SweepPlan, seconds: float) -> str:
    """Return a line on how long a sweep with windows of ``seconds`` takes at the most, if noise repeats nothing."""
    length, loads, closing = StepLength(seconds), [plan.low], closing_steps(plan)
    while loads[-1] < plan.high:
        loads.append(min(loads[-1] * plan.factor, plan.high))
    windows = [length.window_s(load, plan.open) for load in loads] + [seconds] * closing
    most = sum(window + length.warm_up_s(window) for window in windows)
    return (
        f"up to {len(loads)} steps from {plan.low:g} to {plan.high:g}, as far as the server keeps up, and about "
        f"{closing} to close in: {f'{most:.0f} s' if most < 100 else f'{most / 60:.0f} min'} at the most, and longer "
        "where noise makes it repeat steps"
    )


def closing_steps(plan: SweepPlan) -> int:
    """Return how often the gaps around the points that are looked for are halved, until they are within tolerance."""
    points = 1 if plan.share is None else 2
    gap, tolerance = math.log(min(plan.factor, plan.high / plan.low)), math.log1p(plan.tolerance)
    return points * max(math.ceil(math.log2(max(gap, tolerance) / tolerance)), 0)


def _command(scenario: Path, plan: SweepPlan, slo: str | None, seconds: float, seed: int, http: bool) -> str:
    """Return the command that repeats a sweep; addresses and directories are the user's own."""
    options = [
        f"--kind {'rate' if plan.open else 'concurrency'} --from {plan.low:g} --to {plan.high:g}",
        f"--factor {plan.factor:g} --tolerance {plan.tolerance:g} --repeats {plan.repeats}",
        "" if slo is None else f"--slo {shlex.quote(slo)}",
        "" if plan.share is None else f"--share {plan.share:g}",
        f"--step-seconds {seconds:g} --seed {seed}",
        "--http" if http else "",
    ]
    return " ".join(["inflight load sweep", shlex.quote(str(scenario)), *(option for option in options if option)])


def _tell(line: str) -> None:
    _console.print(line, markup=False, soft_wrap=True)
