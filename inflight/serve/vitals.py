"""Watches whether a server that was ready still lives, and its stages with it.

Time is counted in looks, and each look counts for half a second at the most: where the whole machine stands still, for
seconds or for a night, the server is not at fault.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.error import URLError

from inflight.addresses import nearest_of, read_directly
from inflight.serve.processes import ProcessState, ThreadState, in_words, look_at, look_at_threads, waits_for_machine
from inflight.serve.stream_probe import StreamProbe
from inflight.shared_counters import Pulse, read_pulses

LIFELESS_S = 3.0
"""A process that gives no sign of life and uses no processor for so long is stopped, or nothing will ever wake it."""
PATIENCE_WITH_WORK = 10
"""How many times the limit a call may take that computes: a step of a large model on a CPU may take minutes."""
LOOK_S = 0.25
_LONGEST_LOOK_S = 2 * LOOK_S
_BUSY = 0.05
"""Share of one core; Python's threads that wait for its lock, with their timeouts, use less."""
_PROBE_S, _PROBE_TIMEOUT_S = 0.5, 1.0
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of an HTTP/2 client: its preface and empty settings (RFC 9113, 3.4)."""


@dataclass(frozen=True)
class End:
    """Why a server is to be started again."""

    cause: str
    """One of those of ``Restarts.counts``."""
    text: str
    killed: bool = False
    """Whether it was SIGKILL, which the kernel sends too, for lack of memory."""


@dataclass
class _Stretch:
    """How long something has been seen unchanged."""

    seen: object = None
    seconds: float = 0.0
    idle_s: float = 0.0
    """The last seconds among them in which the processor was hardly used."""

    def see(self, value: object, elapsed_s: float, busy: bool) -> None:
        if value is None or value != self.seen:
            self.seen, self.seconds, self.idle_s = value, 0.0, 0.0
            return
        self.seconds += elapsed_s
        self.idle_s = 0.0 if busy else self.idle_s + elapsed_s


class Standstill:
    """Tells from what is seen of one process, look after look, whether it stands still."""

    def __init__(self, hang_timeout_s: float) -> None:
        """A call that does not compute may last for ``hang_timeout_s``."""
        self._limit_s = hang_timeout_s
        self._silence, self._call = _Stretch(), _Stretch()

    @property
    def silent(self) -> bool:
        """Whether the last look or more brought no sign of life."""
        return self._silence.seconds > 0

    def see(self, beats: int, call: int | None, busy: bool, elapsed_s: float) -> str | None:
        """Take a look in, and return what is wrong, if anything is.

        Args:
            beats: signs of life so far.
            call: number of the call that it is in.
            busy: whether it has used the processor since the last look, or waits for one, or for a disk.
            elapsed_s: since then.
        """
        self._silence.see(beats, elapsed_s, busy)
        self._call.see(call, elapsed_s, busy)
        if self._silence.idle_s >= LIFELESS_S:
            return f"has shown no sign of life for {LIFELESS_S:g} s"
        if self._silence.seconds >= (limit_s := max(LIFELESS_S, self._limit_s)):
            return f"has computed for {limit_s:g} s without a sign of life"
        if self._call.idle_s >= self._limit_s:
            return f"has waited in one call for {self._limit_s:g} s"
        if self._call.seconds >= PATIENCE_WITH_WORK * self._limit_s:
            return f"has computed in one call for {PATIENCE_WITH_WORK * self._limit_s:g} s"
        return None


@dataclass
class _Process:
    """One process that is looked at again and again."""

    process: int
    _standstill: Standstill | None
    _cpu_s: float = 0.0
    _threads: dict[str, ThreadState] = field(default_factory=dict)
    """As the last look has seen them; empty where it did not have to."""

    def stands_still(self, state: ProcessState, beats: int, call: int | None, elapsed_s: float) -> str | None:
        if self._standstill is None:
            return None
        used_s, self._cpu_s = state.cpu_s - self._cpu_s, state.cpu_s
        before, self._threads = self._threads, {}
        busy = used_s > _BUSY * elapsed_s
        if not busy and (self._standstill.silent or call is not None):
            self._threads = look_at_threads(self.process)
            busy = waits_for_machine(before, self._threads)
        wrong = self._standstill.see(beats, call, busy, elapsed_s)
        return f"{wrong} (it is stopped)" if wrong and state.stopped else wrong


class Vitals:
    """Looks at a server and its stages. Use as a context manager."""

    def __init__(
        self,
        server: int,
        host: str,
        http_port: int,
        grpc_port: int,
        hang_timeout_s: float | None,
        stop_timeout_s: float,
    ) -> None:
        """
        Args:
            server: its process id; it is ready.
            host, http_port, grpc_port: where it answers.
            hang_timeout_s: of ``Standstill``; None: nothing that stands still is an end.
            stop_timeout_s: how long a server may take to end after it has closed its ports.
        """

        def watched(process: int) -> _Process:
            return _Process(process, None if hang_timeout_s is None else Standstill(hang_timeout_s))

        self._probe = _Probe(nearest_of(host), http_port, grpc_port)
        self._streams = None if hang_timeout_s is None else StreamProbe(nearest_of(host), grpc_port, hang_timeout_s)
        self._server = watched(server)
        self._stages = [(name, pulse, watched(process)) for process, (name, pulse) in read_pulses(server).items()]
        self._stop_timeout_s = math.inf if hang_timeout_s is None else stop_timeout_s
        self._closed_s = 0.0
        self._looked = time.monotonic()

    def __enter__(self) -> Vitals:
        self._probe.start()
        if self._streams is not None:
            self._streams.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._probe.end()
        if self._streams is not None:
            self._streams.end()

    def look(self) -> End | None:
        """Look at the server and its stages; return why it must be started again, or None.

        A server that has ended is not reported: its parent, who calls this, knows how it ended.
        """
        now = time.monotonic()
        elapsed_s, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        server = look_at(self._server.process)
        # A stage may wait for a server that is stopped, with Python's lock held: its silence then says nothing.
        stages_s = 0.0 if server is not None and server.stopped else elapsed_s
        ends = (_look_at_stage(*stage, stages_s) for stage in self._stages if not stage[1].closed)
        end = next(filter(None, ends), None)
        state = look_at(self._server.process)
        if state is None or state.ended:  # a stage that has died too did so for that
            return None
        wrong = self._server.stands_still(state, self._probe.answers, None, elapsed_s)
        if self._streams is not None:
            wrong = self._streams.look(elapsed_s) or wrong
        self._closed_s = 0.0 if self._probe.listens else self._closed_s + elapsed_s
        if wrong is None and self._closed_s >= self._stop_timeout_s:
            # Triton (2.51) crashes at times when its exit timeout is over, and may wait for ever where it prints its
            # stack.
            wrong = f"has closed its ports and has not ended within {self._stop_timeout_s:g} s"
        return end or (End("server_hung", f"the server {wrong}") if wrong else None)


def _look_at_stage(name: str, pulse: Pulse, process: _Process, elapsed_s: float) -> End | None:
    state = look_at(process.process)
    if state is None or state.ended:
        if pulse.closed:  # it has ended in order since it was asked for
            return None
        status = state.exit_status if state else 0
        code = -(status & 0x7F) or status >> 8
        how = f"ended {in_words(code)}" if status else "died"
        return End("stage_died", f"the stage {name} {how}", killed=code == -signal.SIGKILL)
    wrong = process.stands_still(state, pulse.beats, pulse.call, elapsed_s)
    return End("stage_hung", f"the stage {name} {wrong}") if wrong else None


class _Probe:
    """Asks the server whether it lives, in a thread.

    A server that refuses the connection counts as alive: it ends, which it has its own time for.

    An answer by one of its protocols will do: a few large bodies of JSON keep all HTTP threads of Triton busy for
    minutes, while the server serves what it has and what comes over gRPC.
    """

    def __init__(self, host: str, http_port: int, grpc_port: int) -> None:
        self._url = f"http://{host}:{http_port}/v2/health/live"
        self._grpc = host.strip("[]"), grpc_port
        self.answers = 0
        self.listens = True
        """Whether it took HTTP connections when it was last asked."""
        self._ending = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def end(self) -> None:
        """Have the thread end, when the question is answered that it may have asked."""
        self._ending.set()

    def _run(self) -> None:
        while not self._ending.wait(_PROBE_S):
            reason: object = None
            try:
                read_directly(self._url, _PROBE_TIMEOUT_S)
            except URLError as error:
                reason = error.reason
            except (OSError, HTTPException) as error:
                reason = error
            self.listens = not isinstance(reason, ConnectionRefusedError)
            self.answers += not isinstance(reason, TimeoutError) or _greets(self._grpc)


def _greets(address: tuple[str, int]) -> bool:
    """Return whether a gRPC server answers a greeting: the kernel alone takes connections, but says nothing."""
    try:
        with socket.create_connection(address, _PROBE_TIMEOUT_S) as connection:
            connection.sendall(_GREETING)
            return connection.recv(1) != b""
    except OSError:
        return False
