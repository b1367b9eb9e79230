"""Every committed scenario runs, cut short, against the demo deployment; and one leaves the files that it should."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.load.measurements import measure
from inflight.load.report import report_page
from inflight.load.result import read_records, read_summary
from inflight.load.run_command import Target, run_scenario, target_at
from inflight.load.scenario import SCENARIOS, Scenario, load_scenario
from inflight.load.workload import Turn, Workload
from inflight.resources import DEMO
from tests.load.support.scenarios import demo_writer

SECONDS = 0.6


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with target_at(None, DEMO, DEMO, http=False) as target:
        yield target


def _seed(scenario: Scenario) -> int:
    """Return the first seed with which so short a load has a request that is not cancelled: rates are low."""
    workloads = (Workload(scenario, demo_writer(), seed) for seed in range(50))
    return next(made.seed for made in workloads if not scenario.open or any(map(_stays, _turns(made))))


def _turns(workload: Workload) -> list[Turn]:
    return [workload.session(number).turns[0] for number in range(len(workload.arrivals))]


def _stays(turn: Turn) -> bool:
    return turn.cancel_after_tokens is None and turn.cancel_after_s is None


@pytest.mark.proof
@pytest.mark.sweep(most=5)
@pytest.mark.parametrize("name", sorted(path.stem for path in SCENARIOS.glob("*.toml")))
def test_a_scenario_runs(target: Target, name: str) -> None:
    scenario = load_scenario(Path(name))
    scenario = scenario.scaled(SECONDS / Workload(scenario, demo_writer()).duration_s)
    result = run_scenario(scenario, target, _seed(scenario), f"inflight load run {name}")
    assert {one.outcome for one in result.records} <= {"completed", "cancelled"}
    assert any(one.outcome == "completed" for one in result.records)
    for one in result.records:
        assert one.queue_s is not None or one.outcome == "cancelled"
        if one.outcome == "completed":
            # an ending without text, such as an end id that was ignored, has tokens too
            assert 0 < sum(arrival.tokens for arrival in one.arrivals) <= one.output_tokens
            assert sum(one.itl_s) == pytest.approx(one.arrivals[-1].time_s - one.arrivals[0].time_s)
    assert f"Load test: {name}" in report_page(result)


@pytest.mark.proof
def test_the_result_directory(target: Target, tmp_path: Path) -> None:
    output = tmp_path / "result"
    url = target.url
    options = ["--url", url, "--output", str(output), "--duration-scale", "0.15", "--seed", "5"]
    done = CliRunner().invoke(app, ["load", "run", "smoke", *options])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("smoke: ")
    assert sorted(path.name for path in output.iterdir()) == [
        "report.html",
        "requests.jsonl",
        "scenario.toml",
        "summary.json",
    ]
    assert (output / "scenario.toml").read_bytes() == (SCENARIOS / "smoke.toml").read_bytes()
    summary, records = read_summary(output), read_records(output)
    assert summary["command"] == "inflight load run smoke --seed 5 --duration-scale 0.15"
    assert summary["seed"] == 5
    assert summary["commit"]
    assert summary["machine"]
    assert summary["scenario"]["classes"][0]["name"] == "short"
    assert (summary["server"], summary["deployment"], summary["files"]) == (url, "demo", {})
    assert summary["client"]["cpu_share"] > 0
    made = Workload(load_scenario(Path("smoke")), demo_writer(), 5)
    for one in records:
        turn = made.session(one.session).turns[0]
        assert one.output_tokens == turn.max_tokens, "ignore_eos: as long as drawn"
        assert one.input_tokens == demo_writer().count(turn.text), "the server counts as the writer does"
    figures = measure(records, tuple(summary["figures"]["window_s"]), {})
    assert figures.requests == summary["figures"]["requests"]
    assert figures.output_tokens_per_second == pytest.approx(summary["figures"]["output_tokens_per_second"], rel=1e-3)
    assert json.loads(json.dumps(summary)) == summary
    again = CliRunner().invoke(app, ["load", "run", "smoke", "--url", "127.0.0.1:9", "--output", str(output)])
    assert again.exit_code == 1
    assert "no server answers at 127.0.0.1:9 " in again.stderr


@pytest.mark.proof
def test_sigterm_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from inflight.cli import app; app()", "load", "run", "fixed"]
    process = subprocess.Popen([*command, "--serve", str(DEMO), "--output", str(tmp_path / "o")])
    try:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM, "before the load began"
        assert children
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        process.kill()
