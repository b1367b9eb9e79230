"""Beam search in the engine: the beams of transformers, whatever else runs and however the engine goes about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.engine.engine import Engine
from inflight.engine.request import Output, Request
from inflight.engine.scheduler import max_blocks
from tests.engine.support.checkpoints import checkpoint, greedy, reference
from tests.engine.support.driving import ask, load, run
from tests.engine.support.searching import assert_found, beams_of, close, some_ends
from tests.engine.support.speculating import speculating

PROMPT = [5, 17, 80, 3, 44, 8, 120]
PROMPTS = [PROMPT, [9, 9, 200, 41], [*range(30, 61)]]


def search(name: str, prompt: list[int], width: int, max_tokens: int = 9, **more: Any) -> Request:
    """Return a request for beams, some of which end early."""
    return ask(prompt, max_tokens, beam_width=width, end_ids=some_ends(name, prompt, 10), **more)


def mixture(name: str = "llama") -> list[Request]:
    """Return searches and ordinary requests, in turns."""
    return [one for prompt in PROMPTS for one in (search(name, prompt, 2), ask(prompt, 12), search(name, prompt, 4))]


def check(name: str, requests: list[Request], outputs: dict[int, Output]) -> None:
    for request in requests:
        output = outputs[request.key]
        if request.sampling.beam_width > 1:
            assert_found(name, request, output)
        else:
            assert output.tokens == greedy(name, tuple(request.prompt), request.sampling.max_tokens)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2, tied", "gemma3"])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_beams_are_those_of_transformers(name: str, early_stopping: bool) -> None:
    requests = [
        search(name, PROMPT, width, length_penalty=penalty, early_stopping=early_stopping)
        for width, penalty in ((2, 0.0), (3, 1.0), (5, 2.0))
    ]
    check(name, requests, run(load(checkpoint(name)), requests))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_step": 3},
        {"max_tokens_per_step": 16, "block_size": 16},
        {"prefix_reuse": False},
        {"max_batch_size": 5},
        {"mode": "static", "max_batch_size": 6},
        {"policy": "max_utilization", "block_size": 1},
    ],
    ids=str,
)
def test_beams_do_not_depend_on_batch_chunks_or_reuse(settings: dict[str, Any]) -> None:
    engine = load(checkpoint("llama"), **settings)
    for _ in range(2):  # the second time most of it is known already
        requests = mixture()
        check("llama", requests, run(engine, requests))


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_beams_survive_preemption(prefix_reuse: bool) -> None:
    settings: dict[str, Any] = {"policy": "max_utilization", "num_blocks": 26, "prefix_reuse": prefix_reuse}
    engine = load(checkpoint("llama"), max_tokens_per_step=40, **settings)
    requests = [search("llama", prompt, 4) for prompt in PROMPTS * 2]
    check("llama", requests, run(engine, requests))
    assert engine.stats.preemptions > 0


def test_with_reservations_no_search_is_ever_preempted() -> None:
    engine = load(checkpoint("llama"), num_blocks=40)
    requests = mixture()
    check("llama", requests, run(engine, requests))
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize("method", ["ngram", "draft_target"])
def test_beams_beside_speculation(method: str) -> None:
    requests = mixture()
    check("llama", requests, run(speculating(method=method), requests))


def test_a_search_takes_as_many_places_as_it_has_beams() -> None:
    engine = load(checkpoint("llama"), max_batch_size=6)
    requests = [search("llama", prompt, 4) for prompt in PROMPTS]
    for request in requests:
        engine.submit(request)
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.stats.state().step.sequences)
        assert sum(sequence.batch_rows for sequence in engine._scheduler.running) <= 6
    assert most == 4


def test_beams_share_the_blocks_of_their_prompt() -> None:
    engine, prompt = load(checkpoint("llama")), [*range(1, 101)]
    engine.submit(ask(prompt, 6, beam_width=4))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.stats.state().kv_blocks_used)
    assert 25 < most <= 25 + 4 * 2  # the last 6 tokens lie in two blocks


def test_what_is_banned_is_renormalized() -> None:
    request = ask(
        PROMPT,
        8,
        beam_width=3,
        min_tokens=4,
        end_ids=some_ends("llama", PROMPT, 30),
        bad_sequences=((71,), (206, 129)),
        logit_bias={11: 2.5, 12: -1.5},
    )
    output = run(load(checkpoint("llama")), [request])[request.key]
    found = beams_of(
        "llama",
        PROMPT,
        request.sampling,
        min_new_tokens=4,
        bad_words_ids=[[71], [206, 129]],
        sequence_bias=[[[11], 2.5], [[12], -1.5]],
        renormalize_logits=True,
    )
    assert output.beams is not None
    assert close(output.beams, found)
    plain = ask(PROMPT, 8, beam_width=3, end_ids=request.sampling.end_ids)
    assert not close(output.beams, beams_of("llama", PROMPT, plain.sampling))


def test_penalties_are_of_each_beams_own_tokens() -> None:
    request = ask(PROMPT, 8, beam_width=3, repetition_penalty=1.7)
    model = reference("llama")

    def penalize(_: object, arguments: tuple[()], named: dict[str, Any], output: Any) -> Any:
        rows, ids = output.logits[:, -1], named["input_ids"]
        values = rows.gather(1, ids)
        rows.scatter_(1, ids, torch.where(values > 0, values / 1.7, values * 1.7))
        return output

    hook = model.register_forward_hook(penalize, with_kwargs=True)
    try:
        found = beams_of("llama", PROMPT, request.sampling, use_cache=False)
    finally:
        hook.remove()
    output = run(load(checkpoint("llama")), [request])[request.key]
    assert output.beams is not None
    assert close(output.beams, found)
    assert not close(output.beams, beams_of("llama", PROMPT, request.sampling))


def test_log_probs_and_context_logits_go_with_beams() -> None:
    request = search("llama", PROMPT, 3, context_logits=True)
    engine = load(checkpoint("llama"), max_tokens_per_step=3)
    output = run(engine, [request])[request.key]
    assert output.beams is not None
    with torch.inference_mode():
        expected = reference("llama")(torch.tensor([PROMPT])).logits[0]
        torch.testing.assert_close(torch.tensor(output.context_logits), expected, rtol=1e-4, atol=1e-4)
        for beam in output.beams:
            tokens = [*PROMPT, *beam.tokens]
            rows = reference("llama")(torch.tensor([tokens])).logits[0].log_softmax(-1)[len(PROMPT) - 1 :]
            own = [float(row[token]) for row, token in zip(rows, beam.tokens, strict=False)]
            assert list(beam.log_probs) == pytest.approx(own, abs=1e-4)
            assert beam.cum_log_prob <= sum(own) + 1e-4


def test_counts_are_of_all_beams() -> None:
    engine: Engine = load(checkpoint("llama"))
    request = search("llama", PROMPT, 3)
    output = run(engine, [request])[request.key]
    assert output.metrics is not None
    assert output.metrics.generated_tokens == output.num_tokens == engine.stats.generated_tokens
    assert output.metrics.first_token_ns <= output.metrics.last_token_ns
    assert engine.stats.time_to_first_token.cumulative[-1] == 1
    assert engine.stats.output_token_len["total_output_tokens"].sum == output.num_tokens
    assert output.metrics.total_blocks == output.metrics.new_blocks > 0


def test_stop_sequences_end_beams() -> None:
    stop = (206, 71)
    request = ask(PROMPT, 8, beam_width=3, stop_sequences=(stop,))

    def stopped(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.tensor([tuple(row[len(PROMPT) :][-2:].tolist()) == stop for row in ids])

    found = beams_of("llama", PROMPT, request.sampling, stopping_criteria=[stopped])
    output = run(load(checkpoint("llama")), [request])[request.key]
    assert output.beams is not None
    assert stop in [beam.tokens for beam in output.beams]
    assert close(output.beams, found)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_blocks_of_a_quantized_cache_are_copied_whole(dtype: str) -> None:
    found = []
    for block_size in (1, 4, 128):  # nothing is copied; much; only the prompt's block
        engine = load(checkpoint("llama"), kv_cache_dtype=dtype, block_size=block_size, num_blocks=1024 // block_size)
        request = ask(PROMPT, 8, beam_width=4)
        output = run(engine, [request])[request.key]
        assert output.beams is not None
        found.append([beam.tokens for beam in output.beams])
    assert found[0] == found[1] == found[2]


def test_a_bias_without_bounds_is_followed() -> None:
    request = ask(PROMPT, 4, beam_width=2, logit_bias={7: float("inf")})
    [output] = run(load(checkpoint("llama")), [request]).values()
    assert output.beams is not None
    assert output.beams[0].tokens == (7, 7, 7, 7)
    assert output.beams[0].score == 0.0


def test_the_blocks_of_a_search_count_as_new_each_time_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint("llama"), prefix_reuse=False)
    taken, take = [], engine._cache._take
    monkeypatch.setattr(engine._cache, "_take", lambda table: taken.append(take(table)) or taken[-1])
    request = search("llama", PROMPT, 4, max_tokens=24)
    metrics = run(engine, [request])[request.key].metrics
    assert metrics is not None
    assert metrics.new_blocks == metrics.total_blocks == len(taken) > 10


def test_what_a_preempted_search_computes_again_is_not_counted_as_decoded() -> None:
    decoded, recomputed = [], []
    for blocks in (256, 26):
        engine = load(
            checkpoint("llama"), policy="max_utilization", num_blocks=blocks, prefix_reuse=False, max_tokens_per_step=40
        )
        run(engine, [search("llama", prompt, 4) for prompt in PROMPTS * 2])
        decoded.append(engine.stats.step_tokens["decode"])
        recomputed.append(engine.stats.recomputed_tokens)
    assert recomputed[0] == 0 < recomputed[1]
    assert decoded[1] <= decoded[0]


def test_what_a_search_has_reserved_is_enough_for_the_copies_of_its_shared_blocks() -> None:
    """In a cache of exactly the blocks that it may need, beside a request that would take what is not reserved."""
    prompt = PROMPT[:6]
    searched, other = ask(prompt, 6, beam_width=3, ignore_eos=True), ask([*range(17)], 3, ignore_eos=True)
    engine = load(checkpoint("llama"), num_blocks=max_blocks(searched, len(prompt) + 6, 4), prefix_reuse=False)
    run(engine, [searched, other])
    assert engine.stats.preemptions == 0
