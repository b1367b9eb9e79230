"""Each published model that the engine has code for, scaled down, computes what transformers computes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.models.reading import read_model_config
from inflight.engine.request import Output
from inflight.errors import DeploymentError
from tests.engine.support.driving import ask, load, run
from tests.engine.support.published import FAMILIES, VOCAB, config_of, is_served, published

COUNT = 8
_CHANCE = random.Random(11)
_SHARED = _CHANCE.choices(range(1, VOCAB), k=30)
PROMPTS = [_CHANCE.choices(range(1, VOCAB), k=_CHANCE.randint(1, 40)) for _ in range(9)]
PROMPTS += [_SHARED[: _CHANCE.randint(4, 30)] + _CHANCE.choices(range(1, VOCAB), k=5) for _ in range(7)]
"""16, of which seven share a beginning."""
REFUSED = {
    "ApertusForCausalLM", "ArceeForCausalLM", "BambaForCausalLM", "Cohere2ForCausalLM", "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM", "FalconH1ForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM",
    "GraniteMoeForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "Lfm2ForCausalLM",
    "MiniMaxM2ForCausalLM", "MuseGlimmerForConditionalGeneration", "NemotronForCausalLM", "NemotronHForCausalLM",
    "PhiForCausalLM", "SeedOssForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM",
}  # fmt: skip
"""Those that the engine has no code for."""
RECURRENT = {"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
"""Those whose prompts are computed, and reused, by 64 tokens; ``test_hybrid`` has prompts of more."""
SERVED = [family for family in FAMILIES if family not in REFUSED]
each = pytest.mark.parametrize("family", SERVED)


def test_each_is_served_or_refused_by_name() -> None:
    assert {family for family in FAMILIES if not is_served(family)} == REFUSED
    for family in REFUSED:
        with pytest.raises(DeploymentError, match=config_of(family)["architectures"][0]):
            read_model_config(config_of(family))


def _check(family: str, prompt: list[int], output: Output) -> None:
    """Hold tokens and log-probs to those of transformers."""
    with torch.inference_mode():
        logits = published(family).model(torch.tensor([[*prompt, *output.tokens]]), use_cache=False).logits[0].float()
    made = logits[len(prompt) - 1 : -1]
    assert output.tokens == made.argmax(-1).tolist()
    chosen = made.log_softmax(-1).gather(-1, torch.tensor(output.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), chosen, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep(most=6)
@each
def test_alone(family: str) -> None:
    request = ask(PROMPTS[0], COUNT, log_probs=True, ignore_eos=True)
    output = run(load(published(family).directory, cpu_step="pytorch"), [request])[request.key]
    assert len(output.tokens) == COUNT
    _check(family, request.prompt, output)


@pytest.mark.sweep(most=4)
@each
def test_in_a_mixed_batch_of_16(family: str) -> None:
    """With prefixes that are cached, prompts in chunks, and preemption."""
    engine = load(
        published(family).directory, cpu_step="pytorch", policy="max_utilization", num_blocks=48,
        max_tokens_per_step=80 if family in RECURRENT else 24, max_batch_size=16,
    )  # fmt: skip
    requests = [ask(prompt, COUNT, log_probs=True, ignore_eos=True) for prompt in PROMPTS]
    outputs = run(engine, requests)
    for request in requests:
        _check(family, request.prompt, outputs[request.key])
    metrics = [output.metrics for output in outputs.values() if output.metrics]
    assert any(one.cached_tokens for one in metrics) == (family not in RECURRENT)
    assert any(one.preemptions for one in metrics)


@pytest.mark.sweep(most=4)
@each
def test_bits_in_bfloat16_do_not_depend_on_the_batch(family: str) -> None:
    engine = load(published(family).directory, cpu_step="pytorch", dtype="bfloat16", prefix_reuse=False)
    requests = [ask(prompt, COUNT, log_probs=True, ignore_eos=True) for prompt in PROMPTS]
    together = run(engine, requests)
    for request in requests[::4]:
        alone = ask(request.prompt, COUNT, log_probs=True, ignore_eos=True)
        output = run(engine, [alone])[alone.key]
        assert (output.tokens, output.log_probs) == (together[request.key].tokens, together[request.key].log_probs)


def test_experts_that_lie_the_other_way_round_are_told_by_their_shape(tmp_path: Path) -> None:
    """The published file has inputs before outputs; transformers reads it, and writes outputs before inputs."""
    family = "Qwen3VLMoeForConditionalGeneration"
    shutil.copytree(published(family).directory, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    assert sum(".experts." in name for name in tensors) == 4
    save_file(turned, file)
    request = ask(PROMPTS[0], COUNT, log_probs=True, ignore_eos=True)
    _check(family, request.prompt, run(load(tmp_path / "model", cpu_step="pytorch"), [request])[request.key])
