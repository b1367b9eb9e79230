"""What the hostile client makes of an answer."""

from __future__ import annotations

import socket
import threading

import pytest

from benchmarks.hostile.over_http import HttpAttack
from benchmarks.hostile.sending import ANSWERED, Answer, over_http
from inflight.client.transport import Address


@pytest.mark.parametrize(("method", "body"), [(b"GET", b"ok"), (b"HEAD", b"")])
def test_an_answer_to_head_has_no_body_whatever_length_it_names(method: bytes, body: bytes) -> None:
    """The server keeps the connection, so a client that waits for the body waits for ever."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + body)
                over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        attack = HttpAttack("", method + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            assert over_http(Address("http", *listener.getsockname()), attack) == Answer(ANSWERED, "200", "")
        finally:
            over.set()
            thread.join()
