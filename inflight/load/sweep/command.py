"""``inflight load sweep``: how much load a server takes."""

from __future__ import annotations

import math
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inflight.load.result import make_directory, write_report
from inflight.load.run_command import Limits, check_target, target_at
from inflight.load.scenario import Scenario, ScenarioError, load_scenario, parse_slo
from inflight.load.sweep.estimate import estimate
from inflight.load.sweep.report import SweepResult, sweep_page, write_sweep
from inflight.load.sweep.run import Sweep, run_search
from inflight.load.sweep.scenario import check_sweepable, has_limits
from inflight.load.sweep.search import Plan, Search
from inflight.report.failures import one_line_errors

_console = Console(stderr=True, highlight=False)
DEFAULT_SHARE = 0.95
_MOST_DOUBLINGS = 12


class LoadKind(StrEnum):
    """Values of ``--kind``."""

    RATE = "rate"
    CONCURRENCY = "concurrency"


Name = Annotated[Path, typer.Argument(help="Scenario file, or the name of one; its requests are sent.")]
Kind = Annotated[
    LoadKind | None,
    typer.Option(help="Sessions per second (open loop) or at a time (closed loop); the scenario's by default."),
]
Low = Annotated[float, typer.Option("--from", min=0.001, help="Lowest load.")]
High = Annotated[
    float | None, typer.Option("--to", help="Highest load; 4096 times the lowest by default.", show_default=False)
]
Factor = Annotated[float, typer.Option(min=1.05, help="From one load to the next.")]
Share = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, help="Of the requests that must keep every limit, 0.95 by default; 0.99: a P99."),
]
Tolerance = Annotated[float, typer.Option(min=0.005, max=1.0, help="How closely loads are told apart.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs at one load at most, where noise decides.")]
Seconds = Annotated[
    float, typer.Option(min=0.5, help="Measured window of a step; up to three times as long for few requests.")
]
Url = Annotated[str | None, typer.Option(help="Address of a running server; its deployment's ports by default.")]
Serve = Annotated[Path | None, typer.Option(help="Serve this deployment directory on free ports.")]
Deployment = Annotated[
    Path | None,
    typer.Option(help="Deployment that runs at --url: its tokenizer makes the prompts; the demo by default."),
]
Http = Annotated[bool, typer.Option("--http", help="HTTP's generate_stream in place of gRPC.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed in place of the scenario's; each repeat adds one.")]
Output = Annotated[Path | None, typer.Option(help="Result directory; artifacts/load/sweep-NAME-TIME by default.")]


def sweep(
    scenario: Name,
    kind: Kind = None,
    low: Low = 1.0,
    high: High = None,
    factor: Factor = 2.0,
    slo: Limits = None,
    share: Share = None,
    tolerance: Tolerance = 0.05,
    repeats: Repeats = 3,
    step_seconds: Seconds = 20.0,
    url: Url = None,
    serve: Serve = None,
    deployment: Deployment = None,
    http: Http = False,
    seed: Seed = None,
    output: Output = None,
) -> None:
    """Raise the load step by step: find the knee, and the highest load that keeps the limits.

    Ctrl-C, or a server that dies, leaves what was measured; the exit code is then 1.
    """
    with one_line_errors(_console):
        check_target(url, serve, deployment)
        _check_finite(low, high, factor, tolerance, share, step_seconds)
        settings = load_scenario(scenario)
        is_open = settings.open if kind is None else kind is LoadKind.RATE
        check_sweepable(settings, is_open)
        limits = None if slo is None else parse_slo(slo)
        kept = _share(share, has_limits(settings, limits))
        plan = Plan(is_open, low, _highest(low, high), factor, tolerance, kept, repeats)
        _check_whole(plan)
        first = settings.seed if seed is None else seed
        output = output or Path("artifacts/load") / f"sweep-{settings.name}-{datetime.now():%Y%m%d-%H%M%S}"
        make_directory(output)
        _tell(estimate(plan, step_seconds))
        with target_at(url, serve, deployment, http) as target:
            runs = Sweep(settings, target, "rate" if is_open else "concurrency", limits, step_seconds, first, _tell)
            search = Search(plan, runs.measure)
            stopped = run_search(search)
        command = _command(settings, plan, slo, step_seconds, first, http)
        result = SweepResult(settings, limits, plan, first, search.levels, command, stopped)
        _conclude(result, output)
    if stopped:
        raise typer.Exit(1)


def _check_finite(
    low: float, high: float | None, factor: float, tolerance: float, share: float | None, seconds: float
) -> None:
    """Refuse what is called a number and is none: a lower bound does not exclude inf."""
    names = ("--from", "--to", "--factor", "--tolerance", "--share", "--step-seconds")
    for name, value in zip(names, (low, high, factor, tolerance, share, seconds), strict=True):
        if value is not None and not math.isfinite(value):
            raise ScenarioError(f"{name} is {value}: a finite number is expected")


def _share(share: float | None, limits: bool) -> float | None:
    if limits:
        return DEFAULT_SHARE if share is None else share
    if share is not None:
        raise ScenarioError("--share needs limits: give --slo, or a scenario that has them (`slo`)")
    return None


def _highest(low: float, high: float | None) -> float:
    if high is None:
        return float(low * 2**_MOST_DOUBLINGS)
    if high < low:
        raise ScenarioError(f"--to {high:g} is below --from {low:g}")
    return high


def _check_whole(plan: Plan) -> None:
    for name, load in (("--from", plan.low), ("--to", plan.high)):
        if not plan.open and (load < 1 or load != round(load)):
            raise ScenarioError(f"{name} {load:g}: a concurrency is a whole number of sessions, 1 or more")


def _command(scenario: Scenario, plan: Plan, slo: str | None, seconds: float, seed: int, http: bool) -> str:
    """Return the command that repeats a sweep; addresses and directories are the user's own."""
    options = [
        f"--kind {'rate' if plan.open else 'concurrency'} --from {plan.low:g} --to {plan.high:g}",
        f"--factor {plan.factor:g} --tolerance {plan.tolerance:g} --repeats {plan.repeats}",
        "" if slo is None else f"--slo {slo}",
        "" if plan.share is None else f"--share {plan.share:g}",
        f"--step-seconds {seconds:g} --seed {seed}",
        "--http" if http else "",
    ]
    return " ".join(["inflight load sweep", scenario.name, *(option for option in options if option)])


def _conclude(result: SweepResult, output: Path) -> None:
    """Say what was found, then write the result directory: what is said is not lost where nothing can be written."""
    if not result.levels:
        raise ScenarioError("nothing was measured: the first step was interrupted")
    for line in result.lines:
        typer.echo(line)
    write_sweep(output, result)
    page = sweep_page(result)
    _console.print(f"{write_report(output, page)}", markup=False, soft_wrap=True)


def _tell(line: str) -> None:
    _console.print(line, markup=False, soft_wrap=True)
