"""A plugin for pytest, run in a suite's own environment: a line of JSON for each test, in the file ``TELL_TO``."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any

import pytest

_MOST = 600
"""Characters of a text that are told."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Keep the whole text of a failure, of which pytest's shortest report has the first line."""
    report = yield
    report.told = call.excinfo.exconly() if report.failed and call.excinfo else report.longrepr
    return report


def pytest_runtest_logreport(report: Any) -> None:
    """Tell how a test ended: once, and by its set-up where that failed or skipped it."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        _tell(report, report.told)


def pytest_collectreport(report: Any) -> None:
    """Tell of a file that could not be imported, as of one test."""
    if report.outcome == "failed":
        _tell(report, report.longrepr)


def _tell(report: Any, told: Any) -> None:
    row = {"test": report.nodeid, "outcome": report.outcome, "says": _why(told)}
    with open(os.environ["TELL_TO"], "a") as file:
        file.write(json.dumps(row) + "\n")


def _why(told: Any) -> str:
    """Return why a test failed, or was skipped, on one line."""
    if told is None:
        return ""
    text = str(told[2]).removeprefix("Skipped: ") if isinstance(told, tuple) else str(told)  # skipped: file, line, why
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[:_MOST]
