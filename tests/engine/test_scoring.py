"""The scorer: whole sequences as the engine computes them, and single parts of another checkpoint."""

from __future__ import annotations

import pytest
import torch

from inflight.engine.scoring import Scorer, StepScorer
from tests.engine.support.checkpoints import ARCHITECTURES, TOKENS, checkpoint, reference
from tests.engine.support.driving import ask, load, run
from tests.engine.support.quantized import quantized


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_transformers(name: str) -> None:
    with torch.inference_mode():
        expected = reference(name)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(
        Scorer(checkpoint(name), "float32", device="cpu").logits(TOKENS), expected, atol=2e-3, rtol=1e-4
    )


@pytest.mark.parametrize("scheme", ["FP8", "AWQ"])
def test_logits_are_the_engines(scheme: str) -> None:
    """Both by PyTorch: a last bit of the kernels' tips some keys and values to their neighbours in E4M3."""
    directory = quantized(scheme, fp8_kv_cache=True).directory
    request = ask(TOKENS, 1, context_logits=True)
    output = run(load(directory, max_tokens_per_step=24, cpu_step="pytorch"), [request])[request.key]
    logits = Scorer(directory, "float32", device="cpu").logits(TOKENS)
    torch.testing.assert_close(torch.as_tensor(output.context_logits), logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["none", "FP8", "W8A16", "AWQ"])
def test_logits_by_the_step_that_serves_are_the_engines(scheme: str) -> None:
    directory = quantized(scheme).directory
    request = ask(TOKENS, 1, context_logits=True)
    output = run(load(directory, max_tokens_per_step=len(TOKENS), num_blocks=64), [request])[request.key]
    scorer = StepScorer(directory, "float32", device="cpu")
    assert torch.equal(scorer.logits(TOKENS), torch.as_tensor(output.context_logits))
    assert torch.equal(scorer.logits(TOKENS, first=7), scorer.logits(TOKENS)[7:])


def test_a_model_that_the_native_step_does_not_compute_is_scored_by_pytorch() -> None:
    step, scorer = (kind(checkpoint("qwen3.5"), "float32", device="cpu") for kind in (StepScorer, Scorer))
    torch.testing.assert_close(step.logits(TOKENS, first=3), scorer.logits(TOKENS)[3:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_linears_have_their_names_in_the_checkpoint(name: str) -> None:
    scorer, theirs = Scorer(checkpoint(name), device="cpu"), reference(name)
    expected = {name for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)}
    assert scorer.linears.keys() == expected
    for linear in expected:
        assert torch.equal(scorer.weight(linear), theirs.get_submodule(linear).weight)


def test_single_linears_of_another_checkpoint() -> None:
    """All of them in turn make the other model of this one; each makes a difference; afterwards all is as it was."""
    quantized_, original = (Scorer(quantized(name).directory, "float64", device="cpu") for name in ("FP8", "none"))
    before, other = original.logits(TOKENS), quantized_.logits(TOKENS)
    inside = {name: linear for name, linear in quantized_.linears.items() if name != "lm_head"}
    with original.replaced(inside):
        torch.testing.assert_close(original.logits(TOKENS), other, atol=1e-4, rtol=1e-4)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        with original.replaced({name: inside[name]}):
            assert not torch.equal(original.logits(TOKENS), before)
    assert torch.equal(original.logits(TOKENS), before)


def test_whole_layers_of_another_checkpoint() -> None:
    """Of AWQ only these: part of a linear's scales is in the norm before it."""
    awq, original = (Scorer(quantized(name).directory, "float64", device="cpu") for name in ("AWQ", "none"))
    layers = {f"model.layers.{layer}": awq.model.get_submodule(f"model.layers.{layer}") for layer in range(3)}
    with original.replaced(layers):
        torch.testing.assert_close(original.logits(TOKENS), awq.logits(TOKENS), atol=1e-4, rtol=1e-4)
    assert original.model.get_submodule("model.layers.0") is not layers["model.layers.0"]


def test_what_is_replaced_comes_back_after_an_error() -> None:
    scorer = Scorer(checkpoint("llama"), device="cpu")
    norm = scorer.model.get_submodule("model.norm")
    with pytest.raises(RuntimeError), scorer.replaced({"model.norm": torch.nn.Linear(3, 5)}):
        scorer.logits(TOKENS)
    assert scorer.model.get_submodule("model.norm") is norm


def test_a_sequence_of_the_models_length_is_scored() -> None:
    assert Scorer(checkpoint("llama"), device="cpu").logits([1] * 512).shape[0] == 512


@pytest.mark.parametrize("count", [0, 513])
def test_sequences_that_do_not_fit(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} tokens; there must be 1 to 512"):
        Scorer(checkpoint("llama"), device="cpu").logits([1] * count)
