"""Measures one server by `inflight load` and by the locustfile in turn: how far the figures of the two are apart.

Both send the same kind of sessions, closed loop, and both leave every request; the figures of both are computed from
these by ``inflight.load.measurements``, so what differs is how the times were taken.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median

from benchmarks.pipeline import replay_server
from inflight.errors import InflightError
from inflight.load.measurements import Figures, RequestRecord, measure
from inflight.load.result import read_records, read_summary
from inflight.resources import DEMO, ROOT
from inflight.serve.server import TritonServer

STEP_MS = 20.0
_BEGIN_S, _END_S = 2.0, 3.0
"""Left out of each run at its begin and at its end, where locust breaks off the requests that run."""
_SCENARIO = """
[[phases]]
duration_s = {seconds:g}
concurrency = {users}
[[classes]]
name = "chat"
prompt_tokens = {{ distribution = "uniform", min = 16, max = 64 }}
output_tokens = {{ distribution = "uniform", min = 40, max = 80 }}
"""
_BIN = Path(sys.executable).parent


class ToolFailed(InflightError):
    """One of the two tools did not run to its end; the message has the last line that it said."""


@dataclass(frozen=True)
class Comparison:
    """One row of the report."""

    users: int
    transport: str
    figure: str
    inflight_load: float
    locust: float
    deviation: float
    """``locust`` less ``inflight_load``."""
    locust_table: float | str
    """What locust's own table says, which rounds and leaves nothing out; empty: it has no such figure."""


@dataclass(frozen=True)
class _Run:
    """What one tool left of one run."""

    records: list[RequestRecord]
    cpu_share: float
    table: dict[str, dict[str, str]]
    """Rows of locust's CSV by type."""


def compare_tools(
    users: Sequence[int], rounds: int, seconds: float, say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Measure a server with the replay engine by both tools, in turn, ``rounds`` times; yield a row per figure.

    Raises:
        ToolFailed: a tool ended with an error.
    """
    with replay_server(DEMO / "model", STEP_MS) as server, tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "beside.toml"
        for count in users:
            scenario.write_text(_SCENARIO.format(seconds=seconds, users=count))
            for transport in ("grpc", "http"):
                loads, locusts = [], []
                for number in range(rounds):
                    say(f"{count} users over {transport}, round {number + 1} of {rounds}")
                    loads.append(_run_load(server, scenario, transport))
                    locusts.append(_run_locust(server, scenario, transport, count, seconds))
                yield from _rows(count, transport, loads, locusts, seconds)


def _run_load(server: TritonServer, scenario: Path, transport: str) -> _Run:
    http = transport == "http"
    port = server.settings.http_port if http else server.settings.grpc_port
    output = scenario.parent / "load"
    _call("inflight", "load", "run", scenario, "--url", f"127.0.0.1:{port}", "--output", output, *["--http"] * http)
    return _Run(read_records(output), read_summary(output)["client"]["cpu_share"], {})


def _run_locust(server: TritonServer, scenario: Path, transport: str, users: int, seconds: float) -> _Run:
    prefix, records = scenario.parent / "locust", scenario.parent / "records"
    settings = server.settings
    _call(
        *("locust", "-f", ROOT / "loadtest/locustfile.py", "HttpUser" if transport == "http" else "GrpcUser"),
        *("--headless", "--users", users, "--spawn-rate", users, "--run-time", f"{seconds:g}s", "--tags", "stream"),
        *("--host", f"http://127.0.0.1:{settings.http_port}", "--grpc-url", f"127.0.0.1:{settings.grpc_port}"),
        *("--scenario", scenario, "--csv", prefix, "--records", records),
    )
    (cpu,) = _csv_rows(Path(f"{prefix}_cpu.csv"))
    table = {row["Type"]: row for row in _csv_rows(Path(f"{prefix}_stats.csv"))}
    lines = (records / "requests-0.jsonl").read_text().splitlines()
    return _Run([RequestRecord.from_json(json.loads(line)) for line in lines], float(cpu["Share of one core"]), table)


def _call(program: str, *words: object) -> None:
    done = subprocess.run([_BIN / program, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise ToolFailed(f"{program} ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}")


def _csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _rows(
    users: int, transport: str, loads: Sequence[_Run], locusts: Sequence[_Run], seconds: float
) -> Iterator[Comparison]:
    """Yield the median over the rounds of every figure."""
    ours, theirs = ([_figures(one.records, seconds) for one in runs] for runs in (loads, locusts))

    def row(figure: str, value: Callable[[Figures], float], table: float | str = "") -> Comparison:
        one, other = median(map(value, ours)), median(map(value, theirs))
        return Comparison(users, transport, figure, round(one, 2), round(other, 2), round(other - one, 2), table)

    for label in ("TTFT", "ITL"):
        for percentile, column in (("p50", "50%"), ("p99", "99%")):
            value = attrgetter(f"{label.lower()}_ms.{percentile}")
            yield row(f"{label} {percentile}, ms", value, median(float(one.table[label][column]) for one in locusts))
    yield row("output tokens/s", attrgetter("output_tokens_per_second"))
    one, other = (round(100 * median(run.cpu_share for run in runs), 1) for runs in (loads, locusts))
    yield Comparison(users, transport, "client CPU, % of a core", one, other, round(other - one, 1), "")


def _figures(records: list[RequestRecord], seconds: float) -> Figures:
    """Return the figures of a run without its begin and end; the clock of each tool has a begin of its own."""
    began = min(one.sent_s for one in records)
    return measure(records, (began + _BEGIN_S, began + seconds - _END_S), {})
