"""Keeps a deployment served: starts its server, watches it, and starts it again when it has ended, died or hung.

A server is ready once it has generated a token. ``restarts.Restarts`` decides whether and when a server is started
again; ``server`` knows how one is started and ended, and ``vitals`` when one hangs.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from inflight.errors import DeploymentError
from inflight.serve.generation import Generation
from inflight.serve.log import UNKNOWN, CrashWatch, keep
from inflight.serve.processes import killed_for_memory
from inflight.serve.server import TritonServer, pause
from inflight.serve.status import State, Status
from inflight.serve.vitals import LOOK_S, PATIENCE_WITH_WORK, End, Vitals

log = logging.getLogger(__name__)


class _EndedAtStart(Exception):
    """A server whose models are loaded, but which has generated nothing."""

    def __init__(self, end: End) -> None:
        super().__init__(end.text)
        self.end = end


@dataclass
class Supervisor:
    """Serves one deployment for as long as it can be served."""

    server: TritonServer
    """The server, not started yet."""
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context of what must not be interrupted."""
    status: Status = field(default_factory=Status)
    """What others are told."""
    public_port: int | None = None
    """The HTTP port by which the server is known, where it is not the server's own."""

    def start(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Start the server, and wait until it has generated a token; ``on_wait`` is called while its models load.

        Raises:
            DeploymentError: it cannot be served.
        """
        try:
            self._start_once(on_wait)
        except _EndedAtStart as error:
            self._start_again(error.end)

    def keep_serving(self) -> None:
        """Watch the server that is ready, and start it again whenever that is needed, until interrupted.

        Raises:
            DeploymentError: it ends again and again; the message says why it did the last time.
        """
        never = threading.Event()
        while True:
            began = time.monotonic()
            end = self._watch_until(never)
            if end is not None:
                self._start_again(end, time.monotonic() - began)

    def _start_once(self, on_wait: Callable[[], None] = lambda: None) -> str:
        """Start the server until it has generated a token; return how long the parts of that took.

        Raises:
            DeploymentError: its models do not load.
            _EndedAtStart: they do, but it generates nothing.
        """
        began = time.monotonic()
        with self.whole():
            self.server.start()
        try:
            self.server.wait_ready(on_wait=on_wait)
        except DeploymentError as error:
            raise DeploymentError(f"{error}{self._keep_log()}" if UNKNOWN in str(error) else str(error)) from None
        loaded = time.monotonic()
        generation = Generation(self.server.http_url, self._generation_timeout_s())
        end = self._watch_until(generation.done)
        if end is None and generation.error:
            end = End("generation", f"the server has loaded its models, but generates nothing: {generation.error}")
        if end is not None:
            raise _EndedAtStart(end)
        self.status.change(State.READY)
        return f"started in {loaded - began:.1f} s, first token in {time.monotonic() - loaded:.1f} s"

    def _generation_timeout_s(self) -> float:
        limit_s = self.server.settings.hang_timeout_s
        start_s = self.server.deployment.start_timeout_s
        return start_s if limit_s is None else min(start_s, PATIENCE_WITH_WORK * limit_s)

    def _watch_until(self, done: threading.Event) -> End | None:
        """Return why the server must be started again; None: ``done`` is set, and it need not, by one more look."""
        server, settings, killed = self.server, self.server.settings, killed_for_memory()
        where = settings.host, settings.http_port, settings.grpc_port
        timeouts = settings.hang_timeout_s, server.stop_timeout_s
        crashes = CrashWatch(server.log_path)
        with Vitals(server.process.pid, *where, *timeouts) as vitals:
            end, over = None, False
            while end is None and server.process.poll() is None:
                if over:
                    return None
                over = done.wait(LOOK_S)
                end = crashes.look() or vitals.look()
                server.bound_log()
        end = end or _own_end(server)
        if end.killed and killed_for_memory() > killed:
            return End(end.cause, f"{end.text}: the kernel killed it for lack of memory")
        return end

    def _start_again(self, end: End, served_s: float = 0.0) -> None:
        noticed = time.monotonic()
        while True:
            self.status.change(State.RESTARTING, end.cause)
            kept, ended = self._keep_log(), time.monotonic()
            with self.whole():
                self.server.stop(at_once=True)
            ended_s = time.monotonic() - ended
            pause_s = self.server.restarts.after(end.cause, served_s)
            if pause_s is None:
                times = self.server.restarts.in_a_row
                raise DeploymentError(f"{end.text}; `inflight serve` gives up after {times} restarts in a row{kept}")
            log.warning("%s; the server restarts in %d s%s", end.text, pause_s, kept)
            pause(pause_s)
            try:
                parts = f"ended in {ended_s:.1f} s, {self._start_once()}"
            except _EndedAtStart as error:
                end, served_s = error.end, 0.0
            except (DeploymentError, OSError) as error:  # the latter: a full disk, too little memory for a process
                end, served_s = End("start", str(error)), 0.0
            else:
                log.info("ready again in %.1f s (%s); log %s", time.monotonic() - noticed, parts, self.server.log_path)
                return

    def _keep_log(self) -> str:
        """Keep the server's log, which goes with the server; return where, in words."""
        if not self.server.started:
            return ""
        kept = keep(self.server.log_path, f"crash-{self.public_port or self.server.settings.http_port}.log")
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
