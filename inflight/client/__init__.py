"""Clients of an Inflight server: gRPC and HTTP, blocking and asyncio, with the same methods."""

from inflight.client.aio import AsyncClient, AsyncHttpClient, AsyncStream, Timeouts
from inflight.client.answer import Chunk, Completion, Scores, Usage
from inflight.client.errors import RequestTimeout, ServerUnreachable
from inflight.client.request import GenerateOptions, Prompt
from inflight.client.retry import Retry
from inflight.client.sync import Client, HttpClient, Stream

__all__ = [
    "AsyncClient",
    "AsyncHttpClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "GenerateOptions",
    "HttpClient",
    "Prompt",
    "RequestTimeout",
    "Retry",
    "Scores",
    "ServerUnreachable",
    "Stream",
    "Timeouts",
    "Usage",
]
