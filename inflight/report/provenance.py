"""The provenance of results: with which commit they were measured, on which machine, and when."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from inflight.resources import CHECKOUT, VERSION


def provenance() -> dict[str, str | int]:
    """Return commit, machine and date."""
    return {
        "commit": _commit(),
        "machine": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def source_line(command: str) -> str:
    """Return where a page's numbers come from: the command, the commit, the machine and the date."""
    made = provenance()
    return f"{command}; commit {made['commit']}, {made['machine']}, {made['date']}"


@functools.cache
def _commit() -> str:
    """Return the checkout's commit; the version, where Inflight was installed from a wheel.

    It is asked once: results that a process writes into the checkout do not change what was measured.
    """
    if CHECKOUT is None:
        return VERSION
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
