"""The paths and methods that the door lets through; a test holds the gateway's against its own table of routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inflight.serve.envoy.values import GATEWAY, GRPC, HTTP, STATUS

READ = ("GET", "HEAD")
OPEN_PATHS = ("/live", "/ready", "/v2/health/live", "/v2/health/ready")
"""Liveness and readiness: they need no key, and have no limit."""
STATUS_PATHS = ("/status", "/metrics")
MODELS = "(ensemble|tensorrt_llm)"
"""The models that clients may name over HTTP, not the stages ``tokenizer`` and ``detokenizer``."""
GATEWAY_READS = ("/health", "/v1/models", "/tokenizer_info")
GATEWAY_WRITES = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/generative_scoring",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
)
_NO_DOT, _ANY = (f"([^{dot}/%]|%[^2/]|%2[^eE/])" for dot in (".", ""))
MODEL_BY_NAME = rf"/v1/models(/\.*{_NO_DOT}{_ANY}*)+"
"""A model's name has no segment that is empty or of dots alone: read again, the path would be another."""
MODEL_PATH = f"/v2/models/{MODELS}(/versions/[0-9]+)?"
INFER = f"{MODEL_PATH}/infer"
GENERATE = "/(generate|generate_stream)"
"""How the paths end at which Triton hands no header on to the stages."""
GRPC_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
GRPC_METHODS = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "ModelInfer",
    "ModelStreamInfer",
)


@dataclass(frozen=True)
class Served:
    """Requests that go to one server."""

    target: str
    """The server's name: ``http``, ``grpc``, ``gateway`` or ``status``."""
    methods: tuple[str, ...]
    path: str
    """The whole path, or a regular expression (RE2) of it."""
    pattern: bool = False
    """Whether ``path`` is an expression."""


def served(decoupled: bool, gateway: bool) -> Iterator[Served]:
    """Yield what the door lets through.

    Args:
        decoupled: whether models stream; where they do, ``infer`` over HTTP would reach the tokenizer alone.
        gateway: whether OpenAI's API is served.
    """
    yield from (Served(STATUS, READ, path) for path in (*OPEN_PATHS, *STATUS_PATHS))
    if gateway:
        yield from (Served(GATEWAY, READ, path) for path in GATEWAY_READS)
        yield Served(GATEWAY, READ, MODEL_BY_NAME, pattern=True)
        yield from (Served(GATEWAY, ("POST",), path) for path in GATEWAY_WRITES)
    yield Served(HTTP, READ, "/v2")
    yield Served(HTTP, READ, "/v2/models/stats")
    yield Served(HTTP, READ, f"{MODEL_PATH}(/(ready|config|stats))?", pattern=True)
    yield Served(HTTP, ("POST",), f"{MODEL_PATH}{GENERATE}", pattern=True)
    if not decoupled:
        yield Served(HTTP, ("POST",), INFER, pattern=True)
    yield from (Served(GRPC, ("POST",), f"/inference.GRPCInferenceService/{name}") for name in GRPC_METHODS)
