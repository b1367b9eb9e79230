"""Master and workers of a distributed locust: make ready, begin and finish together, and bring records together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.runners import MasterRunner

from inflight.errors import InflightError
from inflight.load.swarm.lane import Settings
from inflight.load.swarm.station import Station

LOCAL = "local"
"""Name of the only process with users, where there are no workers."""
_DATA = "inflight"
_PREPARE, _BEGIN, _FINISH = "inflight_prepare", "inflight_begin", "inflight_finish"
_READY = "inflight_ready"
_PREPARE_S = 90.0
_LATE_S = 10.0


class WorkersNotReady(InflightError):
    """A worker that cannot take part."""


class Workers:
    """The master's view of its workers, for one test after the other."""

    def __init__(self, runner: MasterRunner, add: Callable[[str, dict[str, Any]], None]) -> None:
        """
        Args:
            runner: locust's.
            add: called with a worker's id and each of its batches.
        """
        self._runner = runner
        self._add = add
        self._members: list[str] = []
        self._answers: dict[str, str] = {}
        self._answered = Event()
        self._began: float | None = None
        self.lost = 0
        """Workers that did not say at the end that all their records are here."""
        runner.register_message(_READY, self._take_answer)
        runner.environment.events.worker_report.add_listener(self._take_report)

    @property
    def ready(self) -> int:
        """Workers of this test; before it, those that are there."""
        return len(self._members) or self._runner.worker_count

    def clock(self) -> float:
        """Return the seconds since the begin of the load; 0 before it."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def prepare(self, settings: Settings) -> None:
        """Have all workers make ready.

        Raises:
            WorkersNotReady: one is not; the message says why.
        """
        clients = self._runner.clients
        self._began = None
        self._members = sorted(
            (one.id for one in [*clients.ready, *clients.spawning, *clients.running]),
            key=self._runner.get_worker_index,
        )
        self._ask(_PREPARE, {name: settings.as_json() for name in self._members}, _PREPARE_S)
        for name in self._members:
            error = self._answers.get(name, f"not ready after {_PREPARE_S:g} s")
            if error:
                raise WorkersNotReady(f"worker {self._runner.get_worker_index(name)}: {error}")

    def begin(self, kinds: tuple[str, ...]) -> None:
        """Have all begin, each with its own share of the sessions."""
        self._began = time.perf_counter()
        for place, name in enumerate(self._members):
            share = {"first": place, "step": len(self._members), "kinds": list(kinds)}
            self._runner.send_message(_BEGIN, share, name)

    def finish(self, drain_s: float) -> None:
        """Have all finish; return when all their records are here."""
        self._ask(_FINISH, {name: {"drain_s": drain_s} for name in self._members}, drain_s + _LATE_S)
        self.lost = len(set(self._members) - set(self._answers))

    def break_off(self) -> None:
        """Have all that are about to finish do it at once."""
        for name in self._members:
            self._runner.send_message(_FINISH, {"drain_s": 0}, name)

    def _ask(self, message: str, data: dict[str, dict[str, Any]], timeout: float) -> None:
        """Send each worker its data; return when all have answered, or after so many seconds."""
        self._answers = {}
        for name, one in data.items():
            self._runner.send_message(message, one, name)
        deadline = time.monotonic() + timeout
        while set(self._there()) - set(self._answers) and time.monotonic() < deadline:
            self._answered.clear()
            self._answered.wait(timeout=1)

    def _there(self) -> list[str]:
        """Return the members that locust has not given up."""
        return [name for name in self._members if name in self._runner.clients and not self._gone(name)]

    def _gone(self, name: str) -> bool:
        return self._runner.clients[name].state == "missing"

    def _take_answer(self, environment: Environment, msg: Any, **_: object) -> None:
        self._answers[msg.node_id] = msg.data["error"]
        self._answered.set()

    def _take_report(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        batch = data.get(_DATA)
        if client_id in self._members and batch:
            finished = batch.pop("finished")
            self._add(client_id, batch)
            if finished:
                self._answers[client_id] = ""
                self._answered.set()


class Worker:
    """A worker's side: does what the master says."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._runner = environment.runner
        self._station: Station | None = None
        self._finished = False
        for message, listener in ((_PREPARE, self._prepare), (_BEGIN, self._begin), (_FINISH, self._finish)):
            self._runner.register_message(message, listener, concurrent=True)
        environment.events.report_to_master.add_listener(self._report)
        environment.events.quitting.add_listener(self._quit)

    def drive(self, kind: str) -> None:
        """Do what a user does; one that came after the begin has no share, and waits."""
        if self._station is None:
            gevent.sleep(1)
        else:
            self._station.drive(kind)

    def _prepare(self, environment: Environment, msg: Any, **_: object) -> None:
        self._quit()
        try:
            self._station = Station(self._environment, Settings(**msg.data))
        except InflightError as error:
            self._runner.send_message(_READY, {"error": str(error)})
        else:
            self._runner.send_message(_READY, {"error": ""})

    def _begin(self, environment: Environment, msg: Any, **_: object) -> None:
        if self._station is not None:
            self._station.begin(msg.data["first"], msg.data["step"], tuple(msg.data["kinds"]))

    def _finish(self, environment: Environment, msg: Any, **_: object) -> None:
        if self._station is not None:
            self._station.finish(msg.data["drain_s"])
            self._finished = True

    def _report(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        """Add to a report of locust's. The last one has its last figures and our last records, so neither is lost."""
        if self._station is not None:
            data[_DATA] = self._station.batch() | {"finished": self._finished}
            if self._finished:
                self._quit()

    def _quit(self, **_: object) -> None:
        if self._station is not None:
            self._station.close()
            self._station = None
            self._finished = False
