"""Comparing two load tests: hand-made numbers, false alarms counted over simulated pairs, a known slow-down found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.load.compare.bootstrap import Percentiles, Ratio, block_length, draw, estimate, resample
from inflight.load.compare.compare import compare, holm, judge, p_value
from inflight.load.compare.samples import Run
from inflight.load.measurements import Arrival, RequestRecord, measure
from inflight.load.scenario import Slo
from tests.load.support.scenarios import request_class, scenario

WINDOW = (0.0, 60.0)
LIMITS = {"x": Slo(ttft_ms=150)}
DEFAULTS = {"weight": 1.0, "format": "text", "ignore_eos": True}


def run(seed: int, slower: float = 1.0, count: int = 240) -> Run:
    """A test of independent requests with ten tokens each; the tokens of one share its pace."""
    generator = np.random.default_rng(seed)
    records = []
    for number, start in enumerate(np.sort(generator.uniform(*WINDOW, count))):
        first = start + slower * 0.1 * generator.lognormal(0, 0.2)
        gap = slower * 0.02 * generator.lognormal(0, 0.2)
        arrivals = tuple(Arrival(first + place * gap, 1) for place in range(10))
        end = arrivals[-1].time_s
        records.append(
            RequestRecord(number, 0, "x", start, end, "completed", arrivals=arrivals, output_tokens=10, queue_s=0.0)
        )
    return Run(records, WINDOW, LIMITS)


def test_a_test_against_itself_has_not_changed() -> None:
    rows = compare([run(1)], [run(1)], resamples=1000)
    assert {row.verdict for row in rows} == {"no change", "too few"}
    assert all(row.change == 0 for row in rows)


def test_a_share_of_nothing_is_left_out_and_said() -> None:
    """All were cancelled within limits: none is judged, and what kept the limits is 0 of 0."""
    records = [
        RequestRecord(
            number, 0, "x", number * 0.5, number * 0.5 + 0.4, "cancelled", arrivals=(Arrival(number * 0.5, 1),)
        )
        for number in range(100)
    ]
    cancelled, told = Run(records, WINDOW, LIMITS), []
    rows = compare([cancelled], [cancelled], resamples=1000, tell=told.append)
    assert {row.verdict for row in rows} == {"no change"}
    assert "within limits" not in {row.name for row in rows}
    assert "within limits is left out: too few requests have one" in told


def test_the_values_are_those_of_the_summary() -> None:
    one = run(2)
    figures = measure(one.records, WINDOW, LIMITS)
    assert figures.ttft_ms is not None
    assert figures.itl_ms is not None
    value = {row.name: row.before for row in compare([one], [run(3)], resamples=1000)}
    assert value["throughput"] == pytest.approx(figures.requests_per_second)
    assert value["output"] == pytest.approx(figures.output_tokens_per_second)
    assert value["goodput"] == pytest.approx(figures.goodput)
    assert value["within limits"] == pytest.approx(100 * (figures.slo_attainment or 0))
    assert value["TTFT mean"] == pytest.approx(figures.ttft_ms.mean)
    assert value["TTFT p95"] == pytest.approx(figures.ttft_ms.p95)
    assert value["ITL p50"] == pytest.approx(figures.itl_ms.p50)


@pytest.mark.proof
def test_false_alarms_are_as_seldom_as_promised() -> None:
    """Over 60 pairs of the same server: one figure by itself in 5 % of them, any figure of a pair in 5 %."""
    alone = alarms = figures = 0
    for seed in range(60):
        rows = compare([run(1000 + seed)], [run(2000 + seed)], resamples=1000)
        alarms += any(row.verdict in ("better", "worse") for row in rows)
        moving = [row for row in rows if row.change_interval[0] < row.change_interval[1]]
        alone += sum(not row.change_interval[0] <= 0 <= row.change_interval[1] for row in moving)
        figures += len(moving)
    assert alarms <= 8  # above 8 of 60 with a chance of 1 % if it is 5 %
    assert 0.01 < alone / figures < 0.10


@pytest.mark.proof
def test_a_slow_down_of_a_tenth_is_found() -> None:
    for seed in range(5):
        rows = {row.name: row for row in compare([run(seed)], [run(100 + seed, slower=1.1)], resamples=2000)}
        for name in ("TTFT mean", "E2E mean"):
            assert rows[name].verdict == "worse"
            assert rows[name].percent == pytest.approx(10, abs=6)
            low, high = rows[name].percent_interval or (0.0, 0.0)
            assert 0 < low < high
        faster = {row.name: row for row in compare([run(seed, slower=1.1)], [run(100 + seed)], resamples=2000)}
        assert faster["E2E mean"].verdict == "better"


def test_tokens_of_a_request_are_drawn_together() -> None:
    """The spread of the mean ITL is that of a mean over requests, not over ten times as many tokens."""
    [row] = [row for row in compare([run(1)], [run(2)], resamples=2000) if row.name == "ITL mean"]
    means = [1000 * (one.mean_itl_s or 0) for one in run(1).records]
    low, high = row.before_interval
    assert high - low == pytest.approx(2 * 1.96 * float(np.std(means)) / len(means) ** 0.5, rel=0.15)


def test_percentiles_of_resamples_are_numpys() -> None:
    generator = np.random.default_rng(0)
    samples, cluster_of = generator.normal(size=300), np.repeat(np.arange(30), 10)
    one = Percentiles.of((50, 95, 99), samples, cluster_of, 30)
    weights = draw([30], 20, generator)
    values = one.values(weights)
    for row in range(20):
        drawn = np.repeat(samples, weights[row].astype(int)[cluster_of])
        assert values[:, row] == pytest.approx(np.percentile(drawn, (50, 95, 99)))


def test_many_different_values_are_joined_without_moving_a_percentile() -> None:
    samples = np.random.default_rng(0).lognormal(size=20_000)
    one = Percentiles.of((50, 95, 99), samples, np.arange(20_000) % 50, 50)
    assert len(one.levels) <= 1024
    assert estimate([one], 50) == pytest.approx(np.percentile(samples, (50, 95, 99)), rel=0.01)


def test_a_ratio_by_hand() -> None:
    ratio = Ratio(np.array([1.0, 2.0, 6.0]), np.array([1.0, 1.0, 2.0]))
    weights = np.array([[1.0, 1, 1], [3, 0, 0], [0, 1, 2]])
    assert ratio.values(weights)[0].tolist() == [9 / 4, 1.0, 14 / 5]


def test_the_bootstrap_spread_of_a_mean_is_the_textbooks() -> None:
    values = np.random.default_rng(5).normal(10, 2, 400)
    [draws] = resample([Ratio(values, np.ones(400))], [400], np.random.default_rng(0), 4000)
    assert np.std(draws) == pytest.approx(np.std(values) / 20, rel=0.05)


def test_runs_are_drawn_where_there_are_three() -> None:
    """Runs that differ among themselves widen the interval; two runs alone cannot tell how much."""
    runs = [Ratio(np.repeat([0.0, 10.0, 20.0][:count], 50), np.ones(50 * count)) for count in (2, 3)]
    generator = np.random.default_rng(0)
    [pooled], [drawn] = (
        resample([one], [50] * count, generator, 1000) for one, count in zip(runs, (2, 3), strict=True)
    )
    assert np.std(pooled) == 0
    assert np.std(drawn) > 4


def test_neighbours_that_are_alike_are_drawn_together() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=2000)
    walk = [noise[0]]
    for step in noise[1:]:
        walk.append(0.9 * walk[-1] + step)
    # The autocorrelation time of this process is (1 + 0.9) / (1 - 0.9) = 19.
    assert block_length(walk) == pytest.approx(3 * 19, rel=0.35)
    assert block_length(noise.tolist()) <= 6
    assert block_length([1.0] * 100) == 1
    assert block_length([]) == 1


def test_block_length_leaves_twenty_blocks() -> None:
    """However long the values of a series stay alike: 400 that rise by one are all alike."""
    assert block_length(range(400)) == 400 // 20


@pytest.mark.parametrize(("runs", "widening"), [([100] * 3, 1.966), ([100] * 2, 1.009)], ids=["by runs", "by clusters"])
def test_resample_widens_by_what_is_drawn(runs: list[int], widening: float) -> None:
    """From three runs on these are drawn, and three are few; of two all 200 clusters are. The factors are by hand."""
    values = np.random.default_rng(1).normal(10, 1, sum(runs))
    mean = Ratio(values, np.ones(sum(runs)))
    here = estimate([mean], sum(runs))[0]
    [plain] = mean.values(draw(runs, 50, np.random.default_rng(5)))
    [wide] = resample([mean], runs, np.random.default_rng(5), 50)
    assert (wide - here) / (plain - here) == pytest.approx(widening, abs=0.002)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_values_and_verdicts_by_hand() -> None:
    assert p_value(np.array([1.0] * 99)) == pytest.approx(0.02)
    assert p_value(np.array([-1.0, 1.0])) == 1.0
    assert p_value(np.zeros(10)) == 1.0
    assert judge(1.0, True, 0.01, 0.95) == "better"
    assert judge(1.0, False, 0.01, 0.95) == "worse"
    assert judge(1.0, False, 0.06, 0.95) == "no change"


def write(directory: Path, one: Run, **summary: object) -> Path:
    """Write a result directory with what a comparison reads of it."""
    directory.mkdir(parents=True)
    scenario = {"name": "s", "classes": [{"name": "x", "slo": {"ttft_ms": 150}}]}
    values = {"machine": "m", "transport": "grpc", "seed": 0, "commit": "c", "date": "d", "interrupted": False}
    values |= {"deployment": "d", "files": {"trace.csv": "0"}}
    values |= {"client": {"bottleneck": False, "reasons": []}, "figures": {"window_s": WINDOW}, "scenario": scenario}
    (directory / "summary.json").write_text(json.dumps(values | summary))
    (directory / "requests.jsonl").write_text("\n".join(json.dumps(record.as_json()) for record in one.records))
    return directory


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["load", "compare", *map(str, arguments), "--resamples", "1000"])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.proof
def test_the_command(tmp_path: Path) -> None:
    before, after = write(tmp_path / "a", run(1)), write(tmp_path / "b", run(2, slower=1.2))
    out = tmp_path / "out"
    code, said = invoke(before, after, "--output", out)
    assert code == 0
    assert "Worse: " in said
    record = json.loads((out / "comparison.json").read_text())
    assert {row["name"]: row["verdict"] for row in record["figures"]}["E2E mean"] == "worse"
    assert "<svg" in (out / "report.html").read_text()
    assert invoke(before, after, "--output", out, "--fail-on-regression")[0] == 1
    assert invoke(after, before, "--output", out, "--fail-on-regression")[0] == 0


@pytest.mark.proof
def test_repeats_are_read_from_one_directory(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"a/{number}", run(number), seed=number)
        write(tmp_path / f"b/{number}", run(10 + number), seed=number)
    code, said = invoke(tmp_path / "a", tmp_path / "b", "--output", tmp_path / "out")
    assert code == 0
    assert "No figure changed beyond noise." in said
    assert "Differences between runs are in the intervals." in (tmp_path / "out/report.html").read_text()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("summary", "named"),
    [
        ({"seed": 7}, "seed (0 and 7)"),
        ({"machine": "other"}, "machine (m and other)"),
        ({"deployment": "other"}, "deployment (d and other)"),
        ({"files": {"trace.csv": "1"}}, "files.trace.csv"),
        ({"scenario": {"name": "s", "classes": [{"name": "x"}]}}, "scenario.classes"),
    ],
)
def test_what_measured_different_things_is_refused(tmp_path: Path, summary: dict[str, object], named: str) -> None:
    before, after = write(tmp_path / "a", run(1)), write(tmp_path / "b", run(2), **summary)
    code, said = invoke(before, after)
    assert (code, named in said, "--force" in said) == (1, True, True)
    code, said = invoke(before, after, "--force", "--output", tmp_path / "out")
    assert (code, named in said) == (0, True)


def test_a_default_that_is_spelled_out_is_no_difference(tmp_path: Path) -> None:
    short, long = (
        {"scenario": scenario(request_class("x", **more)).model_dump(mode="json")} for more in ({}, DEFAULTS)
    )
    before, after = write(tmp_path / "a", run(1), **short), write(tmp_path / "b", run(2), **long)
    code, said = invoke(before, after, "--output", tmp_path / "out")
    assert code == 0, said
    assert "Before is before: 1 run, client commit c, d." in (tmp_path / "out/report.html").read_text()


def test_where_nothing_can_be_written_nothing_is_computed(tmp_path: Path) -> None:
    before = write(tmp_path / "a", run(1))
    code, said = invoke(before, before, "--output", tmp_path / "a/summary.json")
    assert code == 1
    assert said.startswith("inflight: ")
    assert said.endswith("summary.json: cannot be written: File exists")


def test_too_few_resamples_are_refused(tmp_path: Path) -> None:
    before = write(tmp_path / "a", run(1))
    code, said = invoke(before, before, "--confidence", "0.99")
    assert code == 1
    assert "1,000 resamples cannot show a change" in said


def test_what_is_no_result_is_one_line(tmp_path: Path) -> None:
    code, said = invoke(tmp_path, tmp_path)
    assert code == 1
    assert said.startswith("inflight: ")
    assert "neither a result of `inflight load run` nor a directory of such" in said
