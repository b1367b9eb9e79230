"""A request that is broken behind any of its tokens and resumed there gives what it would have given unbroken."""

from __future__ import annotations

import functools
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.clock import now_ns
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.guided import pending, state
from inflight.engine.replay import ReplayEngine
from inflight.engine.request import FinishReason, Request
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings
from tests.engine.support.checkpoints import VOCAB, checkpoint
from tests.engine.support.driving import ask, assert_idle, finish, load, run
from tests.engine.support.guiding import byte_tokenizer, end_id
from tests.engine.support.resuming import Answer, again, answer, outputs_of
from tests.engine.support.speculating import speculating
from tests.support.properties import examples
from tests.support.tokenizers import FAMILIES, make_tokenizer

PROMPT = [5, 6, 7, 8, 9]
TIGHT = {"policy": "max_utilization", "num_blocks": 18, "max_tokens_per_step": 24}
"""Of blocks so few that requests beside it preempt it."""


@functools.cache
def _engine(kind: str, family: str = "byte level") -> Engine:
    """Return an engine of a kind, with a tokenizer of a family."""
    tokenizer = byte_tokenizer() if family == "guides" else make_tokenizer(family)
    if kind in ("ngram", "draft_target"):
        return speculating("llama", kind, tokenizer=tokenizer, max_draft_tokens=3)
    more: dict[str, Any] = {"guided_decoding": GuidedDecodingSettings()} if family == "guides" else {}
    return load(checkpoint("llama"), tokenizer, **(TIGHT if kind == "tight" else more))


def _beside(kind: str, chance: random.Random) -> list[Request]:
    """Return requests that take blocks from the one that is looked at, where these are few."""
    if kind != "tight":
        return []
    return [ask([chance.randrange(1, VOCAB) for _ in range(9)], 8, priority=1) for _ in range(3)]


def _whole_and_resumed(kind: str, family: str, request: Request, chance: random.Random) -> tuple[Answer, Answer, int]:
    """Return the answer without a break, and the rest of it after a break behind a chunk; and where that was."""
    whole = _answer(kind, family, request, chance)
    places = [place for place, chunk in enumerate(whole.chunks[:-1]) if chunk.tokens]
    if not places:
        return whole, whole, -1
    place = chance.choice(places)
    return whole, _resumed(kind, family, request, whole, place, chance), place


def _answer(kind: str, family: str, request: Request, chance: random.Random) -> Answer:
    """Return the answer to a request, whose responses have some tokens each."""
    engine, tokenizer = _engine(kind, family), byte_tokenizer() if family == "guides" else make_tokenizer(family)
    outputs = outputs_of(engine, request, lambda: _beside(kind, chance))
    made = answer(tokenizer, request, outputs, lambda: chance.randint(1, 4))
    assert_idle(engine)
    return made


def _resumed(kind: str, family: str, request: Request, whole: Answer, place: int, chance: random.Random) -> Answer:
    """Return the rest of an answer after a break behind a chunk."""
    seen = whole.chunks[place].tokens
    rest = again(request, whole.tokens[:seen], whole.log_probs[:seen], whole.seed)
    return _answer(kind, family, rest, chance)


def _check(whole: Answer, resumed: Answer, place: int) -> None:
    """The rest is what the whole answer has behind the break: tokens, text and its place, log-probs and end."""
    if place < 0:
        return
    chunk = whole.chunks[place]
    assert resumed.error == whole.error
    assert resumed.tokens == whole.tokens[chunk.tokens :]
    assert resumed.log_probs == pytest.approx(whole.log_probs[chunk.tokens :], abs=1e-5)
    assert resumed.finish_reason is whole.finish_reason
    if resumed.chunks:
        assert resumed.chunks[0].start == chunk.end
        assert resumed.text == "".join(one.text for one in whole.chunks[place + 1 :])
        assert resumed.chunks[-1].end == whole.chunks[-1].end


@st.composite
def _requests(draw: st.DrawFn, family: str = "byte level") -> Request:
    """Return a request that samples in some way, with or without words that end it or that it must not have."""
    tokenizer = make_tokenizer(family)
    chance = random.Random(draw(st.integers(0, 99)))
    tokens = st.integers(3, min(VOCAB, tokenizer.config.vocab_size) - 1)
    sampling: dict[str, Any] = {"log_probs": draw(st.booleans()), "min_tokens": draw(st.integers(0, 8))}
    if draw(st.booleans()):
        sampling |= {"temperature": draw(st.sampled_from([0.4, 1.3, 5.0])), "top_p": draw(st.sampled_from([0.9, 1.0]))}
        sampling |= {"seed": draw(st.none() | st.integers(0, 5))}
    if draw(st.booleans()):
        sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2}
    if draw(st.booleans()):
        known = tokenizer.decode([chance.randrange(3, 300) for _ in range(40)])
        starts = [chance.randrange(len(known)) for _ in range(3)]
        stops = {known[one : one + chance.randint(1, 3)] for one in starts}
        sampling["stop_strings"] = tuple(sorted(stops | {" ", "\ufffd\ufffd"}))
    if draw(st.booleans()):
        words = st.lists(tokens, min_size=1, max_size=2).map(tuple)
        sampling["stop_sequences"] = tuple(draw(st.lists(words, max_size=3)))
        sampling["bad_sequences"] = tuple(draw(st.lists(words, max_size=3)))
    sampling["logit_bias"] = dict.fromkeys(range(tokenizer.config.vocab_size, VOCAB), -math.inf)
    sampling["end_ids"] = frozenset(draw(st.lists(tokens, max_size=3)))
    return ask([draw(tokens) for _ in range(draw(st.integers(1, 12)))], draw(st.integers(9, 20)), **sampling)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["roomy", "tight", "ngram", "draft_target"])
@given(data=st.data())
@settings(max_examples=examples(1))
def test_a_broken_request_goes_on_as_if_it_had_not_been(kind: str, data: st.DataObject) -> None:
    request, chance = data.draw(_requests()), random.Random(data.draw(st.integers(0, 99)))
    _check(*_whole_and_resumed(kind, "byte level", request, chance))


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(1))
def test_its_text_goes_on_in_each_vocabulary(family: str, data: st.DataObject) -> None:
    request, chance = data.draw(_requests(family)), random.Random(data.draw(st.integers(0, 99)))
    _check(*_whole_and_resumed("roomy", family, request, chance))


@pytest.mark.parametrize(
    ("kind", "text", "start_ids"),
    [
        ("json_schema", '{"type": "array", "items": {"enum": ["a", 12, null, true]}, "minItems": 4}', ()),
        ("regex", "([a-c]{2} ?){3,9}x", ()),
        ("regex", "[0-9]{3}", (30,)),
    ],
)
def test_a_guide_goes_on(kind: str, text: str, start_ids: tuple[int, ...]) -> None:
    bias = dict.fromkeys(start_ids, 20.0)
    sampling = {"temperature": 1.0, "seed": 3, "end_ids": frozenset({end_id()}), "logit_bias": bias}
    request = ask(PROMPT, 40, guide=Guide(kind, text, start_ids), **sampling)  # type: ignore[arg-type]
    chance = random.Random(1)
    whole = answer(byte_tokenizer(), request, outputs_of(_engine("roomy", "guides"), request))
    assert whole.finish_reason is FinishReason.STOP
    for place in range(len(whole.chunks) - 1):
        _check(whole, _resumed("roomy", "guides", request, whole, place, chance), place)


@functools.cache
def _ended() -> tuple[list[int], str]:
    """Return the tokens of an answer of words, and a string that is in it."""
    tokens = run(_engine("roomy"), [ask(PROMPT, 12)]).popitem()[1].tokens
    return tokens, make_tokenizer("byte level").decode(tokens)


def _refusal(engine: Engine, resumed_ids: list[int], max_tokens: int = 12, **sampling: Any) -> str:
    request = ask(PROMPT, max_tokens, **sampling)
    request.resumed_ids = resumed_ids
    try:
        output = run(engine, [request])[request.key]
    except (InvalidRequest, UnsupportedFeature) as error:
        return error.wire_message()
    assert output.error is not None
    assert output.tokens == []
    return output.error.wire_message()


@pytest.mark.parametrize(
    ("resumed_ids", "sampling", "message"),
    [
        ([1] * 12, {}, "INVALID_ARGUMENT: resumed_ids has 12 tokens; it must have fewer than the 12 that the answer"),
        ([1, VOCAB], {}, f"INVALID_ARGUMENT: resumed_ids has token {VOCAB}; it must be between 0 and {VOCAB - 1}"),
        ([1, 0], {"end_ids": frozenset({0})}, "INVALID_ARGUMENT: resumed_ids has token 0, which is an end id"),
        (
            [1, 5, 6, 7],
            {"stop_sequences": ((5, 6),)},
            "INVALID_ARGUMENT: resumed_ids completes a stop word with token 2",
        ),
        ([1, 5], {"beam_width": 2}, "UNIMPLEMENTED: beam_width is not supported with resumed_ids"),
        ([1, 5], {"context_logits": True}, "UNIMPLEMENTED: return_context_logits is not supported with resumed_ids"),
        ([1, 5], {"prompt_log_probs": 0}, "UNIMPLEMENTED: num_prompt_log_probs is not supported with resumed_ids"),
    ],
)
def test_what_no_earlier_run_can_have_given_is_refused(
    resumed_ids: list[int], sampling: dict[str, Any], message: str
) -> None:
    assert _refusal(_engine("roomy"), resumed_ids, **sampling).startswith(message)


def test_ids_behind_the_end_of_a_text_are_refused() -> None:
    tokens, text = _ended()
    stop = text[4:6]
    assert "completes a stop word" in _refusal(_engine("roomy"), tokens[:11], stop_strings=(stop,))
    digits = byte_tokenizer().encode_batch(["123"])[0]
    of_guide: dict[str, Any] = {"guide": Guide("regex", "[0-9]{3}"), "end_ids": frozenset({end_id()})}
    engine = _engine("roomy", "guides")
    assert "completes guided_decoding_guide" in _refusal(engine, digits, **of_guide)
    wrong = [*digits[:1], *byte_tokenizer().encode_batch(["x"])[0]]
    assert "at 1; guided_decoding_guide does not allow it" in _refusal(engine, wrong, **of_guide)
    assert "which is an end id" in _refusal(engine, [end_id()], **of_guide)
    assert "does not allow it" in _refusal(engine, [end_id()], **of_guide, ignore_eos=True)


def _resumed_in(guide: Guide, count: int) -> tuple[Engine, Request]:
    """Return an engine that has compiled a guide, and a request that goes on behind so many tokens of it."""
    engine, of_guide = _engine("roomy", "guides"), {"guide": guide, "end_ids": frozenset({end_id()})}
    run(engine, [ask(PROMPT, 1, **of_guide)])
    request = ask(PROMPT, count + 1, **of_guide)
    request.resumed_ids = count * byte_tokenizer().spelling("a")
    return engine, request


def _clock(step_s: float) -> SimpleNamespace:
    """Return a clock of CPU time that goes on at each look."""
    looks = itertools.count()
    return SimpleNamespace(thread_time=lambda: next(looks) * step_s)


def test_others_go_on_while_a_guide_follows_what_was_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = _resumed_in(Guide("regex", "a+"), 40)
    monkeypatch.setattr(pending, "time", _clock(0.6 * pending._FOLLOW_S))  # each token takes all of the time
    other = ask(PROMPT, 20)
    for one in (request, other):
        engine.validate(one)
        engine.submit(one)
    first: list[int] = []
    while engine.busy:
        first += [output.key for output in engine.step() if output.finished]
    assert first == [other.key, request.key]


def test_a_guide_that_takes_too_long_to_follow_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = _resumed_in(Guide("regex", "a*"), 40)
    monkeypatch.setattr(state, "time", _clock(0.5))
    error = str(run(engine, [request])[request.key].error)
    assert "cannot be followed any further: after 3 tokens its masks take more than 10 ms" in error


def test_its_deadline_ends_it_as_an_answer_that_has_begun() -> None:
    request = ask(PROMPT, 12, deadline_ns=now_ns() - 1)
    request.resumed_ids = [1, 2]
    output = run(_engine("roomy"), [request])[request.key]
    assert (output.finish_reason, output.error, output.tokens) == (FinishReason.DEADLINE, None, [])


def test_metrics_count_what_this_run_has_done() -> None:
    engine = _engine("roomy")
    tokens, _ = _ended()
    before, generated = engine.stats.resumed_requests, engine.stats.generated_tokens
    request = ask(PROMPT, 12)
    request.resumed_ids = tokens[:7]
    engine.validate(request)
    engine.submit(request)
    engine.step()
    assert engine.snapshot().requests[0].generated_tokens == 8
    metrics = finish(engine)[request.key].metrics
    assert metrics is not None
    assert (metrics.prompt_tokens, metrics.resumed_tokens, metrics.generated_tokens) == (len(PROMPT), 7, 5)
    assert metrics.cached_tokens <= metrics.prompt_tokens
    assert engine.stats.resumed_requests == before + 1
    assert engine.stats.generated_tokens == generated + 5


def test_a_replayed_answer_goes_on() -> None:
    engine = ReplayEngine(EngineConfig(checkpoint("llama")))
    whole, rest = ask(PROMPT, 12), ask(PROMPT, 12)
    rest.resumed_ids = [*PROMPT, *PROMPT[:2]]
    made: dict[int, list[int]] = {whole.key: [], rest.key: []}
    for request in (whole, rest):
        engine.validate(request)
        engine.submit(request)
    while engine.busy:
        for output in engine.step():
            made[output.key] += output.tokens
    assert made[rest.key] == made[whole.key][7:]
