"""Where a server listens: addresses as Triton takes them, and whether they can be had."""

from __future__ import annotations

import errno
import socket

from inflight.addresses import in_url
from inflight.errors import DeploymentError

_REMEDIES = {
    errno.EADDRINUSE: "choose another --{option}",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another --host",
    errno.EACCES: "ports this low are root's; choose a --{option} from 1024 on",
}


def address_of(host: str) -> str:
    """Return the address of a host by its number: Triton's HTTP server (2.51) takes a name for no address at all.

    Args:
        host: a name or an address, of IPv6 with brackets or without.

    Raises:
        DeploymentError: there is no such host.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeploymentError(f"--host {host}: {reason}; it must be an address or a name of this machine") from None
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return str(found[0][4][0])


def require_free(address: str, name: str, port: int) -> None:
    """Look whether a server can listen there.

    Args:
        address: by its number.
        name: of the port's setting.
        port: its number.

    Raises:
        DeploymentError: it cannot; the message says what to change.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "choose another --host or --{option}")
            advice = remedy.format(option=name.replace("_", "-"))
            raise DeploymentError(f"{in_url(address)}:{port} cannot be used ({error.strerror}); {advice}") from None
