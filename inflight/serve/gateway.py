"""Keeps the gateway's process beside Triton: starts it, watches it, starts it again, and ends it.

The two processes do not need each other to live: the gateway answers 503 while the engine is away, and Triton goes on
while the gateway starts again.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import inflight
from inflight.addresses import nearest_of, read_directly, without_proxy_for_loopback
from inflight.errors import DeploymentError
from inflight.serve import shields
from inflight.serve.log import bound, keep
from inflight.serve.metrics_page import read_page
from inflight.serve.processes import in_words
from inflight.serve.scratch import temporary_directory
from inflight.serve.server import address_of, require_free
from inflight.settings.api_keys import read_keys
from inflight.settings.deployment import Deployment, model_name

log = logging.getLogger(__name__)

START_S = 60
"""Seconds until the gateway must answer after its start."""
_ENGINE_LOOKS = 50
"""How many times it is asked whether it has seen that the engine is ready, of a second each at most. Usually they take
five seconds together; time alone is no measure, since it also passes where the machine stands still."""
PAUSES_S = (0, 1, 2, 4, 8, 16)
"""The pauses before new starts in a row; the last of them before all that follow."""
WELL_S = 60
"""Serving for so long ends a row."""
END_S = 10
"""Seconds beyond the exit timeout until the gateway is killed."""
_LOOK_S, _ENGINE_LOOK_S, _PROBE_S, _PROBE_TIMEOUT_S = 0.1, 1.0, 2.0, 5.0
_AWAY = 503
_LAST_LINES = 5


class GatewayProcess:
    """The gateway of one deployment. A thread of its own keeps it running, from ``start`` to ``stop``."""

    def __init__(self, directory: Path, deployment: Deployment, public_port: int | None = None) -> None:
        """``deployment`` is that of ``directory``, with the command's overrides.

        ``public_port`` is the port by which it is known, where it is not its own.
        """
        self._directory, self._deployment = directory, deployment
        self._public_port = public_port or deployment.gateway.port
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._log: TextIO | None = None
        self._thread: threading.Thread | None = None
        self._answered, self._tried = threading.Event(), threading.Event()
        """Whether it has ever answered; whether it has, or never will."""
        self._stopping = threading.Event()
        self._error = ""
        self.is_up = False
        """Whether its process runs, and has answered when it was last asked."""
        self.restarts = 0
        """New starts so far."""

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return self._deployment.gateway.host or self._deployment.server.host

    @property
    def address(self) -> str:
        """``host:port`` at which this machine reaches it."""
        return f"{nearest_of(self.host)}:{self._deployment.gateway.port}"

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        return f"http://{self.address}"

    @property
    def log_path(self) -> Path:
        """Its log; it is gone after ``stop``."""
        assert self._folder is not None, "the gateway was not started"
        return Path(self._folder.name) / "gateway.log"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None, "the gateway was not started"
        return self._process

    @property
    def model_name(self) -> str:
        """The name that requests give in ``model``."""
        return self._deployment.gateway.model_name or model_name(self._deployment.model)

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return self._deployment.gateway.api_keys_file is not None

    def check(self) -> None:
        """Look whether it can be started, before what takes long is.

        Raises:
            DeploymentError: its port is busy, or there is no file of API keys.
        """
        settings = self._deployment.gateway
        require_free(address_of(self.host), "gateway_port", settings.port)
        if settings.api_keys_file is not None and not settings.api_keys_file.is_file():
            raise DeploymentError(f"gateway.api_keys_file: {settings.api_keys_file} is no file")

    def start(self) -> None:
        """Start it; it does not answer yet."""
        self._folder = temporary_directory("inflight-gateway-")
        self._log = self.log_path.open("a")  # each line goes to the end, also of a log that has begun anew
        # The kernel's signal at the parent's death comes at the death of the thread that started the process.
        self._thread = threading.Thread(target=self._keep, name="gateway", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until it answers, and then until it has seen that the engine is ready.

        Raises:
            DeploymentError: it cannot be served; the message is the gateway's own.
        """
        self._tried.wait()
        if not self._answered.is_set():
            raise DeploymentError(f"the gateway {self._error}")
        for _ in range(_ENGINE_LOOKS):
            if self._answers(_ENGINE_LOOK_S, ready=True) or self._stopping.wait(_LOOK_S):
                return

    def begin_stop(self) -> None:
        """Have it take no more requests, and end when those that run have ended or had their time."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """End it, and remove what it leaves."""
        self.begin_stop()
        if self._thread is not None:
            self._thread.join()
        if self._log is not None:
            self._log.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._thread = self._log = self._folder = None

    def metrics(self) -> str | None:
        """Return its page of metrics; None: it is away, or the file of API keys is, of which it needs one."""
        path, key = self._deployment.gateway.api_keys_file, None
        try:
            key = read_keys(path, "gateway.api_keys_file")[1][0] if path is not None else None
        except DeploymentError:
            return None
        return read_page(f"{self.url}/metrics", key)

    def _keep(self) -> None:
        """Run the process again and again, until it is to stop; once, where it never answers."""
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
        kept = keep(self.log_path, f"crash-{self._public_port}.log")
        where = f"; its log is kept in {kept}" if kept else ""
        log.warning("the gateway %s; it restarts in %d s%s", how, pause_s, where)
        self.restarts += 1
        self._stopping.wait(pause_s)

    def _run_once(self) -> str:
        """Start the process and wait until it has ended; return how, in words."""
        try:
            self._spawn()
        except (DeploymentError, OSError) as error:
            return f"could not be started: {error}"
        try:
            return self._watch()
        finally:
            self.is_up = False

    def _watch(self) -> str:
        """Watch the process until it has ended, or ends it; return how it did, in words."""
        answered = asked = time.monotonic()
        limit_s: float | None = START_S
        while self.process.poll() is None and not self._stopping.wait(_LOOK_S):
            now = time.monotonic()
            if limit_s is START_S or now - asked >= _PROBE_S:
                asked = now
                bound(self.log_path)
                self.is_up = self._answers()
                if self.is_up:
                    answered, limit_s = now, self._deployment.server.hang_timeout_s
                    self._answered.set()
                    self._tried.set()
            if limit_s is not None and now - answered >= limit_s:
                self.process.kill()
                self.process.wait()
                return f"has not answered for {limit_s:g} s{self._said()}"
        if self._stopping.is_set():
            return self._end()
        code = self.process.returncode
        return f"ended {in_words(code)}{self._said() if code > 0 else ''}"

    def _spawn(self) -> None:
        deployment = self._deployment
        sections = {name: getattr(deployment, name).model_dump(mode="json") for name in ("server", "gateway")}
        sections["observability"] = deployment.observability.model_dump(mode="json")
        self._process = subprocess.Popen(
            [
                shields.util_linux("setpriv"),
                *("--pdeathsig", "KILL", "--", sys.executable, "-P", "-m", "inflight.gateway"),
                *(str(self._directory.resolve()), "--sections", json.dumps(sections)),
            ],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    def _answers(self, timeout_s: float = _PROBE_TIMEOUT_S, *, ready: bool = False) -> bool:
        """Return whether it answers, if only that the engine is away; ``ready``: whether it says that it is not."""
        try:
            read_directly(f"{self.url}/health", timeout_s)
        except (OSError, http.client.HTTPException) as error:
            return not ready and getattr(error, "code", None) == _AWAY
        return True

    def _end(self) -> str:
        """End the process: SIGTERM, its exit timeout, then SIGKILL. Return how it ended."""
        process = self.process
        process.terminate()  # one that has ended is not signalled
        with suppress(subprocess.TimeoutExpired):
            process.wait(self._deployment.server.exit_timeout_s + END_S)
        process.kill()
        return f"ended {in_words(process.wait())}"

    def _said(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        said = next((line for line in reversed(lines[-_LAST_LINES:]) if line.strip()), "")
        return f": {said.removeprefix('inflight.gateway: ')}" if said else ""


def _environment() -> dict[str, str]:
    """Return the environment in which the process imports what this one does."""
    paths = [str(Path(inflight.__path__[0]).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | without_proxy_for_loopback() | {"PYTHONPATH": os.pathsep.join(paths)}
