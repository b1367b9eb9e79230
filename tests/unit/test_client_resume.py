"""Streams that break and go on, over gRPC and HTTP: the answer is the one that nothing broke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from inflight import errors
from inflight.client import Chunk, Client, Completion, GenerateOptions, HttpClient, Retry, ServerUnreachable, resume
from inflight.client.errors import from_wire
from inflight.client.http_transport import error_of
from inflight.client.resume import Resumption
from inflight.client.retry import Attempts
from inflight.errors import InflightError
from tests.support.cutting import Cutter
from tests.support.fake_server import PIECES, Break, FakeServer, Faults
from tests.support.tables import each_row

RESUME = Retry(first_pause=0.01, resume=True)
DEAD = "in ensemble 'ensemble', message: Stub process 'tensorrt_llm_0_0' is not healthy."
BROKE = "the server broke under this request; send it again later"
"""The door's words."""
EVERYTHING = GenerateOptions(
    seed=7,
    temperature=1.0,
    return_log_probs=True,
    num_top_log_probs=2,
    num_prompt_log_probs=0,
    return_num_input_tokens=True,
    return_num_output_tokens=True,
)
Make = Callable[..., Client | HttpClient]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(pieces=("", *PIECES, "", "é")) as server:  # some tokens end within a character
        yield server


@pytest.fixture(params=["grpc", "http"])
def make(request: pytest.FixtureRequest, fake: FakeServer) -> Iterator[Make]:
    made: list[Client | HttpClient] = []

    def client(port: int | None = None, retry: Retry = RESUME) -> Client | HttpClient:
        kind, own = (Client, fake.grpc_port) if request.param == "grpc" else (HttpClient, fake.http_port)
        made.append(kind(f"127.0.0.1:{port or own}", retry=retry))
        return made[-1]

    yield client
    for one in made:
        one.close()


def read(client: Client | HttpClient, options: GenerateOptions) -> tuple[list[Chunk], Completion]:
    with client.stream("Hi", options) as stream:
        chunks = list(stream)
    return chunks, timeless(stream.completion())


def timeless(answer: Completion) -> Completion:
    """Return the answer without what differs from run to run."""
    others = tuple(map(timeless, answer.alternatives))
    return replace(answer, first_chunk_seconds=None, seconds=0.0, outputs={}, alternatives=others)


BREAKS = [
    [Break(1)],
    [Break(3, DEAD)],
    [Break(2, "UNAVAILABLE: the server is stopping", away=2)],
    [Break(2, silent=True)],
    [Break(1), Break(0), Break(4, DEAD)],
    [Break(0, DEAD)],
]


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("sequences", [None, 3])
def test_a_broken_stream_is_the_unbroken_one(
    make: Make, fake: FakeServer, breaks: list[Break], sequences: int | None
) -> None:
    options = replace(EVERYTHING, num_return_sequences=sequences)
    unbroken = read(make(), options)
    fake.requests.clear()
    fake.faults = Faults(breaks=[replace(one, after=one.after * (sequences or 1)) for one in breaks])
    chunks, answer = read(make(), options)
    assert answer == unbroken[1]
    assert not fake.faults.breaks, "each break has been met"
    for index in range(sequences or 1):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.text for chunk in own] == list(fake.pieces)
        assert len(answer.token_ids) == len(own)


@pytest.mark.sweep
@pytest.mark.parametrize("after", range(1, 20))
def test_sequences_that_break_at_any_response_are_merged(make: Make, fake: FakeServer, after: int) -> None:
    """Some of the sequences have ended then, and of some nothing has come."""
    options = replace(EVERYTHING, num_return_sequences=3)
    unbroken = read(make(), options)
    fake.faults = Faults(breaks=[Break(after)])
    assert read(make(), options)[1] == unbroken[1]


def test_what_nobody_gave_a_seed_goes_on_with_the_servers(make: Make, fake: FakeServer) -> None:
    fake.faults = Faults(breaks=[Break(3), Break(2)])
    _, answer = read(make(), GenerateOptions(temperature=1.0))
    assert answer.used_seed is not None
    assert [inputs.get("seed") for inputs in fake.requests] == [None, answer.used_seed, answer.used_seed]
    assert read(make(), GenerateOptions(temperature=1.0, seed=answer.used_seed))[1] == answer


def test_what_is_resumed_by_hand_can_break_too(make: Make, fake: FakeServer) -> None:
    chunks, whole = read(make(), EVERYTHING)
    options = replace(EVERYTHING, num_prompt_log_probs=None, resumed_ids=whole.token_ids[:2])
    options = replace(options, resumed_log_probs=whole.log_probs[:2])
    fake.faults = Faults(breaks=[Break(3)])
    _, rest = read(make(), options)
    assert rest.token_ids == whole.token_ids[2:]
    assert rest.text == "".join(chunk.text for chunk in chunks[2:])
    assert rest.cum_log_prob == whole.cum_log_prob


def test_a_connection_that_is_cut_is_resumed(make: Make, fake: FakeServer, request: pytest.FixtureRequest) -> None:
    unbroken = read(make(), EVERYTHING)
    held = [threading.Event(), threading.Event()]
    fake.faults = Faults(after=2, holds=list(held))  # no more is on its way when the connection is cut
    with Cutter(fake.grpc_port if request.node.callspec.params["make"] == "grpc" else fake.http_port) as cutter:
        with make(cutter.port).stream("Hi", EVERYTHING) as stream:
            for number, _ in enumerate(stream):
                if number in (1, 3):
                    cutter.cut()
                    held.pop(0).set()
        assert timeless(stream.completion()) == unbroken[1]
        assert stream.breaks == 2


def test_a_request_meets_three_breaks_and_no_more(make: Make, fake: FakeServer) -> None:
    fake.faults = Faults(breaks=[Break(1)] * 5)
    with pytest.raises(ServerUnreachable), make().stream("Hi") as stream:
        list(stream)
    assert len(fake.requests) == 4
    assert stream.completion().text == "".join(fake.pieces[:4])
    fake.requests.clear()
    fake.faults = Faults(breaks=[Break(0)] * 5)
    with pytest.raises(ServerUnreachable):
        make().generate("Hi")
    assert len(fake.requests) == 4


def test_an_answer_that_has_come_is_not_lost_by_a_late_break(make: Make, fake: FakeServer) -> None:
    unbroken = read(make(), EVERYTHING)
    fake.faults = Faults(breaks=[Break(len(fake.pieces))])
    assert read(make(), EVERYTHING)[1] == unbroken[1]
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    "refusal",
    [
        "UNIMPLEMENTED: return_token_ids is not supported by engine.kind trtllm",
        "INVALID_ARGUMENT: [request id: 1] unexpected inference input 'return_token_ids' for model 'ensemble'",
    ],
)
def test_a_server_without_token_ids_serves_what_it_can(make: Make, fake: FakeServer, refusal: str) -> None:
    fake.faults = Faults(no_token_ids=refusal)
    assert read(make(), GenerateOptions())[0][-1].finish_reason == "stop"
    fake.faults = Faults(no_token_ids=refusal, breaks=[Break(1)])
    with pytest.raises(ServerUnreachable), make().stream("Hi") as stream:
        list(stream)
    assert stream.completion().text == fake.pieces[0]


def test_token_ids_that_were_asked_for_are_not_left_out(make: Make, fake: FakeServer) -> None:
    fake.faults = Faults(no_token_ids="UNIMPLEMENTED: return_token_ids is not supported by engine.kind trtllm")
    with pytest.raises(errors.UnsupportedFeature, match="return_token_ids"):
        read(make(), GenerateOptions(return_token_ids=True))
    assert len(fake.requests) == 1


def test_what_cannot_be_resumed_is_tried_again_as_a_whole(make: Make, fake: FakeServer) -> None:
    fake.faults = Faults(breaks=[Break(0), Break(0, DEAD)])
    assert make().generate("Hi", GenerateOptions(beam_width=2)).text == "".join(fake.pieces)
    assert not any("return_token_ids" in inputs for inputs in fake.requests)


def test_the_deadline_counts_from_the_first_try(make: Make, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.0, 140.0, 199.0, 200.0, 200.0])  # begun, sent, broken twice, and over
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(Resumption, "within_deadline", lambda self, pause: pause)
    fake.faults = Faults(breaks=[Break(2), Break(1), Break(0)])
    _, answer = read(make(), GenerateOptions(deadline_ms=100_000))
    assert [inputs["deadline_ms"] for inputs in fake.requests] == [100_000, 60_000, 1_000]
    assert (answer.text, answer.finish_reason) == ("".join(fake.pieces[:3]), "deadline")


def test_a_deadline_before_the_first_token_is_an_error(
    make: Make, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: next(times)))
    fake.faults = Faults(breaks=[Break(0)])
    with pytest.raises(errors.DeadlineExceeded, match="while the server was away"):
        read(make(), GenerateOptions(deadline_ms=1_000))


@pytest.mark.parametrize(("after", "ends"), [(2, ["deadline", "deadline"]), (1, None)])
def test_a_deadline_of_several_sequences_is_an_error_where_one_has_no_token(
    make: Make, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, after: int, ends: list[str] | None
) -> None:
    times = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: next(times)))
    fake.faults = Faults(breaks=[Break(after)])
    options = GenerateOptions(deadline_ms=1_000, num_return_sequences=2)
    if ends is None:
        with pytest.raises(errors.DeadlineExceeded):
            read(make(), options)
        return
    _, answer = read(make(), options)
    assert [one.finish_reason for one in (answer, *answer.alternatives)] == ends


def test_the_servers_own_error_at_the_deadline_stays_one(make: Make, fake: FakeServer) -> None:
    said = "DEADLINE_EXCEEDED: the request's deadline passed before its first token"
    fake.faults = Faults(breaks=[Break(1, said)])
    with pytest.raises(errors.DeadlineExceeded, match="before its first token"):
        read(make(), GenerateOptions(deadline_ms=100_000, num_return_sequences=2))


def test_refusals_that_cannot_be_waited_for_end_the_stream(make: Make, fake: FakeServer) -> None:
    fake.faults = Faults(breaks=[Break(2, away=99)], retry_after="30")
    with pytest.raises(ServerUnreachable), make(retry=replace(RESUME, longest_outage=20)).stream("Hi") as stream:
        list(stream)
    assert stream.completion().text == "".join(fake.pieces[:2])
    assert len(fake.requests) == 2


def test_text_that_comes_twice_is_an_error(make: Make, fake: FakeServer) -> None:
    fake.faults = Faults(breaks=[Break(3)], forget=True)
    with pytest.raises(errors.EngineFailure, match="has come twice"):
        read(make(), GenerateOptions())


def test_pauses_are_those_that_the_answer_asks_for() -> None:
    error: InflightError = error_of(503, b"busy", "7")
    assert Attempts(Retry()).pause(error, progressed=False) == 7
    assert Attempts(Retry()).pause(error_of(429, b"too many", "3600"), progressed=False) == 30
    for strange in (None, "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "1.5", "²"):
        assert error_of(503, b"busy", strange).retry_after_s is None


def test_a_server_that_is_away_is_asked_each_second_until_the_outage_is_too_long() -> None:
    attempts = Attempts(Retry(resume=True))
    away = ServerUnreachable("failed to connect")
    pauses = [attempts.pause(away, progressed=False) for _ in range(100)]
    assert all(pause is not None and pause <= 1 for pause in pauses)
    assert Attempts(Retry(resume=True, longest_outage=0)).pause(away, progressed=False) is None
    full = Attempts(Retry(attempts=2, resume=True))
    assert full.pause(errors.QueueFull("full"), progressed=False) is not None
    assert full.pause(errors.QueueFull("full"), progressed=False) is None, "nothing has begun that could be lost"


def test_a_dying_server_is_one_break_however_often_it_answers() -> None:
    attempts, dead = Attempts(Retry(resume=True)), from_wire(DEAD)
    assert attempts.pause(dead, progressed=True) is not None
    for _ in range(20):
        assert attempts.pause(dead, progressed=False) is not None
    away = ServerUnreachable("failed to connect")
    for _ in range(2):
        assert attempts.pause(away, progressed=False) is not None
        assert attempts.pause(dead, progressed=False) is not None
        assert attempts.pause(ServerUnreachable("Socket closed", broke=True), progressed=False) is not None
    assert attempts.pause(away, progressed=False) is not None
    assert attempts.pause(dead, progressed=False) is None


@pytest.mark.parametrize("retry", [Retry(attempts=99), Retry(resume=True)])
def test_a_request_under_which_servers_break_is_not_sent_for_ever(retry: Retry) -> None:
    attempts, broke = Attempts(retry), from_wire(BROKE, "UNAVAILABLE")
    for _ in range(3):
        assert attempts.pause(ServerUnreachable("failed to connect"), progressed=False) is not None
        assert attempts.pause(broke, progressed=False) is not None
    assert attempts.pause(broke, progressed=False) is None


def test_too_many_requests_may_be_sent_later_and_too_large_ones_may_not() -> None:
    assert type(from_wire("this client sends too many requests", "RESOURCE_EXHAUSTED")) is errors.QueueFull
    large = from_wire("SERVER: Received message larger than max (5 vs. 4)", "RESOURCE_EXHAUSTED")
    assert type(large) is errors.EngineFailure


@each_row(
    ("message", "status", "broke"),
    [
        ("Stream removed (recvmsg:Connection reset by peer (104))", "UNAVAILABLE", True),
        ("Stream removed (RST_STREAM (Received RST_STREAM with error code 2))", "INTERNAL", True),
        ("Stream removed (Data frame with END_STREAM flag received)", "UNKNOWN", True),
        ("Received RST_STREAM with error code 8", "CANCELLED", True),
        ("Internal error from Core", "INTERNAL", True),
        ("GOAWAY received", "UNAVAILABLE", True),
        ("upstream connect error or disconnect/reset before headers. reset reason: connection termination", "", True),
        ("Received http2 header with status: 502", "UNAVAILABLE", True),
        ("Received http2 header with status: 503", "UNAVAILABLE", False),
        ("no healthy upstream", "UNAVAILABLE", False),
        (BROKE, "UNAVAILABLE", True),
        (DEAD, "INTERNAL", True),
        (
            "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure",
            "",
            False,
        ),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: recvmsg:Reset", "", False),
    ],
)
def test_breaks_as_grpc_and_proxies_tell_them(message: str, status: str, broke: bool) -> None:
    error = from_wire(message, status or "UNAVAILABLE")
    assert isinstance(error, ServerUnreachable), error
    assert error.broke is broke


def test_a_message_about_a_clients_text_is_no_broken_stream() -> None:
    assert type(from_wire("INVALID_ARGUMENT: stop_words has 'RST_STREAM'")) is errors.InvalidRequest
