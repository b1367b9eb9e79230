"""`inflight serve`: ready quickly, stopped cleanly, and one clear line when it cannot."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from inflight.serve.command import DEMO
from inflight.serve.installation import find_installation
from inflight.serve.server import free_ports
from tests.triton.conftest import Running

INFLIGHT = str(Path(sys.executable).with_name("inflight"))
SHARED_MEMORY = Path("/dev/shm")


def _ports() -> list[str]:
    http, grpc, metrics = map(str, free_ports(3))
    return ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [INFLIGHT, "serve", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _wait_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "Ctrl-C stops it" in line:
            return said
    raise AssertionError(said)


def _servers() -> set[int]:
    return {one.pid for one in psutil.process_iter() if "triton" in one.name()}


def test_ready_in_under_five_seconds_and_stopped_by_ctrl_c() -> None:
    files, started = set(SHARED_MEMORY.iterdir()), time.monotonic()
    process = _start(*_ports())
    said = _wait_ready(process)
    assert time.monotonic() - started < 5
    url = re.search(r"HTTP +(\S+)", said)
    assert url
    curl = re.search(r"curl -s (\S+) -d '(.*)'", said)
    assert curl
    assert "in-flight" in httpx.post(curl[1], content=curl[2], timeout=30).json()["text_output"].lower()
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert not psutil.wait_procs(children, timeout=1)[1]
    assert set(SHARED_MEMORY.iterdir()) == files


def test_a_killed_command_takes_its_server_along() -> None:
    process = _start(*_ports())
    _wait_ready(process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=15)[1]
    for file in SHARED_MEMORY.glob(f"inflight_{process.pid}_*"):
        file.unlink()  # nobody was left to do it


@pytest.mark.parametrize(
    ("yaml", "reason"),
    [
        ("", "a mapping of settings is expected"),
        ("model: [", "not valid YAML"),
        ("model: nowhere", "is not a checkpoint directory"),
        ("decoupled: true", "`model` is missing"),
        ("model: {model}\nbatchin: {{}}", "unknown key `batchin` (did you mean 'batching'?)"),
        ("model: {model}\nbatching: {{max_batch_sise: 2}}", "did you mean 'max_batch_size'?"),
        ("model: {model}\nbatching: {{max_batch_size: many}}", "`batching.max_batch_size` is 'many'"),
        ("model: {model}\nbatching: {{policy: greedy}}", "'guaranteed_no_evict' or 'max_utilization'"),
        ("model: {model}\nengine: {{device: cuda}}", "PyTorch finds no CUDA device"),
        ("model: {model}\nengine: {{device: tpu9}}", "it must be cpu, cuda, cuda:N or auto"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_deployment_is_one_clear_line(tmp_path: Path, yaml: str, reason: str) -> None:
    if "cuda" in reason and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "deployment.yaml").write_text(yaml.format(model=DEMO / "model"))
    _expect_failure(reason, str(tmp_path))


def test_a_missing_deployment_and_a_missing_model_are_named(tmp_path: Path) -> None:
    _expect_failure("cannot be read", str(tmp_path / "nothing"))
    _expect_failure("is not a checkpoint directory", "--model", str(tmp_path))
    _expect_failure("not both", str(tmp_path), "--model", str(tmp_path))
    _expect_failure("is not a Triton installation", "--triton", str(tmp_path))


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO / "model", model)
    (model / "tokenizer.json").unlink()
    _expect_failure("tokenizer.json: missing", "--model", str(model))


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        _expect_failure(f"127.0.0.1:{port} cannot be used", *_ports()[:4], "--metrics-port", port)


def test_a_model_is_served_without_a_deployment() -> None:
    process = _start("--model", str(DEMO / "model"), *_ports())
    said = _wait_ready(process)
    assert str(DEMO / "model") in said
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 0


def _expect_failure(reason: str, *arguments: str) -> None:
    before = _servers()
    process = _start(*arguments, *([] if "--metrics-port" in arguments else _ports()))
    _, said = process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    [line] = [line for line in said.splitlines() if line.strip()]
    assert line.startswith("inflight: ")
    assert reason in line
    assert _servers() <= before, "a process was left running"


def test_an_installed_triton_is_used_when_named(tmp_path: Path) -> None:
    """A tree laid out as NVIDIA's images have it, made of the wheel's parts."""
    wheel = find_installation()
    (tmp_path / "backends/python").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tritonserver").symlink_to(wheel.binary)
    (tmp_path / "lib").symlink_to(wheel.loader_path[-1])
    for part in (*wheel.python_backend.glob("*.so"), *wheel.python_backend.glob("*.py"), wheel.stub):
        shutil.copy2(part, tmp_path / "backends/python")
    process = _start("--triton", str(tmp_path), *_ports())
    _wait_ready(process)
    servers = [one.cmdline()[0] for one in psutil.Process(process.pid).children() if one.cmdline()]
    assert servers == [str(tmp_path / "bin/tritonserver")]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_the_log_says_what_was_chosen(server: Running) -> None:
    """What the stages log below a warning is there too."""
    assert re.search(r"INFO inflight\.engine\.model_runner: Llama\w+ on \S+ in torch\.\w+: \d+ layers", server.log)
