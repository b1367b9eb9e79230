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

pytestmark = pytest.mark.alone

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


@pytest.mark.slow
def test_an_open_loops_knee_is_the_servers_capacity(tmp_path: Path) -> None:
    options = ("--from", "6", "--to", "12", "--tolerance", "0.2", "--repeats", "1", "--slo", "ttft=150")
    record = _sweep(tmp_path, 2, *options)
    capacity = 2 / REQUEST_S
    assert record["findings"]["knee"]["requests_per_second"] == pytest.approx(capacity, rel=0.1)
    assert record["findings"]["knee"]["load"] == pytest.approx(capacity, rel=0.1)
    assert record["findings"]["usable"]["load"] == pytest.approx(capacity, rel=0.25)


@pytest.mark.slow
def test_a_closed_loops_knee_is_where_all_places_are_taken(tmp_path: Path) -> None:
    record = _sweep(tmp_path, 3, "--kind", "concurrency", "--from", "2", "--to", "6", "--repeats", "1")
    # An answer and the next request take time to travel, in which a place may be empty: a fourth session fills it.
    assert record["findings"]["knee"]["load"] in (3, 4)
    assert record["findings"]["knee"]["requests_per_second"] == pytest.approx(3 / REQUEST_S, rel=0.1)
