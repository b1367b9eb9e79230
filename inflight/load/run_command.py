"""``inflight load run``: a load test from a scenario."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from inflight.deployment import Deployment, load_deployment
from inflight.errors import InflightError
from inflight.load.progress import show_progress
from inflight.load.prompts import PromptWriter
from inflight.load.result import LoadResult, make_directory, result_of, write_report, write_result
from inflight.load.rows import counts, headline, verdict
from inflight.load.runner import Runner, SessionFault, client_for
from inflight.load.scenario import Scenario, ScenarioError, Slo, load_scenario, parse_slo
from inflight.load.workload import Workload
from inflight.report.failures import one_line_errors
from inflight.resources import DEMO, bundled
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports

_console = Console(stderr=True, highlight=False)
_READY_S = 5.0
"""How long a server that is there may take to be ready."""
_PORTS = ("http_port", "grpc_port", "metrics_port")
_STOPS = (signal.SIGINT, signal.SIGTERM)


class LoadTestFailed(InflightError):
    """A load test of which the result is not as it must be; the message is one line."""


@dataclass(frozen=True)
class Target:
    """Where a test sends to, and what is known of it."""

    url: str
    http: bool
    deployment: Deployment
    name: str
    """Of the deployment: its directory's."""

    @property
    def transport(self) -> str:
        """``http`` or ``grpc``."""
        return "http" if self.http else "grpc"


Limits = Annotated[
    str | None, typer.Option(help="Limits in ms, as ttft=200,itl=30,e2e=5000; the scenario's by default.")
]


def run(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, or the name of one in loadtest/scenarios.")],
    url: Annotated[
        str | None, typer.Option(help="Address of a running server; its deployment's ports by default.")
    ] = None,
    serve: Annotated[
        Path | None, typer.Option(help="Serve this deployment directory on free ports for the test.")
    ] = None,
    deployment: Annotated[
        Path | None,
        typer.Option(help="Deployment that runs at --url: its tokenizer makes the prompts; the demo by default."),
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="HTTP's generate_stream in place of gRPC.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed in place of the scenario's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Result directory; artifacts/load/NAME-TIME by default.")] = None,
    slo: Limits = None,
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
        _check_share(fail_below_slo, settings)
        output = output or Path("artifacts/load") / f"{settings.name}-{datetime.now():%Y%m%d-%H%M%S}"
        make_directory(output)
        with target_at(url, serve, deployment, http) as target:
            result = run_scenario(settings, target, seed, _command(scenario, http, seed, slo, duration_scale))
        _conclude(result, output)
        _judge(result, fail_below_slo)


def check_target(url: str | None, serve: Path | None, deployment: Path | None) -> None:
    """Refuse what says nothing of a server that is started for the test.

    Raises:
        ScenarioError: --serve is given with another option.
    """
    for name, value in (("--url", url), ("--deployment", deployment)):
        if serve is not None and value is not None:
            raise ScenarioError(f"give --serve or {name}, not both")


def _check_share(share: float | None, scenario: Scenario) -> None:
    if share is None:
        return
    if all(slo == Slo() for slo in (scenario.slo, *(one.slo or Slo() for one in scenario.classes))):
        raise ScenarioError(f"--fail-below-slo needs limits; {scenario.name} has no `slo`: give --slo")


def _command(scenario: Path, http: bool, seed: int | None, slo: str | None, scale: float) -> str:
    """Return the command that repeats a test; server and result directory are the user's own."""
    options = [
        "--http" if http else "",
        "" if seed is None else f"--seed {seed}",
        "" if slo is None else f"--slo {slo}",
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
        yield Target(url or f"{settings.host}:{port}", http, deployment, name)
        return
    deployment = override_server(deployment, dict(zip(_PORTS, free_ports(3), strict=True)))
    with _exits_on_sigterm(), TritonServer(serve, deployment) as server:
        with _console.status("starting the server"):
            server.wait_ready()
        port = deployment.server.http_port if http else deployment.server.grpc_port
        yield Target(f"{deployment.server.host}:{port}", http, deployment, name)


@contextmanager
def _exits_on_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception, so that what was started is stopped on the way out."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clean-up
    sys.exit(128 + number)


def run_scenario(scenario: Scenario, target: Target, seed: int | None, command: str) -> LoadResult:
    """Run a scenario against a server that is ready.

    Raises:
        InflightError: the scenario does not fit, or no server answers.
    """
    workload = Workload(scenario, PromptWriter.of_checkpoint(target.deployment.model), seed)
    return asyncio.run(_run(workload, target, command))


async def _run(workload: Workload, target: Target, command: str) -> LoadResult:
    async with client_for(target.url, target.http) as client:
        await client.check(_READY_S)
        runner = Runner(workload, client, target.deployment.kv_cache.block_size)
        showing = asyncio.create_task(show_progress(runner, _console))
        try:
            with _stopping(runner):
                await runner.run()
        finally:
            showing.cancel()
            await asyncio.wait({showing})
    return result_of(runner, workload, target.transport, command, target.url, target.name)


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


def _conclude(result: LoadResult, output: Path) -> None:
    """Say what was measured, and write the result directory: in this order, lest it be lost where nothing can be
    written."""
    if not result.records:
        raise (
            SessionFault(result.fault) if result.fault else LoadTestFailed("nothing was measured: no request was sent")
        )
    for line in headline(result):
        typer.echo(line)
    good, text = verdict(result)
    _console.print(text, style=None if good else "yellow", markup=False, soft_wrap=True)
    write_result(output, result)
    from inflight.load.report import report_page

    _console.print(f"{write_report(output, report_page(result))}", markup=False, soft_wrap=True)


def _judge(result: LoadResult, least: float | None) -> None:
    """Say what makes the command fail although there is a result.

    Raises:
        SessionFault: it ended before its time.
        LoadTestFailed: no request completed, or fewer than ``least`` of those that are judged kept the limits.
    """
    if result.fault:
        raise SessionFault(result.fault)
    if not any(one.outcome == "completed" for one in result.records):
        raise LoadTestFailed(f"no request completed: {counts(result.figures())}")
    share = result.figures().slo_attainment
    if least is not None and (share is None or share < least):
        said = "no request can be judged" if share is None else f"{share:.2%} of the requests kept the limits"
        raise LoadTestFailed(f"{said}; --fail-below-slo is {least:g}")
