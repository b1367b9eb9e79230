"""Result files: what was measured, with which commit, on which machine, and when."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inflight.resources import CHECKOUT, VERSION

Row = Mapping[str, float | str]


def write_results(path: Path, command: str, rows: Sequence[Row]) -> None:
    """Write ``rows`` as JSON, with all that is needed to read and repeat them."""
    record = {"command": command, **provenance(), "rows": [dict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def provenance() -> dict[str, str | int]:
    """Return commit, machine and date."""
    return {
        "commit": _commit(),
        "machine": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Show rows with equal keys as a table."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    for name in rows[0]:
        table.add_column("\n".join(name.split("_")), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int | float) else value for value in row.values()))
    # Wide enough for every column, also where the output is a file or a pipe.
    needed = Console(width=1_000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)


def _commit() -> str:
    """Return the checkout's commit; the version, where Inflight was installed from a wheel."""
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
