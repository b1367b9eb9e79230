"""The stack that the server is started with, and the line that says where it cannot be had."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.serve import shields

_ASK = [
    sys.executable,
    "-c",
    "import resource, threading as t; print(resource.getrlimit(resource.RLIMIT_STACK)[0]);"
    "one = t.Thread(target=print); one.start(); one.join()",
]


def _limits(monkeypatch: pytest.MonkeyPatch, **limits: tuple[int, int]) -> None:
    real = resource.getrlimit
    named = {getattr(resource, f"RLIMIT_{name}"): value for name, value in limits.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda which: named.get(which) or real(which))


def test_a_command_and_its_threads_get_it(caplog: pytest.LogCaptureFixture) -> None:
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("this process has a hard limit of its own")
    said = subprocess.check_output([*shields.roomy_stack(), *_ASK], text=True)
    assert int(said) >= 512 << 20
    assert not caplog.messages


def test_a_hard_limit_is_taken_and_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _limits(monkeypatch, STACK=(8 << 20, 64 << 20))
    said = subprocess.check_output([*shields.roomy_stack(), *_ASK], text=True)
    assert int(said) == 64 << 20
    [line] = caplog.messages
    assert line.startswith("the stack of the server's threads is 65536 KiB, its hard limit (`ulimit -Hs`)")


def test_where_memory_is_not_overcommitted_the_stack_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _limits(monkeypatch, AS=(1 << 36, 1 << 36))
    assert shields.roomy_stack() == []
    assert "`ulimit -v`" in caplog.messages[0]
    _limits(monkeypatch, AS=(resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    policy = tmp_path / "overcommit_memory"
    policy.write_text("2\n")
    monkeypatch.setattr(shields, "_OVERCOMMIT", policy)
    assert shields.roomy_stack() == []
    assert "vm.overcommit_memory is 2" in caplog.messages[1]


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeploymentError, match="`prlimit` is not installed; it is part of util-linux"):
        shields.roomy_stack()


def test_the_value_that_opens_an_api_differs_at_each_start() -> None:
    first, again = shields.closed_apis(()), shields.closed_apis(())
    assert first != again
    assert [option.partition(":")[0] for option in first] == [
        "--http-restricted-api=shared-memory,trace,logging",
        "--grpc-restricted-protocol=shared-memory,trace,logging",
    ]
    assert shields.closed_apis(["trace", "shared-memory"])[0].startswith("--http-restricted-api=logging:")
    assert shields.closed_apis(["trace", "shared-memory", "logging"]) == []


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_copy_of_the_server_lacks_what_would_end_it(tmp_path: Path, decoupled: bool) -> None:
    binary, directory = tmp_path / "tritonserver", tmp_path / "run"
    directory.mkdir()
    header, path = b"\0triton_grpc_error\0", b"(?:/(infer|generate|generate_stream|ready|config))"
    asks = bytes.fromhex("80b8c000000000488985d8fcffff0f84d1060000")  # cmpb; mov; je
    sets = bytes.fromhex("c680c000000001488985d8fcffff660f1f440000")  # movb; mov; nop
    binary.write_bytes(header + path + asks)
    copy = shields.shielded(binary, directory, decoupled)
    code = copy.read_bytes()
    assert header not in code
    assert (path in code) is not decoupled
    assert (asks in code, sets in code) == (not decoupled, decoupled)
    assert len(code) == len(header + path + asks)
    binary.write_bytes(b"another server")
    assert shields.shielded(binary, directory, decoupled).read_bytes() == b"another server"


def test_the_copy_of_the_library_keeps_every_batch(tmp_path: Path) -> None:
    libraries, directory = tmp_path / "lib", tmp_path / "run"
    libraries.mkdir()
    directory.mkdir()
    once, number = bytes.fromhex("48c78780010000e8030000"), slice(8 + 7, 8 + 11)
    for name, code in {"libtritonserver.so": b"\x90" * 8 + once, "libtritonserver-twice.so": 2 * once}.items():
        (libraries / name).write_bytes(code)
    shields.shield_library([tmp_path / "none", libraries], directory)
    kept = (directory / "libtritonserver.so").read_bytes()
    assert int.from_bytes(kept[number], "little") == 2**31 - 1
    assert kept[:15] == (b"\x90" * 8 + once)[:15]
    assert (directory / "libtritonserver-twice.so").read_bytes() == 2 * once


def test_the_copy_of_the_backend_skips_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    once, skipped = bytes.fromhex("4883bd48fdffff0074ca"), slice(-2, None)
    for code, expected in ((b"\x90" + once, b"\x90\x90"), (2 * once, b"\x74\xca")):
        library = tmp_path / "libtriton_python.so"
        library.write_bytes(code)
        shields.shield_backend(library, "/tmp/if-abcd1234")
        assert library.read_bytes()[:-2] == code[:-2]
        assert library.read_bytes()[skipped] == expected
    assert "libtriton_python.so is another one than Inflight knows" in caplog.text


def test_the_copy_of_the_backend_names_its_folder_as_told(tmp_path: Path) -> None:
    library = tmp_path / "libtriton_python.so"
    library.write_bytes(b"error.\0/tmp/python_env_Failed to remove")
    shields.shield_backend(library, "/tmp/if-abcd1234")
    assert library.read_bytes() == b"error.\0/tmp/if-abcd1234Failed to remove"
