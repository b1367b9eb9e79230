"""The generation that makes a server ready, against servers that answer in every way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.serve import generation as module
from inflight.serve.generation import REQUEST_ID, Generation, generate
from inflight.serve.server import free_ports

GOOD = 200, {"text_output": "", "finish_reason": "stop"}
"""An answer without text: the first token may be the last."""
Answer = tuple[int, Any]


class Server:
    """Gives its answers one after the other, the last of them again and again; None: it hangs."""

    def __init__(self) -> None:
        self.answers: list[Answer | None] = [GOOD]
        self.asked: list[tuple[str, Any]] = []
        self.ends = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.asked.append((self.path, body))
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                if answer is None:
                    server.ends.wait()
                    return
                self.send_response(answer[0])
                self.end_headers()
                self.wfile.write(json.dumps(answer[1]).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.ends.set()
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def test_one_token_of_one_letter_is_asked_for(server: Server) -> None:
    assert generate(server.url, 60) == ""
    body = {"id": REQUEST_ID, "text_input": "a", "max_tokens": 1}
    assert server.asked == [("/v2/models/ensemble/generate", body)]


def test_a_full_queue_is_asked_again(server: Server) -> None:
    full = 503, {"error": "queue_full: the queue is full"}
    server.answers = [full, full, full, GOOD]
    assert generate(server.url, 60) == ""
    assert len(server.asked) == 4


def test_a_queue_that_is_full_to_the_end_is_one_of_a_server_that_serves(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = list[float]()
    monkeypatch.setattr(module, "_PAUSE_S", 31)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append))
    full = {"error": "in ensemble 'ensemble', UNAVAILABLE: Exceeds maximum queue size: Maximum queue size of 8 ..."}
    server.answers = [(503, full)]
    assert generate(server.url, 60) == ""
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {"error": "the engine\nfailed"}), r'status 500: {"error": "the engine\nfailed"}'),
        ((400, {"error": "invalid"}), 'status 400: {"error": "invalid"}'),
        ((503, {"error": "full"}), 'status 503: {"error": "full"}'),
        ((200, {"error": "x"}), "its answer has no text_output: {'error': 'x'}"),
        ((200, ["x"]), "its answer has no text_output: ['x']"),
        (None, "no answer within 0.5 s"),
    ],
    ids=str,
)
def test_what_is_no_answer_is_told(
    server: Server, answer: Answer | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer and answer[0] == 503:  # a busy server is asked again; with this pause the first answer is also the last
        monkeypatch.setattr(module, "_PAUSE_S", 60)
    server.answers = [answer, *([answer] if answer and answer[0] == 400 else []), GOOD]
    assert generate(server.url, 60 if answer else 0.5) == error


def test_a_model_without_a_head_is_ready_with_an_embedding(server: Server) -> None:
    server.answers = [(400, {"error": "this checkpoint has no output head"}), GOOD]
    assert generate(server.url, 60) == ""
    assert server.asked[1][1] == {"id": REQUEST_ID, "text_input": "a", "pooling": "last"}


def test_a_server_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AFTERMATH_S", 0)
    (nowhere,) = free_ports(1)
    generation = Generation(f"http://127.0.0.1:{nowhere}", 5)
    assert generation.done.wait(60)
    assert "Connection refused" in generation.error
