"""The files of a checkpoint: what is said of those that cannot be read."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inflight.engine.shards import Shards
from inflight.errors import DeploymentError
from inflight.gguf.reader import GgufModel
from inflight.text.tokenizer import Tokenizer


def test_weights_that_may_not_be_read_are_not_called_missing() -> None:
    """Root may read everything, so the test is somebody else meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(b"")
        file.chmod(0)
        Path(folder).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(DeploymentError, match=r"model\.safetensors: cannot be read: Permission denied$"):
                Shards(Path(folder))
        finally:
            os.seteuid(user)


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "shard.safetensors"])
def test_a_pipe_or_a_pointer_in_the_place_of_a_file_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    """A pipe that nobody writes to would be waited for."""
    if name == "shard.safetensors":
        index = {"weight_map": {"a": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    os.mkfifo(tmp_path / name)
    with pytest.raises(DeploymentError, match=f"{name}: is no plain file$"):
        Shards(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(_POINTER)
    with pytest.raises(DeploymentError, match=f"{name}: is a Git LFS pointer; fetch the file with `git lfs pull`$"):
        Shards(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00001.gguf"])
def test_a_gguf_file_is_no_pipe_and_no_pointer(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(_POINTER)
    with pytest.raises(DeploymentError, match="is a Git LFS pointer; fetch the file with `git lfs pull`$"):
        GgufModel(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DeploymentError, match="is no plain file|missing"):
        GgufModel(path)


def test_other_files_that_are_pointers_are_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(_POINTER)
    with pytest.raises(DeploymentError, match=r"tokenizer\.json: is a Git LFS pointer; fetch the file"):
        Tokenizer.from_checkpoint(tmp_path)


def test_a_whole_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    """transformers would take the whole file, whatever the index says."""
    for name in ("model", "part"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert Shards(tmp_path).files == [tmp_path / "model.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with pytest.raises(DeploymentError, match=r"it has model\.safetensors, and .*index\.json that names other files"):
        Shards(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert Shards(tmp_path).files == [tmp_path / "part.safetensors"]
