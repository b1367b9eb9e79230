"""`inflight load run`: what it refuses, how it ends, what it leaves, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from tests.support.fake_server import Break, FakeServer, Faults

SCENARIO = """
[[phases]]
duration_s = {seconds}
concurrency = 2
[[classes]]
name = "one"
prompt_tokens = {{ distribution = "fixed", value = 9 }}
output_tokens = {{ distribution = "fixed", value = 5 }}
"""


RAMP = """
[[phases]]
duration_s = 600
concurrency = 2
steady = false
"""


def _interrupted(tmp_path: Path, scenario: str, number: signal.Signals) -> tuple[int, str, str]:
    """Run a test until it has some answers, send it a signal, and return exit code, output and errors."""
    (tmp_path / "long.toml").write_text(scenario)
    with FakeServer(faults=Faults(delay=0.05)) as fake:
        python = ["env", "--default-signal=INT", sys.executable]  # a shell starts background jobs with it ignored
        command = [*python, "-c", "from inflight.cli import app; app()", "load", "run"]
        options = [str(tmp_path / "long.toml"), "--url", f"127.0.0.1:{fake.grpc_port}", "--output", str(tmp_path / "o")]
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        deadline = time.monotonic() + 60
        while len(fake.requests) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        (tmp_path / "long.toml").write_text("# changed while it ran")
        process.send_signal(number)
        printed, said = process.communicate(timeout=60)
    return process.returncode, printed, said


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    scenario = SCENARIO.format(seconds=600)
    code, printed, said = _interrupted(tmp_path, scenario, number)
    assert code == 0, said
    assert "Traceback" not in said
    assert "in the window from 0.0" in printed
    assert (tmp_path / "o/scenario.toml").read_text() == scenario, "as it was read"
    summary = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert summary["command"] == f"inflight load run {tmp_path / 'long.toml'}"
    assert (summary["interrupted"], summary["steady"], summary["deployment"]) == (True, True, "demo")
    assert summary["server"].startswith("127.0.0.1:")
    assert summary["scenario"]["drain_s"] == 60, "what is not said is spelled out"
    assert 0 < summary["load_ended_s"] < 60
    assert summary["figures"]["outcomes"]["completed"] > 0
    assert "was interrupted" in (tmp_path / "o" / "report.html").read_text()


@pytest.mark.proof
def test_an_end_in_the_ramp_up_is_told(tmp_path: Path) -> None:
    code, printed, said = _interrupted(tmp_path, RAMP + SCENARIO.format(seconds=600), signal.SIGINT)
    assert code == 0, said
    assert "in the ramp-up, which is not the measured window, from 0.0" in printed
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["steady"] is False
    page = (tmp_path / "o" / "report.html").read_text()
    assert "ended in the ramp-up" in page
    assert "In the measured window" not in page


def _run_command(tmp_path: Path, *options: str, faults: Faults | None = None, slo: str = "") -> Any:
    """Run half a second of load."""
    (tmp_path / "s.toml").write_text(slo + SCENARIO.format(seconds=0.5))
    with FakeServer(faults=faults or Faults()) as fake:
        given = ["load", "run", str(tmp_path / "s.toml"), "--url", f"127.0.0.1:{fake.grpc_port}"]
        done = CliRunner().invoke(app, [*given, "--output", str(tmp_path / "o"), *options])
        done.asked = len(fake.requests)  # type: ignore[attr-defined]
    assert isinstance(done.exception, SystemExit | None)
    return done


def test_a_directory_that_cannot_be_is_told_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", Path("/proc/inflight")):
        done = _run_command(tmp_path, "--output", str(output))
        assert (done.exit_code, done.asked) == (1, 0)
        assert done.stderr.startswith(f"inflight: {output}: cannot be written: ")
        assert done.stderr.count("\n") == 1


def test_figures_are_told_where_they_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "o/summary.json").mkdir(parents=True)
    done = _run_command(tmp_path)
    assert done.exit_code == 1
    assert "completed in the window" in done.stdout
    assert done.stderr.splitlines()[-1] == f"inflight: {tmp_path / 'o'}: cannot be written: Is a directory"


def test_a_test_of_which_nothing_completed_fails(tmp_path: Path) -> None:
    done = _run_command(tmp_path, faults=Faults(error="INTERNAL: broken"))
    assert done.exit_code == 1
    assert "inflight: no request completed: " in done.stderr
    assert (tmp_path / "o/report.html").is_file()


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_streams_go_on_where_that_is_asked_for(tmp_path: Path, options: tuple[str, ...]) -> None:
    _run_command(tmp_path, *options, faults=Faults(breaks=[Break(1)]))
    summary = json.loads((tmp_path / "o/summary.json").read_text())
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "o/requests.jsonl").read_text().splitlines()]
    assert outcomes.count("failed") == (0 if options else 1)
    assert ("--resume" in summary["command"]) == bool(options)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("slo", "share", "code", "said"),
    [
        ("slo = { ttft_ms = 10000 }", "1", 0, ""),
        ("slo = { ttft_ms = 0.001 }", "0.5", 1, "inflight: 0.00% of the requests kept the limits; --fail-below-slo is"),
        ("", "0.5", 1, "inflight: --fail-below-slo needs limits; s has no `slo`"),
    ],
)
def test_a_share_that_limits_need(tmp_path: Path, slo: str, share: str, code: int, said: str) -> None:
    done = _run_command(tmp_path, "--fail-below-slo", share, slo=slo)
    assert done.exit_code == code, done.stderr
    assert said in done.stderr


def test_without_a_server_it_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO.format(seconds=1).replace("9 }", "nine }"))
    done = CliRunner().invoke(app, ["load", "run", str(tmp_path / "s.toml")])
    assert done.exit_code == 1
    assert done.stderr.startswith("inflight: ")
    assert "not valid TOML" in done.stderr
    done = CliRunner().invoke(app, ["load", "run", "smoke", "--url", "x:1", "--serve", "."])
    assert (done.exit_code, done.stderr) == (1, "inflight: give --serve or --url, not both\n")
    done = CliRunner().invoke(app, ["load", "run", "smoke", "--deployment", "x", "--serve", "."])
    assert (done.exit_code, done.stderr) == (1, "inflight: give --serve or --deployment, not both\n")
    done = CliRunner().invoke(app, ["load", "run", "smoke", "--duration-scale", "inf"])
    assert done.exit_code == 1
    assert "multiplied by inf" in done.stderr
