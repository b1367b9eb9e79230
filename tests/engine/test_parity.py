"""Token by token what transformers generates, in every way that the engine can come to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inflight.engine.request import Output, Request
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import (
    ARCHITECTURES,
    NOT_NATIVE,
    PROMPTS,
    RECURRENT,
    checkpoint,
    greedy,
    likeliest,
    reference,
)
from tests.engine.support.driving import ask, load, run
from tests.engine.support.native import CPU_STEPS, SETS, each_step

COUNT = 12
POLICIES = ["max_utilization", "guaranteed_no_evict"]


STEPS = {
    name: ["pytorch"] if name in NOT_NATIVE or not SETS else ["pytorch", SETS[number // 2 % len(SETS)]]
    for number, name in enumerate(ARCHITECTURES)
}
"""Each architecture is computed by PyTorch, and natively, where it is; sets take turns. ``test_alone`` has them all."""
each = pytest.mark.parametrize(
    ("name", "cpu_step"),
    [
        pytest.param(name, step, marks=[] if step == STEPS[name][-1] else pytest.mark.proof)
        for name in ARCHITECTURES
        for step in CPU_STEPS
        if step == "pytorch" or name not in NOT_NATIVE
    ],
)


def _mixed_batches() -> list[tuple[str, str, str]]:
    """Return both policies for each architecture, and ways to compute it in turn.

    ``test_hybrid`` has those with recurrent state, whose prompts cannot be cut anywhere.
    """
    cases = []
    for number, (name, steps) in enumerate(STEPS.items()):
        policies = POLICIES if number % 2 else POLICIES[::-1]
        cases += [(name, steps[0], policies[0]), (name, steps[-1], policies[1])] if name not in RECURRENT else []
    return cases


def _check(name: str, requests: list[Request], outputs: dict[int, Output]) -> None:
    made = [(request.prompt, outputs[request.key].tokens) for request in requests]
    for (prompt, tokens), expected in zip(made, likeliest(name, made), strict=True):
        assert len(tokens) == COUNT
        assert tokens == expected, f"prompt of {len(prompt)} tokens"


@each
def test_alone(name: str, cpu_step: str) -> None:
    request = ask(PROMPTS[0], COUNT)
    outputs = run(load(checkpoint(name), cpu_step=cpu_step), [request])
    assert outputs[request.key].tokens == greedy(name, tuple(request.prompt), COUNT)
    _check(name, [request], outputs)


@pytest.mark.skipif(not SETS, reason="the native step was not built")
@pytest.mark.parametrize("name", sorted(NOT_NATIVE))
def test_what_the_native_step_does_not_compute_is_refused_by_name(name: str) -> None:
    with pytest.raises(DeploymentError, match="engine.cpu_step is .*: the kernels have no "):
        load(checkpoint(name), cpu_step=SETS[0])


@pytest.mark.sweep(most=12)
@pytest.mark.parametrize(("name", "cpu_step", "policy"), _mixed_batches())
def test_in_a_mixed_batch_with_reuse_chunks_and_preemption(name: str, cpu_step: str, policy: str) -> None:
    """Twice: the second time most prefixes are cached."""
    engine = load(
        checkpoint(name), cpu_step=cpu_step, policy=policy, num_blocks=64, max_tokens_per_step=24, max_batch_size=32
    )
    preemptions = 0
    for turn in range(2):
        requests = [ask(prompt, COUNT) for prompt in PROMPTS]
        outputs = run(engine, requests)
        _check(name, requests, outputs)
        metrics = [output.metrics for output in outputs.values() if output.metrics]
        assert len(metrics) == len(PROMPTS)
        preemptions += sum(one.preemptions for one in metrics)
        assert any(one.cached_tokens for one in metrics), f"nothing was reused in turn {turn}"
    assert (preemptions > 0) == (policy == "max_utilization")


@pytest.mark.sweep
@each_step
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_without_reuse_and_with_one_token_per_step(name: str, cpu_step: str) -> None:
    engine = load(checkpoint(name), cpu_step=cpu_step, prefix_reuse=False, max_tokens_per_step=1)
    requests = [ask(prompt[:9], COUNT) for prompt in PROMPTS[:6]]
    _check(name, requests, run(engine, requests))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "cpu_step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_scores(name: str, cpu_step: str) -> None:
    """Log-probs and logits, with the prompt's prefix cached and its prefill chunked."""
    tokens = 96 if name in RECURRENT else 7
    engine = load(checkpoint(name), cpu_step=cpu_step, max_tokens_per_step=tokens)
    prompt = PROMPTS[-1]
    run(engine, [ask(prompt, 2)])
    request = ask(
        prompt, COUNT, log_probs=True, top_log_probs=4, context_logits=True, generation_logits=True, ignore_eos=True
    )
    output = run(engine, [request])[request.key]
    with torch.inference_mode():
        logits = reference(name)(torch.tensor([[*prompt, *output.tokens]])).logits[0].float()
    made = logits[len(prompt) - 1 : -1]
    expected = made.log_softmax(-1)
    assert output.context_logits is not None
    torch.testing.assert_close(torch.tensor(output.context_logits), logits[: len(prompt)], atol=2e-3, rtol=1e-4)
    assert output.generation_logits is not None
    generated = torch.stack([torch.tensor(row) for row in output.generation_logits])
    torch.testing.assert_close(generated, made, atol=2e-3, rtol=1e-4)
    chosen = expected.gather(-1, torch.tensor(output.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), chosen, atol=1e-3, rtol=1e-4)
    assert output.top_log_probs is not None
    for row, values in zip(output.top_log_probs, expected.topk(4, -1).values, strict=True):
        torch.testing.assert_close(torch.tensor([value for _, value in row]), values, atol=1e-3, rtol=1e-4)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    request = ask(PROMPTS[1], COUNT)
    _check("llama", [request], run(load(tmp_path), [request]))


def test_long_factors_where_long_sequences_are_served(tmp_path: Path) -> None:
    """longrope: transformers takes the long factors for a prompt beyond the original length; the engine for all."""
    name = "phi3, longrope"
    config = reference(name).config
    config.rope_parameters["original_max_position_embeddings"] = 16
    config.original_max_position_embeddings = 16
    reference(name).save_pretrained(tmp_path)
    import transformers

    model = transformers.Phi3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    prompt = PROMPTS[-4][:30]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    request = ask(prompt, 1, generation_logits=True)
    output = run(load(tmp_path), [request])[request.key]
    reference.cache_clear()
    assert output.generation_logits is not None
    torch.testing.assert_close(torch.tensor(output.generation_logits[0]), logits, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16(name: str) -> None:
    """Close to float32: the likeliest token is among the reference's first few at each step."""
    request = ask(PROMPTS[2], COUNT)
    output = run(load(checkpoint(name), dtype="bfloat16"), [request])[request.key]
    with torch.inference_mode():
        logits = reference(name)(torch.tensor([[*PROMPTS[2], *output.tokens]])).logits[0, len(PROMPTS[2]) - 1 : -1]
    ranks = (logits > logits.gather(-1, torch.tensor(output.tokens)[:, None])).sum(-1)
    assert ranks.max() < 5
