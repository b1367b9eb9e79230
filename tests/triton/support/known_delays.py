"""Measurements of an engine whose delays are known: the load runner's, an independent client's, the server's own.

The independent client is as plain as can be (a blocking call of gRPC's or httpx, a clock beside it) and runs at the
same time as the load, so that what the pipeline, the network's libraries and the machine add is in both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from tritonclient.grpc import InferResult
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.client import GenerateOptions
from inflight.client.grpc_transport import encode_request
from inflight.client.http_transport import body
from inflight.client.request import build_request
from inflight.load.measurements import RequestRecord
from inflight.load.result import read_records, read_summary
from inflight.metrics import FAMILIES
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric
from tests.triton.support.otlp_sink import Span
from tests.triton.support.servers import Running
from tests.triton.support.traced_server import PHASES, QUESTION, Traced

QUEUE_MS, PREFILL_MS = 20.0, 50.0
TTFT_MS = QUEUE_MS + PREFILL_MS
PROMPT_TOKENS = 16
RAMP_UP_S = 2.0
PROBES = 2
"""Independent clients, each with one request after the other."""
SERIES = ("queue", "prefill", "decode", "duration")


@dataclass(frozen=True)
class Load:
    """An open loop at a constant rate, and the engine's time from token to token."""

    name: str
    step_ms: float
    tokens: int
    rate: int
    steady_s: float

    @property
    def e2e_ms(self) -> float:
        """What a request takes in the engine."""
        return TTFT_MS + (self.tokens - 1) * self.step_ms

    @property
    def requests(self) -> int:
        """That start in the measured window."""
        return round(self.rate * self.steady_s)

    @property
    def limits(self) -> dict[str, dict[str, float]]:
        """Classes of requests by name: one with limits that all keep, the others with one each that none can keep."""
        return {
            "kept": {"ttft_ms": 10_000, "itl_ms": 10_000, "e2e_ms": 60_000},
            "ttft": {"ttft_ms": TTFT_MS - 1},
            "itl": {"itl_ms": self.step_ms / 4},
            "e2e": {"e2e_ms": self.e2e_ms - 1},
        }

    def write(self, path: Path) -> None:
        """Write the scenario. Arrivals are half a gap from the window's ends, so what is in it is known."""
        phases = [(RAMP_UP_S, "false"), (self.steady_s, "true")]
        lines = [
            f'[[phases]]\nduration_s = {seconds}\nrate = {self.rate}\narrivals = "constant"\nsteady = {steady}\n'
            for seconds, steady in phases
        ]
        lines += [
            f'[[classes]]\nname = "{name}"\n'
            f'prompt_tokens = {{ distribution = "fixed", value = {PROMPT_TOKENS} }}\n'
            f'output_tokens = {{ distribution = "fixed", value = {self.tokens} }}\n'
            f"slo = {{ {', '.join(f'{limit} = {value}' for limit, value in limits.items())} }}\n"
            for name, limits in self.limits.items()
        ]
        path.write_text("\n".join(lines))


@dataclass(frozen=True)
class Probe:
    """One request as the independent client saw it."""

    request_id: str
    ttft_ms: float
    e2e_ms: float


@dataclass(frozen=True)
class Request:
    """One request as the collector got it."""

    server: Span
    phases: dict[str, Span]

    def ms(self, phase: str) -> float:
        """Return a phase's duration."""
        return (self.phases[phase].end - self.phases[phase].start) / 1e6

    @property
    def in_engine_ms(self) -> float:
        """From the arrival at the engine to the last token."""
        return (self.phases["decode"].end - self.phases["queue"].start) / 1e6


@dataclass(frozen=True)
class Measured:
    """One load, as everyone saw it."""

    load: Load
    figures: dict[str, Any]
    """Of ``summary.json``."""
    records: list[RequestRecord]
    """All, those outside the window too."""
    probes: list[Probe]
    requests: dict[str, Request]
    """By request id; the probes' too."""
    series: dict[str, float]
    """By how much the server's counters grew."""
    timer_late_ms: float
    """How late a timer of this process came beside it, 95th percentile: what the machine can be asked for."""
    stood_still_ms: float
    """How late the latest of these timers came: one such moment is in the means of all requests of that time."""

    @property
    def window(self) -> list[RequestRecord]:
        """The requests that started in the measured window."""
        begin, end = self.figures["window_s"]
        return [one for one in self.records if begin <= one.start_s < end]

    def median_ms(self, phase: str) -> float:
        """Return the median of a phase's durations in the traces."""
        return statistics.median(one.ms(phase) for one in self.requests.values())

    def pipeline_ms(self) -> tuple[float, float]:
        """Return what the independent client sees beyond the engine's own times, in TTFT and E2E: medians."""
        ttft = statistics.median(one.ttft_ms for one in self.probes)
        return ttft - TTFT_MS, statistics.median(one.e2e_ms for one in self.probes) - self.load.e2e_ms


def measure(traced: Traced, load: Load, over_http: bool, directory: Path) -> Measured:
    """Run a load with ``inflight load run``, in a process of its own, and the independent client beside it."""
    server, scenario, output = traced.server, directory / f"{load.name}.toml", directory / "result"
    load.write(scenario)
    before = _series(server)
    command = [Path(sys.executable).with_name("inflight"), "load", "run", scenario, "--output", output]
    command += ["--url", server.http if over_http else server.grpc, "--deployment", server.server.directory]
    command += ["--http"] if over_http else []
    over = threading.Event()
    with ThreadPoolExecutor(PROBES + 1) as pool:
        ask = _ask_http if over_http else _ask_grpc
        asking = [pool.submit(_probe, ask, server, load.tokens, over, f"probe-{n}") for n in range(PROBES)]
        timing = pool.submit(_timer_late_ms, over)
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=120)
        finally:
            over.set()
        probes = [probe for one in asking for probe in one.result()]
    assert told.returncode == 0, told.stdout + told.stderr
    records = read_records(output)
    ids = [one.request_id for one in (*records, *probes)]
    requests = {name: Request(*_trace(traced, name)) for name in ids}
    ended = before["inflight_requests_total"] + len(ids)
    assert wait_until(lambda: _series(server)["inflight_requests_total"] == ended, 30), "requests are not counted"
    grown = {name: value - before[name] for name, value in _series(server).items()}
    figures = read_summary(output)["figures"]
    return Measured(load, figures, records, probes, requests, grown, *timing.result())


def _timer_late_ms(over: threading.Event) -> tuple[float, float]:
    """Return the 95th percentile and the most."""
    late = []
    while not over.is_set():
        due = time.perf_counter() + 0.005
        time.sleep(0.005)
        late.append(1000 * (time.perf_counter() - due))
    return statistics.quantiles(late, n=20)[-1], max(late)


def _trace(traced: Traced, request_id: str) -> tuple[Span, dict[str, Span]]:
    server, children = traced.trace_of(request_id)
    assert {name: len(spans) for name, spans in children.items()} == dict.fromkeys(PHASES, 1)
    return server, {name: spans[0] for name, spans in children.items()}


def _series(server: Running) -> dict[str, float]:
    """Return what the engine's stage counted, by the series' name."""
    seconds = [f"inflight_request_{name}_seconds" for name in SERIES]
    seconds += ["inflight_time_to_first_token_seconds", "inflight_inter_token_seconds"]
    assert all(name in FAMILIES for name in seconds)
    names = [f"{name}_{part}" for name in seconds for part in ("sum", "count")]
    names += ["inflight_prompt_tokens_total", "inflight_generated_tokens_total"]
    found = {name: read_metric(server.metrics, name, model="tensorrt_llm") for name in names}
    ended = read_metric(server.metrics, "inflight_requests_total", model="tensorrt_llm", outcome="length")
    return found | {"inflight_requests_total": ended}


def _probe(ask: Any, server: Running, tokens: int, over: threading.Event, name: str) -> list[Probe]:
    probes: list[Probe] = []
    options = GenerateOptions(max_tokens=tokens, ignore_eos=True)
    while not over.is_set():
        request_id = f"{name}-{time.monotonic_ns()}"
        request = build_request(QUESTION, options, stream=True, request_id=request_id, trace_context={})
        times = list(ask(server, request))
        assert len(times) >= 2, "no stream"
        probes.append(Probe(request_id, *(1000 * (time_s - times[0]) for time_s in (times[1], times[-1]))))
    return probes


def _ask_grpc(server: Running, request: Any) -> Iterator[float]:
    """Yield the time of the call, then those of the responses with text."""
    with grpc.insecure_channel(server.grpc) as channel:
        grpc.channel_ready_future(channel).result(10)
        message = encode_request(request, "ensemble")
        yield time.perf_counter()
        for reply in GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message])):
            now = time.perf_counter()
            assert not reply.error_message, reply.error_message
            texts = InferResult(reply.infer_response).as_numpy("text_output")
            if texts is not None and any(texts.flat):
                yield now


def _ask_http(server: Running, request: Any) -> Iterator[float]:
    """Yield the time of the call, then those of the events with text."""
    with httpx.Client(timeout=60) as client:
        client.get(f"{server.http}/v2/health/ready").raise_for_status()  # the connection is there before the call
        data = body(request)
        yield time.perf_counter()
        with client.stream("POST", f"{server.http}/v2/models/ensemble/generate_stream", json=data) as response:
            for line in response.iter_lines():
                now = time.perf_counter()
                if line.startswith("data:") and json.loads(line[5:])["text_output"]:
                    yield now


def near(name: str, value: float, truth: float, allowed_ms: float = 2.0) -> Sequence[str]:
    """Return what is wrong with a figure, in a line, if it is within neither ``allowed_ms`` nor 2 % of the truth."""
    if abs(value - truth) <= max(allowed_ms, 0.02 * abs(truth)):
        return []
    return [f"{name} is {value:.3f}; the truth is {truth:.3f}"]
