"""The benchmark `profile`: phases that add up to the step, a trace that names them, and an engine left as it was."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest
import yaml
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.profile.measure import Load, take_profile
from benchmarks.profile.ranges import PHASES, _recorded
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.rope import RotaryEmbedding
from inflight.errors import InvalidRequest
from inflight.resources import DEMO
from inflight.settings.deployment import load_deployment
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, run
from tests.engine.support.native import SETS


def test_the_page_names_every_phase() -> None:
    page = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text()
    section = page.split("## `profile`\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE) == list(PHASES.items())


def _engine(**settings: object) -> tuple[Engine, ModelRunner]:
    config = EngineConfig(checkpoint("gemma3"), device="cpu", dtype="float32", block_size=4, num_blocks=64, **settings)  # type: ignore[arg-type]
    runner = ModelRunner(config)
    return Engine(runner, tokenizer=None), runner


def _functions() -> list[object]:
    return [Engine.step, ModelRunner.run, DecoderModel.forward, RotaryEmbedding.__call__]


def test_phases_add_up_and_the_engine_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All operators: which of them take longest is for the machine to say.
    monkeypatch.setattr("benchmarks.profile.measure._OPERATORS", 1000)
    engine, runner = _engine(cpu_step="pytorch")
    functions = _functions()
    before = run(engine, [ask([5, 6, 7], 6)]).popitem()[1].tokens
    said: list[tuple[str, int, int]] = []
    load, trace = Load(3, 9, 6, shared_prefix=4), tmp_path / "trace.json.gz"
    found = take_profile(engine, runner, load, 2, 6, trace, lambda *what: said.append(what))
    expected = [phase for phase in PHASES if phase not in ("draft", "native")]
    assert [row.phase for row in found.phases if row.phase not in ("draft", "native")] == expected
    total = sum(row.ms_per_step for row in found.phases)
    assert 0 < total <= found.profiled_ms_per_step
    assert sum(row.share for row in found.phases) == pytest.approx(1)
    assert all(row.ms_per_step >= 0 for row in found.phases)
    calls = {row.phase: row.calls_per_step for row in found.phases}
    layers = runner._model.config.num_layers
    assert (calls["schedule"], calls["logits"], calls["attention"], calls["mlp"]) == (1, 1, layers, layers)
    products = {row.operator for row in found.operators if row.phase == "mlp"}
    assert products & {"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"}
    assert found.slowdown > 0
    assert found.sequences_per_step == 3
    assert 0 < found.decode_tokens_per_step <= 3
    assert said[0] == ("without the profiler", 1, 8)
    assert said[-1] == ("with the profiler", 8, 8)
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert set(expected) <= names
    assert _functions() == functions
    assert run(engine, [ask([5, 6, 7], 6)]).popitem()[1].tokens == before


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_the_native_step_has_phases_of_its_own(tmp_path: Path) -> None:
    engine, runner = _engine()
    found = take_profile(engine, runner, Load(3, 9, 6, shared_prefix=4), 2, 6, tmp_path / "trace.json", lambda *_: None)
    [native] = [row for row in found.phases if row.phase == "native"]
    assert native.calls_per_step == 1
    assert {"qkv", "attention", "down", "logits"} <= {row.phase for row in found.native}
    assert sum(row.share for row in found.native) == pytest.approx(1)
    assert native.ms_per_step > 0 < next(row.ms_per_step for row in found.phases if row.phase == "mlp")
    assert sum(row.share for row in found.phases) == pytest.approx(1)


def test_the_load_is_the_same_each_time_and_begins_with_all_lengths() -> None:
    load = Load(4, 10, 20, shared_prefix=6)
    first, second = list(islice(load.requests(100), 8)), list(islice(load.requests(100), 8))
    assert [one.prompt for one in first] == [one.prompt for one in second]
    assert [one.sampling.max_tokens for one in first] == [5, 10, 15, 20, 20, 20, 20, 20]
    assert len({tuple(one.prompt[:6]) for one in first}) == 1
    assert len({tuple(one.prompt) for one in first}) == 8
    assert {len(one.prompt) for one in first} == {10}
    alike = islice(Load(4, 10, 20, shared_prefix=6, staggered=False).requests(100), 8)
    assert {one.sampling.max_tokens for one in alike} == {20}


def test_a_load_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    engine, runner = _engine(max_sequence_length=16)
    with pytest.raises(InvalidRequest):
        take_profile(engine, runner, Load(2, 30, 4, 0), 0, 1, tmp_path / "trace.json", lambda *what: None)
    assert not engine.busy


def test_the_command_on_the_demo(tmp_path: Path) -> None:
    arguments = "--streams 2 --prompt-tokens 8 --output-tokens 4 --steps 3 --warm-up 2".split()
    done = CliRunner().invoke(bench, ["profile", *arguments, "--output", str(tmp_path / "here")])
    assert done.exit_code == 0, done.output
    for words in ("3 steps on cpu", "ms per step, and", "Phases of a step", "Operators"):
        assert words in done.output, words
    result = json.loads((tmp_path / "here/profile.json").read_text())
    assert result["load"] == asdict(Load(2, 8, 4, shared_prefix=0))
    assert result["commit"]
    assert result["command"].startswith('make bench ARGS="profile ')
    found = {row["phase"] for row in result["phases"]}
    assert {"schedule", "prepare", "sample", "finish", "other"} < found <= set(PHASES)
    assert result["profiled_ms_per_step"] > 0 < result["plain_ms_per_step"]


def test_what_a_draft_model_computes_is_all_of_the_phase_draft() -> None:
    open_phases: list[str] = []
    forward = _recorded(lambda: None, "residual", open_phases)
    draft = _recorded(forward, "draft", open_phases)
    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        draft()
        forward()
    assert [event.name for event in recorder.events() or () if event.name in PHASES] == ["draft", "residual"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "33"], "--streams is 33; batching.max_batch_size is 32"),
        (
            ["--prompt-tokens", "4", "--shared-prefix", "5"],
            "--shared-prefix is 5, more than --prompt-tokens, 4",
        ),
        (["nowhere"], "nowhere/deployment.yaml: cannot be read"),
        (["--output", "/proc/none"], "inflight: --output /proc/none: No such file or directory"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(bench, ["profile", *arguments])
    assert done.exit_code == 1
    assert message in re.sub(r"\s+", " ", done.output)
    assert "Traceback" not in done.output


def test_other_engines_are_refused_by_name(tmp_path: Path) -> None:
    settings = {"model": str(load_deployment(DEMO).model), "engine": {"kind": "replay"}}
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(settings))
    done = CliRunner().invoke(bench, ["profile", str(tmp_path)])
    assert done.exit_code == 1
    assert "engine.kind is replay; only the portable engine" in re.sub(r"\s+", " ", done.output)
