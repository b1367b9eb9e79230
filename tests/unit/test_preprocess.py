"""The tokenizer stage without Triton: each request of a batch succeeds or fails alone, and by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.settings.deployment import LimitSettings
from inflight.text.preprocess import Arrays, Preprocessor, RawRequest, word_lists
from inflight.text.tokenizer import Tokenizer
from tests.support.tokenizers import LETTERS, letters, make_tokenizer


def _request(*texts: str, **more: Any) -> RawRequest:
    arrays = {name: np.array(value) for name, value in more.items()}
    return RawRequest({"text_input": _strings(*([text] for text in texts))} | arrays, {})


def _strings(*rows: Sequence[str]) -> np.ndarray:
    return np.array([[text.encode() for text in row] for row in rows], object)


def _words(*rows: Sequence[str]) -> dict[str, np.ndarray]:
    return {"bad_words": _strings(*rows)}


def _preprocess(*requests: RawRequest, **limits: int) -> list[Arrays | Exception]:
    return Preprocessor(letters(), LimitSettings(**limits)).preprocess(requests)


def _ids(outcome: Arrays | Exception) -> list[list[int]]:
    assert not isinstance(outcome, Exception), outcome
    lengths = outcome["input_lengths"].reshape(-1)
    return [row[:length].tolist() for row, length in zip(outcome["input_ids"], lengths, strict=True)]


def _refusal(outcome: Arrays | Exception) -> str:
    assert isinstance(outcome, InvalidRequest | UnsupportedFeature), outcome
    return str(outcome)


def test_a_prompt_that_cannot_be_encoded_fails_alone() -> None:
    chat = RawRequest({"messages": _strings(['[{"role": "user", "content": "xyz"}]'])}, {})
    outcomes = _preprocess(_request("ab"), _request("a?"), _request("c", "ba"), chat, _request(""), _request("b", "?"))
    assert [_ids(outcome) for outcome in (outcomes[0], outcomes[2])] == [[[1, 2]], [[3], [2, 1]]]
    assert "text_input cannot be encoded by this checkpoint's tokenizer: " in _refusal(outcomes[1])
    assert "messages cannot be encoded" in _refusal(outcomes[3])
    assert "text_input is empty" in _refusal(outcomes[4])
    assert "text_input cannot be encoded" in _refusal(outcomes[5])


def test_a_batch_is_encoded_together_and_answered_one_by_one() -> None:
    texts = ["abc", "a b", "cab", "a"]
    together = _preprocess(*(_request(text) for text in texts), _request(*texts))
    alone = [_ids(_preprocess(_request(text))[0])[0] for text in texts]
    assert [_ids(outcome) for outcome in together] == [*([ids] for ids in alone), alone]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a", "-"], "bad_words has '-', for which the model has no token"),
        (["a?"], "bad_words cannot be encoded"),
    ],
    ids=str,
)
def test_a_bad_word_that_nothing_could_ban_is_refused(words: list[str], reason: str) -> None:
    refused, other = _preprocess(_request("a", **_words(words)), _request("b"))
    assert reason in _refusal(refused)
    assert _ids(other) == [[2]]


def test_words_of_a_bias_are_refused_alike() -> None:
    for word, reason in (("-", "'-', for which the model has no token"), ("?", "cannot be encoded")):
        bias = {"embedding_bias_words": _strings([word]), "embedding_bias_weights": np.ones((1, 1), np.float32)}
        [outcome] = _preprocess(_request("a", **bias))
        assert "embedding_bias_words" in _refusal(outcome)
        assert reason in _refusal(outcome)


def _bias(tokenizer: Tokenizer, words: list[str], weights: list[float]) -> Arrays | Exception:
    bias = {"embedding_bias_words": _strings(words), "embedding_bias_weights": np.array([weights], np.float32)}
    [outcome] = Preprocessor(tokenizer, LimitSettings()).preprocess([_request("a", **bias)])
    return outcome


def test_the_weights_of_words_that_share_a_token_add_up() -> None:
    outcome = _bias(letters(), ["ab", "bc"], [1.0, 0.5])
    assert not isinstance(outcome, Exception), outcome
    assert outcome["embedding_bias"].tolist() == [[0, 1.0, 1.5, 0.5, 0]]


def test_a_bias_for_a_token_just_beyond_the_models_vocabulary_is_refused() -> None:
    tokenizer = letters()
    tokenizer.config = replace(tokenizer.config, vocab_size=LETTERS[" "])
    assert "' ', for which the model has no token" in _refusal(_bias(tokenizer, [" "], [1.0]))


def test_bad_words_are_banned_alone_and_after_a_space() -> None:
    [outcome] = _preprocess(_request("a", "b", **_words(["ab", "ab", "c"], ["", "b", ""])))
    assert not isinstance(outcome, Exception), outcome
    ids, ends = outcome["bad_words_list"].transpose(1, 0, 2).tolist()
    assert ids == [[1, 2, 4, 1, 2, 3, 4, 3], [2, 4, 2, 0, 0, 0, 0, 0]]
    assert ends == [[2, 5, 6, 8, -1, -1, -1, -1], [1, 3, -1, -1, -1, -1, -1, -1]]


def test_spellings_that_the_vocabulary_has_for_both_places() -> None:
    """Byte level: a word after a space is another token; one spelt alike in both places is listed once."""
    tokenizer = make_tokenizer("byte level")
    words = _words(["the"])
    [outcome] = Preprocessor(tokenizer, LimitSettings()).preprocess([_request("x", **words)])
    assert not isinstance(outcome, Exception), outcome
    [alone, spaced] = tokenizer.encode_batch(["the", " the"])
    ids, ends = outcome["bad_words_list"][0].tolist()
    assert ids == alone + spaced
    assert [end for end in ends if end >= 0] == [len(alone), len(ids)]


def test_stop_words_stay_text() -> None:
    """They are matched on text: no token is needed for them."""
    [outcome] = _preprocess(_request("a", "b", stop_words=_strings(["?", "-"], ["ab", ""])))
    assert not isinstance(outcome, Exception), outcome
    assert outcome["stop_strings"].tolist() == [[b"?", b"-"], [b"ab", b""]]


def test_exactly_as_much_as_the_limits_is_served() -> None:
    [outcome] = _preprocess(
        _request("abcab", **_words(["a", "bc"])), max_words=2, max_words_bytes=3, max_prompt_bytes=5
    )
    assert _ids(outcome) == [[1, 2, 3, 1, 2]]


def test_too_many_words_and_too_long_a_prompt_are_named_with_their_limits() -> None:
    words, prompt = _preprocess(
        _request("a", **_words(["a", "b", "c"])), _request("abcabc"), max_words=2, max_prompt_bytes=5
    )
    assert _refusal(words) == "bad_words has 3 words; the limit is 2"
    assert _refusal(prompt) == "text_input has 6 bytes; the limit is 5"


def test_word_lists_are_laid_out_as_upstream_does() -> None:
    assert word_lists([[[5, 6], [7]], []]).tolist() == [[[5, 6, 7], [2, 3, -1]], [[0, 0, 0], [-1, -1, -1]]]
    assert word_lists([[], []]).shape == (2, 2, 0)
