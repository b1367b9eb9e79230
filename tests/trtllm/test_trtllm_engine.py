"""The engine on the fake: the same tokens as the portable engine, each end for its reason, and its faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.clock import now_ns
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.replay import ReplayEngine
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import DeadlineExceeded, InvalidRequest, UnsupportedFeature
from inflight.sampling import Guide
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.engine import TrtLlmEngine
from tests.support.waiting import wait_until
from tests.trtllm.support.driving import ask, deployment, run

Start = Callable[..., TrtLlmEngine]
QUESTIONS = [f"What is {what}?" for what in ("a paged KV cache", "TTFT", "FP8", "in-flight batching", "a prefix cache")]


@pytest.fixture(scope="module")
def portable(tokenizer: Tokenizer) -> Engine:
    return Engine.load(EngineConfig.of(deployment()), tokenizer)


def _told(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.finish_reason, output.text_limit, output.error


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("sampler", ["trtllm", "torch"])
def test_trtllm_engine_tokens_are_the_portable_engines(
    start: Start, tokenizer: Tokenizer, portable: Engine, sampler: str
) -> None:
    prompts = tokenizer.encode_batch([text for text in QUESTIONS for _ in range(4)], add_special_tokens=True)
    settings: dict[str, Any] = {"max_tokens": 48, "end_ids": tokenizer.config.end_ids}

    def requests() -> list[Request]:
        made = [
            ask(prompt, **settings, stop_strings=(" and", ". ")[: index % 3]) for index, prompt in enumerate(prompts)
        ]
        if sampler == "trtllm":
            drawn = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}
            made += [ask(prompt, **settings, **drawn, seed=seed) for seed, prompt in enumerate(prompts)]
            made += [
                ask(prompt, **settings, bad_sequences=((prompt[-1],),), logit_bias={9: 3.0}) for prompt in prompts[::4]
            ]
        return made

    engine = start(deployment(tensorrt_llm={"sampler": sampler}))
    theirs, ours = run(engine, *requests()), run(portable, *requests())
    assert [_told(output) for output in theirs] == [_told(output) for output in ours]
    assert {output.finish_reason for output in ours} == {FinishReason.STOP, FinishReason.LENGTH}


def test_trtllm_engine_log_probs_and_logits(start: Start, portable: Engine, prompt: list[int]) -> None:
    def request() -> Request:
        return ask(prompt, max_tokens=6, log_probs=True, top_log_probs=3, context_logits=True, generation_logits=True)

    engine = start(deployment(tensorrt_llm={"sampler": "torch"}))
    [theirs], [ours] = run(engine, request()), run(portable, request())
    assert theirs.tokens == ours.tokens
    assert theirs.log_probs == pytest.approx(ours.log_probs, abs=1e-4)
    assert theirs.top_log_probs is not None
    assert ours.top_log_probs is not None
    assert [[token for token, _ in row] for row in theirs.top_log_probs] == [
        [token for token, _ in row] for row in ours.top_log_probs
    ]
    assert theirs.context_logits is not None
    np.testing.assert_allclose(theirs.context_logits, ours.context_logits, atol=1e-3)
    np.testing.assert_allclose(
        np.stack(theirs.generation_logits or []), np.stack(ours.generation_logits or []), atol=1e-3
    )


def test_metrics_of_a_request_and_reuse(start: Start, tokenizer: Tokenizer) -> None:
    engine = start(deployment())
    prompt = tokenizer.encode_batch(["word " * 60], add_special_tokens=True)[0]
    run(engine, ask(prompt))
    [output] = run(engine, ask(prompt))
    metrics = output.metrics
    assert metrics is not None
    assert metrics.arrival_ns <= metrics.first_scheduled_ns <= metrics.first_token_ns < metrics.last_token_ns
    assert metrics.reused_blocks >= 1
    assert metrics.total_blocks == metrics.new_blocks + metrics.reused_blocks
    assert metrics.cached_tokens >= 32
    assert metrics.generated_tokens == 16
    # TensorRT-LLM gives the statistics of an iteration to who waits for them, and a busy machine may wait too late.
    assert wait_until(lambda: run(engine, ask(prompt)) and (engine.stats.iterations or 0) > 16)
    assert engine.stats.state().kv_blocks_max > 0
    assert wait_until(lambda: (engine.step(), engine.stats.state().active)[1] == 0)
    assert engine.stats.state().kv_blocks_used == 0


def test_trtllm_engine_priorities_deadlines_and_cancels(
    start: Start, prompt: list[int], set_fault: Callable[..., None]
) -> None:
    set_fault(step_delay_s=0.005)
    engine = start(deployment(batching={"max_batch_size": 1}))
    first, late, hopeless = (ask(prompt, max_tokens=40) for _ in range(3))
    urgent = ask(prompt, max_tokens=1000, ignore_eos=True)
    urgent.priority = 5
    hopeless.deadline_ns = now_ns() + 50_000_000
    order = []
    engine.submit(first)
    engine.step()
    for request in (late, urgent, hopeless):
        engine.submit(request)
    ended: dict[int, Output] = {}
    while engine.busy:
        for output in engine.step():
            order += [output.key] if output.key not in order else []
            if output.finished:
                ended[output.key] = output
        if urgent.key in order and first.key in ended:
            engine.cancel(urgent.key)
    assert [key for key in order if key != hopeless.key] == [first.key, urgent.key, late.key]
    assert isinstance(ended[hopeless.key].error, DeadlineExceeded)
    assert ended[urgent.key].finish_reason is FinishReason.CANCELLED
    assert ended[late.key].finish_reason is FinishReason.LENGTH


def test_trtllm_engine_fairness_client(start: Start, prompt: list[int]) -> None:
    engine = start(deployment(batching={"max_batch_size": 1, "fairness": "client"}))
    flood = [ask(prompt, max_tokens=8, ignore_eos=True) for _ in range(4)]
    quiet = ask(prompt, max_tokens=8, ignore_eos=True)
    for request in flood:
        request.client_id = "flood"
    quiet.client_id = "quiet"
    for request in (*flood, quiet):
        engine.validate(request)
        engine.submit(request)
    ended = []
    while engine.busy:
        ended += [output.key for output in engine.step() if output.finished]
    assert ended.index(quiet.key) == 1, "after the one that runs, whatever else came before"


def test_a_deadline_after_the_first_token(
    start: Start, prompt: list[int], set_fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_fault(step_delay_s=0.02)
    engine = start(deployment())
    request = ask(prompt, max_tokens=500)
    request.deadline_ns = now_ns() + 3600 * 10**9
    engine.submit(request)
    outputs: list[Output] = []
    take_expired = engine._queue.take_expired
    while engine.busy:
        outputs += engine.step()
        if outputs:
            monkeypatch.setattr(engine._queue, "take_expired", lambda now_ns: take_expired(now_ns + 3601 * 10**9))
    assert outputs[-1].finish_reason is FinishReason.DEADLINE
    assert 0 < sum(len(output.tokens) for output in outputs) < 500


def test_trtllm_engine_guided_decoding(start: Start, tokenizer: Tokenizer, prompt: list[int]) -> None:
    engine = start(deployment(tensorrt_llm={"guided_decoding": "xgrammar"}))
    [output] = run(engine, ask(prompt, guide=Guide("regex", "yes or no")))
    assert tokenizer.decode(output.tokens).strip() == "yes or no"
    with pytest.raises(UnsupportedFeature, match=r"guided_decoding_guide_type .* set tensorrt_llm.guided_decoding"):
        start(deployment()).validate(ask(prompt, guide=Guide("json")))


def test_engines_refuse_the_guides_and_adapters_that_they_do_not_serve(portable: Engine, prompt: list[int]) -> None:
    guided, adapted = ask(prompt, guide=Guide("json")), ask(prompt)
    adapted.lora = "answer"
    replay = ReplayEngine(EngineConfig.of(deployment()))
    with pytest.raises(UnsupportedFeature, match="guided_decoding_guide_type is not supported by the replay engine"):
        replay.validate(guided)
    for engine in (portable, replay):
        with pytest.raises(UnsupportedFeature, match="lora_name is not supported by the"):
            engine.validate(adapted)


def test_trtllm_engine_lora_by_name(start: Start, tmp_path: Path, prompt: list[int]) -> None:
    (tmp_path / "adapter").mkdir()
    config = {"r": 8, "target_modules": ["q_proj"], "fake_bias": {"42": 1000.0}}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    engine = start(deployment(tmp_path, tensorrt_llm={"lora": {"answer": "adapter"}}))
    plain, adapted, wrong = ask(prompt, max_tokens=3), ask(prompt, max_tokens=3), ask(prompt)
    adapted.lora, wrong.lora = "answer", "anwser"
    outputs = run(engine, plain, adapted)
    assert outputs[1].tokens == [42, 42, 42] != outputs[0].tokens
    with pytest.raises(InvalidRequest, match=r"lora_name is 'anwser'; .* answer \(did you mean 'answer'"):
        engine.validate(wrong)


def test_beside_speculation_only_what_reaches_the_drafts_is_served(start: Start, prompt: list[int]) -> None:
    engine = start(deployment(speculation={"method": "ngram"}))
    [output] = run(engine, ask(prompt, temperature=0.5))
    assert len(output.tokens) == 16
    with pytest.raises(UnsupportedFeature, match="embedding_bias is not supported by TensorRT-LLM beside ngram"):
        engine.validate(ask(prompt, logit_bias={3: 1.0}))


def test_the_batch_is_not_the_portable_engines(start: Start) -> None:
    assert start(deployment()).stats.batch_size_limit == 64
    assert start(deployment(batching={"max_batch_size": 3})).stats.batch_size_limit == 3


def test_an_engine_that_becomes_idle_shows_it(start: Start, prompt: list[int], set_fault: Callable[..., None]) -> None:
    """Generations end at any time: between the last look at the statistics and the question whether there is more."""
    set_fault(step_delay_s=0.005)
    engine = start(deployment())
    for _ in range(20):
        request = ask(prompt, max_tokens=40)
        engine.submit(request)
        while not any(output.tokens for output in engine.step()):
            pass  # one that is cancelled before its first step is dropped, and given up seconds later
        engine.cancel(request.key)
        while engine.busy:
            engine.step()
            time.sleep(0.01)  # the generation ends meanwhile
        assert (engine.stats.state().step.sequences, engine.stats.state().kv_blocks_used) == (0, 0)


def test_the_warm_ups_iterations_are_not_counted_however_late(start: Start, prompt: list[int]) -> None:
    engine = start(deployment())
    late = {"iter": 2, "inflightBatchingStats": {"numScheduledRequests": 1, "numGenRequests": 1}}
    engine._runtime._iterations.append(late)
    engine.step()
    assert engine.stats.steps == 0
    run(engine, ask(prompt, max_tokens=4, ignore_eos=True))
    before = engine.stats.steps
    engine._runtime._iterations.append(late | {"iter": 9})
    engine.step()
    assert engine.stats.steps > before, "from the first request on all are counted"


def test_what_tensorrt_llm_refuses_is_not_admitted(start: Start, prompt: list[int]) -> None:
    engine = start(deployment())

    def refuse(**arguments: Any) -> None:
        raise ValueError("no such thing")

    engine._runtime._llm.generate_async = refuse
    [output] = run(engine, ask(prompt))
    assert isinstance(output.error, InvalidRequest)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.request_queue.cumulative[-1], stats.request_duration.cumulative[-1]) == (0, 0, 1)
