"""A CUDA error stays: whatever a process launches after one fails too. So the process that had one ends.

With pytest-xdist another worker takes its place and goes on with the tests that are left: one fault costs one test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

_STICKY = re.compile(
    "CUDA error|CUDA driver error|illegal memory access|device-side assert|misaligned address"
    "|unspecified launch failure|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
)
_STATUS = 70


@pytest.hookimpl(wrapper=True)  # it is called where the test ran, and nowhere else
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what the process cannot go on after."""
    report = yield
    if report.failed and _STICKY.search(report.longreprtext):
        _Process.spoiled = True
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """End a worker that had a CUDA error, once its report is on the way; without workers, end the run."""
    if not _Process.spoiled:
        return
    if os.environ.get("PYTEST_XDIST_WORKER"):
        os._exit(_STATUS)  # nothing that would wait for the device
    pytest.exit("a CUDA error spoils the process; with -n (pytest-xdist) others would go on", returncode=1)


class _Process:
    spoiled = False
