"""gRPC: one ModelStreamInfer call per request, over one channel. Knows nothing of retries, timeouts or chunks.

A call per request (not one shared stream) makes cancelling and errors each request's own, and serves repositories that
are decoupled and that are not alike; HTTP/2 carries them all on one connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import deserialize_bytes_tensor

from inflight import contract
from inflight.addresses import is_loopback
from inflight.client.answer import Health, Outputs
from inflight.client.errors import from_wire, seconds
from inflight.client.request import INPUTS, NUMPY_TYPES, Request
from inflight.errors import EngineFailure

_END_S = 2.0
"""Seconds that a call may take to end behind its last response, until it is cancelled. Triton (2.51) keeps a request
whose call is cancelled in that moment, and does not end by itself any more."""


@dataclass
class GrpcTransport:
    """A channel to ``url``: ``host:port``, ``grpc://host:port`` or, with TLS, ``grpcs://host:port``."""

    url: str
    model: str
    connect_timeout: float
    _channel: grpc.aio.Channel | None = None

    def _stub(self) -> GRPCInferenceServiceStub:
        if self._channel is None:  # not before the first call: a channel belongs to the event loop it is made in
            scheme, _, address = self.url.rpartition("://")
            options = channel_options(address, self.connect_timeout)
            if scheme.lower() == "grpcs":
                self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options)
            else:
                self._channel = grpc.aio.insecure_channel(address, options)
        return GRPCInferenceServiceStub(self._channel)

    async def replies(self, request: Request) -> AsyncGenerator[Outputs, None]:
        """Send ``request`` and yield its responses; closing the generator cancels the request, unless it is over.

        Raises:
            InflightError: the server's error, or ServerUnreachable.
        """
        # Without the header `triton_grpc_error`, an error comes without a status, which its message names. With it, the
        # server (2.51) crashes after a few errors on streams, by SIGSEGV or SIGABRT.
        call = self._stub().ModelStreamInfer(
            [encode_request(request, self.model)], metadata=tuple(request.trace_context.items())
        )
        messages, ends = aiter(call), False
        try:
            async for message in messages:
                if message.error_message:
                    ends = True
                    raise from_wire(message.error_message)
                ends = message.infer_response.parameters["triton_final_response"].bool_param
                if message.infer_response.outputs:
                    yield decode_response(message.infer_response)
        except grpc.aio.AioRpcError as error:
            told = from_wire(error.details() or "", error.code().name)
            told.retry_after_s = seconds(dict(error.trailing_metadata() or ()).get("retry-after"))
            raise told from error
        finally:
            try:
                if ends:
                    await _read_to_end(messages)
            finally:
                call.cancel()

    async def health(self) -> Health:
        """Return what the server says of itself and of the model."""
        stub, limit = self._stub(), self.connect_timeout
        if await self._is_model_ready():
            return Health.READY
        try:
            ready = (await stub.ServerReady(pb.ServerReadyRequest(), timeout=limit)).ready
        except grpc.aio.AioRpcError:
            return Health.SILENT
        if not ready:
            return Health.LOADING
        # The model may have become ready with the server just now.
        return Health.READY if await self._is_model_ready() else Health.NO_MODEL

    async def _is_model_ready(self) -> bool:
        request = pb.ModelReadyRequest(name=self.model)
        try:
            return bool((await self._stub().ModelReady(request, timeout=self.connect_timeout)).ready)
        except grpc.aio.AioRpcError:  # an unknown model, to some versions
            return False

    async def close(self) -> None:
        """Close the channel; requests still running on it are cancelled."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


async def _read_to_end(messages: AsyncIterator[Any]) -> None:
    """Read what is left of a call that is over, for a time."""
    try:
        async with asyncio.timeout(_END_S):
            async for _ in messages:
                pass
    except (TimeoutError, grpc.aio.AioRpcError):
        pass
    except asyncio.CancelledError:  # of the call, whose channel has been closed, or of who reads it
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise


def channel_options(address: str, connect_timeout: float) -> list[tuple[str, int]]:
    """Return channel options: no message limit, and a new try to connect whenever the client makes one.

    A server on this machine is reached without the proxy that the environment may name for other hosts.
    """
    return [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout * 1000)),  # gRPC's name for the time one try may take
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),  # or clients of one process inherit each other's backoff
        ("grpc.enable_http_proxy", int(not is_loopback(address))),
    ]


def encode_request(request: Request, model: str) -> pb.ModelInferRequest:
    """Return ``request`` as Triton's message, every tensor ``[1, n]`` in raw form."""
    message = pb.ModelInferRequest(model_name=model, id=request.id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, values in request.inputs.items():
        dtype = INPUTS[name].dtype
        message.inputs.add(name=name, datatype=dtype, shape=[1, len(values)])
        if dtype == contract.BYTES:  # each string behind its length
            raws = (value.encode() for value in values)
            message.raw_input_contents.append(b"".join(len(raw).to_bytes(4, "little") + raw for raw in raws))
        else:
            message.raw_input_contents.append(np.array(values, NUMPY_TYPES[dtype]).tobytes())
    return message


def decode_response(message: pb.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the tensors of a response, flattened. Raises EngineFailure: one is not what it says of itself."""
    tensors: dict[str, list[Any]] = {}
    try:
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
            if output.datatype == contract.BYTES:
                tensors[output.name] = [value.decode(errors="replace") for value in deserialize_bytes_tensor(raw)]
            else:
                tensors[output.name] = np.frombuffer(raw, NUMPY_TYPES[output.datatype]).tolist()
    except (KeyError, ValueError, struct.error) as error:
        raise EngineFailure(f"a response cannot be decoded: {type(error).__name__}: {error}") from error
    return tensors
