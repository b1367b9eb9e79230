"""``make dashboards``: writes the rules for Prometheus and the dashboards for Grafana beside this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monitoring.generate.boards.all import dashboard_files
from monitoring.generate.objectives import Objectives
from monitoring.generate.rule import RUNBOOKS_PATH, Timescale
from monitoring.generate.rules import RUNBOOKS, write_rules

_MONITORING = Path(__file__).parents[1]


def main(
    runbooks: Annotated[str, typer.Option(help="URL of the folder of runbooks; by default that of Grafana.")] = "",
    folder: Annotated[Path, typer.Option(help="Where rules/ and dashboards/ are written.")] = _MONITORING,
) -> None:
    """Write the recording and alert rules, and the dashboards."""
    write_rules(folder / "rules", Objectives(), Timescale(), runbooks or RUNBOOKS)
    dashboards = folder / "dashboards"
    dashboards.mkdir(parents=True, exist_ok=True)
    for name, text in dashboard_files(runbooks or RUNBOOKS_PATH).items():
        (dashboards / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
