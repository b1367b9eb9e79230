"""Keeps a deployment served: starts its server, watches it, and starts it again when it has ended, died or hung.

It decides when a server is started again. ``server`` knows how one is started and ended, ``vitals`` when one hangs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from inflight.errors import DeploymentError
from inflight.serve.log import UNKNOWN, CrashWatch, keep
from inflight.serve.processes import killed_for_memory
from inflight.serve.server import TritonServer, pause
from inflight.serve.vitals import LOOK_S, End, Vitals

log = logging.getLogger(__name__)

_CRASHES_ON = "the server crashes again while it tells of its crash"


class Supervisor:
    """Serves one deployment for as long as it can be served."""

    def __init__(self, server: TritonServer, whole: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """
        Args:
            server: not started yet.
            whole: the context of what must not be interrupted.
        """
        self._server = server
        self._whole = whole

    def start(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Start the server, and wait until it is ready; ``on_wait`` is called while waiting.

        Raises:
            DeploymentError: it cannot be served.
        """
        with self._whole():
            self._server.start()
        try:
            self._server.wait_ready(on_wait=on_wait)
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
        server, settings, killed = self._server, self._server.settings, killed_for_memory()
        where = settings.host, settings.http_port, settings.grpc_port
        timeouts = settings.hang_timeout_s, server.stop_timeout_s
        crash = CrashWatch(server.log_path)
        with Vitals(server.process.pid, *where, *timeouts) as vitals:
            end = None
            while end is None and server.process.poll() is None:
                time.sleep(LOOK_S)
                end = End("crash", _CRASHES_ON) if crash.goes_on() else vitals.look()
        if end is None:
            cause = "crash" if server.process.returncode < 0 else "exit"
            end = End(cause, f"the server ended {server.how()}")
            said = server.cause()
            if server.process.returncode == 0 and said == UNKNOWN:
                said = "somebody sent it SIGTERM or SIGINT"  # nothing else ends Triton so
        else:
            said = server.cause() if end.text == _CRASHES_ON else ""
        if "SIGKILL" in end.text:
            said = "the kernel killed it for lack of memory" if killed_for_memory() > killed else ""
        return End(end.cause, f"{end.text}: {said}" if said else end.text)

    def _start_again(self, end: End, served_s: float) -> None:
        while True:
            kept = self._keep_log()
            with self._whole():
                self._server.stop(at_once=True)
            pause_s = self._server.restarts.after(end.cause, served_s)
            if pause_s is None:
                times = self._server.restarts.in_a_row
                raise DeploymentError(f"{end.text}; `inflight serve` gives up after {times} restarts in a row{kept}")
            log.warning("%s; the server restarts in %d s%s", end.text, pause_s, kept)
            pause(pause_s)
            began = time.monotonic()
            try:
                self.start()
            except (DeploymentError, OSError) as error:  # the latter: a full disk, too little memory for a process
                end, served_s = End("start", str(error)), 0.0
            else:
                log.info("ready again in %.1f s; log %s", time.monotonic() - began, self._server.log_path)
                return

    def _keep_log(self) -> str:
        """Keep the server's log, which goes with the server; return where, in words."""
        if not self._server.started:
            return ""
        kept = keep(self._server.log_path, f"crash-{self._server.settings.http_port}.log")
        return f"; its log is kept in {kept}" if kept else ""
