"""The lock of a place where a model is written: one process at a time, whoever removes the lock's file."""

from __future__ import annotations

import fcntl
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.hub.download import Downloader
from inflight.hub.model_manifest import ModelFile
from inflight.hub.remote import RemoteFile
from inflight.hub.staging import locked
from inflight.hub.store import remove_entry, stored_models
from tests.fakes.hub import FakeHub
from tests.hub.support.commands import inflight, refused

PATIENCE_S = 60.0


def test_what_another_process_writes_is_not_removed(hub: FakeHub, models: Path) -> None:
    hub.faults.cut_after["model.safetensors"] = [300_000] + [0] * 9
    refused("pull", "org/name")
    [staging] = models.glob("org/name/.*.partial")
    commit = hub.repositories["org/name"].names["main"]
    said = f"another process pulls org/name@{commit[:12]}; it is not removed"
    with locked(models / "org/name" / commit, lambda: None):
        assert refused("models", "rm", "org/name") == said
        assert (staging / "model.safetensors").exists()
    hub.faults.cut_after.clear()
    directory = Path(inflight("pull", "org/name").stdout.strip())
    with locked(directory, lambda: None):
        assert refused("models", "rm", "org/name") == said
    [entry] = stored_models()
    remove_entry(entry)
    with pytest.raises(DeploymentError, match="is not there any more; `inflight models` lists what is"):
        remove_entry(entry)
    assert not list(models.iterdir())


def test_a_model_of_which_a_file_goes_before_the_end_is_none(
    hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_all = Downloader.fetch_all

    def fetch_and_lose(self: Downloader, files: Sequence[RemoteFile]) -> dict[str, ModelFile]:
        done = fetch_all(self, files)
        shutil.rmtree(next(models.glob("org/name/.*.partial")))
        return done

    with monkeypatch.context() as patched:
        patched.setattr(Downloader, "fetch_all", fetch_and_lose)
        assert "is missing, and model-manifest.json lists it" in refused("pull", "org/name")
    assert not list(models.rglob("*"))
    inflight("pull", "org/name")


def test_folders_that_were_made_in_vain_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for place in ("mine/model", "a/b/model"):
        with locked(tmp_path / place, lambda: None):
            assert (tmp_path / place).parent.is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_who_waited_for_a_lock_that_is_gone_makes_a_new_one(tmp_path: Path) -> None:
    """Else a third would make one too, and both would write."""
    target = tmp_path / "model"
    waits, holds, may_end = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with locked(target, waits.set):
            holds.set()
            may_end.wait(PATIENCE_S)

    thread = threading.Thread(target=second)
    with locked(target, lambda: None):
        thread.start()
        assert waits.wait(PATIENCE_S)
        assert not holds.is_set()
    assert holds.wait(PATIENCE_S)
    try:
        with (tmp_path / ".model.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                raise AssertionError("a third process could take the lock")
    finally:
        may_end.set()
        thread.join()
    assert not list(tmp_path.iterdir())
