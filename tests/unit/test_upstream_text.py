"""The tokenizer stage before upstream's C++ backend, in arrays: what it says to it, and what it refuses."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest

from inflight.contract import ENSEMBLE_INPUTS, UPSTREAM_TOKENIZER_OUTPUTS
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.settings.deployment import LimitSettings
from inflight.text.preprocess import RawRequest
from inflight.text.stops import MAX_STOP_SEQUENCES, StopTokens
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamPreprocessor
from tests.support.tables import each_row
from tests.support.tokenizers import FAMILIES, letters, make_tokenizer
from tests.support.upstream_stages import LENGTH, PROMPT, Stages, encode, reason_of, response, with_ends


def words(outputs: dict[str, np.ndarray], row: int = 0) -> list[list[int]]:
    ids, ends = outputs["stop_words_list"][row].tolist()
    ends = [end for end in ends if end >= 0]
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return with_ends(make_tokenizer("byte level"), 2)


def test_one_end_id_goes_and_the_others_are_stop_words(tokenizer: Tokenizer) -> None:
    outputs = Stages(with_ends(tokenizer, 2, 7, 9)).preprocess(rows=2)
    assert outputs["end_id"].tolist() == [[2], [2]]
    assert words(outputs) == words(outputs, 1) == [[7], [9]]
    assert set(outputs) <= {tensor.name for tensor in UPSTREAM_TOKENIZER_OUTPUTS}


def test_what_the_request_says_of_its_end_wins(tokenizer: Tokenizer) -> None:
    stages = Stages(with_ends(tokenizer, 2, 7))
    for more, end in (({"end_id": 5}, 5), ({"end_id": -1}, -1), ({"ignore_eos": True}, -1)):
        outputs = stages.preprocess(**more)
        assert outputs["end_id"].tolist() == [[end]]
        assert "stop_words_list" not in outputs


@each_row("family", FAMILIES)
def test_token_sequences_of_a_stop_string_have_it_in_their_text(family: str) -> None:
    """Whatever stands before them: the engine ends there, and the detokenizer must find the match."""
    tokenizer = make_tokenizer(family)
    before = encode(tokenizer, "So a")
    for word in ("o", "fox", "fox ", "lazy dog", " q", "é", "\n"):
        for tokens in StopTokens(tokenizer).sequences(word):
            for start in ([], before):
                assert word in tokenizer.decode(start + tokens), (word, tokens)
    assert StopTokens(tokenizer).sequences("o")


@each_row("family", FAMILIES)
def test_stop_strings_that_are_in_most_tokens_share_what_the_engine_gets(family: str) -> None:
    """The engine compares with each at each step; the string as it is usually spelled goes before longer tokens."""
    tokenizer = make_tokenizer(family)
    letters = list(string.ascii_letters + " .,")
    for asked in (letters, [*letters, *(one + other for one in "aeio" for other in letters)][:256]):
        told = words(Stages(with_ends(tokenizer, 2, 7)).preprocess(stop_words=asked))
        assert len(told) <= MAX_STOP_SEQUENCES
        assert told[0] == [7], "an end id, which is not cut"
        for spelled in tokenizer.encode_batch(list("aeiou")):
            assert spelled in told or len(spelled) > 1
    assert len(StopTokens(tokenizer).sequences("e", 3)) == 3


def test_a_stop_word_that_names_a_special_token_is_an_end_id(tokenizer: Tokenizer) -> None:
    special = next(iter(tokenizer.token_bytes._special))
    name = tokenizer._backend.id_to_token(special)
    stages = Stages(with_ends(tokenizer, 1 if special != 1 else 2))
    asked = stages.preprocess("a", stream=True, stop_words=name)
    assert [special] in words(asked)
    assert reason_of(stages.answer(response(asked, [special]), "a")) == "stop"


def test_a_stop_word_that_the_vocabulary_cannot_spell_is_matched_on_text_alone() -> None:
    outputs = Stages(letters()).preprocess(text="ab", stop_words=["?", "b"])
    assert words(outputs) == [[2], [4, 2]]


def test_stop_words_and_further_end_ids_do_not_go_beside_min_tokens(tokenizer: Tokenizer) -> None:
    """Upstream's engine would end at them before."""
    assert "stop_words_list" not in Stages(tokenizer).preprocess(stop_words="fox", min_tokens=5)
    with pytest.raises(UnsupportedFeature, match="min_tokens is not supported .* beside several end ids"):
        Stages(with_ends(tokenizer, 2, 7)).preprocess(min_tokens=5)
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5; it must be between 0 and max_tokens \(4\)"):
        Stages(with_ends(tokenizer, 2, 7)).preprocess(min_tokens=5, max_tokens=4)


def test_flags_say_whether_the_prompt_comes_back(tokenizer: Tokenizer) -> None:
    stages = Stages(tokenizer)
    for more, unary in (({}, True), ({"exclude_input_in_output": True}, True), ({"stream": True}, False)):
        outputs = stages.preprocess("id", **more)
        assert not outputs["exclude_input_in_output"].any(), "its tokens say whose the answer is"
        assert outputs["return_num_input_tokens"].all()
        assert outputs["return_perf_metrics"].item() is not unary


@each_row(
    ("asked", "top_k", "top_p", "temperature"),
    [
        ({}, 1, 1.0, 1.0),
        ({"temperature": 0.0, "top_k": 40}, 1, 1.0, 1.0),
        ({"temperature": 0.5}, 0, 1.0, 0.5),
        ({"temperature": 1.0, "top_p": 0.5}, 0, 0.5, 1.0),
        ({"seed": 3}, 0, 1.0, 1.0),
    ],
)
def test_sampling_is_said_in_full(
    tokenizer: Tokenizer, asked: dict[str, Any], top_k: int, top_p: float, temperature: float
) -> None:
    """Upstream's own defaults are others: greedy without top_k, and one seed for all."""
    stages = Stages(tokenizer)
    outputs, again = stages.preprocess(**asked), stages.preprocess(**asked)
    assert outputs["runtime_top_k"].item() == top_k
    assert outputs["runtime_top_p"].item() == top_p
    assert outputs["temperature"].item() == temperature
    assert (outputs["seed"].item() == again["seed"].item()) == ("seed" in asked)


@each_row(
    ("asked", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 2.0}, "top_p is 2"),
        ({"min_tokens": 99, "max_tokens": 9}, "min_tokens is 99"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"end_id": -7}, "end_id is -7"),
    ],
)
def test_what_upstream_would_call_an_internal_error_is_refused_by_name(
    tokenizer: Tokenizer, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Stages(tokenizer).preprocess(**asked)


def test_a_prompt_that_the_engine_has_no_room_for_is_refused(tokenizer: Tokenizer) -> None:
    length = len(encode(tokenizer, PROMPT))
    Stages(tokenizer, max_length=length + 1).preprocess()
    with pytest.raises(InvalidRequest, match="the prompt length .* exceeds the limit"):
        Stages(tokenizer, max_length=length).preprocess()


@each_row(
    ("asked", "named"),
    [
        ({"stream": True}, "streaming"),
        ({"num_return_sequences": 2}, "num_return_sequences above 1"),
        ({"rows": 2}, "a batch of rows"),
    ],
)
def test_what_needs_several_responses_needs_a_decoupled_deployment(
    tokenizer: Tokenizer, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"{named} needs a decoupled deployment"):
        Stages(tokenizer, decoupled=False).preprocess("id", **asked)


@each_row(
    ("name", "values", "problem"),
    [
        ("num_return_sequences", [1, 0], "differs between the rows"),
        ("num_return_sequences", [1, 10**6], "differs between the rows"),
        ("stream", [True, False], "differs between the rows"),
    ],
)
def test_rows_that_differ_in_what_a_request_has_once_are_refused(
    tokenizer: Tokenizer, name: str, values: list[Any], problem: str
) -> None:
    texts = np.array([[PROMPT.encode()]] * 2, object)
    wrong = {"text_input": texts, name: np.array([[value] for value in values])}
    with pytest.raises(InvalidRequest, match=f"{name} {problem}"):
        Stages(tokenizer).preprocessor.preprocess(RawRequest(wrong, {}, "bad"))


REFUSED = [tensor for tensor in ENSEMBLE_INPUTS if not tensor.served("tensorrtllm")]


@each_row("tensor", REFUSED, ids=lambda tensor: tensor.name)
def test_every_tensor_that_upstream_is_not_given_is_refused_by_name(tokenizer: Tokenizer, tensor: Any) -> None:
    value: Any = b"x" if tensor.dtype == "BYTES" else 3
    with pytest.raises(UnsupportedFeature, match=tensor.name):
        Stages(tokenizer).preprocess("id", **{tensor.name: value})


def test_a_neutral_value_asks_for_nothing(tokenizer: Tokenizer) -> None:
    Stages(tokenizer).preprocess("id", min_p=0.0, priority=0, beam_width=1, length_penalty=1.0)


def test_a_detokenizer_that_does_not_answer_fails_the_requests_that_it_must_know_of(tokenizer: Tokenizer) -> None:
    def fail(announcement: bytes) -> int | None:
        raise ConnectionError("gone")

    preprocessor = UpstreamPreprocessor(tokenizer, LimitSettings(), fail, LENGTH)
    with pytest.raises(InvalidRequest):
        preprocessor.preprocess(RawRequest({}, {}))
    with pytest.raises(ConnectionError):
        preprocessor.preprocess(RawRequest({"text_input": np.array([[b"Hi"]], object)}, {}))
