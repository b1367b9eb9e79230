"""The plugin of pytest that tells the runner of each test, in a line of JSON, when it begins and when it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import pytest

KINDS = ("alone", "programs", "published", "waits", "proof", "test")
"""A test's kind is the first of its marks that stands here: ``test`` has none of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tell", type=Path, metavar="FILE", help="tell of each test in a line of this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tell is not None:
        config.pluginmanager.register(_Teller(config.option.tell.open("w", buffering=1)))


def kind_of(item: pytest.Item) -> str:
    """Return what of ``KINDS`` a test is."""
    waits = any(mark.kwargs.get("waits") for mark in item.iter_markers("proof"))
    marks = {mark.name for mark in item.iter_markers()} | ({"waits"} if waits else set())
    return next((kind for kind in KINDS if kind in marks), "test")


class _Teller:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._kinds: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self._kinds[item.nodeid] = kind_of(item)
        self._tell(begins=item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # of pytest-rerunfailures
            self._tell(repeats=test, cause=_first_line(report))
            self._outcomes.pop(test, None)
            return  # pytest-rerunfailures tells nothing more of this try
        if report.failed or (report.skipped and test not in self._outcomes):
            self._outcomes[test] = report.outcome
        if report.when == "teardown":
            outcome = self._outcomes.pop(test, "passed")
            self._tell(ends=test, kind=self._kinds[test], outcome=outcome, seconds=round(self._seconds.pop(test), 3))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(ends=report.nodeid, kind="test", outcome="failed", seconds=0.0)

    def _tell(self, **said: object) -> None:
        self._file.write(json.dumps(said) + "\n")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).splitlines()
    return lines[0] if lines else ""
