"""Plans and builds of models that only transformers' code computes, and of those that TensorRT-LLM does not list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from inflight.cli import app
from inflight.errors import DeploymentError
from inflight.export.checkpoint import inspect
from inflight.export.model_shape import read_shape
from inflight.export.plan.gpus import find_gpu
from inflight.export.plan.plan import PlanRequest
from inflight.export.plan.planner import DoesNotFit, make_plan, rank
from inflight.export.plan.roofline import AS_MEASURED, ASSUMED_PYTORCH
from inflight.export.plan.shape import count_parameters, linears
from inflight.resources import ROOT
from inflight.trtllm.models import LISTED, why_unlisted
from tests.engine.support.adapted import small_checkpoint
from tests.engine.support.driving import load
from tests.export.support.planning import cpu, shape

CPU = cpu(20_000)
SMALL = PlanRequest(input_tokens=20, output_tokens=8)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["gpt2", "granitemoe", "qwen3_moe", "opt", "gemma3n_text"])
def test_the_outline_counts_what_the_checkpoint_holds(kind: str) -> None:
    directory = small_checkpoint(kind)
    config = read_shape(directory)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        held = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    plan = make_plan(config, CPU, SMALL)
    if config.modeling == "transformers":
        assert count_parameters(config).total == held
        assert plan.efficiency == ASSUMED_PYTORCH
    assert plan.weight_bytes == 4 * held
    assert plan.parameters.total == held
    assert plan.predicted


def test_a_token_takes_as_much_of_the_cache_as_the_engine_gives_it() -> None:
    directory = small_checkpoint("granitemoe")
    plan = make_plan(read_shape(directory), CPU, SMALL)
    pool = load(directory, num_blocks=8)._runner._kv_pool
    stored = sum(part.nbytes for layer in pool.layers.values() for part in (layer.keys, layer.values))
    assert plan.memory.kv_bytes_per_token == stored // pool.slots


def test_an_expert_is_read_by_the_tokens_that_are_routed_to_it() -> None:
    config = read_shape(small_checkpoint("granitemoe"))
    shares = {one.share for one in linears(config) if ".experts." in one.name}
    assert shares == {config_of("granitemoe")["num_experts_per_tok"] / config_of("granitemoe")["num_local_experts"]}


def config_of(kind: str) -> dict[str, int]:
    """Return the ``config.json`` of a small checkpoint."""
    found: dict[str, int] = json.loads((small_checkpoint(kind) / "config.json").read_text())
    return found


def test_a_gpu_serves_it_alone_and_nobody_knows_how_fast() -> None:
    config = read_shape(small_checkpoint("gpt2"))
    plan = make_plan(config, find_gpu("h100"), SMALL)
    assert plan.gpus_per_replica == 1
    assert "transformers' code computes this model" in str(plan.unpredicted)
    ranked, refused = rank(config, SMALL)
    assert not ranked
    assert "not predicted: transformers' code computes this model" in refused["h100"]
    with pytest.raises(DeploymentError, match="so no rate or objective can be planned for"):
        make_plan(config, find_gpu("h100"), PlanRequest(input_tokens=20, output_tokens=8, rate=1))


def test_a_build_is_refused_by_name_with_what_can_be_done(tmp_path: Path) -> None:
    directory = small_checkpoint("gpt2")
    with pytest.raises(DeploymentError) as error:
        inspect(directory)
    assert str(error.value) == (
        "GPT2LMHeadModel: `inflight build` makes deployments of architectures that Inflight has code of its own for; "
        f"transformers' code computes this one, unquantized: `inflight serve {directory}` serves it as it is"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    for look in (inspect, read_shape):
        with pytest.raises(DeploymentError, match="neither Inflight nor transformers has code"):
            look(tmp_path)


def test_the_list_is_that_of_the_facts() -> None:
    first = json.loads((ROOT / "tests/facts/tensorrt_llm_models.json").read_text())["lists"][0]
    assert sorted(first["architectures"]) == sorted(LISTED)


def test_what_tensorrt_llm_does_not_list_is_planned_for_the_portable_engine() -> None:
    config = shape("qwen3.6-27b")
    assert why_unlisted(shape("llama-3.1-8b")) is None
    plan = make_plan(config, find_gpu("h200"), PlanRequest())
    assert plan.gpus_per_replica == 1
    assert "list of models does not name Qwen3_5ForConditionalGeneration" in str(plan.unpredicted)
    with pytest.raises(DoesNotFit, match="do not fit into 1 GPU of"):
        make_plan(config, find_gpu("l4"), PlanRequest())


@pytest.mark.parametrize(("name", "efficiency"), [("qwen3.6-27b", ASSUMED_PYTORCH), ("qwen3-8b", AS_MEASURED)])
def test_on_a_cpu_the_speed_is_that_of_what_computes(name: str, efficiency: object) -> None:
    assert make_plan(shape(name), cpu(200_000), PlanRequest()).efficiency == efficiency
    without = make_plan(shape(name), cpu(200_000, native=None), PlanRequest())
    assert without.efficiency == ASSUMED_PYTORCH, "no kernels are here"


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("Gemma2ForCausalLM", ["--engine", "trtllm"], "--engine trtllm: TensorRT-LLM 1.2's list of models does"),
        ("Gemma2ForCausalLM", ["--flow", "pytorch"], "--flow pytorch is TensorRT-LLM's; TensorRT-LLM 1.2's list"),
        ("MixtralForCausalLM", ["--flow", "tensorrt"], "no engine is compiled of models with an architecture whose"),
    ],
)  # fmt: skip
def test_a_build_for_tensorrt_llm_knows_the_same_list(
    family: str, options: list[str], said: str, tmp_path: Path
) -> None:
    config = json.loads((ROOT / f"tests/facts/published_configs/{family}.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["build", "--model", str(tmp_path), "--gpu", "h200", "--precision", "bf16", "--dry-run"]
    refused = CliRunner().invoke(app, [*arguments, *options])
    assert refused.exit_code == 1
    assert said in refused.stderr
    if family == "Gemma2ForCausalLM":
        built = CliRunner().invoke(app, arguments).stdout
        assert "the portable engine, because TensorRT-LLM 1.2's list of models does not name Gemma2ForCausalLM" in built
