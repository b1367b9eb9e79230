"""A plugin for pytest, run in a suite's own environment: a line of JSON for each test, in the file ``TELL_TO``."""

from __future__ import annotations

import json
import os
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """Tell how a test ended: once, and by its set-up where that failed or skipped it."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        text = str(report.longrepr or "")
        told = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
        reason = told[0] if told else text.splitlines()[-1] if text else ""
        row = {"test": report.nodeid, "outcome": report.outcome, "reason": reason[:300]}
        with open(os.environ["TELL_TO"], "a") as file:
            file.write(json.dumps(row) + "\n")
