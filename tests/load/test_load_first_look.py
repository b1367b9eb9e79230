"""What a user is told before a load test: which scenarios there are, which limits, and how long a sweep takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.load.scenario import Slo, load_scenario
from inflight.load.sweep.command import closing_steps, estimate
from inflight.load.sweep.search import SweepPlan
from inflight.resources import SCENARIOS


def test_list_names_every_scenario_and_says_what_it_sends() -> None:
    done = CliRunner().invoke(app, ["load", "list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for file in SCENARIOS.glob("*.toml"):
        description = load_scenario(file).description
        assert description, f"{file} has no description"
        assert re.search(rf"^ *{re.escape(file.stem)} .*{re.escape(description)} *$", done.stdout, re.MULTILINE)


def test_limits_of_the_command_take_the_place_of_the_scenarios() -> None:
    scenario = load_scenario(Path("mixed-classes"))
    limited = scenario.with_limits(Slo(itl_ms=5))
    assert scenario.slo_of(scenario.classes[0].name) != Slo(itl_ms=5)
    assert {limited.slo_of(one.name) for one in scenario.classes} == {Slo(itl_ms=5)}


def test_run_takes_limits() -> None:
    done = CliRunner().invoke(app, ["load", "smoke", "--slo", "tfft=1"])
    assert done.exit_code == 1
    assert "--slo: unknown limit 'tfft' (did you mean 'ttft'?)" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (SweepPlan(True, 1, 4096, 2, 0.05, None), 4),  # 2 ** (1 / 2 ** 4) is 1.044
        (SweepPlan(True, 1, 4096, 2, 0.05, 0.95), 8),
        (SweepPlan(True, 1, 4096, 2, 1.0, 0.95), 0),
        (SweepPlan(True, 1, 1.1, 2, 0.05, None), 1),
    ],
)
def test_a_gap_is_halved_until_it_is_within_tolerance(plan: SweepPlan, steps: int) -> None:
    assert closing_steps(plan) == steps


def test_the_estimate_of_a_sweep() -> None:
    said = estimate(SweepPlan(False, 1, 16, 2, 0.05, None), 20)
    assert said.startswith("up to 5 steps from 1 to 16, as far as the server keeps up, and about 4 to close in: ")
    assert ": 4 min at the most," in said  # 9 steps of 20 s, with a quarter of that before each
    # At 1 session per second a window of 20 s is stretched to the most, a minute, to see enough of them.
    assert ": 75 s at the most," in estimate(SweepPlan(True, 1, 1, 2, 0.05, None), 20)
