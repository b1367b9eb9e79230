"""What a guide may cost while it is followed: it may grow without end or take ever longer, and ends alone."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from inflight.engine.engine import Engine
from inflight.engine.guided import compiler as compiler_module
from inflight.engine.guided.compiler import CompiledGuide
from inflight.engine.guided.guide_check import checked_guide, compile_grammar, parser_limits
from inflight.engine.guided.masks import next_masks
from inflight.engine.guided.state import GuideState, MaskBudget
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import InvalidRequest, QueueFull
from inflight.sampling import Guide, SamplingParams
from inflight.settings.guided import GuidedDecodingSettings
from tests.engine.support.checkpoints import VOCAB, checkpoint
from tests.engine.support.driving import ask, finish, load, run
from tests.engine.support.guiding import (
    byte_tokenizer,
    compiles_nothing,
    end_id,
    guide_compiler,
    regex,
    result_of,
    vocabulary,
)

PROMPT = tuple(range(40, 60))
AMBIGUOUS = 'start: s\ns: s s | "a" | "b" | " "'


def test_kept_guides_are_bounded_by_the_memory_that_they_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = 1 << 30
    monkeypatch.setattr(compiler_module, "heap_bytes", lambda: heap)
    monkeypatch.setattr(compiler_module, "_HEAP_LOOK_S", 0)
    compiler = guide_compiler(cached_bytes=4 << 20, max_lexer_states=3000)
    small, large = regex("[ab]"), Guide("json_schema", json.dumps({"enum": [f"value {one}" for one in range(900)]}))
    results = [result_of(compiler, compiler.ask(guide)) for guide in (small, large)]
    sizes = [one.bytes for one in results if isinstance(one, CompiledGuide)]
    assert 0 < sizes[0] < sizes[1] < 3 << 20
    for one in results:
        assert isinstance(one, CompiledGuide)
        one.masks_s = 100.0  # in which its lexer can have grown to all its states
    heap += 3 << 20
    compiler.ask(small)
    assert len(compiler._kept) == 3, "together they have not grown by more than all memory has"
    heap += 3 << 20
    kept = compiler.ask(small)
    assert list(compiler._kept.values()) == [kept], "the latest used is the last to go"
    assert isinstance(kept.result, CompiledGuide)
    assert kept.result.bytes > 3_000_000


def test_the_heap_is_looked_at_seldom_and_only_where_guides_might_take_much(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(compiler_module, "heap_bytes", lambda: looks.append(None) or 1 << 30)
    monkeypatch.setattr(compiler_module, "_HEAP_LOOK_S", 3600)
    compiler = guide_compiler()
    compiled = [result_of(compiler, compiler.ask(regex(f"[ab]{{{length}}}"))) for length in range(1, 31)]
    assert len(looks) == 1
    for one in compiled:
        assert isinstance(one, CompiledGuide)
        one.masks_s = 0.25
    compiler._heap_read_s = -math.inf
    for _ in range(5):
        compiler.ask(regex("[ab]"))
    assert len(looks) == 2


@pytest.mark.proof
@pytest.mark.parametrize("known", [True, False])
def test_guides_that_are_much_used_stay_kept_while_memory_does_not_grow(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "heap_bytes", lambda: (1 << 30) * known)
    compiler = guide_compiler()
    compiled = [result_of(compiler, compiler.ask(regex(f"[ab]{{{length}}}"))) for length in range(1, 31)]
    for one in compiled:
        assert isinstance(one, CompiledGuide)
        one.masks_s = 0.25
    compiler.ask(regex("[ab]"))
    assert (len(compiler._kept) == 31) == known, "without a figure of the heap the largest that they may be counts"


@pytest.mark.proof
def test_a_guide_whose_lexer_is_full_is_compiled_anew() -> None:
    """Its copies share the lexer: one sequence has filled it, and requests that come later must not fail."""
    compiler, source = guide_compiler(max_lexer_states=300), random.Random(1)
    guide = regex("[ab]*a[ab]{10}")
    compiled = result_of(compiler, compiler.ask(guide))
    assert isinstance(compiled, CompiledGuide)
    engine = load(checkpoint("llama"), byte_tokenizer(), max_batch_size=16, num_blocks=1024)
    assert engine._guides is not None
    engine._guides._compiler = compiler
    failed = 0
    for _ in range(40):
        request = _guided(guide, seed=source.randrange(1 << 30), max_tokens=40, end_ids=frozenset[int]())
        [output] = _run(engine, request)
        if output.error is not None:
            failed += 1
            assert "guided_decoding_guide cannot be followed any further: lexer error" in str(output.error)
            [next_output] = _run(engine, _guided(guide, max_tokens=5))
            assert next_output.error is None
    assert failed
    assert compiler.ask(guide).result is not compiled


def test_a_state_that_finds_its_lexer_full_says_so() -> None:
    vocabulary, guide = Vocabulary(byte_tokenizer(), VOCAB), regex("[ab]*a[ab]{10}")
    limits = parser_limits(200_000, 300)
    grammar = checked_guide(guide, vocabulary.tokens, limits).grammar
    compiled = CompiledGuide(compile_grammar(grammar, vocabulary.tokens, limits), vocabulary)
    sampling, source = SamplingParams(100, guide=guide), random.Random(1)
    state, letters = GuideState(compiled, sampling), [byte_tokenizer().spelling(letter)[0] for letter in "ab"]
    while not state.matcher.is_error():  # type: ignore[union-attr]
        next_masks([state])
        state.push(source.choice(letters))
    other = GuideState(compiled, sampling)
    assert "cannot be followed any further: lexer error" in str(other.without_token(0))
    assert compiled.failed


def _guided(guide: Guide, **more: Any) -> Request:
    sampling: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "seed": 1, "end_ids": frozenset({end_id()})}
    return ask(PROMPT, **sampling | {"guide": guide} | more)


def _run(engine: Engine, *requests: Request) -> list[Output]:
    outputs = run(engine, requests)
    return [outputs[request.key] for request in requests]


def test_a_request_that_finds_the_queue_of_guides_full_may_be_sent_again() -> None:
    """The first may have left the queue, and waits; the next one fills it, and stays there."""
    settings = GuidedDecodingSettings(compile_threads=1, compile_queue=1)
    engine = load(checkpoint("llama"), byte_tokenizer(), max_batch_size=8, num_blocks=1024, guided_decoding=settings)
    with compiles_nothing(engine):
        for length in range(1, 9):
            engine.submit(_guided(regex(f"[ab]{{{length}}}")))
    outputs = finish(engine).values()
    refused = [one for one in outputs if one.error is not None]
    assert 6 <= len(refused) < 8
    assert all(isinstance(one.error, QueueFull) for one in refused)
    [again] = _run(engine, _guided(regex("[ab]{8}")))
    assert again.error is None


def test_warming_up_starts_the_process() -> None:
    engine = load(checkpoint("llama"), byte_tokenizer(), max_batch_size=8, num_blocks=1024)
    engine.warm_up()
    assert engine._guides is not None
    compiler = engine._guides._compiler
    [made] = [*compiler._running.values(), *compiler._kept.values()]
    assert isinstance(result_of(compiler, made), CompiledGuide)
    assert compiler.ask(Guide("json", "")) is made
    assert len(compiler._worker._processes) == 1


@pytest.mark.proof
def test_masks_that_take_ever_longer_end_their_request_alone() -> None:
    settings = GuidedDecodingSettings(max_mask_ms=1)
    engine = load(checkpoint("llama"), byte_tokenizer(), max_batch_size=8, num_blocks=1024, guided_decoding=settings)
    neighbours = [ask(PROMPT, 60, temperature=1.0, seed=3), _guided(regex("[a-z]{60}"), seed=3)]
    slow, *beside = _run(
        engine, _guided(Guide("lark_grammar", AMBIGUOUS), max_tokens=400, ignore_eos=True), *neighbours
    )
    assert isinstance(slow.error, InvalidRequest)
    assert "guided_decoding_guide cannot be followed any further" in str(slow.error)
    assert "1 ms of CPU time on average" in str(slow.error)
    assert slow.finish_reason is None
    assert 20 < len(slow.tokens) < 400
    assert [one.finish_reason for one in beside] == [FinishReason.LENGTH, FinishReason.STOP]
    alone = _run(engine, ask(PROMPT, 60, temperature=1.0, seed=3))
    assert beside[0].tokens == alone[0].tokens


def test_a_slow_mask_is_told_from_the_fast_ones_of_its_step() -> None:
    vocabulary = Vocabulary(byte_tokenizer(), VOCAB)
    limits = parser_limits(200_000, 50_000)
    guides = regex("[ab]+"), _lark(AMBIGUOUS)
    grammars = [checked_guide(guide, vocabulary.tokens, limits).grammar for guide in guides]
    [a] = byte_tokenizer().spelling("a")
    matchers = [_fed(vocabulary, grammars[slow], a) for slow in (0, 0, 1, 0, 0, 0)]
    for _ in range(2):
        masks, seconds = vocabulary.masks(matchers)
        assert max(range(6), key=seconds.__getitem__) == 2
        assert seconds[2] > 3 * sorted(seconds)[-2]
        for matcher in matchers:
            matcher.consume_token(a)
    assert (masks[0] == masks[1]).all()


def _lark(text: str) -> Guide:
    return Guide("lark_grammar", text)


def _fed(vocabulary: Vocabulary, grammar: str, token: int) -> Any:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0)
    for _ in range(240):
        matcher.consume_token(token)
    return matcher


def test_cheap_masks_save_a_limited_budget_for_dear_ones() -> None:
    budget = MaskBudget(0.002)
    for _ in range(5000):
        budget.charge(0.0005)
    budget.charge(0.19)
    assert not budget.is_spent
    budget.charge(0.2)
    assert budget.is_spent


def test_a_first_mask_beyond_the_limits_refuses_the_guide() -> None:
    vocabulary = Vocabulary(byte_tokenizer(), VOCAB)
    names = [f"x{place}" for place in range(900)]
    rules = "\n".join(f'{name}: y "b"? "c"?' for name in names)
    grammar = f'start: s+\ns: {" | ".join(names)}\n{rules}\ny: "a" | "e" | "t" | " "'
    with pytest.raises(InvalidRequest, match="guided_decoding_guide cannot be followed: parser error: Too many items"):
        checked_guide(_lark(grammar), vocabulary.tokens, parser_limits(200_000, 50_000))


@pytest.mark.parametrize("guide", [Guide("ebnf_grammar", "root ::= root"), Guide("json_schema", '{"$ref": "#"}')])
def test_a_guide_without_a_sentence_is_refused_as_such(guide: Guide) -> None:
    with pytest.raises(InvalidRequest, match="guided_decoding_guide allows no text"):
        checked_guide(guide, vocabulary().tokens, parser_limits(200_000, 50_000))
