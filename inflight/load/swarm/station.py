"""One process with users: which sessions are theirs, the process that sends them, and locust's events about them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

from inflight.errors import InflightError
from inflight.load.measurements import RequestRecord
from inflight.load.swarm.lane import GRPC, HTTP, Settings
from inflight.load.swarm.link import Link
from inflight.load.workload import Workload

if TYPE_CHECKING:
    from locust.env import Environment

TITLES = {GRPC: "gRPC", HTTP: "HTTP"}
"""What the transports are called in locust's tables."""
_IDLE_S = 0.2
_PAUSE_AFTER_ERROR_S = 0.1
"""Of a user: against a server that refuses everything it would send nothing but refused requests."""
_AHEAD_S = 0.25
"""How long before its time a session of an open loop is handed over; the process that sends waits for the rest."""


class RequestFailed(Exception):
    """What locust lists under failures: the status and kind of a server's error, without what differs by request."""


class Station:
    """The users' side of one test."""

    def __init__(self, environment: Environment, settings: Settings) -> None:
        """Start the process that sends.

        Raises:
            InflightError: the workload cannot be made, or the process not be started.
        """
        self.workload: Workload = settings.workload()
        self._environment = environment
        self._link = Link(settings, self._take)
        self._numbers: Iterator[int] = iter(())
        self._kinds: tuple[str, ...] = (GRPC,)
        self._over = Event()
        self._began: float | None = None
        self._cpu_before = 0.0
        self._records: list[tuple[str, dict[str, Any]]] = []
        self._samples: list[list[float]] = []
        self._state: dict[str, Any] = {"tokens": 0, "running": 0, "cpu_s": 0.0}

    def begin(self, first: int, step: int, kinds: tuple[str, ...]) -> None:
        """Begin the test.

        Args:
            first: number of the first session that is this process's own.
            step: from one of its own to the next: the number of processes. So no two send the same.
            kinds: transports, of which an open loop takes one after the other.
        """
        last = len(self.workload.arrivals) if self.workload.scenario.open else None
        self._numbers = iter(range(first, last, step)) if last is not None else itertools.count(first, step)
        self._kinds = kinds
        self._cpu_before = time.process_time()
        self._began = time.perf_counter()
        self._link.begin()

    def clock(self) -> float:
        """Return the seconds since the begin of the load; 0 before it."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def drive(self, kind: str) -> None:
        """Do what a user does: one session of a closed loop, to its end, or hand over the next of an open one."""
        if self._began is None or self._over.is_set() or self.clock() >= self.workload.duration_s:
            gevent.sleep(_IDLE_S)
        elif self.workload.scenario.open:
            self._dispatch()
        else:
            self._converse(next(self._numbers), kind)

    def _converse(self, number: int, kind: str) -> None:
        answered = self._link.start(number, kind)
        try:
            if not answered.get():
                gevent.sleep(_PAUSE_AFTER_ERROR_S)
        except gevent.GreenletExit:  # the user is taken away
            self._link.cancel(number, kind)
            raise

    def _dispatch(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._over.wait()
            return
        at = self.workload.arrivals[number]
        if not self._over.wait(timeout=max(0.0, at - _AHEAD_S - self.clock())):
            self._link.start(number, self._kinds[number % len(self._kinds)], at)

    def finish(self, drain_s: float) -> None:
        """End the test; what runs may run on for so many seconds. Afterwards nothing is sent, and all is told."""
        self._over.set()
        self._link.end(drain_s)

    def close(self) -> None:
        """Stop the process that sends."""
        self._link.close()

    def batch(self) -> dict[str, Any]:
        """Return, as a JSON object, what has been seen since the last call, and the state."""
        records, self._records = self._records, []
        samples, self._samples = self._samples, []
        own = time.process_time() - self._cpu_before
        return {
            "records": records,
            "samples": samples,
            "locust_cpu_s": own,
            "lost": self._link.lost,
            **self._state,
            "seconds": self.clock(),
        }

    def _take(self, message: dict[str, Any]) -> None:
        if "state" in message:
            self._state = message["state"]
            self._samples += self._state.pop("samples")
            return
        self._records.append((message["kind"], message["record"]))
        self._fire(TITLES[message["kind"]], RequestRecord.from_json(message["record"]))

    def _fire(self, title: str, one: RequestRecord) -> None:
        """Tell locust of a request: latencies of a completed one; any other by how it ended."""
        if one.outcome == "completed":
            self._event(title, "E2E", one.e2e_s)
            for name, samples in _latencies(one).items():
                for sample in samples:
                    self._event(title, name, sample)
        elif one.outcome in ("refused", "failed"):
            self._event(title, "E2E", one.e2e_s, RequestFailed(kind_of_error(one.error)))
        else:
            self._event(title, one.outcome, one.e2e_s)

    def _event(self, title: str, name: str, seconds: float, error: Exception | None = None) -> None:
        self._environment.events.request.fire(
            request_type=title,
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=error,
            context={},
        )


def _latencies(one: RequestRecord) -> dict[str, list[float]]:
    """Return the samples of each quantity, in seconds, as docs/measurements.md defines them."""
    return {
        "TTFT": [] if one.ttft_s is None else [one.ttft_s],
        "ITL": one.itl_s,
        "chunk gap": one.gaps_s,
        "queue": [] if one.queue_s is None else [one.queue_s],
    }


def kind_of_error(error: str) -> str:
    """Return gRPC's status and the kind of an error as records have it (``kind: message``)."""
    label = error.partition(":")[0]
    return f"{_STATUS_OF.get(label, InflightError.status)} {label}"


_STATUS_OF = {kind.label: kind.status for kind in InflightError.__subclasses__()}
