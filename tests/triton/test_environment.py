"""A server and its clients in an environment full of traps: paths, locales, proxies, Python's variables."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from inflight.resources import DEMO
from inflight.serve.server import free_ports

INFLIGHT = str(Path(sys.executable).with_name("inflight"))
PATIENCE_S = 120.0
TEXT = "Was ist ein KV-Cache? ü 你好 🙂"
NAME = "mod el é 你好"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment; return a deployment whose path has spaces and is not ASCII, as its checkpoint's."""
    directory = tmp_path / "dépl oy"
    shutil.copytree(DEMO / "model", directory / NAME)
    (directory / "deployment.yaml").write_text(f"model: {NAME}\n", encoding="utf-8")
    temporary = tmp_path / "tmp ü"
    temporary.mkdir()
    for name in ("no_proxy", "NO_PROXY", "LANG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    nowhere = "http://127.0.0.1:9"
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, nowhere)
    for name, value in {
        "LC_ALL": "C",
        "TMPDIR": str(temporary),
        "TERM": "dumb",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "default",
        "PYTHONIOENCODING": "ascii",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.proof
def test_serve_and_generate_in_an_odd_environment(odd: Path) -> None:
    http, grpc, metrics, gateway = free_ports(4)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    ports += ["--gateway-port", str(gateway)]
    process = subprocess.Popen(
        [INFLIGHT, "serve", str(odd), "--host", "localhost", *ports], stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    said = b""
    for line in process.stderr:
        said += line
        if b"Ctrl-C stops it" in line:
            break
    else:
        pytest.fail(said.decode(errors="replace"))
    try:
        answer = _inflight("generate", TEXT, "--url", f"127.0.0.1:{grpc}", "--max-tokens", "4")
        assert (answer.returncode, answer.stderr) == (0, b"")
        with open("/dev/full", "wb") as full:
            asked = [INFLIGHT, "generate", TEXT, "--url", f"127.0.0.1:{grpc}"]
            refused = subprocess.run(asked, stdin=None, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S)
        assert (refused.returncode, refused.stderr) == (1, b"inflight: No space left on device\n")
        page = httpx.get(f"http://127.0.0.1:{metrics}/metrics", timeout=60, trust_env=False).content.decode()
        assert f'checkpoint="{NAME}"' in page, "a label that every reader can decode"
    finally:
        os.kill(process.pid, signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait(PATIENCE_S) == 0, rest
    assert b"Traceback" not in said + rest


def _inflight(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([INFLIGHT, *arguments], capture_output=True, timeout=PATIENCE_S)
