"""Two servers, each in a place of its own, behind one Envoy that reads what `inflight door` writes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.faults.place import Place, make_place
from benchmarks.faults.served import TRITON, Served, serving
from inflight.addresses import read_directly
from inflight.errors import EngineFailure
from inflight.resources import DEMO
from inflight.serve.door import Upstreams, envoy_path
from inflight.serve.envoy.files import CONFIGURATION, write_configuration
from inflight.serve.server import free_ports
from inflight.settings.deployment import load_deployment

_READY_S, _PROXY_S, _LOOK_S, _SEEN_S = 240.0, 30.0, 0.1, 4.0
"""The last: after so long the proxy has seen that a server is ready or not."""


@dataclass
class Replica:
    """One of the servers."""

    served: Served
    place: Place

    def wait_ready(self) -> float:
        """Wait until it is ready, and some more until the proxy knows, and return the seconds until it was.

        Raises:
            EngineFailure: it is not ready after minutes.
        """
        began = time.monotonic()
        while time.monotonic() < began + _READY_S:
            with suppress(OSError, HTTPException):
                read_directly(f"http://{self.served.gateway}/health")
                read_directly(f"http://{self.served.http}/v2/health/ready")
                seconds = time.monotonic() - began
                time.sleep(_SEEN_S)
                return seconds
            time.sleep(_LOOK_S)
        raise EngineFailure(f"a replica is not ready: {self.served.said.read_text(errors='replace')[-500:]}")

    def stop(self) -> float:
        """Ask it to stop by SIGTERM, as an update does, and return the seconds until it has ended."""
        began, process = time.monotonic(), self.served.process
        process.terminate()
        process.wait()
        return time.monotonic() - began

    def kill_triton(self) -> float:
        """Kill its Triton, which the supervisor starts again."""
        os.kill(self.served.process_of(TRITON), signal.SIGKILL)
        return 0.0

    def kill_all(self) -> float:
        """Kill all of its processes, as a machine that is lost does."""
        for process in self.place.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return 0.0


@contextmanager
def two_replicas() -> Iterator[tuple[str, list[Replica]]]:
    """Serve the demo twice behind one address, which is given back too.

    Raises:
        EngineFailure: the servers do not get ready, or the proxy does not start.
    """
    with ExitStack() as stack:
        replicas = []
        for _ in range(2):
            place = stack.enter_context(make_place())
            replicas.append(Replica(stack.enter_context(serving(place, behind_a_door=True)), place))
        for replica in replicas:
            replica.wait_ready()
        yield stack.enter_context(_envoy([replica.served for replica in replicas])), replicas


@contextmanager
def _envoy(replicas: Sequence[Served]) -> Iterator[str]:
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    deployment = load_deployment(DEMO)
    with TemporaryDirectory(prefix="inflight-replicas-") as name:
        folder = Path(name)
        upstreams = [Upstreams(one.http, one.grpc, one.gateway, None) for one in replicas]
        write_configuration(folder, deployment, upstreams, [address])
        command = [str(envoy_path()), "--config-path", str(folder / CONFIGURATION), "--disable-hot-restart"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_for_proxy(address, folder / "log")
            yield address
        finally:
            process.terminate()
            process.wait()


def _wait_for_proxy(address: str, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() < began + _PROXY_S:
        with suppress(OSError, HTTPException):
            read_directly(f"http://{address}/v2/health/ready")
            time.sleep(_SEEN_S)
            return
        time.sleep(_LOOK_S)
    raise EngineFailure(f"the proxy does not serve: {log.read_text()[-500:]}")
