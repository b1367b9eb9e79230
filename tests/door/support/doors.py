"""A door before servers that write down what reaches them, break, and come back."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from inflight.serve.door import DoorProcess, Upstreams
from inflight.serve.server import free_ports
from inflight.settings.deployment import Deployment, load_deployment
from inflight.settings.door import DoorSettings
from tests.support.fake_server import FakeServer

DEMO = Path("deployments/demo")


class Recorder:
    """An HTTP server that answers every request with what it has got, as JSON; its name is in the answer.

    The query ``events=N`` has it send N events, each when ``more`` is released; ``break`` closes the connection before
    an answer, and ``bytes=N`` sends so many.
    """

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.requests = name, list[dict[str, Any]]()
        self.more = threading.Semaphore(0)
        self.headers: dict[str, str] = {}
        """Sent with each answer."""
        self.status = 200
        self.known: tuple[str, ...] = ()
        """If there are any, other paths get 404."""
        self.breaks = 0
        """So many of the next requests have their connection closed."""
        handler = type("Handler", (_Handler,), {"recorder": self})
        self._server = _Server(("127.0.0.1", port), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about connections that the tests break."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        recorder = self.recorder
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        body = b"" if chunked else self.rfile.read(int(self.headers.get("Content-Length", 0)))
        got = {
            "server": recorder.name,
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "chunked": chunked,
            "body_bytes": len(body),
            "body": body[:1000].decode("latin-1"),
        }
        recorder.requests.append(got)
        if recorder.breaks > 0:
            recorder.breaks -= 1
            self.close_connection = True
            return
        _, _, query = self.path.partition("?")
        what, _, count = query.partition("=")
        if what == "events":
            self._events(int(count))
        else:
            self._whole(b"x" * int(count) if what == "bytes" else json.dumps(got).encode())

    do_POST = do_HEAD = do_OPTIONS = do_PUT = do_GET

    def _start(self) -> None:
        known, path = self.recorder.known, self.path.partition("?")[0]
        self.send_response(404 if known and path not in known else self.recorder.status)
        for name, value in self.recorder.headers.items():
            self.send_header(name, value)

    def _whole(self, data: bytes) -> None:
        self._start()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data)

    def _events(self, count: int) -> None:
        self._start()
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(count):
            self.recorder.more.acquire()
            event = b"data: %d\n\n" % number
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")


class Relay:
    """Hands connections on to a server; ``cut`` breaks them all and closes the port, until ``open`` opens it again."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        (self._port,) = free_ports(1)
        self._sockets: list[socket.socket] = []
        self.accepted = 0
        self.open()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self.accepted += 1
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                threading.Thread(target=_copy, args=(client, server), daemon=True).start()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError), one, other:
        while True:
            for source in select.select([one, other], [], [])[0]:
                data = source.recv(1 << 16)
                if not data:
                    return
                (other if source is one else one).sendall(data)


@dataclass
class Door:
    """A running door, and the servers behind it."""

    process: DoorProcess
    deployment: Deployment
    http: Recorder
    gateway: Recorder
    status: Recorder
    grpc: FakeServer
    relays: dict[str, Relay] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.deployment.server.http_port

    @property
    def ports(self) -> list[int]:
        server = self.deployment.server
        return [server.http_port, server.grpc_port, server.metrics_port, self.deployment.gateway.port]

    def ask(self, method: str, path: str, *headers: str, body: bytes = b"", port: int | None = None) -> Answer:
        """Send one request of HTTP/1.1 as it is, and return the answer."""
        length = [f"content-length: {len(body)}"] if body else []
        lines = [f"{method} {path} HTTP/1.1", "host: door", *headers, *length, "connection: close"]
        return self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body, port)

    def send(self, data: bytes, port: int | None = None) -> Answer:
        """Send bytes, and return the answer to them."""
        return send(port or self.port, data)


@dataclass(frozen=True)
class Answer:
    """An answer of HTTP/1."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(port: int, data: bytes) -> Answer:
    """Send bytes to a port, and return the answer to them."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    """Read an answer to its length's end, or to the connection's; status 0: there was none."""
    data = head = body = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
            head, _, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"\ncontent-length: (\d+)\r", head + b"\r")
            if length is not None and len(body) >= int(length[1]) > 0:
                break
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(first.split()[1]) if first else 0, headers, body)


def deployment_with(hang_timeout_s: float = 60, **door: Any) -> Deployment:
    """Return the demo's deployment on free ports, with these settings of the door."""
    http, grpc, metrics, gateway = free_ports(4)
    demo = load_deployment(DEMO)
    server = demo.server.model_copy(
        update={"http_port": http, "grpc_port": grpc, "metrics_port": metrics} | {"hang_timeout_s": hang_timeout_s}
    )
    return demo.model_copy(
        update={
            "server": server,
            "gateway": demo.gateway.model_copy(update={"port": gateway}),
            "door": DoorSettings(enabled=True, **door),
        }
    )


@contextmanager
def door(*relayed: str, **settings: Any) -> Iterator[Door]:
    """Run a door with these settings; the servers named in ``relayed`` can be cut off."""
    deployment = deployment_with(**settings)
    http, gateway, status = (Recorder(name) for name in ("http", "gateway", "status"))
    with FakeServer() as triton:
        addresses = {
            "http": http.address,
            "grpc": f"127.0.0.1:{triton.grpc_port}",
            "gateway": gateway.address,
            "status": status.address,
        }
        relays = {name: Relay(addresses[name]) for name in relayed}
        addresses |= {name: relay.address for name, relay in relays.items()}
        process = DoorProcess(deployment, Upstreams(**addresses))
        try:
            process.check()
            process.start()
            process.wait_ready()
            yield Door(process, deployment, http, gateway, status, triton, relays)
        finally:
            process.stop()
            for one in (http, gateway, status):
                one.close()
            for relay in relays.values():
                relay.cut()
