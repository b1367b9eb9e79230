"""Addresses of servers: ``[scheme://]host[:port]``, as users give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from inflight.addresses import in_url
from inflight.errors import InvalidRequest, nearest

SCHEMES = ("grpc", "grpcs", "http", "https")
_PORTS = {"http": 80, "https": 443, "grpcs": 443}
"""Where an address without a port leads."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and what it speaks there."""

    scheme: str
    """One of ``SCHEMES``."""
    host: str
    """Without the brackets of an IPv6 address."""
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
    """Return the address that ``url`` names.

    Args:
        url: ``[scheme://]host[:port]``.
        default: the scheme of an address that names none.
        option: how the user gave it; the error says so.
        schemes: those that are allowed.

    Raises:
        InvalidRequest: it is no such address; one of HTTP may have a path and a user's name besides, as proxies want.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname, parts.port  # both are looked at only when asked for
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
