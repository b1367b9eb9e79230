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
