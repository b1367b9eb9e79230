"""The result of a load test as files: figures, every request, the scenario. They are written and read here.

summary.json     figures, window, client's own share, provenance, the scenario in full, its files' hashes
requests.jsonl   one record per request
scenario.toml    as it was read
report.html      for people (``report``)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from inflight.errors import InflightError
from inflight.load.arrivals import starts
from inflight.load.measurements import Figures, RequestRecord, measure
from inflight.load.overhead import ClientHealth
from inflight.load.scenario import Scenario, Slo
from inflight.report.provenance import provenance
from inflight.report.units import with_floats

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
    steady: bool = True
    """Whether the window is the steady one, or a part of it: not where the test ended in the ramp-up."""
    load_ended_s: float
    interrupted: bool
    client: ClientHealth
    server: str = ""
    """The server's address; empty: not known."""
    deployment: str = ""
    """Name of the deployment's directory; empty: not known."""
    fault: str = ""
    """What ended the test before its time, in a line; empty: nothing did."""

    @property
    def slo_of(self) -> dict[str, Slo]:
        """Limits by class name."""
        names = {one.class_name for one in self.records} | {one.name for one in self.scenario.classes}
        return {name: self.scenario.slo_of(name) for name in sorted(names)}

    @cached_property
    def figures(self) -> Figures:
        """The figures of the window."""
        return measure(self.records, self.window, self.slo_of)

    @cached_property
    def by_class(self) -> dict[str, Figures]:
        """The window's figures of each class."""
        return {
            name: measure([one for one in self.records if one.class_name == name], self.window, {name: slo})
            for name, slo in self.slo_of.items()
        }

    @cached_property
    def by_phase(self) -> list[tuple[str, Figures]]:
        """The figures of each phase that was begun, steady or not, in order."""
        phases = self.scenario.phases
        named = []
        for number, (phase, begin) in enumerate(zip(phases, starts(phases), strict=False), 1):
            end = min(begin + phase.duration_s, self.load_ended_s)
            if begin < end:
                named.append((phase.name or f"phase {number}", measure(self.records, (begin, end), self.slo_of)))
        return named

    def summary(self) -> dict[str, Any]:
        """Return all but the single requests, as a JSON object."""
        own = ("server", "deployment", "transport", "seed", "interrupted", "fault", "steady", "load_ended_s")
        return {
            "command": self.command,
            **provenance(),
            **{name: getattr(self, name) for name in own},
            "figures": asdict(self.figures),
            "classes": {name: asdict(figures) for name, figures in self.by_class.items()},
            "phases": [{"name": name, **asdict(figures)} for name, figures in self.by_phase],
            "client": asdict(self.client),
            "note": EXCLUDED,
            "scenario": self.scenario.model_dump(mode="json"),
            "files": self.scenario.files,
        }


def make_directory(directory: Path | None, name: str) -> Path:
    """Make a result directory, before the test of which the result would be lost without one; return its path.

    Where the user has named none it is in artifacts/load, called by ``name`` and the time.

    Raises:
        ResultError: nothing can be written there.
    """
    directory = directory or Path("artifacts/load") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    with _writing(directory):
        tempfile.TemporaryFile(dir=directory).close()
    return directory


def write_result(directory: Path, result: LoadResult) -> None:
    """Write a result's figures and requests, and the scenario as it was read, into ``directory``, as ``write`` does.

    The summary goes first and comes last: a directory that has one is whole.
    """
    with _writing(directory):
        (directory / SUMMARY).unlink(missing_ok=True)
    write(directory / REQUESTS, "".join(json.dumps(one.as_json()) + "\n" for one in result.records))
    write(directory / SCENARIO, result.scenario.source)
    # Of milliseconds, the fourth decimal is a tenth of a microsecond.
    summary = with_floats(result.summary(), lambda number: round(number, 4))
    write(directory / SUMMARY, json.dumps(summary, indent=1) + "\n")


def write(path: Path, content: str | bytes) -> Path:
    """Write a file of a result directory; return its path. Raises ResultError: it cannot be written."""
    with _writing(path.parent):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ResultError(f"{directory}: cannot be written: {error.strerror}") from None


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the summary of a result directory. Raises ResultError: it cannot be read."""
    with _reading(directory / SUMMARY) as text:
        return dict(json.loads(text))


def read_records(directory: Path) -> list[RequestRecord]:
    """Return the requests of a result directory. Raises ResultError: they cannot be read."""
    with _reading(directory / REQUESTS) as text:
        return [RequestRecord.from_json(json.loads(line)) for line in text.split("\n") if line]


@contextmanager
def _reading(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from None
