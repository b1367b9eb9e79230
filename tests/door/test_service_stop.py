"""How `inflight serve` stops with the door, whatever it was doing: no request is reset, no tail of an answer lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from inflight.serve.service import Service
from inflight.serve.status import State
from tests.door.support.doors import DEMO, Door, door, read_answer

LARGE = 4 << 20
"""Bytes of an answer that the sockets between a server and a client who does not read cannot hold."""


class Server:
    """Stands in for Triton: writes down how the door answers when it is asked to end, and ends as it is told."""

    def __init__(self, behind: Door) -> None:
        self.restarts = SimpleNamespace(counts={})
        self.asked, self.ends = threading.Event(), threading.Event()
        self.refused: list[int] = []
        self._door = behind

    def stop(self) -> None:
        self.refused.append(self._door.ask("GET", "/v2").status)
        self.asked.set()
        assert self.ends.wait(60)


@contextmanager
def _service(running: Door, state: State) -> Iterator[tuple[Any, Server]]:
    """Yield the service of a door that runs, in a state, and its server."""
    service: Any = Service(DEMO, running.deployment, MagicMock(), nullcontext)
    server = Server(running)
    service.server, service.gateway, service._door = server, None, running.process
    service.status.change(state)
    yield service, server
    server.ends.set()


@pytest.mark.parametrize("state", [State.STARTING, State.RESTARTING, State.READY])
def test_the_door_refuses_before_the_server_ends_in_each_state(state: State) -> None:
    """Also where nobody has asked it to drain: a server that is given up, say."""
    with door() as running, _service(running, state) as (service, server):
        assert running.ask("GET", "/v2").status == 200
        server.ends.set()
        service.stop()
        assert server.refused == [503]
        assert not running.process.runs


def test_a_slow_reader_gets_the_end_of_its_answer() -> None:
    with door() as running, _service(running, State.READY) as (service, server), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", running.port))
        client.sendall(b"GET /v2?bytes=%d HTTP/1.1\r\nhost: door\r\nconnection: close\r\n\r\n" % LARGE)
        assert client.recv(1) == b"H"
        stopping = threading.Thread(target=service.stop)
        stopping.start()
        assert server.asked.wait(60)
        server.ends.set()
        body = read_answer(client).body
        stopping.join()
    assert len(body) == LARGE


def test_a_door_that_was_never_started_is_none_to_wait_for() -> None:
    with door() as running, _service(running, State.STARTING) as (service, server):
        running.process.stop()
        server.stop = MagicMock()  # type: ignore[method-assign]
        service.stop()
        server.stop.assert_called_once_with()
