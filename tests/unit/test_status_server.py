"""The status server over real sockets, with parts that answer, are away, or hang."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.errors import DeploymentError
from inflight.serve import metrics_page
from inflight.serve import server as serve_server
from inflight.serve import status_server as module
from inflight.serve.metrics_page import MetricsPage, Page, merge, read_page
from inflight.serve.server import free_ports
from inflight.serve.status import State, Status
from inflight.serve.status_server import StatusServer
from tests.support.waiting import wait_until

TRITON = """\
# HELP nv_inference_count Inferences
# TYPE nv_inference_count counter
nv_inference_count{model="ensemble",version="1"} 3
# HELP inflight_restarts_total New starts
# TYPE inflight_restarts_total counter
inflight_restarts_total{cause="crash",model="tokenizer",version="1"} 1
# HELP inflight_steps_total Engine steps
# TYPE inflight_steps_total counter
inflight_steps_total{model="tensorrt_llm",version="1"} 7
"""


class Part:
    """A part with a page of its own; it counts what it is asked, and keeps the keys."""

    def __init__(self, page: str) -> None:
        self.asked: list[str | None] = []
        part = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                part.asked.append(self.headers["authorization"])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def part() -> Iterator[Part]:
    made = Part(TRITON)
    yield made
    made.close()


@contextmanager
def _serving(status: Status, **parts: Page) -> Iterator[StatusServer]:
    (port,) = free_ports(1)
    server = StatusServer("127.0.0.1", port, status, MetricsPage(status, parts))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _connect(server: StatusServer) -> socket.socket:
    host, port = server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _get(server: StatusServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
    finally:
        connection.close()


def test_live_and_ready_differ_in_each_state() -> None:
    status = Status(lambda: {"crash": 2, "gateway": 1})
    seen = []
    with _serving(status) as server:
        for state in (State.STARTING, State.READY, State.RESTARTING, State.READY, State.STOPPING, State.READY):
            status.change(state, "crash" if state is State.RESTARTING else None)
            seen.append([_get(server, path)[0] for path in ("/live", "/v2/health/live", "/ready", "/v2/health/ready")])
        about = json.loads(_get(server, "/status")[2])
        code, headers, text = _get(server, "/ready")
    waiting, ready = [200, 200, 503, 503], [200, 200, 200, 200]
    assert seen == [waiting, ready, waiting, ready, waiting, waiting], "what stops is not ready any more"
    assert (code, text, headers["retry-after"], headers["x-should-retry"]) == (503, "stopping\n", "2", "true")
    assert about["restarts"] == {"crash": 2, "gateway": 1}
    assert (about["state"], about["ready"], about["last_cause"]) == ("stopping", False, "crash")
    assert about["seconds"] >= 0


def test_a_gateway_that_does_not_answer_makes_it_not_ready() -> None:
    answers: list[bool] = []
    status = Status(gateway_answers=lambda: bool(answers))
    status.change(State.READY)
    with _serving(status) as server:
        code, headers, text = _get(server, "/ready")
        assert (code, text, headers["x-should-retry"]) == (503, "the gateway does not answer yet\n", "true")
        assert json.loads(_get(server, "/status")[2])["ready"] is False
        assert "inflight_serve_ready 0" in _get(server, "/metrics")[2]
        answers.append(True)
        assert [_get(server, path)[0] for path in ("/ready", "/v2/health/ready")] == [200, 200]


def test_what_is_not_served_is_refused() -> None:
    with _serving(Status()) as server:
        assert _get(server, "/nothing")[0] == 404
        assert _get(server, "/live", "POST")[0] == 405
        code, headers, text = _get(server, "/live?verbose", "HEAD")
        assert (code, headers["content-length"], text) == (200, "5", "")
        for bytes_sent in (b"\0\1\2\r\n\r\n", b"GET /live HTTP/1.1\r\n" + b"a" * 100_000, b"GET "):
            with _connect(server) as client:
                client.sendall(bytes_sent)
                client.shutdown(socket.SHUT_WR)
                assert b" 200 " not in client.recv(100)
        assert _get(server, "/live")[0] == 200


def test_a_deployment_without_metrics_has_no_page() -> None:
    (port,) = free_ports(1)
    server = StatusServer("127.0.0.1", port, Status(), None)
    server.start()
    try:
        assert [_get(server, path)[0] for path in ("/live", "/metrics")] == [200, 404]
    finally:
        server.stop()


def test_a_busy_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_server, "HELD_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(DeploymentError, match=f"127.0.0.1:{port} cannot be used .* choose another --status-port"):
            StatusServer("127.0.0.1", port, Status(), None).start()


def test_a_start_that_fails_in_its_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loop(coroutine: Coroutine[None, None, None]) -> NoReturn:
        coroutine.close()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "run", no_loop)
    (port,) = free_ports(1)
    server = StatusServer("127.0.0.1", port, Status(), None)
    with pytest.raises(OSError, match="Too many open files"):
        server.start()
    server.stop()
    socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_held_a_moment_longer_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        server = StatusServer("127.0.0.1", busy.getsockname()[1], Status(), None)
        threading.Timer(0.3, busy.close).start()
        server.start()
    assert _get(server, "/live")[0] == 200
    server.stop()


def test_slow_clients_are_let_go_and_keep_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_S", 0.5)
    monkeypatch.setattr(module, "_CONNECTIONS", 8)
    with _serving(Status()) as server:
        slow = [_connect(server) for _ in range(8)]
        for client in slow:
            client.sendall(b"GET /live")
        assert [client.recv(1) for client in slow] == [b""] * 8
        assert _get(server, "/live")[0] == 200
        for client in slow:
            client.close()


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_S", 1.0)
    size = 16 << 20  # more than the sockets on both sides hold
    with _serving(Status(), large=lambda: "x" * size) as server, _connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        received = len(client.recv(1))
        assert wait_until(lambda: server._connections == 0)
        while part := client.recv(1 << 20):
            received += len(part)
    assert received < size


def test_the_page_has_each_family_once_and_its_own_while_parts_are_away(part: Part) -> None:
    (nowhere,) = free_ports(1)
    status = Status(lambda: {"crash": 3, "gateway": 2})
    status.change(State.READY)
    parts = {
        "triton": partial(read_page, part.url, "secret"),
        "gateway": partial(read_page, f"http://127.0.0.1:{nowhere}/metrics"),
    }
    with _serving(status, **parts) as server:
        code, headers, page = _get(server, "/metrics")
    assert (code, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["inflight_restarts_total", ("cause", "crash")] == 3, "its own, and not what the stage was told"
    assert samples["inflight_restarts_total", ("cause", "gateway")] == 2
    assert len([key for key in samples if key[0] == "inflight_restarts_total"]) == 2
    assert samples["inflight_serve_part_up", ("part", "triton")] == 1
    assert samples["inflight_serve_part_up", ("part", "gateway")] == 0
    assert samples[("inflight_serve_ready",)] == 1
    assert samples["inflight_steps_total", ("model", "tensorrt_llm"), ("version", "1")] == 7
    assert part.asked == ["Bearer secret"]


def test_a_flood_has_the_parts_asked_once(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_S", 3600)
    with _serving(Status(), triton=partial(read_page, part.url)) as server:
        answers: list[int] = []
        threads = [threading.Thread(target=lambda: answers.append(_get(server, "/metrics")[0])) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 20
    assert len(part.asked) == 1


def test_a_part_that_hangs_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        url = f"http://127.0.0.1:{hangs.getsockname()[1]}/metrics"
        with _serving(Status(), triton=partial(read_page, url)) as server:
            began = time.monotonic()
            page = _get(server, "/metrics")[2]
            assert time.monotonic() - began >= 1, "it has its time"
            assert 'inflight_serve_part_up{part="triton"} 0' in page


def test_a_part_that_hangs_is_asked_once_and_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "SOURCE_S", 0.05)
    asked, ends = Counter[str](), threading.Event()

    def hang() -> str | None:
        asked["hangs"] += 1
        ends.wait()
        return "a 1\n"

    def answer() -> str | None:
        asked["answers"] += 1
        return "b 1\n"

    page = MetricsPage(Status(), {"hangs": hang, "answers": answer})
    try:
        pages = [page.collect().decode() for _ in range(4)]
        assert ["b 1" in one for one in pages] == [True] * 4
        assert asked == {"hangs": 1, "answers": 4}
        ends.set()
        assert wait_until(lambda: "a 1" in page.collect().decode())
    finally:
        ends.set()
        page.close()


def test_histograms_stay_whole_and_the_first_page_wins() -> None:
    one = '# HELP a A\n# TYPE a histogram\na_bucket{le="+Inf"} 1\na_sum 2\na_count 1\n'
    other = f"{one.replace('1', '9')}# TYPE b counter\nb 1\n\n"
    assert merge([one, other]) == f"{one}# TYPE b counter\nb 1\n"
