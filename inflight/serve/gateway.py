"""Keeps the gateway's process beside Triton: starts it, watches it, starts it again, and ends it.

The two processes do not need each other to live: the gateway answers 503 while the engine is away, and Triton goes on
while the gateway starts again.
"""

from __future__ import annotations

import http.client
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from inflight.addresses import nearest_of, read_directly
from inflight.errors import DeploymentError
from inflight.serve import shields
from inflight.serve.installation import servers_environment
from inflight.serve.kept_process import KeptProcess
from inflight.serve.log import bound
from inflight.serve.metrics_page import read_page
from inflight.serve.server import address_of, require_free
from inflight.settings.api_keys import read_keys
from inflight.settings.deployment import Deployment, model_name

log = logging.getLogger(__name__)

_ENGINE_LOOKS = 50
"""How many times it is asked whether it has seen that the engine is ready, of a second each at most. Usually they take
five seconds together; time alone is no measure, since it also passes where the machine stands still."""
END_S = 10
"""Seconds beyond the exit timeout until the gateway is killed."""
_LOOK_S, _ENGINE_LOOK_S, _PROBE_S, _PROBE_TIMEOUT_S = 0.1, 1.0, 2.0, 5.0
_AWAY = 503


class GatewayProcess(KeptProcess):
    """The gateway of one deployment. A thread of its own keeps it running, from ``start`` to ``stop``."""

    def __init__(self, directory: Path, deployment: Deployment, public_port: int | None = None) -> None:
        """``deployment`` is that of ``directory``, with the command's overrides.

        ``public_port`` is the port by which it is known, where it is not its own.
        """
        super().__init__("gateway", f"crash-{public_port or deployment.gateway.port}.log", _LOOK_S)
        self._directory, self._deployment = directory, deployment
        self._log: TextIO | None = None
        self.is_up = False
        """Whether its process runs, and has answered when it was last asked."""

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
        return self.folder / "gateway.log"

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
        self._make_folder()
        self._log = self.log_path.open("a")  # each line goes to the end, also of a log that has begun anew
        self._begin()

    def wait_ready(self) -> None:
        """Wait until it answers, and then until it has seen that the engine is ready.

        Raises:
            DeploymentError: it cannot be served; the message is the gateway's own.
        """
        self._wait_answered()
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
        self._finish()
        if self._log is not None:
            self._log.close()
        self._log = None

    def metrics(self) -> str | None:
        """Return its page of metrics; None: it is away, or the file of API keys is, of which it needs one."""
        path, key = self._deployment.gateway.api_keys_file, None
        try:
            key = read_keys(path, "gateway.api_keys_file")[1][0] if path is not None else None
        except DeploymentError:
            return None
        return read_page(f"{self.url}/metrics", key)

    def _watch(self) -> str | None:
        try:
            return self._watch_answers()
        finally:
            self.is_up = False

    def _watch_answers(self) -> str | None:
        """Ask it again and again until it ends; return what is wrong, if it has to be killed."""
        answered = asked = time.monotonic()
        limit_s: float | None = self._deployment.start_timeout_s
        setting, starts = "server.start_timeout_s", True
        while self._goes_on():
            now = time.monotonic()
            if starts or now - asked >= _PROBE_S:
                asked = now
                bound(self.log_path)
                self.is_up = self._answers()
                if self.is_up:
                    answered, limit_s = now, self._deployment.server.hang_timeout_s
                    setting, starts = "server.hang_timeout_s", False
                    self._has_answered()
            if limit_s is not None and now - answered >= limit_s:
                return f"has not answered for {limit_s:g} s ({setting})"
        return None

    def _spawn(self) -> None:
        deployment = self._deployment
        sections = {name: getattr(deployment, name).model_dump(mode="json") for name in ("server", "gateway")}
        sections["observability"] = deployment.observability.model_dump(mode="json")
        sections["door"] = {"enabled": deployment.door.enabled}
        self._process = subprocess.Popen(
            [
                shields.util_linux("setpriv"),
                *("--pdeathsig", "KILL", "--", sys.executable, "-P", "-m", "inflight.gateway"),
                *(str(self._directory.resolve()), "--kept", "--sections", json.dumps(sections)),
            ],
            env=servers_environment(),
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
        return self._terminate(self._deployment.server.exit_timeout_s + END_S)
