"""``inflight plan``, as people call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from inflight.cli import app
from inflight.export.plan.gpus import find_gpu
from inflight.resources import ROOT
from tests.export.support.planning import SHAPES

RESULTS = ROOT / "docs/results/plan"
DEMO = ROOT / "deployments/demo/model"
LLAMA = str(SHAPES / "llama-3.1-8b")


def _run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_the_terminal_shows_memory_states_and_prices() -> None:
    text = _run(LLAMA, "--gpu", "h100", "--gpu", "l4", "--precision", "fp8", "--rate", "10").stdout
    assert "NVIDIA H100 SXM5 80 GB" in text
    assert "NVIDIA L4 24 GB" in text
    assert "██ weights 8.46 GiB" in text
    assert "10 requests/s" in text
    assert "GPUs by price" in text
    assert "a100-80  precision fp8: a100-80 has compute capability 8.0" in text


def test_the_mean_is_called_the_mean_and_a_p95_is_asked_for(tmp_path: Path) -> None:
    page, asked = tmp_path / "plan.html", "say how long they are by --p95-input and --p95-output"
    for options, lengths, ttft in (
        ((), "1,280 tokens (mean prompt, mean answer)", "a mean prompt"),
        (("--p95-input", "4000"), "4,256 tokens (P95 prompt, mean answer)", "a P95 prompt"),
        (("--p95-input", "4000", "--p95-output", "900"), "4,900 tokens (P95 prompt, P95 answer)", "a P95 prompt"),
    ):
        text = _run(LLAMA, "--gpu", "h100", *options, "--html", str(page)).stdout
        assert lengths in text
        assert (asked in " ".join(text.split())) == ("mean" in lengths)
        assert f"TTFT is that of {ttft}." in page.read_text()


def test_large_figures_are_written_out(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = _run(str(DEMO), "--gpu", "h100", "--html", str(page)).stdout
    for said in (text, page.read_text()):
        assert re.search(r"\b1\d\d,\d{3} tokens/s", said)
        assert not re.search(r"\de\+\d+ tokens/s", said)


def test_a_memory_bar_has_its_width_whatever_is_in_it() -> None:
    for gpu in ("l4", "b200"):
        lines = _run(LLAMA, "--gpu", gpu).stdout.splitlines()
        bars = [line for line in lines if line.startswith("█") and "GiB" not in line]
        assert [len(bar) for bar in bars] == [72]


def test_each_part_of_a_memory_bar_has_a_character_of_its_own() -> None:
    lines = _run(LLAMA, "--gpu", "l4").stdout.splitlines()
    legend = re.findall(r"(.)\1 ([a-zA-Z ]+?) [0-9.]+ GiB", "\n".join(line for line in lines if "GiB" in line))
    assert [name for _, name in legend] == ["weights", "KV cache", "activations", "runtime", "reserve"]
    assert len({character for character, _ in legend}) == len(legend)


def test_json_on_stdout_is_json_alone() -> None:
    answer = json.loads(_run(LLAMA, "--gpu", "b200", "--precision", "nvfp4", "--rate", "50", "--json", "-").stdout)
    assert answer["model"] == "llama-3.1-8b"
    assert answer["plans"][0]["precision"] == "nvfp4"
    assert answer["plans"][0]["load"]["requests_per_second"] * answer["plans"][0]["fleet"]["replicas"] == 50
    hourly = [plan["fleet"]["usd_per_hour"] for plan in answer["ranking"]]
    assert hourly == sorted(hourly)
    assert "begins with 10.0" in answer["refused"]["h100"]


def test_a_price_counts_in_the_plan_and_in_the_ranking() -> None:
    answer = json.loads(_run(LLAMA, "--gpu", "h100", "--price", "0.5", "--json", "-").stdout)
    ranked = {plan["gpu"]: plan["fleet"]["usd_per_hour"] for plan in answer["ranking"]}
    assert ranked["h100"] == answer["plans"][0]["fleet"]["usd_per_hour"] == 0.5
    assert ranked["h200"] == find_gpu("h200").usd_per_hour


@pytest.mark.proof
def test_every_option_changes_the_plan() -> None:
    def first(*options: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(_run(LLAMA, "--gpu", "h100", *options, "--json", "-").stdout)["plans"][0]
        return {key: value for key, value in found.items() if key != "request"}

    plain = first()
    options = [
        "--precision fp8", "--kv-cache fp8", "--tensor-parallel 2", "--gpus 2", "--input-tokens 4000",
        "--output-tokens 1000", "--p95-input 8000", "--p95-output 4000", "--rate 7", "--cache-hit-rate 0.5",
        "--slo-ttft-ms 35", "--slo-itl-ms 7", "--price 9",
    ]  # fmt: skip
    for option in options:
        assert first(*option.split()) != plain, option
    windows = [str(SHAPES / "mistral-7b-v0.1"), "--gpu", "l4", "--input-tokens", "9000", "--json", "-"]
    kept, freed = (json.loads(_run(*windows, *more).stdout)["plans"][0] for more in ([], ["--free-windows"]))
    assert freed["fitting_sequences"] > kept["fitting_sequences"]
    assert first("--precision", "fp8", "--exclude", "*.down_proj") != first("--precision", "fp8")


@pytest.mark.proof
def test_calibrated_and_checked_with_the_committed_files(tmp_path: Path) -> None:
    calibrate, check = ["--calibrate", str(RESULTS / "calibration.json")], ["--check", str(RESULTS / "check.json")]
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    text = _run(str(DEMO), "--gpu", "cpu", *calibrate, *check, "--html", str(page), "--json", str(data)).stdout
    assert "fitted:" in text
    assert "Measured and predicted" in text
    errors = [row["error"] for row in json.loads(data.read_text())["check"] if not row["prompt_tokens"]]
    assert len(errors) == 12
    assert max(map(abs, errors)) < 0.25
    html = page.read_text()
    for heading in ("Plan: demo/model", "Memory of one GPU", "Throughput and latency", "Measured on this machine"):
        assert heading in html
    assert html.count("<svg") == 4


@pytest.mark.proof
def test_this_machine_is_measured_and_planned_in_one_go(tmp_path: Path) -> None:
    from tests.engine.support.checkpoints import checkpoint

    path = tmp_path / "measured.json"
    arguments = ("--gpu", "cpu", "--input-tokens", "100", "--output-tokens", "50")
    text = _run(str(checkpoint("llama")), *arguments, "--rounds", "1", "--measure", str(path), "--calibrate", str(path))
    assert "fitted:" in text.stdout
    written = json.loads(path.read_text())
    assert {"command", "commit", "machine", "date", "rows"} <= set(written)
    assert written["precision"] == "float32"


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "awq", "version": "gemm"}, "by another library"),
    ],
)
def test_a_quantized_checkpoint_is_not_measured_as_if_it_were_none(
    quantization: dict[str, str], named: str, tmp_path: Path
) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = _run(str(tmp_path), "--gpu", "cpu", "--measure", str(tmp_path / "x.json"), code=1)
    assert f"the checkpoint is quantized ({named})" in result.stderr
    assert not (tmp_path / "x.json").exists()


def test_speeds_that_no_roofline_knows_are_not_presented_as_predictions(tmp_path: Path) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    arguments = ("--gpu", "cpu", "--precision", "nvfp4", "--input-tokens", "100", "--output-tokens", "50")
    text = _run(str(DEMO), *arguments, "--html", str(page), "--json", str(data)).stdout.partition("GPUs by price")[0]
    html = page.read_text()
    assert "not predicted: PyTorch computes this model's steps" in text
    assert "not predicted: PyTorch computes" in html
    assert "its memory is planned, its speed is not predicted" in html
    for words in ("TTFT", "ITL", "tokens/s", "Steady states", "hardly more throughput", "efficiencies"):
        assert words not in text, words
    assert "Steady states" not in html
    (plan,) = json.loads(data.read_text())["plans"]
    assert plan["speed"].startswith("not predicted")
    assert [plan[name] for name in ("unloaded", "full", "capacity", "load", "curve", "fleet", "efficiency")] == [
        None
    ] * 7
    assert plan["memory"]["weights"] > 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("missing",), "config.json"),
        ((str(DEMO), "--gpu", "cpu", "--free-windows"), "the portable engine keeps all blocks"),
        ((LLAMA, "--gpu", "h1000"), "did you mean 'h100'"),
        ((LLAMA, "--gpu", "a100-80", "--precision", "fp8"), "use int8 or int4-awq"),
        ((LLAMA, "--gpu", "h100", "--rate", "-1"), "rate is -1.0; it must be above 0"),
        (
            (str(DEMO), "--gpu", "cpu", "--precision", "nvfp4", "--rate", "1"),
            "so no rate or objective can be planned for",
        ),
        ((LLAMA, "--gpu", "h100", "--measure", "x.json"), "add --gpu cpu"),
        ((LLAMA, "--gpu", "h100", "--calibrate", str(RESULTS / "calibration.json")), "the measurement is of cpu"),
        ((LLAMA, "--gpu", "h100", "--check", str(RESULTS / "check.json")), "the measurement is of cpu"),
        (
            (str(DEMO), "--gpu", "cpu", "--precision", "bf16", "--calibrate", str(RESULTS / "calibration.json")),
            "the measurement is in float32, and the plan in bf16",
        ),
        ((str(DEMO), "--gpu", "cpu", "--precision", "int8", "--measure", "x.json"), "only float32 and bf16"),
        ((str(DEMO), "--gpu", "cpu", "--measure", "/missing/x.json"), "/missing/x.json: cannot be written"),
        ((LLAMA, "--gpu", "h100", "--json", "/missing/x.json"), "/missing/x.json: cannot be written"),
        ((LLAMA, "--gpu", "h100", "--html", "/missing/x.html"), "/missing/x.html: cannot be written"),
    ],
)
def test_a_fault_is_one_line(arguments: tuple[str, ...], fault: str) -> None:
    result = _run(*arguments, code=1)
    assert result.stderr.startswith("inflight: ")
    assert fault in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
