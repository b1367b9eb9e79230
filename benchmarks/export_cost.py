"""Measures what exporting metrics costs a server: CPU time on both sides, not a difference of two throughputs.

The stages count the CPU time of their exporters, and the calls that these make. What a call costs the server's own
process follows from two idle servers side by side, one that exports and one that does not.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException

import psutil

from inflight.addresses import read_directly
from inflight.errors import EngineFailure
from inflight.metrics import EXPORT
from inflight.serve.server import TritonServer

SETTLE_S = 1.2
"""An idle server shows all that it has counted within this time."""
_SCRAPES = 20


@dataclass(frozen=True)
class CpuUse:
    """A server's CPU time and calls, so far or in between two moments."""

    at_s: float
    """``time.monotonic()``; in between: how long."""
    total_s: float
    """The CPU time of all its processes."""
    server_s: float
    """The CPU time of the server's own process."""
    exporting_s: float = 0.0
    """The CPU time of the stages' exporters, as they count it."""
    calls: float = 0.0
    """The exporters' calls to the server."""

    def since(self, before: CpuUse) -> CpuUse:
        """Return what has been used since then."""
        return CpuUse(
            self.at_s - before.at_s,
            self.total_s - before.total_s,
            self.server_s - before.server_s,
            self.exporting_s - before.exporting_s,
            self.calls - before.calls,
        )


@dataclass(frozen=True)
class CallCost:
    """What exporting costs the server's own process, in seconds of CPU time."""

    per_call: float
    per_scrape: float


@dataclass(frozen=True)
class ExportCost:
    """What exporting has cost under load, stages and server together."""

    ms_per_second: float
    """CPU time per second of load."""
    percent: float
    """The same as a share of the CPU time of all the server's processes."""


def cpu_use(server: TritonServer, exports: bool) -> CpuUse:
    """Return a server's CPU time so far.

    Args:
        server: a running one.
        exports: whether it has metrics.

    Raises:
        EngineFailure: its metrics cannot be read.
    """
    cpu, calls = _exported(server) if exports else (0.0, 0.0)
    own = process_cpu_seconds(server.process.pid)
    stages = psutil.Process(server.process.pid).children(recursive=True)
    return CpuUse(time.monotonic(), own + sum(process_cpu_seconds(stage.pid) for stage in stages), own, cpu, calls)


def process_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its threads, those that have ended included.

    To the nanosecond, by clock_getcpuclockid(3): /proc counts in ticks of 10 ms, more than an idle server uses.

    Raises:
        EngineFailure: there is no such process.
    """
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise EngineFailure(f"the CPU time of process {pid} cannot be read: {os.strerror(error)}")
    return time.clock_gettime(clock.value)


def call_cost(shown: TritonServer, hidden: TritonServer, seconds: float) -> CallCost:
    """Return what a call costs, from two idle servers that are watched at the same time.

    All that the first one's own process uses more goes to the account of its calls: Triton's metrics of its own too.

    Args:
        shown: it exports its metrics.
        hidden: it has none.
        seconds: how long they are watched.

    Raises:
        EngineFailure: nothing was exported meanwhile.
    """
    begins = cpu_use(shown, True), cpu_use(hidden, False)
    time.sleep(seconds)
    hidden_end, own_end = cpu_use(hidden, False), process_cpu_seconds(shown.process.pid)  # before the page is read
    idle = cpu_use(shown, True).since(begins[0])
    if idle.calls <= 0:
        raise EngineFailure(f"no metrics were exported in {seconds:g} s")
    extra = own_end - begins[0].server_s - hidden_end.since(begins[1]).server_s
    return CallCost(max(0.0, extra) / idle.calls, _scrape_cost(shown))


def export_cost(uses: Sequence[CpuUse], call: CallCost) -> ExportCost:
    """Return what exporting has cost in some times of load, without scrapes of the page.

    What is exported in the rest at the end of each is charged to its load: too much rather than too little.

    Args:
        uses: from ``settled``.
        call: of this kind of server.
    """
    seconds = sum(use.exporting_s + use.calls * call.per_call for use in uses)
    return ExportCost(
        1000 * seconds / sum(use.at_s - SETTLE_S for use in uses), 100 * seconds / sum(use.total_s for use in uses)
    )


def settled(server: TritonServer, exports: bool, work: Callable[[], object]) -> CpuUse:
    """Return what a server uses from the beginning of some work until it is idle again and shows all that it did."""
    before = cpu_use(server, exports)
    work()
    time.sleep(SETTLE_S)
    return cpu_use(server, exports).since(before)


def _scrape_cost(server: TritonServer) -> float:
    before = process_cpu_seconds(server.process.pid)
    for _ in range(_SCRAPES):
        _page(server)
    return (process_cpu_seconds(server.process.pid) - before) / _SCRAPES


def _exported(server: TritonServer) -> tuple[float, float]:
    """Return the seconds and the calls of all stages' exporters."""
    lines = _page(server).splitlines()
    seconds, calls = (
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{family.name}{{"))
        for family in EXPORT
    )
    return seconds, calls


def _page(server: TritonServer) -> str:
    url = f"http://{server.settings.host}:{server.settings.metrics_port}/metrics"
    try:
        return read_directly(url, timeout_s=10).decode()
    except (OSError, HTTPException) as error:
        raise EngineFailure(f"the metrics at {url} cannot be read: {error}") from None
