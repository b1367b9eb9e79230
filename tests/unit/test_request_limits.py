"""How much a request may ask for in words, ids and biases: the same at the tokenizer and at the engine's stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequest
from inflight.sampling import MAX_SEED, SamplingParams
from inflight.settings.deployment import LimitSettings
from inflight.text.preprocess import Arrays, Preprocessor, RawRequest
from inflight.triton import request_reader
from inflight.triton.request_reader import read_request
from tests.support.tokenizers import make_tokenizer

LIMITS = LimitSettings(max_words=3, max_words_bytes=10, max_prompt_bytes=100)


def _strings(*texts: str) -> np.ndarray:
    return np.array([[text.encode() for text in texts]], object)


def _preprocess(**more: np.ndarray) -> Arrays:
    preprocessor = Preprocessor(make_tokenizer("byte level"), LIMITS)
    return preprocessor.preprocess(RawRequest({"text_input": _strings("x")} | more, {}))


def _refusal(**more: np.ndarray) -> str:
    with pytest.raises(InvalidRequest) as refused:
        _preprocess(**more)
    return str(refused.value)


def _read(sequences: int = 1, **more: Any) -> list[SamplingParams]:
    scalars = {"request_output_len": 4, "num_return_sequences": sequences}
    arrays = {name: np.array([[value]]) for name, value in scalars.items()}
    arrays["input_ids"] = np.ones((1, 9), np.int32)
    _, parts = read_request(arrays | more, "", LIMITS, 100, True, "pytorch", max_sequences=256)
    return [part.request.sampling for part in parts]


def test_seeds_of_return_sequences_go_on_from_the_largest_to_zero() -> None:
    seed = np.array([[MAX_SEED]], np.uint64)
    assert [sampling.seed for sampling in _read(sequences=2, seed=seed)] == [MAX_SEED, 0]


def _list(ids: int, ends: list[int]) -> np.ndarray:
    return np.array([[[5] * ids, [*ends, *([-1] * (ids - len(ends)))]]], np.int32)


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_words_at_the_tokenizer(name: str) -> None:
    more = {"embedding_bias_weights": np.ones((1, 3), np.float32)} if name.startswith("embedding") else {}
    _preprocess(**{name: _strings("the", "qu", "é")}, **more)
    assert _refusal(**{name: _strings(*"abcd")}) == f"{name} has 4 words; the limit is 3"
    assert _refusal(**{name: _strings("the", "quick", "é😀")}) == f"{name} has 14 bytes of words; the limit is 10"


def test_what_else_has_a_limit_at_the_tokenizer() -> None:
    weights = np.ones((1, 4), np.float32)
    assert _refusal(embedding_bias_weights=weights) == "embedding_bias_weights has 4 elements; the limit is 3"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stop_strings": _strings(*"abcd")}, "stop_strings has 4 words; the limit is 3"),
        ({"stop_strings": _strings("x" * 11)}, "stop_strings has 11 bytes of words; the limit is 10"),
        ({"end_ids": np.arange(4)[None]}, "end_ids has 4 elements; the limit is 3"),
        ({"end_id": np.array([[100]], np.int32)}, "end_id is 100; it must be a token id below 100, or -1 for none"),
        ({"stop_words_list": _list(7, [1, 2, 3, 4, 5, 6, 7])}, "stop_words_list has 7 words; the limit is 6"),
        ({"bad_words_list": _list(7, [1, 2, 3, 4, 5, 6, 7])}, "bad_words_list has 7 words; the limit is 6"),
        ({"bad_words_list": _list(27, [27])}, "bad_words_list has 27 token ids; the limit is 26"),
        (
            {"retention_token_range_starts": np.arange(4)[None]},
            "retention_token_range_starts has 4 elements; the limit is 3",
        ),
    ],
)
def test_words_and_ids_at_the_engine(more: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _read(**more)
    assert str(refused.value) == message


def test_more_sequences_than_the_queue_takes_are_refused_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes milliseconds, in the one thread that takes requests."""
    monkeypatch.setattr(request_reader, "_sampling", None)
    with pytest.raises(InvalidRequest, match=r"the request has 8 sequences .*; the queue takes 7"):
        read_request(
            {"input_ids": np.ones((2, 9), np.int32), "num_return_sequences": np.array([[4], [4]])},
            "", LIMITS, 100, True, "pytorch", max_sequences=7,
        )  # fmt: skip


def test_what_is_within_the_limits_is_read() -> None:
    lists = {name: _list(26, [1, 2, 3, 4, 5, 26]) for name in ("stop_words_list", "bad_words_list")}
    [sampling] = _read(stop_strings=_strings("aaa", "bbb", "cccc"), end_ids=np.arange(3)[None], **lists)
    assert sampling.stop_strings == ("aaa", "bbb", "cccc")
    assert len(sampling.stop_sequences) == len(sampling.bad_sequences) == 6
    assert sampling.end_ids == {0, 1, 2}


def test_a_list_without_an_end_has_no_word() -> None:
    [sampling] = _read(stop_words_list=_list(4, []))
    assert sampling.stop_sequences == ()


def test_the_tokenizers_own_lists_are_within_the_engines_limits() -> None:
    """The longest words that are taken, in tokens of one byte each, spelt alone and after a space."""
    outputs = _preprocess(bad_words=_strings("\x01\x02\x03", "\x04\x05\x06", "\x07\x08\x0e\x0f"))
    [sampling] = _read(bad_words_list=outputs["bad_words_list"])
    assert len(sampling.bad_sequences) == 6


def test_sequences_of_one_request_share_what_was_read() -> None:
    seeded = _read(sequences=3, seed=np.array([[2**64 - 1]], np.uint64))
    assert [one.seed for one in seeded] == [2**64 - 1, 0, 1]
    plain = _read(sequences=3)
    assert plain[0] is plain[1] is plain[2]
