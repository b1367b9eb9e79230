"""The scheduler's bench: the load is what it says, and the command writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import scheduler
from benchmarks.__main__ import bench


def test_the_load_stays_as_it_is_said_to_be() -> None:
    bench = scheduler._Bench(16, 40, "client")
    ended = bench._added
    for _ in range(100):
        assert bench.step() > 0
        assert 14 <= len(bench._scheduler.running) <= 16
        assert 38 <= bench._scheduler.num_waiting <= 42
    assert bench._added - ended > 100, "nobody has come after the first"
    bench._cache.check()


def test_the_command_writes_a_row_for_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.measure_scheduler, "__defaults__", (((2, 0), (4, 8)),))
    result = CliRunner().invoke(bench, ["scheduler", "--steps", "10", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "scheduler.json").read_text())["rows"]
    assert [(row["running"], row["waiting"], row["fairness"]) for row in rows] == [
        (2, 0, "none"),
        (2, 0, "client"),
        (4, 8, "none"),
        (4, 8, "client"),
    ]
    assert all(0 < row["median_ms"] <= row["99_%_ms"] for row in rows)
    assert "scheduler.svg" in (tmp_path / "README.md").read_text()
