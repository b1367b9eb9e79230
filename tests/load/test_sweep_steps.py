"""What a step of a sweep is made of: its load, its length, its limits; and what is refused."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.load import overhead
from inflight.load.scenario import Scenario, ScenarioError, Slo, parse_slo
from inflight.load.sweep.run import StepLength, step_scenario
from tests.support.fake_server import FakeServer

CLASS = {
    "name": "x",
    "prompt_tokens": {"distribution": "fixed", "value": 8},
    "output_tokens": {"distribution": "fixed", "value": 8},
    "slo": {"ttft_ms": 9},
}
SCENARIO = """
[[phases]]
duration_s = 1
rate = 1
[[classes]]
name = "x"
prompt_tokens = { distribution = "fixed", value = 8 }
output_tokens = { distribution = "fixed", value = 8 }
"""
BASE = Scenario.model_validate(
    {"phases": [{"duration_s": 1, "rate": 1, "arrivals": "gamma", "burstiness": 0.5}], "classes": [CLASS]}
)


def test_a_step_has_the_scenarios_arrivals_at_its_own_rate() -> None:
    warm_up, steady = step_scenario(BASE, True, 50, StepLength(10, 1.0)).phases
    assert (warm_up.duration_s, warm_up.steady) == (2.5, False)
    assert (steady.duration_s, steady.rate, steady.arrivals, steady.burstiness) == (10, 50, "gamma", 0.5)


def test_a_step_can_be_of_the_other_kind() -> None:
    scenario = step_scenario(BASE, False, 7.0, StepLength(10, 1.0))
    assert [phase.concurrency for phase in scenario.phases] == [7, 7]
    assert not scenario.open


def test_limits_given_are_those_of_all_classes() -> None:
    assert step_scenario(BASE, True, 1, StepLength(10, 1.0)).slo_of("x") == Slo(ttft_ms=9)
    limited = BASE.with_limits(Slo(itl_ms=5))
    assert step_scenario(limited, True, 1, StepLength(10, 1.0)).slo_of("x") == Slo(itl_ms=5)


@pytest.mark.parametrize(
    ("load", "slowest_s", "window_s", "warm_up_s"),
    [
        (50, 1.0, 10, 2.5),
        (5, 1.0, 20, 5.0),  # 100 requests
        (1, 1.0, 30, 7.5),  # no more than three times as long
        (50, 6.0, 24, 9.0),  # four times as long as a request; one and a half before
    ],
)
def test_the_length_of_a_step(load: float, slowest_s: float, window_s: float, warm_up_s: float) -> None:
    length = StepLength(10, slowest_s)
    assert length.window_s(load, True) == window_s
    assert length.warm_up_s(window_s) == warm_up_s


def test_limits_are_read() -> None:
    assert parse_slo("ttft=200, itl=30,e2e=5e3") == Slo(ttft_ms=200, itl_ms=30, e2e_ms=5000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tttf=200", "--slo: unknown limit 'tttf'"),
        ("ttft", "--slo: `ttft` is ''"),
        ("ttft=-1", "--slo: `ttft` is '-1'"),
        ("ttft=nan", "--slo: `ttft` is 'nan'"),
        ("itl=1,itl=2", "--slo: `itl` is given twice"),
    ],
)
def test_wrong_limits_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        parse_slo(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--share", "0.9"], "--share needs limits"),
        (["--from", "5", "--to", "2"], "--to 2 is below --from 5"),
        (["--kind", "concurrency", "--from", "1.5"], "--from 1.5: a concurrency is a whole number"),
        (["--serve", ".", "--url", "x:1"], "give --serve or --url, not both"),
        (["--to", "inf"], "--to is inf: a finite number is expected"),
        (["--from", "inf"], "--from is inf: a finite number is expected"),
        (["--step-seconds", "inf"], "--step-seconds is inf: a finite number is expected"),
        (["--output", "s.toml"], "s.toml: cannot be written: File exists"),
        (["--url", "127.0.0.1:9"], "no server answers at 127.0.0.1:9 (connection refused)"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = _sweep(SCENARIO, *options)
    assert code == 1
    assert f"inflight: {said}" in output


def test_conversations_are_swept_in_a_closed_loop_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    talking = SCENARIO + "turns = { count = { distribution = 'fixed', value = 4 } }\n"
    code, output = _sweep(talking, "--url", "127.0.0.1:9")
    assert code == 1
    assert output.startswith("inflight: s: conversations (class 'x') cannot be swept with --kind rate")
    _, output = _sweep(talking, "--kind", "concurrency", "--output", "s.toml")
    assert "s.toml: cannot be written" in output, "the next thing that is wrong"


def _sweep(scenario: str, *options: str) -> tuple[int, str]:
    """Sweep ``scenario`` from the working directory; return exit code and output, wherever the terminal breaks it."""
    Path("s.toml").write_text(scenario)
    done = CliRunner().invoke(app, ["load", "sweep", "s.toml", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("dies", [False, True], ids=["fails", "dies"])
def test_a_server_that_breaks_down_ends_the_sweep_and_has_no_knee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Of a server whose requests all fail nothing is answered: that is not what a knee is."""
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        fake = stack.enter_context(FakeServer())

        def break_down(line: str) -> None:
            if line.startswith("20 sessions/s"):
                stack.close() if dies else setattr(fake.faults, "error", "INTERNAL: out of order")

        monkeypatch.setattr("inflight.load.sweep.command._tell", break_down)
        for limit in ("LAG_LIMIT_MS", "CPU_LIMIT", "SEND_DELAY_LIMIT_MS"):  # a busy machine's client ends no sweep
            monkeypatch.setattr(overhead, limit, float("inf"))
        monkeypatch.setattr("inflight.load.sweep.step.SHORTFALL_LIMIT", 1.0)
        options = ["--from", "10", "--to", "40", "--step-seconds", "1", "--repeats", "1", "--output", "out"]
        code, output = _sweep(SCENARIO, "--url", f"127.0.0.1:{fake.grpc_port}", *options)
    record = json.loads(Path("out/sweep.json").read_text())
    assert code == 1
    assert {step["load"] for step in record["steps"]} == {10}
    assert record["findings"]["knee"] is None
    assert "The sweep did not come to its end: " in output
    assert ("no server answers at" if dies else "requests failed; the first with internal: out of order") in record[
        "stopped"
    ]
