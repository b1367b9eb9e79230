"""Stops that TensorRT-LLM ends at by itself: no abort is needed, and the text is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.request import FinishReason, Request
from inflight.sampling import SamplingParams
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.request_arguments import single_stop_tokens
from tests.support.tokenizers import FAMILIES, LETTERS, letters, make_tokenizer
from tests.trtllm.support.driving import ask, deployment, run


def test_words_of_one_token_are_told_and_others_are_not(tokenizer: Tokenizer) -> None:
    [[token], several] = tokenizer.encode_batch([" and", "and so forth"])
    assert len(several) > 1
    asked = SamplingParams(16, stop_strings=(" and", "and so forth"), stop_sequences=((7,), (8, 9)))
    assert single_stop_tokens(asked, tokenizer) == {token, 7}


def test_a_word_that_the_vocabulary_cannot_spell_is_not_told() -> None:
    assert single_stop_tokens(SamplingParams(16, stop_strings=("?", "b")), letters()) == {LETTERS["b"]}


def test_before_the_least_number_of_tokens_nothing_may_stop(tokenizer: Tokenizer) -> None:
    for least, told in ((0, True), (1, True), (2, False)):
        asked = SamplingParams(16, min_tokens=least, stop_strings=(" and",))
        assert bool(single_stop_tokens(asked, tokenizer)) is told


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_is_told_ends_the_text_wherever_it_comes(family: str) -> None:
    """Of every word that is one token: it is told only if the text ends by it, as the first token and later."""
    tokenizer = make_tokenizer(family)
    told = 0
    for token in range(tokenizer.config.vocab_size):
        text = tokenizer.decode([token])
        if not text:
            continue
        for stop in single_stop_tokens(SamplingParams(1, stop_strings=(text,)), tokenizer):
            told += 1
            for before in ([], *tokenizer.encode_batch(["The", "日", "a 😀"])):
                limit = StopTextLimit(tokenizer, [text])
                for one in before:
                    limit.push(one)
                limit.push(stop)
                assert limit.matched, (text, before)
    assert told > 5


@pytest.mark.proof
def test_the_text_is_the_portable_engines_and_nothing_is_aborted(
    start: Callable[..., TrtLlmEngine], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tokenizer.encode_batch(
        [f"What is {what}?" for what in ("TTFT", "FP8", "paging")], add_special_tokens=True
    )
    portable = Engine.load(EngineConfig.of(deployment()), tokenizer)
    words = [
        tokenizer.decode([token]) for output in run(portable, *map(_long, prompts)) for token in output.tokens[4:9]
    ]
    stops = [word for word in words if len(tokenizer.encode_batch([word])[0]) == 1]

    def requests() -> list[Request]:
        return [_long(prompt, stop_strings=(stop,)) for prompt in prompts for stop in stops[:6]]

    engine, asked = start(deployment()), requests()
    aborted: list[int] = []
    monkeypatch.setattr(engine._runtime, "abort", aborted.append)
    theirs, ours = run(engine, *asked), run(portable, *requests())
    assert [(one.tokens, one.finish_reason, one.text_limit) for one in theirs] == [
        (one.tokens, one.finish_reason, one.text_limit) for one in ours
    ]
    told = {
        request.key
        for request, output in zip(asked, theirs, strict=True)
        if output.finish_reason is FinishReason.STOP
        and output.tokens[-1] in single_stop_tokens(request.sampling, tokenizer)
    }
    assert len(told) > 3
    assert not told & set(aborted)


def _long(prompt: list[int], **sampling: Any) -> Request:
    return ask(prompt, max_tokens=40, ignore_eos=True, **sampling)
