"""Quantized checkpoints give the logits of ModelOpt's own simulation, and the tokens that follow from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.engine.quant.linears import SCHEMES, Int4Fp8Linear, Int4WeightLinear, QuantizedLinear
from inflight.engine.scoring import Scorer
from tests.engine.support.checkpoints import TOKENS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.quantized import ALGORITHMS, CONFIGS, Quantized, copied, mixed, quantized

each = pytest.mark.parametrize("scheme", CONFIGS)


def _score(model: Quantized) -> Tensor:
    return Scorer(model.directory, "float64", device="cpu").logits(TOKENS)


def _check(model: Quantized) -> None:
    torch.testing.assert_close(_score(model), model.logits(TOKENS), atol=1e-6, rtol=1e-6)


def test_every_scheme_is_tested() -> None:
    assert set(ALGORITHMS.values()) == set(SCHEMES)
    assert ALGORITHMS.keys() == CONFIGS.keys()


@pytest.mark.sweep(most=4)
@each
def test_logits(scheme: str) -> None:
    _check(quantized(scheme))


@pytest.mark.sweep
@each
def test_quantization_changes_them_at_all(scheme: str) -> None:
    """A simulation that did not simulate would agree with anything."""
    model, original = quantized(scheme), Scorer(quantized("none").directory, "float64", device="cpu")
    change = (_score(model) - original.logits(TOKENS)).abs().mean()
    assert change > 3e-3


@pytest.mark.sweep(most=3)
@each
def test_logits_with_an_fp8_cache(scheme: str) -> None:
    _check(quantized(scheme, fp8_kv_cache=True))


@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("scheme", ["FP8", "SmoothQuant", "AWQ", "NVFP4"])
def test_biases_and_tied_embeddings(scheme: str) -> None:
    _check(quantized(scheme, "Qwen2", tied=True))


@pytest.mark.parametrize("scheme", ["FP8", "AWQ"])
def test_a_checkpoint_that_is_fused_itself(scheme: str) -> None:
    _check(quantized(scheme, "Phi3"))


@pytest.mark.proof
@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3Text"])
def test_norms_of_queries_and_keys(kind: str) -> None:
    _check(quantized("W4A8", kind, fp8_kv_cache=True))


def test_schemes_mixed_within_one_projection() -> None:
    model = mixed()
    scorer = Scorer(model.directory, "float64", device="cpu")
    kinds = {name: type(linear).__name__ for name, linear in scorer.linears.items()}
    parts = [kinds[f"model.layers.0.self_attn.{part}_proj"] for part in "qkv"]
    assert parts == ["Fp8Linear", "Int8WeightLinear", "ExactLinear"]
    assert kinds["model.layers.1.mlp.gate_proj"] == "Fp8Linear"
    assert kinds["model.layers.0.mlp.gate_proj"] == kinds["model.layers.1.mlp.up_proj"] == "ExactLinear"
    assert scorer.scheme == "FP8, W4A16_AWQ, W8A16"
    torch.testing.assert_close(scorer.logits(TOKENS), model.logits(TOKENS), atol=1e-6, rtol=1e-6)


@pytest.mark.sweep(most=4)
@each
def test_each_linear_by_itself(scheme: str) -> None:
    """What a linear returns, and the weight it computes with, in float32."""
    model = quantized(scheme)
    scorer = Scorer(model.directory, "float32", device="cpu")
    generator = torch.Generator().manual_seed(1)
    found = 0
    for name, linear in scorer.linears.items():
        theirs = model.simulation.get_submodule(name)
        x = torch.randn(20, theirs.weight.shape[1], generator=generator)
        with torch.inference_mode():
            torch.testing.assert_close(linear(x).double(), theirs(x.double()), atol=2e-5, rtol=1e-5)
            expected = theirs.weight_quantizer(theirs.weight).float()
        torch.testing.assert_close(scorer.weight(name), expected, atol=1e-7, rtol=1e-6)
        found += isinstance(linear, QuantizedLinear)
    assert found == 3 * 7
    assert not isinstance(scorer.linears["lm_head"], QuantizedLinear)


@pytest.mark.proof
def test_int4_weights_are_rounded_to_the_type_of_the_computation_before_e4m3() -> None:
    """In ModelOpt's simulation, the second quantizer gets what the first returns, in the type of the weight."""
    model = quantized("W4A8")
    name = "model.layers.1.mlp.down_proj"
    linear = Scorer(model.directory, "bfloat16", device="cpu").linears[name]
    assert isinstance(linear, Int4Fp8Linear)
    # The scales of these small models are powers of two, and their products need no rounding.
    linear.weight_scale *= 0.5 + torch.rand(linear.weight_scale.shape, generator=torch.Generator().manual_seed(1))
    first, second = model.simulation.get_submodule(name).weight_quantizer
    assert first(torch.ones(128, 256, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.inference_mode():
        expected, otherwise = (
            second(Int4WeightLinear.decode(linear, dtype)) for dtype in (torch.bfloat16, torch.float32)
        )
        torch.testing.assert_close(linear.decode(torch.bfloat16), expected, atol=0, rtol=0)
    assert (expected != otherwise.bfloat16()).any(), "the order of rounding does not show here"


@pytest.mark.sweep(most=4)
@each
def test_greedy_tokens(scheme: str) -> None:
    """The engine's tokens are those that the simulation finds likeliest, or as likely but for the last digits."""
    model, engine = quantized(scheme), load(quantized(scheme).directory)
    request = ask(TOKENS[:30], 16)
    tokens = run(engine, [request])[request.key].tokens
    with torch.inference_mode():
        logits = model.logits([*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
    behind = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() < 0.3, "not what the simulation would say"
    assert (behind == 0).float().mean() > 0.8


@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("scheme", ["SmoothQuant", "FP8"])
@pytest.mark.parametrize("cpu_step", ["auto", "pytorch"])
@pytest.mark.parametrize("settings", [{"max_tokens_per_step": 7}, {"num_blocks": 45, "policy": "max_utilization"}])
def test_logits_are_the_same_bits_however_they_come(scheme: str, cpu_step: str, settings: dict[str, Any]) -> None:
    """In chunks, beside others, and computed again after a preemption: what rounds inputs may differ in no bit."""
    prompts = [TOKENS[:60], TOKENS[5:65], TOKENS[:52]]

    def logits(prompts: list[list[int]], **settings: Any) -> list[np.ndarray]:
        requests = [ask(prompt, 12, generation_logits=True, ignore_eos=True) for prompt in prompts]
        engine = load(quantized(scheme).directory, prefix_reuse=False, cpu_step=cpu_step, **settings)
        outputs = run(engine, requests)
        assert bool(engine.stats.preemptions) == ("policy" in settings)
        return [np.stack(outputs[request.key].generation_logits or []) for request in requests]

    for prompt, together in zip(prompts, logits(prompts, **settings), strict=True):
        np.testing.assert_array_equal(logits([prompt], max_tokens_per_step=512)[0], together)


@pytest.mark.sweep(most=5)
@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_types_that_are_served(scheme: str, dtype: str) -> None:
    """In the types that are served, a checkpoint is no further from the original than in ModelOpt's simulation."""
    model, original = quantized(scheme), quantized("none").logits(TOKENS).log_softmax(-1)
    ours = Scorer(model.directory, dtype, device="cpu").logits(TOKENS)  # type: ignore[arg-type]
    lost, expected = (
        (original.exp() * (original - logits.log_softmax(-1))).sum(-1).mean() for logits in (ours, model.logits(TOKENS))
    )
    assert lost < 1.25 * expected + 0.005


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("FP8", "weight_scale"),
        ("FP8", "input_scale"),
        ("SmoothQuant", "pre_quant_scale"),
        ("W8A16", "weight_scale"),
        ("AWQ", "weight_scale"),
        ("W4A8", "weight_scale"),
        ("NVFP4", "weight_scale_2"),
    ],
)
def test_a_damaged_scale_shows(scheme: str, kind: str) -> None:
    """Four times as large, in one linear: the logits are others."""
    model = quantized(scheme)
    directory = copied(model.directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.1.mlp.down_proj.{kind}"] *= 4
    save_file(tensors, file)
    damaged = Scorer(directory, "float64", device="cpu").logits(TOKENS)
    assert (damaged - _score(model)).abs().max() > 0.05


@pytest.mark.parametrize(("scheme", "share"), [("FP8", 0.26), ("W8A16", 0.27), ("AWQ", 0.15), ("NVFP4", 0.16)])
def test_weights_stay_small_in_memory(scheme: str, share: float) -> None:
    """Of the linears in the layers, against float32."""
    linears = Scorer(quantized(scheme).directory, "float32", device="cpu").linears
    inside = [linear for name, linear in linears.items() if name != "lm_head"]
    held = sum(parameter.nbytes for linear in inside for parameter in linear.parameters())
    full = sum(linear.decode(torch.float32).nbytes for linear in inside if isinstance(linear, QuantizedLinear))
    assert held / full < share
