"""Whether a server can be asked, and if not, why: one line that says what is there and what to do.

Every command that talks to a server asks here before its first request, by way of the clients' ``check``.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import httpx

from inflight.client.address import Address
from inflight.client.errors import ServerLoading, ServerUnreachable
from inflight.errors import InflightError, NotFound, UnsupportedFeature

_PROBE_S = 2.0
"""What one look at an address may take."""
_METRICS = "nv_inference_"
"""Begins the names of Triton's own metrics."""
START = "start a server with `inflight serve`, or name another address with --url"


class Health(Enum):
    """What a server says of itself over one protocol."""

    READY = "ready"
    LOADING = "loading"
    NO_MODEL = "no model"
    """It is ready, but the model that was asked for is not."""
    SILENT = "silent"
    """Nothing at this address speaks the protocol."""


class Speaker(Protocol):
    """What is asked here: a transport."""

    async def health(self) -> Health:
        """Return what the server says of itself and of the model."""

    async def close(self) -> None:
        """Close all connections."""


Connect = Callable[[Address], Speaker]
"""Returns a transport to an address, which ``find_problem`` closes, or raises UnsupportedFeature."""


async def find_problem(address: Address, model: str, speaker: Speaker, connect: Connect) -> InflightError | None:
    """Return why ``model`` cannot be asked at ``address``, or None if it can.

    Args:
        address: of the server.
        model: of the server's.
        speaker: the transport that requests take.
        connect: makes transports to other addresses, or of another protocol to this one.
    """
    health = await speaker.health()
    if health is Health.READY:
        return None
    if health is Health.LOADING:
        return ServerLoading(f"the server at {address.url} is not ready yet: it is loading its models or stopping")
    if health is Health.NO_MODEL:
        return NotFound(f"the server at {address.url} has no model {model!r} that is ready; name another with --model")
    return ServerUnreachable(await _why_silent(address, connect))


async def _why_silent(address: Address, connect: Connect) -> str:
    """Return why nothing at ``address`` speaks its protocol."""
    try:
        opened = asyncio.open_connection(address.host, address.port)
        _, writer = await asyncio.wait_for(opened, _PROBE_S)
        writer.close()
    except TimeoutError:
        return f"no answer from {address.place} within {_PROBE_S:g} s; {START}"
    except OSError as error:
        return f"no server answers at {address.place} ({_reason(error)}); {START}"
    return await _other_protocol(address, connect) or await _foreign(address)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, OSError) and error.errno is not None:  # its own text names every address of the host
        return os.strerror(error.errno).lower() if error.errno > 0 else str(error.strerror).lower()
    return str(error).lower() or "no answer"


async def _other_protocol(address: Address, connect: Connect) -> str | None:
    """Return what a user should have typed, where a server speaks another protocol at this port; else None."""
    grpc, tls = address.scheme.startswith("grpc"), address.scheme.endswith("s")
    problem = await _tls_problem(address)
    if tls and problem is not None:
        plain = Address("grpc" if grpc else "http", address.host, address.port)
        if await _speaks(connect, plain):
            return f"{address.place} does not use TLS: --url {plain.url}"
        return f"no TLS connection to {address.place}: {_reason(problem)}"
    other = Address(("http" if grpc else "grpc") + ("s" if tls else ""), address.host, address.port)
    if await _speaks(connect, other):
        wanted, found, step = ("gRPC", "HTTP", 1) if grpc else ("HTTP", "gRPC", -1)
        there = Address(address.scheme, address.host, address.port + step)
        sure = "is" if await _speaks(connect, there) else "is probably"
        return (
            f"{address.place} is the server's {found} port; {wanted} {sure} at --url {there.url}, "
            f"and --url {other.url} asks over {found}"
        )
    if not tls and (problem is None or isinstance(problem, ssl.SSLCertVerificationError)):
        return f"{address.place} uses TLS: --url {'grpcs' if grpc else 'https'}://{address.place}"
    return None


async def _speaks(connect: Connect, address: Address) -> bool:
    """Return whether a server answers at ``address`` in its protocol, as far as this program speaks it."""
    try:
        speaker = connect(address)
    except UnsupportedFeature:
        return False
    try:
        return await speaker.health() is not Health.SILENT
    finally:
        await speaker.close()


async def _tls_problem(address: Address) -> Exception | None:
    """Return why there is no TLS connection to ``address`` that this machine trusts; None: there is one."""
    try:
        opened = asyncio.open_connection(address.host, address.port, ssl=ssl.create_default_context())
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
