"""Log-probs and logits within 1e-4 of transformers', alone and in a crowd; and that the checkpoints can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from inflight.engine.checkpoint import load_config
from inflight.engine.request import Output, Request
from tests.engine.support.checkpoints import ARCHITECTURES, PROMPTS, RECURRENT, VOCAB, checkpoint, greedy, reference
from tests.engine.support.driving import ask, load, run

COUNT, CLOSE = 12, {"atol": 1e-4, "rtol": 1e-5}
SHARED = PROMPTS[-4]
ALL = {"log_probs": True, "top_log_probs": 5, "context_logits": True, "generation_logits": True}
each = pytest.mark.parametrize("name", ARCHITECTURES)
each_in_short_steps = pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in RECURRENT])
"""Recurrent layers take prompts by 64 tokens; ``test_hybrid`` is about those."""


def _check_scores(name: str, request: Request, output: Output) -> None:
    prompt, tokens = request.prompt, output.tokens
    with torch.inference_mode():
        logits = reference(name)(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    made = logits[len(prompt) - 1 : -1]
    assert len(tokens) == COUNT
    assert tokens == made.argmax(-1).tolist(), "not what transformers generates"
    assert output.generation_logits is not None
    torch.testing.assert_close(torch.tensor([row.tolist() for row in output.generation_logits]), made, **CLOSE)
    if request.sampling.context_logits:
        assert output.context_logits is not None
        torch.testing.assert_close(torch.tensor(output.context_logits), logits[: len(prompt)], **CLOSE)
    expected = made.log_softmax(-1)
    chosen = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), chosen, **CLOSE)
    _check_top(output, expected)


def _check_top(output: Output, expected: torch.Tensor) -> None:
    assert output.top_log_probs is not None
    best = torch.tensor([[value for _, value in row] for row in output.top_log_probs])
    torch.testing.assert_close(best, expected.topk(5, -1).values, **CLOSE)
    ids = torch.tensor([[token for token, _ in row] for row in output.top_log_probs])
    torch.testing.assert_close(expected.gather(-1, ids), best, **CLOSE)


@pytest.mark.sweep(most=8)
@each
def test_the_checkpoint_can_tell(name: str) -> None:
    """No parameter but is different from its neighbours, and no prompt leads to the same few tokens."""
    for which, parameter in reference(name).get_decoder().named_parameters():
        assert parameter.detach().std() > 0.01, f"{which} is constant: an engine that ignored it would pass"
    ends = [greedy(name, tuple(prompt), COUNT) for prompt in PROMPTS[:12]]
    assert sum(len(set(end)) for end in ends) > 4 * len(ends)
    assert len({tuple(end) for end in ends}) > 10


@pytest.mark.parametrize("name", ["gemma3", "gemma3, tied, linear", "qwen2, windows"])
def test_both_kinds_of_layers_occur(name: str) -> None:
    config = load_config(checkpoint(name))
    assert set(config.windows) == {None, 8}
    assert max(map(len, PROMPTS)) > 8


@pytest.mark.sweep(most=4)
@each_in_short_steps
def test_after_a_cached_prefix_in_chunks(name: str) -> None:
    """Context logits are whole although the prefix is cached; without them the cache is used, to the same end."""
    engine = load(checkpoint(name), max_tokens_per_step=7)
    prompt = SHARED
    run(engine, [ask(prompt, 2)])
    whole = ask(prompt, COUNT, **ALL)
    output = run(engine, [whole])[whole.key]
    assert output.metrics is not None
    assert not output.metrics.cached_tokens
    _check_scores(name, whole, output)
    quick = ask(prompt, COUNT, **(ALL | {"context_logits": False}))
    output = run(engine, [quick])[quick.key]
    assert output.metrics is not None
    assert output.metrics.cached_tokens > 30
    _check_scores(name, quick, output)


@pytest.mark.sweep(most=4)
@each_in_short_steps
def test_in_a_crowd_with_preemption(name: str) -> None:
    """All scores of all requests of a batch that is preempted again and again."""
    engine = load(checkpoint(name), policy="max_utilization", num_blocks=40, max_tokens_per_step=20)
    requests = [
        ask(prompt, COUNT, priority=index % 3, **(ALL | {"context_logits": index % 2 == 0}))
        for index, prompt in enumerate(PROMPTS[10:22])
    ]
    outputs = run(engine, requests)
    for request in requests:
        _check_scores(name, request, outputs[request.key])
    preempted = [out.metrics.preemptions for out in outputs.values() if out.metrics]
    assert sum(preempted) > 0


def test_context_logits_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    """What was computed before is forgotten, and computed again: once, and whole."""
    engine = load(checkpoint("llama"), policy="max_utilization", num_blocks=24, max_tokens_per_step=8)
    low = ask(range(1, 61), COUNT, priority=-1, **ALL)
    growing = [ask([100 + index], 30) for index in range(3)]
    for request in growing:
        engine.submit(request)
    engine.step()
    outputs = run(engine, [low])
    metrics = outputs[low.key].metrics
    assert metrics is not None
    assert metrics.preemptions > 0
    _check_scores("llama", low, outputs[low.key])


@pytest.mark.parametrize("served", [60, 512])
def test_longrope_scales_by_the_served_length(served: int, tmp_path: Path) -> None:
    """Short factors, scaled, where no served sequence is beyond the original length; else the long ones for all."""
    name = "phi3, longrope"
    source = transformers.AutoConfig.from_pretrained(checkpoint(name))
    source.original_max_position_embeddings = 64
    source.rope_parameters["original_max_position_embeddings"] = 64
    directory = tmp_path / "model"
    reference(name).save_pretrained(directory)
    source.save_pretrained(directory)
    rope = source.rope_parameters
    if served > 64:
        rope["short_factor"] = rope["long_factor"]  # transformers goes by the prompt's length
    model = transformers.Phi3ForCausalLM.from_pretrained(directory, config=source, attn_implementation="eager").eval()
    request = ask(SHARED, 1, generation_logits=True)
    output = run(load(directory, max_sequence_length=served), [request])[request.key]
    with torch.inference_mode():
        expected = model(torch.tensor([request.prompt])).logits[0, -1:]
    assert output.generation_logits is not None
    torch.testing.assert_close(torch.tensor(output.generation_logits[0])[None], expected, **CLOSE)


@pytest.mark.sweep(most=3)
@each_in_short_steps
def test_bfloat16_in_a_crowd(name: str) -> None:
    """Runs in every architecture, in both policies of the batch; tokens are of the vocabulary, scores are numbers."""
    engine = load(checkpoint(name), dtype="bfloat16", num_blocks=48, max_tokens_per_step=20, policy="max_utilization")
    requests = [ask(prompt, 6, log_probs=True) for prompt in PROMPTS[14:26]]
    for output in run(engine, requests).values():
        assert len(output.tokens) == len(output.log_probs or ()) == 6
        assert all(0 <= token < VOCAB for token in output.tokens)
        assert torch.tensor(output.log_probs).isfinite().all()
