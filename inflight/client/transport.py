"""What carries requests: gRPC or HTTP, by the scheme of an address.

The libraries of a protocol are imported with the first transport of it: `inflight serve` needs neither, and NVIDIA's
images have no gRPC client for Python.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from inflight.client.answer import Outputs
from inflight.client.reach import Health
from inflight.client.request import Request
from inflight.errors import UnsupportedFeature


class Transport(Protocol):
    """What the clients need of gRPC or HTTP."""

    def replies(self, request: Request) -> AsyncGenerator[Outputs, None]:
        """Send ``request`` and yield its responses; closing the generator cancels the request."""

    async def health(self) -> Health:
        """Return what the server says of itself and of the model."""

    async def close(self) -> None:
        """Close all connections."""


def make_transport(scheme: str, url: str, model: str, connect_timeout: float) -> Transport:
    """Return a transport to ``url``; nothing is connected before the first call.

    Args:
        scheme: ``grpc``, ``grpcs``, ``http`` or ``https``.
        url: address of the server.
        model: the Triton model to ask.
        connect_timeout: seconds that one try to connect may take.

    Raises:
        UnsupportedFeature: gRPC is asked for, and its libraries are not installed.
    """
    if not scheme.startswith("grpc"):
        from inflight.client.http_transport import HttpTransport

        return HttpTransport(url, model, connect_timeout)
    try:
        from inflight.client.grpc_transport import GrpcTransport
    except (ImportError, RuntimeError) as error:  # the latter is tritonclient's, where it is there without gRPC
        raise UnsupportedFeature(
            "gRPC needs the package tritonclient[grpc], which is not installed here; install it, or ask over HTTP"
        ) from error
    return GrpcTransport(url, model, connect_timeout)
