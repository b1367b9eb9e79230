"""The result of a load test as files: figures, every request, the scenario; and reading them again.

summary.json     figures, window, client's own share, provenance, the scenario in full, its files' hashes
requests.jsonl   one record per request
scenario.toml    as it was read
report.html      for people (``report``)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from inflight.errors import InflightError
from inflight.load.arrivals import starts
from inflight.load.measurements import Figures, RequestRecord, measure, send_delay_ms
from inflight.load.overhead import ClientHealth
from inflight.load.runner import Runner
from inflight.load.scenario import Scenario, Slo
from inflight.load.workload import Workload
from inflight.report.results import provenance

SUMMARY, REQUESTS, SCENARIO, REPORT = "summary.json", "requests.jsonl", "scenario.toml", "report.html"
EXCLUDED = (
    "Latencies and lengths are those of completed requests that started in the window; cancelled, refused, failed and "
    "unfinished ones are counted and have no part in them."
)


class ResultError(InflightError):
    """A result directory that cannot be written or read; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """One load test that has been run."""

    scenario: Scenario
    seed: int
    transport: str
    command: str
    records: list[RequestRecord]
    window: tuple[float, float]
    """The steady one: ramp-up and drain are not in it. Of a test that ended before it, the whole time."""
    load_ended_s: float
    interrupted: bool
    client: ClientHealth
    server: str = ""
    """Its address; empty: not known."""
    deployment: str = ""
    """Name of its directory; empty: not known."""
    fault: str = ""
    """What ended the test before its time, in a line; empty: nothing did."""

    @property
    def steady(self) -> bool:
        """Whether the window is the steady one, or a part of it: not where the test ended in the ramp-up."""
        trace = self.scenario.trace
        return self.load_ended_s > (self.scenario.steady[0] if trace is None else trace.ramp_up_s)

    @property
    def slo_of(self) -> dict[str, Slo]:
        """Limits by class name."""
        names = {one.class_name for one in self.records} | {one.name for one in self.scenario.classes}
        return {name: self.scenario.slo_of(name) for name in sorted(names)}

    def figures(self) -> Figures:
        """Return the figures of the window."""
        return self._figures

    @cached_property
    def _figures(self) -> Figures:
        return measure(self.records, self.window, self.slo_of)

    def by_class(self) -> dict[str, Figures]:
        """Return the window's figures of each class."""
        return self._by_class

    @cached_property
    def _by_class(self) -> dict[str, Figures]:
        return {
            name: measure([one for one in self.records if one.class_name == name], self.window, {name: slo})
            for name, slo in self.slo_of.items()
        }

    def by_phase(self) -> list[tuple[str, Figures]]:
        """Return the figures of each phase that was begun, steady or not, in order."""
        return self._by_phase

    @cached_property
    def _by_phase(self) -> list[tuple[str, Figures]]:
        phases = self.scenario.phases
        named = []
        for number, (phase, begin) in enumerate(zip(phases, starts(phases), strict=False), 1):
            end = min(begin + phase.duration_s, self.load_ended_s)
            if begin < end:
                named.append((phase.name or f"phase {number}", measure(self.records, (begin, end), self.slo_of)))
        return named

    def summary(self) -> dict[str, Any]:
        """Return all but the single requests, as a JSON object."""
        return {
            "command": self.command,
            **provenance(),
            "server": self.server,
            "deployment": self.deployment,
            "transport": self.transport,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "fault": self.fault,
            "steady": self.steady,
            "load_ended_s": self.load_ended_s,
            "figures": asdict(self.figures()),
            "classes": {name: asdict(figures) for name, figures in self.by_class().items()},
            "phases": [{"name": name, **asdict(figures)} for name, figures in self.by_phase()],
            "client": asdict(self.client),
            "note": EXCLUDED,
            "scenario": self.scenario.model_dump(mode="json"),
            "files": self.scenario.files,
        }


def result_of(
    runner: Runner, workload: Workload, transport: str, command: str, server: str, deployment: str
) -> LoadResult:
    """Return the result of a test that has been run."""
    window = _window(workload.steady, runner.load_ended_s)
    delay = send_delay_ms(runner.records, window)
    return LoadResult(
        scenario=workload.scenario,
        seed=workload.seed,
        transport=transport,
        command=command,
        records=sorted(runner.records, key=lambda one: (one.start_s, one.session, one.turn)),
        window=window,
        load_ended_s=runner.load_ended_s,
        interrupted=runner.interrupted,
        client=runner.watch.health(window, delay),
        server=server,
        deployment=deployment,
        fault=runner.fault,
    )


def _window(steady: tuple[float, float], ended_s: float) -> tuple[float, float]:
    """Return what there is of the steady window; of a test that ended before it, the whole time."""
    begin = steady[0] if steady[0] < ended_s else 0.0
    return begin, min(steady[1], ended_s)


def make_directory(directory: Path) -> None:
    """Make a result directory, before the test of which the result would be lost without one.

    Raises:
        ResultError: nothing can be written there.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()


def write_result(directory: Path, result: LoadResult) -> None:
    """Write a result's figures and requests, and the scenario as it was read, into ``directory``.

    Raises:
        ResultError: it cannot be written.
    """
    summary = json.dumps(_rounded(result.summary()), indent=1)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SUMMARY).write_text(summary + "\n", encoding="utf-8")
        with (directory / REQUESTS).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(one.as_json()) + "\n" for one in result.records)
        (directory / SCENARIO).write_bytes(result.scenario.source)


def write_report(directory: Path, page: str) -> Path:
    """Write a result's page into ``directory``; return its path.

    Raises:
        ResultError: it cannot be written.
    """
    with writing(directory):
        (directory / REPORT).write_text(page, encoding="utf-8")
    return directory / REPORT


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn what cannot be written into a ResultError that names the directory."""
    try:
        yield
    except OSError as error:
        raise ResultError(f"{directory}: cannot be written: {error.strerror}") from None


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the summary of a result directory.

    Raises:
        ResultError: it cannot be read.
    """
    path = directory / SUMMARY
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None


def read_records(directory: Path) -> list[RequestRecord]:
    """Return the requests of a result directory.

    Raises:
        ResultError: they cannot be read.
    """
    path = directory / REQUESTS
    try:
        lines: Iterable[str] = path.read_text(encoding="utf-8").split("\n")
        return [RequestRecord.from_json(json.loads(line)) for line in lines if line]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None


def _rounded(value: Any) -> Any:
    """Return a JSON value with its floats to four decimals: a tenth of a microsecond, of milliseconds."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value
