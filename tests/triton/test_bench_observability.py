"""The benchmark `observability`, kept short: each row is one server, and the ratios are to the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench


@pytest.mark.release
def test_bench_observability_rows_are_three_servers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = "--engine replay --step-ms 1 --streams 4 --rounds 2 --seconds 0.5"
    done = CliRunner().invoke(bench, ["observability", *chosen.split(), "--output", str(file)])
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text())
    assert record["command"] == f'make bench ARGS="observability {chosen}"'
    assert {(row["engine"], row["step_ms"]) for row in record["rows"]} == {("replay", 1)}
    rows = {row["shown"]: row for row in record["rows"]}
    assert list(rows) == ["off", "metrics", "metrics and traces"]
    assert (rows["off"]["ratio"], rows["off"]["cpu_ratio"]) == (1.0, 1.0)
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert all(rows["off"][name] == 0 for name in rows["off"] if name.startswith(("export_", "scrape_")))
    for shown in ("metrics", "metrics and traces"):
        assert 0 < rows[shown]["export_cpu_ms_per_second"] < 1000
        assert 0 < rows[shown]["export_cpu_percent"] < 100
        assert rows[shown]["scrape_cpu_ms"] > 0
    assert done.stderr.count("tokens/s") == 6


def test_bench_observability_refuses_step_ms_of_a_real_engine() -> None:
    done = CliRunner().invoke(bench, ["observability", "--engine", "pytorch", "--step-ms", "5"])
    assert done.exit_code == 2
    assert "only the replay engine's steps" in done.stderr
