"""``inflight dashboards``: the dashboards as pictures, from a running Prometheus."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inflight.monitoring.prometheus import Prometheus
from inflight.report.failures import one_line_errors

_console = Console(stderr=True, highlight=False)


def dashboards(
    prometheus: Annotated[str, typer.Option(help="URL of a Prometheus that scrapes the server.")] = (
        "http://127.0.0.1:9090"
    ),
    output: Annotated[Path, typer.Option(help="Folder that gets one SVG per dashboard.")] = Path(
        "artifacts/dashboards"
    ),
    minutes: Annotated[float, typer.Option(min=0.1, help="How much time to show.")] = 15,
    until: Annotated[datetime | None, typer.Option(help="End of that time, in UTC; now by default.")] = None,
) -> None:
    """Draw the dashboards from a running Prometheus, without Grafana."""
    with one_line_errors(_console):
        from inflight.monitoring.render import render

    end = time.time() if until is None else until.replace(tzinfo=UTC).timestamp()
    with one_line_errors(_console), _console.status("asking Prometheus") as status:
        for path in render(Prometheus(prometheus), output, end - 60 * minutes, end):
            _console.print(f"wrote {path}", soft_wrap=True, markup=False)
            status.update("drawing")
