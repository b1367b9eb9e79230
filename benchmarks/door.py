"""``make bench ARGS=door``: what Envoy before the servers costs, over gRPC and OpenAI's API.

The same streams go to the servers and through the door in turn, in one run on one machine, clients included.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import psutil
import typer

from benchmarks.command import Output, Page, command_line, console, report_results
from benchmarks.gateway.paths import ENSEMBLE, GATEWAY, cpu_seconds, run
from benchmarks.gateway.served import Served, serve
from benchmarks.result import Result
from inflight.resources import DEMO
from inflight.serve.door import DoorProcess, Upstreams
from inflight.serve.server import free_ports
from inflight.settings.door import DoorSettings

_PAGE = Page(
    "What the door costs",
    "Streams through Envoy beside streams to the servers themselves, measured on the machine that serves, with the "
    'clients beside it. Written by `make bench ARGS="door --output docs/results/door"`.',
    ("door-replay", "door-demo"),
)
_ENGINES: dict[str, dict[str, Any]] = {
    "replay": {"kind": "replay", "replay_step_ms": 20},
    "demo": {"dtype": "float32"},
}
"""One engine that computes nothing, with steps of 20 ms as a large model has on a GPU, and the demo's."""
_NAMES = {ENSEMBLE: "gRPC", GATEWAY: "OpenAI"}


@dataclass(frozen=True)
class Measured:
    """One protocol in one round, through the door or not."""

    protocol: str
    door: bool
    round: int
    tokens_per_second: float
    ttft_ms_p50: float
    server_us_per_token: float
    """CPU of Triton, its stages and the gateway."""
    door_us_per_token: float
    """CPU of Envoy."""


@dataclass(frozen=True)
class _Behind(Served):
    """The servers as clients reach them through the door."""

    port: int

    @property
    def url(self) -> str:
        return f"http://{self.grpc}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.port}"


def door(
    streams: Annotated[int, typer.Option(min=1, max=256, help="Streams at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of both protocols with the door and without.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 5,
    output: Output = None,
) -> None:
    """Measure what the door costs."""

    def results() -> Iterator[Result]:
        yield from (_result(name, streams, rounds, seconds) for name in _ENGINES)

    words = f"--streams {streams} --rounds {rounds} --seconds {seconds:g}"
    report_results(results, command_line("door", words), output, _PAGE)


def _result(engine: str, streams: int, rounds: int, seconds: float) -> Result:
    rows: list[Measured] = []
    settings = {
        "model": str((DEMO / "model").resolve()),
        "engine": _ENGINES[engine],
        "batching": {"max_batch_size": streams},
    }
    with serve(settings) as served, _before(served) as (process, behind):
        for path in _NAMES:  # all of it is warm before the first round
            asyncio.run(run(behind, path, streams, 1.0))
        for number in range(rounds):
            for path in _NAMES:
                # The order changes from round to round, as does what else the machine does.
                for through in (number % 2 == 0, number % 2 == 1):
                    rows.append(_one(process, behind if through else served, path, number, streams, seconds))
                    console.print(f"{rows[-1]}")
    finding = f"{streams} streams, {rounds} rounds. {' '.join(_compared(rows, name) for name in _NAMES.values())}"
    return Result(f"door-{engine}", f"With the door and without: {engine}", finding, [asdict(row) for row in rows])


@contextmanager
def _before(served: Served) -> Iterator[tuple[DoorProcess, _Behind]]:
    """Run a door before servers that run."""
    http, grpc, metrics, openai = free_ports(4)
    deployment = served.server.deployment
    ports = deployment.server.model_copy(update={"http_port": http, "grpc_port": grpc, "metrics_port": metrics})
    gateway = deployment.gateway.model_copy(update={"port": openai})
    update = {"server": ports, "gateway": gateway, "door": DoorSettings(enabled=True)}
    own = f"{served.server.settings.host}:{served.server.settings.http_port}"
    upstreams = Upstreams(own, served.grpc, served.url.removeprefix("http://"), None)
    process = DoorProcess(deployment.model_copy(update=update), upstreams)
    process.check()
    process.start()
    try:
        process.wait_ready()
        yield process, _Behind(served.server, served.gateway, http)
    finally:
        process.stop()


def _one(process: DoorProcess, served: Served, path: str, number: int, streams: int, seconds: float) -> Measured:
    before, began = _cpu(process, served), time.monotonic()
    seen = asyncio.run(run(served, path, streams, seconds))
    elapsed = time.monotonic() - began
    servers, envoy = (after - first for after, first in zip(_cpu(process, served), before, strict=True))
    per_token = 1e6 / seen.tokens
    return Measured(
        protocol=_NAMES[path],
        door=isinstance(served, _Behind),
        round=number,
        tokens_per_second=round(seen.tokens / elapsed),
        ttft_ms_p50=round(statistics.median(seen.first_ms), 1),
        server_us_per_token=round(servers * per_token, 1),
        door_us_per_token=round(envoy * per_token, 1),
    )


def _cpu(process: DoorProcess, served: Served) -> tuple[float, float]:
    """Return the CPU seconds so far of Triton, its stages and the gateway, and of Envoy."""
    root = psutil.Process(served.server.process.pid)
    servers = [root, *root.children(recursive=True), psutil.Process(served.gateway.process.pid)]
    return sum(map(cpu_seconds, servers)), cpu_seconds(psutil.Process(process.process.pid))


def _compared(rows: Sequence[Measured], protocol: str) -> str:
    """Say what the door changes: medians over rounds, of pairs that were measured one after the other."""
    ours = [row for row in rows if row.protocol == protocol]
    pairs = [(one, other) for one in ours for other in ours if one.door and not other.door and one.round == other.round]
    rates = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    first = [one.ttft_ms_p50 - other.ttft_ms_p50 for one, other in pairs]
    shares = [one.door_us_per_token / (one.door_us_per_token + one.server_us_per_token) for one, _ in pairs]
    return (
        f"{protocol}: {statistics.median(rates):.3f} of the tokens per second ({min(rates):.3f} to {max(rates):.3f}), "
        f"the first token {statistics.median(first):+.1f} ms ({min(first):+.1f} to {max(first):+.1f}); Envoy takes "
        f"{statistics.median(shares):.1%} of the servers' CPU time."
    )
