"""A load test by locust, from a scenario: on one machine or many, as locust was started.

Where there are users there is a ``Station``; where results come together there is a ``Gathering``; a locust that is not
distributed has both. The master tells the workers, before locust does, to make ready, to begin and to finish, so that
all their clocks begin together and no record is still under way when the result is written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, Runner, WorkerRunner
from locust.stats import StatsCSVFileWriter

from inflight.errors import InflightError
from inflight.load.result import ResultError, make_directory, write_report, write_result
from inflight.load.rows import headline, verdict
from inflight.load.swarm.cost import find_server
from inflight.load.swarm.gathering import Gathering, SwarmResult
from inflight.load.swarm.lane import Settings
from inflight.load.swarm.options import add_options, command_of, settings_of
from inflight.load.swarm.panel import add_panel
from inflight.load.swarm.station import Station
from inflight.load.swarm.workers import LOCAL, Worker, Workers
from inflight.load.workload import Workload

_COLLECT_S = 1.0
_IDLE_S = 0.1


class Swarm:
    """The side that says when: a locust without workers, or the master."""

    def __init__(self, environment: Environment) -> None:
        """
        Raises:
            InflightError: the scenario or an option cannot be used, or no result be written.
        """
        self._environment = environment
        self._options = environment.parsed_options
        self.settings: Settings = settings_of(self._options)
        self.workload: Workload = self.settings.workload()
        if self._options.result:
            make_directory(Path(self._options.result))
        self.gathering: Gathering | None = None
        self._workers = Workers(environment.runner, self._add) if isinstance(environment.runner, MasterRunner) else None
        self._station: Station | None = None
        self._state = "idle"
        self._load_ended_s = 0.0
        self._said: list[str] = []
        environment.stop_timeout = environment.stop_timeout or self.workload.scenario.drain_s
        environment.events.test_start.add_listener(self._begin)
        environment.events.test_stopping.add_listener(self._stopping)
        environment.events.test_stop.add_listener(self._conclude)
        environment.events.quit.add_listener(self._say)
        if environment.web_ui:
            add_panel(environment.web_ui, lambda: self.gathering)

    @property
    def stations(self) -> int:
        """Processes with users."""
        return self._workers.ready if self._workers else 1

    @property
    def over(self) -> bool:
        """Whether the load has ended; a test that could not begin has, too."""
        return self._state in ("ended", "failed") or (
            self._state == "running" and self.clock() >= self.workload.duration_s
        )

    def clock(self) -> float:
        """Return the seconds since the begin of the load; 0 before it."""
        if self._state != "running":
            return 0.0
        return self._workers.clock() if self._workers else self._station.clock() if self._station else 0.0

    def drive(self, kind: str) -> None:
        """Do what a user does."""
        if self._station is None:
            gevent.sleep(_COLLECT_S)
        else:
            self._station.drive(kind)

    def _begin(self, **_: object) -> None:
        kinds = tuple(sorted({user.kind for user in self._environment.user_classes}))
        pid = self._options.server_pid or find_server(self.settings.grpc_url)
        self._said, self.gathering = [], None
        try:
            if self._workers:
                self._workers.prepare(self.settings)
            else:
                self._station = Station(self._environment, self.settings)
        except InflightError as error:
            self._fail(error)
            return
        self.gathering = Gathering(self.workload, pid, distributed=self._workers is not None)
        self._state = "running"
        if self._workers:
            self._workers.begin(kinds)
        elif self._station:
            self._station.begin(0, 1, kinds)
            gevent.spawn(self._collect, self._station)

    def _fail(self, error: InflightError) -> None:
        self._state = "failed"
        self._environment.process_exit_code = 1
        print(f"inflight: {error}", file=sys.stderr)

    def _collect(self, station: Station) -> None:
        while self._station is station:
            self._add(LOCAL, station.batch())
            gevent.sleep(_COLLECT_S)

    def _add(self, source: str, batch: dict[str, Any]) -> None:
        if self.gathering is not None:
            self.gathering.add(source, batch)

    def finish(self, drain_s: float | None = None) -> None:
        """End the load; return when all records are here.

        Args:
            drain_s: how long requests may run on; None: as long as the scenario says.
        """
        if self._state == "draining":  # somebody else waits already; without a drain, both end at once
            if drain_s == 0:
                self._break_off()
            while self._state == "draining":
                gevent.sleep(_IDLE_S)
        if self._state != "running":
            return
        self._load_ended_s = min(self.clock(), self.workload.duration_s)
        self._state = "draining"
        drain_s = self.workload.scenario.drain_s if drain_s is None else drain_s
        try:
            self._collect_last(drain_s)
        finally:
            self._state = "ended"

    def _collect_last(self, drain_s: float) -> None:
        if self._workers:
            self._workers.finish(drain_s)
        elif self._station:
            station = self._station
            station.finish(drain_s)
            self._add(LOCAL, station.batch())
            self._station = None
            station.close()

    def _break_off(self) -> None:
        if self._workers:
            self._workers.break_off()
        elif self._station:
            self._station.finish(0)

    def _stopping(self, **_: object) -> None:
        self.finish(0)

    def _conclude(self, **_: object) -> None:
        if self._state != "ended" or self.gathering is None:
            return
        self._state = "idle"
        cost = self.gathering.cost(self._workers.lost if self._workers else 0)
        ended_early = self._load_ended_s < self.workload.duration_s
        result = self.gathering.result(cost, self._load_ended_s, ended_early, command_of(self._options))
        self._said = [*_words(result), *self._write(result)]
        if not self._options.headless:
            self._say()

    def _write(self, result: SwarmResult) -> list[str]:
        """Write the result directory, if there is to be one; return what there is to say about it."""
        if not self._options.result:
            return []
        if not result.records:
            return ["no result was written"]
        from inflight.load.report import report_page  # with matplotlib: not before the test, and on no worker

        directory = Path(self._options.result)
        try:
            write_result(directory, result)
            return [str(write_report(directory, report_page(result)))]
        except ResultError as error:
            self._environment.process_exit_code = 1
            return [f"inflight: {error}"]

    def _say(self, **_: object) -> None:
        """Print what was measured: at the end of all of locust's own tables, where somebody looks at a terminal."""
        for line in self._said:
            print(line, file=sys.stderr)
        self._said = []


def _words(result: SwarmResult) -> list[str]:
    if not result.records:
        return ["nothing was measured: no request was sent"]
    return [*headline(result), verdict(result)[1], result.cost.sentence()]


def install() -> None:
    """Make locust run scenarios: what a locustfile calls."""
    StatsCSVFileWriter.close_files = _flush  # type: ignore[method-assign]
    events.init_command_line_parser.add_listener(add_options)
    events.init.add_listener(_attach)


def _flush(writer: StatsCSVFileWriter) -> None:
    """Write out the CSV files and leave them open: locust itself closes them while a greenlet still writes to them."""
    writer.requests_flush()
    writer.stats_history_flush()
    writer.failures_flush()
    writer.exceptions_flush()


def _attach(environment: Environment, runner: Runner, **_: object) -> None:
    try:
        environment.inflight = Worker(environment) if isinstance(runner, WorkerRunner) else Swarm(environment)
    except InflightError as error:
        print(f"inflight: {error}", file=sys.stderr)
        sys.exit(1)
