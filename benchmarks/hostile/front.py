"""What attackers see of a server: its addresses, and how a request to each is answered, in one word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.hostile.over_grpc import GrpcAttack
from benchmarks.hostile.over_http import HttpAttack, wire
from benchmarks.hostile.sending import Answer, over_grpc, over_http
from benchmarks.hostile.target import Places
from inflight.client.transport import Address

SERVICE = "/inference.GRPCInferenceService/"
GENERATE = "/v2/models/ensemble/generate"
STREAM = "/v2/models/ensemble/generate_stream"
CHAT = "/v1/chat/completions"
_PATIENCE_S = 240.0


@dataclass(frozen=True)
class Front:
    """A server that is attacked."""

    places: Places
    model: str
    """What the gateway calls it."""

    @property
    def gateway(self) -> Address:
        """Where OpenAI's API is."""
        assert self.places.gateway is not None, "the table is of the pair"
        return self.places.gateway

    def triton(self, path: str, body: bytes, *headers: str, method: str = "POST") -> str:
        """Send a request to Triton's HTTP port."""
        return self.raw(self.places.http, wire(path, body, *headers, method=method))

    def openai(self, body: bytes, *headers: str, path: str = CHAT) -> str:
        """Send a request to the gateway's port."""
        return self.raw(self.gateway, wire(path, body, *headers, json=True))

    def chat(self, **fields: Any) -> str:
        """Send a chat with more fields to the gateway's port."""
        sound = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 2}
        return self.openai(json.dumps(sound | fields).encode())

    def raw(self, address: Address, request: bytes) -> str:
        """Send bytes that are one request, or none."""
        return _word(over_http(address, HttpAttack("", request), _PATIENCE_S))

    def rpc(
        self,
        *requests: service_pb2.ModelInferRequest,
        streams: bool = True,
        metadata: Mapping[str, str] | None = None,
        compression: grpc.Compression | None = None,
    ) -> str:
        """Send requests over one call."""
        method = SERVICE + ("ModelStreamInfer" if streams else "ModelInfer")
        messages = tuple(request.SerializeToString() for request in requests)
        return self.call(GrpcAttack("", method, messages, streams, tuple((metadata or {}).items())), compression)

    def call(self, attack: GrpcAttack, compression: grpc.Compression | None = None) -> str:
        """Make one call over a connection of its own."""
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self.places.grpc.place, options=options, compression=compression) as channel:
            return _word(over_grpc(channel, attack, _PATIENCE_S))

    def neighbour(self) -> str:
        """Ask what any client might."""
        asked = [self.triton(GENERATE, b'{"text_input": "Hello", "max_tokens": 2}'), self.chat(), self.rpc(tensors())]
        return "served" if asked == ["200", "200", "OK"] else ", ".join(asked)


def _word(answer: Answer) -> str:
    refused = " with an error" if answer.text and answer.status in ("OK", "200") else ""
    return (answer.status or answer.outcome) + refused


def tensors(model: str = "ensemble", **more: tuple[str, list[int], bytes]) -> service_pb2.ModelInferRequest:
    """Return a sound request, with more inputs, or others in their place: type, shape and bytes of each."""
    sound = {"text_input": ("BYTES", [1, 1], b"\5\0\0\0Hello"), "max_tokens": ("INT32", [1, 1], b"\2\0\0\0")}
    if model == "tensorrt_llm":
        ids = "INT32", [1, 3], b"\5\0\0\0\6\0\0\0\7\0\0\0"
        sound = {"input_ids": ids, "request_output_len": ("INT32", [1, 1], b"\4\0\0\0")}
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, (datatype, shape, content) in (sound | more).items():
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(content)
    return request
