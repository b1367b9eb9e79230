"""Ends a Triton server that this process started, in the time it needs, and all that belongs to it.

At SIGTERM Triton takes no new HTTP connection, waits until none is left, and only then stops its models, with what
remains of the exit timeout (its pull request 6986; so in 2.51). That has two consequences:

- Where no HTTP connection is left, a running stream over gRPC gets no token more, and the server waits for it until the
  exit timeout is over. So a connection is held here until the engine has no request.
- A client that merely keeps a connection open, such as Prometheus, would use all of the time up. So a server that has
  nothing left to do is not waited for.

Where a client cancels a gRPC stream in the moment in which its last response is written, Triton 2.51 at times keeps
the request for good, although each stage has answered it to its end: it counts no inference in flight, unloads the
stages, and then waits for the ensemble ("1 live models") until the exit timeout is over. So a server whose stages have
all ended is not waited for either. Streams over HTTP leave nothing, and Inflight's clients and gateway read an answer
of one sequence that is over to the end of its call.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from inflight.addresses import read_directly
from inflight.contract import ENGINE
from inflight.metrics import UPSTREAM
from inflight.serve.processes import look_at, runs_alone, wait_for_group
from inflight.shared_counters import read_pulses

log = logging.getLogger(__name__)

_POLL_S = 0.1
LOOK_S = 0.4
"""The time between two looks at what a server has left to do. Metrics show a request within it."""
CALM_LOOKS, LOOKS = 2, 8
"""Looks in a row that must find nothing until our own connection is closed, and until the server is killed: the last
response may be on its way, and spans are sent once a second. They are counted, and not their time: where the whole
machine stands still, the server is not at fault."""
_BUSY, _SERVER_BUSY = 0.05, 0.25
"""The share of one core of a stage of text that works, and of a server that reads a request or writes an answer; the
stage's threads that beat and export metrics use less, and so does the server for our looks and a Prometheus."""
_TIDY_S = 2.0
"""The time that the stages of a server that has gone get to end what they have started, and themselves."""
_GONE_S = 10.0
"""The time that killed processes get to give back their memory."""
_ACTIVE = re.compile(rf'^{UPSTREAM[0].name}{{[^}}]*request_type="active"[^}}]*}} (\S+)$', re.MULTILINE)


def end_server(server: subprocess.Popen[bytes], http: tuple[str, int], metrics: str | None, timeout_s: float) -> int:
    """End a server that leads a process group: SIGTERM, then SIGKILL for it, and for what it leaves of the group.

    Args:
        server: the process; it may have ended already.
        http: the host and the port of its HTTP API.
        metrics: the URL of its metrics, which say whether the engine has requests. Without them a server that waits for
            idle connections alone cannot be told from one that works, and has all of its time.
        timeout_s: seconds until SIGKILL.

    Returns:
        Its exit code, as ``Popen.returncode`` has it.
    """
    deadline = time.monotonic() + timeout_s
    work, held = _Work(server.pid, metrics), None if metrics is None else _connection(*http)
    server.send_signal(signal.SIGTERM)
    looked = time.monotonic()
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            server.wait(_POLL_S)
        if time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            work.look()
            if held is not None and work.idle_looks == CALM_LOOKS:
                held.close()
                held, work = None, _Work(server.pid, metrics)
            elif work.is_over:
                break
    if held is not None:
        held.close()
    server.kill()  # a process that has ended already is not signalled
    server.wait()
    wait_for_group(server.pid, _TIDY_S)
    return kill_server(server)


def kill_server(server: subprocess.Popen[bytes]) -> int:
    """End what is left of a server's process group at once, and wait until it has gone. Return as ``end_server``."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    wait_for_group(server.pid, _GONE_S)
    return code


class _Seen(NamedTuple):
    """What the stages have done so far."""

    beats: list[int]
    calls: list[int]
    cpu_s: float
    """The time of the processor that the stages of text have used."""
    server_cpu_s: float
    """The time of the processor that the server itself has used."""
    at_s: float
    """When this was seen."""


class _Work:
    """What a server that has been asked to end has left to do; looked at again and again."""

    def __init__(self, server: int, metrics: str | None) -> None:
        self._server = server
        self._metrics = metrics
        self._stages = read_pulses(server)
        self._had_stages = not runs_alone(server)
        self._seen = self._look_at_stages()
        self.idle_looks = self._lonely_looks = 0
        """The last looks in a row that have found no work, and no stage."""

    def look(self) -> None:
        """Look once more."""
        self.idle_looks = self.idle_looks + 1 if self._finds_none() else 0
        self._lonely_looks = self._lonely_looks + 1 if self._had_stages and runs_alone(self._server) else 0
        if self._lonely_looks == LOOKS:
            log.debug("the server's stages have ended, and it waits for a request that has ended too: it is killed")

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return LOOKS in (self.idle_looks, self._lonely_looks)

    def _finds_none(self) -> bool:
        """Return whether each stage lives, has begun no call and no end, and the engine has no request.

        A long prompt in the tokenizer, and a body that the server parses, are no request of the engine yet, and an
        answer that the server writes is none any more: then these processes compute.
        """
        seen, self._seen = self._seen, self._look_at_stages()
        elapsed_s = self._seen.at_s - seen.at_s
        computes = self._seen.cpu_s - seen.cpu_s > _BUSY * elapsed_s
        computes |= self._seen.server_cpu_s - seen.server_cpu_s > _SERVER_BUSY * elapsed_s
        lives = all(now > before for now, before in zip(self._seen.beats, seen.beats, strict=True))
        rests = not any(pulse.closed or pulse.call for _, pulse in self._stages.values())
        rests &= self._seen.calls == seen.calls and not computes
        return lives and rests and self._metrics is not None and _has_no_request(self._metrics)

    def _look_at_stages(self) -> _Seen:
        pulses = [pulse for _, pulse in self._stages.values()]
        texts = [process for process, (name, _) in self._stages.items() if name != ENGINE]
        return _Seen(
            [pulse.beats for pulse in pulses],
            [pulse.calls for pulse in pulses],
            sum(map(_cpu_s, texts)),
            _cpu_s(self._server),
            time.monotonic(),
        )


def _cpu_s(process: int) -> float:
    """Return the time of the processor that a process has used; 0: there is none."""
    state = look_at(process)
    return 0.0 if state is None else state.cpu_s


def _connection(host: str, port: int) -> HTTPConnection | None:
    """Return a connection that the server counts as open until it is closed; None: it takes none."""
    connection = HTTPConnection(host, port, timeout=_POLL_S)
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    except (OSError, HTTPException):
        connection.close()
        return None
    return connection


def _has_no_request(metrics: str) -> bool:
    """Return whether the engine has no request, as far as its metrics say."""
    try:
        active = _ACTIVE.findall(read_directly(metrics).decode(errors="replace"))
    except (OSError, HTTPException):  # it ends meanwhile, also in the middle of its page
        return False
    return bool(active) and not any(map(float, active))
