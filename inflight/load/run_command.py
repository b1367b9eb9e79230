"""``inflight load run``: a load test from a scenario."""

from __future__ import annotations

import asyncio
import shlex
import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from inflight.addresses import nearest_of
from inflight.errors import InflightError
from inflight.load.measurements import send_delay_ms
from inflight.load.report import counts, headline, report_page, verdict
from inflight.load.result import REPORT, LoadResult, make_directory, write, write_result
from inflight.load.runner import Runner, client_for
from inflight.load.scenario import Scenario, ScenarioError, load_scenario, parse_slo
from inflight.load.workload import PromptWriter, Workload
from inflight.report.failures import one_line_errors
from inflight.resources import DEMO, bundled
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import Deployment, load_deployment

_console = Console(stderr=True, highlight=False)
_READY_S = 5.0
"""How long a server that is there may take to be ready."""
_PORTS = ("http_port", "grpc_port", "metrics_port")
_STOPS = (signal.SIGINT, signal.SIGTERM)
_LIVE_S, _LOG_S = 0.5, 10.0
"""Seconds between two updates of a terminal, and between two lines elsewhere."""


class LoadTestFailed(InflightError):
    """A load test of which the result is not as it must be; the message is one line."""


@dataclass(frozen=True)
class Target:
    """Where a test sends to, and what is known of it."""

    url: str
    http: bool
    deployment: Deployment
    name: str
    """Name of the deployment's directory."""
    resume: bool = False
    """Whether streams go on where the server breaks."""


Limits = Annotated[
    str | None, typer.Option(help="Limits in ms, as ttft=200,itl=30,e2e=5000; the scenario's by default.")
]
Url = Annotated[str | None, typer.Option(help="Address of a running server; its deployment's ports by default.")]
Serve = Annotated[Path | None, typer.Option(help="Serve this deployment directory on free ports for the test.")]
DeploymentAtUrl = Annotated[
    Path | None,
    typer.Option(help="Deployment that runs at --url: its tokenizer makes the prompts; the demo by default."),
]
Http = Annotated[bool, typer.Option("--http", help="HTTP's generate_stream in place of gRPC.")]


def run(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, or the name of one in loadtest/scenarios.")],
    url: Url = None,
    serve: Serve = None,
    deployment: DeploymentAtUrl = None,
    http: Http = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed in place of the scenario's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Result directory; artifacts/load/NAME-TIME by default.")] = None,
    slo: Limits = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Streams go on where the server breaks; else they fail.")
    ] = False,
    duration_scale: Annotated[float, typer.Option(min=0.001, help="Multiply all durations; rates stay.")] = 1.0,
    fail_below_slo: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 1 if a smaller share keeps the limits, e.g. 0.95.")
    ] = None,
) -> None:
    """Run a load test; write figures, every request and a report. Ctrl-C ends it with what was measured."""
    with one_line_errors(_console):
        check_target(url, serve, deployment)
        settings = load_scenario(scenario)
        settings = settings if duration_scale == 1 else settings.scaled(duration_scale)
        settings = settings if slo is None else settings.with_limits(parse_slo(slo))
        if fail_below_slo is not None and not settings.has_limits:
            raise ScenarioError(f"--fail-below-slo needs limits; {settings.name} has no `slo`: give --slo")
        output = make_directory(output, settings.name)
        with target_at(url, serve, deployment, http) as target:
            command = _command(scenario, http, seed, slo, resume, duration_scale)
            result = run_scenario(settings, replace(target, resume=resume), seed, command)
        if not result.records:
            raise LoadTestFailed(result.fault or "nothing was measured: no request was sent")
        for line in headline(result):  # said before anything is written, lest it be lost where nothing can be
            typer.echo(line)
        good, text = verdict(result)
        _console.print(text, style=None if good else "yellow", markup=False, soft_wrap=True)
        write_result(output, result)
        _console.print(f"{write(output / REPORT, report_page(result))}", markup=False, soft_wrap=True)
        _check_result(result, fail_below_slo)


def check_target(url: str | None, serve: Path | None, deployment: Path | None) -> None:
    """Refuse what says nothing of a server that is started for the test.

    Raises:
        ScenarioError: --serve is given with another option.
    """
    for name, value in (("--url", url), ("--deployment", deployment)):
        if serve is not None and value is not None:
            raise ScenarioError(f"give --serve or {name}, not both")


def _command(scenario: Path, http: bool, seed: int | None, slo: str | None, resume: bool, scale: float) -> str:
    """Return the command that repeats a test; server and result directory are the user's own."""
    options = [
        "--http" if http else "",
        "" if seed is None else f"--seed {seed}",
        "" if slo is None else f"--slo {shlex.quote(slo)}",
        "--resume" if resume else "",
        "" if scale == 1 else f"--duration-scale {scale:g}",
    ]
    return " ".join(["inflight load run", shlex.quote(str(scenario)), *(option for option in options if option)])


@contextmanager
def target_at(url: str | None, serve: Path | None, directory: Path | None, http: bool) -> Iterator[Target]:
    """Yield the server to test; it is started, and stopped again, also by SIGTERM, if that is asked for.

    Args:
        url: of a running server; None: where its deployment says that it listens.
        serve: deployment directory to serve on free ports; None: nothing is started.
        directory: deployment of the server at ``url``; None: the demo.
        http: whether to send over HTTP.

    Raises:
        DeploymentError: a deployment that cannot be read or served.
    """
    serve = serve and bundled(serve)
    directory = serve or bundled(directory or DEMO)
    deployment, name = load_deployment(directory), directory.resolve().name
    if serve is None:
        settings = deployment.server
        port = settings.http_port if http else settings.grpc_port
        yield Target(url or f"{nearest_of(settings.host)}:{port}", http, deployment, name)
        return
    deployment = override_server(deployment, dict(zip(_PORTS, free_ports(3), strict=True)))
    with _exit_on_sigterm(), TritonServer(serve, deployment) as server:
        with _console.status("starting the server"):
            server.wait_ready()
        port = deployment.server.http_port if http else deployment.server.grpc_port
        yield Target(f"{nearest_of(deployment.server.host)}:{port}", http, deployment, name)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception, so that what was started is stopped on the way out."""

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_scenario(scenario: Scenario, target: Target, seed: int | None, command: str) -> LoadResult:
    """Run a scenario against a server that is ready.

    Raises:
        InflightError: the scenario does not fit, or no server answers.
    """
    workload = Workload(scenario, PromptWriter.of_checkpoint(target.deployment.model), seed)
    runner = asyncio.run(_run(workload, target))
    begin, end = workload.steady
    is_steady = begin < runner.load_ended_s
    window = (begin if is_steady else 0.0, min(end, runner.load_ended_s))
    return LoadResult(
        scenario=scenario,
        seed=workload.seed,
        transport="http" if target.http else "grpc",
        command=command,
        records=sorted(runner.records, key=lambda one: (one.start_s, one.session, one.turn)),
        window=window,
        steady=is_steady,
        load_ended_s=runner.load_ended_s,
        interrupted=runner.interrupted,
        client=runner.watch.health(window, send_delay_ms(runner.records, window)),
        server=target.url,
        deployment=target.name,
        fault=runner.fault,
    )


async def _run(workload: Workload, target: Target) -> Runner:
    cache = target.deployment.kv_cache
    known = target.deployment.engine.kind == "pytorch" or "block_size" in cache.model_fields_set
    async with client_for(target.url, target.http, target.resume) as client:
        await client.check(_READY_S)
        runner = Runner(workload, client, cache.block_size if known else None)
        showing = asyncio.create_task(_show_progress(runner))
        try:
            with _stopping(runner):
                await runner.run()
        finally:
            showing.cancel()
            await asyncio.wait({showing})
    return runner


async def _show_progress(runner: Runner) -> None:
    """Show the state of ``runner`` until cancelled."""
    period = _LIVE_S if _console.is_terminal else _LOG_S
    before = 0
    with Live(console=_console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(period)
            duration, now = runner.workload.duration_s, runner.clock()
            parts = [
                f"{now:.0f} of {duration:.0f} s" if now < duration else "waiting for the rest",
                f"{runner.running} running",
                *(f"{count:,} {outcome}" for outcome, count in sorted(runner.ended.items())),
                f"{(runner.tokens - before) / period:,.0f} tokens/s",
            ]
            if runner.recent_ttft_s:
                parts.append(f"TTFT {1000 * statistics.median(runner.recent_ttft_s):,.0f} ms")
            line, before = ", ".join(parts), runner.tokens
            if _console.is_terminal:
                live.update(Text(line), refresh=True)
            else:
                _console.print(line, markup=False, soft_wrap=True)


@contextmanager
def _stopping(runner: Runner) -> Iterator[None]:
    """End the test on Ctrl-C and SIGTERM, with what was measured."""
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in _STOPS}
    for number in _STOPS:
        loop.add_signal_handler(number, runner.stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)  # leaves the system's own, not the one before
            signal.signal(number, handler)


def _check_result(result: LoadResult, least: float | None) -> None:
    """Fail although there is a result: the test ended before its time, no request completed, or fewer than ``least``
    of those that are judged kept the limits."""
    if result.fault:
        raise LoadTestFailed(result.fault)
    if not any(one.completed for one in result.records):
        raise LoadTestFailed(f"no request completed: {counts(result.figures)}")
    share = result.figures.slo_attainment
    if least is not None and not (share is not None and share >= least):
        said = "no request can be judged" if share is None else f"{share:.2%} of the requests kept the limits"
        raise LoadTestFailed(f"{said}; --fail-below-slo is {least:g}")
