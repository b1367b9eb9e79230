"""Load for a running server, in locust: a streaming gRPC user and an HTTP user.

    locust -f loadtest/locustfile.py --headless -u 16 -r 8 -t 60s --host http://127.0.0.1:8000

Each request fires three locust events: `E2E`, the whole request; `TTFT`, until its first text; and `ITL`, the mean gap
between its chunks. The gRPC address is --grpc-url.
"""

from __future__ import annotations

import json
import random
import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.experimental.gevent
import httpx
from locust import User, between, events, task
from locust.argument_parser import LocustArgumentParser
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.client import GenerateOptions
from inflight.client.grpc_transport import decode_response, encode_request
from inflight.client.http_transport import body
from inflight.client.request import Request, build_request

grpc.experimental.gevent.init_gevent()

QUESTIONS = (
    "What is in-flight batching?",
    "What is a paged KV cache?",
    "How do I start Inflight?",
    "What is time to first token?",
)


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--grpc-url", default="127.0.0.1:8001", help="gRPC address of the server")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")


class _ChatUser(User):
    """Asks one question after the other, each on a stream of its own."""

    abstract = True
    wait_time = between(0, 0.2)
    kind: str

    @abstractmethod
    def texts(self, request: Request) -> Iterator[str]:
        """Send ``request`` and yield the text of each response; raise on an error."""

    @task
    def ask(self) -> None:
        """Ask one question and measure its stream."""
        options = GenerateOptions(max_tokens=self.environment.parsed_options.max_tokens)
        messages = [{"role": "user", "content": random.choice(QUESTIONS)}]
        request = build_request(messages, options, stream=True)
        arrivals: list[float] = []
        size, failure = 0, None
        started = time.perf_counter()
        try:
            for text in self.texts(request):
                if text:
                    arrivals.append(time.perf_counter())
                    size += len(text)
        except Exception as error:
            failure = error
        self._fire("E2E", time.perf_counter() - started, size, failure)
        if arrivals:
            self._fire("TTFT", arrivals[0] - started)
        if len(arrivals) > 1:
            self._fire("ITL", (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))

    def _fire(self, name: str, seconds: float, size: int = 0, error: Exception | None = None) -> None:
        self.environment.events.request.fire(
            request_type=self.kind,
            name=name,
            response_time=seconds * 1000,
            response_length=size,
            exception=error,
            context={},
        )


class GrpcUser(_ChatUser):
    """Streams over gRPC."""

    kind = "gRPC"

    def on_start(self) -> None:
        """Connect."""
        self._channel = grpc.insecure_channel(self.environment.parsed_options.grpc_url)
        self._stub = GRPCInferenceServiceStub(self._channel)

    def on_stop(self) -> None:
        """Disconnect."""
        self._channel.close()

    def texts(self, request: Request) -> Iterator[str]:
        """One ModelStreamInfer call per request."""
        for message in self._stub.ModelStreamInfer(iter([encode_request(request, "ensemble")])):
            if message.error_message:
                raise RuntimeError(message.error_message)
            yield _text(decode_response(message.infer_response))


class HttpUser(_ChatUser):
    """Streams over HTTP's generate_stream."""

    kind = "HTTP"

    def on_start(self) -> None:
        """Connect."""
        self._http = httpx.Client(base_url=self.environment.host or "http://127.0.0.1:8000", timeout=60)

    def on_stop(self) -> None:
        """Disconnect."""
        self._http.close()

    def texts(self, request: Request) -> Iterator[str]:
        """One server-sent event per response."""
        with self._http.stream("POST", "/v2/models/ensemble/generate_stream", json=body(request)) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data:"):
                    event = json.loads(line.removeprefix("data:"))
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    yield _text(event)


def _text(outputs: dict[str, Any]) -> str:
    text = outputs.get("text_output", "")
    return "".join(text) if isinstance(text, list) else str(text)
