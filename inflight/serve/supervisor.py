"""Keeps a deployment served: starts its server, watches it, and starts it again when it has ended, died or hung.

``server.Restarts`` decides whether and when a server is started again; ``server`` knows how one is started and ended,
and ``vitals`` when one hangs.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from inflight.errors import DeploymentError
from inflight.serve.log import UNKNOWN, CrashWatch, keep
from inflight.serve.processes import killed_for_memory
from inflight.serve.server import TritonServer, pause
from inflight.serve.vitals import LOOK_S, End, Vitals

log = logging.getLogger(__name__)


@dataclass
class Supervisor:
    """Serves one deployment for as long as it can be served."""

    server: TritonServer
    """The server, not started yet."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context of what must not be interrupted."""

    def start(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Start the server, and wait until it is ready; ``on_wait`` is called while waiting.

        Raises:
            DeploymentError: it cannot be served.
        """
        with self.whole():
            self.server.start()
        try:
            self.server.wait_ready(on_wait=on_wait)
        except DeploymentError as error:
            raise DeploymentError(f"{error}{self._keep_log()}" if UNKNOWN in str(error) else str(error)) from None

    def keep_serving(self) -> None:
        """Watch the server that is ready, and start it again whenever that is needed, until interrupted.

        Raises:
            DeploymentError: it ends again and again; the message says why it did the last time.
        """
        while True:
            began = time.monotonic()
            end = self._wait_for_end()
            self._start_again(end, time.monotonic() - began)

    def _wait_for_end(self) -> End:
        server, settings, killed = self.server, self.server.settings, killed_for_memory()
        where = settings.host, settings.http_port, settings.grpc_port
        timeouts = settings.hang_timeout_s, server.stop_timeout_s
        crashes = CrashWatch(server.log_path)
        with Vitals(server.process.pid, *where, *timeouts) as vitals:
            end = None
            while end is None and server.process.poll() is None:
                time.sleep(LOOK_S)
                end = crashes.look() or vitals.look()
        end = end or _own_end(server)
        if end.killed and killed_for_memory() > killed:
            return End(end.cause, f"{end.text}: the kernel killed it for lack of memory")
        return end

    def _start_again(self, end: End, served_s: float) -> None:
        while True:
            kept = self._keep_log()
            with self.whole():
                self.server.stop(at_once=True)
            pause_s = self.server.restarts.after(end.cause, served_s)
            if pause_s is None:
                times = self.server.restarts.in_a_row
                raise DeploymentError(f"{end.text}; `inflight serve` gives up after {times} restarts in a row{kept}")
            log.warning("%s; the server restarts in %d s%s", end.text, pause_s, kept)
            pause(pause_s)
            began = time.monotonic()
            try:
                self.start()
            except (DeploymentError, OSError) as error:  # the latter: a full disk, too little memory for a process
                end, served_s = End("start", str(error)), 0.0
            else:
                log.info("ready again in %.1f s; log %s", time.monotonic() - began, self.server.log_path)
                return

    def _keep_log(self) -> str:
        """Keep the server's log, which goes with the server; return where, in words."""
        if not self.server.started:
            return ""
        kept = keep(self.server.log_path, f"crash-{self.server.settings.http_port}.log")
        return f"; its log is kept in {kept}" if kept else ""


def _own_end(server: TritonServer) -> End:
    """Return why a server must be started again that has ended by itself."""
    code, said = server.process.returncode, server.cause()
    text = f"the server ended {server.how()}"
    if code == -signal.SIGKILL:
        return End("crash", text, killed=True)
    if code == 0 and said == UNKNOWN:
        said = "somebody sent it SIGTERM or SIGINT"  # nothing else ends Triton so
    return End("crash" if code < 0 else "exit", f"{text}: {said}")
