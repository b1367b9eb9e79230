"""How long a stop of `inflight serve` takes, from SIGTERM to the end of the process, beside several kinds of client."""

from __future__ import annotations

import http.client
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

from benchmarks.faults.served import Served, serving
from benchmarks.result import Result, Row
from inflight.addresses import read_directly
from inflight.client.request import GenerateOptions
from inflight.client.sync import Client
from inflight.errors import EngineFailure, InflightError

_READY, _METRICS = "/v2/health/ready", "/metrics"
_IDLE_S = 1.5
"""How long the clients' connections have been there when the server is stopped."""
_SCRAPE_S = 1.0
_START_S, _STOP_S = 180.0, 120.0
_STREAM = GenerateOptions(max_tokens=300, ignore_eos=True)


@contextmanager
def _nobody(serve: Served) -> Iterator[list[InflightError]]:
    yield []


@contextmanager
def _idle_connection(serve: Served) -> Iterator[list[InflightError]]:
    """An HTTP connection that is kept open after one answer, as a client with a pool has it."""
    with closing(_connect(serve.http)) as connection:
        _get(connection, _READY)
        time.sleep(_IDLE_S)
        yield []


@contextmanager
def _prometheus(serve: Served) -> Iterator[list[InflightError]]:
    """The two jobs of monitoring/prometheus.yml, each over a connection that is kept, but once a second."""
    over = threading.Event()

    def scrape(address: str, path: str) -> None:
        with closing(_connect(address)) as connection, suppress(OSError, http.client.HTTPException):
            while not over.wait(_SCRAPE_S):
                _get(connection, path)
            over.wait()

    jobs = [threading.Thread(target=scrape, args=job) for job in ((serve.http, _READY), (serve.metrics, _METRICS))]
    for job in jobs:
        job.start()
    try:
        time.sleep(_IDLE_S + _SCRAPE_S)
        yield []
    finally:
        over.set()
        for job in jobs:
            job.join()


@contextmanager
def _stream(serve: Served) -> Iterator[list[InflightError]]:
    """A stream over gRPC that has begun, and what has cut it before its end."""
    begun, cut = threading.Event(), list[InflightError]()

    def run() -> None:
        try:
            with Client(serve.grpc) as client, client.stream("What is in-flight batching?", _STREAM) as stream:
                for _ in stream:
                    begun.set()
        except InflightError as error:
            cut.append(error)
        begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield cut
    finally:
        thread.join()


CLIENTS = {
    "none": _nobody,
    "an idle HTTP connection": _idle_connection,
    "Prometheus, two kept connections": _prometheus,
    "a gRPC stream of 300 tokens": _stream,
}


def _connect(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(f"//{address}")
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_STOP_S)


def _get(connection: http.client.HTTPConnection, path: str) -> None:
    connection.request("GET", path)
    connection.getresponse().read()


def _wait_ready(serve: Served) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and serve.process.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            read_directly(f"http://{serve.http}{_READY}")
            time.sleep(_IDLE_S)  # this question's own connection is closed, and has to be forgotten
            return
        time.sleep(0.1)
    raise EngineFailure(f"the server did not start: {serve.said.read_text()}")


def measure_stop(rounds: int, say: Callable[[str], object]) -> Result:
    """Start the demo, stop it while a kind of client is there, and measure; each kind ``rounds`` times, by turns.

    Raises:
        EngineFailure: a server did not start.
    """
    seconds: dict[str, list[float]] = {name: [] for name in CLIENTS}
    cut = dict.fromkeys(CLIENTS, 0)
    for _ in range(rounds):
        for name, clients in CLIENTS.items():
            with serving() as serve:
                _wait_ready(serve)
                with clients(serve) as faults:
                    began = time.monotonic()
                    serve.process.terminate()
                    serve.process.wait(_STOP_S)
                    seconds[name].append(time.monotonic() - began)
                cut[name] += len(faults)
            say(f"stopped in {seconds[name][-1]:.1f} s; clients: {name}{', cut' * len(faults)}")
    rows = [_row(name, one, cut[name]) for name, one in seconds.items()]
    return Result("stop", "How long a stop takes", _finding(rows), rows)


def _row(name: str, seconds: Sequence[float], cut: int) -> Row:
    return {
        "clients": name,
        "stops": len(seconds),
        "median, s": round(statistics.median(seconds), 1),
        "shortest, s": round(min(seconds), 1),
        "longest, s": round(max(seconds), 1),
        "streams cut": cut,
    }


def _finding(rows: Sequence[Row]) -> str:
    alone, idle, scraped, streaming = (row["median, s"] for row in rows)
    return (
        f"From SIGTERM to the end of `inflight serve` with the demo, in the median: {alone} s without a client, {idle} "
        f"s with an idle HTTP connection, {scraped} s with a Prometheus that scrapes readiness and metrics over kept "
        f"connections, and {streaming} s with a stream over gRPC; {rows[-1]['streams cut']} of {rows[-1]['stops']} "
        "streams were cut."
    )
