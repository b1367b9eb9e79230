"""What the stages read and send of resumed requests: each input by name, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.contract import TENSORRTLLM, TRTLLM
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import InflightError, InvalidRequest
from inflight.sampling import SamplingParams
from inflight.settings.deployment import LimitSettings
from inflight.text.postprocess import Postprocessor
from inflight.text.upstream import UpstreamPreprocessor
from inflight.triton import response_writer
from inflight.triton.request_reader import OutputOptions, SubRequest, read_request
from inflight.triton.send_limiter import SendLimiter
from inflight.triton.streams import ResponseStreams
from tests.support.tokenizers import FAMILIES, make_tokenizer
from tests.support.waiting import wait_until
from tests.unit.support.senders import FakeSender

IDS = np.array([[7, 8]], np.int32)
LOG_PROBS = np.array([[-0.5, -1.25]], np.float32)
ON = np.ones((1, 1), np.bool_)


def _read(engine: str = "pytorch", **more: np.ndarray) -> tuple[OutputOptions, list[SubRequest]]:
    rows = max(len(array) for array in (IDS, *more.values()))
    arrays = {"input_ids": np.ones((rows, 3), np.int32), "request_output_len": np.full((rows, 1), 4, np.int32)}
    usual = {"streaming": np.ones((rows, 1), np.bool_), "resumed_ids": IDS}
    return read_request(arrays | usual | more, "", LimitSettings(), 100, True, engine, max_sequences=16)


def test_what_was_generated_is_read_with_its_log_probs() -> None:
    _, [part] = _read(resumed_log_probs=LOG_PROBS, return_log_probs=ON)
    assert (part.request.resumed_ids, part.request.resumed_log_prob) == ([7, 8], -1.75)
    assert part.request.prompt == [1, 1, 1]
    _, [part] = _read(resumed_ids=np.zeros((1, 0), np.int32), return_log_probs=ON)
    assert part.request.resumed_ids == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"resumed_ids": np.full((1, 4), 5, np.int32)}, "resumed_ids has 4 tokens; it must have fewer than max_tokens"),
        ({"return_log_probs": ON}, "resumed_log_probs has 0 values; it must have 2: one for each"),
        ({"resumed_log_probs": LOG_PROBS}, "resumed_log_probs has 2 values; it must have 0: one for each"),
        *(
            (
                {"resumed_log_probs": np.array([log_probs], np.float32), "return_log_probs": ON},
                "resumed_log_probs has the sum",
            )
            for log_probs in ([-0.5, -np.inf], [np.nan, -0.5], [np.inf, -np.inf], [-3e38, -3e38])
        ),
        (
            {"num_return_sequences": 2 * ON.astype(np.int32)},
            "num_return_sequences above 1 is not supported with resumed",
        ),
        ({"pooling": np.array([[b"last"]], object)}, "pooling is not supported with resumed_ids"),
        ({"resumed_ids": np.tile(IDS, (2, 1))}, "a batch of rows is not supported with resumed_ids"),
        ({"streaming": ~ON}, "exclude_input_in_output is false; with resumed_ids only new text"),
        (
            {"return_token_ids": ON, "beam_width": 2 * ON.astype(np.int32)},
            "return_token_ids is not supported",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InflightError) as refused:
        _read(**more)
    assert str(refused.value).startswith(message)


def test_beams_without_token_ids_may_say_so() -> None:
    options, _ = _read(return_token_ids=~ON, beam_width=2 * ON.astype(np.int32))
    assert not options.return_token_ids


@pytest.mark.parametrize("name", ["resumed_ids", "resumed_log_probs", "return_token_ids"])
def test_other_engines_refuse_each_input(name: str) -> None:
    value = {"resumed_ids": IDS, "resumed_log_probs": LOG_PROBS, "return_token_ids": ON}[name]
    with pytest.raises(InflightError, match=f"^{name} is not supported by this engine"):
        _read(TRTLLM, **{"resumed_ids": IDS[:, :0], name: value})
    assert UpstreamPreprocessor.engine == TENSORRTLLM
    assert name in {tensor.name for tensor in UpstreamPreprocessor.table if not tensor.served(TENSORRTLLM)}


def _part(**sampling: Any) -> tuple[OutputOptions, SubRequest]:
    options, [part] = _read(return_token_ids=ON, heartbeat=ON)
    part.request.sampling = SamplingParams(4, **sampling)
    part.request.begin()
    return options, part


def test_the_seed_is_told_of_a_sequence_that_samples() -> None:
    """With a greedy one's seed beside it, a request with the usual temperature would sample."""
    options, part = _part(temperature=0.7)
    assert response_writer.opening(part.request, options)["used_seed"].item() == part.request.seed
    options, part = _part(temperature=0.7, seed=2**64 - 1)
    assert response_writer.opening(part.request, options)["used_seed"].item() == 2**64 - 1
    options, part = _part(seed=5)
    assert "used_seed" not in response_writer.opening(part.request, options)
    options, part = _part(temperature=0.7)
    assert "used_seed" not in response_writer.opening(part.request, replace(options, return_token_ids=False))


def test_only_the_detokenizer_gets_what_was_resumed() -> None:
    options, part = _part()
    assert response_writer.opening(part.request, options)["resumed_output_ids"].tolist() == [[7, 8]]
    assert response_writer.opening(part.request, replace(options, heartbeat=False)) == {}
    assert response_writer.opening(Request([1], SamplingParams(4)), options) == {}


def test_the_first_of_two_responses_does_not_show_what_the_second_settles() -> None:
    """Of a step with two tokens the first is sent alone, and a client may resume behind it."""
    output = Output(1, [5, 6], text_limit=9, text_limits=[3, 9], finish_reason=FinishReason.LENGTH)
    first, last = response_writer.split_last(output)
    assert (first.tokens, first.text_limit) == ([5], 3)
    assert (last.tokens, last.text_limit) == ([6], 9)


@pytest.mark.parametrize("decoupled", [True, False])
def test_sums_and_lengths_go_on_and_what_was_resumed_comes_once(decoupled: bool) -> None:
    stage: Any = SimpleNamespace(count_end=lambda output: None, cancel=lambda key: None)
    sender: Any = FakeSender()
    streams = ResponseStreams(stage, decoupled)
    answered: Any = SimpleNamespace(count=1 << 62)  # the detokenizer has answered all
    streams.start(stage, SendLimiter(answered))
    asked: dict[str, Any] = dict.fromkeys(
        ("heartbeat", "return_log_probs", "return_num_output_tokens", "return_token_ids"), ON
    )
    whole: dict[str, Any] = {} if decoupled else {"streaming": ~ON, "exclude_input_in_output": ON}
    options, [part] = _read(**asked, **whole, resumed_log_probs=LOG_PROBS)
    streams.open(sender, options, [part])
    key = part.request.key
    streams.deliver(Output(key, [5], log_probs=[-1.0]))
    assert wait_until(lambda: bool(sender.sent) or not decoupled, 30)
    streams.deliver(Output(key, [6], log_probs=[-2.0], finish_reason=FinishReason.LENGTH))
    assert sender.ended.wait(30)
    streams.close()
    sent = [arrays for _, arrays in sender.sent if arrays["output_ids"].size]
    assert [token for arrays in sent for token in arrays["token_ids"].reshape(-1).tolist()] == [5, 6]
    assert (sent[-1]["num_output_tokens"].item(), sent[-1]["cum_log_probs"].item()) == (4, -4.75)
    assert [arrays["resumed_output_ids"].tolist() for arrays in sent if "resumed_output_ids" in arrays] == [[[7, 8]]]


@pytest.mark.parametrize("ids", [[[-1]], [[2**31 - 1]]])
def test_forged_ids_are_refused_at_the_detokenizer(ids: list[list[int]]) -> None:
    stage = Postprocessor(make_tokenizer(FAMILIES[0]))
    arrays = response_writer.heartbeat_arrays(1) | {
        "output_ids": np.array([[[5]]], np.int32),
        "sequence_length": np.array([[1]], np.int32),
        "resumed_output_ids": np.array(ids, np.int32),
    }
    with pytest.raises(InvalidRequest, match="^resumed_output_ids has token"):
        stage.postprocess(arrays)
    assert len(stage) == 0
