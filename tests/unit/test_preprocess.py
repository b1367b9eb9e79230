"""The tokenizer stage without Triton: what a request becomes, and what is refused by name."""

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


def _preprocess(request: RawRequest, **limits: int) -> Arrays:
    return Preprocessor(letters(), LimitSettings(**limits)).preprocess(request)


def _ids(outputs: Arrays) -> list[list[int]]:
    lengths = outputs["input_lengths"].reshape(-1)
    return [row[:length].tolist() for row, length in zip(outputs["input_ids"], lengths, strict=True)]


def _refusal(request: RawRequest, **limits: int) -> str:
    with pytest.raises((InvalidRequest, UnsupportedFeature)) as refused:
        _preprocess(request, **limits)
    return str(refused.value)


def test_what_cannot_be_encoded_is_refused_by_name() -> None:
    chat = RawRequest({"messages": _strings(['[{"role": "user", "content": "xyz"}]'])}, {})
    assert "text_input cannot be encoded by this checkpoint's tokenizer: " in _refusal(_request("a?"))
    assert "text_input cannot be encoded" in _refusal(_request("b", "?"))
    assert "messages cannot be encoded" in _refusal(chat)
    assert "text_input is empty" in _refusal(_request(""))


def test_rows_get_the_ids_that_each_would_get_alone() -> None:
    texts = ["abc", "a b", "cab", "a"]
    alone = [_ids(_preprocess(_request(text)))[0] for text in texts]
    assert alone == [[1, 2, 3], [1, LETTERS[" "], 2], [3, 1, 2], [1]]
    assert _ids(_preprocess(_request(*texts))) == alone


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a", "-"], "bad_words has '-', for which the model has no token"),
        (["a?"], "bad_words cannot be encoded"),
    ],
    ids=str,
)
def test_a_bad_word_that_nothing_could_ban_is_refused(words: list[str], reason: str) -> None:
    assert reason in _refusal(_request("a", **_words(words)))


def test_words_of_a_bias_are_refused_alike() -> None:
    for word, reason in (("-", "'-', for which the model has no token"), ("?", "cannot be encoded")):
        bias = {"embedding_bias_words": _strings([word]), "embedding_bias_weights": np.ones((1, 1), np.float32)}
        refusal = _refusal(_request("a", **bias))
        assert "embedding_bias_words" in refusal
        assert reason in refusal


def _bias(tokenizer: Tokenizer, words: list[str], weights: list[float]) -> Arrays:
    bias = {"embedding_bias_words": _strings(words), "embedding_bias_weights": np.array([weights], np.float32)}
    return Preprocessor(tokenizer, LimitSettings()).preprocess(_request("a", **bias))


def test_the_weights_of_words_that_share_a_token_add_up() -> None:
    outputs = _bias(letters(), ["ab", "bc"], [1.0, 0.5])
    assert outputs["embedding_bias"].tolist() == [[0, 1.0, 1.5, 0.5, 0]]


def test_a_bias_for_a_token_just_beyond_the_models_vocabulary_is_refused() -> None:
    tokenizer = letters()
    tokenizer.config = replace(tokenizer.config, vocab_size=LETTERS[" "])
    with pytest.raises(InvalidRequest, match="' ', for which the model has no token"):
        _bias(tokenizer, [" "], [1.0])


def test_bad_words_are_banned_alone_and_after_a_space() -> None:
    outputs = _preprocess(_request("a", "b", **_words(["ab", "ab", "c"], ["", "b", ""])))
    ids, ends = outputs["bad_words_list"].transpose(1, 0, 2).tolist()
    assert ids == [[1, 2, 4, 1, 2, 3, 4, 3], [2, 4, 2, 0, 0, 0, 0, 0]]
    assert ends == [[2, 5, 6, 8, -1, -1, -1, -1], [1, 3, -1, -1, -1, -1, -1, -1]]


def test_spellings_that_the_vocabulary_has_for_both_places() -> None:
    """Byte level: a word after a space is another token; one spelt alike in both places is listed once."""
    tokenizer = make_tokenizer("byte level")
    words = _words(["the"])
    outputs = Preprocessor(tokenizer, LimitSettings()).preprocess(_request("x", **words))
    [alone, spaced] = tokenizer.encode_batch(["the", " the"])
    ids, ends = outputs["bad_words_list"][0].tolist()
    assert ids == alone + spaced
    assert [end for end in ends if end >= 0] == [len(alone), len(ids)]


def test_stop_words_stay_text() -> None:
    """They are matched on text: no token is needed for them."""
    outputs = _preprocess(_request("a", "b", stop_words=_strings(["?", "-"], ["ab", ""])))
    assert outputs["stop_strings"].tolist() == [[b"?", b"-"], [b"ab", b""]]


def test_exactly_as_much_as_the_limits_is_served() -> None:
    outputs = _preprocess(_request("abcab", **_words(["a", "bc"])), max_words=2, max_words_bytes=3, max_prompt_bytes=5)
    assert _ids(outputs) == [[1, 2, 3, 1, 2]]


def test_too_many_words_and_too_long_a_prompt_are_named_with_their_limits() -> None:
    words = _refusal(_request("a", **_words(["a", "b", "c"])), max_words=2)
    assert words == "bad_words has 3 words; the limit is 2"
    assert _refusal(_request("abcabc"), max_prompt_bytes=5) == "text_input has 6 bytes; the limit is 5"


def test_word_lists_are_laid_out_as_upstream_does() -> None:
    assert word_lists([[[5, 6], [7]], []]).tolist() == [[[5, 6, 7], [2, 3, -1]], [[0, 0, 0], [-1, -1, -1]]]
    assert word_lists([[], []]).shape == (2, 2, 0)


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded() -> None:
    stage = Preprocessor(letters(), LimitSettings(), longest=20)
    for count, said in ((100_000, "more than 8192 tokens"), (200, "more than 100 tokens"), (160, None), (20, None)):
        request = _request("ab" * (count // 2))
        if said is None:
            assert stage.preprocess(request)["input_lengths"].tolist() == [[count]]
            continue
        with pytest.raises(InvalidRequest, match=rf"the prompt length \({said}\) exceeds the limit; .* 20 tokens"):
            stage.preprocess(request)
