"""The program `inflight` as a shell starts it: its first seconds, and standard streams that are not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_server import PIECES, FakeServer, Faults

PROGRAM = Path(sys.executable).with_name("inflight")
INTERRUPTED = """
import os, signal, sys

interrupted = sys.argv.pop()

class Finder:
    def find_spec(self, name, *_):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from inflight.__main__ import main
main()
"""


def _run(*arguments: str, closed: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', str(PROGRAM), *arguments]
    given = {"input": "Hi\n", "capture_output": True, "encoding": "utf-8", "timeout": 120}
    return subprocess.run(command, env=environment, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("module", ["inflight.cli", "inflight.client.commands"])
def test_ctrl_c_while_it_loads_ends_it_quietly(module: str) -> None:
    command = ["env", "--default-signal=INT", sys.executable, "-c", INTERRUPTED, "chat", module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_command_does_not_load_what_only_others_need() -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from inflight.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code, "generate", "--help"]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.split()
    assert "inflight.client.commands" in loaded
    others = tuple(f"inflight.{part}" for part in ("export", "load", "top", "serve"))
    assert [name for name in loaded if name.startswith(others)] == []


@pytest.mark.sweep
@pytest.mark.parametrize("command", [["chat"], ["generate", "Hi"]], ids=lambda words: words[0])
@pytest.mark.parametrize("closed", ["<&- 2>&-", ">&-"])
def test_a_standard_stream_may_be_closed(command: list[str], closed: str) -> None:
    if closed == "<&- 2>&-" and command == ["chat"]:
        closed = "2>&-"  # it has to have a message
    with FakeServer() as fake:
        done = _run(*command, "--url", f"127.0.0.1:{fake.grpc_port}", closed=closed)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ("" if closed == ">&-" else "".join(PIECES) + ("\n" if command != ["chat"] else ""))
        assert len(fake.requests) == 1


@pytest.mark.proof
def test_an_error_without_a_standard_error_is_no_answer() -> None:
    with FakeServer(faults=Faults(error="INVALID_ARGUMENT: no")) as fake:
        done = _run("generate", "Hi", "--url", f"127.0.0.1:{fake.grpc_port}", closed="2>&-")
    assert (done.returncode, done.stdout) == (1, "\n")


@pytest.mark.proof
def test_a_full_disk_is_told_without_the_number_of_the_error() -> None:
    assert _run("load", "list", closed=">/dev/full").stderr == "inflight: No space left on device\n"


@pytest.mark.proof
def test_a_scheme_in_capitals_is_that_scheme() -> None:
    with FakeServer() as fake:
        done = _run("generate", "Hi", "--url", f"HTTP://127.0.0.1:{fake.http_port}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "".join(PIECES) + "\n", "")


@pytest.mark.proof
def test_what_grpc_logs_of_a_wrong_port_is_not_shown() -> None:
    with FakeServer() as fake:
        done = _run("generate", "Hi", "--url", f"GRPCS://127.0.0.1:{fake.grpc_port}")
        assert done.stderr == (
            f"inflight: 127.0.0.1:{fake.grpc_port} does not use TLS: --url 127.0.0.1:{fake.grpc_port}\n"
        )
    assert done.returncode == 1
