"""Where a server's temporary directory is made, when the first choice cannot be used."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.serve import scratch


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """TMPDIR, which is mounted noexec as far as the kernel's answer goes, and another directory."""
    wanted, other = tmp_path / "wanted", tmp_path / "other"
    wanted.mkdir()
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        fields = list(real(path))
        fields[8] |= os.ST_NOEXEC if path == str(wanted) else 0
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(tempfile, "tempdir", str(wanted))
    monkeypatch.setattr(scratch, "_OTHERS", (str(other),))
    return wanted, other


def test_what_is_mounted_noexec_gives_way_and_is_told_once(
    choices: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    wanted, other = choices
    other.mkdir()
    for _ in range(2):
        with scratch.temporary_directory("inflight-") as made:
            assert Path(made).parent == other
    reason = f"{wanted} is mounted noexec, and the server could not run from it"
    assert caplog.messages == [f"temporary files go to {other}: {reason}"]


def test_where_none_can_be_made_each_reason_is_told(choices: tuple[Path, Path]) -> None:
    wanted, other = choices
    with pytest.raises(DeploymentError, match=rf"{wanted} is mounted noexec.*; {other}: No such file.*set TMPDIR"):
        scratch.temporary_directory("inflight-")


def test_what_tidies_up_old_files_finds_the_directory_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd-tmpfiles looks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch.temporary_directory("inflight-") as made:
        looker = os.open(made, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(looker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(looker)
    assert not Path(made).exists()
