"""What takes whole processes: Ctrl-C, kill -9, two pulls at once, a full file system, certificates, imports."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.resources import DEMO
from tests.fakes.hub import FakeHub
from tests.hub.conftest import FILES, WEIGHTS
from tests.hub.support.commands import inflight, refused

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def _start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "inflight", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())


def _wait_until(happened: object) -> None:
    assert callable(happened)
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _staged(models: Path) -> int:
    """Return how many bytes of the weights are staged."""
    return sum(path.stat().st_size for path in models.glob("org/name/.*.partial/model.safetensors"))


@pytest.fixture
def slow(hub: FakeHub) -> Iterator[FakeHub]:
    """A hub that stands still amid the weights, until it is told to go on."""
    hub.faults.hold_after["model.safetensors"] = 300_000
    yield hub
    hub.faults.go_on.set()


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_pull_goes_on_where_it_was(number: signal.Signals, slow: FakeHub, models: Path) -> None:
    process = _start("pull", "org/name")
    _wait_until(lambda: _staged(models) > 100_000)
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE_S)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "are kept, and the same command goes on from there" in said
        assert "Traceback" not in said
    assert not list(models.rglob("model-manifest.json"))
    slow.faults.go_on.set()
    slow.log.clear()
    kept = _staged(models)
    directory = Path(inflight("pull", "org/name").stdout.strip())
    assert slow.sent("model.safetensors") == [f"bytes={kept}-"] * 2
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.proof
def test_a_serve_that_is_stopped_while_it_pulls(slow: FakeHub, models: Path) -> None:
    slow.repositories["org/name"].commit({**FILES, "config.json": (DEMO / "model/config.json").read_bytes()})
    process = _start("serve", "org/name")
    _wait_until(lambda: _staged(models) > 100_000)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert said.endswith("are kept, and the same command goes on from there\n")


@pytest.mark.proof
def test_two_pulls_at_once_get_each_file_once(slow: FakeHub, models: Path) -> None:
    first = _start("pull", "org/name")
    _wait_until(lambda: _staged(models) > 0)
    second = _start("pull", "org/name")
    assert second.stderr is not None
    assert "another process pulls org/name; waiting for it" in second.stderr.readline()
    slow.faults.go_on.set()
    said = [process.communicate(timeout=PATIENCE_S) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert "is here already" in said[1][1]
    assert len(slow.sent("model.safetensors")) == 2, "once from the hub, once from its storage"


@pytest.mark.proof
def test_one_that_waits_goes_on_when_the_other_dies(slow: FakeHub, models: Path) -> None:
    first = _start("pull", "org/name")
    _wait_until(lambda: _staged(models) > 0)
    second = _start("pull", "org/name")
    assert second.stderr is not None
    assert "waiting for it" in second.stderr.readline()
    first.kill()
    first.communicate()
    slow.faults.go_on.set()
    _, said = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, said
    assert len(list(models.rglob("model-manifest.json"))) == 1


@pytest.mark.proof
def test_a_full_file_system(hub: FakeHub, models: Path) -> None:
    """The disk seems large enough when it is looked at. The second pull goes on when there is room."""
    unshare = shutil.which("unshare")
    ways = [[unshare, "--mount"], [unshare, "--user", "--map-root-user", "--mount"]]
    mount = "mount -t tmpfs -o size=700k tmpfs"
    way = next(
        (way for way in ways if unshare and not _run([*map(str, way), "sh", "-c", f"{mount} /mnt"]).returncode), None
    )
    if way is None:
        pytest.skip("no file system can be mounted here")
    models.mkdir()
    pull = f"{sys.executable} -c 'import shutil, collections;"
    pull += 'shutil.disk_usage = lambda path: collections.namedtuple("u", "free")(10**9);'
    pull += 'import sys; sys.argv = ["inflight", "pull", "org/name"];from inflight.cli import app; app()\''
    script = f"{mount} {models} && {pull}; echo code $?; mount -o remount,size=4m {models} && {pull}; echo code $?"
    done = _run([*map(str, way), "sh", "-c", script])
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 1", "code 0"], done
    assert "No space left on device, and " in done.stderr, "of whichever file came to it first"
    assert "Traceback" not in done.stderr
    starts = [one for one in hub.sent("model.safetensors") if one]
    assert starts, "the second pull went on from where the first had no room"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=PATIENCE_S)


def test_a_file_that_may_not_grow(hub: FakeHub, models: Path) -> None:
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
    limited += "sys.argv = ['inflight', 'pull', 'org/name']; from inflight.cli import app; app()"
    done = _run([sys.executable, "-c", limited])
    assert done.returncode == 1
    assert "model.safetensors: File too large, and " in done.stderr
    assert "Traceback" not in done.stderr
    assert _staged(models) == 500_000
    inflight("pull", "org/name")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key and a certificate of this machine's loopback, signed by themselves."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, made = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-keyout", key, "-out", made, *names], check=True, capture_output=True)
    return key, made


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_certificate_of_ones_own(
    variable: str, hub: FakeHub, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    hub.server.socket = context.wrap_socket(hub.server.socket, server_side=True)
    hub.scheme = "https"
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    assert "certificate verify failed" in refused("pull", "org/name")
    monkeypatch.setenv(variable, str(certificate[1]))
    inflight("pull", "org/name")
    monkeypatch.setenv(variable, str(certificate[0].with_name("nowhere.pem")))
    assert refused("pull", "org/name@v1").startswith(f"{variable}: ")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("inflight.hub.commands", {"torch", "triton", "transformers", "numpy", "huggingface_hub"}),
        ("inflight.serve.command", {"httpx", "inflight.hub.pull", "psutil"}),
    ],
)
def test_what_is_not_needed_is_not_imported(module: str, left_out: set[str]) -> None:
    found = f"import {module}, sys; print(*(set({sorted(left_out)}) & set(sys.modules)))"
    done = _run([sys.executable, "-c", found])
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
