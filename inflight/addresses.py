"""Addresses of servers: how a URL spells a host, and which servers are on this machine.

A proxy that the environment names (``http_proxy`` and its like) is for other hosts: it has a loopback of its own.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import urllib.request
from collections.abc import Mapping
from functools import cache
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""This machine's names for itself."""
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def in_url(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def nearest_of(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on ``host``, as URLs have it."""
    bare = host.strip("[]")
    return in_url(_EVERYWHERE.get(bare, bare))


def is_loopback(address: str) -> bool:
    """Return whether ``[scheme://]host[:port]`` is on this machine's own network; False for what is no address."""
    host = _host(address)
    if host is None or host.rstrip(".") == "localhost":
        return host is not None
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def direct_mounts(address: str) -> dict[str, None]:
    """Return the ``mounts`` with which httpx reaches an address without a proxy if it is on this machine."""
    return {f"all://{in_url(_host(address) or '')}": None} if is_loopback(address) else {}


@cache
def tls_context() -> ssl.SSLContext:
    """Return the ``verify`` of all clients of httpx: each would read every certificate of this machine, for 40 ms."""
    import httpx  # which what only serves does without

    return httpx.create_ssl_context()


def read_directly(url: str | urllib.request.Request, timeout_s: float = 2) -> bytes:
    """Return the answer of a server on this machine, without a proxy.

    Raises:
        OSError: it does not answer, or not with 200.
        http.client.HTTPException: what answers does not speak HTTP.
    """
    with _DIRECTLY.open(url, timeout=timeout_s) as response:
        return response.read()


def without_proxy_for_loopback(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with which a child process uses the environment's proxies, but not for this machine."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = [host for entry in given.split(",") if (host := entry.strip())]
    value = "*" if "*" in hosts else ",".join([*hosts, *(host for host in LOOPBACK if host not in hosts)])
    return {"no_proxy": value, "NO_PROXY": value}


def _host(address: str) -> str | None:
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname
    except ValueError:
        return None
