"""What a run of locust leaves beside locust's own statistics: its CPU share, and the requests one by one.

All users of a process share one core. Where they use most of it, a response waits for its greenlet, and the times are
locust's rather than the server's: so each run says how much of a core each process used.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

CPU_LIMIT = 0.8
"""Of one core: above it, responses begin to wait for their greenlets."""
_KEY = "inflight_cpu"
"""Of the reports that workers send to the master."""


@dataclass(frozen=True)
class CpuTime:
    """What one process of locust used from the start of a test to its end."""

    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def share(self) -> float:
        """Cores that it used; one is all that greenlets can have."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def __sub__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)

    @classmethod
    def now(cls) -> CpuTime:
        """Return the CPU time of this process, all threads of it, and the time."""
        return cls(time.process_time(), time.perf_counter())


class Report:
    """The listeners of one process."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._began: CpuTime | None = None
        self._ended: CpuTime | None = None
        self._workers: dict[str, CpuTime] = {}
        self._records: TextIO | None = None
        local = environment.events
        local.test_start.add_listener(self._start)
        local.test_stop.add_listener(self._stop)
        local.report_to_master.add_listener(self._tell)
        local.worker_report.add_listener(self._hear)
        local.request.add_listener(self._write_record)
        if not isinstance(environment.runner, WorkerRunner):
            local.quit.add_listener(self._conclude)

    def _start(self, **_: object) -> None:
        self._began, self._ended, self._workers = CpuTime.now(), None, {}
        directory = self._environment.parsed_options.records
        if directory and not isinstance(self._environment.runner, MasterRunner):
            Path(directory).mkdir(parents=True, exist_ok=True)
            path = Path(directory) / f"requests-{self._environment.runner.worker_index}.jsonl"
            self._records = path.open("w", encoding="utf-8", buffering=1)  # whole lines, also of one that is killed

    def _stop(self, **_: object) -> None:
        self._ended = CpuTime.now()
        if self._records is not None:
            self._records.close()
            self._records = None

    def _used(self) -> CpuTime:
        return (self._ended or CpuTime.now()) - self._began if self._began else CpuTime()

    def _tell(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        used = self._used()
        data[_KEY] = [used.cpu_s, used.wall_s]

    def _hear(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        self._workers[client_id] = CpuTime(*data[_KEY])

    def _write_record(self, context: dict[str, Any], **_: object) -> None:
        if self._records is not None and "record" in context:
            self._records.write(json.dumps(context["record"].as_json()) + "\n")

    def _processes(self) -> dict[str, CpuTime]:
        """Return what each process used: the only one, or the workers and the master."""
        runner = self._environment.runner
        if not isinstance(runner, MasterRunner):
            return {"locust": self._used()}
        workers = sorted((runner.get_worker_index(client), used) for client, used in self._workers.items())
        return {f"worker {index}": used for index, used in workers} | {"master": self._used()}

    def _conclude(self, **_: object) -> None:
        """Print the CPU share of each process, and write it beside the statistics of --csv."""
        processes = self._processes()
        for name, used in processes.items():
            said = f"{name}: {used.cpu_s:.1f} s of CPU in {used.wall_s:.1f} s, {used.share:.0%} of one core"
            print(said, file=sys.stderr)
            if used.share > CPU_LIMIT:
                advice = "its times are locust's own; use more workers or fewer users"
                print(f"WARNING: {name} used more than {CPU_LIMIT:.0%} of one core: {advice}", file=sys.stderr)
        prefix = self._environment.parsed_options.csv_prefix
        if prefix:
            with Path(f"{prefix}_cpu.csv").open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(["Process", "CPU s", "Wall s", "Share of one core"])
                for name, used in processes.items():
                    rows.writerow([name, round(used.cpu_s, 3), round(used.wall_s, 3), round(used.share, 4)])


def install() -> None:
    """Make every process of locust report."""
    events.init.add_listener(lambda environment, **_: Report(environment))
