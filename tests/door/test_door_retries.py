"""What the door does while a server is away or breaks, and how it lets a server go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.door.support.doors import Door, door
from tests.support.fake_server import PIECES, Faults
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def breaking() -> Iterator[Door]:
    with door("grpc", "http", "gateway") as running:
        yield running


class Stream:
    """A stream of gRPC in both directions that stays open, as clients' streams do, until the answer has ended."""

    def __init__(self, running: Door) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{running.port}")
        self._ended = threading.Event()
        self.received = 0
        self.error: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _requests(self) -> Iterator[pb.ModelInferRequest]:
        request = pb.ModelInferRequest(model_name="ensemble", id="1")
        request.inputs.add(name="stream", datatype="BOOL", shape=[1, 1])
        request.raw_input_contents.append(b"\x01")
        yield request
        self._ended.wait(60)

    def _run(self) -> None:
        try:
            for _ in GRPCInferenceServiceStub(self._channel).ModelStreamInfer(self._requests()):
                self.received += 1
                if self.received == len(PIECES) + 1:  # and the empty one at the end
                    self._ended.set()
        except grpc.RpcError as error:
            self.error = error

    def end(self) -> Stream:
        """Wait for the end."""
        self._thread.join(60)
        self._ended.set()
        self._channel.close()
        return self


@pytest.mark.parametrize(("server", "path"), [("http", "/v2/models/ensemble/generate"), ("gateway", "/v1/messages")])
def test_a_request_waits_for_a_server_that_is_away(breaking: Door, server: str, path: str) -> None:
    relay = breaking.relays[server]
    relay.cut()
    timer = threading.Timer(1.5, relay.open)
    timer.start()
    answer = breaking.ask("POST", path, body=b"{}")
    timer.join()
    assert (answer.status, answer.json["body"][-1:]) == (200, "}")


def test_a_stream_of_grpc_waits_too(breaking: Door) -> None:
    relay = breaking.relays["grpc"]
    relay.cut()
    stream = Stream(breaking)
    time.sleep(1)
    relay.open()
    assert (stream.end().received, stream.error) == (len(PIECES) + 1, None)


def test_a_stream_of_grpc_that_the_server_has_got_is_not_sent_to_it_again(breaking: Door) -> None:
    before = len(breaking.grpc.requests)
    held = threading.Event()
    breaking.grpc.faults = Faults(after=0, holds=[held])
    stream = Stream(breaking)
    assert wait_until(lambda: len(breaking.grpc.requests) == before + 1)
    breaking.relays["grpc"].cut()
    breaking.relays["grpc"].open()
    assert isinstance(stream.end().error, grpc.RpcError)
    held.set()
    breaking.grpc.faults = Faults()
    assert stream.error.code() == grpc.StatusCode.UNAVAILABLE
    assert len(breaking.grpc.requests) == before + 1


def test_a_stream_of_grpc_that_has_begun_is_not(breaking: Door) -> None:
    before = len(breaking.grpc.requests)
    held = threading.Event()
    breaking.grpc.faults = Faults(after=1, holds=[held])
    stream = Stream(breaking)
    assert wait_until(lambda: stream.received == 1)
    breaking.relays["grpc"].cut()
    breaking.relays["grpc"].open()
    assert isinstance(stream.end().error, grpc.RpcError)
    held.set()
    breaking.grpc.faults = Faults()
    assert stream.error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert len(breaking.grpc.requests) == before + 1


@pytest.mark.parametrize(("server", "path"), [("http", "/v2/models/ensemble/generate"), ("gateway", "/v1/messages")])
def test_a_request_that_ends_its_server_ends_it_once(breaking: Door, server: str, path: str) -> None:
    recorder = getattr(breaking, server)
    before = len(recorder.requests)
    recorder.breaks = 100
    answer = breaking.ask("POST", path, body=b"{}")
    recorder.breaks = 0
    assert (answer.status, int(answer.headers["retry-after"]) > 0) == (503, True)
    assert len(recorder.requests) == before + 1


def test_an_error_of_a_server_is_its_answer(breaking: Door) -> None:
    before = len(breaking.gateway.requests)
    breaking.gateway.status, breaking.gateway.headers = 503, {"retry-after": "7", "x-should-retry": "true"}
    answer = breaking.ask("POST", "/v1/messages", body=b"{}")
    breaking.gateway.status, breaking.gateway.headers = 200, {}
    assert (answer.status, answer.headers["retry-after"], answer.json["server"]) == (503, "7", "gateway")
    assert len(breaking.gateway.requests) == before + 1


def test_when_no_try_is_left_the_client_is_told_to_come_again() -> None:
    with door("grpc", "http", "gateway", retries=1) as running:
        for relay in running.relays.values():
            relay.cut()
        openai = running.ask("POST", "/v1/completions", body=b"{}")
        assert (openai.status, openai.json["error"]["type"]) == (503, "server_error")
        assert int(openai.headers["retry-after"]) > 0
        kserve = running.ask("POST", "/v2/models/ensemble/generate", body=b"{}")
        assert (kserve.status, list(kserve.json)) == (503, ["error"])
        stream = Stream(running).end()
        assert isinstance(stream.error, grpc.RpcError)
        assert stream.error.code() == grpc.StatusCode.UNAVAILABLE


def test_a_door_that_drains_refuses_requests_and_ends_none() -> None:
    with door() as running:
        running.grpc.faults = Faults(delay=0.2)
        before = Stream(running)
        assert wait_until(lambda: before.received >= 1)
        running.process.begin_drain()
        assert wait_until(lambda: running.ask("GET", "/v1/models").status == 503)
        refused = running.ask("GET", "/v1/models")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["x-should-retry"] == "true"
        assert running.ask("GET", "/ready").json["server"] == "status"
        after = Stream(running).end()
        assert isinstance(after.error, grpc.RpcError)
        assert after.error.code() == grpc.StatusCode.UNAVAILABLE
        assert (before.end().received, before.error) == (len(PIECES) + 1, None)
