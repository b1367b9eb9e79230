"""What may end a sequence, and when: stops before ``min_tokens``, across the prompt's border, and when preempted."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest

from inflight.engine.loop import EngineLoop
from inflight.engine.request import FinishReason, Output
from tests.engine.support.checkpoints import VOCAB, checkpoint, greedy
from tests.engine.support.driving import Collector, ask, assert_idle, load, run
from tests.support.tokenizers import make_tokenizer

PROMPT = [5, 6, 7, 8, 9]
TOKENIZER = make_tokenizer("byte level")


def _tokens(count: int = 12) -> list[int]:
    return greedy("llama", tuple(PROMPT), count)


def _end(**options: Any) -> Output:
    return run(load(checkpoint("llama"), TOKENIZER), [ask(PROMPT, 12, **options)]).popitem()[1]


def _places(sequence: tuple[int, ...]) -> list[int]:
    """How many tokens are generated each time this sequence is at their end."""
    tokens = _tokens()
    return [end for end in range(len(sequence), 13) if tuple(tokens[end - len(sequence) : end]) == sequence]


def _late_stop() -> tuple[int, ...]:
    """Return two tokens that are generated in a row only once, late."""
    pairs = [tuple(_tokens()[start : start + 2]) for start in range(9, 4, -1)]
    return next(pair for pair in pairs if len(_places(pair)) == 1)


@functools.cache
def _readable() -> tuple[tuple[int, ...], str, str]:
    """Return a prompt, the text that follows, and a string that is in it once, neither at its start nor late."""
    for first in range(1, VOCAB):
        tokens = greedy("llama", (first, 7), 12)
        text = TOKENIZER.decode(tokens)
        for stop in (TOKENIZER.decode([token]) for token in tokens[2:6]):
            if stop and stop.isprintable() and "\N{REPLACEMENT CHARACTER}" not in stop and text.count(stop) == 1:
                return (first, 7), text, stop
    raise AssertionError("no prompt leads to a readable text")


def test_a_stop_sequence_counts_from_min_tokens_on() -> None:
    stop = tuple(_tokens()[1:3])
    assert _places(stop) == [3]
    assert len(_end(stop_sequences=(stop,)).tokens) == 3
    assert len(_end(stop_sequences=(stop,), min_tokens=3).tokens) == 3
    output = _end(stop_sequences=(stop,), min_tokens=4)
    assert (output.finish_reason, output.tokens) == (FinishReason.LENGTH, _tokens())


def test_a_stop_string_counts_from_min_tokens_on() -> None:
    prompt, text, stop = _readable()

    def end(**options: Any) -> Output:
        request = ask(prompt, 12, stop_strings=(stop,), **options)
        return run(load(checkpoint("llama"), TOKENIZER), [request])[request.key]

    early, late = end(), end(min_tokens=8)
    assert (early.finish_reason, early.text_limit) == (FinishReason.STOP, text.index(stop))
    assert (late.finish_reason, late.text_limit) == (FinishReason.LENGTH, len(text))
    assert late.tokens == greedy("llama", prompt, 12)


def test_an_end_id_is_not_drawn_before_min_tokens() -> None:
    first = _tokens()[0]
    output = _end(end_ids=frozenset({first}), min_tokens=5)
    assert first not in output.tokens[:5]
    assert len(output.tokens) >= 5
    assert _end(end_ids=frozenset({first})).tokens == []


def test_a_stop_sequence_does_not_begin_in_the_prompt() -> None:
    """The prompt's last token and the first generated one are no match: the prompt is not output."""
    across = (PROMPT[-1], _tokens()[0])
    assert not _places(across)
    output = _end(stop_sequences=(across,))
    assert (output.finish_reason, output.tokens) == (FinishReason.LENGTH, _tokens())


def test_the_first_of_several_ends_wins() -> None:
    tokens = _tokens()
    output = _end(stop_sequences=((tokens[6],), (tokens[4], tokens[5]), tuple(tokens[1:3])))
    assert output.tokens == tokens[: min(_places((tokens[6],)) + _places(tuple(tokens[1:3])))]


@pytest.mark.parametrize("reuse", [True, False])
def test_stops_are_found_when_the_request_was_preempted(reuse: bool) -> None:
    """What was generated before the preemption is not matched twice, nor forgotten."""
    stop, (prompt, text, string) = _late_stop(), _readable()
    engine = load(checkpoint("llama"), TOKENIZER, policy="max_utilization", num_blocks=9, prefix_reuse=reuse)
    by_tokens = ask(PROMPT, 12, priority=-1, stop_sequences=(stop,))
    by_text = ask(prompt, 12, priority=-2, stop_strings=(string,))
    others = [ask([40 + index] * 5, 12, priority=1) for index in range(2)]
    for request in (by_tokens, by_text):
        engine.submit(request)
    sequences = [engine._sequences[request.key] for request in (by_tokens, by_text)]
    engine.step()
    outputs = run(engine, others)
    assert sequences[0].tokens == [*PROMPT, *_tokens()[: _places(stop)[0]]]
    assert outputs[by_text.key].text_limit == text.index(string)
    assert {outputs[request.key].finish_reason for request in (by_tokens, by_text)} == {FinishReason.STOP}
    assert any(one.metrics.preemptions for one in sequences)


def test_an_idle_loop_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After requests have ended, were cancelled, or never existed, its thread sleeps."""
    engine, collect, turns = load(checkpoint("llama")), Collector(), []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: turns.append(1) or step())
    loop = EngineLoop(engine, collect, 10)
    first, second = ask(PROMPT, 400), ask(PROMPT, 2)
    for request in (first, second):
        loop.submit(request)
    loop.cancel(first.key)
    loop.cancel(12345)
    last = collect.wait(first, second)[0]
    assert last.finish_reason is FinishReason.CANCELLED
    loop.cancel(first.key)
    turned = threading.Event()
    loop.between_steps(turned.set)
    assert turned.wait(30)
    time.sleep(0.2)
    before = len(turns)
    time.sleep(0.2)
    assert len(turns) <= before + 1, "a loop that spins makes thousands"
    loop.close()
    assert_idle(engine)
