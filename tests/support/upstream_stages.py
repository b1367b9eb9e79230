"""The text stages around upstream's C++ backend, wired together in arrays, and what that backend answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from inflight.contract import EXPECTATION, MARK
from inflight.settings.deployment import LimitSettings
from inflight.text.preprocess import RawRequest
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import MARKS, STREAM_MARKS, UpstreamPreprocessor
from inflight.text.upstream_answers import UpstreamPostprocessor

PROMPT = "The quick brown fox"
LENGTH = 64
"""Tokens of a sequence, in the engine."""


class Stages:
    """Both stages, the detokenizer's told by the tokenizer's as over a call from stage to stage."""

    def __init__(self, tokenizer: Tokenizer, max_length: int = LENGTH, **settings: Any) -> None:
        self.postprocessor = UpstreamPostprocessor(tokenizer)
        self.preprocessor = UpstreamPreprocessor(tokenizer, LimitSettings(), self._announce, max_length, **settings)
        self.stops = 0

    def _announce(self, announcement: bytes) -> int | None:
        answer = self.postprocessor.postprocess({EXPECTATION: np.array([[announcement]], object)})
        assert answer is not None
        mark: int = answer[MARK].item()
        return None if mark < 0 else mark

    def preprocess(self, request_id: str = "", rows: int = 1, text: str = PROMPT, **more: Any) -> dict[str, np.ndarray]:
        """Return what the engine gets, or raise what the client gets."""
        texts = np.array([[text.encode()]] * rows, object)
        arrays = {"text_input": texts} | {name: np.array([[value]] * rows) for name, value in more.items()}
        if "stop_words" in more:
            words = more["stop_words"] if isinstance(more["stop_words"], list) else [more["stop_words"]]
            arrays["stop_words"] = np.array([[word.encode() for word in words]] * rows, object)
        return self.preprocessor.preprocess(RawRequest(arrays, {}, request_id))

    def answer(self, arrays: dict[str, np.ndarray], request_id: str = "") -> dict[str, np.ndarray] | None:
        """Return what the client gets of one response of the engine."""
        outputs = self.postprocessor.postprocess(arrays, request_id)
        self.stops += self.postprocessor.ends_engine(arrays)
        return outputs


def response(
    asked: dict[str, np.ndarray], ids: list[int], last: bool = False, arrival: int = 1, **more: int
) -> dict[str, np.ndarray]:
    """Return a response of upstream's engine to a request; one that does not stream begins with the prompt."""
    mark = sum(bit * bool(asked[flag].all()) for flag, bit in MARKS.items())
    unary = mark not in STREAM_MARKS
    prompt = asked["input_ids"][0].tolist() if unary else []
    arrays = {
        "output_ids": np.array(prompt + ids, np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(prompt + ids)]], np.int32),
    }
    assert asked["return_num_input_tokens"].all()
    arrays["num_input_tokens"] = np.array([asked["input_lengths"][0]], np.int32)
    if asked["return_num_output_tokens"].all():
        arrays["num_output_tokens"] = np.array([[len(prompt + ids)]], np.int32)
    if asked["return_perf_metrics"].all():
        arrays["arrival_time_ns"] = np.array([[arrival]], np.int64)
        arrays["last_token_time_ns"] = np.array([[9 if last or unary else 0]], np.int64)
    return arrays | {name: np.array([[value]], np.int32) for name, value in more.items()}


def text_of(outputs: dict[str, np.ndarray] | None) -> str:
    assert outputs is not None
    return str(outputs["text_output"][0].decode())


def reason_of(outputs: dict[str, np.ndarray] | None) -> str | None:
    assert outputs is not None
    return outputs["finish_reason"].item().decode() if "finish_reason" in outputs else None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    [ids] = tokenizer.encode_batch([text], add_special_tokens=False)
    return ids


def with_ends(tokenizer: Tokenizer, *ends: int) -> Tokenizer:
    return Tokenizer(tokenizer._backend, replace(tokenizer.config, end_ids=frozenset(ends)))
