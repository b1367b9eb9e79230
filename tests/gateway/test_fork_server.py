"""The gateway's largest requests: prepared in processes of their own, as if they were small ones."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from inflight.gateway.workers import HUGE
from tests.gateway.support.answers import MODEL
from tests.gateway.support.gateways import Beside, process_alone, until

PATIENCE_S = 300
CHAT = [{"role": "user", "content": "What is TTFT?"}]
FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "look", "parameters": FORM}
LABELS = {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": CHAT,
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "logprobs": True,
        "prompt_logprobs": 1,
    },
    "/v1/completions": {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "guided_json": FORM, "stop": "z"},
    "/v1/responses": {"input": "a", "tools": [{"type": "function", **TOOL}], "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 8, "tools": [{"name": "look", "input_schema": FORM}]},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/score": LABELS,
    "/generative_scoring": LABELS,
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/tokenize": {"messages": CHAT, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
}
GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_VARIES = re.compile(
    r'"(?:id|item_id|created|created_at|completed_at|call_id)": ?(?:"[^"]*"|[\d.]+|null)|"cached_tokens": ?\d+|'
    r'"cache_\w+": ?\d+'
)
"""The parts that differ between two answers to the same request."""


def _run(case: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gateway.support.forked", case, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("case", ["results", "errors", "ended", "without", "crowded", "stopped"])
def test_a_call_is_made_as_in_the_same_process(tmp_path: Path, case: str) -> None:
    done = _run(case, str(tmp_path / "place"))
    assert done.stdout.splitlines()[-1:] == ["done"], done.stderr


def test_no_process_outlives_the_one_that_calls(tmp_path: Path) -> None:
    done = _run("leave", str(tmp_path / "place"))
    assert done.returncode == -signal.SIGKILL
    pids = [int(one) for one in done.stdout.split()]
    assert len(pids) == 2, "the server and the call"
    until(lambda: not any(map(_runs, pids)), PATIENCE_S)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("path", BODIES)
def test_a_large_request_is_answered_as_a_small_one(gateway: Beside, path: str) -> None:
    """The field that makes it large is left out, and named."""
    body = {"model": MODEL, **({"temperature": 0} if path in GENERATE else {}), **BODIES[path]}
    with gateway.client() as client:
        small, large = (client.post(path, json={**body, "padding": "a" * size}) for size in (1, HUGE))
    for reply in small, large:
        assert reply.status_code == 200, reply.text[:500]
        assert reply.headers["x-ignored-fields"] == "padding"
    assert _VARIES.sub("", large.text) == _VARIES.sub("", small.text)


def test_what_is_wrong_with_a_large_request_is_told(gateway: Beside) -> None:
    with gateway.client() as client:
        for body, status, said in (
            ({"messages": CHAT, "padding": "a" * HUGE, "n": -1}, 400, "n is -1"),
            ({"messages": CHAT, "padding": "a" * HUGE, "model": "another"}, 404, "'another' does not exist"),
            ({"messages": "a" * HUGE}, 400, "messages"),
        ):
            reply = client.post("/v1/chat/completions", json={"model": MODEL, **body})
            assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.text
        reply = client.post("/v1/chat/completions", content=b"[" * HUGE, headers={"content-type": "application/json"})
        assert "levels deep" in reply.json()["error"]["message"]


def test_large_requests_are_prepared_by_another_process_while_there_is_one() -> None:
    with (
        process_alone() as process,
        httpx.Client(base_url=process.url, timeout=PATIENCE_S, trust_env=False) as client,
    ):
        port = process.url.rpartition(":")[2]
        [own] = [one for one in psutil.Process().children() if f'"port": {port}' in " ".join(one.cmdline())]
        [server] = own.children()
        body = {"prompt": "a", "padding": "a" * HUGE}
        assert client.post("/tokenize", json=body).json()["count"] == 1
        assert server.nice() == own.nice() + 10
        assert "its own does all work" not in process.log_path.read_text()
        server.kill()
        until(lambda: not _runs(server.pid))
        assert client.post("/tokenize", json=body).json()["count"] == 1
        assert "its own does all work" in process.log_path.read_text()
