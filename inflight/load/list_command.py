"""``inflight load list``: which scenarios there are."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from inflight.load.scenario import Scenario, load_scenario
from inflight.report.failures import one_line_errors
from inflight.resources import SCENARIOS


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
            table.add_row(one.name, _loop(one), _length(one), one.description)
        Console(highlight=False).print(table)
        print(f"`inflight load NAME` runs one; a file like those in {SCENARIOS} runs as well.")


def _loop(scenario: Scenario) -> str:
    return "trace" if scenario.trace else "open" if scenario.open else "closed"


def _length(scenario: Scenario) -> str:
    """Return how long its load lasts; a trace says so itself."""
    return f"{sum(phase.duration_s for phase in scenario.phases):g} s" if scenario.phases else ""
