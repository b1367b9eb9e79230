"""The benchmarks of a server, kept short: the servers start, the figures hang together, the file is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench

SECONDS = "0.1"


def _bench(tmp_path: Path, command: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Run a measurement; return the rows of its result file, and what it printed."""
    file = tmp_path / "results" / "rows.json"
    done = CliRunner().invoke(bench, [command, "--seconds", SECONDS, *options, "--output", str(file)])
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text())
    assert record["command"] == f'make bench ARGS="{command} --seconds {SECONDS}"'
    assert record["commit"]
    assert record["machine"]
    return record["rows"], done.stdout


@pytest.mark.proof
def test_bench_pipeline(tmp_path: Path) -> None:
    rows, printed = _bench(tmp_path, "pipeline", "--streams", "1", "--streams", "4", "--step-ms", "2")
    assert [(row["streams"], row["step_ms"]) for row in rows] == [(1, 2.0), (4, 2.0)]
    for row in rows:
        assert 0 < row["tokens_per_second"] <= row["streams"] * 1050 / row["step_ms"], "faster than the engine's steps"
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_max"]
        assert row["gap_ms_p50"] <= row["gap_ms_p99"] <= row["gap_ms_max"] + 0.1
        assert row["tokens_per_chunk"] >= 1
        assert row["server_cpu_us_per_token"] > 0
        assert f"{row['tokens_per_second']:,}" in printed


@pytest.mark.proof
def test_bench_serving_cost(tmp_path: Path) -> None:
    rows, printed = _bench(tmp_path, "serving-cost", "--streams", "2", "--step-ms", "5")
    assert [(row["transport"], row["streams"]) for row in rows] == [("http", 2), ("grpc", 2)]
    for row in rows:
        assert 0 < row["tokens_per_second"] <= row["streams"] * 1050 / 5, "faster than the engine's steps"
        assert row["tokens_per_chunk"] >= 1
        parts = [row[f"{process}_us"] for process in ("triton", "tokenizer", "engine_stage", "detokenizer")]
        assert row["serving_us"] == pytest.approx(sum(parts), abs=0.3)
        whole = row["serving_us"] + row["compute_us"]
        assert row["serving_share"] == pytest.approx(row["serving_us"] / whole, abs=0.001)
        assert f"{row['tokens_per_second']:,}" in printed


@pytest.mark.release
def test_bench_tokenizer(tmp_path: Path) -> None:
    [row], printed = _bench(tmp_path, "tokenizer", "--words", "20")
    assert row["prompt_words"] == 20
    assert row["ours_per_second"] > 0
    assert row["upstream_per_second"] > 0
    assert 0 < row["ratio"] < 100
    assert f"{row['ours_per_second']:,}" in printed


def test_bench_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    for command in ("pipeline", "tokenizer"):
        done = CliRunner().invoke(bench, [command, "--seconds", SECONDS, "--model", str(tmp_path)])
        assert done.exit_code == 1
        assert not done.stdout
        said = " ".join(line for line in done.stderr.splitlines() if " streams, " not in line)
        assert said.startswith("inflight: ")
        assert "is not a checkpoint directory" in " ".join(said.split())
