"""What a guide may cost: it may hang, crash, grow without end or take ever longer, and ends its own request alone."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from inflight.engine.engine import Engine
from inflight.engine.guided.checking import check_guide, compile_grammar, parser_limits
from inflight.engine.guided.compiler import Compilation, CompiledGuide, GuideCompiler
from inflight.engine.guided.masks import next_masks
from inflight.engine.guided.state import GuideState, MaskBudget
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import EngineFailure, InflightError, InvalidRequest, QueueFull
from inflight.sampling import Guide, SamplingParams
from inflight.settings.guided import GuidedDecodingSettings
from tests.engine.support.checkpoints import VOCAB, checkpoint
from tests.engine.support.driving import ask, finish, load, run
from tests.engine.support.guiding import byte_tokenizer, compiles_nothing, end_id

PROMPT = tuple(range(40, 60))
AMBIGUOUS = 'start: s\ns: s s | "a" | "b" | " "'
WAIT_S = 120


def _settings(**settings: Any) -> GuidedDecodingSettings:
    """Return settings with which a busy machine has time to compile."""
    return GuidedDecodingSettings(**{"compile_timeout_s": WAIT_S} | settings)


def _engine(**settings: Any) -> Engine:
    guided = _settings(**settings)
    return load(checkpoint("llama"), byte_tokenizer(), max_batch_size=16, num_blocks=1024, guided_decoding=guided)


def _compiler(**settings: Any) -> GuideCompiler:
    """Return a compiler of one thread, whose process runs."""
    made = GuideCompiler(lambda: Vocabulary(byte_tokenizer(), VOCAB), _settings(**{"compile_threads": 1} | settings))
    assert isinstance(_result(made, made.ask(_regex("first"))), CompiledGuide)
    return made


def _regex(text: str) -> Guide:
    return Guide("regex", text)


def _result(compiler: GuideCompiler, compilation: Compilation) -> CompiledGuide | InflightError | None:
    assert compilation.done.wait(WAIT_S)
    return compiler.result(compilation)


def _pid(compiler: GuideCompiler) -> int:
    [checker] = compiler._worker._checkers
    assert checker._process is not None
    return checker._process.pid


def _hang(compiler: GuideCompiler) -> tuple[int, threading.Event]:
    """Make the compiler's process stand still, as a guide that hangs does.

    Return its id, and an event: that it has been sent a guide.
    """
    [checker] = compiler._worker._checkers
    connection = checker._connection
    assert connection is not None
    sent, send = threading.Event(), connection.send

    def noted(guide: Guide) -> None:
        send(guide)
        sent.set()

    connection.send = noted  # type: ignore[method-assign]
    os.kill(pid := _pid(compiler), signal.SIGSTOP)
    return pid, sent


def test_a_compilation_that_hangs_is_ended_and_the_next_one_works() -> None:
    compiler = _compiler()
    [checker] = compiler._worker._checkers
    checker._settings = _settings(compile_timeout_s=0.5)
    pid, _ = _hang(compiler)
    said = _result(compiler, compiler.ask(_regex("a")))
    assert isinstance(said, InvalidRequest)
    assert "guided_decoding_guide takes more than 0.5 s to compile" in str(said)
    checker._settings = _settings()  # a busy machine may take longer
    assert isinstance(_result(compiler, compiler.ask(_regex("b"))), CompiledGuide)
    assert _pid(compiler) != pid
    assert isinstance(_result(compiler, compiler.ask(_regex("a"))), CompiledGuide), "it is tried again"


def test_a_compilation_that_crashes_ends_its_request_alone() -> None:
    compiler = _compiler()
    pid, sent = _hang(compiler)
    crashed, after = compiler.ask(_regex("a")), compiler.ask(_regex("b"))
    assert sent.wait(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(_result(compiler, after), CompiledGuide)
    said = _result(compiler, crashed)
    assert isinstance(said, InvalidRequest)
    assert "guided_decoding_guide cannot be compiled" in str(said)


def test_a_process_that_has_ended_meanwhile_is_started_again() -> None:
    compiler = _compiler()
    [checker] = compiler._worker._checkers
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert isinstance(_result(compiler, compiler.ask(_regex("a"))), CompiledGuide)


def test_what_nobody_waits_for_leaves_the_queue_and_a_full_queue_refuses() -> None:
    compiler = _compiler(compile_queue=2)
    pid, sent = _hang(compiler)
    first = compiler.ask(_regex("a"))
    assert sent.wait(WAIT_S)
    queued = [compiler.ask(_regex(text)) for text in "bcd"]
    assert isinstance(compiler.result(queued[2]), QueueFull)
    assert compiler.ask(_regex("b")) is queued[0]
    for _ in range(2):
        compiler.give_up(queued[0])
    assert list(compiler._worker._queue) == [queued[1]]
    again = compiler.ask(_regex("d"))
    assert compiler.result(again) is None
    compiler.give_up(first)
    os.kill(pid, signal.SIGCONT)
    assert isinstance(_result(compiler, again), CompiledGuide)
    assert isinstance(compiler.result(queued[1]), CompiledGuide)
    assert queued[0].result is None
    assert isinstance(_result(compiler, compiler.ask(_regex("b"))), CompiledGuide)


def test_the_process_ends_with_the_compiler() -> None:
    compiler = _compiler()
    [checker] = compiler._worker._checkers
    process = checker._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    compiler.ask(_regex("a"))
    del compiler, checker
    gc.collect()
    assert process.poll() == -signal.SIGKILL


def test_the_process_ends_when_the_one_that_started_it_has_ended() -> None:
    compiler = _compiler()
    [checker] = compiler._worker._checkers
    assert checker._process is not None
    assert checker._connection is not None
    checker._connection.close()
    assert checker._process.wait(WAIT_S) == 0


def test_a_process_that_does_not_start_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compiler = GuideCompiler(lambda: Vocabulary(byte_tokenizer(), VOCAB), _settings())
    said = _result(compiler, compiler.ask(_regex("a")))
    assert isinstance(said, EngineFailure)
    monkeypatch.undo()
    assert isinstance(_result(compiler, compiler.ask(_regex("a"))), CompiledGuide)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not say what a process has")
def test_the_process_can_take_a_limited_amount_of_memory() -> None:
    code = (
        "from inflight.engine.guided.check_process import _MEMORY_BYTES, _limit_memory\n"
        "_limit_memory()\n"
        "bytearray(_MEMORY_BYTES // 2)\n"
        "try:\n    bytearray(2 * _MEMORY_BYTES)\nexcept MemoryError:\n    print('refused')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "refused\n"


def test_kept_guides_are_bounded_by_the_memory_that_they_may_take() -> None:
    compiler = _compiler(cached_bytes=4 << 20, max_lexer_states=3000)
    small, large = _regex("[ab]"), Guide("json_schema", json.dumps({"enum": [f"value {one}" for one in range(900)]}))
    results = [_result(compiler, compiler.ask(guide)) for guide in (small, large)]
    assert all(isinstance(one, CompiledGuide) for one in results)
    sizes = [one.bytes for one in results if isinstance(one, CompiledGuide)]
    assert 0 < sizes[0] < sizes[1] < 3 << 20
    compiler.ask(small)
    assert len(compiler._kept) == 3
    for one in results:
        assert isinstance(one, CompiledGuide)
        one.masks_s = 100.0  # in which its lexer can have grown to all its states
    kept = compiler.ask(small)
    assert list(compiler._kept.values()) == [kept], "the latest used is the last to go"
    assert isinstance(kept.result, CompiledGuide)
    assert kept.result.bytes > 3_000_000


def test_a_guide_whose_lexer_is_full_is_compiled_anew() -> None:
    """Its copies share the lexer: one sequence has filled it, and requests that come later must not fail."""
    compiler, source = _compiler(max_lexer_states=300), random.Random(1)
    guide = _regex("[ab]*a[ab]{10}")
    compiled = _result(compiler, compiler.ask(guide))
    assert isinstance(compiled, CompiledGuide)
    engine = _engine()
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
    vocabulary, guide = Vocabulary(byte_tokenizer(), VOCAB, threads=1), _regex("[ab]*a[ab]{10}")
    limits = parser_limits(200_000, 300)
    grammar = check_guide(guide, vocabulary.tokens, limits).grammar
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
    """The first may have left the queue, and hangs; the next one fills it, and stays there."""
    engine = _engine(compile_threads=1, compile_queue=1)
    with compiles_nothing(engine):
        for length in range(1, 9):
            engine.submit(_guided(_regex(f"[ab]{{{length}}}")))
    outputs = finish(engine).values()
    refused = [one for one in outputs if one.error is not None]
    assert 6 <= len(refused) < 8
    assert all(isinstance(one.error, QueueFull) for one in refused)
    [again] = _run(engine, _guided(_regex("[ab]{8}")))
    assert again.error is None


def test_warming_up_starts_the_process() -> None:
    engine = _engine()
    engine.warm_up()
    assert engine._guides is not None
    compiler = engine._guides._compiler
    [made] = [*compiler._running.values(), *compiler._kept.values()]
    assert isinstance(_result(compiler, made), CompiledGuide)
    assert compiler.ask(Guide("json", "")) is made
    assert len(compiler._worker._checkers) == 1


def test_masks_that_take_ever_longer_end_their_request_alone() -> None:
    engine = _engine(max_mask_ms=1)
    neighbours = [ask(PROMPT, 60, temperature=1.0, seed=3), _guided(_regex("[a-z]{60}"), seed=3)]
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
    vocabulary = Vocabulary(byte_tokenizer(), VOCAB, threads=2)
    limits = parser_limits(200_000, 50_000)
    grammars = [check_guide(guide, vocabulary.tokens, limits).grammar for guide in (_regex("[ab]+"), _lark(AMBIGUOUS))]
    [a] = byte_tokenizer().spelling("a")
    matchers = [_fed(vocabulary, grammars[slow], a) for slow in (0, 0, 1, 0, 0, 0)]
    first, shares = vocabulary.timed_masks(matchers)
    assert len(set(shares)) == 1
    for matcher in matchers:
        matcher.consume_token(a)
    second, seconds = vocabulary.timed_masks(matchers)
    assert max(range(6), key=seconds.__getitem__) == 2
    assert seconds[2] > 3 * sorted(seconds)[-2]
    assert (first == second).all()


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
    vocabulary = Vocabulary(byte_tokenizer(), VOCAB, threads=1)
    names = [f"x{place}" for place in range(900)]
    rules = "\n".join(f'{name}: y "b"? "c"?' for name in names)
    grammar = f'start: s+\ns: {" | ".join(names)}\n{rules}\ny: "a" | "e" | "t" | " "'
    with pytest.raises(InvalidRequest, match="guided_decoding_guide cannot be followed: parser error: Too many items"):
        check_guide(_lark(grammar), vocabulary.tokens, parser_limits(200_000, 50_000))
