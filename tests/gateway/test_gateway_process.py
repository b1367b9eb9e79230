"""The gateway's process beside Triton: each lives through the other's death, and both end together."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from inflight.resources import DEMO
from inflight.serve import log as log_module
from inflight.serve.server import free_ports
from tests.gateway.support.gateways import Beside, process_alone, until
from tests.triton.support.metrics_page import read_metric
from tests.triton.support.servers import on_engine

INFLIGHT = (sys.executable, "-m", "inflight")
PATIENCE_S = 120.0


@dataclass
class Command:
    """A running `inflight serve`."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    said: Path

    def text(self) -> str:
        return self.said.read_text()

    def health(self) -> httpx.Response | None:
        """Return the gateway's answer; None: there is none."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=PATIENCE_S, trust_env=False)
        return None

    def is_healthy(self) -> bool:
        reply = self.health()
        return reply is not None and reply.status_code == 200

    def child(self, word: str) -> psutil.Process:
        """Return the child with a word in its command, as soon as there is one."""
        found: list[psutil.Process] = []
        until(lambda: found.extend(_with(word, self.processes())) or found, PATIENCE_S)
        return found[0]

    def processes(self, recursive: bool = False) -> list[psutil.Process]:
        """Return its children, and theirs."""
        return psutil.Process(self.process.pid).children(recursive)


@contextmanager
def serving(directory: Path, *options: str, demo: bool = False, **settings: Any) -> Iterator[Command]:
    """Run `inflight serve` with the engine that starts soonest, or with the demo model."""
    served = on_engine("pytorch" if demo else "replay", directory, **settings)
    numbers = dict(zip(("http", "grpc", "metrics", "gateway"), free_ports(4), strict=True))
    ports = [f"--{name}-port={port}" for name, port in numbers.items()]
    said = directory / "said"
    with said.open("w") as file:
        environment = os.environ | {"XDG_STATE_HOME": str(directory / "state")}
        process = subprocess.Popen(
            [*INFLIGHT, "serve", str(served), *ports, *options],
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    command = Command(process, numbers["gateway"], numbers["metrics"], said)
    try:
        until(lambda: "Ctrl-C stops it" in command.text() or process.poll() is not None, PATIENCE_S)
        assert process.poll() is None, command.text()
        yield command
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE_S)


def _with(word: str, processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those with a word in their command; one that ends meanwhile has none."""
    found = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            found += [one] if any(word in part for part in one.cmdline()) else []
    return found


def _wait_for_end(processes: list[psutil.Process]) -> None:
    """Wait until none of them runs any more; a zombie waits for the machine's first process alone."""

    def runs(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    until(lambda: not any(map(runs, processes)), PATIENCE_S)


def _is_away(reply: httpx.Response | None) -> bool:
    """Return whether an answer says that the engine is away, or the gateway about to be."""
    return reply is not None and reply.status_code == 503 and reply.headers["retry-after"] == "1"


@pytest.mark.proof
def test_each_process_lives_through_the_others_death(tmp_path: Path) -> None:
    with serving(tmp_path) as command:
        assert command.is_healthy(), "as soon as the command says that it is ready"
        gateway, triton = command.child("inflight.gateway"), command.child("tritonserver")
        gateway.kill()
        until(lambda: command.is_healthy() and command.child("inflight.gateway").pid != gateway.pid, PATIENCE_S)
        assert command.child("tritonserver") == triton
        assert "the gateway ended on SIGKILL; it restarts in 0 s; its log is kept in" in command.text()
        kept = next((tmp_path / "state/inflight").glob("crash-*.log"))
        assert "the engine is ready" in kept.read_text()

        gateway = command.child("inflight.gateway")
        command.process.send_signal(signal.SIGSTOP)  # so that it does not start the server again before this is seen
        triton.kill()
        until(lambda: _is_away(command.health()), PATIENCE_S)
        assert gateway.is_running()
        command.process.send_signal(signal.SIGCONT)
        until(command.is_healthy, PATIENCE_S)
        assert command.child("inflight.gateway") == gateway
        everything = command.processes(recursive=True)
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(PATIENCE_S) == 0
        _wait_for_end(everything)


@pytest.mark.proof
def test_a_killed_command_takes_its_gateway_along(tmp_path: Path) -> None:
    with serving(tmp_path) as command:
        everything = command.processes(recursive=True)
        assert _with("inflight.gateway", everything)
        command.process.kill()
        command.process.wait()
        _wait_for_end(everything)


@pytest.mark.proof
def test_a_gateway_that_stands_still_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path, server={"hang_timeout_s": 5}) as command:
        gateway = command.child("inflight.gateway")
        gateway.suspend()
        until(lambda: "the gateway has not answered for 5 s" in command.text(), PATIENCE_S)
        until(command.is_healthy, PATIENCE_S)
        assert command.child("inflight.gateway").pid != gateway.pid


@pytest.mark.proof
def test_there_is_none_where_it_is_off(tmp_path: Path) -> None:
    with serving(tmp_path, "--no-gateway") as command:
        assert "  OpenAI   off\n" in command.text()
        assert "/v1/chat/completions" not in command.text()
        assert not _with("inflight.gateway", command.processes(recursive=True))
        assert command.health() is None


@pytest.mark.proof
def test_the_banner_names_the_url_and_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, gateway={"model_name": "org/name"}) as command:
        said = command.text()
        phases = [line for line in said.partition("ready in ")[0].splitlines() if re.match(r" *\d+\.\d s  \w", line)]
        assert any("reading the tokenizer" in line for line in phases), said
        assert f"  OpenAI   http://127.0.0.1:{command.port}/v1, log /" in said
        log = Path(said.partition("/v1, log ")[2].splitlines()[0])
        assert "the engine is ready" in log.read_text()
        assert f"curl -s http://127.0.0.1:{command.port}/v1/chat/completions" in said
        assert '"model": "org/name"' in said
    assert not log.exists()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("keys", "said"),
    [("missing", "gateway.api_keys_file: "), ("deployment.yaml", "gateway.api_keys_file: ")],
)
def test_keys_that_cannot_be_used_stop_the_start(tmp_path: Path, keys: str, said: str) -> None:
    directory = on_engine("replay", tmp_path, gateway={"api_keys_file": keys})
    numbers = dict(zip(("http", "grpc", "metrics", "gateway"), free_ports(4), strict=True))
    done = subprocess.run(
        [*INFLIGHT, "serve", str(directory), *(f"--{name}-port={port}" for name, port in numbers.items())],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_stops_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        numbers = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True)) | {"gateway": port}
        command = [*INFLIGHT, "serve", str(DEMO), *(f"--{name}-port={one}" for name, one in numbers.items())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert f"127.0.0.1:{port} cannot be used (Address already in use); choose another --gateway-port" in done.stderr


def test_the_shared_gateway_is_ready(gateway: Beside) -> None:
    with gateway.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert "inflight_gateway_engine_ready 1.0" in client.get("/metrics").text
        given = client.get("/v1/models", headers={"x-request-id": "my-id"})
    assert given.headers["x-request-id"] == "my-id"
    until(lambda: "my-id" in gateway.log)
    assert "GET /v1/models 200" in gateway.log


@pytest.mark.proof
def test_its_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MOST_BYTES", 4000)
    with process_alone() as process:
        before = process.log_path.with_suffix(".log.1")
        with httpx.Client(base_url=process.url, timeout=60, trust_env=False) as client:
            for number in range(40):
                assert client.get("/v1/models", headers={"x-request-id": f"first-{number}-{'a' * 60}"}).is_success
            until(lambda: before.exists() and process.log_path.stat().st_size < 4000)
            assert client.get("/v1/models", headers={"x-request-id": "last"}).is_success
            until(lambda: "last" in process.log_path.read_text())
        assert "\0" not in process.log_path.read_text(), "it goes on at its beginning"
        assert "first-0-" in before.read_text()


@pytest.mark.proof
def test_it_stops_at_once_when_nothing_runs(tmp_path: Path) -> None:
    with serving(tmp_path, server={"exit_timeout_s": 3600}) as command:
        gateway = command.child("inflight.gateway")
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
            client.get(f"http://127.0.0.1:{command.port}/health")  # an idle connection stays open
            command.process.send_signal(signal.SIGINT)
            gateway.wait(PATIENCE_S)
        assert command.process.wait(PATIENCE_S) == 0
        assert "the gateway" not in command.text(), "it ended in order"


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is TTFT?"}], "temperature": 0}
LONG = {**CHAT, "max_tokens": 1900, "ignore_eos": True, "stream": True}


def _url(command: Command) -> str:
    return f"http://127.0.0.1:{command.port}/v1/chat/completions"


def _chat(command: Command, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(_url(command), json=body, timeout=PATIENCE_S, trust_env=False)


@pytest.mark.proof
def test_a_stream_is_finished_at_the_end_and_new_requests_are_refused(tmp_path: Path) -> None:
    """The stream waits for its place in a batch of one, until the stream before it, of three minutes, is left."""
    with (
        serving(
            tmp_path,
            engine={"replay_step_ms": 100},
            batching={"max_batch_size": 1},
            server={"exit_timeout_s": 600},
        ) as command,
        ThreadPoolExecutor() as pool,
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as client,
    ):
        with client.stream("POST", _url(command), json=LONG) as before:
            lines = before.iter_lines()
            assert next(lines)
            whole = pool.submit(_chat, command, {**LONG, "max_tokens": 10})
            page = f"http://127.0.0.1:{command.metrics_port}/metrics"
            until(lambda: read_metric(page, "inflight_waiting_requests") == 1, PATIENCE_S)
            everything = command.processes(recursive=True)
            command.process.send_signal(signal.SIGTERM)
            until(lambda: _is_away(command.health()), PATIENCE_S)
            refused = _chat(command, CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert not whole.done(), "all this while it ran"
        text = whole.result().text
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
        assert command.process.wait(PATIENCE_S) == 0
        _wait_for_end(everything)


BROKEN: tuple[dict[str, Any], ...] = (
    {**LONG, "max_tokens": 1500},
    {**LONG, "max_tokens": 200, "temperature": 1, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2},
    {**LONG, "max_tokens": 200, "temperature": 0.8, "seed": 1, "frequency_penalty": 0.5, "stop": ["@@"]},
    {**LONG, "max_tokens": 200, "temperature": 1.2, "seed": 2, "min_tokens": 100, "ignore_eos": False},
    {**CHAT, "max_tokens": 1900, "temperature": 1, "seed": 3, "ignore_eos": True},
)


@pytest.mark.proof
def test_streams_go_on_where_the_server_dies(tmp_path: Path) -> None:
    with serving(tmp_path, demo=True) as command, ThreadPoolExecutor() as pool:
        for _ in range(4):  # before the server is killed, a fast one may have answered all that were to break
            begun = _counted(command, FIRST_TOKENS)
            broken = [pool.submit(_chat, command, body) for body in BROKEN]
            until(lambda begun=begun: _counted(command, FIRST_TOKENS) >= begun + len(BROKEN) - 1, PATIENCE_S)
            command.child("tritonserver").kill()
            late = pool.submit(_chat, command, CHAT)
            assert "first token" in late.result().json()["choices"][0]["message"]["content"].lower()
            answers = [_said(reply.result()) for reply in broken]
            ends = ("resumed", "repeated")
            resumed, repeated = (_counted(command, f'resumed_total{{outcome="{one}"}}') for one in ends)
            if resumed and repeated:
                break
        assert resumed >= 1, "the first has the most tokens"
        assert repeated >= 1, "the last one comes whole"
        assert "ready again" in command.text()
        assert answers == [_said(_chat(command, body)) for body in BROKEN]


@pytest.mark.proof(waits=True)
def test_requests_wait_for_an_engine_until_it_is_given_up(tmp_path: Path) -> None:
    """The restarts in a row fail, since the deployment cannot be read any more."""
    with serving(tmp_path) as command, ThreadPoolExecutor() as pool:
        assert "--kept" in command.child("inflight.gateway").cmdline()
        (tmp_path / "deployment.yaml").write_text("model: [")
        command.child("tritonserver").kill()
        until(lambda: _is_away(command.health()), PATIENCE_S)
        reply = pool.submit(httpx.post, _url(command), json=CHAT, timeout=None, trust_env=False)
        until(lambda: "the server restarts in 16 s" in command.text(), PATIENCE_S)
        assert not reply.done(), "all this while it waits"
        assert _is_away(reply.result())
        assert command.process.wait(PATIENCE_S) == 1
        assert "gives up after 6 restarts in a row" in command.text()


def _said(reply: httpx.Response) -> list[Any]:
    """Return what an answer says of each choice: its text, its tokens by their log-probs, and how it ends."""
    assert reply.status_code == 200, reply.text
    parts = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")] or [reply.json()]
    choices: dict[int, list[Any]] = {}
    for choice in [choice for part in parts for choice in part["choices"]]:
        said = choices.setdefault(choice["index"], ["", [], None])
        said[0] += (choice["delta"] if "delta" in choice else choice["message"]).get("content") or ""
        said[1] += [one["token"] for one in (choice["logprobs"] or {"content": []})["content"]]
        said[2] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


@pytest.mark.proof
def test_the_banners_command_works(tmp_path: Path) -> None:
    with serving(tmp_path, demo=True) as command:
        [shown] = [line for line in command.text().splitlines() if "/v1/chat/completions" in line]
        done = subprocess.run(shown, shell=True, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "in-flight" in json.loads(done.stdout)["choices"][0]["message"]["content"].lower()


FIRST_TOKENS = 'time_to_first_token_seconds_count{route="/v1/chat/completions"}'


def _counted(command: Command, series: str) -> int:
    """Return what the gateway has counted."""
    page = httpx.get(f"http://127.0.0.1:{command.port}/metrics", timeout=PATIENCE_S, trust_env=False).text
    found = re.search(rf"inflight_gateway_{re.escape(series)} (\d+)", page)
    return int(found[1]) if found else 0
