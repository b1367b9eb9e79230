"""``inflight load``: its commands, ``list`` among them; a first word that names none of them is a scenario to run."""

from __future__ import annotations

from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from inflight.load.compare.command import compare
from inflight.load.run_command import run
from inflight.load.scenario import load_scenario
from inflight.load.sweep.command import sweep
from inflight.report.failures import one_line_errors
from inflight.resources import SCENARIOS


class _RunsScenarios(TyperGroup):
    """``inflight load SCENARIO`` is ``inflight load run SCENARIO``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put ``run`` before a first word that names no command."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


def scenarios() -> None:
    """List the scenarios that come with Inflight, each with what it is for."""
    with one_line_errors(Console(stderr=True, highlight=False)):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1))
        table.add_column("scenario", no_wrap=True)
        table.add_column("loop", no_wrap=True)
        table.add_column("length", justify="right", no_wrap=True)
        table.add_column("what it sends")
        for file in sorted(SCENARIOS.glob("*.toml")):
            one = load_scenario(file)
            loop = "trace" if one.trace else "open" if one.open else "closed"
            length = f"{sum(phase.duration_s for phase in one.phases):g} s" if one.phases else ""  # a trace has its own
            table.add_row(one.name, loop, length, one.description)
        Console(highlight=False).print(table)
        print(f"`inflight load NAME` runs one; a file like those in {SCENARIOS} runs as well.")


load = typer.Typer(
    cls=_RunsScenarios, help="Load tests from scenarios: `inflight load SCENARIO` runs one.", no_args_is_help=True
)
load.command("list")(scenarios)
load.command()(run)
load.command()(sweep)
load.command()(compare)
