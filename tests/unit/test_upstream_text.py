"""The text stages around upstream's C++ backend, in arrays: what they say to it, and what they make of its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inflight.contract import ENSEMBLE_INPUTS, UPSTREAM_TOKENIZER_OUTPUTS
from inflight.deployment import LimitSettings
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.text.prepare import RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import UpstreamAssembler, UpstreamPreparer
from tests.tokenizers_for_tests import FAMILIES, make_tokenizer

TEXT = "naïve 😀 done"


def prepare(tokenizer: Tokenizer, request_id: str = "", rows: int = 1, **more: Any) -> dict[str, np.ndarray]:
    texts = np.array([[b"The quick brown fox"]] * rows, object)
    arrays = {"text_input": texts} | {name: np.array([[value]] * rows) for name, value in more.items()}
    if "stop_words" in more:
        arrays["stop_words"] = np.array([[more["stop_words"].encode()]] * rows, object)
    [result] = UpstreamPreparer(tokenizer, LimitSettings()).prepare([RawRequest(arrays, {}, request_id)])
    if isinstance(result, Exception):
        raise result
    return result


def words(outputs: dict[str, np.ndarray], row: int = 0) -> list[list[int]]:
    ids, ends = outputs["stop_words_list"][row].tolist()
    ends = [end for end in ends if end >= 0]
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer("byte level")


def with_ends(tokenizer: Tokenizer, *ends: int) -> Tokenizer:
    return Tokenizer(tokenizer._backend, replace(tokenizer.config, end_ids=frozenset(ends)))


def test_one_end_id_goes_and_the_others_are_stop_words(tokenizer: Tokenizer) -> None:
    outputs = prepare(with_ends(tokenizer, 2, 7, 9), rows=2)
    assert outputs["end_id"].tolist() == [[2], [2]]
    assert words(outputs) == words(outputs, 1) == [[7], [9]]
    assert set(outputs) <= {tensor.name for tensor in UPSTREAM_TOKENIZER_OUTPUTS}


def test_what_the_request_says_of_its_end_wins(tokenizer: Tokenizer) -> None:
    tokenizer = with_ends(tokenizer, 2, 7)
    for more, end in (({"end_id": 5}, 5), ({"end_id": -1}, -1), ({"ignore_eos": True}, -1)):
        outputs = prepare(tokenizer, **more)
        assert outputs["end_id"].tolist() == [[end]]
        assert "stop_words_list" not in outputs


def test_stop_words_go_as_tokens_alone_and_after_a_space(tokenizer: Tokenizer) -> None:
    sequences = words(prepare(with_ends(tokenizer, 2), stop_words="lazy dog"))
    assert [tokenizer.decode(ids) for ids in sequences] == ["lazy dog", " lazy dog"]


def test_flags_say_whether_the_prompt_comes_back(tokenizer: Tokenizer) -> None:
    for more, echo in (({}, True), ({"exclude_input_in_output": True}, False), ({"stream": True}, False)):
        outputs = prepare(tokenizer, "id", **more)
        assert outputs["return_num_output_tokens"].tolist() == [[echo]]
        assert outputs["return_num_input_tokens"].tolist() == [[echo]]
        assert outputs["return_perf_metrics"].all()
    asked = prepare(tokenizer, "id", stream=True, return_num_input_tokens=True)
    assert asked["return_num_input_tokens"].all()
    assert not asked["return_num_output_tokens"].any()


REFUSED = [tensor for tensor in ENSEMBLE_INPUTS if not tensor.served("tensorrtllm")]


@pytest.mark.parametrize("tensor", REFUSED, ids=lambda tensor: tensor.name)
def test_every_tensor_that_upstream_is_not_given_is_refused_by_name(tokenizer: Tokenizer, tensor: Any) -> None:
    value: Any = b"x" if tensor.dtype == "BYTES" else 3
    with pytest.raises(UnsupportedFeature, match=tensor.name):
        prepare(tokenizer, "id", **{tensor.name: value})


def test_a_neutral_value_asks_for_nothing(tokenizer: Tokenizer) -> None:
    prepare(tokenizer, "id", min_p=0.0, priority=0, beam_width=1, length_penalty=1.0)


def test_a_stream_needs_an_id(tokenizer: Tokenizer) -> None:
    prepare(tokenizer, "id", stream=True)
    with pytest.raises(InvalidRequest, match="the request id is missing"):
        prepare(tokenizer, stream=True)


def response(ids: list[int], last: bool, arrival: int = 1, **more: int) -> dict[str, np.ndarray]:
    arrays = {
        "output_ids": np.array(ids, np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(ids)]], np.int32),
        "arrival_time_ns": np.array([[arrival]], np.int64),
        "last_token_time_ns": np.array([[9 if last else 0]], np.int64),
    }
    return arrays | {name: np.array([[value]], np.int32) for name, value in more.items()}


def text_of(outputs: dict[str, np.ndarray] | None) -> str:
    assert outputs is not None
    return str(outputs["text_output"][0].decode())


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_of_one_id_join_to_their_texts(family: str) -> None:
    """Token by token, in turns: rows, sequences and arrival times keep the streams apart; nothing held back is lost."""
    tokenizer = make_tokenizer(family)
    assembler = UpstreamAssembler(tokenizer)
    [ids] = tokenizer.encode_batch([TEXT], add_special_tokens=False)
    streams = [{"arrival": 1}, {"arrival": 2}, {"arrival": 1, "batch_index": 1}, {"arrival": 1, "sequence_index": 1}]
    texts = [""] * len(streams)
    for position, token in enumerate(ids):
        for index, stream in enumerate(streams):
            last = position == len(ids) - 1
            outputs = assembler.assemble(response([token], last, **stream), "same")
            texts[index] += text_of(outputs)
            assert outputs is not None
            assert outputs["num_output_tokens"].tolist() == [[position + 1]]
            assert ("finish_reason" in outputs) is last
            assert "arrival_time_ns" in outputs  # its clients read the figures of every response
    assert texts == [tokenizer.decode(ids)] * len(streams)
    assert len(assembler) == 0


def test_an_end_without_a_token_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode_batch(["😀"], add_special_tokens=False)
    assembler = UpstreamAssembler(tokenizer)
    assert text_of(assembler.assemble(response(ids[:-1], last=False), "a")) == ""
    assert text_of(assembler.assemble(response([], last=True), "a")) == "\N{REPLACEMENT CHARACTER}"


def test_the_prompt_is_taken_off_the_count_and_kept_in_the_text(tokenizer: Tokenizer) -> None:
    prompt, answer = tokenizer.encode_batch(["The fox", " jumps"], add_special_tokens=False)
    whole = response(prompt + answer, True, num_input_tokens=len(prompt), num_output_tokens=len(prompt + answer))
    outputs = UpstreamAssembler(tokenizer).assemble(whole, "")
    assert text_of(outputs) == "The fox jumps"
    assert outputs is not None
    assert outputs["num_output_tokens"].tolist() == [[len(answer)]]
    assert outputs["finish_reason"].tolist() == [[b"unknown"]]


def test_a_stop_has_what_upstream_requires_of_every_request(tokenizer: Tokenizer) -> None:
    [stop] = UpstreamAssembler(tokenizer).stops(response([1], last=False))
    assert set(stop) == {"stop", "input_lengths", "request_output_len"}
    assert stop["stop"].all()
