"""What a killed process leaves is removed, and what a living one has is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from inflight.cli import app
from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve import leftovers, scratch
from inflight.serve.door import DoorProcess
from inflight.serve.leftovers import sweep
from inflight.serve.scratch import temporary_directory
from inflight.shared_counters import SHARED_MEMORY

OWNER = """
import sys, time
from inflight.serve.scratch import temporary_directory
made = temporary_directory("inflight-test-")
for path in sys.argv[1:]:
    made.note(path)
print(made.name, flush=True)
time.sleep(600)
"""


class Owner:
    """A process with a temporary directory, which has noted files."""

    def __init__(self, place: Path, *noted: str) -> None:
        environment = os.environ | {"TMPDIR": str(place)}
        command = [sys.executable, "-c", OWNER, *noted]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.folder = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_OTHERS", ())
    return tmp_path


@pytest.fixture
def shared() -> Iterator[list[Path]]:
    """Files as those of a server that has ended, by the number of a process that has."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"inflight_{ended.pid}_{uuid.uuid4().hex}", f"inflight_{ended.pid}9999_{uuid.uuid4().hex}"]
    paths = [SHARED_MEMORY / name for name in names]
    for path in paths:
        path.touch()
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_only_what_the_killed_one_noted_is_removed(place: Path, shared: list[Path]) -> None:
    own, similar = shared
    prefix = str(own).rpartition("_")[0] + "_"
    lives = Owner(place)
    killed = Owner(place, prefix, str(place / "kept"), f"{SHARED_MEMORY}/", f"{SHARED_MEMORY}/inflight_1_../../")
    (place / "kept").touch()
    (place / "inflight-without-owner").mkdir()
    (killed.folder / "models").symlink_to(place)
    try:
        sweep()
        assert killed.folder.is_dir(), "its owner lives"
        killed.kill()
        sweep()
        assert not killed.folder.exists()
        assert not own.exists()
        assert similar.exists(), "another process's number begins alike"
        assert (lives.folder / scratch.OWNER).exists()
        assert (place / "kept").exists()
        assert (place / "inflight-without-owner").exists(), "nobody knows whose it is"
    finally:
        lives.kill()
        killed.kill()


@pytest.mark.parametrize("name", ["inflight-results", "inflight-abcd1234"])
@pytest.mark.parametrize("owner", [b"me\n", b"", b"\xff\n", scratch.OWNED.encode()])
def test_a_strangers_directory_stays(place: Path, name: str, owner: bytes) -> None:
    """Only the right name and the right first line together make it one of ours."""
    folder = place / name
    folder.mkdir()
    (folder / scratch.OWNER).write_bytes(owner)
    sweep()
    is_ours = name != "inflight-results" and owner == scratch.OWNED.encode()
    assert folder.exists() == (not is_ours)


def test_the_files_of_a_server_that_has_not_ended_stay(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whose supervisor has, say because it was moved to another parent."""
    monkeypatch.setattr(leftovers, "_GONE_S", 0.2)
    triton = tmp_path / "tritonserver"
    triton.symlink_to(sys.executable)
    server = subprocess.Popen([triton, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    path = SHARED_MEMORY / f"inflight_{server.pid}_pulse"
    path.touch()
    owner = Owner(place, f"{SHARED_MEMORY}/inflight_{server.pid}_")
    owner.kill()
    try:
        sweep()
        assert path.exists()
        assert owner.folder.exists()
        server.send_signal(signal.SIGKILL)
        sweep()  # it is not waited for, and is a zombie
        assert not path.exists()
        assert not owner.folder.exists()
    finally:
        server.kill()
        server.communicate()
        path.unlink(missing_ok=True)


def test_the_next_door_removes_what_a_killed_one_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys above all."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(DoorProcess, "check", MagicMock(side_effect=DeploymentError("a port is busy")))
    killed = Owner(place)
    killed.kill()
    assert killed.folder.exists()
    done = CliRunner().invoke(app, ["door", str(DEMO), "--replica", "127.0.0.1:1"])
    assert "a port is busy" in done.output
    assert not killed.folder.exists()


def test_a_directory_that_was_cleaned_up_is_gone(place: Path) -> None:
    with temporary_directory("inflight-") as made:
        sweep()
        assert Path(made).is_dir()
    assert not list(place.glob("inflight-*"))
