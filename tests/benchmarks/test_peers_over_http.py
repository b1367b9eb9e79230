"""The client that measures servers, beside a server of the test's own that speaks each dialect, and wrongly if told."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.contenders import Place
from benchmarks.peers.serving import SERVERS, served, speed_name
from benchmarks.peers.variants import OURS, SERVED
from benchmarks.peers.workers.http_load import (
    DIALECTS,
    Client,
    ServerFailure,
    Stream,
    figures,
    prompts,
    serving,
)
from inflight.serve.server import free_ports
from inflight.settings.deployment import load_deployment

TOKENS = 3
EVENTS: dict[str, list[Any]] = {
    "inflight": [
        {"text_output": "a"},
        {"text_output": "bc"},
        {"text_output": "", "num_output_tokens": 3},
    ],
    "openai": [
        {"choices": [{"text": "a"}], "usage": None},
        {"choices": [{"text": "bc"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
        "[DONE]",
    ],
    "llama.cpp": [
        {"content": "a", "stop": False},
        {"content": "bc", "stop": False},
        {"content": "", "stop": True, "tokens_predicted": 3},
    ],
}
"""What each server sends for three tokens, of which two came together."""


def chunk(event: Any) -> bytes:
    """Return an event as one chunk of HTTP."""
    line = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


@asynccontextmanager
async def server(events: list[Any], asked: list[Any], status: str = "200 OK") -> AsyncIterator[int]:
    """Serve the same events to everyone, and note what was asked; yields the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length:")[2].split()[0])
        asked.append((head.split()[1], json.loads(await reader.readexactly(length))))
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for event in events:
            writer.write(chunk(event))
        writer.write(b"0\r\n\r\n")
        writer.close()

    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]


@pytest.mark.parametrize("name", DIALECTS)
async def test_each_server_is_understood(name: str) -> None:
    asked: list[Any] = []
    async with server(EVENTS[name], asked) as port:
        streams = await Client(DIALECTS[name], port, "model", TOKENS).ask_all(["abc", "abd", "abe"], 2)
    assert [(one.made, len(one.chunks_s)) for one in streams] == [(3, 2)] * 3
    assert {path for path, _ in asked} == {DIALECTS[name].path}
    assert all(TOKENS in body.values() and body["ignore_eos"] is True and body["stream"] is True for _, body in asked)


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        (EVENTS["inflight"][:2], "200 OK", "a stream of 3 tokens was asked for, and None came"),
        ([{"text_output": "", "num_output_tokens": 2}], "200 OK", "3 tokens was asked for, and 2 came"),
        (["{half"], "200 OK", "this event is not understood: b'{half'"),
        ([{"error": "too long"}], "200 OK", "this event is not understood"),
        ([{"error": "too long"}], "400 Bad Request", "400 Bad Request: .*too long"),
    ],
)
async def test_a_wrong_answer_is_a_failure(events: list[Any], status: str, message: str) -> None:
    async with server(events, [], status) as port:
        with pytest.raises(ServerFailure, match=message):
            await Client(DIALECTS["inflight"], port, "model", TOKENS).ask("abc")


def test_figures_are_of_the_chunks_and_of_the_tokens() -> None:
    streams = [Stream(0.0, [1.0, 1.5, 3.5], 4), Stream(0.0, [2.0, 2.5, 3.0], 4)]
    found = figures(streams, 4.0, 0.8)
    assert found["tokens_per_s"] == 2
    assert found["cpu_ms_per_token"] == pytest.approx(100)
    assert (found["ttft_p50_ms"], found["gap_p50_ms"], found["gap_longest_ms"]) == (1500, 500, 2000)
    assert found["tokens_per_chunk"] == pytest.approx(8 / 6)
    rows = served({"loads": [{"streams": 8, **found}], "others": 0.0})
    assert rows["figures"] == {speed_name(8): 2}
    assert rows["loads"]["8"]["gap_longest_ms"] == 2000


def test_prompts_have_so_many_words_and_follow_from_the_seed() -> None:
    found = prompts(3, 100, 5)
    assert {len(prompt.split(" ")) for prompt in found} == {100}
    assert found == prompts(3, 100, 5)
    assert found != prompts(3, 100, 6)


def test_a_server_that_ends_before_it_is_ready_is_a_failure() -> None:
    command = [sys.executable, "-c", "raise SystemExit(4)"]
    with (
        pytest.raises(ServerFailure, match="ended with code 4 before it was ready"),
        serving(command, {}, free_ports(1)[0], "/"),
    ):
        pytest.fail("it was never ready")


def test_a_server_is_stopped_in_the_end() -> None:
    [port] = free_ports(1)
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    with serving(command, {}, port, "/") as process:
        assert process.is_running()
    assert not process.is_running()


def test_ours_is_served_with_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.serving.cores", lambda: [0, 1, 2])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    found = {}
    for variant in (one for one in SERVED if one.contender == OURS):
        start: Callable[..., Any] = SERVERS[OURS]
        command, _, dialect = start(Place(tmp_path), variant, model, [8001, 8002, 8003])
        assert dialect in DIALECTS
        found[variant.name] = load_deployment(Path(command[-1]))
    threads = {name: one.engine.threads for name, one in found.items()}
    assert threads == {"defaults": None, "a thread for each core": 3, "INT8": None}
    assert found["INT8"].engine.weights == "int8"
    assert {one.server.http_port for one in found.values()} == {8001}
    assert set(SERVERS) == {one.contender for one in SERVED}
