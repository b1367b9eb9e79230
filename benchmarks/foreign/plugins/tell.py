"""A plugin for pytest, run in a suite's own environment: a line of JSON for each test, in the file ``TELL_TO``."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Tell how a test ended: once, and by its set-up where that failed or skipped it."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        _tell(report)


def pytest_collectreport(report: Any) -> None:
    """Tell of a file that could not be imported, as of one test."""
    if report.outcome == "failed":
        _tell(report)


def _tell(report: Any) -> None:
    row = {"test": report.nodeid, "outcome": report.outcome, "says": _why(report.longrepr)}
    with open(os.environ["TELL_TO"], "a") as file:
        file.write(json.dumps(row) + "\n")


def _why(told: Any) -> str:
    """Return why a test failed, or was skipped; of a failure the lines that pytest marks with an E."""
    if told is None:
        return ""
    if isinstance(told, tuple):  # of a skipped test: file, line, reason
        return str(told[2]).removeprefix("Skipped: ")[:600]
    text = str(told)
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    return (" / ".join(lines) if lines else text[-600:])[:600]
