"""Calls of the detokenizer that no engine makes: refused by name, and nothing of them stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequest
from inflight.settings.deployment import validate
from inflight.text import postprocess
from inflight.text.postprocess import Postprocessor
from inflight.text.upstream_answers import UpstreamPostprocessor
from tests.support.tokenizers import FAMILIES, make_tokenizer

SOUND = {
    "output_ids": np.array([[[5, 6]]], np.int32),
    "sequence_length": np.array([[2]], np.int32),
    "stream_key": np.array([[1]], np.int64),
}
NONE: Any = None
FORGED: list[tuple[dict[str, Any], str]] = [
    ({"output_ids": NONE}, "output_ids is missing"),
    ({"sequence_length": NONE}, "sequence_length is missing"),
    ({"stream_key": NONE}, "stream_key is missing"),
    ({"output_ids": np.array([[[-5, 6]]], np.int32)}, "output_ids has token -5"),
    ({"output_ids": np.array([[[5, 2**31 - 1]]], np.int32)}, "output_ids has token 2147483647"),
    ({"sequence_length": np.array([[3]], np.int32)}, r"sequence_length is \[3\]; it must fit output_ids, \[1, 2\]"),
    ({"sequence_length": np.array([[-1]], np.int32)}, r"sequence_length is \[-1\]"),
    ({"sequence_length": np.array([[1, 1]], np.int32)}, r"sequence_length is \[1, 1\]"),
    ({"sequence_length": np.zeros((1, 0), np.int32)}, r"sequence_length is \[\]"),
    ({"output_ids": np.zeros((1, 0, 2), np.int32), "finish_reason": np.array([[b"stop"]], object)}, "sequence_length"),
]


@pytest.mark.parametrize(("changes", "said"), FORGED)
def test_each_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    postprocessor = Postprocessor(make_tokenizer(FAMILIES[0]))
    arrays = {name: array for name, array in (SOUND | changes).items() if array is not None}
    with pytest.raises(InvalidRequest, match=said):
        postprocessor.postprocess(arrays)
    assert len(postprocessor) == 0


def test_more_ids_than_a_sequence_has_are_refused_before_they_are_decoded() -> None:
    postprocessor = Postprocessor(make_tokenizer(FAMILIES[0]), max_length=4)
    long = {"output_ids": np.full((1, 1, 5), 5, np.int32), "sequence_length": np.array([[5]], np.int32)}
    with pytest.raises(InvalidRequest, match="output_ids has rows of 5 ids; the limit is 4"):
        postprocessor.postprocess(SOUND | long)
    assert len(postprocessor) == 0


def test_of_too_many_streams_the_oldest_state_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a character of four bytes the first two have come: only who keeps the state gets the character."""
    monkeypatch.setattr(postprocess, "MAX_STREAMS", 2)
    tokenizer = make_tokenizer(FAMILIES[0])
    [ids] = tokenizer.encode_batch(["\N{CJK UNIFIED IDEOGRAPH-9F98}"], add_special_tokens=False)
    stage = Postprocessor(tokenizer)

    def text(key: int, ids: list[int]) -> str:
        shape = {"output_ids": np.array([[ids]], np.int32), "sequence_length": np.array([[len(ids)]], np.int32)}
        outputs = stage.postprocess(shape | {"stream_key": np.array([[key]], np.int64)})
        assert outputs is not None
        return str(outputs["text_output"].item().decode())

    for key in (1, 2, 3):
        assert text(key, ids[:1]) == ""
    assert len(stage) == 2
    assert [text(key, ids[1:]) for key in (2, 3)] == ["\N{CJK UNIFIED IDEOGRAPH-9F98}"] * 2
    assert "\N{REPLACEMENT CHARACTER}" in text(1, ids[1:])


@pytest.mark.parametrize(
    ("engine", "limits", "longest"),
    [
        ("pytorch", {}, 2048),
        ("pytorch", {"max_sequence_length": 4096}, 4096),
        ("trtllm", {"max_sequence_length": 4096}, 4096),
        ("trtllm", {}, None),
        ("replay", {}, None),
    ],
)
def test_how_many_ids_a_sequence_has(engine: str, limits: dict[str, int], longest: int | None) -> None:
    deployment = validate({"model": "x", "engine": {"kind": engine}, "limits": limits}, "test")
    assert deployment.max_sequence_length(2048) == longest


def test_what_upstreams_engine_always_sends_is_asked_for_by_name() -> None:
    postprocessor = UpstreamPostprocessor(make_tokenizer(FAMILIES[0]))
    with pytest.raises(InvalidRequest, match="num_input_tokens is missing"):
        postprocessor.postprocess(SOUND, "a")
    counted = {"last_token_time_ns": np.array([[0]], np.int64), "num_output_tokens": np.array([[2]], np.int32)}
    with pytest.raises(InvalidRequest, match="num_input_tokens is missing"):
        postprocessor.postprocess(SOUND | counted, "a")
