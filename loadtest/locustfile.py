"""Load for a running server, in locust: a streaming gRPC user and an HTTP user.

    locust -f loadtest/locustfile.py --headless -u 16 -r 8 -t 60s --host http://127.0.0.1:8000

Besides locust's own request events (the whole request: E2E) each request fires `TTFT` and, with more than one chunk,
`ITL` (the mean gap between chunks). The gRPC address is --grpc-url.
"""

from __future__ import annotations

import itertools
import random
import time
from urllib.parse import urlsplit

import gevent.monkey
import grpc.experimental.gevent
from locust import User, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from inflight.client import Client, GenerateOptions, HttpClient

gevent.monkey.patch_all()
grpc.experimental.gevent.init_gevent()

QUESTIONS = (
    "What is in-flight batching?",
    "What is a paged KV cache?",
    "How do I start Inflight?",
    "What is time to first token?",
)
_seeds = itertools.count()


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--grpc-url", default="127.0.0.1:8001", help="gRPC address of the server")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")


def _fire(
    environment: Environment, kind: str, name: str, seconds: float, size: int = 0, error: Exception | None = None
) -> None:
    environment.events.request.fire(
        request_type=kind, name=name, response_time=seconds * 1000, response_length=size, exception=error, context={}
    )


class _ChatUser(User):
    abstract = True
    wait_time = between(0, 0.2)

    client: Client | HttpClient
    kind: str

    @task
    def ask(self) -> None:
        """Ask one question and measure its stream."""
        environment = self.environment
        random_ = random.Random(next(_seeds))
        messages = [{"role": "user", "content": random_.choice(QUESTIONS)}]
        started = time.perf_counter()
        arrivals: list[float] = []
        size = 0
        try:
            options = GenerateOptions(max_tokens=environment.parsed_options.max_tokens)
            with self.client.stream(messages, options) as stream:
                for chunk in stream:
                    if chunk.text:
                        arrivals.append(time.perf_counter())
                        size += len(chunk.text)
        except Exception as error:
            _fire(environment, self.kind, "E2E", time.perf_counter() - started, size, error)
            return
        _fire(environment, self.kind, "E2E", time.perf_counter() - started, size)
        if arrivals:
            _fire(environment, self.kind, "TTFT", arrivals[0] - started)
        if len(arrivals) > 1:
            _fire(environment, self.kind, "ITL", (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))


class GrpcUser(_ChatUser):
    """Streams over gRPC."""

    kind = "gRPC"

    def on_start(self) -> None:
        """Connect."""
        self.client = Client(self.environment.parsed_options.grpc_url)


class HttpUser(_ChatUser):
    """Streams over HTTP's generate_stream."""

    kind = "HTTP"

    def on_start(self) -> None:
        """Connect."""
        self.client = HttpClient(urlsplit(self.environment.host or "http://127.0.0.1:8000").netloc)
