"""``inflight load``: its commands; what is none of them is a scenario to run."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from inflight.load.compare.command import compare
from inflight.load.list_command import scenarios
from inflight.load.run_command import run
from inflight.load.sweep.command import sweep


class _RunsScenarios(TyperGroup):
    """``inflight load SCENARIO`` is ``inflight load run SCENARIO``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put ``run`` before a first word that names no command."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["run", *args])


load = typer.Typer(
    cls=_RunsScenarios,
    help="Load tests from scenarios: `inflight load SCENARIO` runs one.",
    no_args_is_help=True,
)
load.command("list")(scenarios)
load.command()(run)
load.command()(sweep)
load.command()(compare)
