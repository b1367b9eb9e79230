"""Whole requests over gRPC and HTTP, blocking and asyncio, against a server that fails on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inflight import errors
from inflight.client import (
    AsyncClient,
    AsyncHttpClient,
    Client,
    GenerateOptions,
    HttpClient,
    RequestTimeout,
    Retry,
    ServerUnreachable,
    Timeouts,
    grpc_transport,
    sync,
)
from inflight.client.errors import from_wire
from tests.support.fake_server import PIECES, FakeServer, Faults

TEXT = "".join(PIECES)
NO_RETRY = Retry(attempts=1)
QUICK = Retry(attempts=4, first_pause=0.02)
Make = Callable[..., Any]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def blocking(request: pytest.FixtureRequest, fake: FakeServer) -> Iterator[Make]:
    """Make a blocking client of the fake server."""
    made: list[Client | HttpClient] = []

    def make(**arguments: Any) -> Client | HttpClient:
        kind, port = (Client, fake.grpc_port) if request.param == "grpc" else (HttpClient, fake.http_port)
        made.append(kind(f"127.0.0.1:{port}", **arguments))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture(params=["grpc", "http"])
def parallel(request: pytest.FixtureRequest, fake: FakeServer) -> Make:
    """Make an asyncio client of the fake server."""
    kind, port = (AsyncClient, fake.grpc_port) if request.param == "grpc" else (AsyncHttpClient, fake.http_port)
    return lambda **arguments: kind(f"127.0.0.1:{port}", **arguments)


def test_stream_is_the_text(blocking: Make, fake: FakeServer) -> None:
    options = GenerateOptions(
        max_tokens=9, stop_words=["a", "b"], return_num_input_tokens=True, return_num_output_tokens=True
    )
    with blocking().stream("Hi", options, request_id="r1") as stream:
        chunks = list(stream)
    assert tuple(chunk.text for chunk in chunks) == PIECES
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, None, "stop"]
    answer = stream.completion()
    assert (answer.text, answer.finish_reason) == (TEXT, "stop")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 5)
    assert answer.first_chunk_seconds is not None
    assert 0 < answer.first_chunk_seconds <= answer.seconds
    (inputs,) = fake.requests
    assert inputs.pop("") == "r1"
    assert inputs == {
        "text_input": "Hi",
        "max_tokens": 9,
        "stop_words": ["a", "b"],
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "exclude_input_in_output": True,
        "stream": True,
    }


def test_generate_is_one_response(blocking: Make, fake: FakeServer) -> None:
    answer = blocking().generate([{"role": "user", "content": "Hi"}])
    assert (answer.text, answer.finish_reason) == (TEXT, "stop")
    assert fake.requests[0]["stream"] is False
    assert fake.requests[0]["messages"] == '[{"role": "user", "content": "Hi"}]'


def test_sequences_and_log_probs(blocking: Make) -> None:
    answer = blocking().generate(
        "Hi", GenerateOptions(num_return_sequences=3, return_log_probs=True, num_top_log_probs=2)
    )
    assert [answer.text, *(other.text for other in answer.alternatives)] == [TEXT] * 3
    assert answer.log_probs == tuple(-0.5 - number / 64 for number in range(len(PIECES)))
    assert answer.cum_log_prob == sum(answer.log_probs)
    assert [[log_prob for _, log_prob in position] for position in answer.top_log_probs] == [[-0.5, -1.0]] * len(PIECES)


def test_grpc_asks_for_status_codes(fake: FakeServer) -> None:
    with Client(f"grpc://127.0.0.1:{fake.grpc_port}") as client:
        client.generate("Hi")
    assert "triton_grpc_error" not in fake.metadata[0], "the server crashes after a few errors on such streams"


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("in_band", [False, True])
def test_errors_are_typed(blocking: Make, fake: FakeServer, after: int, in_band: bool) -> None:
    fake.faults = Faults(error="INVALID_ARGUMENT: top_p is 2; it must be at most 1", after=after, in_band=in_band)
    stream = blocking().stream("Hi")
    assert [next(stream).text for _ in range(after)] == list(PIECES[:after])
    with pytest.raises(errors.InvalidRequest, match=r"^top_p is 2; it must be at most 1$"):
        next(stream)
    assert len(fake.requests) == 1
    assert stream.completion().text == "".join(PIECES[:after])


def test_a_full_queue_is_tried_again(blocking: Make, fake: FakeServer) -> None:
    fake.faults = Faults(refuse=3)
    assert blocking(retry=QUICK).generate("Hi").text == TEXT
    assert len(fake.requests) == 4
    fake.faults = Faults(refuse=4)
    with pytest.raises(errors.QueueFull):
        blocking(retry=QUICK).generate("Hi")
    assert len(fake.requests) == 8


@pytest.mark.parametrize("fault", [{"hangup": True}, {"error": "UNAVAILABLE: the queue is full"}])
def test_nothing_is_tried_again_after_the_first_chunk(blocking: Make, fake: FakeServer, fault: dict[str, Any]) -> None:
    fake.faults = Faults(after=1, **fault)
    with (
        pytest.raises((ServerUnreachable, errors.QueueFull)),
        blocking(retry=QUICK).stream("Hi") as stream,
    ):
        for _ in stream:
            pass
    assert stream.completion().text == PIECES[0]
    assert len(fake.requests) == 1


@pytest.mark.parametrize("sequences", [-1, 0, 2**31 - 1])
def test_senseless_counts_are_left_for_the_server_to_refuse(blocking: Make, fake: FakeServer, sequences: int) -> None:
    fake.faults = Faults(error="INVALID_ARGUMENT: num_return_sequences is bad")
    with pytest.raises(errors.InvalidRequest, match="num_return_sequences"):
        blocking().generate("Hi", GenerateOptions(num_return_sequences=sequences))


def test_other_errors_are_not_tried_again(blocking: Make, fake: FakeServer) -> None:
    fake.faults = Faults(error="INTERNAL: broken")
    with pytest.raises(errors.EngineFailure):
        blocking(retry=QUICK).generate("Hi")
    assert len(fake.requests) == 1


@pytest.mark.parametrize("faults", [Faults(truncate=True, after=2), Faults(lose=2)])
def test_a_stream_that_lost_something_is_an_error(blocking: Make, fake: FakeServer, faults: Faults) -> None:
    fake.faults = faults
    with pytest.raises(errors.EngineFailure, match=r"missing|before its last"), blocking().stream("Hi") as stream:
        list(stream)


@pytest.mark.parametrize(
    ("limits", "faults", "name", "arrived"),
    [
        (Timeouts(first_chunk=0.4), Faults(first_delay=2), "first_chunk of 0.4 s", 0),
        (Timeouts(between_chunks=0.4), Faults(delay=2), "between_chunks of 0.4 s", 1),
        (Timeouts(total=0.6), Faults(delay=0.5), "total of 0.6 s", None),
    ],
)
def test_timeouts_name_their_limit(
    blocking: Make, fake: FakeServer, limits: Timeouts, faults: Faults, name: str, arrived: int | None
) -> None:
    """That it came in time is seen in what the server had not sent yet, which no clock of a busy machine can change.

    No pause is as long as the total that is tested: one that began anew with each chunk would not be reached.
    """
    fake.faults = faults
    client = blocking()
    client.wait_ready(10)  # on a busy machine, a connection can take longer than a limit that is tested
    stream = client.stream("Hi", timeouts=limits)
    with pytest.raises(RequestTimeout, match=name):
        list(stream)
    text = stream.completion().text
    assert TEXT.startswith(text)
    assert text != TEXT
    assert arrived is None or text == "".join(PIECES[:arrived])
    assert fake.cancelled.wait(30)


def test_an_answer_in_one_response_has_only_the_total_limit(blocking: Make, fake: FakeServer) -> None:
    fake.faults = Faults(first_delay=0.3)
    short = Timeouts(first_chunk=0.1, between_chunks=0.1)
    assert blocking(timeouts=short).generate("Hi").text == TEXT
    fake.faults = Faults(first_delay=5)
    with pytest.raises(RequestTimeout, match="total"):
        blocking().generate("Hi", timeouts=Timeouts(total=0.1))


@pytest.mark.parametrize("way", ["cancel", "leave", "thread"])
def test_cancelling_reaches_the_server(blocking: Make, fake: FakeServer, way: str) -> None:
    fake.faults = Faults(delay=1.0)
    with blocking().stream("Hi") as stream:
        assert next(stream).text == PIECES[0]
        if way == "cancel":
            stream.cancel()
        elif way == "thread":
            threading.Timer(0.1, stream.cancel).start()
        if way == "cancel":
            assert list(stream) == [], "it has waited for the next chunk"
        elif way == "thread":
            assert len(list(stream)) < len(PIECES) - 1, "it has waited for the end"
    assert list(stream) == []
    assert stream.completion().finish_reason is None
    assert fake.cancelled.wait(30)


def test_a_stream_that_is_left_behind_its_last_chunk_is_not_cancelled(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton keeps a request whose call is cancelled while it ends."""
    monkeypatch.setattr(grpc_transport, "_END_S", 60.0)
    fake.faults = Faults(hold_end=threading.Event())
    assert fake.faults.hold_end is not None

    def leave() -> str:
        with Client(f"127.0.0.1:{fake.grpc_port}") as client, client.stream("Hi") as stream:
            return next(str(chunk.finish_reason) for chunk in stream if chunk.finish_reason)

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(leave)
        assert not fake.cancelled.wait(0.5)
        fake.faults.hold_end.set()
        assert left.result() == "stop"
    assert not fake.cancelled.is_set()


def test_no_server() -> None:
    started = time.monotonic()
    for kind in (Client, HttpClient):
        with kind("127.0.0.1:1", retry=NO_RETRY) as client:
            assert not client.ready()
            with pytest.raises(ServerUnreachable):
                client.generate("Hi")
            with pytest.raises(ServerUnreachable, match=r"not ready after 0\.2 s"):
                client.wait_ready(0.2)
    assert time.monotonic() - started < 30


def test_wait_ready_and_retry_bridge_a_start(blocking: Make, fake: FakeServer) -> None:
    client = blocking()
    fake.ready = False
    assert not client.ready()
    threading.Timer(0.3, setattr, (fake, "ready", True)).start()
    client.wait_ready(30)
    assert client.ready()


async def test_many_at_once_each_with_its_own_answer(parallel: Make, fake: FakeServer) -> None:
    fake.faults = Faults(together=9)
    async with parallel() as client:
        answers = await asyncio.gather(*(client.generate(str(number)) for number in range(24)))
    assert [answer.text for answer in answers] == [TEXT] * 24
    assert fake.most_running > 8
    assert {inputs["text_input"] for inputs in fake.requests} == {str(number) for number in range(24)}


async def test_cancelled_task_and_cancel_from_another_task(parallel: Make, fake: FakeServer) -> None:
    fake.faults = Faults(delay=1, first_delay=0.2)
    async with parallel() as client:
        task = asyncio.create_task(client.generate("Hi"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with client.stream("Hi") as stream:
            await anext(stream)
            task = asyncio.create_task(stream.cancel())
            assert len([chunk async for chunk in stream]) < len(PIECES) - 1
            await task
    assert await asyncio.to_thread(fake.cancelled.wait, 30)


@pytest.mark.proof
async def test_closed_pause_between_tries_ends_at_once(parallel: Make, fake: FakeServer) -> None:
    fake.faults = Faults(refuse=99)
    async with parallel(retry=Retry(attempts=3, first_pause=30, longest_pause=60)) as client:
        await client.wait_ready(10)
        stream = client.stream("Hi")

        async def cancel_once_refused() -> None:
            while not fake.requests:
                await asyncio.sleep(0.01)
            await stream.cancel()

        cancelling = asyncio.create_task(cancel_once_refused())
        assert [chunk async for chunk in stream] == []
        await cancelling
        with pytest.raises(RequestTimeout, match="total"):
            await client.generate("Hi", timeouts=Timeouts(total=10))
    assert len(fake.requests) == 2


def test_threads_that_come_first_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    new_loop = asyncio.new_event_loop

    def slow() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        return new_loop()

    sync._start_loop.cache_clear()
    monkeypatch.setattr(asyncio, "new_event_loop", slow)
    with ThreadPoolExecutor(4) as threads:
        loops = list(threads.map(lambda _: sync._loop(), range(4)))
    assert len(set(loops)) == 1


def test_a_broken_connection_is_no_full_queue() -> None:
    for details in (
        "UNAVAILABLE: ipv4:127.0.0.1:8001: Socket closed",
        "failed to connect to all addresses; last error",
    ):
        assert type(from_wire(details, "UNAVAILABLE")) is ServerUnreachable
    assert type(from_wire("in ensemble 'ensemble', UNAVAILABLE: the queue is full")) is errors.QueueFull


async def test_many_that_are_cancelled_together_end_quietly(fake: FakeServer) -> None:
    """As on Ctrl-C: what runs is cancelled, and again by the end of the event loop while it still ends."""
    fake.faults = Faults(first_delay=5)
    async with AsyncClient(f"127.0.0.1:{fake.grpc_port}", retry=NO_RETRY) as client:
        tasks = [asyncio.create_task(client.generate("Hi")) for _ in range(8)]
        while fake.running < len(tasks):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in ended] == [asyncio.CancelledError] * len(tasks)
