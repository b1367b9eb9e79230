"""What a running Envoy tells: by its administration, and by an answer to one of its own paths."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
from pathlib import Path

from inflight.settings.door import TlsSettings

REFUSALS = "/stats?filter=(update_rejected|update_failure)$&usedonly"
"""The page that counts what Envoy could not use of its files, one line for each kind of them."""
_REFUSAL = re.compile(r"^(\S+)\.update_\w+: (\d+)$", re.MULTILINE)


def ask(administration: Path, path: str, timeout_s: float) -> tuple[int, str]:
    """Return the status and the text with which Envoy's administration answers.

    Args:
        administration: its Unix socket.
        path: what is asked for.
        timeout_s: of each step.

    Raises:
        OSError, http.client.HTTPException: it does not answer.
    """
    connection = http.client.HTTPConnection("door", timeout=timeout_s)
    connection.sock = socket.socket(socket.AF_UNIX)
    folder = os.open(administration.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        connection.sock.settimeout(timeout_s)
        # A socket's path has 107 bytes at most (unix(7)), which a temporary folder's may exceed.
        connection.sock.connect(f"/proc/self/fd/{folder}/{administration.name}")
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        os.close(folder)
        connection.close()


def refusals(page: str) -> dict[str, int]:
    """Return how often Envoy could not use each of its files, by a page of ``REFUSALS``."""
    counts: dict[str, int] = {}
    for name, count in _REFUSAL.findall(page):
        counts[name] = counts.get(name, 0) + int(count)
    return counts


def says_that_it_lives(address: str, tls: TlsSettings, timeout_s: float) -> bool:
    """Return whether ``/live`` is served at a public address, so that the table of routes is in use.

    Where clients need a certificate nobody here has one, and a connection that is taken is all that is looked for.

    Args:
        address: ``host:port``.
        tls: what clients are served with; nothing of it is verified.
        timeout_s: of each step.

    Raises:
        OSError, http.client.HTTPException: no answer came.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if tls.client_ca is not None:
        socket.create_connection((host, int(port)), timeout_s).close()
        return True
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    if tls.certificate is not None:
        connection = http.client.HTTPSConnection(host, int(port), timeout=timeout_s, context=_trusting())
    try:
        connection.request("GET", "/live")
        return connection.getresponse().status == http.client.OK
    finally:
        connection.close()


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
