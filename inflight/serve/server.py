"""Starts, watches and stops one Triton server process.

It knows processes, ports and files; not what the models compute.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from inflight.addresses import in_url, nearest_of, read_directly
from inflight.contract import CLIENT, TENSORRTLLM, TRTLLM
from inflight.errors import DeploymentError
from inflight.manifest import check_deployment
from inflight.resources import MODEL_REPOSITORY
from inflight.serve import shields
from inflight.serve.installation import (
    PYTHON_LIBRARY,
    TritonInstallation,
    find_installation,
    libraries_beside,
    require_engine,
)
from inflight.serve.leftovers import remove
from inflight.serve.log import UNKNOWN, StageLog, bound, cause
from inflight.serve.processes import in_words
from inflight.serve.repository import DEFAULT_VARIANT, orchestrator_environment, prepare_repository, variant_name
from inflight.serve.restarts import Restarts
from inflight.serve.scratch import OwnedDirectory, temporary_directory
from inflight.serve.shutdown import end_server, kill_server
from inflight.settings.deployment import DOOR_VARIABLE, ENVIRONMENT_VARIABLE, Deployment
from inflight.settings.observability import LOG_FORMAT_VARIABLE, METRICS_VARIABLE, RESTARTS_VARIABLE
from inflight.settings.server import ServerSettings
from inflight.shared_counters import SHARED_MEMORY

log = logging.getLogger(__name__)

HELD_S = 3.0
"""How long a port may be busy before that is an error."""
_READY_POLL_S, _PAUSE_POLL_S = 0.02, 0.1
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)
_PORTS, _PARTS, _PORTS_EACH = 10_000, 700, 30
"""The first port that ``free_ports`` gives; the number of parts, of which each process has its own; a part's ports."""
_looked_at = itertools.count()
_METRICS_INTERVAL_MS = 500
"""Between two looks of Triton at the machine (2.51: 2000). It sleeps so long also where it is to stop: each stop, and
each restart, waits for it."""
_TRACE_HEADERS = "traceparent", "tracestate"
"""The headers that Triton hands on to the stages as parameters: those of gRPC, and of HTTP on `infer`, but not on
`generate` (2.51)."""
_REMEDIES = {
    errno.EADDRINUSE: "choose another --{option}",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another --host",
    errno.EACCES: "ports this low are root's; choose a --{option} from 1024 on",
}


@dataclass
class TritonServer:
    """One server process for one deployment. Use as a context manager, or call ``stop``."""

    directory: Path
    """The deployment's directory."""
    deployment: Deployment
    installation: TritonInstallation = field(default_factory=find_installation)
    model_repository: Path = MODEL_REPOSITORY
    restarts: Restarts = field(default_factory=Restarts)
    """Counts the new starts of this server."""
    _process: subprocess.Popen[bytes] | None = None
    _runtime: OwnedDirectory | None = None
    _log: TextIO | None = None
    _ready: int = 0
    """Bytes of its log when it was ready."""

    @property
    def settings(self) -> ServerSettings:
        """Where the server listens."""
        return self.deployment.server

    @property
    def stop_timeout_s(self) -> float:
        """Seconds that it may take to end: its own exit timeout, and some more."""
        return self.settings.exit_timeout_s + 10

    @property
    def metrics(self) -> bool:
        """Whether it serves metrics."""
        return self.deployment.observability.metrics

    @property
    def log_path(self) -> Path:
        """The server's log; it is gone after ``stop``."""
        assert self._runtime is not None, "the server was not started"
        return Path(self._runtime.name) / "triton.log"

    @property
    def http_url(self) -> str:
        """Where this machine reaches its HTTP API."""
        return f"http://{nearest_of(self.settings.host)}:{self.settings.http_port}"

    @property
    def metrics_url(self) -> str:
        """Where this machine reads its metrics."""
        return f"http://{nearest_of(self.settings.host)}:{self.settings.metrics_port}/metrics"

    @property
    def started(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._runtime is not None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running server."""
        assert self._process is not None, "the server was not started"
        return self._process

    def start(self) -> None:
        """Start the process; it is not ready yet.

        Raises:
            DeploymentError: a port is busy, the deployment was not built for this machine, or a tool is missing.
        """
        # The kernel kills it if this process dies without stopping it: its port is needed for the one that comes next,
        # and the door, by which clients read what still runs, is gone too. Python's own way, ``preexec_fn``, runs
        # gRPC's handlers in the forked process where this one has used gRPC; at times they end it by SIGABRT before it
        # has become the server (https://github.com/grpc/grpc/issues/43055).
        dies_with_parent = [shields.util_linux("setpriv"), "--pdeathsig", "KILL", "--"]
        roomy_stack = shields.roomy_stack()
        kind = self.deployment.engine.kind
        if kind in (TRTLLM, TENSORRTLLM):
            check_deployment(self.directory)
        require_engine(kind)
        address = address_of(self.settings.host)
        for name in ("http_port", "grpc_port", *(["metrics_port"] if self.metrics else [])):
            require_free(address, name, getattr(self.settings, name))
        self._runtime = temporary_directory("inflight-")
        runtime = Path(self._runtime.name)
        repository = prepare_repository(self.model_repository, self.deployment, runtime / "models")
        backends = self.installation.assemble_backends(runtime / "backends")
        binary = self.installation.binary
        if self.installation.embedded:
            binary = shields.shielded(binary, runtime, self.deployment.decoupled)
            shields.shield_library(self.installation.loader_path, libraries_beside(backends))
            shields.shield_backend(backends / "python" / PYTHON_LIBRARY, self._runtime.backends_folders)
        environment = {
            ENVIRONMENT_VARIABLE: str(self.directory.resolve()),
            DOOR_VARIABLE: "on" if self.deployment.door.enabled else "off",
            METRICS_VARIABLE: "on" if self.metrics else "off",
            RESTARTS_VARIABLE: json.dumps(self.restarts.counts),
            LOG_FORMAT_VARIABLE: self.deployment.observability.log_format,
        }
        if kind == TENSORRTLLM:
            self.installation.add_upstreams_backend(backends)
            environment |= orchestrator_environment(self.deployment)
        self._log = self.log_path.open("a")  # each line goes to the end, also of a log that has begun anew
        self._process = subprocess.Popen(
            [*dies_with_parent, *roomy_stack, *self._command(binary, backends, repository)],
            env=self.installation.environment(backends) | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle; a second SIGINT would cut its shutdown short
        )
        for prefix in self._made_outside():
            self._runtime.note(prefix)

    def wait_ready(self, timeout_s: float | None = None, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until every model answers, for ``server.start_timeout_s`` by default; ``on_wait`` is called meanwhile.

        A server that crashes before is started again as ``restarts`` says, if time is left. Triton's Python backend
        crashes where it gives a stage up that loads: ``shields`` says when it does.

        Raises:
            DeploymentError: the server ended, or was not ready in time; the message says what its log says.
        """
        timeout_s = self.deployment.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._becomes_ready(deadline, on_wait):
            if self.process.poll() is None:
                raise DeploymentError(
                    f"the server was not ready within {timeout_s:.0f} s (server.start_timeout_s): {self._where()}"
                )
            end = f"the server ended {self.how()}: {self.cause()}"
            pause_s = self.restarts.after("crash") if self.process.returncode in _CRASHES else None
            if pause_s is None or time.monotonic() + pause_s > deadline:
                raise DeploymentError(end)
            log.warning("%s; it restarts in %d s", end, pause_s)
            self.stop()
            pause(pause_s, on_wait)
            self.start()
        self._ready = self.log_path.stat().st_size

    def bound_log(self) -> None:
        """Begin its log anew where that is long."""
        if bound(self.log_path):
            self._ready = min(self._ready, 1)

    def _becomes_ready(self, deadline: float, on_wait: Callable[[], None]) -> bool:
        probes = [f"{self.http_url}/v2/health/ready"]
        if self.metrics:
            probes.append(self.metrics_url)
        # The process is checked too: another server on the same ports would answer the probe in its place.
        while self.process.poll() is None and time.monotonic() < deadline:
            if all(map(_answers, probes)):
                return True
            on_wait()
            time.sleep(_READY_POLL_S)
        return False

    def stop(self, at_once: bool = False) -> int | None:
        """End the server: SIGTERM, its own exit timeout, then SIGKILL. Remove what it leaves. Return its exit code.

        Args:
            at_once: SIGKILL only: what runs cannot end any more.
        """
        code = None
        if self._process is not None:
            if at_once:
                code = kill_server(self._process)
            else:
                http = nearest_of(self.settings.host).strip("[]"), self.settings.http_port
                metrics = self.metrics_url if self.metrics else None
                code = end_server(self._process, http, metrics, self.stop_timeout_s)
            remove(self._made_outside())
        if self._log is not None:
            self._log.close()
        if self._runtime is not None:
            self._runtime.cleanup()
        self._process = self._log = self._runtime = None
        self._ready = 0
        return code

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _made_outside(self) -> tuple[str, str, str]:
        """Return how the paths begin of what Triton and the stages make in shared memory, and in /tmp."""
        assert self._runtime is not None, "the server was not started"
        stages = f"{SHARED_MEMORY}/inflight_{self.process.pid}_"
        return f"{SHARED_MEMORY}/{self._shm_prefix()}", stages, self._runtime.backends_folders

    def _shm_prefix(self) -> str:
        # Newer servers refuse to register a region whose name begins as the Python backend's own do.
        return f"triton_python_backend_shm_region_inflight_{os.getpid()}_{self.settings.http_port}_"

    def _command(self, binary: Path, backends: Path, repository: Path) -> list[str]:
        server, address = self.settings, address_of(self.settings.host)
        http_address = f"ipv6:{address}" if ":" in address else address  # as its HTTP library spells it
        command = [
            str(binary),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix()}",
            "--disable-auto-complete-config",
            f"--http-address={http_address}",
            f"--grpc-address={in_url(address)}",
            f"--http-port={server.http_port}",
            f"--grpc-port={server.grpc_port}",
            f"--exit-timeout-secs={server.exit_timeout_s}",
            *shields.closed_apis(server.open_apis),
        ]
        headers = [*(_TRACE_HEADERS if self.deployment.observability.trace_endpoint is not None else ())]
        headers += [CLIENT] if self.deployment.door.enabled else []
        pattern = f"(?i)^({'|'.join(headers)})$"
        command += [f"--{api}-header-forward-pattern={pattern}" for api in ("grpc", "http") if headers]
        if self.metrics:
            command += [f"--metrics-address={http_address}", f"--metrics-port={server.metrics_port}"]
            command.append(f"--metrics-interval-ms={_METRICS_INTERVAL_MS}")
        else:
            command.append("--allow-metrics=false")
        variant = variant_name(self.deployment.engine.kind, self.deployment.decoupled)
        return command if variant == DEFAULT_VARIANT else [*command, f"--model-config-name={variant}"]

    def how(self) -> str:
        """Return how the process ended: "with code 1", "on SIGABRT"."""
        return in_words(self.process.returncode)

    def cause(self) -> str:
        """Return what the log says of why it ended."""
        return cause(self.log_path, self._ready)

    def _where(self) -> str:
        """Return why a start takes too long, or what its stages said last."""
        found, said = self.cause(), StageLog().new_lines(self.log_path)
        return f"its stages said last: {said[-1].message}" if said and found == UNKNOWN else found


def address_of(host: str) -> str:
    """Return the address of a host by its number: Triton's HTTP server (2.51) takes a name for no address at all.

    The host is a name or an address, of IPv6 with brackets or without.

    Raises:
        DeploymentError: there is no such host.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeploymentError(f"--host {host}: {reason}; it must be an address or a name of this machine") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def require_free(address: str, name: str, port: int) -> None:
    """Look whether a server can listen at an address, given by its number; ``name`` is that of the port's setting.

    A port that is busy is looked at for ``HELD_S``: a server that was killed may hold it a moment longer.

    Raises:
        DeploymentError: it cannot; the message says what to change.
    """
    deadline = time.monotonic() + HELD_S
    while (error := _bind_error(address, port)) is not None:
        if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
            remedy = _REMEDIES.get(error.errno or 0, "choose another --host or --{option}")
            advice = remedy.format(option=name.replace("_", "-"))
            raise DeploymentError(f"{in_url(address)}:{port} cannot be used ({error.strerror}); {advice}")
        time.sleep(_PAUSE_POLL_S)


def _bind_error(address: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def free_ports(count: int, kept: Collection[int | None] = ()) -> list[int]:
    """Return ports that nothing listens on, but none of those that are ``kept`` for something else.

    They lie below those that Linux gives to outgoing connections, and each process looks in its own part of them: until
    a server binds them, seconds from now, hardly anybody else gets them.

    Raises:
        DeploymentError: there are not as many.
    """
    first, found = _PORTS + _part_of(os.getpid())[0] * _PORTS_EACH, list[int]()
    for _ in range(_PORTS_EACH):
        port = first + next(_looked_at) % _PORTS_EACH
        if port in kept:
            continue
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            found.append(port)
        if len(found) == count:
            return found
    raise DeploymentError(f"fewer than {count} of the ports {first} to {first + _PORTS_EACH - 1} are free")


@functools.cache
def _part_of(process: int) -> tuple[int, socket.socket]:
    """Return a part that this process has, and the socket that holds it until it ends.

    An abstract address (unix(7)) is one process's, whoever runs it. Where others have them all, the part is shared.
    """
    part, holder = process % _PARTS, socket.socket(socket.AF_UNIX)
    for one in (*range(part, _PARTS), *range(part)):
        with contextlib.suppress(OSError):
            holder.bind(f"\0inflight-ports-{one}")
            return one, holder
    return part, holder


def pause(seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
    """Wait, calling ``on_wait`` meanwhile."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        on_wait()
        time.sleep(min(left_s, _PAUSE_POLL_S))


def _answers(url: str) -> bool:
    try:
        read_directly(url)
    except (OSError, http.client.HTTPException):  # the latter: something else listens there
        return False
    return True
