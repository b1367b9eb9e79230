"""Starts, watches and stops one Triton server process.

It knows processes, ports and files; not what the models compute.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from inflight.contract import TENSORRTLLM, TRTLLM
from inflight.deployment import ENVIRONMENT_VARIABLE, Deployment, ServerSettings
from inflight.errors import DeploymentError
from inflight.manifest import check_deployment
from inflight.serve import cpp_backend
from inflight.serve.installation import MODEL_REPOSITORY, TritonInstallation, find_installation
from inflight.serve.pbtxt import DEFAULT, variant_name
from inflight.serve.repository import prepare_repository

SHARED_MEMORY = Path("/dev/shm")
_READY_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


@dataclass
class TritonServer:
    """One server process for one deployment. Use as a context manager, or call ``stop``."""

    directory: Path
    """The deployment's directory."""
    deployment: Deployment
    installation: TritonInstallation = field(default_factory=find_installation)
    model_repository: Path = MODEL_REPOSITORY
    _process: subprocess.Popen[bytes] | None = None
    _runtime: tempfile.TemporaryDirectory[str] | None = None
    _log: TextIO | None = None

    @property
    def settings(self) -> ServerSettings:
        """Where the server listens."""
        return self.deployment.server

    @property
    def log_path(self) -> Path:
        """The server's log; it is gone after ``stop``."""
        assert self._runtime is not None, "the server was not started"
        return Path(self._runtime.name) / "triton.log"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running server."""
        assert self._process is not None, "the server was not started"
        return self._process

    def start(self) -> None:
        """Start the process; it is not ready yet.

        Raises:
            DeploymentError: a port is busy, or the deployment was not built for this machine.
        """
        kind = self.deployment.engine.kind
        if kind in (TRTLLM, TENSORRTLLM):
            check_deployment(self.directory)
        for name in ("http_port", "grpc_port", "metrics_port"):
            _require_free(self.settings.host, name, getattr(self.settings, name))
        self._runtime = tempfile.TemporaryDirectory(prefix="inflight-")
        runtime = Path(self._runtime.name)
        repository = prepare_repository(self.model_repository, self.deployment, runtime / "models")
        backends = self.installation.assemble_backends(runtime / "backends")
        environment = {ENVIRONMENT_VARIABLE: str(self.directory.resolve())}
        if kind == TENSORRTLLM:
            self.installation.add_upstreams_backend(backends)
            environment |= cpp_backend.environment(self.deployment)
        self._log = self.log_path.open("w")
        self._process = subprocess.Popen(
            self._command(backends, repository),
            env=self.installation.environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle; a second SIGINT would cut its shutdown short
            preexec_fn=_die_with_parent,
        )

    def wait_ready(self, timeout_s: float = 600, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until every model answers; ``on_wait`` is called while waiting.

        Raises:
            DeploymentError: the server ended, or was not ready in time; the message says what its log says.
        """
        http, metrics = (
            f"http://{self.settings.host}:{port}" for port in (self.settings.http_port, self.settings.metrics_port)
        )
        deadline = time.monotonic() + timeout_s
        # The process is checked too: another server on the same ports would answer the probe in its place.
        while self.process.poll() is None:
            if _answers(f"{http}/v2/health/ready") and _answers(f"{metrics}/metrics"):
                return
            if time.monotonic() > deadline:
                raise DeploymentError(f"the server was not ready within {timeout_s:.0f} s: {self.cause()}")
            on_wait()
            time.sleep(_READY_POLL_S)
        raise DeploymentError(f"the server ended with code {self.process.returncode}: {self.cause()}")

    def stop(self) -> int | None:
        """End the server: SIGTERM, its own exit timeout, then SIGKILL. Remove what it leaves. Return its exit code."""
        code = None
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                code = self._process.wait(self.settings.exit_timeout_s + 10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
            for leftover in SHARED_MEMORY.glob(f"{self._shm_prefix()}*"):
                leftover.unlink(missing_ok=True)
        if self._log is not None:
            self._log.close()
        if self._runtime is not None:
            self._runtime.cleanup()
        self._process = self._log = self._runtime = None
        return code

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _shm_prefix(self) -> str:
        return f"inflight_{os.getpid()}_{self.settings.http_port}_"

    def _command(self, backends: Path, repository: Path) -> list[str]:
        server = self.settings
        command = [
            str(self.installation.binary),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix()}",
            "--disable-auto-complete-config",
            f"--http-address={server.host}",
            f"--grpc-address={server.host}",
            f"--metrics-address={server.host}",
            f"--http-port={server.http_port}",
            f"--grpc-port={server.grpc_port}",
            f"--metrics-port={server.metrics_port}",
            f"--exit-timeout-secs={server.exit_timeout_s}",
        ]
        variant = variant_name(self.deployment.engine.kind, self.deployment.decoupled)
        return command if variant == DEFAULT else [*command, f"--model-config-name={variant}"]

    def cause(self) -> str:
        """Return the line of the log that says best why a start failed."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        for pattern in (
            r"DeploymentError: (.*?)(?:\\n\\nAt:|$)",  # the stub puts a traceback, its line ends escaped, behind it
            r" ERROR inflight[\w.]*: (.*)",
            r"\| (\w+ +\| \d+ +\| UNAVAILABLE: .*)\|$",
            r"E\d{4} [^\]]*\] (.*)",
            "(.+)",
        ):
            for line in lines:
                if match := re.search(pattern, line):
                    return " ".join(match[1].strip(' "').split())
        return "its log is empty"


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on; all are held until all are found, so that they differ."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _require_free(host: str, name: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            option = name.replace("_", "-")
            raise DeploymentError(
                f"{host}:{port} cannot be used ({error.strerror}); choose another --{option}"
            ) from None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM to the server if this process dies without stopping it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
