"""The gateway's requests to the engine, as tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from inflight.errors import EngineFailure, InvalidRequest
from inflight.gateway import engine_client
from inflight.gateway.engine_client import EngineClient, EngineDelta, GenerateRequest, tensors_of
from inflight.gateway.errors import ApiError
from inflight.gateway.readings import Reading, read_all
from inflight.inputs import Inputs, read_sampling
from inflight.resources import DEMO
from inflight.settings.deployment import load_deployment

_FIELDS = {"temperature": "temperature", "top_p": "runtime_top_p", "top_k": "runtime_top_k", "seed": "seed"}


def sampled(request: GenerateRequest) -> bool:
    """Return whether the engine samples for a request, by its own reading of the tensors."""
    arrays = {name: np.array([value]) for name, value in tensors_of(request).items() if name in _FIELDS.values()}
    return bool(read_sampling(Inputs(arrays, (), rows=1), 0, _FIELDS).get("temperature"))


@pytest.mark.parametrize("seed", [None, 1234])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_request_samples_where_its_temperature_is_above_zero(temperature: float, seed: int | None) -> None:
    request = GenerateRequest(prompt=[1], max_tokens=1, temperature=temperature, seed=seed)

    assert sampled(request) == (temperature > 0)


class _Stopped:
    """A call whose request somebody stops at the engine."""

    _ended = False

    async def read(self) -> Any:
        """Return the last answer, and then that it was the last."""
        if self._ended:
            return grpc.aio.EOF
        self._ended = True
        answer = pb.ModelStreamInferResponse()
        answer.infer_response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1, 1])
        answer.infer_response.raw_output_contents.append(b"\x09\0\0\0cancelled")
        return answer


@pytest.mark.parametrize("pooling", [None, "last"])
async def test_a_request_that_is_stopped_at_the_engine_is_an_error(
    pooling: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient("127.0.0.1:1")
    stub = SimpleNamespace(ModelStreamInfer=lambda messages, metadata: _Stopped())
    monkeypatch.setattr(client, "_stub", lambda: stub)
    gateway: Any = SimpleNamespace(engine=client, max_model_len=None, deployment=load_deployment(DEMO))

    with pytest.raises(ApiError) as caught:
        await read_all(gateway, [Reading(GenerateRequest(prompt=[1], max_tokens=1, pooling=pooling), "input")])

    assert (caught.value.status, caught.value.code) == (503, "server_unavailable")


class _Engine(GRPCInferenceServiceServicer):
    """An engine that answers as told, until its request is stopped, and counts the calls that their client cancels."""

    def __init__(self, *answers: pb.ModelStreamInferResponse) -> None:
        self._answers = answers
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()
        """Whether it has been asked; whether it goes on after what it answered, though it was not stopped."""
        self.stops = self.cancelled = self.ended = 0

    async def ModelStreamInfer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for message in messages:
            if [tensor.name for tensor in message.inputs] == ["stop"]:
                assert message.id == "mine"
                self.stops += 1
                self.goes_on.set()
                return
        self.asked.set()
        try:
            for answer in self._answers:
                yield answer
            await self.goes_on.wait()
            yield _tokens(7)
            self.ended += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def _tokens(*ids: int) -> pb.ModelStreamInferResponse:
    answer = pb.ModelStreamInferResponse()
    answer.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, len(ids)])
    answer.infer_response.raw_output_contents.append(np.array(ids, np.int32).tobytes())
    return answer


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client read what it leaves for as long as a machine that stands still needs."""
    monkeypatch.setattr(engine_client, "_STOP_TIMEOUT_S", 600.0)


@asynccontextmanager
async def _served(engine: _Engine) -> AsyncIterator[AsyncGenerator[EngineDelta, None]]:
    """Ask the engine over gRPC, and end the client in order; its request's id is "mine"."""
    server = grpc.aio.server()
    add_GRPCInferenceServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = EngineClient(f"127.0.0.1:{port}")
    yield client.generate(GenerateRequest(prompt=[1], max_tokens=1, request_id="mine"))
    await client.close()
    await server.stop(None)


# A cancellation that meets a response ends a Triton of 2024, and a request that is stopped responds at once.


@pytest.mark.usefixtures("patient")
async def test_a_client_that_leaves_between_two_answers_stops_its_request_and_cancels_no_call() -> None:
    engine = _Engine(_tokens(5))
    async with _served(engine) as answers:
        await anext(answers)
        await answers.aclose()
    assert (engine.stops, engine.ended, engine.cancelled) == (1, 1, 0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("answers", [(), (_tokens(5),)], ids=["the first", "the second"])
async def test_a_client_that_leaves_while_it_waits_stops_its_request_and_cancels_no_call(
    answers: tuple[pb.ModelStreamInferResponse, ...],
) -> None:
    engine = _Engine(*answers)
    async with _served(engine) as deltas:
        for _ in answers:
            await anext(deltas)
        waits = asyncio.ensure_future(anext(deltas))
        while deltas.ag_await is None:  # cancelled before, it would leave between two answers
            await asyncio.sleep(0)
        await engine.asked.wait()
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
    assert (engine.stops, engine.ended, engine.cancelled) == (1, 1, 0)


@pytest.mark.usefixtures("patient")
async def test_a_request_that_the_engine_refuses_is_read_to_its_end_and_not_stopped() -> None:
    engine = _Engine(pb.ModelStreamInferResponse(error_message="INVALID_ARGUMENT: max_tokens is 0"))
    async with _served(engine) as answers:
        with pytest.raises(InvalidRequest, match="max_tokens is 0"):
            await anext(answers)
        engine.goes_on.set()
    assert (engine.stops, engine.ended, engine.cancelled) == (0, 1, 0)


class _Endless:
    """A call that always has an answer, until it is told to end."""

    def __init__(self) -> None:
        self.reads, self.is_over = 0, False

    def cancel(self) -> None:
        """End it."""
        self.is_over = True

    async def read(self) -> Any:
        """Return an answer, or that there is none."""
        self.reads += 1
        await asyncio.sleep(0)
        return grpc.aio.EOF if self.is_over else _tokens(1)


async def test_a_call_is_read_a_little_ahead_and_to_its_end_for_nobody() -> None:
    endless: Any = _Endless()
    call = engine_client._Call(endless)

    async def reads() -> int:
        for _ in range(100):
            await asyncio.sleep(0)
        return endless.reads

    assert await reads() == engine_client._AHEAD + 1
    for _ in range(3):
        await call.read()
    assert await reads() == engine_client._AHEAD + 4
    draining = asyncio.ensure_future(call.drain())
    assert await reads() > engine_client._AHEAD + 10
    assert not draining.done()
    endless.is_over = True
    await draining
    assert call.ended


async def test_a_call_that_is_cancelled_while_it_waits_for_a_reader_ends() -> None:
    endless: Any = _Endless()
    call = engine_client._Call(endless)
    for cancels in (False, True):
        if cancels:
            call.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert call.ended == cancels


async def test_a_message_that_cannot_be_parsed_is_no_end() -> None:
    async def read() -> None:
        """Return what gRPC has for such a message."""

    broken: Any = SimpleNamespace(read=read, cancel=lambda: None)
    call = engine_client._Call(broken)
    with pytest.raises(EngineFailure, match="cannot be parsed"):
        await call.read()


def test_what_asks_for_nothing_is_not_sent() -> None:
    assert set(tensors_of(GenerateRequest(prompt=[1], max_tokens=1))) == {
        "input_ids",
        "request_output_len",
        "streaming",
        "exclude_input_in_output",
        "return_num_output_tokens",
        "return_num_cached_tokens",
    }
