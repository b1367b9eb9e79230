"""Verification of drafts: rejected ones leave no trace, ends within accepted ones are ends, faults stay small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inflight.engine.chunk import Chunk
from inflight.engine.engine import Engine
from inflight.engine.request import FinishReason, Request
from inflight.errors import DeploymentError, EngineFailure
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import PROMPTS, VOCAB, checkpoint, greedy, reference
from tests.engine.support.driving import ask, load, run
from tests.engine.support.speculating import alike, foretold, shown, speculating
from tests.support.tokenizers import make_tokenizer

PROMPT = PROMPTS[0]


@pytest.mark.parametrize("wrong_at", [(), (4, 5), (3, 4, 5, 11), range(40)], ids=str)
def test_drafts_are_accepted_up_to_the_first_wrong_one(wrong_at: tuple[int, ...]) -> None:
    requests = [ask(prompt, 20) for prompt in PROMPTS[:3]]
    outputs = run(foretold(requests, frozenset(wrong_at)), requests)
    for request in requests:
        metrics = outputs[request.key].metrics
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 20)
        assert metrics is not None
        steps = metrics.steps - metrics.prefill_steps
        assert metrics.accepted_draft_tokens == 19 - steps, "a step makes one token more than were accepted"
    assert (steps == 4) == (not wrong_at)


def _endings() -> list[dict[str, Any]]:
    made = greedy("llama", tuple(PROMPT), 20)
    return [
        {"end_ids": frozenset({made[9]})},
        {"end_ids": frozenset({made[9]}), "min_tokens": 14},
        {"stop_sequences": ((made[7], made[8]),)},
        {"stop_sequences": ((made[7], made[8]),), "min_tokens": 12},
        {"max_tokens": 9},
        {"end_ids": frozenset({made[1]})},
    ]


@pytest.mark.parametrize("ending", range(6))
def test_an_end_within_accepted_drafts(ending: int) -> None:
    options = {"max_tokens": 20} | _endings()[ending]
    count = options.pop("max_tokens")
    request = ask(PROMPT, count, **options)
    engine = foretold([request])
    output = run(engine, [request])[request.key]
    alone = run(load(checkpoint("llama")), [ask(PROMPT, count, **options)]).popitem()[1]
    assert shown(output) == shown(alone)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.generated_tokens == len(output.tokens)
    again = ask([*PROMPT, *output.tokens, 5], 6)
    expected = greedy("llama", tuple(again.prompt), 6)
    engine._speculator._drafter = None
    assert run(engine, [again])[again.key].tokens == expected, "what the cache keeps of it is right"


def test_a_stop_string_within_accepted_drafts() -> None:
    tokenizer = make_tokenizer("byte level")
    made = greedy("llama", tuple(PROMPT), 20)
    whole = tokenizer.decode(made)
    stop = whole[len(whole) // 2 :][:2]

    def outcome(engine: Engine, request: Request) -> tuple[Any, ...]:
        engine._tokenizer = tokenizer
        return shown(run(engine, [request])[request.key])

    requests = [ask(PROMPT, 20, stop_strings=(stop,)) for _ in range(2)]
    speculated = outcome(foretold(requests), requests[0])
    assert speculated == outcome(load(checkpoint("llama")), requests[1])
    assert speculated[1] is FinishReason.STOP


def test_rejected_drafts_are_not_found_by_their_prefix() -> None:
    request = ask(PROMPT, 30)
    engine = foretold([request], frozenset(range(2, 30)), max_draft_tokens=12)
    made = run(engine, [request])[request.key].tokens
    kept = [*PROMPT, *made]
    wrong = [*kept[: len(PROMPT) + 2], *((token + 1) % VOCAB for token in made[2:14])]
    engine._speculator._drafter = None
    other = ask(wrong, 5)
    output = run(engine, [other])[other.key]
    assert output.metrics is not None
    assert output.metrics.cached_tokens <= len(PROMPT) + 2
    assert output.tokens == greedy("llama", tuple(wrong), 5)


def test_drafts_keep_to_the_budget_and_to_the_reserved_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as the requests' longest lengths need, and not one more."""
    requests = [ask(PROMPTS[1][:9], 11) for _ in range(3)]
    engine = foretold(requests, frozenset({5, 6}), num_blocks=15, max_tokens_per_step=13, prefix_reuse=False)
    sizes, real = [], engine._runner.run

    def watched(chunks: list[Chunk], copies: Any) -> Any:
        sizes.append(sum(chunk.size for chunk in chunks))
        assert all(chunk.start + chunk.size < chunk.sequence.longest for chunk in chunks if chunk.drafts)
        return real(chunks, copies)

    monkeypatch.setattr(engine._runner, "run", watched)
    outputs = run(engine, requests)
    assert max(sizes) <= 13
    assert engine.stats.preemptions == 0
    assert engine.stats.accepted_draft_tokens > 0
    for request in requests:
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 11)


def test_requests_go_on_where_drafting_fails(caplog: pytest.LogCaptureFixture) -> None:
    requests = [ask(prompt, 12) for prompt in PROMPTS[:4]]
    engine = foretold(requests[:2])  # of the others it knows nothing: a KeyError
    outputs = run(engine, requests)
    for request in requests:
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 12)
    assert len([record for record in caplog.records if "speculation is off" in record.message]) == 1


def test_logits_of_a_draft_that_are_not_numbers_end_the_request_behind_what_was_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = ask(PROMPT, 12)
    engine = foretold([request])
    engine.submit(request)
    engine.step()
    real = engine._runner.run

    def broken(chunks: Any, copies: Any) -> Any:
        logits, context = real(chunks, copies)
        logits = logits.clone()
        logits[2] = torch.nan
        return logits, context

    monkeypatch.setattr(engine._runner, "run", broken)
    [output] = engine.step()
    assert output.tokens == greedy("llama", tuple(PROMPT), 12)[1:3]
    assert isinstance(output.error, EngineFailure)
    assert not engine.busy


def test_a_failed_engine_begins_anew() -> None:
    engine = speculating(noise=0.05)
    for prompt in PROMPTS[:4]:
        engine.submit(ask(prompt, 20))
    for _ in range(4):
        engine.step()
    engine.fail_all(EngineFailure("a fault"))
    request = ask(PROMPT, 20)
    assert run(engine, [request])[request.key].tokens == greedy("llama", tuple(PROMPT), 20)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**(reference("llama").config.to_dict() | {"vocab_size": VOCAB + 8}))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    settings = SpeculationSettings(method="draft_target", draft_model=tmp_path)
    with pytest.raises(DeploymentError, match=f"vocabulary of {VOCAB + 8} tokens, the model one of {VOCAB}"):
        load(checkpoint("llama"), speculation=settings)


def test_a_draft_model_that_reaches_less_far_drafts_as_far_as_it_does(tmp_path: Path) -> None:
    """Its longest sequence is 40 tokens: beyond it there are no drafts, and the target goes on."""
    short = alike("llama", 0.0)
    (tmp_path / "model.safetensors").write_bytes((short / "model.safetensors").read_bytes())
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = SpeculationSettings(method="draft_target", draft_model=tmp_path, adaptive=False)
    engine = load(checkpoint("llama"), speculation=settings)
    prompt = PROMPTS[1][:20]
    requests = [ask(prompt, 40), ask([*prompt, *range(1, 30)], 8)]
    outputs = run(engine, requests)
    for request in requests:
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), request.sampling.max_tokens)
    assert 10 < engine.stats.accepted_draft_tokens < 21


def test_drafts_are_given_up_where_the_draft_cache_is_full() -> None:
    """Half the target's blocks for the same sequences: some draft and some do not, and all is right."""
    engine = speculating(noise=0.0)
    drafter: Any = engine._speculator._drafter
    drafter._config = drafter._config.__class__(**(vars(drafter._config) | {"num_blocks": 20}))
    drafter.reset()
    requests = [ask(prompt, 20) for prompt in PROMPTS[:8]]
    outputs = run(engine, requests)
    for request in requests:
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 20)
    drafted = [output.metrics.draft_tokens for output in outputs.values() if output.metrics]
    assert min(drafted) < max(drafted) == 15
