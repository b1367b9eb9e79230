"""The fake hub speaks the interface of the real one: the Hub's own client gets from it what it holds, or its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.hub import FakeHub
from tests.hub.conftest import FILES

pytest.importorskip("huggingface_hub")

SCRIPT = """
import sys
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError
repo, revision, directory = sys.argv[1:]
try:
    plan = snapshot_download(repo, revision=revision, dry_run=True)
    print(*sorted(f"{one.filename}={one.file_size}" for one in plan))
    snapshot_download(repo, revision=revision, local_dir=directory)
    print(HfApi().model_info(repo, revision=revision).sha)
    print(HfApi().verify_repo_checksums(repo, revision=revision, local_dir=directory).mismatches)
except (DryRunError, HfHubHTTPError, LocalEntryNotFoundError) as error:
    print(type(error).__name__, type(error.__cause__).__name__)
"""


def _client(directory: Path, repo: str = "org/name", revision: str = "main") -> list[str]:
    """Return what the real client prints; it reads the environment when it is imported."""
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_ETAG_TIMEOUT": "60"}  # the machine may stand still
    command = [sys.executable, "-c", SCRIPT, repo, revision, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_real_client_gets_every_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.page_size = 4
    listed, commit, mismatches = _client(tmp_path / "got")
    assert listed.split() == sorted(f"{name}={len(data)}" for name, data in FILES.items())
    assert commit == hub.repositories["org/name"].names["main"]
    assert mismatches == "[]", "by the real client's own check of hashes"
    assert all((tmp_path / "got" / name).read_bytes() == data for name, data in FILES.items())


def test_the_real_client_survives_a_cut_connection(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.cut_after["model.safetensors"] = [300_000]
    _client(tmp_path / "got")
    assert (tmp_path / "got/model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len(hub.sent("model.safetensors")) == 2, "once before the cut and once after it"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("repo", "revision", "error"),
    [
        ("org/name", "gated", "GatedRepoError"),
        ("org/name", "v9", "RevisionNotFoundError"),
        ("org/nothing", "main", "RepositoryNotFoundError"),
    ],
)
def test_the_real_client_knows_the_refusals(repo: str, revision: str, error: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["org/name"].commit(FILES, "gated")
    hub.faults.gated = revision == "gated"
    assert error in _client(tmp_path / "got", repo, revision)[-1].split()
