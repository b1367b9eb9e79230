"""The gateway's requests to the engine, as tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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

from inflight.errors import InvalidRequest
from inflight.gateway.engine_client import EngineClient, GenerateRequest, tensors_of
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

    def done(self) -> bool:
        """Return that the call has ended."""
        return True

    async def __aiter__(self) -> AsyncIterator[pb.ModelStreamInferResponse]:
        answer = pb.ModelStreamInferResponse()
        answer.infer_response.outputs.add(name="finish_reason", datatype="BYTES", shape=[1, 1])
        answer.infer_response.raw_output_contents.append(b"\x09\0\0\0cancelled")
        yield answer


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
    """An engine that answers until its request is stopped, and counts the calls that their client cancels."""

    def __init__(self, error: str = "") -> None:
        self._error, self._stopped = error, asyncio.Event()
        self.cancelled = self.ended = 0

    async def ModelStreamInfer(
        self, messages: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for message in messages:
            if [tensor.name for tensor in message.inputs] == ["stop"]:
                assert message.id == "mine"
                self._stopped.set()
                return
        try:
            if self._error:
                yield pb.ModelStreamInferResponse(error_message=self._error)
                await asyncio.sleep(0.2)  # what follows the error: the client has it by now
            while not self._error and not self._stopped.is_set():
                answer = pb.ModelStreamInferResponse()
                answer.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, 1])
                answer.infer_response.raw_output_contents.append(b"\5\0\0\0")
                yield answer
                await asyncio.sleep(0.01)
            self.ended += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("error", ["", "INVALID_ARGUMENT: max_tokens is 0"])
async def test_a_call_that_is_left_is_read_to_its_end_and_not_cancelled(error: str) -> None:
    """A cancellation that meets a response ends a Triton of 2024; a request that is stopped responds at once."""
    server, engine = grpc.aio.server(), _Engine(error)
    add_GRPCInferenceServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = EngineClient(f"127.0.0.1:{port}")
    answers = client.generate(GenerateRequest(prompt=[1], max_tokens=1, request_id="mine"))
    if error:
        with pytest.raises(InvalidRequest, match="max_tokens is 0"):
            await anext(answers)
    else:
        await anext(answers)
        await answers.aclose()
    await client.close()
    await server.stop(None)
    assert (engine.ended, engine.cancelled) == (1, 0)


def test_what_asks_for_nothing_is_not_sent() -> None:
    assert set(tensors_of(GenerateRequest(prompt=[1], max_tokens=1))) == {
        "input_ids",
        "request_output_len",
        "streaming",
        "exclude_input_in_output",
        "return_num_output_tokens",
        "return_num_cached_tokens",
    }
