"""Speed beside transformers: the same model on both sides, and what is made of the times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.checkpoints import SHAPES, SMALL, TINY, llama_config
from benchmarks.drive import Driver, ask, prompts
from benchmarks.figures import COLOURS, panels, stacks
from benchmarks.roofline import flops_per_token, peak_flops
from benchmarks.setting import Setting
from benchmarks.speed import ENGINES, PEERS, Lengths, _Cell, _speed, measure_speed
from benchmarks.step import Steps
from benchmarks.transformers_peers import GeneratePeer, Rates, load_transformers
from inflight.errors import EngineFailure


@pytest.fixture(autouse=True)
def _few_steps_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace grows with each step, and what is read off one has the same form."""
    monkeypatch.setattr("benchmarks.step._STEPS", 3)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_their_names(name: str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(SHAPES[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        SHAPES[name].parameters, rel=0.02
    )


def test_a_checkpoint_is_made_once_and_the_engine_computes_what_transformers_does(setting: Setting) -> None:
    directory = setting.checkpoint(SMALL)
    written = (directory / "model.safetensors").stat().st_mtime_ns
    [prompt] = prompts(np.random.default_rng(3), 1, 20)
    [stream] = Driver(setting.engine(SMALL)).run([ask(prompt, 8)])
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    with torch.inference_mode():
        ids = load_transformers(directory, "cpu").generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert stream.tokens == ids[0, 20:].tolist()


def test_rates_are_of_the_two_phases() -> None:
    rates = Rates.of([[1] * 10, [1] * 10], 100.0, [[101.0, 103.0, 104.0], [102.0, 103.0, 104.0]])
    assert rates == Rates(prefill=20 / 2, decode=4 / 2)


@pytest.mark.proof
def test_all_are_measured_and_the_parts_and_phases_of_a_step_add_up(setting: Setting) -> None:
    speed, step, phases, start = measure_speed(setting, [TINY], [2], Lengths(8, 3), 2)
    assert [row["phase"] for row in speed.rows] == ["prefill", "decode"]
    assert all(float(row[f"{name}, tokens/s"]) > 0 for row in speed.rows for name in PEERS)
    [row] = step.rows
    parts = sum(float(value) for name, value in row.items() if name.endswith(", ms") and name != "step, ms")
    assert parts == pytest.approx(float(row["step, ms"]), abs=0.01)
    assert [row["engine"] for row in start.rows] == list(ENGINES)
    assert all(float(row["weights, s"]) > 0 for row in start.rows)
    [row] = phases.rows
    assert sum(float(value) for name, value in row.items() if name.endswith(", %")) == pytest.approx(100, abs=1)
    assert sum(bar.get_height() for bar in phases.figure.axes[0].patches) == pytest.approx(100, abs=1e-6)


def test_profiled_steps_decode_all_streams_and_do_nothing_else(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Steps.take(setting, TINY, 24, 90, {})
    assert taken.profile.decode_tokens_per_step == taken.profile.sequences_per_step == 24
    too_few = replace(taken.profile, prefill_tokens_per_step=0.5)
    monkeypatch.setattr("benchmarks.step.take_profile", lambda *_: too_few)
    with pytest.raises(EngineFailure, match=r"0\.6M, 24 streams: prompts were still computed after 9 steps"):
        Steps.take(setting, TINY, 24, 90, {})


def test_a_stack_has_all_its_parts_however_many() -> None:
    _, [axes] = panels(1)
    stacks(axes, {"one": dict.fromkeys(map(str, range(len(COLOURS) + 1)), 1.0)}, "parts")
    assert len(axes.patches) == len(COLOURS) + 1


def test_a_token_costs_two_operations_for_each_weight_that_it_is_multiplied_with() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(SMALL))
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    every = 2 * sum(one.weight.numel() for one in linears.values())
    assert flops_per_token(SMALL, 1) == every
    assert flops_per_token(SMALL, 0) == every - 2 * linears["lm_head"].weight.numel()
    assert peak_flops("cpu") > 0


def test_the_sentence_is_what_was_measured() -> None:
    decode = dict(zip(PEERS, (300.0, 150.0, 400.0, 100.0, 200.0, 250.0), strict=True))
    rates = {name: [Rates(1000.0, rate)] * 3 for name, rate in decode.items()}
    peak = 600 * flops_per_token(SMALL, 1)  # so that 600 tokens per second are the most in float32
    cell = _Cell(SMALL, 32, rates, peak, cast(Steps, None), {})
    result = _speed([cell], Lengths(128, 32), 3)
    prefill, row = result.rows
    assert row["float32 / generate"] == "3.00 (3.00 to 3.00)"
    assert row["bfloat16 / generate"] == "0.75 (0.75 to 0.75)"
    assert row["fastest / fastest"] == "1.60 (1.60 to 1.60)"
    assert prefill["fastest / fastest"] == "1.00 (1.00 to 1.00)"
    assert "1.60 times (engine in INT8, continuous batching in float32)" in result.finding
    assert "Above 1 are 3 of these 8 ratios; at least 2: float32 / generate (6.8M, decode)." in result.finding
    assert "50 % in decode with 6.8M (6.00)" in result.finding


def test_a_peer_that_makes_too_few_tokens_is_not_measured() -> None:
    class Lazy:
        device = "cpu"

        def generate(self, ids: torch.Tensor, **_: object) -> torch.Tensor:
            return ids

    with pytest.raises(EngineFailure, match=r"generate made \[0\] tokens; 4 were asked for"):
        GeneratePeer(Lazy()).run([[1, 2]], 4)


@pytest.mark.proof
def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, folder: Path) -> None:
    few = "--streams 1 --prompt-tokens 4 --output-tokens 3 --rounds 1 --threads 1".split()
    places = ["--checkpoints", str(folder), "--output", str(tmp_path)]
    done = CliRunner().invoke(bench, ["engine", "--model", "6.8M", *few, *places])
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md", "phases.json", "phases.svg", "speed.json", "speed.svg", "start.json", "start.svg",
        "step.json", "step.svg",
    }  # fmt: skip
    assert json.loads((tmp_path / "speed.json").read_text())["command"] == (
        'make bench ARGS="engine --model 6.8M --streams 1 --prompt-tokens 4 --output-tokens 3 --rounds 1 --threads 1"'
    )


def test_an_unknown_model_and_a_device_that_is_not_there_are_refused_in_a_line(folder: Path) -> None:
    done = CliRunner().invoke(bench, ["engine", "--model", "8B"])
    assert done.exit_code == 2
    assert "'8B' is not one of 6.8M, 125M" in " ".join(done.output.split())
    done = CliRunner().invoke(bench, ["soak", "--device", "gpu", "--checkpoints", str(folder)])
    assert done.exit_code == 1
    assert "engine.device is 'gpu'" in done.output
    assert "Traceback" not in done.output
