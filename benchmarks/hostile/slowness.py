"""Clients that are slow, and connections that do nothing: what they hold of a server, and whether others are served."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from inflight.client.transport import Address

CLIENTS, CONNECTIONS = 64, 2000
_SECONDS = 15
_SMALL_BUFFER = 4096
_PATIENCE_S = 10.0


def _connect(address: Address) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
    connection.settimeout(_PATIENCE_S)
    connection.connect((address.host, address.port))
    return connection


@contextmanager
def _connected(address: Address, count: int) -> Iterator[list[socket.socket]]:
    """Open as many connections as are taken."""
    with ExitStack() as stack:
        connections: list[socket.socket] = []
        with suppress(OSError):
            for _ in range(count):
                connections.append(stack.enter_context(_connect(address)))
        yield connections


def slow_readers(address: Address, wire: bytes, neighbour: Callable[[], str]) -> Iterator[str]:
    """Have clients read one byte of their streams each second."""
    with _connected(address, CLIENTS) as connections:
        for one in connections:
            with suppress(OSError):
                one.sendall(wire)
        got = 0
        for _ in range(_SECONDS):
            time.sleep(1)
            for one in connections:
                one.setblocking(False)
                with suppress(OSError):
                    got += len(one.recv(1))
        yield f"{'all' if got > CLIENTS else 'not all'} read"
        yield f"a neighbour: {neighbour()}"


def slow_writers(address: Address, head: bytes, neighbour: Callable[[], str]) -> Iterator[str]:
    """Have clients write one byte of their bodies each second."""
    with _connected(address, CLIENTS) as connections:
        for one in connections:
            with suppress(OSError):
                one.sendall(head)
        for _ in range(_SECONDS):
            time.sleep(1)
            for one in connections:
                with suppress(OSError):
                    one.sendall(b" ")
        yield f"a neighbour: {neighbour()}"


def idle_connections(address: Address, neighbour: Callable[[], str]) -> Iterator[str]:
    """Open many connections and say nothing."""
    with _connected(address, CONNECTIONS) as connections:
        yield f"{'all' if len(connections) == CONNECTIONS else 'not all'} connected"
        yield f"a neighbour: {neighbour()}"


def answers_of(address: Address, wire: bytes) -> str:
    """Return the statuses of all answers that come to some bytes; ``closed``: none did."""
    with socket.create_connection((address.host, address.port), timeout=_PATIENCE_S) as connection:
        said = b""
        try:
            connection.sendall(wire)
            connection.settimeout(2.0)
            while more := connection.recv(1 << 16):
                said += more
        except OSError:
            pass
    statuses = [part[:3].decode(errors="replace") for part in said.split(b"HTTP/1.1 ")[1:]]
    return " then ".join(statuses) or "closed"
