"""How requests end, wait and fail; after each test the cache is idle."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from inflight.clock import now_ns
from inflight.engine.checkpoint import load_config
from inflight.engine.engine import Engine
from inflight.engine.loop import EngineLoop
from inflight.engine.request import FinishReason, Output
from inflight.errors import (
    DeadlineExceeded,
    DeploymentError,
    EngineFailure,
    InvalidRequest,
    QueueFull,
    ShuttingDown,
)
from tests.engine.support.checkpoints import VOCAB, checkpoint, greedy
from tests.engine.support.driving import ask, assert_idle, finish, load, run
from tests.support.tokenizers import make_tokenizer

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def engine() -> Engine:
    return load(checkpoint("llama"))


def _tokens(count: int = 12) -> list[int]:
    return greedy("llama", tuple(PROMPT), count)


def test_length(engine: Engine) -> None:
    output = run(engine, [ask(PROMPT, 5)]).popitem()[1]
    assert (output.finish_reason, output.tokens) == (FinishReason.LENGTH, _tokens()[:5])


def test_the_longest_sequence_ends_with_length() -> None:
    output = run(load(checkpoint("llama"), max_sequence_length=9), [ask(PROMPT, 50)]).popitem()[1]
    assert (output.finish_reason, len(output.tokens)) == (FinishReason.LENGTH, 4)


def test_an_end_id_ends_and_is_not_shown(engine: Engine) -> None:
    end = _tokens()[3]
    first = _tokens().index(end)
    output = run(engine, [ask(PROMPT, 12, end_ids=frozenset({end}))]).popitem()[1]
    assert (output.finish_reason, output.tokens) == (FinishReason.STOP, _tokens()[:first])
    output = run(engine, [ask(PROMPT, 12, end_ids=frozenset({end}), ignore_eos=True)]).popitem()[1]
    assert (output.finish_reason, output.tokens) == (FinishReason.LENGTH, _tokens())


def test_a_stop_sequence_stays_in_the_output(engine: Engine) -> None:
    output = run(engine, [ask(PROMPT, 12, stop_sequences=(tuple(_tokens()[2:4]),))]).popitem()[1]
    assert (output.finish_reason, output.tokens) == (FinishReason.STOP, _tokens()[:4])


def test_a_stop_string_limits_the_text() -> None:
    tokenizer = make_tokenizer("byte level")
    engine = load(checkpoint("llama"), tokenizer)
    text = tokenizer.decode(_tokens())
    stop = text[4:7]
    output = run(engine, [ask(PROMPT, 12, stop_strings=(stop,))]).popitem()[1]
    assert output.finish_reason is FinishReason.STOP
    assert output.text_limit == text.index(stop)
    assert len(output.tokens) <= 12


def test_higher_priority_runs_first() -> None:
    engine = load(checkpoint("llama"), max_batch_size=1)
    low, high = ask(PROMPT, 2, priority=-1), ask(PROMPT, 2, priority=5)
    outputs = run(engine, [low, high])
    first, second = (outputs[request.key].metrics for request in (high, low))
    assert first is not None
    assert second is not None
    assert first.last_token_ns < second.first_scheduled_ns


def test_context_logits_come_with_one_output_only(engine: Engine) -> None:
    request = ask([5, 6, 7], 4, ignore_eos=True, context_logits=True)
    engine.submit(request)
    given = []
    while engine.busy:
        given += [output.context_logits is not None for output in engine.step()]
    assert given == [True, False, False, False]


def test_deadlines(engine: Engine) -> None:
    late = ask(PROMPT, 5, deadline_ns=now_ns() - 1)
    output = run(engine, [late]).popitem()[1]
    assert isinstance(output.error, DeadlineExceeded)
    running = ask(PROMPT, 400, deadline_ns=now_ns() + 10**12)
    engine.submit(running)
    outputs = engine.step() + engine.step()
    engine._scheduler._clock = lambda: now_ns() + 10**13
    try:
        outputs += finish(engine).values()
    finally:
        engine._scheduler._clock = now_ns
    output = outputs[0]
    for more in outputs[1:]:
        output.extend(more)
    assert output.finish_reason is FinishReason.DEADLINE
    assert 0 < len(output.tokens) < 400


def test_cancel_waiting_running_and_unknown() -> None:
    engine = load(checkpoint("llama"), max_batch_size=1)
    running, waiting = ask(PROMPT, 50), ask(PROMPT, 50)
    engine.submit(running)
    engine.submit(waiting)
    engine.step()
    for key in (running.key, waiting.key, 10**9):
        engine.cancel(key)
    engine.cancel(running.key)
    outputs = finish(engine)
    assert {output.finish_reason for output in outputs.values()} == {FinishReason.CANCELLED}
    assert len(outputs) == 2


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask([1] * 600), "exceeds the limit"),
        (ask([1, VOCAB]), f"token {VOCAB}; it must be between 0 and {VOCAB - 1}"),
        (ask([1], logit_bias={-1: 1.0}), "embedding_bias has token -1"),
        (ask([1], bad_sequences=((1, 999),)), "bad_words_list has token 999"),
        (ask([1], stop_strings=("x",)), "no tokenizer"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(engine: Engine, request_: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        engine.validate(request_)


def test_a_failing_step_ends_its_requests_and_no_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda *_: 1 / 0)
        output = run(engine, [ask(PROMPT)]).popitem()[1]
    assert isinstance(output.error, EngineFailure)
    assert "division" not in str(output.error)
    assert run(engine, [ask(PROMPT, 12)]).popitem()[1].tokens == _tokens()


def test_warm_up_leaves_no_trace(engine: Engine) -> None:
    engine.warm_up()
    assert engine.stats.steps == 0
    assert_idle(engine)


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_storm_of_requests(policy: str) -> None:
    """300 requests come and go at random; each ends once, and those left alone get what they would get alone."""
    chance = random.Random(3)
    engine = load(checkpoint("llama"), num_blocks=48, max_batch_size=12, max_tokens_per_step=20, policy=policy)
    prompts = [[chance.randrange(1, 20) for _ in range(chance.randint(1, 24))] for _ in range(12)]
    waiting = [ask(chance.choice(prompts), chance.randint(1, 10), priority=chance.randint(0, 2)) for _ in range(300)]
    sent, cancelled, ended = list(waiting), set(), {}
    while waiting or engine.busy:
        for _ in range(min(len(waiting), chance.randint(0, 4))):
            engine.submit(waiting.pop())
        if chance.random() < 0.2:
            victim = chance.choice(sent).key
            cancelled.add(victim)
            engine.cancel(victim)
        for output in engine.step():
            tokens = ended.setdefault(output.key, [])
            assert None not in tokens, "an output came after the last one"
            tokens += output.tokens + ([None] if output.finished else [])
        engine._cache.check()
    assert_idle(engine)
    assert all(tokens[-1] is None for tokens in ended.values())
    assert {request.key for request in sent} == set(ended)
    for request in sent:
        if request.key not in cancelled:
            expected = greedy("llama", tuple(request.prompt), 10)[: request.sampling.max_tokens]
            assert ended[request.key][:-1] == expected


class Collector:
    """Takes a loop's outputs."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.ended = threading.Semaphore(0)

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        if output.finished:
            self.ended.release()


def test_the_loops_queue_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, collect = threading.Event(), Collector()
    real = engine.step
    monkeypatch.setattr(engine, "step", lambda: gate.wait(60) and real())
    loop = EngineLoop(engine, collect, max_queue_size=3)
    with pytest.raises(QueueFull, match="Maximum queue size of 3 has been reached"):
        [loop.submit(ask(PROMPT, 2)) for _ in range(40)]
    gate.set()
    assert collect.ended.acquire(timeout=60)
    loop.close()


def test_the_loop_survives_a_fault_of_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Collector()
    loop = EngineLoop(engine, collect, max_queue_size=10)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
        loop.submit(ask(PROMPT))
        assert collect.ended.acquire(timeout=60)
    assert isinstance(collect.outputs[-1].error, EngineFailure)
    loop.submit(ask(PROMPT, 3))
    assert collect.ended.acquire(timeout=60)
    assert collect.outputs[-1].finish_reason is FinishReason.LENGTH
    loop.close()
    assert_idle(engine)


def test_closing_the_loop_ends_what_runs(engine: Engine) -> None:
    collect = Collector()
    loop = EngineLoop(engine, collect, max_queue_size=10)
    loop.submit(ask(PROMPT, 400))
    loop.close()
    assert collect.ended.acquire(blocking=False)
    assert isinstance(collect.outputs[-1].error, ShuttingDown)
    with pytest.raises(ShuttingDown):
        loop.submit(ask(PROMPT))


def _copy(tmp_path: Path, **changes: Any) -> Path:
    shutil.copytree(checkpoint("llama"), tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architecture BloomForCausalLM is no causal language model"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1.0}}, "rope_type 'axial' is not supported"),
        ({"num_hidden_layers": 4}, "no tensor for model.layers.3"),
        ({"num_hidden_layers": 2}, "has no place"),
        ({"intermediate_size": 95}, r"tensor model.layers.0.mlp.\w+.weight is \["),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
    ids=str,
)
def test_a_checkpoint_that_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason) as caught:
        load(_copy(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    model = _copy(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DeploymentError, match="cannot be read"):
        load(model)
    weights.unlink()
    with pytest.raises(DeploymentError, match=r"no model.safetensors"):
        load(model)
    with pytest.raises(DeploymentError, match=r"config.json: missing"):
        load(tmp_path)


def test_old_spellings_of_the_configuration(tmp_path: Path) -> None:
    old = _copy(
        tmp_path,
        rope_parameters=None,
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_theta=5000.0,
        dtype=None,
        torch_dtype="bfloat16",
    )
    config = load_config(old)
    rope = config.attention[0].rope
    assert rope is not None
    assert (rope["rope_type"], rope["rope_theta"]) == ("linear", 5000.0)
    assert config.dtype == "bfloat16"


def test_a_fused_and_a_split_checkpoint_are_the_same(tmp_path: Path) -> None:
    """Phi-3's files hold fused projections, Llama's split ones: both end in the same matrices."""
    model = _copy(tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    assert run(load(model), [ask(PROMPT, 12)]).popitem()[1].tokens == _tokens()
