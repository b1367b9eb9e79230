"""Checkpoints in the formats that others publish: logits and tokens are those of transformers with decoded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.engine.quant.linears import QuantizedLinear
from inflight.engine.scoring import Scorer
from tests.engine.support.checkpoints import TOKENS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.native import SETS
from tests.engine.support.packed_models import FORMATS, Published, published

each = pytest.mark.parametrize("name", FORMATS)


def _check(model: Published) -> Scorer:
    scorer = Scorer(model.directory, "float64", device="cpu")
    torch.testing.assert_close(scorer.logits(TOKENS), model.logits(TOKENS), atol=1e-5, rtol=1e-5)
    return scorer


@pytest.mark.sweep
@each
def test_logits(name: str) -> None:
    scorer = _check(published(name))
    held = {module for module, linear in scorer.linears.items() if isinstance(linear, QuantizedLinear)}
    assert "lm_head" not in held
    assert len(held) == (2 * 6 if name == "mixed" else 2 * 7)


@pytest.mark.sweep
@each
def test_greedy_tokens(name: str) -> None:
    """In float32, by whichever step computes them."""
    model, engine = published(name), load(published(name).directory)
    requests = [ask(TOKENS[start : start + 20], 12) for start in (0, 31, 60)]
    outputs = run(engine, requests)
    for request in requests:
        tokens = outputs[request.key].tokens
        logits = model.logits([*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert behind.max() < 0.02, "not what transformers would say"


@pytest.mark.parametrize(
    ("name", "kind", "special"),
    [
        ("gptq", "Qwen2", {"tie_word_embeddings": True}),
        ("awq", "Phi3", {}),
        ("gptq_v2, ordered", "Phi3", {}),
        ("fp8 by blocks", "Qwen3", {"head_dim": 32}),
        ("int8, inputs", "Phi3", {}),
    ],
)
def test_biases_tied_embeddings_and_checkpoints_that_are_fused_themselves(
    name: str, kind: str, special: dict[str, Any]
) -> None:
    _check(published(name, kind, **special))


def test_parts_of_one_projection_may_differ() -> None:
    linears = _check(published("mixed")).linears
    kinds = [type(linears[f"model.layers.1.self_attn.{part}_proj"]).__name__ for part in "qkv"]
    assert kinds == ["Fp8BlockLinear", "Int4WeightLinear", "Linear"]


@each
def test_weights_stay_packed_in_memory(name: str) -> None:
    linears = Scorer(published(name).directory, "float32", device="cpu").linears.values()
    held = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    weights = sum(linear.weight.numel() * linear.per_element for linear in held)
    four_bits = any(linear.per_element == 2 for linear in held)
    # Groups of 32 have a float32 and a byte, and each input a group; those of real models are longer.
    assert sum(linear.weight_bytes for linear in held) < weights * (0.5 + 5 / 32 + 4 / 32 if four_bits else 1.3)


@pytest.mark.parametrize("name", ["int8, inputs", "fp8, inputs", "awq"])
def test_tokens_do_not_depend_on_the_batch(name: str) -> None:
    prompts = [TOKENS[:40], TOKENS[5:45], TOKENS[:31]]

    def tokens(prompts: list[list[int]]) -> list[list[int]]:
        requests = [ask(prompt, 10, ignore_eos=True) for prompt in prompts]
        outputs = run(load(published(name).directory, prefix_reuse=False, max_tokens_per_step=16), requests)
        return [outputs[request.key].tokens for request in requests]

    assert tokens(prompts) == [tokens([prompt])[0] for prompt in prompts]


BY_PYTORCH = {"gptq_v2, ordered", "nvfp4", "mixed"}
"""What the native step does not multiply."""


@pytest.mark.skipif(not SETS, reason="no kernels run here")
@each
def test_which_step_computes_them(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(published(name).directory)
    assert ("PyTorch computes the steps" in caplog.text) == (name in BY_PYTORCH)


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_long_groups_are_several_short_ones_in_the_native_step() -> None:
    """A row of 64 inputs with one scale: logits are those of PyTorch, but for inputs of 16 bits."""
    model = published("gptq, one group")
    prompt, logits = TOKENS[:40], list[np.ndarray]()
    for cpu_step in ("auto", "pytorch"):
        request = ask(prompt, 4, generation_logits=True, ignore_eos=True)
        output = run(load(model.directory, cpu_step=cpu_step), [request])[request.key]
        logits.append(np.stack(output.generation_logits or []))
    np.testing.assert_allclose(*logits, atol=1e-3)
    assert not np.array_equal(*logits)
