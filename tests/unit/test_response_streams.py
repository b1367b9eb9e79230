"""Response streams with a sender that can be slow, deaf or broken: every request ends exactly once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.errors import DeadlineExceeded, EngineFailure, QueueFull, ShuttingDown
from inflight.sampling import SamplingParams
from inflight.triton.request_reader import OutputOptions, SubRequest
from inflight.triton.response_writer import Arrays
from inflight.triton.send_limiter import RESPONSES_PER_SECOND, SendLimiter
from inflight.triton.streams import HEARTBEAT_S, ResponseStreams
from tests.support.waiting import wait_until
from tests.unit.support.senders import FakeSender


def _options(**more: Any) -> OutputOptions:
    usual: dict[str, Any] = {
        "streaming": True,
        "exclude_input_in_output": False,
        "heartbeat": False,
        "return_log_probs": False,
        "return_perf_metrics": False,
        "final_perf_metrics": False,
        "return_num_input_tokens": False,
        "return_num_output_tokens": True,
        "pad_id": 0,
        "vocab_size": 16,
        "batch_size": 1,
        "sequences": 1,
    }
    return OutputOptions(**(usual | more))


def _subrequests(count: int = 1, rows: bool = False, **sampling: Any) -> list[SubRequest]:
    requests = [Request([1, 2], SamplingParams(8, **sampling), request_id="me") for _ in range(count)]
    return [SubRequest(one, index if rows else 0, 0 if rows else index) for index, one in enumerate(requests)]


class Stage:
    """The engine's loop and the stage's metrics, as far as the streams know them."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.ends: list[Output] = []
        self.refusals: list[Exception] = []
        self.cancel, self.count_end, self.count_refusal = self.cancelled.append, self.ends.append, self.refusals.append


def _start(stage: Stage, decoupled: bool = True) -> ResponseStreams:
    streams = ResponseStreams(stage, decoupled)
    streams.start(stage, SendLimiter(SimpleNamespace(count=1 << 62)))  # the detokenizer has answered all
    return streams


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def streams(stage: Stage) -> Any:
    made = _start(stage)
    yield made
    made.close()


def _end(key: int, *tokens: int) -> Output:
    return Output(key, list(tokens), finish_reason=FinishReason.LENGTH)


def test_tokens_arrive_in_order_and_the_last_response_is_final(streams: ResponseStreams) -> None:
    sender, [subrequest] = FakeSender(), _subrequests()
    streams.open(sender, _options(), [subrequest])
    for token in range(100):
        streams.deliver(Output(subrequest.request.key, [token]))
    streams.deliver(_end(subrequest.request.key, 100))
    assert sender.ended.wait(30)
    assert sender.tokens == list(range(101))
    assert [int(arrays["num_output_tokens"].item()) for _, arrays in sender.sent][-1] == 101
    assert len(streams) == 0


def test_many_streams_are_coalesced_and_none_starves(streams: ResponseStreams) -> None:
    senders, subrequests = [FakeSender() for _ in range(40)], [_subrequests()[0] for _ in range(40)]
    for sender, subrequest in zip(senders, subrequests, strict=True):
        streams.open(sender, _options(), [subrequest])
    started = time.monotonic()
    for token in range(150):
        for subrequest in subrequests:
            streams.deliver(Output(subrequest.request.key, [token]))
        time.sleep(0.002)
    elapsed = time.monotonic() - started
    for subrequest in subrequests:
        streams.deliver(_end(subrequest.request.key))
    assert all(sender.ended.wait(30) for sender in senders)
    assert all(sender.tokens == list(range(150)) for sender in senders)
    responses = sum(len(sender.sent) for sender in senders)
    assert responses <= elapsed * RESPONSES_PER_SECOND * 1.2 + 2 * len(senders)
    counts = [len(sender.sent) for sender in senders]
    assert max(counts) <= min(counts) * 1.5 + 3


def test_the_first_token_does_not_wait(streams: ResponseStreams) -> None:
    busy = [(FakeSender(), _subrequests()[0]) for _ in range(60)]
    for other, subrequest in busy:
        streams.open(other, _options(), [subrequest])
        streams.deliver(Output(subrequest.request.key, [1]))
    assert wait_until(lambda: all(len(other.sent) == 1 for other, _ in busy), every_s=0.001)
    sender, [new] = FakeSender(), _subrequests()
    with streams._changed:  # nothing is sent meanwhile
        for _, subrequest in busy:
            streams.deliver(Output(subrequest.request.key, [2]))
        streams.open(sender, _options(), [new])
        streams.deliver(Output(new.request.key, [5]))
    assert wait_until(lambda: all(len(other.sent) == 2 for other, _ in busy), every_s=0.001)
    assert sender.sent[0][0] <= min(other.sent[1][0] for other, _ in busy)


def test_the_rate_is_that_of_the_streams_that_have_begun_and_not_ended(stage: Stage) -> None:
    """Those that wait for their first token do not count; whatever ends a stream, it counts no longer."""
    counts: list[tuple[int, int]] = []
    limiter = SimpleNamespace(wait_s=0.0, may_send=lambda now: True, sent=lambda: None)
    limiter.reserve = lambda urgent, waited, now, streams: counts.append((streams, urgent + waited))
    streams, senders = ResponseStreams(stage, decoupled=True), [FakeSender() for _ in range(4)]
    streams.start(stage, limiter)
    subrequests = [_subrequests(2) for _ in range(4)]
    keys = [[one.request.key for one in both] for both in subrequests]
    try:
        for sender, both in zip(senders, subrequests, strict=True):
            streams.open(sender, _options(sequences=2), both)
        for begun, key in enumerate([*keys[0], *keys[1], keys[2][0]], 1):
            streams.deliver(Output(key, [1]))
            assert wait_until(lambda: len(counts) == begun, every_s=0.001)  # noqa: B023
        streams.deliver(_end(keys[0][0], 2))
        streams.deliver(Output(keys[1][0], error=EngineFailure("it failed")))
        assert senders[1].ended.wait(30)
        streams.deliver(Output(keys[3][0], [1]))
        assert wait_until(lambda: len(senders[3].sent) == 1, every_s=0.001)
    finally:
        streams.close()
    assert counts[:5] == [(begun, 1) for begun in range(5)], "a first token, urgent and the oldest, counts once"
    assert counts[-1][0] == 2, "of five, one has ended, and two of one request have failed together"


def test_several_sequences_end_with_one_final_flag(streams: ResponseStreams) -> None:
    sender, subrequests = FakeSender(), _subrequests(3)
    streams.open(sender, _options(sequences=3), subrequests)
    for subrequest in subrequests:
        streams.deliver(_end(subrequest.request.key, 7))
    assert sender.ended.wait(30)
    assert sorted(int(arrays["sequence_index"].item()) for _, arrays in sender.sent) == [0, 1, 2]


def test_the_sequences_of_a_stream_end_with_one_token_each_where_scores_come_with_it(streams: ResponseStreams) -> None:
    """Upstream's client stacks what came last of each sequence; without scores no token waits for the next."""
    sender, subrequests = FakeSender(), _subrequests(2, log_probs=True)
    streams.open(sender, _options(sequences=2, return_log_probs=True), subrequests)
    for subrequest, tokens in zip(subrequests, ([1, 2, 3], [4]), strict=True):
        streams.deliver(Output(subrequest.request.key, tokens, log_probs=[-float(token) for token in tokens]))
    first, second = (subrequest.request.key for subrequest in subrequests)
    streams.deliver(Output(first, finish_reason=FinishReason.STOP))
    streams.deliver(Output(second, [5, 6], log_probs=[-5.0, -6.0], finish_reason=FinishReason.LENGTH))
    assert sender.ended.wait(30)
    rows: list[list[list[int]]] = [[], []]
    for _, arrays in sender.sent:
        assert (arrays["output_log_probs"] == -arrays["output_ids"]).all()
        rows[arrays["sequence_index"].item()].append(arrays["output_ids"].reshape(-1).tolist())
    assert [row[-1] for row in rows] == [[3], [6]]
    assert [[token for tokens in row for token in tokens] for row in rows] == [[1, 2, 3], [4, 5, 6]]


def test_context_logits_come_with_the_last_response(streams: ResponseStreams) -> None:
    """Upstream's client keeps what the last one has, and requires what it asked for in each."""
    logits = np.ones((2, 16), np.float32)
    sender, [subrequest] = FakeSender(), _subrequests(context_logits=True, generation_logits=True)
    streams.open(sender, _options(), [subrequest])
    streams.deliver(Output(subrequest.request.key, [1], context_logits=logits, generation_logits=[logits[0]]))
    assert wait_until(lambda: sender.sent, every_s=0.001)
    streams.deliver(Output(subrequest.request.key, finish_reason=FinishReason.STOP))
    assert sender.ended.wait(30)
    shapes = [(arrays["context_logits"].shape, arrays["generation_logits"].shape) for _, arrays in sender.sent]
    assert shapes == [((1, 0, 16), (1, 1, 1, 16)), ((1, 2, 16), (1, 1, 0, 16))]


@pytest.mark.parametrize(
    ("asked", "expected"), [("return_perf_metrics", [True, True]), ("final_perf_metrics", [False, True])]
)
def test_figures_come_with_every_response_or_with_the_last(
    streams: ResponseStreams, asked: str, expected: list[bool]
) -> None:
    sender, [subrequest] = FakeSender(), _subrequests()
    metrics = RequestMetrics(arrival_ns=7)
    streams.open(sender, _options(**{asked: True}), [subrequest])
    streams.deliver(Output(subrequest.request.key, [1], metrics=metrics))
    assert wait_until(lambda: sender.sent, every_s=0.001)
    streams.deliver(Output(subrequest.request.key, [2], metrics=metrics, finish_reason=FinishReason.LENGTH))
    assert sender.ended.wait(30)
    assert ["arrival_time_ns" in arrays for _, arrays in sender.sent] == expected


def test_one_failed_sequence_fails_its_request_and_cancels_the_others(streams: ResponseStreams, stage: Stage) -> None:
    sender, subrequests = FakeSender(), _subrequests(3)
    streams.open(sender, _options(sequences=3), subrequests)
    streams.deliver(Output(subrequests[1].request.key, error=QueueFull("full")))
    assert sender.ended.wait(30)
    assert isinstance(sender.error, QueueFull)
    assert sorted(stage.cancelled) == sorted(subrequest.request.key for subrequest in (subrequests[0], subrequests[2]))
    for subrequest in subrequests:
        streams.deliver(_end(subrequest.request.key, 7))  # what the engine says afterwards reaches nobody
    assert len(streams) == 0


@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_request_that_the_engine_refused_is_forgotten(
    stage: Stage, heartbeat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = ResponseStreams(stage, True)  # its thread, which does not run, would poll it
    sender, subrequests = FakeSender(), _subrequests(2)
    asked: list[bool] = []
    monkeypatch.setattr(sender, "is_cancelled", lambda: asked.append(True))
    streams.open(sender, _options(sequences=2, heartbeat=heartbeat), subrequests)
    assert set(streams.keys_beside([subrequests[0].request.key])) == {
        subrequest.request.key for subrequest in subrequests
    }
    request = streams._streams[subrequests[0].request.key]
    streams.forget(subrequests)
    assert len(streams) == 0
    streams._poll_one(
        subrequests[0].request.key, request, time.monotonic(), interval=0
    )  # of a round that had begun before
    assert not sender.sent
    assert not asked
    assert not sender.ended.is_set()


@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_refusal_waits_until_its_request_is_not_polled(streams: ResponseStreams, heartbeat: bool) -> None:
    """Triton's thread sends the refusal: a response beside the last one of its request ends the server, and the
    question whether its client has gone reads what Triton frees with it."""
    polled, goes_on, polls = threading.Event(), threading.Event(), []

    class Slow(FakeSender):
        def send(self, arrays: Arrays, final: bool) -> None:
            self.is_cancelled()
            super().send(arrays, final)

        def is_cancelled(self) -> bool:
            polled.set()
            polls.append(goes_on.wait(30))
            return False

    sender, subrequests = Slow(), _subrequests(2)
    streams.open(sender, _options(sequences=2, heartbeat=heartbeat), subrequests)
    assert polled.wait(30)
    with ThreadPoolExecutor(1) as pool:
        forgotten = pool.submit(streams.forget, subrequests)
        with pytest.raises(TimeoutError):
            forgotten.result(0.3)
        goes_on.set()
        forgotten.result(30)
    assert polls == [True]
    time.sleep(2 * HEARTBEAT_S)
    assert polls == [True], "it is not polled any more"


def test_a_request_whose_response_cannot_be_written_is_told_of(streams: ResponseStreams, stage: Stage) -> None:
    sender = FakeSender(broken=True)
    [subrequest] = _subrequests()
    streams.open(sender, _options(), [subrequest])
    streams.deliver(Output(subrequest.request.key, [5], finish_reason=FinishReason.LENGTH))
    assert sender.ended.wait(30)
    streams.close()
    assert [type(error) for error in stage.refusals] == [EngineFailure]


def test_nothing_follows_a_response_that_could_not_be_written(streams: ResponseStreams, stage: Stage) -> None:
    """Of sequences with scores the last token comes alone: there are two responses to send at once."""
    sender = FakeSender(broken=True)
    subrequests = _subrequests(2, log_probs=True)
    streams.open(sender, _options(sequences=2, return_log_probs=True), subrequests)
    streams.deliver(
        Output(subrequests[0].request.key, [5, 6], log_probs=[-5.0, -6.0], finish_reason=FinishReason.LENGTH)
    )
    assert sender.ended.wait(30)
    streams.close()
    assert [type(error) for error in stage.refusals] == [EngineFailure]


def test_a_broken_sender_harms_nobody_else(streams: ResponseStreams) -> None:
    broken, sender = FakeSender(broken=True), FakeSender()
    [bad], [good] = _subrequests(), _subrequests()
    streams.open(broken, _options(), [bad])
    streams.open(sender, _options(), [good])
    for subrequest in (bad, good):
        streams.deliver(Output(subrequest.request.key, [1]))
        streams.deliver(_end(subrequest.request.key, 2))
    assert sender.ended.wait(30)
    assert sender.tokens == [1, 2]
    assert isinstance(broken.error, EngineFailure)


def test_a_gone_client_is_noticed(streams: ResponseStreams, stage: Stage) -> None:
    [subrequest] = _subrequests()
    streams.open(FakeSender(cancelled=True), _options(), [subrequest])
    assert wait_until(lambda: subrequest.request.key in stage.cancelled)


def test_a_silent_request_shows_that_it_lives(streams: ResponseStreams) -> None:
    (sender, [subrequest]), began = (FakeSender(), _subrequests()), time.monotonic()
    streams.open(sender, _options(streaming=False, heartbeat=True), [subrequest])
    assert wait_until(lambda: len(sender.sent) >= 2)
    streams.deliver(_end(subrequest.request.key, 3))
    assert sender.ended.wait(30)
    assert sender.sent[1][0] - began >= 2 * HEARTBEAT_S, "each costs the stages a response"
    assert all(arrays["output_ids"].size == 0 for _, arrays in sender.sent[:-1])
    assert sender.sent[-1][1]["output_ids"].reshape(-1).tolist() == [1, 2, 3]


def test_unary_rows_come_as_one_response(stage: Stage) -> None:
    streams = _start(stage, decoupled=False)
    sender, subrequests = FakeSender(), _subrequests(2, rows=True)
    streams.open(sender, _options(streaming=False, exclude_input_in_output=True, batch_size=2, pad_id=9), subrequests)
    streams.deliver(_end(subrequests[1].request.key, 5))
    streams.deliver(_end(subrequests[0].request.key, 3, 4))
    assert sender.ended.wait(30)
    [(_, arrays)] = sender.sent
    assert arrays["output_ids"].tolist() == [[[3, 4]], [[5, 9]]]
    assert arrays["sequence_length"].tolist() == [[2], [1]]
    streams.close()


def test_rows_of_a_unary_batch_are_padded_by_what_each_tensor_means(stage: Stage) -> None:
    streams = _start(stage, decoupled=False)
    sender, subrequests = FakeSender(), _subrequests(2, rows=True, log_probs=True)
    streams.open(
        sender,
        _options(streaming=False, exclude_input_in_output=True, batch_size=2, return_log_probs=True),
        subrequests,
    )
    keys = [one.request.key for one in subrequests]
    streams.deliver(Output(keys[0], [3, 4], [-0.5, -0.25], text_limit=2, finish_reason=FinishReason.STOP))
    streams.deliver(Output(keys[1], [5], [-0.125], finish_reason=FinishReason.LENGTH))
    assert sender.ended.wait(30)
    [(_, arrays)] = sender.sent
    assert arrays["output_log_probs"].tolist() == [[[-0.5, -0.25]], [[-0.125, -1]]]
    assert arrays["text_limit"].tolist() == [[2], [2**31 - 1]], "all text of the row without stop strings is shown"
    streams.close()


def test_closing_fails_a_request_of_several_sequences_once(stage: Stage) -> None:
    streams, failures = _start(stage), []

    class Counting(FakeSender):
        def fail(self, error: Exception, stream_key: int | None = None) -> None:
            failures.append(error)

    streams.open(Counting(), _options(sequences=3), _subrequests(3))
    streams.close()
    assert [type(error) for error in failures] == [ShuttingDown]


def test_ids_find_their_streams(streams: ResponseStreams) -> None:
    first, second = _subrequests(2), _subrequests()
    streams.open(FakeSender(), _options(sequences=2), first)
    streams.open(FakeSender(), _options(), second)
    assert streams.keys_of("me") == [subrequest.request.key for subrequest in first + second]
    assert streams.keys_of("other") == []


def test_closing_fails_what_runs(stage: Stage) -> None:
    streams = _start(stage)
    sender = FakeSender()
    streams.open(sender, _options(), _subrequests())
    done, [subrequest] = FakeSender(), _subrequests()
    streams.open(done, _options(), [subrequest])
    streams.deliver(_end(subrequest.request.key, 4))
    streams.close()
    assert isinstance(sender.error, ShuttingDown)
    assert done.tokens == [4], "what was finished is sent all the same"


@pytest.mark.parametrize("heartbeat", [True, False])
def test_only_the_detokenizer_is_left_to_tell_a_failure(streams: ResponseStreams, heartbeat: bool) -> None:
    """It alone knows whether the client is there; who asks the engine itself is told by the engine."""
    sender, [subrequest] = FakeSender(), _subrequests()
    key = subrequest.request.key
    streams.open(sender, _options(heartbeat=heartbeat), [subrequest])
    streams.deliver(Output(key, [], error=DeadlineExceeded("late")))
    assert sender.ended.wait(30)
    assert isinstance(sender.error, DeadlineExceeded)
    assert sender.failed_key == (key if heartbeat else None)
