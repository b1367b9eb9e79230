"""Servers that tests share, streaming and unary, with the demo deployment on each engine, and watched in every way.

A test that takes ``server`` or ``unary_server`` runs on the portable engine, and on ``trtllm`` against the fake
TensorRT-LLM; if it is marked ``any_engine`` it runs on the stand-in for upstream's C++ backend, ``tensorrtllm``, too.
`make test` runs it on the portable engine alone; all others are proofs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx._transports.default
import psutil
import pytest

from inflight.serve.server import TritonServer
from inflight.settings.observability import ObservabilitySettings
from inflight.shared_counters import read_pulses
from tests.triton.support.metrics_page import read_page
from tests.triton.support.otlp_sink import OtlpSink
from tests.triton.support.servers import STEP_TOKENS, Running, on_engine, run
from tests.triton.support.traced_server import Traced

# Each call of httpx would read all certificates of this machine, for 40 ms; what is called here has none.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out on ``tensorrtllm`` what is not promised there; say which tests of another engine are proofs.

    The proofs that are long on the first engine are left to a release on the others.
    """
    items[:] = [item for item in items if _engine_of(item) != "tensorrtllm" or item.get_closest_marker("any_engine")]
    for item in items:
        if _engine_of(item) in ("trtllm", "tensorrtllm"):
            item.add_marker("release" if item.get_closest_marker("proof") else "proof")


def _engine_of(item: pytest.Item) -> str | None:
    call = getattr(item, "callspec", None)
    return call.params.get("engine") if call else None


@pytest.fixture(scope="session", params=["pytorch", "trtllm", "tensorrtllm"])
def engine(request: pytest.FixtureRequest) -> str:
    """``engine.kind`` of the servers."""
    return str(request.param)


@pytest.fixture(scope="session")
def sink(engine: str) -> Iterator[OtlpSink]:
    """The collector of the engine's shared streaming server: the same tests run on each, with the same request ids."""
    with OtlpSink() as collector:
        yield collector


@pytest.fixture(scope="session")
def unary_sink(engine: str) -> Iterator[OtlpSink]:
    """The collector of the engine's shared unary server."""
    with OtlpSink() as collector:
        yield collector


def _observed(engine: str, directory: Path, sink: OtlpSink, **settings: Any) -> Iterator[Running]:
    """Serve with metrics, traces, and a line of JSON in the log for each request; steps are small.

    The deployment says text, and the command JSON. Upstream's C++ backend has neither traces nor these lines.
    """
    if engine == "tensorrtllm":
        yield from run(on_engine(engine, directory, **settings))
        return
    if engine == "pytorch":
        settings["batching"] = {"max_batch_size": 32, "max_tokens_per_step": STEP_TOKENS}
    shown = {"log_requests": "info", "trace_endpoint": sink.endpoint}
    path = on_engine(engine, directory, observability=shown, **settings)
    yield from run(path, observability=ObservabilitySettings(log_format="json", **shown))


@pytest.fixture(scope="session")
def server(engine: str, sink: OtlpSink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from _observed(engine, tmp_path_factory.mktemp(engine), sink)


@pytest.fixture(scope="session")
def unary_server(engine: str, unary_sink: OtlpSink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from _observed(engine, tmp_path_factory.mktemp(engine), unary_sink, decoupled=False)


@pytest.fixture
def traced(server: Running, sink: OtlpSink) -> Traced:
    """The shared streaming server, and what it told its collector."""
    return Traced(server, sink)


@pytest.fixture
def traced_unary(unary_server: Running, unary_sink: OtlpSink) -> Traced:
    """The shared unary server, and what it told its collector."""
    return Traced(unary_server, unary_sink)


@pytest.fixture(scope="session")
def narrow_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """It runs one sequence at a time and lets eight wait."""
    yield from run(
        on_engine(engine, tmp_path_factory.mktemp(engine), batching={"max_batch_size": 1, "max_queue_size": 8})
    )


@pytest.fixture(autouse=True)
def _shared_servers_run(request: pytest.FixtureRequest) -> None:
    """Start a shared server again of which a part has ended: the test before has failed, others need not."""
    for name in ("server", "unary_server", "narrow_server"):
        shared = request.getfixturevalue(name) if name in request.fixturenames else None
        if isinstance(shared, Running) and (ended := _ended(shared.server)):
            last = "\n".join(shared.log.splitlines()[-30:])
            warnings.warn(f"{ended} of a shared server has ended; its log said last:\n{last}", stacklevel=1)
            shared.server.stop(at_once=True)
            shared.server.start()
            shared.server.wait_ready(180)
            object.__setattr__(shared, "first_page", read_page(shared.metrics))


def _ended(server: TritonServer) -> str:
    """Return what of a server has ended that no test has stopped: the server itself, or one of its stages."""
    if server._process is None:  # a test has stopped it
        return ""
    if server._process.poll() is not None:
        return "the process"
    for process, (stage, _) in read_pulses(server._process.pid).items():
        try:
            ended = psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        if ended:
            return f"the stage {stage}"
    return ""
