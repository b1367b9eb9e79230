"""A sweep against real servers whose capacity is known by construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from inflight.cli import app
from inflight.load import overhead
from inflight.resources import DEMO

pytestmark = pytest.mark.proof

PREFILL_MS, STEP_MS, TOKENS = 60, 20, 10
REQUEST_S = (PREFILL_MS + (TOKENS - 1) * STEP_MS) / 1000
SCENARIO = f"""
[[phases]]
duration_s = 1
rate = 1
arrivals = "constant"
[[classes]]
name = "equal"
prompt_tokens = {{ distribution = "fixed", value = 16 }}
output_tokens = {{ distribution = "fixed", value = {TOKENS} }}
"""


@pytest.fixture(autouse=True)
def _shared_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is not judged: that other tests hold it up is no fault of its own, and capacity is a matter of the
    replay's delays and not of the machine's speed."""
    for limit in ("LAG_LIMIT_MS", "CPU_LIMIT", "SEND_DELAY_LIMIT_MS"):
        monkeypatch.setattr(overhead, limit, float("inf"))


def _sweep(tmp_path: Path, places: int, *options: str) -> dict[str, Any]:
    """Sweep a server with so many places; return what sweep.json says."""
    deployment = tmp_path / "deployment"
    deployment.mkdir()
    engine = {"kind": "replay", "replay_prefill_ms": PREFILL_MS, "replay_step_ms": STEP_MS}
    settings = {"model": str(DEMO / "model"), "engine": engine, "batching": {"max_batch_size": places}}
    (deployment / "deployment.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "equal.toml").write_text(SCENARIO)
    given = ["--serve", str(deployment), "--output", str(tmp_path / "out"), "--step-seconds", "2", *options]
    done = CliRunner().invoke(app, ["load", "sweep", str(tmp_path / "equal.toml"), *given])
    assert done.exit_code == 0, done.output
    assert "Knee at" in done.stdout
    assert "<svg" in (tmp_path / "out/report.html").read_text()
    return json.loads((tmp_path / "out/sweep.json").read_text())


def _assert_near(answered: float, capacity: float) -> None:
    """A server never answers more, but for the ends of a short window; a machine that stands still makes that less.

    How closely a sweep finds a knee is a matter of its search, which is tested without a machine.
    """
    assert 0.5 * capacity < answered < 1.25 * capacity


def test_an_open_loops_knee_is_the_servers_capacity(tmp_path: Path) -> None:
    # No load breaks this limit: the usable load is the highest that the server keeps up with, however slow it is.
    options = ("--from", "5", "--to", "40", "--tolerance", "0.5", "--repeats", "1", "--slo", "ttft=60000")
    findings = _sweep(tmp_path, 2, *options)["findings"]
    _assert_near(findings["knee"]["requests_per_second"], 2 / REQUEST_S)
    assert findings["knee"]["load"] <= findings["knee"]["requests_per_second"]
    assert 5 <= findings["usable"]["load"] < findings["usable"]["broken_at"] <= 40
    assert findings["usable"]["attainment"] == 1.0


@pytest.mark.release
def test_a_closed_loops_knee_is_where_all_places_are_taken(tmp_path: Path) -> None:
    record = _sweep(tmp_path, 3, "--kind", "concurrency", "--from", "1", "--to", "12", "--repeats", "1")
    _assert_near(record["findings"]["knee"]["requests_per_second"], 3 / REQUEST_S)
    assert 1 < record["findings"]["knee"]["load"] < 12
