"""The tables of docs/models-served.md, cell by cell: what is served is served, what is refused is refused so."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine.checkpoint import load_config
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.models.architectures import ARCHITECTURES
from inflight.engine.models.config import ModelConfig
from inflight.engine.quant.grouped import LINEARS
from inflight.engine.quant.linears import QuantizedLinear
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError, InflightError
from inflight.trtllm.arguments import llm_arguments
from scripts.matrix_page import FEATURES, FORMATS, Feature, computes, deployment_of, held, refusal, request_of
from scripts.models_page import models_page
from tests.engine.support.adapted import small_checkpoint
from tests.engine.support.checkpoints import TOKENS, checkpoint
from tests.engine.support.driving import ask, load, run
from tests.engine.support.guiding import byte_tokenizer
from tests.engine.support.native import SETS
from tests.engine.support.packed_architectures import PACKS, packed
from tests.engine.support.packed_models import fp8

SMALL = {
    "DeepseekV2ForCausalLM": "deepseek2", "DeepseekV3ForCausalLM": "deepseek3", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "Gemma4ForCausalLM": "gemma4", "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe", "Glm4MoeLiteForCausalLM": "glm4moelite", "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt-oss", "Llama4ForCausalLM": "llama4", "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "ministral3", "Mistral4ForCausalLM": "mistral4", "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral", "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe", "Phi3ForCausalLM": "phi3", "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5ForCausalLM": "qwen3.5", "Qwen3_5MoeForCausalLM": "qwen3.5moe",
    "SmolLM3ForCausalLM": "smollm3",
}  # fmt: skip
"""A small checkpoint of each architecture with code of our own."""
CELLS = [(architecture, form) for architecture in SMALL for form in FORMATS]
FEW = [(architecture, list(FORMATS)[index % len(FORMATS)]) for index, architecture in enumerate(SMALL)]
"""Each architecture in one format, and so each format in two or three architectures."""


def test_the_tables_have_each_architecture_and_format_that_is_tested() -> None:
    page = models_page()
    assert set(PACKS) == set(FORMATS)
    assert set(SMALL) == set(ARCHITECTURES)
    assert all(f"`{architecture}`" in page for architecture in SMALL)


def _hold(architecture: str, form: str) -> None:
    """Hold each linear of a packed checkpoint to the weight that it stands for, and logits where inputs stay."""
    directory, plain = packed(SMALL[architecture], form)
    ours, decoded = (Scorer(one, "float64", device="cpu") for one in (directory, plain))
    quantized = {name: one for name, one in ours.linears.items() if isinstance(one, QuantizedLinear)}
    assert quantized
    for name, linear in quantized.items():
        weight = decoded.linears[name].weight
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(linear.decode(torch.float32), weight.float()), name
    if not LINEARS[held(form).quant_algo].rounds_inputs():
        torch.testing.assert_close(ours.logits(TOKENS[:30]), decoded.logits(TOKENS[:30]), atol=1e-9, rtol=0)


@pytest.mark.sweep
@pytest.mark.parametrize(("architecture", "form"), FEW)
def test_a_format_is_read_and_served(architecture: str, form: str) -> None:
    _hold(architecture, form)
    _serve(architecture, form)


def _serve(architecture: str, form: str | None) -> None:
    directory = checkpoint(SMALL[architecture]) if form is None else packed(SMALL[architecture], form)[0]
    engine = load(directory)
    said = computes(load_config(directory), form)
    if SETS:
        assert (engine._runner._native is not None) == (said == "native")
    request = ask(TOKENS[:9], 2, ignore_eos=True)
    assert len(run(engine, [request])[request.key].tokens) == 2


@pytest.mark.sweep(most=20)
@pytest.mark.proof
@pytest.mark.parametrize(("architecture", "form"), [cell for cell in CELLS if cell not in FEW])
def test_every_format_is_read_and_served_for_every_architecture(architecture: str, form: str) -> None:
    _hold(architecture, form)
    _serve(architecture, form)


@pytest.mark.sweep(most=8)
@pytest.mark.parametrize("architecture", SMALL)
def test_what_is_not_quantized_is_served_by_what_the_table_says(architecture: str) -> None:
    _serve(architecture, None)


@pytest.mark.sweep(most=4)
@pytest.mark.parametrize("form", FORMATS)
def test_no_format_is_served_by_transformers_code(form: str, tmp_path: Path) -> None:
    shutil.copytree(small_checkpoint("gpt2"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": FORMATS[form]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    method = FORMATS[form]["quant_method"]
    with pytest.raises(DeploymentError) as error:
        load(tmp_path)
    said = f"config.json: quantization_config ('{method}') is not supported with transformers' code"
    assert str(error.value) == said
    assert said.replace(f"'{method}'", "'gptq'") in models_page()


def test_rows_that_share_a_scale_but_no_head_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Qwen3-Next: its rows lie by heads in the checkpoint; blocks of 12 rows do not end where heads of 16 do."""
    described = PACKS["FP8 by blocks"][0] | {"weight_block_size": [12, 32]}
    monkeypatch.setitem(PACKS, "blocks of 12", (described, fp8(12, 32, "weight_scale_inv")))
    with pytest.raises(DeploymentError, match="in_proj_qkvz.weight_scale has 22 rows for 256 of the weight, and they"):
        load(packed("qwen3next", "blocks of 12")[0])


MODELS = {"own code": "llama", "latent": "deepseek3", "hybrids": "qwen3next", "transformers' code": "gpt2"}


def _directory(model: str) -> Path:
    return small_checkpoint("gpt2") if model == "transformers' code" else checkpoint(MODELS[model])


@functools.cache
def _config(model: str) -> ModelConfig:
    return load_config(_directory(model), "auto")


def _engine(feature: Feature, directory: Path) -> Engine:
    """Return a small engine of a deployment that asks for a feature."""
    config = EngineConfig.of(deployment_of(feature, "pytorch"))
    drafts: dict[str, Any] = {"draft_model": directory} if config.speculation.draft_model else {}
    small = replace(
        config, model=directory, device="cpu", dtype="float32", block_size=4, num_blocks=256, max_batch_size=4,
        offload_bytes=1 << 20, speculation=config.speculation.model_copy(update=drafts),
    )  # fmt: skip
    return Engine.load(small, byte_tokenizer())


@functools.cache
def _plain_tokens(model: str) -> list[int]:
    request = ask(TOKENS[:9], 6, ignore_eos=True)
    return run(load(_directory(model)), [request])[request.key].tokens


@pytest.mark.sweep
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if not feature.on_gpu])
def test_a_feature_is_served_or_refused_in_the_words_of_the_table(name: str, model: str) -> None:
    """What needs a GPU is in test_invariance.py and test_adapter.py."""
    feature, directory = FEATURES[name], _directory(model)
    said = refusal(feature, _config(model))
    if said is not None:
        with pytest.raises(InflightError) as error:
            _engine(feature, directory).validate(request_of(feature))
        assert str(error.value) == said
        return
    engine = _engine(feature, directory)
    request = ask(TOKENS[:9], 6, ignore_eos=True, **feature.sampling)
    output = run(engine, [request])[request.key]
    if "guide" in feature.sampling:
        assert byte_tokenizer().decode(output.tokens)[0] in '{["-0123456789tfn \n', "it begins as JSON does"
        return
    if output.beams is None and not {"dtype", "weights"} & {key for one in feature.settings.values() for key in one}:
        assert output.tokens == _plain_tokens(model)
    assert output.num_tokens >= 6
    asked = {"log_probs": output.log_probs, "top_log_probs": output.top_log_probs, "beam_width": output.beams,
             "context_logits": output.context_logits}  # fmt: skip
    assert all(asked[key] is not None for key in feature.sampling)


@pytest.mark.parametrize("name", [name for name, one in FEATURES.items() if refusal(one, "trtllm") is None])
def test_what_tensorrt_llm_is_asked_for_is_among_its_arguments(name: str) -> None:
    """What a deployment is taken with is told to TensorRT-LLM; the rest is of requests (tests/trtllm)."""
    feature = FEATURES[name]
    plain, asked = (llm_arguments(deployment_of(one, "trtllm")) for one in (Feature(), feature))
    is_default = name == "prefix reuse" or (feature.sampling and "guide" not in feature.sampling)
    assert (plain == asked) == bool(is_default)
