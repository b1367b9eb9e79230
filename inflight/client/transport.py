"""Where a server is: its address, the transport that carries requests there, and why it cannot be asked if it cannot.

The library of gRPC is imported with the first transport of it: NVIDIA's images have none for Python. Every command that
talks to a server asks ``find_problem`` before its first request, by way of the clients' ``check``.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from inflight.addresses import in_url
from inflight.client.answer import Health, Outputs
from inflight.client.errors import ServerLoading, ServerUnreachable
from inflight.client.http_transport import HttpTransport
from inflight.client.request import Request
from inflight.errors import EngineFailure, InflightError, InvalidRequest, NotFound, UnsupportedFeature, nearest

SCHEMES = ("grpc", "grpcs", "http", "https")
_PORTS = {"http": 80, "https": 443, "grpcs": 443}
"""The port of an address that names none, by its scheme."""
_PROBE_S = 2.0
"""What one look at an address may take."""
_METRICS = "nv_inference_"
"""The names of Triton's own metrics begin with it."""
START = "start a server with `inflight serve`, or name another address with --url"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what it speaks there."""

    scheme: str
    """One of ``SCHEMES``."""
    host: str
    """The host, without the brackets of an IPv6 address."""
    port: int

    @property
    def place(self) -> str:
        """``host:port``, an IPv6 address in its brackets."""
        return f"{in_url(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """The address as ``--url`` takes it; gRPC without TLS needs no scheme."""
        return self.place if self.scheme == "grpc" else f"{self.scheme}://{self.place}"


def is_http(url: str) -> bool:
    """Return whether ``url`` asks for HTTP."""
    return url.lower().startswith(("http://", "https://"))


def parse_address(url: str, default: str = "grpc", option: str = "--url", schemes: Sequence[str] = SCHEMES) -> Address:
    """Return the address that ``url``, ``[scheme://]host[:port]``, names.

    Args:
        default: the scheme of an address that names none.
        option: how the user gave it; the error says so.
        schemes: those that are allowed.

    Raises:
        InvalidRequest: it is no such address; one of HTTP may have a path and a user's name besides, as proxies want.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname, parts.port  # both are looked at only when asked for
        (host or "").encode("idna")  # as the resolver will: UnicodeError is a ValueError
    except ValueError as error:
        raise InvalidRequest(f"{option} is {url!r}: {error}") from None
    if parts.scheme and parts.scheme not in schemes:
        known = ", ".join(schemes)
        raise InvalidRequest(f"{option} is {url!r}: the scheme must be one of {known}{nearest(parts.scheme, schemes)}")
    scheme = parts.scheme or default
    port = port or _PORTS.get(scheme)
    more = scheme in ("grpc", "grpcs") and (parts.path or parts.query or parts.fragment or parts.username)
    if not host or port is None or more:
        raise InvalidRequest(f"{option} is {url!r}; it must be [scheme://]host:port, such as localhost:8001")
    return Address(scheme, host, port)


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

    One try to connect may take ``connect_timeout`` seconds.

    Raises:
        UnsupportedFeature: gRPC is asked for, and its libraries are not installed.
    """
    if not scheme.startswith("grpc"):
        return HttpTransport(url, model, connect_timeout)
    try:
        from inflight.client.grpc_transport import GrpcTransport
    except (ImportError, RuntimeError) as error:  # the latter is tritonclient's, where it is there without gRPC
        raise UnsupportedFeature(
            "gRPC needs the package tritonclient[grpc], which is not installed here; install it, or ask over HTTP"
        ) from error
    return GrpcTransport(url, model, connect_timeout)


async def inspect(transport: Transport, url: str) -> str:
    """Return the snapshot of the engine that ``transport`` leads to, as JSON; ``url`` is named in errors.

    Raises:
        InflightError: there is none, or the server refuses.
    """
    # To the call's end: one that is left right after its answer can stay with Triton (2.51), and hold up its stop.
    answers = [outputs async for outputs in transport.replies(Request({"inspect": [True]}))]
    if not answers:
        raise EngineFailure(f"{url}: the answer has no snapshot")
    return str(answers[0]["snapshot"][0])


async def find_problem(address: Address, model: str, transport: Transport) -> InflightError | None:
    """Return why ``model`` cannot be asked at ``address``, or None if it can; ``transport`` is what requests take."""
    health = await transport.health()
    if health is Health.READY:
        return None
    if health is Health.LOADING:
        return ServerLoading(f"the server at {address.url} is not ready yet: it is loading its models or stopping")
    if health is Health.NO_MODEL:
        return NotFound(f"the server at {address.url} has no model {model!r} that is ready; name another with --model")
    return ServerUnreachable(await _why_silent(address, model))


async def _why_silent(address: Address, model: str) -> str:
    """Return why nothing at ``address`` speaks its protocol."""
    problem = await _connection_problem(address)
    if isinstance(problem, TimeoutError):
        return f"no answer from {address.place} within {_PROBE_S:g} s; {START}"
    if problem is not None:
        return f"no server answers at {address.place} ({_reason(problem)}); {START}"
    return await _other_protocol(address, model) or await _foreign(address)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, OSError) and error.errno is not None:  # its own text names every address of the host
        return os.strerror(error.errno).lower() if error.errno > 0 else str(error.strerror).lower()
    return str(error).lower() or "no answer"


async def _other_protocol(address: Address, model: str) -> str | None:
    """Return what a user should have typed, where a server speaks another protocol at this port; else None."""
    grpc, tls = address.scheme.startswith("grpc"), address.scheme.endswith("s")
    problem = await _connection_problem(address, ssl.create_default_context())
    if tls and problem is not None:
        plain = Address("grpc" if grpc else "http", address.host, address.port)
        if await _speaks(model, plain):
            return f"{address.place} does not use TLS: --url {plain.url}"
        return f"no TLS connection to {address.place}: {_reason(problem)}"
    other = Address(("http" if grpc else "grpc") + ("s" if tls else ""), address.host, address.port)
    if await _speaks(model, other):
        wanted, found, step = ("gRPC", "HTTP", 1) if grpc else ("HTTP", "gRPC", -1)
        there = Address(address.scheme, address.host, address.port + step)
        sure = "is" if await _speaks(model, there) else "is probably"
        return (
            f"{address.place} is the server's {found} port; {wanted} {sure} at --url {there.url}, "
            f"and --url {other.url} asks over {found}"
        )
    if not tls and (problem is None or isinstance(problem, ssl.SSLCertVerificationError)):
        return f"{address.place} uses TLS: --url {'grpcs' if grpc else 'https'}://{address.place}"
    return None


async def _speaks(model: str, address: Address) -> bool:
    """Return whether a server answers at ``address`` in its protocol, as far as this program speaks it."""
    try:
        transport = make_transport(address.scheme, address.url, model, _PROBE_S)
    except UnsupportedFeature:
        return False
    try:
        return await transport.health() is not Health.SILENT
    finally:
        await transport.close()


async def _connection_problem(address: Address, tls: ssl.SSLContext | None = None) -> Exception | None:
    """Return why there is no connection to ``address``, with ``tls`` one that it trusts; None: there is one."""
    try:
        opened = asyncio.open_connection(address.host, address.port, ssl=tls)
        _, writer = await asyncio.wait_for(opened, _PROBE_S)
        writer.close()
    except (TimeoutError, OSError) as error:
        return error
    return None


async def _foreign(address: Address) -> str:
    """Return what answers at ``address``, which is not a server's HTTP or gRPC port."""
    http = f"http://{address.place}"
    try:
        async with httpx.AsyncClient(timeout=_PROBE_S, trust_env=False) as client:
            page = await client.get(f"{http}/metrics")
    except httpx.HTTPError:
        return f"what listens at {address.place} is not a Triton server; {START}"
    if _METRICS in page.text:
        step = 1 if address.scheme.startswith("grpc") else 2
        there = Address(address.scheme, address.host, address.port - step)
        return f"{address.place} is the server's metrics port; requests probably go to --url {there.url}"
    return f"the web server at {address.place} is not a Triton server; {START}"
