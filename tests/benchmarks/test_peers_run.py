"""A run of the peers' measurements: what it measures, repeats and records, and the tables of its record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import measure
from benchmarks.peers.contenders import Place
from benchmarks.peers.jobs import WorkerFailure
from benchmarks.peers.measure import Run, figure_names, figures_of, measured_of
from benchmarks.peers.record import Record
from benchmarks.peers.report import results
from benchmarks.peers.serving import STREAMS, served
from benchmarks.peers.variants import GRID, OURS, PLAIN, WORKERS, Selection, Variant
from benchmarks.peers.workers.work import Cell, Others
from inflight.errors import InflightError

CELLS = [Cell(1, 128, 8), Cell(8, 128, 8)]


def worker_result(speed: float) -> dict[str, Any]:
    """Return what a worker answers, with the same speed everywhere."""
    one = {f"{phase}_{unit}": speed for phase in measure.PHASES for unit in ("tokens_per_s", "cpu_ms_per_token")}
    return {"cells": [one for _ in CELLS], "versions": {"engine": "1"}, "others": 0.01}


class _Notes:
    """Notes its jobs, of which all are measured alike."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []

    def do(self, job: dict[str, Any], _: float) -> dict[str, Any]:
        self.jobs.append(job)
        return worker_result(90)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run whose measurements are made up: ours 90, theirs by their place in the grid; one peer fails."""

    def once(_run: Run, part: str, one: Variant, seed: int) -> dict[str, Any]:
        if one.name == "float32" and one.contender == "vllm":
            raise WorkerFailure("vllm ended with code 1")
        return measured_of(CELLS, worker_result(90 if one.contender == OURS else 30 + GRID.index(one) + seed))

    monkeypatch.setattr(Run, "_once", once)
    record = Record.open(tmp_path / "record.json", "125M", CELLS, 2)
    return Run(Place(tmp_path), record, tmp_path, CELLS, Selection(), 3, lambda _: None)


def test_a_run_goes_on_where_the_last_one_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.measure("engine", 2)
    written = run.record.path.read_text()
    monkeypatch.setattr(Run, "_once", lambda *_: pytest.fail("what is recorded is not measured again"))
    again = replace(run, record=Record.open(run.record.path, "125M", CELLS, 2))
    again.measure("engine", 2)
    assert run.record.path.read_text() == written
    assert again.record.rounds("engine", 2)[0].keys() >= {"inflight: bfloat16"}


def test_a_disturbed_measurement_is_repeated_and_the_least_disturbed_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.5, 0.3, 0.01, 0.9, 0.8, 0.2, 0.7])
    monkeypatch.setattr(Run, "_once", lambda *_: {"others": next(shares)})
    assert run._quietly("engine", GRID[0], 0) == {"others": 0.01}
    assert run._quietly("engine", GRID[0], 0) == {"others": 0.2}  # not one in four was quiet
    assert list(shares) == []


def test_others_are_all_but_what_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr("benchmarks.peers.workers.work._STAT", stat)
    monkeypatch.setattr("benchmarks.peers.workers.work._TICKS", 100)
    stat.write_text("cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 5 5 5 5 5 5 5 5 0 0\n")
    own = iter([2.0, 8.0])
    others = Others(lambda: next(own), [0])
    # user, nice, system, idle, iowait, irq, softirq, stolen: 7 s of 10 busy, of which 6 s were its own
    stat.write_text("cpu 0 0 0 0 0 0 0 0 0 0\ncpu0 500 0 100 200 100 0 0 100 0 0\ncpu1 9 9 9 9 9 9 9 9 0 0\n")
    assert others.share() == pytest.approx(0.1)


def test_a_record_of_other_cells_is_refused(run: Run) -> None:
    run.measure("engine", 1)
    with pytest.raises(InflightError, match=r"record\.json has threads 2, and this run 4; remove it to begin again"):
        Record.open(run.record.path, "125M", CELLS, 4)
    run.record.path.write_text("{")
    with pytest.raises(InflightError, match="is not valid JSON"):
        Record.open(run.record.path, "125M", CELLS, 2)


def test_tables_have_the_bests_and_the_ratios(run: Run) -> None:
    run.measure("engine", 3)
    run.record.content["kl"]["inflight: bfloat16"] = 1e-6
    ratios, engines = results(run.record, "engine", 3, CELLS, "125M")
    for kind in PLAIN:
        fastest = max(GRID.index(one) for one in GRID if one.kind == kind) + 30 + 3
        rows = [row for row in ratios.rows if row["class"] == kind]
        assert [row["tokens/s"] for row in rows] == figure_names("engine", CELLS)
        assert {row["ratio"] for row in rows} == {round(90 / fastest, 2)}
    assert "Not measured: vllm: float32." in ratios.caveat
    assert "Disturbed" not in ratios.caveat
    run.record.rounds("engine", 3)[1]["inflight: INT8"]["others"] = 0.2
    [disturbed, _] = results(run.record, "engine", 3, CELLS, "125M")
    assert "Disturbed in round 2, so slower than on a quiet machine: inflight: INT8 (others 20 %)." in disturbed.caveat
    assert {row["contender"] for row in engines.rows} == set(WORKERS)
    ours = {(row["class"], row["variant"]): row["KL to float32"] for row in engines.rows if row["contender"] == OURS}
    assert ours.keys() == {("16-bit", "bfloat16"), ("8-bit", "INT8"), ("4-bit", "INT4")}
    assert ours["16-bit", "bfloat16"] == 1e-6
    assert figures_of(run.record.grid).keys() == {one.key for one in GRID if one.kind in PLAIN} - {"vllm: float32"}
    titles = [one.title for one in results(run.record, "engine", 3, CELLS, "125M-context-1024")]
    assert all("125M, contexts of 1,024 tokens" in one for one in titles)
    with pytest.raises(InflightError, match="has no 4 rounds of engine"):
        results(run.record, "engine", 4, CELLS, "125M")


def test_the_picture_has_those_who_were_measured_in_16_bits(run: Run) -> None:
    replace(run, selection=Selection([OURS, "llama.cpp"], ["16-bit"])).measure("engine", 1)
    ratios, _ = results(run.record, "engine", 1, CELLS, "125M")
    assert ratios.figure is not None
    legend = ratios.figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [OURS, "llama.cpp"]
    run.record.content["engine"] = []
    replace(run, selection=Selection(kinds=["8-bit"])).measure("engine", 1)
    assert results(run.record, "engine", 1, CELLS, "125M")[0].figure is None


def test_a_variant_without_another_beside_it_is_not_measured_in_the_grid(run: Run) -> None:
    kept = ("inflight: bfloat16", "llama.cpp: bf16 weights, f16 KV", "llama.cpp: f16 weights, f16 KV")
    replace(run, selection=Selection(names=kept[:1])).measure("engine", 1)
    assert run.record.grid == {}
    replace(run, selection=Selection(names=kept)).measure("engine", 1)
    assert set(run.record.grid) == set(kept[1:])
    assert set(run.record.content["engine"][0]) == {kept[0], kept[2]}


def test_a_variant_that_is_not_in_every_round_is_named_and_left_out(run: Run) -> None:
    for count, key in ((1, "inflight: bfloat16"), (2, "inflight: float32")):
        replace(run, selection=Selection(names=[key])).measure("engine", count)
    ratios, engines = results(run.record, "engine", 2, CELLS, "125M")
    assert {row["variant"] for row in engines.rows} == {"float32"}
    assert engines.title.endswith("the variants that were asked for")
    assert "Not measured in every round: inflight: bfloat16." in ratios.caveat


def test_the_grid_measures_each_load_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    worker = _Notes()
    monkeypatch.setattr(Place, "worker", lambda *_, **__: worker)
    monkeypatch.setattr(Place, "converted", lambda *_: Path("model"))
    replace(run, selection=Selection(names=["inflight: bfloat16", "inflight: float32"])).measure("engine", 1)
    assert [(job["seed"], job["times"]) for job in worker.jobs] == [(0, 1), (0, 1), (1, 3)]
    assert {one["times"] for one in run.record.rounds("engine", 1)[0].values()} == {3}
    ratios, _ = results(run.record, "engine", 1, CELLS, "125M")
    assert "A round has the median of 3 measurements of each load." in ratios.finding


def test_a_record_is_written_whole_with_its_provenance(run: Run) -> None:
    run.measure("engine", 1)
    assert not list(run.record.path.parent.glob("*.new"))
    [first, *_] = json.loads(run.record.path.read_text())["grid"].values()
    assert first.keys() >= {"figures", "cpu_ms_per_token", "versions", "commit", "date"}


def test_the_table_of_servers_has_the_medians_of_the_rounds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(_run: Run, part: str, one: Variant, seed: int) -> dict[str, Any]:
        speed, times = (100 if one.contender == OURS else 50) + seed, ("ttft_p50", "gap_p50", "gap_p99", "gap_longest")
        row = {**{f"{name}_ms": 10.0 * seed for name in times}, "cpu_ms_per_token": 2.0, "tokens_per_chunk": 1.0}
        return served(
            {"loads": [{"streams": count, "tokens_per_s": speed, **row} for count in STREAMS], "others": 0.02}
        )

    monkeypatch.setattr(Run, "_once", once)
    run.record.grid["vllm: float32"] = {"failed": "it took too long"}
    run.measure("http", 3)
    [result] = results(run.record, "http", 3, CELLS, "125M")
    ours = [row for row in result.rows if row["contender"] == OURS and row["class"] == "16-bit"]
    assert [row["streams"] for row in ours] == list(STREAMS)
    assert {(row["median"], row["lowest"], row["TTFT p50"], row["longest gap"]) for row in ours} == {(102, 101, 20, 20)}
    assert {row["lowest / peers' highest"] for row in ours} == {round(101 / 53, 2)}
    assert "Not measured: vllm: float32." in result.caveat
    assert result.figure is not None
