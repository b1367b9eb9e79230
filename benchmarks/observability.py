"""Measures what metrics and traces cost: the same streams from three servers, in turn, round after round.

The machine's own ups and downs are slower than a round, so each round gives ratios, and their median is the result. An
engine whose steps take their time, as a GPU's do, leaves the machine room, and the ratio is exact. Where every core is
busy all the time, some percent are lost in the noise: what metrics cost is counted too (``export_cost``).
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.export_cost import CallCost, CpuUse, ExportCost, call_cost, export_cost, settled
from benchmarks.medians import median_interval
from benchmarks.pipeline import PipelineResult, measure, serve
from inflight.serve.server import TritonServer, free_ports

OFF, METRICS, TRACES = "off", "metrics", "metrics and traces"
_WARM_UP_S, _IDLE_S = 0.5, 4.0


@dataclass(frozen=True)
class EngineLoad:
    """An engine to measure, and how long a step of it takes if it is the replay engine."""

    kind: str
    step_ms: float | None = None

    def settings(self) -> dict[str, Any]:
        """Return the deployment's settings of ``engine``."""
        return {"kind": self.kind} | ({} if self.step_ms is None else {"replay_step_ms": self.step_ms})

    def __str__(self) -> str:
        return self.kind if self.step_ms is None else f"{self.kind}, {self.step_ms:g} ms per step"


@dataclass(frozen=True)
class ObservabilityResult:
    """One row of the report: one engine, with one thing more to show of itself."""

    engine: str
    step_ms: float | None
    """How long a step of the replay engine takes; of another engine, None."""
    shown: str
    streams: int
    tokens_per_second: int
    """Median over the rounds."""
    ratio: float
    """Tokens per second over those of the same round with nothing shown; the median of the rounds."""
    ratio_low: float
    ratio_high: float
    """95 % interval of that median; of one round there is none, and both are the ratio."""
    ratio_min: float
    ratio_max: float
    server_cpu_us_per_token: float
    """Median over the rounds."""
    cpu_ratio: float
    """The server's CPU time per token over that with nothing shown, likewise."""
    export_cpu_ms_per_second: float
    """CPU time of exporting metrics per second of load, in the stages and the server; the mean of all rounds."""
    export_cpu_percent: float
    """The same, of the CPU time of all the server's processes."""
    scrape_cpu_ms: float
    """CPU time that the server takes to write its page of metrics once."""


@dataclass(frozen=True)
class _Measured:
    result: PipelineResult
    use: CpuUse


def measure_observability(
    model: Path, loads: list[EngineLoad], streams: int, rounds: int, seconds: float, on_round: Callable[[str], object]
) -> Iterator[ObservabilityResult]:
    """Yield a row for each engine and each of nothing, metrics, metrics and traces.

    Args:
        model: checkpoint to serve; with ``replay`` its tokenizer alone.
        loads: engines to measure.
        streams: streams at once.
        rounds: how often each server is measured.
        seconds: length of each measurement; two servers are watched for as long while they are idle.
        on_round: gets a line about each measurement.

    Raises:
        EngineFailure: a stream's text is wrong, or a server's metrics cannot be read.
    """
    for load in loads:
        with ExitStack() as stack:
            shown: dict[str, dict[str, Any]] = {
                OFF: {"metrics": False},
                METRICS: {},
                TRACES: {"trace_endpoint": stack.enter_context(_collector())},
            }
            servers = {
                name: stack.enter_context(serve(_settings(model, load, streams, settings)))
                for name, settings in shown.items()
            }
            for server in servers.values():
                measure(server, streams, 0, _WARM_UP_S, warm_up_s=0)
            on_round(f"{load}, idle")
            call = call_cost(servers[METRICS], servers[OFF], max(_IDLE_S, seconds))
            measured: dict[str, list[_Measured]] = {name: [] for name in servers}
            for number in range(rounds):
                # Each server is first, second and last as often: what a neighbour leaves behind hits all alike.
                names = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
                for name in names:
                    one = _measure(servers[name], name != OFF, streams, seconds)
                    measured[name].append(one)
                    rate = one.result.tokens_per_second
                    on_round(f"{load}, round {number + 1} of {rounds}, {name}: {rate:,.0f} tokens/s")
        yield from (_row(load, name, several, measured[OFF], call) for name, several in measured.items())


def _measure(server: TritonServer, exports: bool, streams: int, seconds: float) -> _Measured:
    """Measure once. Whether it exports or not, a server rests before the next one has its turn."""
    results: list[PipelineResult] = []
    use = settled(server, exports, lambda: results.append(measure(server, streams, 0, seconds, warm_up_s=0)))
    return _Measured(results[0], use)


def _settings(model: Path, load: EngineLoad, streams: int, observability: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(model.resolve()),
        "engine": load.settings(),
        "batching": {"max_batch_size": streams},
        "observability": observability,
    }


def _row(
    load: EngineLoad, name: str, several: list[_Measured], off: list[_Measured], call: CallCost
) -> ObservabilityResult:
    results = [one.result for one in several]
    pairs = list(zip(results, (one.result for one in off), strict=True))
    ratios = [one.tokens_per_second / base.tokens_per_second for one, base in pairs]
    cpu = [one.server_cpu_us_per_token / base.server_cpu_us_per_token for one, base in pairs]
    low, high = median_interval(ratios)
    cost = ExportCost(0.0, 0.0) if name == OFF else export_cost([one.use for one in several], call)
    return ObservabilityResult(
        engine=load.kind,
        step_ms=load.step_ms,
        shown=name,
        streams=results[0].streams,
        tokens_per_second=round(statistics.median(one.tokens_per_second for one in results)),
        ratio=round(statistics.median(ratios), 4),
        ratio_low=round(low, 4),
        ratio_high=round(high, 4),
        ratio_min=round(min(ratios), 4),
        ratio_max=round(max(ratios), 4),
        server_cpu_us_per_token=round(statistics.median(one.server_cpu_us_per_token for one in results), 1),
        cpu_ratio=round(statistics.median(cpu), 4),
        export_cpu_ms_per_second=round(cost.ms_per_second, 2),
        export_cpu_percent=round(cost.percent, 3),
        scrape_cpu_ms=round(1000 * call.per_scrape, 2) if name != OFF else 0.0,
    )


@contextmanager
def _collector() -> Iterator[str]:
    """Run a collector that takes all traces and keeps none, in a process of its own; yield its URL."""
    [port] = free_ports(1)
    process = multiprocessing.get_context("spawn").Process(target=_collect, args=(port,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port}/v1/traces"
    finally:
        process.terminate()
        process.join()


def _collect(port: int) -> None:
    _Collector(("127.0.0.1", port), _Taker).serve_forever()


class _Collector(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a server that stops may leave its last spans half sent."""


class _Taker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
