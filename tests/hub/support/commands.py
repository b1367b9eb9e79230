"""Runs `inflight`, mostly within the test's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from typer.testing import CliRunner, Result

from inflight.cli import app
from inflight.serve.server import free_ports

ROOT = Path(__file__).parents[3]
PROMPT, ANSWER_TOKENS = "What is in-flight batching?", 8
"""What a server is asked."""


def inflight(*words: str) -> Result:
    """Run a command that has to succeed."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done


def refused(*words: str) -> str:
    """Run a command that has to fail with one line, and return what that says."""
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 1, done.output
    last = done.stderr.splitlines()[-1]
    assert last.startswith("inflight: "), done.output
    assert "Traceback" not in done.output
    return last.removeprefix("inflight: ")


def answer_of(model: str) -> tuple[str, str]:
    """Serve a model, ask it for ``ANSWER_TOKENS``, stop it; return what the command said, and the answer."""
    http, grpc, metrics = map(str, free_ports(3))
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics, "--no-gateway"]
    process = subprocess.Popen(
        [sys.executable, "-m", "inflight", "serve", model, *ports],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if "Ctrl-C stops it" in line:
                break
        assert "Ctrl-C stops it" in said, said
        body = {"text_input": PROMPT, "max_tokens": ANSWER_TOKENS}
        answer = httpx.post(f"http://127.0.0.1:{http}/v2/models/ensemble/generate", json=body, timeout=60)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 0
    return said, str(answer.json()["text_output"])
