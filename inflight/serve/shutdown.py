"""Ends a Triton server that this process started, in the time it needs, and all that belongs to it.

At SIGTERM Triton waits until its HTTP port has no connection left, and only then for its models, with what remains of
the exit timeout (its pull request 6986; so in 2.51). A client that merely keeps a connection open would use all of it
up: the models would not be unloaded, and the server would end with code 1. So once the engine has no request, the
connections on which nothing moves are shut down for reading, as if their clients had done it: Triton closes them.

Where a client cancels a gRPC stream in the moment in which its last response is written, Triton 2.51 at times keeps
the request for good: it unloads the stages, and then waits for the ensemble until the exit timeout is over. So a
server whose stages have all ended is not waited for.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from inflight.addresses import read_directly
from inflight.metrics import UPSTREAM
from inflight.serve.processes import runs_alone, wait_for_group

log = logging.getLogger(__name__)

_POLL_S = 0.1
_LONGEST_POLL_S = 2 * _POLL_S
"""What a poll counts for at the most: where the whole machine stands still, the server is not at fault."""
_GONE_S = 10.0
"""How long what was killed may take to give back its memory."""
QUIET_MS = 1000
"""How long nothing has moved on an idle connection: the last response is still on its way when the engine is done."""
_ACTIVE = re.compile(rf'^{UPSTREAM[0].name}{{[^}}]*request_type="active"[^}}]*}} (\S+)$', re.MULTILINE)
_PIDFD_GETFD = 438
"""The system call's number, the same on every architecture (Linux 5.6); Python has no function for it."""
_ALONE_S = 3.0
"""How long a server may take to end after its last stage, without which nothing can be answered any more."""
_GONE = (errno.EBADF, errno.ESRCH)
_TCP_INFO = struct.Struct("=44xI4xI")
"""Of tcp_info in linux/tcp.h: milliseconds since data were sent, and since data were received."""


def end_server(server: subprocess.Popen[bytes], http_port: int, metrics: str | None, timeout_s: float) -> int:
    """End a server that leads a process group: SIGTERM, then SIGKILL for it, and for what it leaves of the group.

    Args:
        server: the process; it may have ended already.
        http_port: where it takes HTTP requests.
        metrics: URL of its metrics, which say whether the engine has requests; without them nothing is closed.
        timeout_s: seconds until SIGKILL.

    Returns:
        Its exit code, as ``Popen.returncode`` has it.
    """
    deadline = time.monotonic() + timeout_s
    had_stages, alone_s, looked = not runs_alone(server.pid), 0.0, time.monotonic()
    # Once before the signal, at which Triton counts them, and then only once a second.
    again = _close_idle_connections(server, http_port, metrics)
    server.send_signal(signal.SIGTERM)
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            server.wait(_POLL_S)
        again = again and _close_idle_connections(server, http_port, metrics)
        now = time.monotonic()
        elapsed_s, looked = min(now - looked, _LONGEST_POLL_S), now
        alone_s = alone_s + elapsed_s if had_stages and runs_alone(server.pid) else 0.0
        if alone_s > _ALONE_S:
            log.warning("the server's stages have ended, and it waits for a request that has ended too: it is killed")
            break
    return kill_server(server)


def kill_server(server: subprocess.Popen[bytes]) -> int:
    """End what is left of a server's process group at once, and wait until it has gone. Return as ``end_server``."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    wait_for_group(server.pid, _GONE_S)
    return code


def _is_idle(metrics: str) -> bool:
    """Return whether the engine has no request, as far as its metrics say."""
    try:
        active = _ACTIVE.findall(read_directly(metrics).decode(errors="replace"))
    except (OSError, HTTPException):  # it ends meanwhile, also in the middle of its page
        return False
    return bool(active) and not any(map(float, active))


def _close_idle_connections(server: subprocess.Popen[bytes], port: int, metrics: str | None) -> bool:
    """Close the idle ones of the server's connections on its port; return whether it is of use to try again."""
    if metrics is None:
        return False
    if not _is_idle(metrics):
        return True
    try:
        process = os.pidfd_open(server.pid)
        try:
            for link in Path(f"/proc/{server.pid}/fd").iterdir():
                _close_if_idle(process, int(link.name), port)
        finally:
            os.close(process)
    except OSError as error:
        if server.poll() is None:
            log.warning("idle HTTP connections cannot be closed (%s): the server may wait for them", error.strerror)
        return False
    return True


def _close_if_idle(process: int, descriptor: int, port: int) -> None:
    """Shut down for reading what another process has open, if it is an idle connection on that port of its own.

    Raises:
        OSError: the kernel lacks pidfd_getfd(2), or a container's seccomp profile forbids it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    ours = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if ours < 0:
        if ctypes.get_errno() in _GONE:
            return
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        connection = socket.socket(fileno=ours)
    except OSError:  # not a socket
        os.close(ours)
        return
    with connection, suppress(OSError):  # what listens has no peer, what is closed no name
        connection.getpeername()
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
            moved_ms = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
            if min(moved_ms) >= QUIET_MS:
                connection.shutdown(socket.SHUT_RD)
