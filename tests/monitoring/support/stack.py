"""A real server, a real Prometheus that scrapes it often, and rules whose windows are all shortened by one factor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from inflight.client import AsyncClient, GenerateOptions
from inflight.resources import DEMO
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import load_deployment
from monitoring.generate.alerts import alerts
from monitoring.generate.objectives import Objectives
from monitoring.generate.rule import Timescale
from monitoring.generate.rules import write_rules
from tests.monitoring.support.prometheus import Prometheus
from tests.support.waiting import wait_until

MONITORING = Path(__file__).parents[3] / "monitoring"
HOLDS_S = {one.name: one.hold_s for group in alerts(Objectives(), Timescale()).values() for one in group}
"""How long each alert is held before it fires, in committed seconds."""
SLOW_ENGINE = tuple(
    f"Inflight{latency}{symptom}"
    for latency in ("Ttft", "Itl")
    for symptom in ("BurnFast", "BurnSlow", "BurnSustained", "High")
)
"""What fires of a server whose first tokens and tokens all are late."""
ROOM_S = 120
"""Some scrapes and evaluations, on a busy machine, beyond an alert's window and hold."""
SCALE = 15
"""What takes a minute takes four seconds; scrapes are a second apart instead of fifteen."""
FAST_SCALE = 30
"""Where it is not looked at which stage lives: a stage that is idle shows that it lives only once a second."""
_SCRAPES_S = 15
"""Apart, as committed."""


@dataclass
class Stack:
    """A server and the Prometheus that watches it."""

    server: TritonServer
    prometheus: Prometheus
    scale: int = SCALE

    def restart(self, **sections: dict[str, object]) -> None:
        """Stop the server, and start it where it was with other settings; wait until it is ready."""
        self.server.stop()
        at = self.server.settings
        _write_deployment(self.server.directory, self.server.deployment.model, sections)
        self.server.deployment = load_deployment(self.server.directory).model_copy(update={"server": at})
        self.server.start()
        self.server.wait_ready(180)

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.server.settings.grpc_port}"

    def stub(self, stage: str) -> int:
        """Return the process that runs a stage."""
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        return next(child.pid for child in children if any(f"/{stage}/1/" in word for word in child.cmdline()))

    def firing(self) -> dict[str, dict[str, str]]:
        """Return the labels and annotations of the alerts that fire, by name."""
        found = self.prometheus.get("alerts")["alerts"]
        return {
            one["labels"]["alertname"]: one["labels"] | one["annotations"] for one in found if one["state"] == "firing"
        }

    def wait_firing(self, alert: str, window_s: float) -> dict[str, str]:
        """Return the labels and annotations of an alert as soon as it fires, within its time.

        Args:
            alert: its name.
            window_s: what it looks back on, in committed seconds; how long it is held is known.
        """
        within_s = Timescale(self.scale).seconds(window_s + HOLDS_S[alert]) + ROOM_S
        found: dict[str, dict[str, str]] = {}

        def fires() -> bool:
            found.update(self.firing())
            return alert in found

        wait_for(fires, within_s, f"{alert} does not fire within {within_s:g} s, but {list(self.firing())}")
        return found[alert]

    def wait_quiet(self, *alerts: str) -> None:
        """Wait until none of these alerts fires any more."""
        wait_for(lambda: not set(alerts) & set(self.firing()), 2 * ROOM_S, f"still firing: {list(self.firing())}")

    async def ask(self, count: int, max_tokens: int = 48, prompt: str = "What is in-flight batching?") -> list[str]:
        """Send ``count`` requests at once, answers of full length; return how each ended, an error by its class."""
        async with AsyncClient(self.grpc) as client:
            options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True)
            answers = [client.generate(prompt, options) for _ in range(count)]
            ends = await asyncio.gather(*answers, return_exceptions=True)
        return [type(end).__name__ if isinstance(end, BaseException) else end.finish_reason for end in ends]


def wait_for(condition: Callable[[], object], within_s: float, else_say: str) -> None:
    """Wait until a condition holds."""
    assert wait_until(condition, within_s, every_s=0.2), else_say


@contextmanager
def stack(
    folder: Path,
    scale: int = SCALE,
    model: Path = DEMO / "model",
    exit_timeout_s: int = 2,
    **sections: dict[str, object],
) -> Iterator[Stack]:
    """Serve the demo with more settings, and scrape it with the committed configuration at the test's scale."""
    _write_deployment(folder, model, sections)
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "exit_timeout_s": exit_timeout_s}
    server = TritonServer(folder, override_server(load_deployment(folder), ports))
    with server, watch(server, folder, scale) as prometheus:
        server.wait_ready(180)
        running = Stack(server, prometheus, scale)
        wait_for(lambda: prometheus.instant('up{job="inflight"} == 1'), ROOM_S, "the server is not scraped")
        yield running


def _write_deployment(folder: Path, model: Path, sections: dict[str, dict[str, object]]) -> None:
    data = yaml.safe_load((DEMO / "deployment.yaml").read_text()) | {"model": str(model)}
    data |= {name: data.get(name, {}) | values for name, values in sections.items()}
    if data["engine"].get("kind") == "replay":  # it computes nothing, in no type
        del data["engine"]["dtype"]
    (folder / "deployment.yaml").write_text(yaml.safe_dump(data))


@contextmanager
def watch(server: TritonServer, folder: Path, scale: int = SCALE) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes a server with the committed configuration at a scale."""
    [port] = free_ports(1)
    metrics, ready = (f"127.0.0.1:{one}" for one in (server.settings.metrics_port, server.settings.http_port))
    text = (MONITORING / "prometheus.yml").read_text()
    assert text.count(f": {_SCRAPES_S}s") == 2
    (folder / "prometheus.yml").write_text(text.replace(f": {_SCRAPES_S}s", f": {Timescale(scale).span(_SCRAPES_S)}"))
    (folder / "targets.yml").write_text(yaml.safe_dump([{"targets": [metrics], "labels": {"__ready_address": ready}}]))
    write_rules(folder / "rules", Objectives(), Timescale(scale))
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            wait_for(lambda: _answers(prometheus), ROOM_S, "Prometheus does not answer")
            yield prometheus
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


@contextmanager
def in_thread(drive: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run ``drive`` in a thread until it is told, by its argument, that all is over."""
    over = threading.Event()
    thread = threading.Thread(target=drive, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def load(
    running: Stack,
    count: int,
    max_tokens: int,
    prompt: str | Callable[[], str] = "What is a paged KV cache?",
    pause_s: float = 0.05,
) -> Iterator[None]:
    """Keep ``count`` requests in a server from a thread, whatever becomes of them; ``prompt`` may make each round's.

    After each round is a pause: what is refused at once is not sent again at once.
    """

    def drive(over: threading.Event) -> None:
        while not over.is_set():
            with suppress(asyncio.TimeoutError):
                text = prompt if isinstance(prompt, str) else prompt()
                asyncio.run(asyncio.wait_for(running.ask(count, max_tokens, text), 30))
            over.wait(pause_s)

    with in_thread(drive):
        yield


def _answers(prometheus: Prometheus) -> bool:
    try:
        prometheus.get("alerts")
    except (httpx.HTTPError, ValueError):  # it is not there yet, or answers that it still starts
        return False
    return True


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, and let it go on afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
