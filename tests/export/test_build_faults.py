"""Builds that are interrupted, killed, or meet a full disk, a read-only folder or a broken checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from inflight.errors import DeploymentError
from inflight.export import stages
from inflight.export.build.pipeline import Build
from inflight.export.build.request import BuildRequest
from inflight.export.stages import Journal, fresh_directory
from inflight.export.verify import verifier
from tests.export.support.building import LENIENT, Built, run
from tests.export.support.tiny import make_checkpoint
from tests.support.progress import silent


@pytest.mark.proof
def test_an_interrupted_build_resumes(
    request_of: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(work=tmp_path / "work", output=tmp_path / "out", precision="int8")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verifier, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(request)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "work").glob(".*partial*"))
    again, lines = run(request)
    assert "quantize" not in again.ran
    assert "verify" in again.ran
    assert any(line.startswith("quantize: nothing to do") for line in lines)


@pytest.mark.proof
def test_a_killed_build_leaves_nothing_that_is_taken_for_a_result(
    request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    request = request_of(work=tmp_path / "work", output=tmp_path / "out")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stage = Build(request, lambda *_: None, silent)
    target = stage._stages.directory("plan", {"plan": stage._blueprint.plan.as_dict()})
    left = target.with_name(f".{target.name}.partial-{gone.pid}")
    left.mkdir(parents=True)
    (left / "plan.json").write_text("{")
    stage.run()
    assert not left.exists()
    assert json.loads((target / "plan.json").read_text())["precision"] == "fp8"


@pytest.mark.proof
def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    built: Built, request_of: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    shutil.copytree(built.directory, output)
    before = sorted(path.name for path in output.rglob("*"))
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        yaml.safe_dump({"engine": {"dtype": "float32"}, "quality": LENIENT, "limits": {"max_words": 9}})
    )

    def full(_source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(stages, "link_or_copy", full)
    with pytest.raises(DeploymentError, match="the disk is full; nothing was written"):
        run(request_of(settings=settings, output=output))
    assert sorted(path.name for path in output.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()].count("out") == 1
    assert not list(tmp_path.glob(".out*"))


def test_too_little_space_is_said_before_work_begins(
    request_of: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DeploymentError, match=r"GB are needed and 0\.0 GB are free"):
        run(request_of(work=tmp_path / "work", output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["work", "output"])
def test_a_read_only_folder_is_one_line(request_of: Callable[..., BuildRequest], place: str) -> None:
    nobody_writes_here = Path("/sys/inflight")  # root is refused there too
    with pytest.raises(DeploymentError, match="^/sys.*cannot be written: ") as failure:
        run(request_of(**{place: nobody_writes_here / "folder"}))
    assert "\n" not in str(failure.value)


def test_a_missing_shard_is_named(request_of: Callable[..., BuildRequest], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "sharded", shards=True)
    shard = sorted(checkpoint.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(DeploymentError, match=f"{shard.name} is missing"):
        run(request_of(model=checkpoint, work=tmp_path / "work", output=tmp_path / "out"))
    assert not (tmp_path / "work").exists()


def test_only_what_builds_left_is_swept(tmp_path: Path) -> None:
    for name in (".out.my-notes", ".out.backup-99999999", ".out.partial-99999999"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.old-99999999").mkdir()
    (tmp_path / ".out.old-99999999" / "kept").touch()
    with pytest.raises(DeploymentError), fresh_directory(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.backup-99999999", ".out.my-notes", "out"]
    assert (tmp_path / "out/kept").exists()


def test_a_journal_keeps_steps_and_drops_a_line_that_was_cut(tmp_path: Path) -> None:
    path, asked = tmp_path / "stages" / ".verify.journal", list[str]()

    def work(name: str) -> dict[str, float]:
        asked.append(name)
        return {"loss": len(asked) / 3}

    first = [Journal(path).step(name, partial(work, name)) for name in ("row 0", "row 1")]
    with path.open("a") as file:
        file.write('\n["row 2", {"lo')
    again = Journal(path)
    found = [again.step(f"row {index}", partial(work, f"row {index}")) for index in range(4)]
    assert asked == ["row 0", "row 1", "row 2", "row 3"]
    assert found[:2] == first
    assert Journal(path).step("row 3", partial(work, "row 3")) == found[3]
