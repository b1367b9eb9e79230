"""A server that lives and answers nothing on its streams hangs; one that cannot be asked does not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from inflight.serve import stream_probe
from inflight.serve.stream_probe import StreamProbe
from inflight.serve.vitals import LOOK_S, End, Vitals

LIMIT_S = 3


class Streams(GRPCInferenceServiceServicer):
    """Refuses requests on streams, or keeps them waiting."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def ModelStreamInfer(self, request_iterator: object, context: object) -> Iterator[object]:
        """Answer with nothing."""
        self.answers.wait()
        yield from ()


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_probe, "PAUSE_S", 0.1)


@pytest.fixture
def streams() -> Iterator[Streams]:
    one = Streams()
    yield one
    one.answers.set()


@pytest.fixture
def port(streams: Streams) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_GRPCInferenceServiceServicer_to_server(streams, server)
    number = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield number
    streams.answers.set()
    server.stop(None).wait()


def _end(port: int, seconds: float, hang_timeout_s: float | None = LIMIT_S) -> End | None:
    """Return what is said of a server in so many seconds; this process is in its place, and answers a greeting."""
    with Vitals(os.getpid(), "127.0.0.1", port, port, hang_timeout_s, 60) as vitals:
        for _ in range(round(seconds / LOOK_S)):
            time.sleep(LOOK_S)
            if (end := vitals.look()) is not None:
                return end
    return None


def test_a_server_that_answers_no_stream_hangs(streams: Streams, port: int) -> None:
    assert _end(port, 60) == End("server_hung", f"the server has answered no request for {LIMIT_S} s")
    streams.answers.set()
    while any(thread.name == "stream probe" for thread in threading.enumerate()):
        time.sleep(LOOK_S)


@pytest.mark.proof
def test_a_server_that_answers_does_not_and_none_does_without_a_limit(streams: Streams, port: int) -> None:
    assert _end(port, 2 * LIMIT_S, hang_timeout_s=None) is None
    streams.answers.set()
    assert _end(port, 2 * LIMIT_S) is None


def test_waits_for_several_answers_do_not_add_up() -> None:
    probe = StreamProbe("127.0.0.1", 1, LIMIT_S)
    for waits in (True, False, True):
        probe._waits = waits
        assert probe.look(LIMIT_S - 1) is None


@pytest.mark.proof
@pytest.mark.parametrize("listens", [True, False], ids=["takes connections and is mute", "refuses them"])
def test_a_server_without_a_connection_is_for_others_to_see(listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        probe = StreamProbe("127.0.0.1", mute.getsockname()[1] if listens else 1, 5)
        probe.start()
        try:
            for _ in range(round(8 / LOOK_S)):
                time.sleep(LOOK_S)
                assert probe.look(LOOK_S) is None
        finally:
            probe.end()


def test_a_question_that_cannot_be_asked_is_not_the_servers_fault(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where this process may have no more threads."""
    tries = []

    def fail() -> object:
        tries.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(stream_probe, "question", fail)
    probe = StreamProbe("127.0.0.1", port, 1)
    probe.start()
    try:
        while len(tries) < 30:
            time.sleep(LOOK_S)
            assert probe.look(LOOK_S) is None
        assert "could not be asked: can't start new thread" in caplog.text
    finally:
        probe.end()
